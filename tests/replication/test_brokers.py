"""Three real brokers and real clients: leaders that die, followers that refuse, readers that are sent next door."""

from collections.abc import Iterator

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient

from headrace.base.errors import ErrorCode
from headrace.testing import Cluster
from headrace.wire.apis import Api
from tests.server.raw import RawClient, batch, fetch_body, produce_body
from tests.server.test_kill import PARTITIONS, Writer, read_all

ACKED_BETWEEN_KILLS = 1000
DEADLINE_S = 60
LATEST = -1


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(
        3,
        settings={"replica.selector.class": "org.apache.kafka.common.replica.RackAwareReplicaSelector"},
        each=lambda number: {"broker.rack": f"rack-{number}"},
    ) as cluster:
        yield cluster


def connect(cluster: Cluster, number: int) -> RawClient:
    broker = cluster.broker(number)
    return RawClient(broker.host, broker.port)


@pytest.mark.timeout(300)
def test_no_acknowledged_record_is_lost_doubled_or_reordered_when_leaders_are_killed(cluster: Cluster):
    cluster.create_topic("t", PARTITIONS, config={"min.insync.replicas": "2"})
    writer = Writer(cluster.bootstrap)
    try:
        for partition in range(2):
            writer.wait_for_more(ACKED_BETWEEN_KILLS)
            leader = cluster.leader("t", partition)
            cluster.broker(leader).kill()
            writer.wait_for_more(ACKED_BETWEEN_KILLS)
            cluster.broker(leader).start()
            cluster.await_in_sync("t")
        writer.wait_for_more(ACKED_BETWEEN_KILLS)
    finally:
        writer.stop()
    assert writer.failed == []
    for partition, acked in writer.acked.items():
        found = read_all(cluster.bootstrap, partition)
        assert set(acked) <= set(found), "an acknowledged record is not where it was acknowledged"
        numbers = [number for _, number in found]
        assert numbers == sorted(set(numbers)), "a record is doubled or out of order"


def filled(cluster: Cluster, topic: str, records: int = 10) -> int:
    """A topic of one partition with some records; its leader."""
    cluster.create_topic(topic)
    leader = cluster.leader(topic)
    with connect(cluster, leader) as client:
        for number in range(records):
            assert client.produce(topic, batch(b"%d" % number)).error_code == ErrorCode.NONE
    return leader


@pytest.mark.timeout(120)
def test_a_follower_refuses_what_only_the_leader_does_and_says_where_that_is(cluster: Cluster):
    leader = filled(cluster, "led")
    follower = next(number for number in cluster.ids if number != leader)
    with connect(cluster, follower) as client:
        produced = client.call(Api.PRODUCE, 10, produce_body("led", batch(b"x")))
        [partition] = produced.responses[0].partition_responses
        assert partition.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
        assert partition.current_leader.leader_id == leader
        [endpoint] = produced.node_endpoints
        assert (endpoint.node_id, endpoint.port) == (leader, cluster.broker(leader).port)
        wanted = {"partition_index": 0, "timestamp": LATEST, "current_leader_epoch": -1}
        listed = client.call(
            Api.LIST_OFFSETS,
            6,
            {
                "replica_id": -1,
                "isolation_level": 0,
                "topics": [{"name": "led", "partitions": [wanted]}],
            },
        )
        assert listed.topics[0].partitions[0].error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER


@pytest.mark.timeout(120)
def test_a_reader_that_says_its_rack_reads_from_the_follower_there(cluster: Cluster):
    leader = filled(cluster, "near")
    follower = next(number for number in cluster.ids if number != leader)
    consumer = Consumer(
        {
            "bootstrap.servers": cluster.bootstrap,
            "group.id": "unused",
            "enable.auto.commit": False,
            "client.rack": f"rack-{follower}",
        }
    )
    consumer.assign([TopicPartition("near", 0, 0)])
    values = [message.value() for message in consumer.consume(10, DEADLINE_S)]
    consumer.close()
    assert values == [b"%d" % number for number in range(10)]
    with connect(cluster, leader) as client:
        body = fetch_body("near", {0: 0}, rack_id=f"rack-{follower}")
        [partition] = client.call(Api.FETCH, 12, body).responses[0].partitions
        assert partition.preferred_read_replica == follower
        assert not partition.records
    with connect(cluster, follower) as client:
        [partition] = client.call(Api.FETCH, 12, body).responses[0].partitions
        assert partition.error_code == ErrorCode.NONE
        assert partition.records
        body["rack_id"] = ""
        [partition] = client.call(Api.FETCH, 12, body).responses[0].partitions
        assert partition.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER


@pytest.mark.timeout(120)
def test_deleted_records_are_gone_from_every_replica_when_the_deletion_is_answered(cluster: Cluster):
    leader = filled(cluster, "trimmed")
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    [deleted] = admin.delete_records([TopicPartition("trimmed", 0, 4)]).values()
    assert deleted.result(DEADLINE_S).low_watermark == 4
    for number in cluster.ids:
        with connect(cluster, number) as client:
            body = fetch_body("trimmed", {0: 3}, rack_id=f"rack-{number}")
            [partition] = client.call(Api.FETCH, 12, body).responses[0].partitions
            assert partition.error_code == ErrorCode.OFFSET_OUT_OF_RANGE, (number, leader)
            assert partition.log_start_offset == 4
