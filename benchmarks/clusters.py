"""Clusters under measurement, and what is measured of them: three replicas, acks=all, min.insync.replicas=2.

The workloads of a single broker run here on three brokers; the others are about what only a cluster has: how long
writes wait when a leader dies or is stopped, how long a start takes, how soon a broker is in sync again. Both systems
run with their own defaults.
"""

import json
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from itertools import pairwise

from benchmarks.systems import START_S, Headrace, Kafka, System, Unavailable
from benchmarks.transactions import transactions
from benchmarks.workloads import (
    QUIET,
    SETTLE_S,
    Numbers,
    Scale,
    create_topics,
    latency,
    produce,
    produce_java,
)

ROUNDS = {
    "write-gap": (10, 3),
    "controller-gap": (10, 3),
    "stop-gap": (10, 3),
    "rejoin": (3, 1),
}
"""How often these are measured, of Headrace and of Kafka, whose rounds take several times as long."""
QUICK_ROUNDS = 2
SEND_EVERY_S = 0.005
BEFORE_S = 2.0
GAP_MAX_S = 60.0
IN_SYNC_S = 300.0


class HeadraceCluster(Headrace):
    """This checkout, as `headrace up`."""

    brokers = 3
    replicas = 3
    acks = "all"

    def command(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "headrace", *arguments, "--data", str(self.directory / "data")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=START_S)
        if done.returncode != 0:
            raise Unavailable(f"headrace {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def launch(self) -> None:
        settings = [word for key, value in self.settings.items() for word in ("--set", f"{key}={value}")]
        self.command("up", "--detach", "--brokers", str(self.brokers), "--port", str(self.port), *settings)

    def pids(self) -> list[int]:
        brokers = json.loads(self.command("status", "--json"))["brokers"]
        return [broker["pid"] for broker in brokers if broker["pid"]]

    def one(self, action: str, number: int) -> None:
        """Kill, stop or start one broker."""
        self.command("broker", action, str(number))

    def remove(self) -> None:
        self.command("down")
        super().remove()


class KafkaCluster(Kafka):
    """Real Kafka, three brokers that are also controllers."""

    brokers = 3
    replicas = 3
    acks = "all"

    def one(self, action: str, number: int) -> None:
        """Kill, stop or start one broker."""
        self.call(action, str(number))


Cluster = HeadraceCluster | KafkaCluster


def prefixed(workload: Callable[[System, Scale], Numbers]) -> Callable[[System, Scale], Numbers]:
    """The same workload, with names of its own for its numbers."""

    def run(system: System, scale: Scale) -> Numbers:
        return {f"cluster {key}": number for key, number in workload(system, scale).items()}

    return run


def new_topic(system: System, name: str, partitions: int = 1, replicas: list[int] | None = None) -> None:
    """A topic that is in sync: of three replicas, or of one partition on these, led by the first."""
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": system.bootstrap, **QUIET})
    config = {"min.insync.replicas": "2"}
    if replicas is None:
        topic = NewTopic(name, partitions, 3, config=config)
    else:
        topic = NewTopic(name, 1, replica_assignment=[replicas], config=config)
    admin.create_topics([topic])[name].result(120)
    await_in_sync(system, name)


def active_controller(system: System) -> int:
    """The leader of the quorum; DescribeCluster of Kafka names any broker instead."""
    import asyncio

    from headrace.client.admin import Admin

    async def ask() -> int:
        async with Admin({"bootstrap.servers": system.bootstrap}) as admin:
            return (await admin.describe_quorum()).leader_id

    return asyncio.run(ask())


def await_in_sync(system: System, name: str) -> None:
    """Return when every replica of a topic is in sync."""
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": system.bootstrap, **QUIET})
    deadline_s = time.monotonic() + IN_SYNC_S
    while time.monotonic() < deadline_s:
        found = admin.list_topics(timeout=30).topics.get(name)
        parts = found.partitions.values() if found is not None else ()
        if parts and all(p.leader >= 0 and len(p.isrs) == len(p.replicas) for p in parts):
            return
        time.sleep(0.02)
    raise Unavailable(f"replicas of {name} were not in sync within {IN_SYNC_S:.0f} s")


def gap_s(system: Cluster, action: str, *, of_controller: bool = False) -> float:
    """The longest time between two acknowledgements when the leader of a partition is killed or stopped.

    With `of_controller` that leader is the active controller too; else it is one time and is not another.
    """
    from confluent_kafka import Producer
    from confluent_kafka.admin import AdminClient

    name = f"bench-{uuid.uuid4().hex[:8]}"
    replicas = None
    if of_controller:
        controller = active_controller(system)
        replicas = [controller, *(each for each in range(1, 4) if each != controller)]
    new_topic(system, name, replicas=replicas)
    producer = Producer(
        {
            "bootstrap.servers": system.bootstrap,
            "acks": "all",
            "enable.idempotence": True,
            "linger.ms": 0,
            **QUIET,
        }
    )
    acks: list[float] = []
    refused: list[str] = []
    stopping = threading.Event()

    def told(error: object, _: object) -> None:
        if error is None:
            acks.append(time.perf_counter())
        else:
            refused.append(str(error))

    def write() -> None:
        while not stopping.wait(SEND_EVERY_S):
            producer.produce(name, b"x" * 100, on_delivery=told)
            producer.poll(0)
        producer.flush(GAP_MAX_S)

    writer = threading.Thread(target=write)
    writer.start()
    time.sleep(BEFORE_S)
    admin = AdminClient({"bootstrap.servers": system.bootstrap, **QUIET})
    leader = admin.list_topics(name, timeout=30).topics[name].partitions[0].leader
    hit_s = time.perf_counter()
    system.one(action, leader)
    while (not acks or acks[-1] < hit_s + 1.0 or time.perf_counter() < hit_s + 4.0) and (
        time.perf_counter() < hit_s + GAP_MAX_S
    ):
        time.sleep(0.1)
    stopping.set()
    writer.join()
    if refused:
        raise Unavailable(f"{len(refused)} records were refused: {refused[0]}")
    system.one("start", leader)
    await_in_sync(system, name)
    return max(later - earlier for earlier, later in pairwise(acks))


def write_gap(system: System, scale: Scale) -> Numbers:
    """The gap when whoever leads is killed, which is the active controller now and then."""
    assert isinstance(system, HeadraceCluster | KafkaCluster)
    return {"write gap after a kill s": gap_s(system, "kill")}


def controller_gap(system: System, scale: Scale) -> Numbers:
    """The gap when a leader is killed that is the active controller too."""
    assert isinstance(system, HeadraceCluster | KafkaCluster)
    return {"write gap after a controller's kill s": gap_s(system, "kill", of_controller=True)}


def stop_gap(system: System, scale: Scale) -> Numbers:
    """The gap when the leader is stopped cleanly."""
    assert isinstance(system, HeadraceCluster | KafkaCluster)
    return {"write gap after a stop s": gap_s(system, "stop")}


def rounds(workload: str, kind: str, runs: int, quick: bool) -> int:
    """How often a workload is measured of a system, when others are `runs` times."""
    if workload not in ROUNDS:
        return runs
    ours, theirs = ROUNDS[workload]
    count = ours if kind == HeadraceCluster.name else theirs
    return min(count, QUICK_ROUNDS) if quick else count


def rejoin(system: System, scale: Scale) -> Numbers:
    """Seconds from the start of a killed broker of many partitions until it is in all ISRs."""
    assert isinstance(system, HeadraceCluster | KafkaCluster)
    name = f"bench-{uuid.uuid4().hex[:8]}"
    new_topic(system, name, scale.partitions)
    system.one("kill", 1)
    begun_s = time.perf_counter()
    system.one("start", 1)
    await_in_sync(system, name)
    return {"rejoin with 1000 partitions s": time.perf_counter() - begun_s}


class FiveHeadrace(HeadraceCluster):
    """As `headrace up` starts it."""

    brokers = 5


class FiveKafka(KafkaCluster):
    """As many of Kafka."""

    brokers = 5


FIVE: dict[type[System], type[System]] = {HeadraceCluster: FiveHeadrace, KafkaCluster: FiveKafka}


def five(kind: type[System], scale: Scale) -> Numbers:
    """Five brokers from nothing: until all are in service, and the memory of all of them."""
    system = FIVE[kind]()
    try:
        begun_s = time.perf_counter()
        system.start()
        seconds = time.perf_counter() - begun_s
        time.sleep(SETTLE_S)
        return {"five brokers start s": seconds, "five brokers memory MB": system.memory_mb()}
    finally:
        system.remove()


CLUSTER_SHARED: dict[str, Callable[[System, Scale], Numbers]] = {
    "produce": prefixed(produce),
    "produce-java": prefixed(produce_java),
    "latency": prefixed(latency),
    "create-topics": prefixed(create_topics),
    "transactions": prefixed(transactions),
    "write-gap": write_gap,
    "controller-gap": controller_gap,
    "stop-gap": stop_gap,
    "rejoin": rejoin,
}
CLUSTER_ALONE: dict[str, Callable[[type[System], Scale], Numbers]] = {"five": five}
