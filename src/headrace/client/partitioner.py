"""Which partition a record goes to: by its key, as Kafka's Java client does it, or sticky when it has none.

Owns the hash and the choice. Invariants: the same key with the same number of partitions gives the partition
that Kafka's own producer gives (records of one key stay together whoever writes them); keyless records stay
on one partition until about a batch has gone there, then move to another with a leader. Called by `producer`.
"""

import random
from collections.abc import Callable
from functools import lru_cache
from struct import unpack_from
from typing import TypeAlias

from headrace.client.cluster import NO_NODE, TopicInfo

KEY_HASHES_CACHED_MAX = 4096
STICKY_TOPICS_MAX = 10_000

_SEED = 0x9747B28C
_M = 0x5BD1E995
_MASK = 0xFFFFFFFF

Partitioner: TypeAlias = Callable[[TopicInfo, bytes | None, int], int]


def murmur2(data: bytes) -> int:
    """Kafka's murmur2 of some bytes, as an unsigned 32-bit number (Java's, seen as unsigned)."""
    length = len(data)
    h = _SEED ^ length
    words = length // 4
    for k in unpack_from(f"<{words}I", data):
        k = k * _M & _MASK
        k = (k ^ (k >> 24)) * _M & _MASK
        h = h * _M & _MASK ^ k
    rest = data[words * 4 :]
    if rest:
        h ^= int.from_bytes(rest, "little")
        h = h * _M & _MASK
    h ^= h >> 13
    h = h * _M & _MASK
    return h ^ (h >> 15)


@lru_cache(KEY_HASHES_CACHED_MAX)
def positive_hash(key: bytes) -> int:
    """The hash of a key without its sign bit: what is taken modulo the number of partitions."""
    return murmur2(key) & 0x7FFFFFFF


class StickyPartitioner:
    """Kafka's default: by the key's hash, or sticky and uniform without a key."""

    def __init__(self, batch_size: int, source: random.Random) -> None:
        self._batch_size = batch_size
        self._random = source
        self._current: dict[str, tuple[int, int]] = {}

    def __call__(self, topic: TopicInfo, key: bytes | None, size_bytes: int) -> int:
        """The partition for a record of this size."""
        if key is not None:
            return positive_hash(key) % len(topic.partitions)
        current = self._current.get(topic.name)
        if (
            current is None
            or current[0] not in topic.partitions
            or current[1] + size_bytes > self._batch_size
        ):
            if len(self._current) >= STICKY_TOPICS_MAX:
                self._current.clear()
            current = (self._choose(topic, current[0] if current else NO_NODE), 0)
        self._current[topic.name] = (current[0], current[1] + size_bytes)
        return current[0]

    def _choose(self, topic: TopicInfo, previous: int) -> int:
        led = [p.partition for p in topic.partitions.values() if p.leader != NO_NODE] or list(
            topic.partitions
        )
        others = [partition for partition in led if partition != previous] or led
        return self._random.choice(others)
