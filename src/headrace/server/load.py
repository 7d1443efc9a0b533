"""What this broker has to do, measured: for the controller, which hears it with every heartbeat.

Owns the counts at the last measurement. Invariant: rates are over the time since then, by the monotonic clock, so a
clock that jumps measures nothing wrong. Called by the registration; the session charges bytes to `Traffic`.
"""

import os
import resource

from headrace.base.clock import Clock
from headrace.cluster.control_messages import BrokerLoad
from headrace.security.authorizer import Principal
from headrace.security.quotas import Flow
from headrace.server.broker import Broker
from headrace.server.peers import Peers

SPAN_MIN_MS = 50.0
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


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
        self._messages: dict[tuple[str, int], int] = {}
        self._last = BrokerLoad()

    def measure(self) -> BrokerLoad:
        """The load since the last call, or what that said when it was a moment ago."""
        now_ms = self._clock.monotonic_ms()
        span_s = (now_ms - self._at_ms) / 1000
        if span_s * 1000 < SPAN_MIN_MS:
            return self._last
        broker, traffic, cpu_s = self._broker, self._traffic, _cpu_s()
        ends = {
            (partition.topic, partition.index): partition.log.log_end_offset
            for partition in broker.replicas.table
            if partition.is_leader
        }
        received, sent = self._peers.traffic()
        bytes_in, bytes_out = traffic.bytes_in + received, traffic.bytes_out + sent
        grown = sum(end - self._messages[key] for key, end in ends.items() if key in self._messages)
        sizes = broker.logs.sizes()
        self._last = BrokerLoad(
            cpu=(cpu_s - self._cpu_s) / span_s,
            memory_bytes=_memory_bytes(),
            disk_bytes=sum(size.size_bytes for size in sizes),
            disk_free_bytes=broker.logs.fs.free_bytes(),
            bytes_in=(bytes_in - self._bytes_in) / span_s,
            bytes_out=(bytes_out - self._bytes_out) / span_s,
            messages_in=max(0, grown) / span_s,
            partitions=len(sizes),
            leaders=len(ends),
        )
        self._at_ms, self._cpu_s, self._messages = now_ms, cpu_s, ends
        self._bytes_in, self._bytes_out = bytes_in, bytes_out
        return self._last


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
