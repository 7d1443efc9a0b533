"""Which partition of the internal topic a group or transactional id belongs to: Java's String.hashCode, as Kafka."""

from functools import lru_cache
from typing import Final

PLACES_REMEMBERED_MAX: Final = 8192
LONG_PLACES_REMEMBERED_MAX: Final = 64
LONG: Final = 512
_INT_MIN: Final = -(2**31)


def java_hash(text: str) -> int:
    """String.hashCode: over UTF-16 units, wrapping at 32 bits, signed."""
    data = text.encode("utf-16-be", "surrogatepass")
    value = 0
    for position in range(0, len(data), 2):
        value = (value * 31 + (data[position] << 8) + data[position + 1]) & 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def partition_for(key: str, count: int) -> int:
    """The partition of the internal topic that holds a key's records."""
    return _short_place(key, count) if len(key) < LONG else _long_place(key, count)


def _place(key: str, count: int) -> int:
    number = java_hash(key)
    return 0 if number == _INT_MIN else abs(number) % count


_short_place = lru_cache(maxsize=PLACES_REMEMBERED_MAX)(_place)
_long_place = lru_cache(maxsize=LONG_PLACES_REMEMBERED_MAX)(_place)
"""Ids may be 32 KB long: few of those are kept."""
