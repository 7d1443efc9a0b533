"""OffsetCommit by hand: consumers send more of it than of anything but Fetch and heartbeats.

Reads a request into plain tuples in one pass, and writes the reply the same way. Most commits are of one partition
without metadata: such a request ends in a tail of fixed size that holds the offset, and all before it, the head, is the
same for every commit of that consumer. Whoever remembers how a head was read has a commit for a look-up.
Invariants: every version that is served reads and writes exactly what the schema-driven codec does (tests compare
them); a length is checked against the bytes that are there before anything is made of it. The commit handler is the
caller.
"""

from collections.abc import Sequence
from functools import lru_cache
from struct import Struct
from struct import error as StructError
from typing import NamedTuple, TypeAlias

from headrace.wire.primitives import Buffer, Malformed, read_uvarint, write_uvarint

RETENTION_UNTIL, LEADER_EPOCH_FROM, INSTANCE_FROM = 4, 6, 7
THROTTLE_FROM, FLEXIBLE_FROM, TOPIC_IDS_FROM = 3, 8, 10
ID_SIZE = 16
PARTITION_BYTES_MIN = 13
HEAD_BYTES_MAX = 384
"""Longer ones are not worth to be remembered."""
REPLIES_REMEMBERED_MAX = 4096

_SHORT, _INT, _LONG = Struct(">h"), Struct(">i"), Struct(">q")
_PARTITION, _PARTITION_OLD = Struct(">iqi"), Struct(">iq")
_RESULT = Struct(">ih")
_TAIL = Struct(">qi")
TAIL_BYTES = 16
"""Offset and leader epoch of the last partition, and four bytes: no metadata, no tagged fields."""
_TAILS = (b"\x01\x00\x00\x00", b"\x00\x00\x00\x00")
_NO_METADATA = (b"\x01\x00", b"\x00\x00")  # empty or null, and no tagged fields
_NO_MEMBER = b"\x01\x00"  # an empty member id and a null instance id, as consumers without a group send

TopicKey: TypeAlias = str | bytes
"""A topic's name, or its id in the versions that have ids."""
Wanted: TypeAlias = list[tuple[int, int, int, str]]
"""Partition, offset, leader epoch, metadata."""


class OffsetCommitRequest(NamedTuple):
    """What a client wants to have committed."""

    group_id: str
    generation: int
    member_id: str
    instance_id: str | None
    retention_ms: int
    topics: list[tuple[TopicKey, Wanted]]


class CommitHead(NamedTuple):
    """A commit of one partition without metadata, but for the offset and its leader epoch."""

    group_id: str
    generation: int
    member_id: str
    instance_id: str | None
    topic: TopicKey
    partition: int


def split_commit(version: int, data: bytes) -> tuple[bytes, int, int] | None:
    """The head, the offset and its leader epoch of a request that may be a commit of one partition; None if not."""
    at = len(data) - TAIL_BYTES
    if not 0 < at <= HEAD_BYTES_MAX or version < FLEXIBLE_FROM or data[at + 12 :] not in _TAILS:
        return None
    offset, leader_epoch = _TAIL.unpack_from(data, at)
    return data[:at], offset, leader_epoch


def read_commit_head(version: int, data: bytes) -> CommitHead | None:
    """A head as it was split off; None when the request is of another kind after all, or malformed."""
    try:
        group_id, pos = _text(data, 0, True)
        (generation,) = _INT.unpack_from(data, pos)
        member_id, pos = _text(data, pos + 4, True)
        instance_id, pos = _optional_text(data, pos, True)
        topics, pos = _count(data, pos, True, 1)
        if topics != 1:
            return None
        key: TopicKey
        if version >= TOPIC_IDS_FROM:
            key, pos = data[pos : pos + ID_SIZE], pos + ID_SIZE
        else:
            key, pos = _text(data, pos, True)
        partitions, pos = _count(data, pos, True, 1)
        if partitions != 1 or pos + 4 != len(data):
            return None
        (index,) = _INT.unpack_from(data, pos)
    except (Malformed, StructError):
        return None
    return CommitHead(group_id, generation, member_id, instance_id, key, index)


def read_offset_commit(version: int, data: bytes) -> OffsetCommitRequest:
    """The request of this body. Raises Malformed."""
    try:
        return _read(version, data, 0)
    except StructError:
        raise Malformed("message cut short") from None


def _read(version: int, buf: Buffer, pos: int) -> OffsetCommitRequest:
    flexible = version >= FLEXIBLE_FROM
    group_id, pos = _text(buf, pos, flexible)
    (generation,) = _INT.unpack_from(buf, pos)
    pos += 4
    if flexible and buf[pos : pos + 2] == _NO_MEMBER:
        member_id, instance_id, pos = "", None, pos + 2
    else:
        member_id, pos = _text(buf, pos, flexible)
        instance_id = None
        if version >= INSTANCE_FROM:
            instance_id, pos = _optional_text(buf, pos, flexible)
    retention_ms = -1
    if version <= RETENTION_UNTIL:
        (retention_ms,) = _LONG.unpack_from(buf, pos)
        pos += 8
    count, pos = _count(buf, pos, flexible, 1)
    topics: list[tuple[TopicKey, Wanted]] = []
    for _ in range(count):
        key: TopicKey
        if version >= TOPIC_IDS_FROM:
            key, pos = bytes(buf[pos : pos + ID_SIZE]), pos + ID_SIZE
        else:
            key, pos = _text(buf, pos, flexible)
        wanted, pos = _partitions(version, buf, pos, flexible)
        topics.append((key, wanted))
        if flexible:
            pos = _skip_tags(buf, pos)
    if flexible:
        _skip_tags(buf, pos)
    return OffsetCommitRequest(group_id, generation, member_id, instance_id, retention_ms, topics)


def _partitions(version: int, buf: Buffer, pos: int, flexible: bool) -> tuple[Wanted, int]:
    count, pos = _count(buf, pos, flexible, PARTITION_BYTES_MIN)
    wanted: Wanted = []
    for _ in range(count):
        if version >= LEADER_EPOCH_FROM:
            index, offset, epoch = _PARTITION.unpack_from(buf, pos)
            pos += 16
        else:
            index, offset = _PARTITION_OLD.unpack_from(buf, pos)
            epoch = -1
            pos += 12
        if flexible and buf[pos : pos + 2] in _NO_METADATA:
            wanted.append((index, offset, epoch, ""))
            pos += 2
            continue
        metadata, pos = _optional_text(buf, pos, flexible)
        wanted.append((index, offset, epoch, metadata or ""))
        if flexible:
            pos = _skip_tags(buf, pos)
    return wanted, pos


def _optional_text(buf: Buffer, pos: int, flexible: bool) -> tuple[str | None, int]:
    if flexible:
        size = buf[pos] if pos < len(buf) else 0x80
        pos += 1
        if size >= 0x80:
            size, pos = read_uvarint(buf, pos - 1)
        size -= 1
    else:
        (size,) = _SHORT.unpack_from(buf, pos)
        pos += 2
    if size < 0:
        if size == -1:
            return None, pos
        raise Malformed("a string of negative length")
    end = pos + size
    if end > len(buf):
        raise Malformed("a string longer than its message")
    try:
        return str(buf[pos:end], "utf-8"), end
    except UnicodeDecodeError:
        raise Malformed("a string is not UTF-8") from None


def _text(buf: Buffer, pos: int, flexible: bool) -> tuple[str, int]:
    if flexible and pos < len(buf) and 0 < (size := buf[pos]) < 0x80 and pos + size <= len(buf):
        try:
            return str(buf[pos + 1 : pos + size], "utf-8"), pos + size
        except UnicodeDecodeError:
            raise Malformed("a string is not UTF-8") from None
    found, pos = _optional_text(buf, pos, flexible)
    if found is None:
        raise Malformed("a string may not be null")
    return found, pos


def _count(buf: Buffer, pos: int, flexible: bool, size_min: int) -> tuple[int, int]:
    if flexible:
        count, pos = read_uvarint(buf, pos)
        count -= 1
    else:
        (count,) = _INT.unpack_from(buf, pos)
        pos += 4
    if count < 0:
        raise Malformed("an array may not be null")
    if count * size_min > len(buf) - pos:
        raise Malformed("an array longer than its message")
    return count, pos


def _skip_tags(buf: Buffer, pos: int) -> int:
    if pos < len(buf) and buf[pos] == 0:
        return pos + 1
    count, pos = read_uvarint(buf, pos)
    for _ in range(count):
        _, pos = read_uvarint(buf, pos)
        size, pos = read_uvarint(buf, pos)
        pos += size
        if pos > len(buf):
            raise Malformed("tagged field longer than its message")
    return pos


def write_offset_commit_reply(
    version: int, throttle_ms: int, topics: Sequence[tuple[TopicKey, Sequence[tuple[int, int]]]]
) -> bytes:
    """The reply: of each topic, the error of each partition."""
    flexible = version >= FLEXIBLE_FROM
    out = bytearray(_INT.pack(throttle_ms) if version >= THROTTLE_FROM else b"")
    _write_count(out, len(topics), flexible)
    for key, results in topics:
        if isinstance(key, bytes):
            out += key
        else:
            data = key.encode()
            if flexible:
                write_uvarint(out, len(data) + 1)
            else:
                out += _SHORT.pack(len(data))
            out += data
        _write_count(out, len(results), flexible)
        for index, error in results:
            out += _RESULT.pack(index, error)
            if flexible:
                out.append(0)
        if flexible:
            out.append(0)
    if flexible:
        out.append(0)
    return bytes(out)


def _one_reply(version: int, throttle_ms: int, key: TopicKey, index: int, error: int) -> bytes:
    return write_offset_commit_reply(version, throttle_ms, [(key, [(index, error)])])


write_one_commit_reply = lru_cache(maxsize=REPLIES_REMEMBERED_MAX)(_one_reply)
"""The reply to a commit of one partition, whose topic came in a head: consumers are told the same again and again."""


def _write_count(out: bytearray, count: int, flexible: bool) -> None:
    if flexible:
        write_uvarint(out, count + 1)
    else:
        out += _INT.pack(count)
