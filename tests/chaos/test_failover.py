"""A cluster of three real brokers whose leader is killed, cut off, paused; what a client is told, and what is there."""

from collections.abc import Iterator

import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition

from headrace.testing import Cluster
from headrace.testing.topics import describe_topic
from tests.testing.waiting import wait_until

DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(3, cables=True, settings={"broker.session.timeout.ms": 6000}) as running:
        yield running


def producer(bootstrap: str, **config: object) -> Producer:
    return Producer(
        {
            "bootstrap.servers": bootstrap,
            "acks": "all",
            "enable.idempotence": True,
            "linger.ms": 0,
            "log_level": 0,
            "socket.timeout.ms": 5_000,
            "request.timeout.ms": 4_000,
            "topic.metadata.refresh.interval.ms": 1_000,  # a stale leader is asked again soon who leads
            **config,
        }
    )


class Acks:
    """What a producer was told."""

    def __init__(self) -> None:
        self.offsets: dict[bytes, int] = {}
        self.errors: list[KafkaError] = []

    def send(self, client: Producer, topic: str, value: bytes) -> None:
        client.produce(topic, value, partition=0, on_delivery=lambda e, m: self._told(value, e, m))

    def _told(self, value: bytes, error: KafkaError | None, message: object) -> None:
        if error is not None:
            self.errors.append(error)
        else:
            self.offsets[value] = message.offset()  # type: ignore[attr-defined]


def read(bootstrap: str, topic: str, count: int) -> list[bytes]:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "g", "log_level": 0})
    consumer.assign([TopicPartition(topic, 0, 0)])
    found: list[bytes] = []

    def enough() -> bool:
        found.extend(m.value() for m in consumer.consume(1000, 0.5) if m.error() is None)
        return len(found) >= count

    try:
        wait_until(enough, f"{count} records of {topic}", DEADLINE_S)
    finally:
        consumer.close()
    return found


def test_acknowledged_records_survive_the_kill_of_their_leader(cluster: Cluster) -> None:
    cluster.create_topic("killed", config={"min.insync.replicas": "2"})
    client, acks = producer(cluster.bootstrap), Acks()
    for number in range(50):
        acks.send(client, "killed", b"before %d" % number)
    assert client.flush(DEADLINE_S) == 0
    leader = cluster.leader("killed")
    cluster.broker(leader).kill()
    for number in range(50):
        acks.send(client, "killed", b"after %d" % number)
    assert client.flush(DEADLINE_S) == 0
    assert not acks.errors and len(acks.offsets) == 100
    assert cluster.leader("killed") != leader
    cluster.broker(leader).start()
    cluster.await_in_sync("killed", DEADLINE_S)
    found = read(cluster.bootstrap, "killed", 100)
    assert found == sorted(acks.offsets, key=acks.offsets.__getitem__)


def test_a_leader_that_is_cut_off_from_the_others_acknowledges_nothing_that_is_lost(cluster: Cluster) -> None:
    """Clients still reach it; what it takes from them must not be acknowledged unless the new leader has it."""
    cluster.create_topic("cut", config={"min.insync.replicas": "2"})
    client, acks = producer(cluster.bootstrap), Acks()
    acks.send(client, "cut", b"whole")
    assert client.flush(DEADLINE_S) == 0
    old = cluster.leader("cut")
    cluster.isolate(old, clients=False)
    try:
        for number in range(20):
            acks.send(client, "cut", b"cut %d" % number)
        others = ",".join(a for n, a in zip(cluster.ids, cluster.bootstrap.split(",")) if n != old)
        # Only a client that never hears of the old leader is sure to find the new one while both can be reached.
        wait_until(lambda: _leader(others) not in (old, -1), "a new leader", DEADLINE_S)
        fresh, told = producer(others), Acks()
        told.send(fresh, "cut", b"new leader")
        assert fresh.flush(DEADLINE_S) == 0 and told.offsets
    finally:
        cluster.heal()
    assert client.flush(DEADLINE_S) == 0
    cluster.await_in_sync("cut", DEADLINE_S)
    assert not acks.errors and len(acks.offsets) == 21
    found = read(cluster.bootstrap, "cut", 22)
    places = {value: offset for offset, value in enumerate(found)}
    assert {value: places[value] for value in acks.offsets} == acks.offsets
    ours = [value for value in found if value != b"new leader"]
    assert ours == [b"whole", *(b"cut %d" % number for number in range(20))]


def _leader(bootstrap: str) -> int:
    return describe_topic(bootstrap, "cut").partitions[0].leader


def test_a_leader_that_was_paused_does_not_serve_what_it_alone_has(cluster: Cluster) -> None:
    cluster.create_topic("paused", config={"min.insync.replicas": "2"})
    client, acks = producer(cluster.bootstrap), Acks()
    acks.send(client, "paused", b"first")
    assert client.flush(DEADLINE_S) == 0
    old = cluster.leader("paused")
    cluster.broker(old).pause()
    try:
        acks.send(client, "paused", b"second")
        assert client.flush(DEADLINE_S) == 0
    finally:
        cluster.broker(old).resume()
    assert cluster.leader("paused") != old or acks.offsets[b"second"] == 1
    cluster.await_in_sync("paused", DEADLINE_S)
    assert read(cluster.bootstrap, "paused", 2) == [b"first", b"second"]
