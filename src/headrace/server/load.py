"""What this broker has to do, measured: for the controller, which hears it with every heartbeat.

Owns the counts at the last measurement. Invariants: rates are over the time since then, by the monotonic clock, so a
clock that jumps measures nothing wrong; partitions are named only as far as they are among the heaviest, so a report
does not grow with their number. Called by the registration; the session charges bytes to `Traffic`.
"""

import os
import resource
from collections.abc import Mapping, Sequence
from heapq import nlargest
from typing import TypeAlias

from headrace.base.clock import Clock
from headrace.cluster.control_messages import BrokerLoad, PartitionLoad
from headrace.security.authorizer import Principal
from headrace.security.quotas import Flow
from headrace.server.broker import Broker
from headrace.server.peers import Peers
from headrace.storage.manager import LogSize

SPAN_MIN_MS = 50.0
HEAVIEST_MAX = 16
"""How many partitions are named for each measure. If so many are each too heavy to go to the broker that has least,
then that has more than seven eighths of what this one has, and nothing needs to go."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

Key: TypeAlias = tuple[str, int]
"""Topic and index of a partition."""
Counts: TypeAlias = tuple[int, int, int]
"""End offset, size, and bytes out of a partition."""


class Traffic:
    """Quotas without limits that count what goes in and out."""

    def __init__(self) -> None:
        self.bytes_in = 0
        self.bytes_out = 0

    def charge(self, flow: Flow, principal: Principal, client_id: str | None, size: int) -> int:
        if flow is Flow.IN:
            self.bytes_in += size
        else:
            self.bytes_out += size
        return 0


class LoadMeter:
    """See the module."""

    def __init__(self, broker: Broker, traffic: Traffic, peers: Peers, clock: Clock) -> None:
        self._broker = broker
        self._traffic = traffic
        self._peers = peers
        self._clock = clock
        self._at_ms = clock.monotonic_ms()
        self._cpu_s = _cpu_s()
        self._bytes_in = self._bytes_out = 0
        self._counts: dict[Key, Counts] = {}
        self._last = BrokerLoad()

    def measure(self) -> BrokerLoad:
        """The load since the last call, or what that said when it was a moment ago."""
        now_ms = self._clock.monotonic_ms()
        span_s = (now_ms - self._at_ms) / 1000
        if span_s * 1000 < SPAN_MIN_MS:
            return self._last
        broker, traffic, cpu_s = self._broker, self._traffic, _cpu_s()
        received, sent = self._peers.traffic()
        bytes_in, bytes_out = traffic.bytes_in + received, traffic.bytes_out + sent
        busy = self._measure_busy(span_s)
        sizes = broker.logs.sizes()
        self._last = BrokerLoad(
            cpu=(cpu_s - self._cpu_s) / span_s,
            memory_bytes=_memory_bytes(),
            disk_bytes=sum(size.size_bytes for size in sizes),
            disk_free_bytes=broker.logs.fs.free_bytes(),
            bytes_in=(bytes_in - self._bytes_in) / span_s,
            bytes_out=(bytes_out - self._bytes_out) / span_s,
            messages_in=sum(part.messages_in for part in busy.values()),
            partitions=len(sizes),
            leaders=sum(partition.is_leader for partition in broker.replicas.table),
            heaviest=_heaviest(busy, sizes),
        )
        self._at_ms, self._cpu_s = now_ms, cpu_s
        self._bytes_in, self._bytes_out = bytes_in, bytes_out
        return self._last

    def _measure_busy(self, span_s: float) -> dict[Key, PartitionLoad]:
        """What partitions took and gave since the last measurement, those that did.

        What a leader's log grew by is what came in. One that shrank says nothing: its oldest segments were deleted.
        """
        counts: dict[Key, Counts] = {}
        busy: dict[Key, PartitionLoad] = {}
        for partition in self._broker.replicas.table:
            log, key = partition.log, (partition.topic, partition.index)
            now = counts[key] = (log.log_end_offset, log.size_bytes, partition.bytes_out)
            before = self._counts.get(key, now)
            if now != before:
                messages, bytes_in, bytes_out = [
                    max(0, n - b) / span_s for n, b in zip(now, before, strict=True)
                ]
                if not partition.is_leader:
                    messages = bytes_in = 0.0
                busy[key] = PartitionLoad(*key, log.size_bytes, bytes_in, bytes_out, messages)
        self._counts = counts
        return busy


def _heaviest(busy: Mapping[Key, PartitionLoad], sizes: Sequence[LogSize]) -> tuple[PartitionLoad, ...]:
    """Those with most of each measure."""
    parts = busy.values()
    found = nlargest(HEAVIEST_MAX, parts, lambda part: part.bytes_in + part.bytes_out)
    found += nlargest(HEAVIEST_MAX, parts, lambda part: part.messages_in)
    for size in nlargest(HEAVIEST_MAX, sizes, lambda size: size.size_bytes):
        quiet = PartitionLoad(size.topic, size.partition, size.size_bytes)
        found.append(busy.get((size.topic, size.partition), quiet))
    return tuple({(part.topic, part.index): part for part in found}.values())


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _memory_bytes() -> int:
    """What is resident now; where the system does not tell that, the most there ever was."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
