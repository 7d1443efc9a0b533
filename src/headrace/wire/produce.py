"""Produce, by hand: the request is walked without copying its records, the reply written in one pass.

Both are on the path of every message, where the schema-driven codec would cost more than the append itself. Versions
3 to 13; 9 and up are flexible, 13 names topics by id.
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
    skip_tags,
    text,
    write_count,
    write_uvarint,
)

VERSION_MIN = 3
FLEXIBLE_FROM = 9
TOPIC_IDS_FROM = 13

_INT16 = Struct(">h")
_INT32 = Struct(">i")
_ACKS_TIMEOUT = Struct(">hi")
_RESULT_V3 = Struct(">ihqq")
_RESULT_V5 = Struct(">ihqqq")


class ProducePartition(NamedTuple):
    """Records for one partition; a slice of the request's own memory."""

    partition: int
    records: Buffer | None


class ProduceTopic(NamedTuple):
    """The partitions of one topic, named by name or, from version 13, by id."""

    name: str
    topic_id: bytes
    partitions: list[ProducePartition]


class ProduceRequest(NamedTuple):
    """A Produce request."""

    transactional_id: str | None
    acks: int
    timeout_ms: int
    topics: list[ProduceTopic]


class ProduceResult(NamedTuple):
    """The answer for one partition. `leader` is (id, epoch) when the client should look elsewhere."""

    partition: int
    error: int
    base_offset: int = -1
    log_append_time_ms: int = -1
    log_start_offset: int = -1
    message: str | None = None
    leader: tuple[int, int] | None = None
    record_errors: Sequence[tuple[int, str]] = ()  # the records that a whole batch was refused for, and why


def decode_produce(version: int, buf: Buffer, pos: int) -> ProduceRequest:
    """The request whose body begins at `pos`. Raises Malformed."""
    try:
        return _decode(version, buf, pos)
    except StructError:
        raise Malformed("produce request cut short") from None


def _decode(version: int, buf: Buffer, pos: int) -> ProduceRequest:
    flexible = version >= FLEXIBLE_FROM
    budget = Budget()
    read_text_length = length_reader(flexible, wide=False)
    read_length = length_reader(flexible, wide=True)
    end = len(buf)
    length, pos = read_text_length(buf, pos, budget)
    transactional_id: str | None = None
    if length >= 0:
        transactional_id = text(part(buf, pos, length))
        pos += length
    acks, timeout_ms = _ACKS_TIMEOUT.unpack_from(buf, pos)
    pos += _ACKS_TIMEOUT.size
    topic_count, pos = read_length(buf, pos, budget)
    budget.spend(topic_count, 3, end - pos)
    topics: list[ProduceTopic] = []
    for _ in range(topic_count):
        name, topic_id = "", b""
        if version >= TOPIC_IDS_FROM:
            topic_id = bytes(part(buf, pos, 16))
            pos += 16
        else:
            length, pos = read_text_length(buf, pos, budget)
            name = text(part(buf, pos, length))
            pos += length
        partition_count, pos = read_length(buf, pos, budget)
        budget.spend(partition_count, 5, end - pos)
        partitions: list[ProducePartition] = []
        for _ in range(partition_count):
            (index,) = _INT32.unpack_from(buf, pos)
            length, pos = read_length(buf, pos + 4, budget)
            records: Buffer | None = None
            if length >= 0:
                records = part(buf, pos, length)
                pos += length
            if flexible:
                pos = skip_tags(buf, pos)
            partitions.append(ProducePartition(index, records))
        if flexible:
            pos = skip_tags(buf, pos)
        topics.append(ProduceTopic(name, topic_id, partitions))
    if flexible:
        skip_tags(buf, pos)
    return ProduceRequest(transactional_id, acks, timeout_ms, topics)


def encode_produce_reply(
    version: int,
    topics: list[tuple[ProduceTopic, list[ProduceResult]]],
    throttle_time_ms: int,
    endpoints: dict[int, tuple[str, int, str | None]] | None = None,
) -> bytes:
    """The body of the reply. `endpoints` says where the leaders named in results are, from version 10."""
    flexible = version >= FLEXIBLE_FROM
    out = bytearray()
    write_count(out, len(topics), flexible)
    for topic, results in topics:
        if version >= TOPIC_IDS_FROM:
            out += topic.topic_id
        else:
            _write_text(out, topic.name, flexible)
        write_count(out, len(results), flexible)
        for result in results:
            partition, error, base_offset, append_time_ms, log_start_offset, message, leader, bad = result
            if version >= 5:
                out += _RESULT_V5.pack(partition, error, base_offset, append_time_ms, log_start_offset)
            else:
                out += _RESULT_V3.pack(partition, error, base_offset, append_time_ms)
            if version >= 8:
                write_count(out, len(bad), flexible)
                for number, reason in bad:
                    out += _INT32.pack(number)
                    _write_text(out, reason, flexible)
                    if flexible:
                        out.append(0)
                _write_text(out, message, flexible)
            if flexible:
                if leader is not None and version >= 10:
                    out += b"\x01\x00\x09" + Struct(">ii").pack(*leader) + b"\x00"
                else:
                    out.append(0)
        if flexible:
            out.append(0)
    out += _INT32.pack(throttle_time_ms)
    if flexible:
        if endpoints and version >= 10:
            write_node_endpoints(out, endpoints)
        else:
            out.append(0)
    return bytes(out)


def write_node_endpoints(out: bytearray, endpoints: dict[int, tuple[str, int, str | None]]) -> None:
    """The tagged section that holds only the node endpoints, tag 0, as Produce and Fetch replies end."""
    section = bytearray()
    write_uvarint(section, len(endpoints) + 1)
    for node, (host, port, rack) in endpoints.items():
        section += _INT32.pack(node)
        _write_text(section, host, True)
        section += _INT32.pack(port)
        _write_text(section, rack, True)
        section.append(0)
    out += b"\x01\x00"
    write_uvarint(out, len(section))
    out += section


def _write_text(out: bytearray, value: str | None, flexible: bool) -> None:
    raw = b"" if value is None else value.encode()
    if flexible:
        write_uvarint(out, 0 if value is None else len(raw) + 1)
    else:
        out += _INT16.pack(-1 if value is None else len(raw))
    out += raw
