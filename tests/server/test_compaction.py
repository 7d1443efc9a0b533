"""A compacted topic on a running broker, with a client nobody here wrote."""

import random
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from headrace.testing import Broker
from tests.testing.waiting import wait_until

DEADLINE_S = 60
KEYS = 50
VALUE_BYTES = 1000
RECORDS = 6000  # some six segments of the least size there is
SETTINGS = {"log.cleaner.backoff.ms": "0"}
TOPIC = {
    "cleanup.policy": "compact",
    "segment.bytes": str(1 << 20),
    "min.cleanable.dirty.ratio": "0.01",
    "delete.retention.ms": "86400000",
}

Seen = list[tuple[int, bytes, bytes | None]]


def write(bootstrap: str, compression: str) -> dict[bytes, bytes | None]:
    """Put and delete keys in turn; the last value of each."""
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "enable.idempotence": True,
            "compression.type": compression,
            "batch.num.messages": 100,
            "log_level": 0,
        }
    )
    noise = random.Random(1)  # which no codec makes small
    latest: dict[bytes, bytes | None] = {}
    for number in range(RECORDS):
        key = b"%d" % (number % KEYS)
        value = None if number % 97 == 0 else noise.randbytes(VALUE_BYTES)
        producer.produce("t", value, key, partition=0, headers={"number": b"%d" % number})
        latest[key] = value
        producer.poll(0)
    assert producer.flush(DEADLINE_S) == 0
    return latest


def read(bootstrap: str) -> Seen:
    """All records from the first to the one that was last when it began."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "unused",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
            "log_level": 0,
        }
    )
    consumer.assign([TopicPartition("t", 0, 0)])
    seen: Seen = []
    while True:
        message = consumer.poll(DEADLINE_S)
        assert message is not None, "nothing to read"
        if message.error():
            break
        number = dict(message.headers())["number"]
        assert b"%d" % message.offset() == number, "an offset changed"
        seen.append((message.offset(), message.key(), message.value()))
    consumer.close()
    return seen


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_compacted_topic_keeps_the_last_value_of_every_key_also_after_a_kill(
    compression: str, tmp_path: Path
) -> None:
    with Broker(data_dir=tmp_path / "data", settings=SETTINGS) as broker:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap, "log_level": 0})
        topic = NewTopic("t", 1, 1, config=TOPIC)
        admin.create_topics([topic])["t"].result(DEADLINE_S)
        latest = write(broker.bootstrap, compression)
        held: list[Seen] = []

        def compacted() -> bool:
            held.append(read(broker.bootstrap))
            return len(held[-1]) < RECORDS // 2

        wait_until(compacted, "compaction", DEADLINE_S)
        for seen in held:
            assert {key: value for _, key, value in seen} == latest
            assert [offset for offset, _, _ in seen] == sorted({offset for offset, _, _ in seen})
        broker.kill()
        broker.start()
        assert {key: value for _, key, value in read(broker.bootstrap)} == latest
