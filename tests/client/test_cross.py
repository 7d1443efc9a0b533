"""What this client writes librdkafka reads, and the reverse: keys, nulls, headers, timestamps, every compression."""

from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import OFFSET_BEGINNING
from confluent_kafka import Consumer as TheirConsumer
from confluent_kafka import Producer as TheirProducer
from confluent_kafka import TopicPartition as Theirs

from headrace.client.consumer import Consumer
from headrace.client.producer import Producer
from headrace.client.topics import TopicPartition

CODECS = ["none", "gzip", "snappy", "lz4", "zstd"]

RECORDS: list[tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]], int]] = [
    (b"key", b"value", [], 1_700_000_000_000),
    (None, b"no key", [("h", b"1")], 1_700_000_000_001),
    (b"tombstone", None, [], 1_600_000_000_000),
    (None, None, [], 1_700_000_000_003),
    (b"", b"", [("", b""), ("null", None), ("twice", b"a"), ("twice", b"b")], 1_700_000_000_004),
    (bytes(range(256)), bytes(range(256)) * 40, [("ünïcode", b"\xff\x00")], 1_700_000_000_005),
    (b"long", b"x" * 200_000, [], 1_700_000_000_006),
]


def their_records(bootstrap: str, topic: str, count: int) -> list[Any]:
    consumer = TheirConsumer(
        {"bootstrap.servers": bootstrap, "group.id": "unused", "enable.auto.commit": False}
    )
    consumer.assign([Theirs(topic, 0, OFFSET_BEGINNING)])
    found: list[Any] = []
    try:
        while len(found) < count:
            message = consumer.poll(60)
            assert message is not None, f"only {len(found)} of {count} records came"
            assert message.error() is None
            found.append(message)
    finally:
        consumer.close()
    return found


@pytest.mark.parametrize("codec", CODECS)
def test_librdkafka_reads_what_this_client_writes(
    codec: str, cluster_bootstrap: str, new_topic: Callable[..., str], run: Callable[..., Any]
) -> None:
    topic = new_topic()

    async def produce() -> list[int]:
        async with Producer({"bootstrap.servers": cluster_bootstrap, "compression.type": codec}) as producer:
            sent = [
                await producer.send(topic, value, key=key, headers=headers, timestamp_ms=when)
                for key, value, headers, when in RECORDS
            ]
            return [(await delivery).offset for delivery in sent]

    assert run(produce()) == list(range(len(RECORDS)))
    for message, (key, value, headers, when) in zip(
        their_records(cluster_bootstrap, topic, len(RECORDS)), RECORDS
    ):
        assert (message.key(), message.value()) == (key, value)
        assert (message.headers() or []) == headers
        assert message.timestamp()[1] == when


@pytest.mark.parametrize("codec", CODECS)
def test_this_client_reads_what_librdkafka_writes(
    codec: str, cluster_bootstrap: str, new_topic: Callable[..., str], run: Callable[..., Any]
) -> None:
    topic = new_topic()
    theirs = TheirProducer(
        {"bootstrap.servers": cluster_bootstrap, "compression.type": codec, "linger.ms": 20}
    )
    failures: list[Any] = []
    for key, value, headers, when in RECORDS:
        theirs.produce(
            topic,
            value,
            key,
            partition=0,
            timestamp=when,
            headers=headers,
            on_delivery=lambda error, _: failures.append(error) if error else None,
        )
    assert theirs.flush(60) == 0
    assert failures == []

    async def consume() -> list[Any]:
        config = {"bootstrap.servers": cluster_bootstrap, "auto.offset.reset": "earliest"}
        async with Consumer(config) as consumer:
            consumer.assign([TopicPartition(topic, 0)])
            found: list[Any] = []
            while len(found) < len(RECORDS):
                found += await consumer.poll(1_000)
            return found

    for offset, (record, (key, value, headers, when)) in enumerate(zip(run(consume()), RECORDS)):
        assert (record.offset, record.key, record.value) == (offset, key, value)
        assert list(record.headers) == headers
        assert record.timestamp_ms == when


def test_keys_go_to_the_same_partitions_as_with_librdkafkas_java_partitioner(
    cluster_bootstrap: str, new_topic: Callable[..., str], run: Callable[..., Any]
) -> None:
    topic = new_topic(partitions=7)
    keys = [b"%d" % number for number in range(200)] + [b"", b"\xff" * 33]
    partitions: dict[bytes, int] = {}
    theirs = TheirProducer({"bootstrap.servers": cluster_bootstrap, "partitioner": "murmur2_random"})
    for key in keys:
        theirs.produce(
            topic,
            b"",
            key,
            on_delivery=lambda error, m: partitions.__setitem__(m.key() or b"", m.partition()),
        )
    assert theirs.flush(60) == 0

    async def ours() -> dict[bytes, int]:
        async with Producer({"bootstrap.servers": cluster_bootstrap}) as producer:
            sent = {key: await producer.send(topic, b"", key=key) for key in keys}
            return {key: (await delivery).partition for key, delivery in sent.items()}

    ours_by_key = run(ours())
    assert {key: partitions[key] for key in keys if key} == {key: ours_by_key[key] for key in keys if key}
