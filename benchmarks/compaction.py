"""What compaction takes: megabytes of log a second of one core, and what a producer notices of it.

A compacted topic of 100-byte records over a million keys is filled by kcat while `min.compaction.lag.ms` keeps the
cleaner away; lowering it lets the cleaner begin. It is done when the checkpoint of cleaned offsets, a file that both
systems have, names the topic. The segment that is written to is not cleaned and not counted.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.systems import System, Unavailable
from benchmarks.workloads import QUIET, RECORD_BYTES, Numbers, Scale, kcat

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient

KEYS = 1_000_000
KEY_STEP = 617_051  # shares no factor with KEYS: all of them, in no order
SEGMENTS = 4  # in the smaller log
CHECKPOINT = "cleaner-offset-checkpoint"
LAG = "min.compaction.lag.ms"
FAR_MS = "1000000000"
CLEANED_S = 300.0
RATE_PER_S = 1000
IDLE_S = 10.0


def compaction(kind: type[System], scale: Scale) -> Numbers:
    """One log cleaned on an idle broker, for the processor time; another one while a producer is at work."""
    from confluent_kafka.admin import AdminClient

    system = kind(log_cleaner_backoff_ms="100")
    try:
        system.start()
        admin = AdminClient({"bootstrap.servers": system.bootstrap, **QUIET})
        first_bytes = _fill(system, admin, "first", scale, 1)
        _fill(system, admin, "second", scale, 4)
        begun_s, begun_cpu_s = time.monotonic(), system.cpu_s()
        _let_clean(admin, "first")
        while not _is_cleaned(system, "first"):
            _check(begun_s)
            time.sleep(0.02)
        megabytes_per_cpu_s = first_bytes / 1e6 / (system.cpu_s() - begun_cpu_s)
        idle_ends_s = time.monotonic() + IDLE_S
        idle_ms = _acknowledged_ms(system, lambda: time.monotonic() > idle_ends_s)
        _let_clean(admin, "second")
        busy_ms = _acknowledged_ms(system, lambda: _is_cleaned(system, "second"))
    finally:
        system.remove()
    return {
        "compaction MB/s a core": megabytes_per_cpu_s,
        "produce p99 idle ms": idle_ms,
        "produce p99 compacting ms": busy_ms,
        "produce p99 of its idle value": busy_ms / idle_ms,
    }


def _lines(system: System, count: int) -> Path:
    path = system.directory / "keys.txt"
    if not path.exists():
        value = "x" * (RECORD_BYTES - 8)
        with path.open("w") as out:
            for block in range(0, count, 10_000):
                out.writelines(
                    f"{number * KEY_STEP % KEYS:08d}\t{value}\n" for number in range(block, block + 10_000)
                )
    return path


def _fill(system: System, admin: "AdminClient", name: str, scale: Scale, times: int) -> int:
    """A compacted topic, filled several times over, and the bytes of it that may be cleaned."""
    from confluent_kafka.admin import NewTopic

    config = {
        "cleanup.policy": "compact",
        "segment.bytes": str(scale.records * RECORD_BYTES // SEGMENTS),
        "min.cleanable.dirty.ratio": "0.01",
        LAG: FAR_MS,
    }
    admin.create_topics([NewTopic(name, 1, system.replicas, config=config)])[name].result(60)
    settings = ["-X", "linger.ms=5", "-X", "batch.size=1000000", "-X", "queue.buffering.max.messages=1000000"]
    lines = str(_lines(system, scale.records))
    for _ in range(times):
        kcat("-P", "-b", system.bootstrap, "-t", name, "-K", "\t", *settings, "-l", lines)
    segments = sorted(system.directory.glob(f"**/{name}-0/*.log"))
    if len(segments) < 2:
        raise Unavailable(f"{scale.records} records are too few to be compacted")
    return sum(path.stat().st_size for path in segments[:-1])


def _let_clean(admin: "AdminClient", name: str) -> None:
    from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource

    entry = ConfigEntry(LAG, "0", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource("topic", name, incremental_configs=[entry])
    admin.incremental_alter_configs([resource])[resource].result(60)


def _is_cleaned(system: System, name: str) -> bool:
    return any(
        line.startswith(f"{name} 0 ") and not line.endswith(" 0")
        for path in system.directory.glob(f"**/{CHECKPOINT}")
        for line in path.read_text().splitlines()
    )


def _check(begun_s: float) -> None:
    if time.monotonic() - begun_s > CLEANED_S:
        raise Unavailable(f"nothing was compacted within {CLEANED_S:.0f} s")


def _acknowledged_ms(system: System, is_over: Callable[[], bool]) -> float:
    """The 99th percentile of the time to an acknowledgement at a steady rate, until `is_over`."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": system.bootstrap, "acks": "1", "linger.ms": 0, **QUIET})
    took_ms: list[float] = []

    def send(count: int) -> None:
        sent_s = time.perf_counter()

        def told(error: object, message: object) -> None:
            if count > RATE_PER_S and error is None:  # the first second does not count
                took_ms.append((time.perf_counter() - sent_s) * 1000)

        producer.produce("latency", b"x" * RECORD_BYTES, partition=0, on_delivery=told)

    begun_s = time.monotonic()
    count = 0
    while count <= 2 * RATE_PER_S or not (count % 100 == 0 and is_over()):
        while time.monotonic() < begun_s + count / RATE_PER_S:
            time.sleep(0.0001)
            producer.poll(0)
        count += 1
        send(count)
        producer.poll(0)
        _check(begun_s)
    producer.flush(30)
    return statistics.quantiles(took_ms, n=100)[98]


COMPACTION = {"compaction": compaction}
