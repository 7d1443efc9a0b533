"""A group's coordinator is killed, its members and all brokers are restarted one by one: its members go on, every
record is handled, and nothing that was committed is lost or goes back."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any, Self

import pytest

from headrace.coordinators.group_hash import partition_for
from headrace.testing import Cluster
from tests.compat.clients import produce_confluent
from tests.compat.group_clients import Confluent, ConfluentConsumer, Member, wait_until
from tests.compat.samples import QUIET, WAIT_S, Sample

PARTITIONS = 4
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


class CommitsWatched:
    """Looks at what a group has committed, over and over; `steps_back` holds every offset that was less than before."""

    def __init__(self, cluster: Cluster, group: str, topic: str) -> None:
        self._cluster, self._group, self._topic = cluster, group, topic
        self.latest = [0] * PARTITIONS
        self.steps_back: list[tuple[int, int, int]] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopping.set()
        self._thread.join(WAIT_S)

    def _look(self) -> None:
        from confluent_kafka import Consumer, KafkaException, TopicPartition

        config = {**QUIET, "bootstrap.servers": self._cluster.bootstrap, "group.id": self._group}
        consumer = Consumer(config)
        asked = [TopicPartition(self._topic, index) for index in range(PARTITIONS)]
        try:
            while not self._stopping.wait(0.02):
                try:
                    told = consumer.committed(asked, timeout=5)
                except KafkaException:
                    continue  # brokers come and go
                for each in told:
                    before, now = self.latest[each.partition], max(each.offset, 0)
                    if each.error is None and now < before:
                        self.steps_back.append((each.partition, before, now))
                    if each.error is None:
                        self.latest[each.partition] = now
        finally:
            consumer.close()


class Committing(Confluent):
    """Commits each record and waits for it: librdkafka's own commits may overtake each other when they are retried."""

    def handled(self, consumer: Any, message: Any) -> None:
        from confluent_kafka import KafkaException

        with suppress(KafkaException):  # its partition went to another, or the coordinator is on its way
            consumer.commit(message, asynchronous=False)


class CommittingConsumer(Committing):
    timing = ConfluentConsumer.timing


@pytest.mark.parametrize("family", [Committing, CommittingConsumer], ids=["classic", "consumer"])
def test_rolling_restarts_of_members_and_brokers_lose_nothing(cluster: Cluster, family: type[Member]) -> None:
    from confluent_kafka import Producer

    topic = group = f"rolling-{family.__name__.lower()}"
    cluster.create_topic(topic, partitions=PARTITIONS, replication_factor=3)
    producer = Producer({**QUIET, "bootstrap.servers": cluster.bootstrap, "acks": "all"})
    sent = 0
    members: list[Member] = []

    def more() -> None:
        nonlocal sent
        for number in range(sent, sent + 40):
            producer.produce(topic, str(number), partition=number % PARTITIONS)
        assert producer.flush(WAIT_S) == 0
        sent += 40

    def handled() -> bool:
        return len({each for member in members for each in member.seen}) == sent

    with ExitStack() as running, CommitsWatched(cluster, group, topic) as commits:

        def start() -> Member:
            member = family(cluster.bootstrap, group, topic, **{"enable.auto.commit": False})
            members.append(running.enter_context(member))
            return member

        current = [start(), start()]
        for place in range(len(current)):
            more()
            wait_until(handled, "all is read", *current)
            current[place].leave()
            current[place] = start()
        for number in cluster.ids:
            more()
            cluster.broker(number).restart()
            more()
            wait_until(handled, f"all is read after broker {number} came back", *current)
            cluster.await_in_sync("__consumer_offsets")
            cluster.await_in_sync(topic)
        more()
        wait_until(lambda: sum(commits.latest) == sent, "all is committed", *current)
    assert commits.steps_back == []
