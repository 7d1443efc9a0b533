"""What is measured, each a function from a system to numbers by name.

A workload in `SHARED` runs on a broker that is up for the whole run and makes topics of its own; one in `ALONE` starts
and ends a broker itself, because the start or the empty broker is what it measures. Numbers of a workload that cannot
run here are absent, with the reason.
"""

import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.systems import System, Unavailable, kafka_tool

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient

RECORD_BYTES = 100
CLIENT_S = 300.0
SETTLE_S = 2.0
QUIET = {"log_level": 0}
Numbers = dict[str, float]


@dataclass(frozen=True)
class Scale:
    """How much each workload does. `quick` is for trying the benchmark itself."""

    records: int = 2_000_000
    log_records: int = 10_000_000  # one gigabyte, for the start after a kill
    partitions: int = 1000
    latency_rate_per_s: int = 1000
    latency_s: int = 10

    @classmethod
    def quick(cls) -> "Scale":
        return cls(records=200_000, log_records=500_000, partitions=100, latency_s=3)


@contextmanager
def topic(system: System, partitions: int = 1, **config: str) -> Iterator[str]:
    """A new topic, gone afterwards."""
    if not system.keeps_topics:
        yield "any"
        return
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": system.bootstrap, **QUIET})
    name = f"bench-{uuid.uuid4().hex[:10]}"
    settings = {key.replace("_", "."): value for key, value in config.items()}
    if system.replicas > 1:
        settings["min.insync.replicas"] = "2"
    admin.create_topics([NewTopic(name, partitions, system.replicas, config=settings)])[name].result(60)
    listed = {}
    while name not in listed or any(p.leader < 0 for p in listed[name].partitions.values()):
        listed = admin.list_topics(timeout=30).topics
    try:
        yield name
    finally:
        admin.delete_topics([name])[name].exception(60)


def lines(count: int) -> Path:
    """A file of numbered lines to send, made once, in memory where there is such a place."""
    folder = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
    path = folder / f"headrace-bench-{count}.txt"
    if not path.exists():
        block = b"".join(b"%09d" % i + b"x" * (RECORD_BYTES - 9) + b"\n" for i in range(10_000))
        with path.open("wb") as out:
            for _ in range(count // 10_000):
                out.write(block)
    return path


def kcat(*arguments: str) -> float:
    """Seconds that kcat took."""
    program = shutil.which("kcat")
    if program is None:
        raise Unavailable("kcat is not installed (Debian: apt install kcat)")
    begun_s = time.perf_counter()
    subprocess.run([program, *arguments], stdout=subprocess.DEVNULL, check=True, timeout=CLIENT_S)
    return time.perf_counter() - begun_s


def kcat_produce(system: System, name: str, count: int) -> float:
    return kcat(
        *(
            "-P",
            "-b",
            system.bootstrap,
            "-t",
            name,
            "-X",
            f"acks={system.acks}",
            "-X",
            "linger.ms=5",
            "-X",
            "batch.size=1000000",
        ),
        *("-X", "queue.buffering.max.messages=1000000", "-l", str(lines(count))),
    )


def rates(system: System, count: int, seconds: float, cpu_s: float, what: str) -> Numbers:
    gigabytes = count * RECORD_BYTES / 1e9
    return {f"{what} msg/s": count / seconds, f"{what} cpu s/GB": (system.cpu_s() - cpu_s) / gigabytes}


def produce(system: System, scale: Scale) -> Numbers:
    with topic(system) as name:
        cpu_s = system.cpu_s()
        seconds = kcat_produce(system, name, scale.records)
        return rates(system, scale.records, seconds, cpu_s, "produce")


def produce_flushed(system: System, scale: Scale) -> Numbers:
    with topic(system, flush_messages="1") as name:
        cpu_s = system.cpu_s()
        seconds = kcat_produce(system, name, scale.records)
        return rates(system, scale.records, seconds, cpu_s, "flushed produce")


def produce_spread(system: System, scale: Scale) -> Numbers:
    with topic(system, scale.partitions) as name:
        cpu_s = system.cpu_s()
        seconds = kcat_produce(system, name, scale.records)
        return rates(system, scale.records, seconds, cpu_s, "spread produce")


def produce_java(system: System, scale: Scale) -> Numbers:
    with topic(system) as name:
        cpu_s = system.cpu_s()
        out = kafka_tool(
            "kafka-producer-perf-test",
            *("--topic", name, "--num-records", str(scale.records), "--record-size", str(RECORD_BYTES)),
            *("--throughput", "-1", "--producer-props", f"bootstrap.servers={system.bootstrap}"),
            f"acks={system.acks}",
            *("linger.ms=5", "batch.size=262144", "buffer.memory=67108864", "enable.idempotence=false"),
        )
        per_s = float(out.strip().splitlines()[-1].split(" records/sec")[0].split()[-1])
        return rates(system, scale.records, scale.records / per_s, cpu_s, "java produce")


def consume(system: System, scale: Scale) -> Numbers:
    with topic(system) as name:
        kcat_produce(system, name, scale.records)
        cpu_s = system.cpu_s()
        seconds = kcat(
            *(
                "-C",
                "-b",
                system.bootstrap,
                "-t",
                name,
                "-o",
                "beginning",
                "-e",
                "-q",
                "-X",
                "check.crcs=false",
            ),
            *("-X", "fetch.message.max.bytes=10000000", "-X", "queued.max.messages.kbytes=1000000"),
        )
        return rates(system, scale.records, seconds, cpu_s, "consume")


def stolen_s() -> float:
    """Processor seconds that the host has given to others while this guest wanted them; 0 where that is not told."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return 0.0
    return int(fields[8]) / os.sysconf("SC_CLK_TCK")


def latency(system: System, scale: Scale) -> Numbers:
    """End to end, producer to consumer, at a steady rate, in milliseconds. The first two seconds do not count.

    Also the share of the processors that the machine's host took away meanwhile: nothing moves latencies as that does.
    """
    from confluent_kafka import Consumer, Producer, TopicPartition

    warm = 2 * scale.latency_rate_per_s
    total = warm + scale.latency_rate_per_s * scale.latency_s
    with topic(system) as name:
        consumer = Consumer(
            {"bootstrap.servers": system.bootstrap, "group.id": "bench", "enable.auto.commit": False, **QUIET}
        )
        consumer.assign([TopicPartition(name, 0, 0)])
        producer = Producer(
            {"bootstrap.servers": system.bootstrap, "acks": system.acks, "linger.ms": 0, **QUIET}
        )

        def write() -> None:
            begun_s = time.perf_counter()
            for i in range(total):
                while time.perf_counter() < begun_s + i / scale.latency_rate_per_s:
                    time.sleep(0.0001)
                    producer.poll(0)
                producer.produce(name, b"%.9f" % time.perf_counter() + b"x" * 80, partition=0)
                producer.poll(0)
            producer.flush(30)

        writer = threading.Thread(target=write)
        started_s, stolen_before_s = time.perf_counter(), stolen_s()
        writer.start()
        took_ms: list[float] = []
        seen = 0
        while seen < total and (message := consumer.poll(10)) is not None:
            if message.error():
                continue
            seen += 1
            if seen > warm:
                took_ms.append((time.perf_counter() - float(message.value().rstrip(b"x"))) * 1000)
        writer.join()
        stolen, taken_s = stolen_s(), time.perf_counter() - started_s
        consumer.close()
    if seen < total:
        raise Unavailable(f"only {seen} of {total} records came")
    quantiles = statistics.quantiles(took_ms, n=100)
    return {
        "latency p50 ms": quantiles[49],
        "latency p99 ms": quantiles[98],
        "latency stolen %": (stolen - stolen_before_s) / taken_s / (os.cpu_count() or 1) * 100,
    }


def create_topics(system: System, scale: Scale) -> Numbers:
    """Seconds until 100 topics with a tenth of `scale.partitions` over 100 each are created, in one request."""
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": system.bootstrap, **QUIET})
    admin.list_topics(timeout=30)
    prefix = uuid.uuid4().hex[:8]
    names = [f"bench-{prefix}-{i}" for i in range(100)]
    begun_s = time.perf_counter()
    for made in admin.create_topics(
        [NewTopic(n, scale.partitions // 100, system.replicas) for n in names]
    ).values():
        made.result(120)
    if system.replicas > 1:
        await_leaders(admin, names)
    seconds = time.perf_counter() - begun_s
    for gone in admin.delete_topics(names).values():
        gone.exception(120)
    return {"create 100 topics s": seconds}


def await_leaders(admin: "AdminClient", names: list[str]) -> None:
    """Return when a client that asks finds a leader for every partition of these topics."""
    wanted, led = set(names), set[str]()
    while led != wanted:
        for name, found in admin.list_topics(timeout=30).topics.items():
            if name in wanted and found.partitions and all(p.leader >= 0 for p in found.partitions.values()):
                led.add(name)


def first_ack_s(system: System, name: str) -> float:
    """Seconds from the launch of the broker's process to its first acknowledgement of a record."""
    from confluent_kafka import Producer

    begun_s = time.perf_counter()
    system.launch()
    producer = Producer(
        {
            "bootstrap.servers": system.bootstrap,
            "acks": "all",
            "reconnect.backoff.ms": 10,
            "reconnect.backoff.max.ms": 50,
            "retry.backoff.ms": 10,
            "topic.metadata.refresh.fast.interval.ms": 20,
            **QUIET,
        }
    )
    told: list[object] = []
    producer.produce(name, b"first", on_delivery=lambda error, message: told.append(error))
    while not told:
        producer.poll(0.005)
    if told[0] is not None:
        raise Unavailable(f"the first record was refused: {told[0]}")
    return time.perf_counter() - begun_s


@contextmanager
def alone(kind: type[System]) -> Iterator[System]:
    """A broker for this workload only."""
    system = kind()
    try:
        yield system.start()
    finally:
        system.remove()


def made_topic(system: System) -> str:
    """A topic that stays."""
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": system.bootstrap, **QUIET})
    admin.create_topics([NewTopic("start", 1, 1)])["start"].result(60)
    while "start" not in admin.list_topics(timeout=30).topics:
        pass
    return "start"


def starts(kind: type[System], scale: Scale) -> Numbers:
    """Start to first acknowledgement: after a clean stop, and after kill -9 with a gigabyte in one log."""
    with alone(kind) as system:
        name = made_topic(system)
        kcat_produce(system, name, scale.log_records)
        system.stop()
        clean_s = first_ack_s(system, name)
        system.kill()
    with alone(kind) as system:
        name = made_topic(system)
        kcat_produce(system, name, scale.log_records)
        system.kill()
        killed_s = first_ack_s(system, name)
    return {"start after a clean stop s": clean_s, "start after a kill s": killed_s}


def memory(kind: type[System], scale: Scale) -> Numbers:
    """Resident memory of a broker that has just started, and what each of many idle partitions adds to it."""
    from confluent_kafka.admin import AdminClient, NewTopic

    with alone(kind) as system:
        time.sleep(SETTLE_S)
        idle_mb = system.memory_mb()
        admin = AdminClient({"bootstrap.servers": system.bootstrap, **QUIET})
        admin.create_topics([NewTopic("many", scale.partitions, 1)])["many"].result(120)
        time.sleep(SETTLE_S)
        each_kb = (system.memory_mb() - idle_mb) * 1024 / scale.partitions
        return {"idle memory MB": idle_mb, "memory per partition KB": each_kb}


SHARED: dict[str, Callable[[System, Scale], Numbers]] = {
    "produce": produce,
    "produce-java": produce_java,
    "produce-flushed": produce_flushed,
    "produce-spread": produce_spread,
    "consume": consume,
    "latency": latency,
    "create-topics": create_topics,
}
ALONE: dict[str, Callable[[type[System], Scale], Numbers]] = {"memory": memory, "starts": starts}
