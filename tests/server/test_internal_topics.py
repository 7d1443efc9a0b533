"""How many replicas the cluster's own topics get, for clients that come while the cluster is still starting."""

import asyncio
from pathlib import Path

import pytest

from headrace.base.errors import ErrorCode
from headrace.cluster.image import apply
from headrace.cluster.names import CONSUMER_OFFSETS_TOPIC, TRANSACTION_STATE_TOPIC
from headrace.cluster.records import BrokerRecord
from headrace.server.member import VOTERS_AWAITED_MS
from headrace.wire.apis import Api
from tests.server.desk import Desk
from tests.server.members import Cluster

KINDS = pytest.mark.parametrize(
    ("kind", "name"),
    [(0, CONSUMER_OFFSETS_TOPIC), (1, TRANSACTION_STATE_TOPIC)],
    ids=["groups", "transactions"],
)


def look(desk: Desk, kind: int) -> ErrorCode:
    """What a client that looks for a coordinator is told."""
    [found] = desk.ask(Api.FIND_COORDINATOR, 6, {"coordinator_keys": ["g"], "key_type": kind}).coordinators
    return ErrorCode(found.error_code)


def replicas(desk: Desk, name: str) -> set[int]:
    """How many each partition of a topic has; none when it is not there."""
    topic = desk.image.topics.get(name)
    return set() if topic is None else {len(partition.replicas) for partition in topic.partitions}


@KINDS
@pytest.mark.parametrize(("brokers", "made_with"), [(1, 1), (2, 2), (3, 3), (5, 3)])
def test_a_cluster_that_is_complete_has_its_topics_at_once(
    kind: int, name: str, brokers: int, made_with: int
) -> None:
    desk = Desk(brokers=brokers, voters=range(1, min(brokers, 3) + 1))
    look(desk, kind)
    assert replicas(desk, name) == {made_with}


@KINDS
def test_a_cluster_that_is_still_starting_waits_for_its_voters(kind: int, name: str) -> None:
    desk = Desk(brokers=2, voters=(1, 2, 3))
    assert look(desk, kind) is ErrorCode.COORDINATOR_NOT_AVAILABLE
    [topic] = desk.ask(Api.METADATA, 12, {"topics": [{"name": name, "topic_id": bytes(16)}]}).topics
    assert topic.error_code == ErrorCode.LEADER_NOT_AVAILABLE
    assert replicas(desk, name) == set()
    desk.image = apply(desk.image, [BrokerRecord(3, "host3", 9003, None, 1, fenced=True)])
    look(desk, kind)
    assert replicas(desk, name) == {3}, "a broker that has registered holds replicas, also while it is fenced"


def test_fewer_replicas_wait_for_fewer_brokers() -> None:
    desk = Desk({"offsets.topic.replication.factor": "2"}, brokers=2, voters=(1, 2, 3))
    look(desk, 0)
    assert replicas(desk, CONSUMER_OFFSETS_TOPIC) == {2}


@KINDS
def test_a_voter_that_never_comes_is_waited_for_no_longer_than_it_takes(kind: int, name: str) -> None:
    desk = Desk(brokers=2, voters=(1, 2, 3))
    look(desk, kind)
    desk.clock.advance(VOTERS_AWAITED_MS - 1)
    assert look(desk, kind) is ErrorCode.COORDINATOR_NOT_AVAILABLE
    desk.clock.advance(1)
    look(desk, kind)
    assert replicas(desk, name) == {2}


def test_what_is_asked_of_two_brokers_has_replicas_on_the_third_that_comes_late(tmp_path: Path) -> None:
    async def run() -> None:
        cluster = Cluster(3, 3, {"offsets.topic.num.partitions": "2"}, str(tmp_path))
        first, second, late = cluster.nodes.values()
        try:
            await asyncio.gather(first.start(), second.start())

            async def look() -> int:
                link = first.broker.member.peers.link(second.id)
                body = {"coordinator_keys": ["g"], "key_type": 0}
                [found] = (await link.request(Api.FIND_COORDINATOR, 4, body, 10_000)).coordinators
                return int(found.error_code)

            assert await look() == ErrorCode.COORDINATOR_NOT_AVAILABLE
            await late.start()
            await second.broker.metadata.until(late.broker.metadata.applied_offset)
            await look()
            made = second.image.topics[CONSUMER_OFFSETS_TOPIC].partitions
            assert [sorted(partition.replicas) for partition in made] == [[1, 2, 3]] * 2
        finally:
            for node in cluster.nodes.values():
                if node.process._broker is not None:
                    await node.die()

    asyncio.run(run())
