"""Fetch, by hand: the request read in one pass, the reply written as heads around byte ranges that are sent unread.

Versions 4 to 18; 7 brings sessions, 12 is flexible, 13 names topics by id. The ranges a partition answers with are
opaque here: the listener knows how to send them.
"""

from collections.abc import Sequence
from struct import Struct
from struct import error as StructError
from typing import NamedTuple

from headrace.wire.primitives import (
    Budget,
    Buffer,
    Malformed,
    length_reader,
    part,
    read_uvarint,
    skip_tags,
    text,
    write_count,
    write_uvarint,
)
from headrace.wire.produce import write_node_endpoints

SESSIONS_FROM = 7
FLEXIBLE_FROM = 12
TOPIC_IDS_FROM = 13
REPLICA_STATE_FROM = 15

_INT16 = Struct(">h")
_INT32 = Struct(">i")
_HEAD_V4 = Struct(">iiib")
_HEAD_V7 = Struct(">iiibii")
_REPLICA = Struct(">iq")
_PARTITION_V4 = Struct(">iqi")
_PARTITION_V5 = Struct(">iqqi")
_PARTITION_V9 = Struct(">iiqqi")
_PARTITION_V12 = Struct(">iiqiqi")
_ABORTED = Struct(">qq")


class FetchPartition(NamedTuple):
    """What is wanted of one partition."""

    partition: int
    leader_epoch: int
    offset: int
    last_fetched_epoch: int
    log_start_offset: int
    max_bytes: int


class FetchTopic(NamedTuple):
    """The partitions of one topic, named by name or, from version 13, by id."""

    name: str
    topic_id: bytes
    partitions: list[FetchPartition]


class ForgottenTopic(NamedTuple):
    """Partitions that leave a fetch session."""

    name: str
    topic_id: bytes
    partitions: list[int]


class FetchRequest(NamedTuple):
    """A Fetch request. `replica_id` is -1 for a consumer."""

    replica_id: int
    replica_epoch: int
    max_wait_ms: int
    min_bytes: int
    max_bytes: int
    isolation_level: int
    session_id: int
    session_epoch: int
    topics: list[FetchTopic]
    forgotten: list[ForgottenTopic]
    rack_id: str


class FetchResult(NamedTuple):
    """The answer for one partition: its offsets, and the byte ranges of its records with their total size."""

    partition: int
    error: int
    high_watermark: int = -1
    last_stable_offset: int = -1
    log_start_offset: int = -1
    aborted: Sequence[tuple[int, int]] | None = None
    preferred_read_replica: int = -1
    ranges: Sequence[object] = ()
    size: int = 0
    diverging: tuple[int, int] | None = None
    leader: tuple[int, int] | None = None


def decode_fetch(version: int, buf: Buffer, pos: int) -> FetchRequest:
    """The request whose body begins at `pos`. Raises Malformed."""
    try:
        return _decode(version, buf, pos)
    except StructError:
        raise Malformed("fetch request cut short") from None


def _decode(version: int, buf: Buffer, pos: int) -> FetchRequest:
    flexible = version >= FLEXIBLE_FROM
    budget = Budget()
    read_length = length_reader(flexible, wide=True)
    replica_id, replica_epoch, session_id, session_epoch = -1, -1, 0, -1
    if version < REPLICA_STATE_FROM:
        (replica_id,) = _INT32.unpack_from(buf, pos)
        pos += 4
    if version >= SESSIONS_FROM:
        wait_ms, min_bytes, max_bytes, isolation, session_id, session_epoch = _HEAD_V7.unpack_from(buf, pos)
        pos += _HEAD_V7.size
    else:
        wait_ms, min_bytes, max_bytes, isolation = _HEAD_V4.unpack_from(buf, pos)
        pos += _HEAD_V4.size
    count, pos = read_length(buf, pos, budget)
    budget.spend(count, 3, len(buf) - pos)
    topics = []
    for _ in range(count):
        name, topic_id, pos = _topic(version, buf, pos, budget)
        partitions, pos = _partitions(version, buf, pos, budget)
        if flexible:
            pos = skip_tags(buf, pos)
        topics.append(FetchTopic(name, topic_id, partitions))
    forgotten = []
    rack_id = ""
    if version >= SESSIONS_FROM:
        count, pos = read_length(buf, pos, budget)
        budget.spend(count, 3, len(buf) - pos)
        for _ in range(count):
            name, topic_id, pos = _topic(version, buf, pos, budget)
            number, pos = read_length(buf, pos, budget)
            budget.spend(number, 4, len(buf) - pos)
            indexes = list(Struct(f">{number}i").unpack_from(buf, pos))
            pos += 4 * number
            if flexible:
                pos = skip_tags(buf, pos)
            forgotten.append(ForgottenTopic(name, topic_id, indexes))
    if version >= 11:
        length, pos = length_reader(flexible, wide=False)(buf, pos, budget)
        rack_id = text(part(buf, pos, length))
        pos += length
    if version >= REPLICA_STATE_FROM:
        replica_id, replica_epoch = _replica_state(buf, pos)
    return FetchRequest(
        replica_id,
        replica_epoch,
        wait_ms,
        min_bytes,
        max_bytes,
        isolation,
        session_id,
        session_epoch,
        topics,
        forgotten,
        rack_id,
    )


def _topic(version: int, buf: Buffer, pos: int, budget: Budget) -> tuple[str, bytes, int]:
    if version >= TOPIC_IDS_FROM:
        return "", bytes(part(buf, pos, 16)), pos + 16
    length, pos = length_reader(version >= FLEXIBLE_FROM, wide=False)(buf, pos, budget)
    return text(part(buf, pos, length)), b"", pos + length


def _partitions(version: int, buf: Buffer, pos: int, budget: Budget) -> tuple[list[FetchPartition], int]:
    flexible = version >= FLEXIBLE_FROM
    count, pos = length_reader(flexible, wide=True)(buf, pos, budget)
    budget.spend(count, _PARTITION_V4.size, len(buf) - pos)
    partitions = []
    for _ in range(count):
        leader_epoch, last_epoch, log_start = -1, -1, -1
        if flexible:
            index, leader_epoch, offset, last_epoch, log_start, max_bytes = _PARTITION_V12.unpack_from(
                buf, pos
            )
            pos = skip_tags(buf, pos + _PARTITION_V12.size)
        elif version >= 9:
            index, leader_epoch, offset, log_start, max_bytes = _PARTITION_V9.unpack_from(buf, pos)
            pos += _PARTITION_V9.size
        elif version >= 5:
            index, offset, log_start, max_bytes = _PARTITION_V5.unpack_from(buf, pos)
            pos += _PARTITION_V5.size
        else:
            index, offset, max_bytes = _PARTITION_V4.unpack_from(buf, pos)
            pos += _PARTITION_V4.size
        partitions.append(FetchPartition(index, leader_epoch, offset, last_epoch, log_start, max_bytes))
    return partitions, pos


def _replica_state(buf: Buffer, pos: int) -> tuple[int, int]:
    """The follower's id and epoch, from the tagged fields at the end of the request."""
    count, pos = read_uvarint(buf, pos)
    for _ in range(count):
        tag, pos = read_uvarint(buf, pos)
        size, pos = read_uvarint(buf, pos)
        if pos + size > len(buf):
            raise Malformed("tagged field longer than its message")
        if tag == 1:
            replica_id, replica_epoch = _REPLICA.unpack_from(buf, pos)
            return replica_id, replica_epoch
        pos += size
    return -1, -1


def encode_fetch_reply(
    version: int,
    topics: list[tuple[str, bytes, list[FetchResult]]],
    *,
    throttle_time_ms: int = 0,
    error: int = 0,
    session_id: int = 0,
    endpoints: dict[int, tuple[str, int, str | None]] | None = None,
) -> tuple[list[object], int]:
    """The body of the reply as parts, bytes and ranges in order, and its size in bytes."""
    flexible = version >= FLEXIBLE_FROM
    parts: list[object] = []
    total = 0
    out = bytearray(_INT32.pack(throttle_time_ms))
    if version >= SESSIONS_FROM:
        out += Struct(">hi").pack(error, session_id)
    write_count(out, len(topics), flexible)
    for name, topic_id, results in topics:
        if version >= TOPIC_IDS_FROM:
            out += topic_id
        elif flexible:
            raw = name.encode()
            write_uvarint(out, len(raw) + 1)
            out += raw
        else:
            raw = name.encode()
            out += _INT16.pack(len(raw)) + raw
        write_count(out, len(results), flexible)
        for result in results:
            _write_partition_head(out, version, result)
            if result.ranges:
                total += len(out) + result.size
                parts.append(out)
                parts.extend(result.ranges)
                out = bytearray()
            if flexible:
                _write_partition_tags(out, version, result)
        if flexible:
            out.append(0)
    if flexible:
        if endpoints and version >= 16:
            write_node_endpoints(out, endpoints)
        else:
            out.append(0)
    if out:
        parts.append(out)
        total += len(out)
    return parts, total


_RESULT_V4 = Struct(">ihqq")
_RESULT_V5 = Struct(">ihqqq")


def _write_partition_head(out: bytearray, version: int, result: FetchResult) -> None:
    """All of a partition's answer up to and with the length of its records."""
    flexible = version >= FLEXIBLE_FROM
    if version >= 5:
        out += _RESULT_V5.pack(
            result.partition,
            result.error,
            result.high_watermark,
            result.last_stable_offset,
            result.log_start_offset,
        )
    else:
        out += _RESULT_V4.pack(
            result.partition, result.error, result.high_watermark, result.last_stable_offset
        )
    if result.aborted is None:
        out += b"\x00" if flexible else b"\xff\xff\xff\xff"
    else:
        write_count(out, len(result.aborted), flexible)
        for producer_id, first_offset in result.aborted:
            out += _ABORTED.pack(producer_id, first_offset)
            if flexible:
                out.append(0)
    if version >= 11:
        out += _INT32.pack(result.preferred_read_replica)
    if flexible:
        write_uvarint(out, result.size + 1)
    else:
        out += _INT32.pack(result.size)


def _write_partition_tags(out: bytearray, version: int, result: FetchResult) -> None:
    tags = []
    if result.diverging is not None:
        tags.append(b"\x00\x0d" + Struct(">iq").pack(*result.diverging) + b"\x00")
    if result.leader is not None:
        tags.append(b"\x01\x09" + Struct(">ii").pack(*result.leader) + b"\x00")
    out.append(len(tags))
    for tag in tags:
        out += tag
