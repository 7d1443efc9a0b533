"""confluent-kafka (current librdkafka) takes the broker for Kafka: what users do beyond writing and reading."""

import subprocess
import sys
import uuid
from collections.abc import Callable

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from headrace.wire.apis import SUPPORTED, Api
from tests.compat.clients import consume_confluent, produce_confluent
from tests.compat.samples import QUIET, WAIT_S, Sample, eventually

MakeTopic = Callable[..., str]


def numbered(count: int, size: int = 10) -> list[Sample]:
    return [Sample(b"%d" % i, b"%d" % i + b"x" * size, age_ms=1000 - i) for i in range(count)]


def test_an_idempotent_producer_keeps_order_over_many_batches(
    bootstrap: str, make_topic: MakeTopic, now_ms: int
) -> None:
    topic = make_topic()
    samples = numbered(500, 1000)
    offsets = produce_confluent(
        bootstrap,
        topic,
        samples,
        now_ms,
        **{"enable.idempotence": True, "batch.size": 10_000, "linger.ms": 0},
    )
    assert offsets == list(range(500))
    seen = consume_confluent(bootstrap, topic, 500)
    assert [s.key for s in seen] == [s.key for s in samples]


def test_watermarks_tell_the_first_and_the_next_offset(
    bootstrap: str, make_topic: MakeTopic, now_ms: int
) -> None:
    topic = make_topic()
    consumer = Consumer({**QUIET, "bootstrap.servers": bootstrap, "group.id": "unused"})
    where = TopicPartition(topic, 0)
    assert consumer.get_watermark_offsets(where, timeout=WAIT_S) == (0, 0)
    produce_confluent(bootstrap, topic, numbered(7), now_ms)
    assert consumer.get_watermark_offsets(where, timeout=WAIT_S) == (0, 7)
    consumer.close()


def test_an_offset_is_found_by_its_time(bootstrap: str, make_topic: MakeTopic, now_ms: int) -> None:
    topic = make_topic()
    produce_confluent(
        bootstrap, topic, [Sample(None, b"%d" % i, age_ms=1000 * (10 - i)) for i in range(10)], now_ms
    )
    consumer = Consumer({**QUIET, "bootstrap.servers": bootstrap, "group.id": "unused"})

    def at(time_ms: int) -> int:
        return consumer.offsets_for_times([TopicPartition(topic, 0, time_ms)], timeout=WAIT_S)[0].offset

    assert [at(now_ms - 10_000), at(now_ms - 9_500), at(now_ms - 1000)] == [0, 1, 9]
    assert at(0) == 0
    assert at(now_ms + 1) == -1  # librdkafka's word for the end of the partition
    consumer.close()


def test_the_offset_of_the_newest_record_is_told(bootstrap: str, make_topic: MakeTopic, now_ms: int) -> None:
    topic = make_topic()
    produce_confluent(
        bootstrap, topic, [Sample(None, b"old", age_ms=500), Sample(None, b"new", age_ms=5)], now_ms
    )
    produce_confluent(bootstrap, topic, [Sample(None, b"late", age_ms=300)], now_ms)
    admin = AdminClient({**QUIET, "bootstrap.servers": bootstrap})
    where = TopicPartition(topic, 0)

    def ask(spec: OffsetSpec) -> tuple[int, int]:
        told = admin.list_offsets({where: spec})[where].result(WAIT_S)
        return told.offset, told.timestamp

    assert ask(OffsetSpec.earliest())[0] == 0
    assert ask(OffsetSpec.latest())[0] == 3
    assert ask(OffsetSpec.max_timestamp()) == (1, now_ms - 5)


def test_a_record_over_the_topic_limit_is_refused_and_the_next_is_taken(
    bootstrap: str, make_topic: MakeTopic, now_ms: int
) -> None:
    topic = make_topic(max_message_bytes=2000)
    with pytest.raises(KafkaException) as caught:
        produce_confluent(bootstrap, topic, [Sample(None, b"x" * 5000)], now_ms)
    assert caught.value.args[0].code() == KafkaError.MSG_SIZE_TOO_LARGE
    assert produce_confluent(bootstrap, topic, [Sample(None, b"x" * 100)], now_ms) == [0]


def test_a_read_past_the_end_resets_as_the_client_was_told(
    bootstrap: str, make_topic: MakeTopic, now_ms: int
) -> None:
    topic = make_topic()
    produce_confluent(bootstrap, topic, numbered(3), now_ms)
    seen = consume_confluent(bootstrap, topic, 3, offset=1000, **{"auto.offset.reset": "earliest"})
    assert [s.offset for s in seen] == [0, 1, 2]


def test_a_waiting_reader_gets_a_record_that_is_written_later(
    bootstrap: str, make_topic: MakeTopic, now_ms: int
) -> None:
    topic = make_topic()
    consumer = Consumer(
        {**QUIET, "bootstrap.servers": bootstrap, "group.id": "unused", "fetch.wait.max.ms": 10_000}
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    assert consumer.poll(0.2) is None
    produce_confluent(bootstrap, topic, [Sample(None, b"at last")], now_ms)
    message = consumer.poll(WAIT_S)
    assert message is not None
    assert message.value() == b"at last"
    consumer.close()


def test_a_topic_is_made_by_the_first_record_for_it(bootstrap: str, now_ms: int) -> None:
    topic = f"compat-auto-{uuid.uuid4().hex[:12]}"
    producer = Producer({**QUIET, "bootstrap.servers": bootstrap})
    told: list[object] = []
    producer.produce(topic, b"first", on_delivery=lambda error, message: told.append(error))
    assert producer.flush(WAIT_S) == 0
    assert told == [None]
    assert topic in AdminClient({**QUIET, "bootstrap.servers": bootstrap}).list_topics(timeout=WAIT_S).topics


def test_topics_are_created_described_grown_and_deleted(bootstrap: str) -> None:
    admin = AdminClient({**QUIET, "bootstrap.servers": bootstrap})
    name = f"compat-{uuid.uuid4().hex[:12]}"
    admin.create_topics([NewTopic(name, 2, 1)])[name].result(WAIT_S)
    with pytest.raises(KafkaException) as caught:
        admin.create_topics([NewTopic(name, 2, 1)])[name].result(WAIT_S)
    assert caught.value.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS

    def partitions() -> list[int]:
        return sorted(admin.list_topics(name, timeout=WAIT_S).topics[name].partitions)

    eventually(partitions, [0, 1])
    admin.create_partitions([NewPartitions(name, 5)])[name].result(WAIT_S)
    eventually(partitions, [0, 1, 2, 3, 4])
    admin.delete_topics([name])[name].result(WAIT_S)
    eventually(lambda: name in admin.list_topics(timeout=WAIT_S).topics, False)


def test_settings_of_a_topic_are_described_and_altered(bootstrap: str, make_topic: MakeTopic) -> None:
    admin = AdminClient({**QUIET, "bootstrap.servers": bootstrap})
    topic = make_topic(retention_ms=100_000)

    def described() -> dict[str, str]:
        resource = ConfigResource(ResourceType.TOPIC, topic)
        return {
            name: entry.value
            for name, entry in admin.describe_configs([resource])[resource].result(WAIT_S).items()
        }

    before = described()
    assert before["retention.ms"] == "100000"
    assert before["cleanup.policy"] == "delete"
    resource = ConfigResource(ResourceType.TOPIC, topic, set_config={"segment.bytes": "1048576"})
    with pytest.warns(DeprecationWarning, match="incremental"):
        admin.alter_configs([resource])[resource].result(WAIT_S)
    # Altering all at once sets what is not named back to its default.
    eventually(lambda: (described()["segment.bytes"], described()["retention.ms"]), ("1048576", "604800000"))


def test_records_are_deleted_up_to_an_offset(bootstrap: str, make_topic: MakeTopic, now_ms: int) -> None:
    topic = make_topic()
    produce_confluent(bootstrap, topic, numbered(10), now_ms)
    admin = AdminClient({**QUIET, "bootstrap.servers": bootstrap})
    where = TopicPartition(topic, 0, 4)
    told = admin.delete_records([where])
    assert next(iter(told.values())).result(WAIT_S).low_watermark == 4
    seen = consume_confluent(bootstrap, topic, 6, **{"auto.offset.reset": "earliest"})
    assert [s.offset for s in seen] == [4, 5, 6, 7, 8, 9]


def test_the_cluster_describes_itself(bootstrap: str) -> None:
    admin = AdminClient({**QUIET, "bootstrap.servers": bootstrap})
    cluster = admin.describe_cluster().result(WAIT_S)
    assert cluster.cluster_id
    assert f"{cluster.nodes[0].host}:{cluster.nodes[0].port}" == bootstrap
    assert cluster.controller.id == cluster.nodes[0].id


def test_many_partitions_are_read_by_one_client(bootstrap: str, make_topic: MakeTopic) -> None:
    partitions = 20
    topic = make_topic(partitions)
    producer = Producer({**QUIET, "bootstrap.servers": bootstrap})
    for i in range(200):
        producer.produce(topic, b"%d" % i, partition=i % partitions)
    assert producer.flush(WAIT_S) == 0
    consumer = Consumer({**QUIET, "bootstrap.servers": bootstrap, "group.id": "unused"})
    consumer.assign([TopicPartition(topic, p, 0) for p in range(partitions)])
    got: dict[int, list[bytes]] = {}
    for message in consumer.consume(200, WAIT_S):
        assert message.error() is None
        got.setdefault(message.partition(), []).append(message.value())
    consumer.close()
    assert got == {p: [b"%d" % i for i in range(p, 200, partitions)] for p in range(partitions)}


ASSIGN_WITHOUT_OFFSET = """
import sys
from confluent_kafka import Consumer, TopicPartition
consumer = Consumer({"bootstrap.servers": sys.argv[1], "group.id": "never-committed", "auto.offset.reset": "earliest"})
consumer.assign([TopicPartition(sys.argv[2], 0)])
message = consumer.poll(30)
print(message.value().decode())
consumer.close()
"""


@pytest.mark.skipif(
    Api.OFFSET_FETCH not in SUPPORTED, reason="committed offsets are not served yet (OffsetFetch)"
)
def test_a_partition_assigned_without_an_offset_starts_where_the_client_was_told(
    bootstrap: str, make_topic: MakeTopic, now_ms: int
) -> None:
    # In a process of its own: librdkafka 2.15 ends with a segmentation fault when a broker lacks OffsetFetch.
    topic = make_topic()
    produce_confluent(bootstrap, topic, [Sample(None, b"first")], now_ms)
    done = subprocess.run(
        [sys.executable, "-c", ASSIGN_WITHOUT_OFFSET, bootstrap, topic],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "first\n"), done.stderr
