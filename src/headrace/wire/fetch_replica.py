"""Fetch as a follower speaks it: the request written, the reply read in place, both by hand.

One version, of the newest that carry all a follower says: topic ids, the last fetched epoch, the replica's id and
epoch. Records in a reply stay slices of the frame they came in. The other side is `wire.fetch`.
"""

from struct import Struct
from struct import error as StructError
from typing import NamedTuple

from headrace.wire.fetch import FetchRequest, FetchResult
from headrace.wire.primitives import Budget, Malformed, part, read_uvarint, skip_tags, write_uvarint

VERSION = 17

_HEAD = Struct(">iiibii")
_PARTITION = Struct(">iiqiqi")
_INT32 = Struct(">i")
_REPLICA = Struct(">iq")
_REPLICA_TAGS = b"\x01\x01\x0d"  # one tag, number 1, of 13 bytes
_REPLY_HEAD = Struct(">ihi")
_RESULT = Struct(">ihqqq")
_ABORTED_BYTES = 17
_DIVERGING = Struct(">iq")
DIVERGING_TAG = 0


class FetchedTopics(NamedTuple):
    """A reply: the error of the whole, the session, and the results by topic id."""

    error: int
    session_id: int
    topics: list[tuple[bytes, list[FetchResult]]]


def encode_fetch(request: FetchRequest) -> bytes:
    """The body of a follower's request."""
    out = bytearray(
        _HEAD.pack(
            request.max_wait_ms,
            request.min_bytes,
            request.max_bytes,
            request.isolation_level,
            request.session_id,
            request.session_epoch,
        )
    )
    write_uvarint(out, len(request.topics) + 1)
    for topic in request.topics:
        out += topic.topic_id
        write_uvarint(out, len(topic.partitions) + 1)
        for wanted in topic.partitions:
            out += _PARTITION.pack(*wanted)
            out.append(0)
        out.append(0)
    write_uvarint(out, len(request.forgotten) + 1)
    for forgotten in request.forgotten:
        out += forgotten.topic_id
        write_uvarint(out, len(forgotten.partitions) + 1)
        for index in forgotten.partitions:
            out += _INT32.pack(index)
        out.append(0)
    write_uvarint(out, len(request.rack_id.encode()) + 1)
    out += request.rack_id.encode()
    out += _REPLICA_TAGS + _REPLICA.pack(request.replica_id, request.replica_epoch) + b"\x00"
    return bytes(out)


def decode_fetch_reply(buf: memoryview) -> FetchedTopics:
    """A reply. Raises Malformed."""
    try:
        return _decode(buf)
    except StructError:
        raise Malformed("fetch reply cut short") from None


def _decode(buf: memoryview) -> FetchedTopics:
    budget = Budget()
    _, error, session_id = _REPLY_HEAD.unpack_from(buf, 0)
    count, pos = read_uvarint(buf, _REPLY_HEAD.size)
    budget.spend(max(count - 1, 0), 18, len(buf) - pos)
    topics = []
    for _ in range(count - 1):
        topic_id = bytes(part(buf, pos, 16))
        number, pos = read_uvarint(buf, pos + 16)
        budget.spend(max(number - 1, 0), _RESULT.size, len(buf) - pos)
        results = []
        for _ in range(number - 1):
            result, pos = _result(buf, pos, budget)
            results.append(result)
        pos = skip_tags(buf, pos)
        topics.append((topic_id, results))
    return FetchedTopics(error, session_id, topics)


def _result(buf: memoryview, pos: int, budget: Budget) -> tuple[FetchResult, int]:
    index, error, high_watermark, last_stable, log_start = _RESULT.unpack_from(buf, pos)
    aborted, pos = read_uvarint(buf, pos + _RESULT.size)
    if aborted > 1:
        budget.spend(aborted - 1, _ABORTED_BYTES, len(buf) - pos)
        pos += (aborted - 1) * _ABORTED_BYTES
    preferred: int = _INT32.unpack_from(buf, pos)[0]
    length, pos = read_uvarint(buf, pos + 4)
    size = max(length - 1, 0)
    records = part(buf, pos, size)
    pos += size
    diverging, pos = _diverging(buf, pos)
    return (
        FetchResult(
            index,
            error,
            high_watermark,
            last_stable,
            log_start,
            None,
            preferred,
            (records,) if size else (),
            size,
            diverging,
        ),
        pos,
    )


def _diverging(buf: memoryview, pos: int) -> tuple[tuple[int, int] | None, int]:
    """The tagged fields of a partition's result, of which a follower wants one."""
    count, pos = read_uvarint(buf, pos)
    diverging: tuple[int, int] | None = None
    for _ in range(count):
        tag, pos = read_uvarint(buf, pos)
        size, pos = read_uvarint(buf, pos)
        content = part(buf, pos, size)
        if tag == DIVERGING_TAG:
            epoch, end_offset = _DIVERGING.unpack_from(content, 0)
            diverging = (epoch, end_offset)
        pos += size
    return diverging, pos
