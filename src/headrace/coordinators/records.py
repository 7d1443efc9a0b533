"""The records of `__consumer_offsets`, byte for byte as Kafka writes them, so that tools that read the topic work.

A key begins with a version that also says what the record is: 0 and 1 an offset, 2 a classic group. Values have
versions of their own. Offsets are written as version 3 (version 1 when the client set a time of expiry), groups as
version 3, as Kafka 4 does; every version that Kafka ever wrote is read, the flexible version 4 too. Invariant: what is
encoded here decodes to the same. Keys of other kinds decode to None; those of the consumer protocol are in
`consumer_records`. The runtime's replay and the group shard call it.
"""

import struct
from functools import lru_cache
from typing import Final, NamedTuple

from headrace.base.errors import ErrorCode, KafkaError
from headrace.coordinators.record_reader import RecordReader

OFFSET_KEY_VERSION: Final = 1
GROUP_KEY_VERSION: Final = 2
VALUE_VERSION: Final = 3
EXPIRING_VALUE_VERSION: Final = 1
FLEXIBLE_FROM: Final = 4
NEVER: Final = -1
KEYS_REMEMBERED_MAX: Final = 8192
"""Of offsets: consumers commit the same partitions again and again."""
KEY_REMEMBERED_BYTES_MAX: Final = 512

_SHORT = struct.Struct(">h")
_INT = struct.Struct(">i")
_LONG = struct.Struct(">q")
_PLAIN_OFFSET = struct.Struct(">hqih")
_BARE_OFFSET = struct.Struct(">hqihq")
_OFFSET_KEYS = (_SHORT.pack(OFFSET_KEY_VERSION), _SHORT.pack(0))
_PLAIN_VERSION = _SHORT.pack(VALUE_VERSION)
_new_tuple = tuple.__new__  # a named tuple's own takes three times as long


class OffsetKey(NamedTuple):
    """Whose offset, of which partition."""

    group: str
    topic: str
    partition: int


class GroupKey(NamedTuple):
    """A classic group."""

    group: str


class OffsetValue(NamedTuple):
    """A committed offset."""

    offset: int
    leader_epoch: int
    metadata: str
    commit_timestamp_ms: int
    expire_timestamp_ms: int = NEVER


class MemberValue(NamedTuple):
    """A member of a classic group in its generation."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    rebalance_timeout_ms: int
    session_timeout_ms: int
    subscription: bytes
    assignment: bytes


class GroupValue(NamedTuple):
    """A classic group as of one generation."""

    protocol_type: str
    generation: int
    protocol: str | None
    leader: str | None
    state_timestamp_ms: int
    members: tuple[MemberValue, ...]


def offset_key(group: str, topic: str, partition: int) -> bytes:
    if len(group) < KEY_REMEMBERED_BYTES_MAX:
        return _remembered_offset_key(group, topic, partition)
    return _new_offset_key(group, topic, partition)


def _new_offset_key(group: str, topic: str, partition: int) -> bytes:
    return b"".join((_SHORT.pack(OFFSET_KEY_VERSION), _string(group), _string(topic), _INT.pack(partition)))


_remembered_offset_key = lru_cache(maxsize=KEYS_REMEMBERED_MAX)(_new_offset_key)


def group_key(group: str) -> bytes:
    return _SHORT.pack(GROUP_KEY_VERSION) + _string(group)


def offset_value(value: OffsetValue | tuple[int, int, str, int, int]) -> bytes:
    offset, epoch, metadata, committed_ms, expires_ms = value
    if expires_ms != NEVER:
        return b"".join(
            (
                _SHORT.pack(EXPIRING_VALUE_VERSION),
                _LONG.pack(offset),
                _string(metadata),
                _LONG.pack(committed_ms),
                _LONG.pack(expires_ms),
            )
        )
    if not metadata:
        return bare_offset_value(offset, epoch, committed_ms)
    data = metadata.encode()
    return _PLAIN_OFFSET.pack(VALUE_VERSION, offset, epoch, len(data)) + data + _LONG.pack(committed_ms)


def bare_offset_value(offset: int, epoch: int, committed_ms: int) -> bytes:
    """An offset without metadata that does not expire by itself."""
    return _BARE_OFFSET.pack(VALUE_VERSION, offset, epoch, 0, committed_ms)


def group_value(value: GroupValue) -> bytes:
    parts = [
        _SHORT.pack(VALUE_VERSION),
        _string(value.protocol_type),
        _INT.pack(value.generation),
        _string(value.protocol),
        _string(value.leader),
        _LONG.pack(value.state_timestamp_ms),
        _INT.pack(len(value.members)),
    ]
    for member in value.members:
        parts += (
            _string(member.member_id),
            _string(member.instance_id),
            _string(member.client_id),
            _string(member.client_host),
            _INT.pack(member.rebalance_timeout_ms),
            _INT.pack(member.session_timeout_ms),
            _INT.pack(len(member.subscription)),
            member.subscription,
            _INT.pack(len(member.assignment)),
            member.assignment,
        )
    return b"".join(parts)


def decode_key(data: bytes) -> OffsetKey | GroupKey | None:
    """What a record is about; None for kinds that are not known here."""
    if data[:2] in _OFFSET_KEYS:
        remembered = len(data) <= KEY_REMEMBERED_BYTES_MAX
        return _remembered_plain_key(data) if remembered else _plain_offset_key(data)
    reader = RecordReader(data)
    version = reader.int16()
    if version == GROUP_KEY_VERSION:
        return GroupKey(reader.text())
    return None


def _plain_offset_key(data: bytes) -> OffsetKey:
    """By position, not by cursor: a restart decodes one for every commit that was ever made."""
    try:
        topic_at = 4 + _SHORT.unpack_from(data, 2)[0]
        end = topic_at + 2 + _SHORT.unpack_from(data, topic_at)[0]
        if topic_at >= 4 and topic_at + 2 <= end:
            group, topic = str(data[4:topic_at], "utf-8"), str(data[topic_at + 2 : end], "utf-8")
            return OffsetKey(group, topic, _INT.unpack_from(data, end)[0])
    except (struct.error, UnicodeDecodeError):
        pass
    raise KafkaError(ErrorCode.CORRUPT_MESSAGE, "a key of an offset is cut short")


_remembered_plain_key = lru_cache(maxsize=KEYS_REMEMBERED_MAX)(_plain_offset_key)


def decode_offset(data: bytes) -> OffsetValue:
    if data[:2] == _PLAIN_VERSION:
        return _plain_offset(data)
    reader = RecordReader(data)
    version = reader.version(FLEXIBLE_FROM, FLEXIBLE_FROM)
    offset = reader.int64()
    leader_epoch = reader.int32() if version >= FLEXIBLE_FROM else -1
    metadata = reader.text()
    committed_ms = reader.int64()
    expires_ms = reader.int64() if version == EXPIRING_VALUE_VERSION else NEVER
    return OffsetValue(offset, leader_epoch, metadata, committed_ms, expires_ms)


def _plain_offset(data: bytes) -> OffsetValue:
    """Version 3, which all but a few are: by position too."""
    try:
        if len(data) == _BARE_OFFSET.size:
            _, offset, leader_epoch, size, committed_ms = _BARE_OFFSET.unpack(data)
            if size == 0:
                return _new_tuple(OffsetValue, (offset, leader_epoch, "", committed_ms, NEVER))
        _, offset, leader_epoch, size = _PLAIN_OFFSET.unpack_from(data)
        end = _PLAIN_OFFSET.size + size
        if size >= 0:
            metadata = str(data[_PLAIN_OFFSET.size : end], "utf-8")
            return OffsetValue(offset, leader_epoch, metadata, _LONG.unpack_from(data, end)[0])
    except (struct.error, UnicodeDecodeError):
        pass
    raise KafkaError(ErrorCode.CORRUPT_MESSAGE, "the value of an offset is cut short")


def decode_group(data: bytes) -> GroupValue:
    reader = RecordReader(data)
    version = reader.version(FLEXIBLE_FROM, FLEXIBLE_FROM)
    protocol_type = reader.text()
    generation = reader.int32()
    protocol, leader = reader.optional_text(), reader.optional_text()
    timestamp_ms = reader.int64() if version >= 2 else -1
    members = tuple([_member(reader, version) for _ in range(reader.count())])
    return GroupValue(protocol_type, generation, protocol, leader, timestamp_ms, members)


def _member(reader: RecordReader, version: int) -> MemberValue:
    member_id = reader.text()
    instance_id = reader.optional_text() if version >= 3 else None
    client_id, client_host = reader.text(), reader.text()
    rebalance_ms = reader.int32() if version >= 1 else -1
    session_ms = reader.int32()
    subscription, assignment = reader.blob(), reader.blob()
    reader.skip_tags()
    if rebalance_ms < 0:
        rebalance_ms = session_ms
    return MemberValue(
        member_id, instance_id, client_id, client_host, rebalance_ms, session_ms, subscription, assignment
    )


def subscribed_topics(metadata: bytes) -> set[str] | None:
    """The topics that a consumer's protocol metadata names; None when it is not a consumer's."""
    try:
        reader = RecordReader(metadata)
        reader.int16()
        return {reader.text() for _ in range(reader.count())}
    except KafkaError:
        return None


def _string(text: str | None) -> bytes:
    if text is None:
        return b"\xff\xff"
    data = text.encode()
    return _SHORT.pack(len(data)) + data
