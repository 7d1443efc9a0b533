"""What members of a classic group tell each other through the coordinator: subscriptions and assignments.

Owns the bytes of Kafka's consumer protocol, versions 0 to 3, and of the sticky assignor's user data. The coordinator
never reads them; members of other clients do. Invariant: a version newer than ours is read as far as it is known,
because newer fields only follow. Pure. Called by `classic_member` and `assignors`.
"""

from collections.abc import Iterable, Mapping
from struct import Struct
from struct import error as StructError
from typing import NamedTuple

from headrace.base.errors import ErrorCode, KafkaError
from headrace.client.topics import TopicPartition

VERSION = 3
NO_GENERATION = -1

_I16 = Struct(">h")
_I32 = Struct(">i")


class Subscription(NamedTuple):
    """What one member wants and has."""

    topics: tuple[str, ...]
    owned: frozenset[TopicPartition] = frozenset()
    generation: int = NO_GENERATION
    rack: str | None = None
    user_data: bytes | None = None


def encode_subscription(subscription: Subscription) -> bytes:
    """The bytes of a member's metadata."""
    out = bytearray(_I16.pack(VERSION))
    out += _I32.pack(len(subscription.topics))
    for topic in sorted(subscription.topics):
        _put_string(out, topic)
    _put_bytes(out, subscription.user_data)
    _put_partitions(out, subscription.owned)
    out += _I32.pack(subscription.generation)
    if subscription.rack:
        _put_string(out, subscription.rack)
    else:
        out += _I16.pack(-1)
    return bytes(out)


def decode_subscription(data: bytes) -> Subscription:
    """A member's metadata. Raises KafkaError."""
    try:
        read = _Reading(data)
        version = read.i16()
        topics = tuple(read.string() or "" for _ in range(read.i32()))
        user_data = read.nullable_bytes()
        owned = read.partitions() if version >= 1 and read.more else frozenset()
        generation = read.i32() if version >= 2 and read.more else NO_GENERATION
        rack = read.string() if version >= 3 and read.more else None
    except (StructError, UnicodeDecodeError):
        raise _unreadable("subscription") from None
    return Subscription(topics, owned, generation, rack, user_data)


def encode_assignment(partitions: Iterable[TopicPartition]) -> bytes:
    """The bytes of one member's assignment."""
    out = bytearray(_I16.pack(VERSION))
    _put_partitions(out, partitions)
    _put_bytes(out, None)
    return bytes(out)


def decode_assignment(data: bytes) -> frozenset[TopicPartition]:
    """One member's assignment; no bytes are no partitions. Raises KafkaError."""
    if not data:
        return frozenset()
    try:
        read = _Reading(data)
        read.i16()
        return read.partitions()
    except (StructError, UnicodeDecodeError):
        raise _unreadable("assignment") from None


def encode_sticky_data(owned: Iterable[TopicPartition], generation: int) -> bytes:
    """The user data of the eager sticky assignor: what the member had, and when."""
    out = bytearray()
    _put_partitions(out, owned)
    out += _I32.pack(generation)
    return bytes(out)


def decode_sticky_data(data: bytes | None) -> tuple[frozenset[TopicPartition], int]:
    """What `encode_sticky_data` wrote; nothing when it cannot be read, for then stickiness is all that is lost."""
    if not data:
        return frozenset(), NO_GENERATION
    try:
        read = _Reading(data)
        owned = read.partitions()
        return owned, read.i32() if read.more else NO_GENERATION
    except (StructError, UnicodeDecodeError):
        return frozenset(), NO_GENERATION


def by_topic(partitions: Iterable[TopicPartition]) -> Mapping[str, list[int]]:
    """Partition numbers by topic, both sorted."""
    grouped: dict[str, list[int]] = {}
    for topic, number in sorted(partitions):
        grouped.setdefault(topic, []).append(number)
    return grouped


def _unreadable(what: str) -> KafkaError:
    return KafkaError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL, f"a member's {what} cannot be read")


def _put_string(out: bytearray, text: str) -> None:
    raw = text.encode()
    out += _I16.pack(len(raw))
    out += raw


def _put_bytes(out: bytearray, data: bytes | None) -> None:
    out += _I32.pack(-1 if data is None else len(data))
    out += data or b""


def _put_partitions(out: bytearray, partitions: Iterable[TopicPartition]) -> None:
    grouped = by_topic(partitions)
    out += _I32.pack(len(grouped))
    for topic, numbers in grouped.items():
        _put_string(out, topic)
        out += _I32.pack(len(numbers))
        for number in numbers:
            out += _I32.pack(number)


class _Reading:
    """A position in the bytes of a member."""

    def __init__(self, data: bytes) -> None:
        self._data = bytes(data)
        self._pos = 0

    @property
    def more(self) -> bool:
        return self._pos < len(self._data)

    def i16(self) -> int:
        (value,) = _I16.unpack_from(self._data, self._pos)
        self._pos += 2
        return int(value)

    def i32(self) -> int:
        (value,) = _I32.unpack_from(self._data, self._pos)
        self._pos += 4
        return int(value)

    def string(self) -> str | None:
        length = self.i16()
        return None if length < 0 else self._take(length).decode()

    def nullable_bytes(self) -> bytes | None:
        length = self.i32()
        return None if length < 0 else self._take(length)

    def partitions(self) -> frozenset[TopicPartition]:
        found = set()
        for _ in range(self.i32()):
            topic = self.string() or ""
            for _ in range(self.i32()):
                found.add(TopicPartition(topic, self.i32()))
        return frozenset(found)

    def _take(self, length: int) -> bytes:
        if length > len(self._data) - self._pos:
            raise StructError("cut short")
        taken = self._data[self._pos : self._pos + length]
        self._pos += length
        return taken
