"""Which partition a record goes to.

Owns the choices; `records._sending` has the hash and applies most of them without coming back here. There are two
kinds: a `Spreader` chooses a partition for the next batch of records that are not placed by their key, and a
callable is asked for every record. Invariants: the same key with the same number of partitions gives the partition
that Kafka's own producer gives (records of one key stay together whoever writes them); a spreader prefers
partitions with a leader. Called by `producer`.

| name | with a key | without |
|---|---|---|
| `default` | the key's murmur2 hash | sticky: one partition a batch, then another at random |
| `sticky` | as without | sticky |
| `load_aware` | the key's murmur2 hash | sticky, and leaders that answer slowly or throttle are chosen less often |
| `round_robin` | as without | each record to the next partition |
| `range` | by the order of keys: neighbours share a partition | the first partition |
"""

import random
from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

from headrace.client.cluster import NO_NODE, TopicInfo
from headrace.records.codec import key_partition, murmur2

__all__ = [
    "LoadAware",
    "NodeLoad",
    "PerRecord",
    "RangePartitioner",
    "RoundRobin",
    "Spreader",
    "Sticky",
    "key_partition",
    "murmur2",
    "named_partitioner",
]

ROUND_ROBIN_TOPICS_MAX = 10_000
KEY_BYTES_COMPARED = 8
LATENCY_SMOOTHING = 0.2
LATENCY_MS_MIN = 0.5
THROTTLED_WEIGHT = 0.01

PerRecord: TypeAlias = Callable[[TopicInfo, "bytes | None", "bytes | None"], int]


class Spreader(Protocol):
    """Chooses a partition for a batch of records that are not placed by their key."""

    by_key: bool

    def choose(self, topic: TopicInfo, previous: int) -> int:
        """The partition for the next batch; `previous` is that of the last, -1 at first."""
        ...


class NodeLoad:
    """How loaded a broker seems: its smoothed answer time, what waits for it, and whether it throttles."""

    __slots__ = ("in_flight", "latency_ms", "throttled_until_s")

    def __init__(self) -> None:
        self.latency_ms = 0.0
        self.in_flight = 0
        self.throttled_until_s = 0.0

    def answered(self, latency_ms: float) -> None:
        """One more produce request was answered after this time."""
        known = self.latency_ms or latency_ms
        self.latency_ms = known + (latency_ms - known) * LATENCY_SMOOTHING


class Sticky:
    """Any partition with a leader, but not the same twice in a row."""

    def __init__(self, source: random.Random, *, by_key: bool = True) -> None:
        self._random = source
        self.by_key = by_key

    def choose(self, topic: TopicInfo, previous: int) -> int:
        return self._random.choice(_candidates(topic, previous))


class LoadAware:
    """Partitions whose leaders are less loaded, more often.

    A partition's weight is one over its leader's smoothed answer time multiplied by one plus the requests that wait for
    it; a leader that throttles this client counts a hundredth until it stops. Leaders that were never asked count as
    the fastest known, so that each is tried.
    """

    def __init__(
        self, source: random.Random, loads: Mapping[int, NodeLoad], clock_s: Callable[[], float]
    ) -> None:
        self._random = source
        self._loads = loads
        self._clock_s = clock_s
        self.by_key = True

    def choose(self, topic: TopicInfo, previous: int) -> int:
        candidates = _candidates(topic, NO_NODE)
        weights = [self._weight(topic.partitions[number].leader) for number in candidates]
        return self._random.choices(candidates, weights)[0]

    def _weight(self, node_id: int) -> float:
        load = self._loads.get(node_id)
        known = [other.latency_ms for other in self._loads.values() if other.latency_ms]
        if load is None or not load.latency_ms:
            latency_ms, waiting = min(known, default=1.0), 0
        else:
            latency_ms, waiting = load.latency_ms, load.in_flight
        weight = 1 / (max(latency_ms, LATENCY_MS_MIN) * (1 + waiting))
        throttled = load is not None and load.throttled_until_s > self._clock_s()
        return weight * THROTTLED_WEIGHT if throttled else weight


class RoundRobin:
    """Each record to the next partition that has a leader, whatever its key."""

    def __init__(self) -> None:
        self._next: dict[str, int] = {}

    def __call__(self, topic: TopicInfo, key: bytes | None, value: bytes | None) -> int:
        candidates = _candidates(topic, NO_NODE)
        if len(self._next) >= ROUND_ROBIN_TOPICS_MAX:
            self._next.clear()
        at = self._next.get(topic.name, 0)
        self._next[topic.name] = at + 1
        return candidates[at % len(candidates)]


class RangePartitioner:
    """Partitions in the order of their keys.

    With boundaries b1 < b2 < …, keys below b1 go to partition 0, those from b1 to below b2 to partition 1, and so on;
    without, the space of all keys is cut into equal parts by their first eight bytes.
    """

    def __init__(self, boundaries: "list[bytes] | None" = None) -> None:
        if boundaries is not None and sorted(set(boundaries)) != boundaries:
            raise ValueError("boundaries must be ascending, each of them once")
        self._boundaries = boundaries

    def __call__(self, topic: TopicInfo, key: bytes | None, value: bytes | None) -> int:
        count = len(topic.partitions)
        if key is None:
            return 0
        if self._boundaries is not None:
            place = sum(key >= boundary for boundary in self._boundaries)
            return min(place, count - 1)
        head = int.from_bytes(key[:KEY_BYTES_COMPARED].ljust(KEY_BYTES_COMPARED, b"\0"), "big")
        return head * count >> (8 * KEY_BYTES_COMPARED)


def named_partitioner(
    name: str,
    *,
    ignore_keys: bool,
    source: random.Random,
    loads: Mapping[int, NodeLoad],
    clock_s: Callable[[], float],
) -> Spreader | PerRecord:
    """The partitioner that configuration names."""
    if name == "round_robin":
        return RoundRobin()
    if name == "range":
        return RangePartitioner()
    if name == "load_aware":
        spreader = LoadAware(source, loads, clock_s)
        spreader.by_key = not ignore_keys
        return spreader
    return Sticky(source, by_key=name == "default" and not ignore_keys)


def _candidates(topic: TopicInfo, previous: int) -> list[int]:
    led = [p.partition for p in topic.partitions.values() if p.leader != NO_NODE] or list(topic.partitions)
    return [partition for partition in led if partition != previous] or led
