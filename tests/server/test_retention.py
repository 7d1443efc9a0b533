"""Records that go while they are written, read, replicated and part of transactions: retention and DeleteRecords."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from headrace.base.errors import ErrorCode
from headrace.testing import Broker, Cluster
from headrace.wire.apis import Api
from tests.server.raw import RawClient, fetch_body
from tests.testing.waiting import wait_until

WAIT_S = 60
SEGMENT_BYTES = 1 << 20
RETENTION_BYTES = 2 << 20
VALUE = b"x" * 1000
QUICK = {"log.retention.check.interval.ms": "100"}
TOPIC, ALL_BROKERS = 2, (4, "")
SMALL = {"segment.bytes": str(SEGMENT_BYTES)}


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with Broker(settings=QUICK) as running:
        yield running


def ends(bootstrap: str, topic: str, isolation: int = 0) -> tuple[int, int]:
    """The first offset of a partition, and the end of what a reader may see."""
    host, _, port = bootstrap.rpartition(":")
    found = []
    with RawClient(host, int(port)) as client:
        for timestamp in (-2, -1):
            where = {"partition_index": 0, "timestamp": timestamp}
            body = {"isolation_level": isolation, "topics": [{"name": topic, "partitions": [where]}]}
            [partition] = client.call(Api.LIST_OFFSETS, 5, body).topics[0].partitions
            assert partition.error_code == ErrorCode.NONE
            found.append(partition.offset)
    return found[0], found[1]


def produce(bootstrap: str, topic: str, count: int) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all", "batch.num.messages": 20})
    for _ in range(count):
        producer.produce(topic, VALUE, partition=0)
    assert producer.flush(WAIT_S) == 0


def transactional(bootstrap: str, transactional_id: str) -> Producer:
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": transactional_id})
    producer.init_transactions(WAIT_S)
    producer.begin_transaction()
    return producer


def read_committed(bootstrap: str, topic: str, offset: int) -> list[tuple[int, bytes]]:
    """Offsets and values from `offset` to the end of what is stable."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "unused",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
        }
    )
    consumer.assign([TopicPartition(topic, 0, offset)])
    found: list[tuple[int, bytes]] = []
    try:
        while (message := consumer.poll(WAIT_S)) is not None and not message.error():
            found.append((message.offset(), message.value()))
    finally:
        consumer.close()
    assert message is not None, "no end of the partition"
    return found


def alter(bootstrap: str, resource: tuple[int, str], key: str, value: str) -> None:
    host, _, port = bootstrap.rpartition(":")
    change = {"name": key, "config_operation": 0, "value": value}
    body = {"resource_type": resource[0], "resource_name": resource[1], "configs": [change]}
    with RawClient(host, int(port)) as client:
        [told] = client.call(Api.INCREMENTAL_ALTER_CONFIGS, 1, {"resources": [body]}).responses
    assert told.error_code == ErrorCode.NONE, told.error_message


def test_records_of_an_open_transaction_can_be_deleted_and_it_stays_open(tmp_path: Path) -> None:
    with Broker(data_dir=tmp_path) as broker:
        broker.create_topic("cut")
        where = broker.bootstrap
        producer = transactional(where, "cut")
        for number in range(10):
            producer.produce("cut", b"%d" % number, partition=0)
        producer.flush(WAIT_S)
        produce(where, "cut", 1)
        admin = AdminClient({"bootstrap.servers": where})
        [deleted] = admin.delete_records([TopicPartition("cut", 0, 6)]).values()
        assert deleted.result(WAIT_S).low_watermark == 6
        assert ends(where, "cut", isolation=1) == (6, 6), "open from before where the log begins"
        broker.restart()
        assert ends(where, "cut", isolation=1) == (6, 6)
        producer.abort_transaction(WAIT_S)
        wait_until(lambda: ends(where, "cut", isolation=1) == (6, 12), "the marker")
        assert read_committed(where, "cut", 6) == [(10, VALUE)]


def test_records_of_a_topic_that_is_only_compacted_are_not_deleted_by_offset(broker: Broker) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    for policy, told in (("compact", KafkaError.POLICY_VIOLATION), ("compact,delete", None)):
        topic = policy.replace(",", "-")
        broker.create_topic(topic, config={"cleanup.policy": policy})
        for number in range(5):
            producer.produce(topic, key=b"%d" % number, value=b"value")
        assert producer.flush(WAIT_S) == 0
        [deleted] = admin.delete_records([TopicPartition(topic, 0, 3)]).values()
        if told is None:
            assert deleted.result(WAIT_S).low_watermark == 3
            assert ends(broker.bootstrap, topic) == (3, 5)
        else:
            assert deleted.exception(WAIT_S).args[0].code() == told
            assert ends(broker.bootstrap, topic) == (0, 5)


def test_retention_takes_what_an_open_transaction_wrote_and_its_end_hides_the_rest(broker: Broker) -> None:
    broker.create_topic("aged", config=SMALL)
    where = broker.bootstrap
    producer = transactional(where, "aged")
    for _ in range(2 * SEGMENT_BYTES // len(VALUE)):
        producer.produce("aged", VALUE, partition=0)
        producer.poll(0)
    producer.flush(WAIT_S)
    produce(where, "aged", SEGMENT_BYTES // len(VALUE))
    alter(where, (TOPIC, "aged"), "retention.bytes", str(RETENTION_BYTES))
    wait_until(lambda: ends(where, "aged")[0] > 0, "retention")
    start, stable = ends(where, "aged", isolation=1)
    assert stable == start
    opened_to = 2 * SEGMENT_BYTES // len(VALUE)
    assert start < opened_to, "some of what is open is left"
    producer.abort_transaction(WAIT_S)
    wait_until(lambda: ends(where, "aged", 1)[1] == ends(where, "aged")[1], "the marker")
    seen = read_committed(where, "aged", ends(where, "aged")[0])
    assert seen and min(offset for offset, _ in seen) >= opened_to


def test_retention_settings_of_the_broker_apply_without_a_restart(broker: Broker) -> None:
    where = broker.bootstrap
    broker.create_topic("by-size", config=SMALL)
    broker.create_topic("by-time", config=SMALL)
    for topic in ("by-size", "by-time"):
        produce(where, topic, 4 * SEGMENT_BYTES // len(VALUE))
        assert ends(where, topic)[0] == 0
    alter(where, ALL_BROKERS, "log.retention.bytes", str(RETENTION_BYTES))
    wait_until(lambda: ends(where, "by-size")[0] > 0, "log.retention.bytes")
    first, end = ends(where, "by-size")
    assert first < end, "what is kept is as large as it may be"
    alter(where, ALL_BROKERS, "log.retention.ms", "1")
    wait_until(lambda: ends(where, "by-time") == (end, end), "log.retention.ms")
    alter(where, ALL_BROKERS, "log.retention.ms", "-1")
    alter(where, ALL_BROKERS, "log.retention.bytes", "-1")


@pytest.mark.timeout(180)
def test_retention_goes_on_under_load_and_a_follower_that_lagged_takes_up_where_the_log_begins() -> None:
    settings = {
        **QUICK,
        "replica.lag.time.max.ms": "1500",
        "replica.selector.class": "org.apache.kafka.common.replica.RackAwareReplicaSelector",
    }
    with Cluster(3, settings=settings, each=lambda number: {"broker.rack": f"rack-{number}"}) as cluster:
        config = {**SMALL, "retention.bytes": str(RETENTION_BYTES), "min.insync.replicas": "2"}
        cluster.create_topic("busy", config=config)
        leader = cluster.leader("busy")
        where = cluster.broker(leader).bootstrap
        produce(where, "busy", 100)
        cluster.await_in_sync("busy")
        lagging = next(number for number in cluster.ids if number != leader)
        cluster.broker(lagging).pause()
        rounds = 0
        while ends(where, "busy")[0] <= 100:
            produce(where, "busy", SEGMENT_BYTES // len(VALUE))
            rounds += 1
            assert rounds < 60, "nothing is deleted while one replica lags"
        cluster.broker(lagging).resume()
        produce(where, "busy", SEGMENT_BYTES // len(VALUE))
        cluster.await_in_sync("busy", WAIT_S)
        follower = cluster.broker(lagging)

        def is_level() -> bool:
            first, end = ends(where, "busy")
            with RawClient(follower.host, follower.port) as client:
                body = fetch_body("busy", {0: first}, rack_id=f"rack-{lagging}")
                [partition] = client.call(Api.FETCH, 12, body).responses[0].partitions
            told = (partition.error_code, partition.log_start_offset, partition.high_watermark)
            return told == (ErrorCode.NONE, first, end)

        wait_until(is_level, "the follower begins and ends where the leader does")
        assert ends(where, "busy")[0] > 100
