"""How groups change: how long a rebalance takes, and how long a group stands still when its coordinator is killed.

The members are confluent-kafka's, each in a thread of its own, with the same settings for every system.
"""

import statistics
import threading
import time
import uuid
from collections.abc import Callable
from itertools import pairwise

from benchmarks.clusters import HeadraceCluster, KafkaCluster, await_in_sync, new_topic
from benchmarks.groups import HEARTBEAT_MS, WAIT_S, Connection, alone
from benchmarks.systems import Headrace, Kafka, System
from benchmarks.workloads import QUIET, Numbers, Scale, topic
from headrace.wire.apis import Api

REBALANCE_MEMBERS, REBALANCE_PARTITIONS = 20, 100
SETTLED_S = 4.0
"""librdkafka joins at most once a second: a group that has just come together could not rebalance sooner than that."""
USUAL_HEARTBEAT_MS = "3000"
COORDINATOR_KILLS = 3
BEFORE_S = 3.0
AFTER_S = 1.0
EVERY_S = 0.02


def rebalance(system: System, scale: Scale) -> Numbers:
    """Twenty consumers over a hundred partitions: from the leaving of one until the others have all of it."""
    with topic(system, REBALANCE_PARTITIONS) as name:
        numbers: Numbers = {}
        for what, config in REBALANCES.items():
            formed_s, left_s = _rebalance(system, name, config)
            numbers[f"form {what} s"], numbers[f"rebalance {what} s"] = formed_s, left_s
        return numbers


REBALANCES = {
    "cooperative": {
        "heartbeat.interval.ms": HEARTBEAT_MS,
        "partition.assignment.strategy": "cooperative-sticky",
    },
    "eager": {"heartbeat.interval.ms": HEARTBEAT_MS, "partition.assignment.strategy": "range"},
    "usual": {
        "heartbeat.interval.ms": USUAL_HEARTBEAT_MS,
        "partition.assignment.strategy": "cooperative-sticky",
    },
    "consumer": {"group.protocol": "consumer"},
}
"""Settings of the clients; how often members of the consumer protocol report is the broker's setting, HEARTBEAT_MS."""


def _rebalance(system: System, name: str, settings: dict[str, str]) -> tuple[float, float]:
    """How long the group took to come together from nothing, and to share anew what one left behind."""
    from confluent_kafka import Consumer

    group = f"bench-{uuid.uuid4().hex[:8]}"
    config = {"bootstrap.servers": system.bootstrap, "group.id": group, **settings, **QUIET}
    stopping = threading.Event()
    held: dict[int, int] = {}
    leaving = threading.Event()

    def member(number: int) -> None:
        consumer = Consumer(config)
        consumer.subscribe([name])
        while not stopping.is_set() and not (number == 0 and leaving.is_set()):
            consumer.poll(0.02)
            held[number] = len(consumer.assignment())
        held.pop(number, None)
        consumer.close()

    threads = [threading.Thread(target=member, args=(number,)) for number in range(REBALANCE_MEMBERS)]

    def settled(members: int) -> bool:
        counts = list(held.values())
        return len(counts) == members and sum(counts) == REBALANCE_PARTITIONS and min(counts) > 0

    try:
        begun_s = time.monotonic()
        for thread in threads:
            thread.start()
        _until(lambda: settled(REBALANCE_MEMBERS))
        formed_s = time.monotonic() - begun_s
        time.sleep(SETTLED_S)
        assert settled(REBALANCE_MEMBERS), "the group did not stay together"
        begun_s = time.monotonic()
        leaving.set()
        _until(lambda: settled(REBALANCE_MEMBERS - 1))
        return formed_s, time.monotonic() - begun_s
    finally:
        stopping.set()
        for thread in threads:
            thread.join(WAIT_S)


def _until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline_s, "the group does not settle"
        time.sleep(0.005)


def coordinator_kill(kind: type[System], scale: Scale) -> Numbers:
    """Three brokers: the longest time without a commit, and without a record, when a group's coordinator is killed."""
    system = CLUSTERS[kind]()
    try:
        system.start()
        gaps = [_gap_s(system) for _ in range(COORDINATOR_KILLS)]
    finally:
        system.remove()
    return {
        "coordinator killed, commits s": statistics.median(commits for commits, _ in gaps),
        "coordinator killed, reading s": statistics.median(reads for _, reads in gaps),
    }


CLUSTERS: dict[type[System], type[HeadraceCluster] | type[KafkaCluster]] = {
    Headrace: HeadraceCluster,
    Kafka: KafkaCluster,
}


def _gap_s(system: HeadraceCluster | KafkaCluster) -> tuple[float, float]:
    from confluent_kafka import Consumer, KafkaException, Producer

    name = group = f"bench-{uuid.uuid4().hex[:8]}"
    new_topic(system, name)
    shared = {"bootstrap.servers": system.bootstrap, **QUIET}
    consumer = Consumer(
        {**shared, "group.id": group, "auto.offset.reset": "earliest", "enable.auto.commit": False}
    )
    producer = Producer({**shared, "acks": "all", "linger.ms": 0})
    consumer.subscribe([name])
    read_s: list[float] = []
    committed_s: list[float] = []
    stopping = threading.Event()

    def write() -> None:
        while not stopping.wait(EVERY_S):
            producer.produce(name, b"x")
            producer.poll(0)

    def read() -> None:
        while not stopping.is_set():
            message = consumer.poll(EVERY_S)
            if message is None or message.error():
                continue
            read_s.append(time.monotonic())
            try:
                consumer.commit(asynchronous=False)
            except KafkaException:
                continue
            committed_s.append(time.monotonic())
        consumer.close()

    threads = [threading.Thread(target=work) for work in (write, read)]
    for thread in threads:
        thread.start()
    _until(lambda: len(committed_s) > 0)
    time.sleep(BEFORE_S)
    connection = Connection(system.bootstrap)
    coordinator = connection.call(Api.FIND_COORDINATOR, 3, {"key": group, "key_type": 0}).node_id
    connection.socket.close()
    killed_s = time.monotonic()
    system.one("kill", coordinator)
    _until(lambda: committed_s[-1] > killed_s + AFTER_S)
    stopping.set()
    for thread in threads:
        thread.join(WAIT_S)
    producer.flush(WAIT_S)
    system.one("start", coordinator)
    await_in_sync(system, name)
    await_in_sync(system, "__consumer_offsets")

    def longest(times: list[float]) -> float:
        since = [killed_s - EVERY_S, *[each for each in times if each >= killed_s - EVERY_S]]
        return max(later - earlier for earlier, later in pairwise(since))

    return longest(committed_s), longest(read_s)


GROUP_CHANGES: dict[str, Callable[[type[System], Scale], Numbers]] = {
    "rebalance": alone(rebalance),
    "coordinator-kill": coordinator_kill,
}
