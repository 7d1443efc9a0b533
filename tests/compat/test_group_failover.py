"""A group's coordinator is killed: another broker takes over, nothing committed is lost, and its members go on."""

from collections.abc import Iterator

import pytest

from headrace.coordinators.group_hash import partition_for
from headrace.testing import Cluster
from tests.compat.clients import produce_confluent
from tests.compat.group_clients import Confluent, ConfluentConsumer, Member, wait_until
from tests.compat.samples import Sample

OFFSETS_PARTITIONS = 4
SETTINGS = {
    "group.initial.rebalance.delay.ms": 0,
    "group.consumer.min.heartbeat.interval.ms": 100,
    "group.consumer.heartbeat.interval.ms": 500,
    "offsets.topic.num.partitions": OFFSETS_PARTITIONS,
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(3, settings=SETTINGS) as running:
        yield running


def committed(cluster: Cluster, group: str, topic: str) -> int:
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": group, "log_level": 0})
    try:
        [found] = consumer.committed([TopicPartition(topic, 0)], timeout=60)
        return int(found.offset)
    finally:
        consumer.close()


@pytest.mark.parametrize("family", [Confluent, ConfluentConsumer], ids=["classic", "consumer"])
def test_a_group_goes_on_when_its_coordinator_is_killed(cluster: Cluster, family: type[Member]) -> None:
    topic = group = f"failover-{family.__name__.lower()}"
    cluster.create_topic(topic, partitions=1, replication_factor=3)
    produce_confluent(cluster.bootstrap, topic, [Sample(None, b"early")] * 40, 0)
    with family(cluster.bootstrap, group, topic, **{"auto.commit.interval.ms": 200}) as member:
        wait_until(lambda: len(set(member.seen)) == 40, "what came early is read", member)
        wait_until(lambda: committed(cluster, group, topic) == 40, "it is committed", member)
        coordinator = cluster.leader("__consumer_offsets", partition_for(group, OFFSETS_PARTITIONS))
        cluster.broker(coordinator).kill()
        produce_confluent(cluster.bootstrap, topic, [Sample(None, b"late")] * 40, 0)
        wait_until(lambda: len(set(member.seen)) == 80, "what came later is read too", member)
        wait_until(lambda: committed(cluster, group, topic) == 80, "and committed", member)
    early = [offset for _, offset in member.seen if offset < 40]
    assert len(early) == 40, "nothing that was committed before the kill is read again"
    cluster.broker(coordinator).start()
    cluster.await_in_sync("__consumer_offsets")
    assert committed(cluster, group, topic) == 80
