"""kafka-python takes the broker for Kafka: what its users do beyond writing and reading back."""

import uuid
from collections.abc import Callable, Iterator

import pytest
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.errors import MessageSizeTooLargeError, UnknownTopicOrPartitionError

from tests.compat.clients import consume_kafka_python, produce_kafka_python
from tests.compat.samples import WAIT_S, Sample, eventually

MakeTopic = Callable[..., str]


@pytest.fixture
def consumer(bootstrap: str) -> Iterator[KafkaConsumer]:
    consumer = KafkaConsumer(bootstrap_servers=bootstrap, group_id=None)
    yield consumer
    consumer.close()


@pytest.fixture
def admin(bootstrap: str) -> Iterator[KafkaAdminClient]:
    admin = KafkaAdminClient(bootstrap_servers=bootstrap)
    yield admin
    admin.close()


def test_offsets_are_told_for_both_ends_and_by_time(
    bootstrap: str, make_topic: MakeTopic, now_ms: int, consumer: KafkaConsumer
) -> None:
    topic = make_topic()
    produce_kafka_python(bootstrap, topic, [Sample(b"k", b"v", age_ms=100 - i) for i in range(5)], now_ms)
    where = TopicPartition(topic, 0)
    assert consumer.beginning_offsets([where]) == {where: 0}
    assert consumer.end_offsets([where]) == {where: 5}
    found = consumer.offsets_for_times({where: now_ms - 98})[where]
    assert (found.offset, found.timestamp) == (2, now_ms - 98)
    assert consumer.offsets_for_times({where: now_ms + 60_000})[where] is None


def test_an_idempotent_producer_is_given_an_identity(
    bootstrap: str, make_topic: MakeTopic, now_ms: int
) -> None:
    topic = make_topic()
    samples = [Sample(b"%d" % i, b"x" * 500, age_ms=5) for i in range(200)]
    offsets = produce_kafka_python(
        bootstrap,
        topic,
        samples,
        now_ms,
        enable_idempotence=True,
        batch_size=4000,
        max_in_flight_requests_per_connection=5,
    )
    assert offsets == list(range(200))
    assert [s.key for s in consume_kafka_python(bootstrap, topic, 200)] == [s.key for s in samples]


def test_a_record_over_the_topic_limit_is_refused(bootstrap: str, make_topic: MakeTopic, now_ms: int) -> None:
    topic = make_topic(max_message_bytes=2000)
    with pytest.raises(MessageSizeTooLargeError):
        produce_kafka_python(bootstrap, topic, [Sample(None, b"x" * 5000)], now_ms, retries=0)


def test_keys_are_spread_over_partitions_and_each_keeps_its_own(
    bootstrap: str, make_topic: MakeTopic, consumer: KafkaConsumer
) -> None:
    topic = make_topic(4)
    producer = KafkaProducer(bootstrap_servers=bootstrap)
    sent = [producer.send(topic, key=b"key-%d" % (i % 20), value=b"%d" % i) for i in range(100)]
    chosen = [future.get(timeout=WAIT_S).partition for future in sent]
    producer.close()
    assert len(set(chosen)) == 4
    assert all(chosen[i] == chosen[i % 20] for i in range(100))
    assert consumer.partitions_for_topic(topic) == {0, 1, 2, 3}
    ends = consumer.end_offsets([TopicPartition(topic, p) for p in range(4)])
    assert {where.partition: end for where, end in ends.items()} == {p: chosen.count(p) for p in range(4)}


def test_topics_are_created_and_deleted_by_the_admin_client(admin: KafkaAdminClient) -> None:
    name = f"compat-{uuid.uuid4().hex[:12]}"
    admin.create_topics({name: {"num_partitions": 3, "replication_factor": 1}})
    eventually(lambda: name in admin.list_topics(), True)
    assert len(admin.describe_topics([name])[0]["partitions"]) == 3
    admin.delete_topics([name])
    eventually(lambda: name in admin.list_topics(), False)
    with pytest.raises(UnknownTopicOrPartitionError):
        admin.delete_topics([name])


def test_a_fetch_of_few_bytes_still_reads_everything(
    bootstrap: str, make_topic: MakeTopic, now_ms: int
) -> None:
    topic = make_topic()
    samples = [Sample(None, b"%d" % i * 50, age_ms=5) for i in range(300)]
    produce_kafka_python(bootstrap, topic, samples, now_ms, batch_size=1000)
    seen = consume_kafka_python(bootstrap, topic, 300, fetch_max_bytes=100, max_partition_fetch_bytes=100)
    assert [s.value for s in seen] == [s.value for s in samples]
