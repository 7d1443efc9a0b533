"""Produce and Fetch as a client writes and reads them, by hand: they are on the path of every record it sends or reads.

Same bodies and same messages as the schema-driven codec, for the flexible versions (Produce from 9, Fetch from 12),
at a fraction of its steps. Invariant: nothing is guessed; an answer with tagged fields, record errors or whatever
else is out of the ordinary is left to the schema-driven codec, as are all other APIs and versions.
"""

from collections.abc import Mapping
from functools import cache
from struct import Struct
from struct import error as StructError
from typing import Any

from headrace.wire.apis import Api
from headrace.wire.messages import (
    SPLICED_BYTES_MIN,
    Message,
    absent_fields,
    decode_response,
    encode_request_parts,
)
from headrace.wire.primitives import Buffer, Malformed, read_uvarint, write_uvarint
from headrace.wire.schema import message_schema

PRODUCE_FROM = 9
FETCH_FROM = 12
TOPIC_IDS_FROM = 13
REPLICA_STATE_FROM = 15
BY_HAND_TOPICS_MAX = 126  # a count of one byte

_INT32 = Struct(">i")
_ACKS_TIMEOUT = Struct(">hi")
_FETCH_HEAD = Struct(">iiibii")
_FETCH_PARTITION = Struct(">iiqiqi")
_PRODUCED = Struct(">ihqqq")
_FETCHED = Struct(">ihqqq")
_FETCH_REPLY_HEAD = Struct(">ihi")

_NO_TAGS = 0
_ONE_EMPTY = b"\x01\x00"  # no record errors, no error message


class _Unusual(Exception):
    """Something for the schema-driven codec."""


def request_parts(api: int, version: int, body: Mapping[str, Any]) -> list[Buffer]:
    """The bytes of a request's body in parts, in which large record sets are what was given, not copies of it."""
    if api == Api.PRODUCE and version >= PRODUCE_FROM:
        return _produce_request(version, body)
    if api == Api.FETCH and version >= FETCH_FROM:
        return [_fetch_request(version, body)]
    return encode_request_parts(api, version, body)


def read_response(api: int, version: int, buf: Buffer, pos: int) -> Message:
    """The body of a response that begins at `pos`. Raises Malformed."""
    try:
        if api == Api.PRODUCE and version >= PRODUCE_FROM:
            return _produce_reply(version, buf, pos)
        if api == Api.FETCH and version >= FETCH_FROM:
            return _fetch_reply(version, buf, pos)
    except (_Unusual, StructError, IndexError, Malformed):
        pass  # the schema-driven codec reads it, or says what is wrong with it
    return decode_response(api, version, buf, pos)


# -- requests ----------------------------------------------------------------------------------------------------------


def _produce_request(version: int, body: Mapping[str, Any]) -> list[Buffer]:
    parts: list[Buffer] = []
    out = bytearray()
    _write_text(out, body["transactional_id"])
    out += _ACKS_TIMEOUT.pack(body["acks"], body["timeout_ms"])
    topics = body["topic_data"]
    write_uvarint(out, len(topics) + 1)
    for topic in topics:
        if version >= TOPIC_IDS_FROM:
            out += topic["topic_id"]
        else:
            _write_text(out, topic["name"])
        partitions = topic["partition_data"]
        write_uvarint(out, len(partitions) + 1)
        for partition in partitions:
            records = partition["records"]
            out += _INT32.pack(partition["index"])
            write_uvarint(out, len(records) + 1)
            if len(records) >= SPLICED_BYTES_MIN:
                parts += (out, records)
                out = bytearray()
            else:
                out += records
            out.append(_NO_TAGS)
        out.append(_NO_TAGS)
    out.append(_NO_TAGS)
    parts.append(out)
    return parts


def _fetch_request(version: int, body: Mapping[str, Any]) -> bytearray:
    out = bytearray()
    if version < REPLICA_STATE_FROM:
        out += _INT32.pack(body["replica_id"])
    out += _FETCH_HEAD.pack(
        body["max_wait_ms"],
        body["min_bytes"],
        body["max_bytes"],
        body["isolation_level"],
        body["session_id"],
        body["session_epoch"],
    )
    topics = body["topics"]
    write_uvarint(out, len(topics) + 1)
    for topic in topics:
        if version >= TOPIC_IDS_FROM:
            out += topic["topic_id"]
        else:
            _write_text(out, topic["topic"])
        partitions = topic["partitions"]
        write_uvarint(out, len(partitions) + 1)
        for entry in partitions:
            out += _FETCH_PARTITION.pack(
                entry["partition"],
                entry["current_leader_epoch"],
                entry["fetch_offset"],
                -1,
                -1,
                entry["partition_max_bytes"],
            )
            out.append(_NO_TAGS)
        out.append(_NO_TAGS)
    out.append(1)  # no topics to forget
    _write_text(out, body.get("rack_id", ""))
    out.append(_NO_TAGS)
    return out


def _write_text(out: bytearray, value: str | None) -> None:
    if value is None:
        out.append(0)
        return
    raw = value.encode()
    write_uvarint(out, len(raw) + 1)
    out += raw


# -- responses ---------------------------------------------------------------------------------------------------------


@cache
def _absent(api: int, *path: str) -> dict[str, Any]:
    """The fields of a response, or of a struct in it, with what they hold where nothing is said."""
    fields = message_schema(api, "response").fields
    for name in path:
        fields = next(item.children for item in fields if item.name == name)
    return absent_fields(fields)


def _message(values: dict[str, Any]) -> Message:
    message = Message()
    message.__dict__ = values
    return message


def _no_tags(buf: Buffer, pos: int) -> int:
    if buf[pos] != _NO_TAGS:
        raise _Unusual
    return pos + 1


def _count(buf: Buffer, pos: int) -> int:
    """The number of elements of an array that is not null, as one byte."""
    count = buf[pos] - 1
    if not 0 <= count <= BY_HAND_TOPICS_MAX:
        raise _Unusual
    return count


def _topic_of(version: int, buf: Buffer, pos: int) -> tuple[bytes, str, int]:
    """A topic's id, its name, and where it goes on."""
    if version >= TOPIC_IDS_FROM:
        return bytes(buf[pos : pos + 16]), "", pos + 16
    length = _count(buf, pos)
    return bytes(16), str(buf[pos + 1 : pos + 1 + length], "utf-8"), pos + 1 + length


def _produce_reply(version: int, buf: Buffer, pos: int) -> Message:
    topics = []
    count = _count(buf, pos)
    pos += 1
    for _ in range(count):
        topic_id, name, pos = _topic_of(version, buf, pos)
        results = []
        inner = _count(buf, pos)
        pos += 1
        for _ in range(inner):
            values = _absent(Api.PRODUCE, "responses", "partition_responses").copy()
            (
                values["index"],
                values["error_code"],
                values["base_offset"],
                values["log_append_time_ms"],
                values["log_start_offset"],
            ) = _PRODUCED.unpack_from(buf, pos)
            pos += _PRODUCED.size
            if buf[pos : pos + 2] != _ONE_EMPTY:
                raise _Unusual
            values["record_errors"] = []
            pos = _no_tags(buf, pos + 2)
            results.append(_message(values))
        pos = _no_tags(buf, pos)
        fields = _absent(Api.PRODUCE, "responses").copy()
        fields["topic_id"], fields["name"], fields["partition_responses"] = topic_id, name, results
        topics.append(_message(fields))
    whole = _absent(Api.PRODUCE).copy()
    whole["responses"] = topics
    (whole["throttle_time_ms"],) = _INT32.unpack_from(buf, pos)
    _no_tags(buf, pos + 4)
    return _message(whole)


def _fetch_reply(version: int, buf: Buffer, pos: int) -> Message:
    whole = _absent(Api.FETCH).copy()
    whole["throttle_time_ms"], whole["error_code"], whole["session_id"] = _FETCH_REPLY_HEAD.unpack_from(
        buf, pos
    )
    pos += _FETCH_REPLY_HEAD.size
    topics = []
    count = _count(buf, pos)
    pos += 1
    for _ in range(count):
        topic_id, name, pos = _topic_of(version, buf, pos)
        results = []
        inner = _count(buf, pos)
        pos += 1
        for _ in range(inner):
            result, pos = _fetched(buf, pos)
            results.append(result)
        pos = _no_tags(buf, pos)
        fields = _absent(Api.FETCH, "responses").copy()
        fields["topic_id"], fields["topic"], fields["partitions"] = topic_id, name, results
        topics.append(_message(fields))
    whole["responses"] = topics
    _no_tags(buf, pos)
    return _message(whole)


def _fetched(buf: Buffer, pos: int) -> tuple[Message, int]:
    values = _absent(Api.FETCH, "responses", "partitions").copy()
    (
        values["partition_index"],
        values["error_code"],
        values["high_watermark"],
        values["last_stable_offset"],
        values["log_start_offset"],
    ) = _FETCHED.unpack_from(buf, pos)
    pos += _FETCHED.size
    aborted = buf[pos]
    if aborted > 1:
        raise _Unusual
    values["aborted_transactions"] = [] if aborted else None
    (values["preferred_read_replica"],) = _INT32.unpack_from(buf, pos + 1)
    length, pos = read_uvarint(buf, pos + 5)
    if length == 0:
        values["records"] = None
    else:
        end = pos + length - 1
        if end > len(buf):
            raise _Unusual
        values["records"] = buf[pos:end]
        pos = end
    return _message(values), _no_tags(buf, pos)
