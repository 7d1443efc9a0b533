# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, binding=True
# cython: annotation_typing=False
"""The record codec: everything that loops over records or batches.

One source, two lives: Python as it stands, and C when setup.py could compile it, with the types that
`_codec.pxd` gives to the same names. Nothing here may depend on which one runs: arithmetic stays inside 64
bits because it is checked first, and every index is checked against `end` before it is used, because the
compiled one does not. Invariant: whatever the bytes are, a function returns or raises KafkaError; memory
taken is in proportion to the bytes that were really there, never to a count or length they state.

A record: length varint, attributes i8, timestamp_delta varlong, offset_delta varint, key length varint and
bytes, value length varint and bytes, header count varint, then per header key and value likewise. Varints
are zigzag; length -1 is null.

Callers: `codec` chooses between the two, and everyone imports from there.
"""

import struct
from collections.abc import Iterable
from types import FunctionType
from typing import Any

from headrace.base.errors import ErrorCode, KafkaError
from headrace.records.batch import BatchInfo, Buffer, Record, Scan, ScanStop, SegmentScan
from headrace.records.crc import crc32c

Header = tuple[str, bytes | None]
RecordInput = tuple[int, bytes | None, bytes | None, Iterable[Header]]
# A tuple type, the topic and partition to put before a Record's fields, the leader epoch to put after, an offset.
Place = tuple[type, str, int, int, int] | None

# What check_records found.
NULL_KEY, NULL_VALUE = 1, 2

# The least a record takes: seven one-byte fields. A header: two.
_RECORD_BYTES_MIN = 7
_HEADER_BYTES_MIN = 2

# Numbers of more than 32 bits have names, and the names C types: as literals they would be Python objects in C too.
_I64_MAX = 0x7FFFFFFFFFFFFFFF
_I64_MIN = -_I64_MAX - 1
_U32_SIGN, _U32_RANGE, _U32_MASK = 0x80000000, 0x100000000, 0xFFFFFFFF

# The first offset that no batch may reach, far enough below 2^63 for every sum of an offset and a delta.
_OFFSET_MAX = 0x7FFFFFFF00000000

# ScanStop's members as the plain numbers they are.
_NEED_MORE, _BAD_LENGTH, _BAD_MAGIC, _BAD_OFFSET, _BAD_CRC, _GAP = 1, 2, 3, 4, 5, 6

_new_tuple = tuple.__new__
_unpack_header = struct.Struct(">qiibIhi8xqqhi4x").unpack_from


def _invalid(message: str) -> KafkaError:
    return KafkaError(ErrorCode.INVALID_RECORD, message)


# Reading a field at a time is the fastest way in C, and the slowest in Python, where one unpack_from is.
_COMPILED = not isinstance(_invalid, FunctionType)


class _Cursor:
    """A position in a batch's records; every read is checked against the end of the record it is in."""

    def __init__(self, payload: Buffer, count: int) -> None:
        data = payload if type(payload) is bytes else bytes(payload)
        self.owner = data
        self.data = data
        self.pos = 0
        self.end = len(data)
        self.size = len(data)
        if count < 0 or count > self.size // _RECORD_BYTES_MIN:
            raise _invalid("a record count does not fit its batch")

    def varint(self, shift_max: int) -> int:
        """One zigzag number of 32 bits (shift_max 28) or 64 bits (shift_max 63)."""
        pos = self.pos
        if pos >= self.end:
            raise _invalid("a number is cut short")
        byte = self.data[pos]
        pos += 1
        raw = byte & 0x7F
        shift = 7
        while byte >= 0x80:
            if pos >= self.end:
                raise _invalid("a number is cut short")
            byte = self.data[pos]
            pos += 1
            # The last byte there may be: with bits to spare, and no sign that more follow.
            if shift == shift_max and byte > (0x0F if shift == 28 else 0x01):
                raise _invalid("a number is too large")
            raw |= (byte & 0x7F) << shift
            shift += 7
        self.pos = pos
        return (raw >> 1) ^ -(raw & 1)

    def begin_record(self) -> None:
        """Enter the next record: from here to its end is all that the following reads may see."""
        length = self.varint(28)
        if length < _RECORD_BYTES_MIN - 1 or length > self.end - self.pos:
            raise _invalid("a record's length does not fit its batch")
        self.end = self.pos + length
        self.pos += 1  # the record's attributes, which have no meaning yet

    def end_record(self) -> None:
        if self.pos != self.end:
            raise _invalid("a record is longer than its fields")
        self.end = self.size

    def end_batch(self) -> None:
        if self.pos != self.size:
            raise _invalid("a batch is longer than its records")

    def length(self) -> int:
        """The length of a nullable field that is really there, or -1."""
        length = self.varint(28)
        if length < -1 or length > self.end - self.pos:
            raise _invalid("a field's length does not fit its record")
        return length

    def header_count(self) -> int:
        count = self.varint(28)
        if count < 0 or count * _HEADER_BYTES_MIN > self.end - self.pos:
            raise _invalid("a header count does not fit its record")
        return count

    def skip_nullable(self) -> int:
        """Pass over a nullable field; 1 when it is null."""
        length = self.length()
        if length < 0:
            return 1
        self.pos += length
        return 0

    def skip_headers(self) -> None:
        for _ in range(self.header_count()):
            if self.skip_nullable():
                raise _invalid("a header has no key")
            self.skip_nullable()

    def headers(self) -> tuple[Header, ...]:
        count = self.header_count()
        if count == 0:
            return ()
        found = []
        for _ in range(count):
            length = self.length()
            if length < 0:
                raise _invalid("a header has no key")
            key = self.data[self.pos : self.pos + length].decode("utf-8", "surrogateescape")
            self.pos += length
            found.append((key, self.nullable_bytes()))
        return tuple(found)

    def nullable_bytes(self) -> bytes | None:
        length = self.length()
        if length < 0:
            return None
        start = self.pos
        self.pos = start + length
        return self.data[start : start + length]


def decode_records(
    payload: Buffer,
    count: int,
    base_offset: int,
    base_timestamp: int,
    append_time: int = -1,
    place: Place = None,
) -> list[Any]:
    """The `count` records of an inflated batch. `append_time`, unless -1, is the time of each of them.

    With a `place` they are of its type, which has more fields around a Record's, from its offset on.
    """
    cursor = _Cursor(payload, count)
    if base_offset < 0 or base_offset > _OFFSET_MAX:
        raise _invalid("a base offset is out of range")
    records: list[Any] = []
    kind, topic, partition, epoch, start = place or (Record, "", 0, 0, 0)
    for _ in range(count):
        cursor.begin_record()
        timestamp_delta = cursor.varint(63)
        if append_time != -1:
            timestamp = append_time
        elif _sum_fits(base_timestamp, timestamp_delta):
            timestamp = base_timestamp + timestamp_delta
        else:
            raise _invalid("a timestamp is out of range")
        offset_delta = cursor.varint(28)
        if offset_delta < 0:
            raise _invalid("an offset delta is negative")
        key = cursor.nullable_bytes()
        value = cursor.nullable_bytes()
        headers = cursor.headers()
        cursor.end_record()
        offset = base_offset + offset_delta
        if place is None:
            records.append(_new_tuple(Record, (offset, timestamp, key, value, headers)))
        elif offset >= start:
            fields = (topic, partition, offset, timestamp, key, value, headers, epoch)
            records.append(_new_tuple(kind, fields))
    cursor.end_batch()
    return records


def check_records(payload: Buffer, count: int) -> int:
    """Check that these are `count` well-formed records with offset deltas 0, 1, 2...; NULL_* bits."""
    cursor = _Cursor(payload, count)
    null_keys = 0
    null_values = 0
    for index in range(count):
        cursor.begin_record()
        cursor.varint(63)
        if cursor.varint(28) != index:
            raise _invalid("offset deltas are not consecutive")
        null_keys |= cursor.skip_nullable()
        null_values |= cursor.skip_nullable()
        cursor.skip_headers()
        cursor.end_record()
    cursor.end_batch()
    return (NULL_KEY if null_keys else 0) | (NULL_VALUE if null_values else 0)


def encode_records(out: bytearray, records: Iterable[RecordInput], base_timestamp: int) -> tuple[int, int]:
    """Append the records to `out`, with offset deltas 0, 1, 2...; their number and latest timestamp."""
    count = 0
    max_timestamp = -1
    for timestamp, key, value, headers in records:
        encode_record(out, count, timestamp, base_timestamp, key, value, headers)
        if timestamp > max_timestamp:
            max_timestamp = timestamp
        count += 1
    return count, max_timestamp


def encode_record(
    out: bytearray,
    offset_delta: int,
    timestamp: int,
    base_timestamp: int,
    key: bytes | None,
    value: bytes | None,
    headers: Iterable[Header],
) -> None:
    """Append one record to `out`."""
    if not _difference_fits(timestamp, base_timestamp):
        raise KafkaError(ErrorCode.INVALID_TIMESTAMP, "timestamps of one batch are too far apart")
    timestamp_delta = timestamp - base_timestamp
    key_length = -1 if key is None else len(key)
    value_length = -1 if value is None else len(value)
    size = 1 + _varint_size(timestamp_delta) + _varint_size(offset_delta)
    size += _varint_size(key_length) + _varint_size(value_length)
    if key_length > 0:
        size += key_length
    if value_length > 0:
        size += value_length
    encoded_headers = _encode_headers(headers) if headers else b"\x00"
    size += len(encoded_headers)
    _put_varint(out, size)
    out.append(0)
    _put_varint(out, timestamp_delta)
    _put_varint(out, offset_delta)
    _put_varint(out, key_length)
    if key is not None:
        out += key
    _put_varint(out, value_length)
    if value is not None:
        out += value
    out += encoded_headers


def _encode_headers(headers: Iterable[Header]) -> bytes:
    body = bytearray()
    count = 0
    for key, value in headers:
        encoded = key.encode("utf-8", "surrogateescape")
        _put_varint(body, len(encoded))
        body += encoded
        if value is None:
            _put_varint(body, -1)
        else:
            _put_varint(body, len(value))
            body += value
        count += 1
    out = bytearray()
    _put_varint(out, count)
    return bytes(out + body)


class _Walk:
    """The headers of the batches in a buffer, one at a time: `load` reads one, `judge` says whether it counts."""

    def __init__(self, buf: Buffer) -> None:
        self.view = memoryview(buf)
        self.data = self.view

    def check_range(self, pos: int, end: int) -> None:
        """Hold the caller to the buffer: positions only grow from here, and none is read past `end`."""
        if pos < 0 or end > len(self.view):
            raise ValueError("a range outside the buffer")

    def load(self, pos: int) -> None:
        """Read the header at `pos`, which the caller has seen to be there."""
        if _COMPILED:
            self.base_offset = self.i64(pos)
            self.batch_length = self.i32(pos + 8)
            self.leader_epoch = self.i32(pos + 12)
            self.magic = self.data[pos + 16]
            self.crc = self.u32(pos + 17)
            self.attributes = self.i16(pos + 21)
            self.last_offset_delta = self.i32(pos + 23)
            self.max_timestamp = self.i64(pos + 35)
            self.producer_id = self.i64(pos + 43)
            self.producer_epoch = self.i16(pos + 51)
            self.base_sequence = self.i32(pos + 53)
        else:
            (
                self.base_offset,
                self.batch_length,
                self.leader_epoch,
                self.magic,
                self.crc,
                self.attributes,
                self.last_offset_delta,
                self.max_timestamp,
                self.producer_id,
                self.producer_epoch,
                self.base_sequence,
            ) = _unpack_header(self.view, pos)

    def judge(self, pos: int, end: int, offset_min: int, offset_max: int) -> int:
        """A ScanStop for the batch at `pos`, or 0 when it is whole, right, and within the offsets given."""
        if end - pos < 61:
            return _NEED_MORE
        self.load(pos)
        if self.batch_length < 49:
            return _BAD_LENGTH
        if self.magic != 2:
            return _BAD_MAGIC
        if self.base_offset < offset_min or self.last_offset_delta < 0 or self.base_offset > offset_max:
            return _BAD_OFFSET
        if self.last_offset_delta > offset_max - self.base_offset:
            return _BAD_OFFSET
        if self.batch_length + 12 > end - pos:
            return _NEED_MORE
        if crc32c(self.view[pos + 21 : pos + 12 + self.batch_length]) != self.crc:
            return _BAD_CRC
        return 0

    def info(self, pos: int) -> BatchInfo:
        last_sequence = -1
        if self.base_sequence != -1:
            last_sequence = (self.base_sequence + self.last_offset_delta) & 0x7FFFFFFF
        return _new_tuple(
            BatchInfo,
            (
                pos,
                self.batch_length + 12,
                self.base_offset,
                self.base_offset + self.last_offset_delta,
                self.max_timestamp,
                self.leader_epoch,
                self.attributes,
                self.producer_id,
                self.producer_epoch,
                self.base_sequence,
                last_sequence,
            ),
        )

    def outcome(self, pos: int, end: int, stop: int, next_offset: int, batches: list[BatchInfo]) -> Scan:
        needed = 0
        if stop == _NEED_MORE:
            needed = 61 if end - pos < 61 else self.batch_length + 12
        return Scan(pos, ScanStop(stop), needed, next_offset, batches)

    def i64(self, pos: int) -> int:
        return (self.i32(pos) << 32) | self.u32(pos + 4)

    def i32(self, pos: int) -> int:
        value = self.u32(pos)
        return value - _U32_RANGE if value >= _U32_SIGN else value

    def u32(self, pos: int) -> int:
        value = self.data[pos]
        value = (value << 8) | self.data[pos + 1]
        value = (value << 8) | self.data[pos + 2]
        return (value << 8) | self.data[pos + 3]

    def i16(self, pos: int) -> int:
        value = self.data[pos]
        value = (value << 8) | self.data[pos + 1]
        return value - 0x10000 if value >= 0x8000 else value


def scan(buf: Buffer, pos: int, end: int, min_offset: int = 0) -> Scan:
    """Walk the whole batches in buf[pos:end], and stop at the first that is cut short or is none.

    A batch counts when its length is sane, its magic is 2, its offsets go on from `min_offset` and its CRC is
    right.
    """
    walk = _Walk(buf)
    walk.check_range(pos, end)
    batches: list[BatchInfo] = []
    stop = 0
    next_offset = min_offset
    while pos < end:
        stop = walk.judge(pos, end, next_offset, _OFFSET_MAX)
        if stop:
            break
        batches.append(walk.info(pos))
        next_offset = walk.base_offset + walk.last_offset_delta + 1
        pos += walk.batch_length + 12
    return walk.outcome(pos, end, stop, next_offset, batches)


def scan_segment(state: SegmentScan, buf: Buffer, pos: int, end: int, file_position: int = 0) -> Scan:
    """As `scan`, for the recovery of a segment: what the batches add up to goes into `state`, in one pass.

    `file_position` is where buf[0] lies in the segment's file. The `batches` returned are those of producers with
    an id alone: the others leave nothing behind but index entries.
    """
    walk = _Walk(buf)
    walk.check_range(pos, end)
    offset_entries = state.offset_entries
    time_entries = state.time_entries
    base_offset = state.base_offset
    interval_bytes = state.index_interval_bytes
    bytes_since_entry = state.bytes_since_entry
    max_timestamp = state.max_timestamp
    max_timestamp_offset = state.max_timestamp_offset
    indexed_timestamp = state.indexed_timestamp
    leader_epoch = state.leader_epoch
    next_offset = state.next_offset
    stop_at_gaps = state.stop_at_gaps
    batch_count = state.batch_count
    # Index entries hold offsets relative to the segment's base in 32 bits.
    offset_max = base_offset + 0x7FFFFFFF
    batches: list[BatchInfo] = []
    stop = 0
    while pos < end:
        stop = walk.judge(pos, end, next_offset, offset_max)
        if stop == 0 and stop_at_gaps and walk.base_offset != next_offset:
            stop = _GAP
        if stop:
            break
        batch_count += 1
        size = walk.batch_length + 12
        last_offset = walk.base_offset + walk.last_offset_delta
        if walk.max_timestamp > max_timestamp:
            max_timestamp = walk.max_timestamp
            max_timestamp_offset = last_offset
        if bytes_since_entry > interval_bytes:
            _put_i32(offset_entries, last_offset - base_offset)
            _put_i32(offset_entries, file_position + pos)
            if max_timestamp > indexed_timestamp:
                _put_i32(time_entries, max_timestamp >> 32)
                _put_i32(time_entries, max_timestamp & _U32_MASK)
                _put_i32(time_entries, max_timestamp_offset - base_offset)
                indexed_timestamp = max_timestamp
            bytes_since_entry = 0
        bytes_since_entry += size
        if walk.leader_epoch != leader_epoch and walk.leader_epoch >= 0:
            leader_epoch = walk.leader_epoch
            state.epochs.append((leader_epoch, walk.base_offset))
        if walk.producer_id >= 0:
            batches.append(walk.info(pos))
        next_offset = last_offset + 1
        pos += size
    state.bytes_since_entry = bytes_since_entry
    state.max_timestamp = max_timestamp
    state.max_timestamp_offset = max_timestamp_offset
    state.indexed_timestamp = indexed_timestamp
    state.leader_epoch = leader_epoch
    state.next_offset = next_offset
    state.batch_count = batch_count
    return walk.outcome(pos, end, stop, next_offset, batches)


def find_offset(buf: Buffer, pos: int, end: int, target: int) -> tuple[int, bool]:
    """The position of the first batch from `pos` on whose last offset is `target` or later, by headers alone.

    With False, that batch is not in buf[pos:end]: the position is where the next header to read begins, which
    may be beyond `end`, since the bodies need not be there.
    """
    walk = _Walk(buf)
    walk.check_range(pos, end)
    while end - pos >= 61:
        walk.load(pos)
        _check_header(walk)
        if walk.base_offset >= target - walk.last_offset_delta:
            return pos, True
        pos += walk.batch_length + 12
    return pos, False


def find_timestamp(buf: Buffer, pos: int, end: int, target: int) -> tuple[int, bool]:
    """As `find_offset`, for the first batch whose latest timestamp is `target` or later."""
    walk = _Walk(buf)
    walk.check_range(pos, end)
    while end - pos >= 61:
        walk.load(pos)
        _check_header(walk)
        if walk.max_timestamp >= target:
            return pos, True
        pos += walk.batch_length + 12
    return pos, False


def _check_header(walk: _Walk) -> None:
    if walk.batch_length < 49 or walk.magic != 2 or walk.last_offset_delta < 0:
        raise KafkaError(ErrorCode.CORRUPT_MESSAGE, "the bytes of a log are no batch")


def _put_i32(out: bytearray, value: int) -> None:
    out.append((value >> 24) & 0xFF)
    out.append((value >> 16) & 0xFF)
    out.append((value >> 8) & 0xFF)
    out.append(value & 0xFF)


def _put_varint(out: bytearray, value: int) -> None:
    raw = value << 1 if value >= 0 else (value << 1) ^ -1
    while raw >= 0x80:
        out.append((raw & 0x7F) | 0x80)
        raw >>= 7
    out.append(raw)


def _varint_size(value: int) -> int:
    raw = value << 1 if value >= 0 else (value << 1) ^ -1
    size = 1
    while raw >= 0x80:
        raw >>= 7
        size += 1
    return size


def _sum_fits(base: int, delta: int) -> bool:
    """Whether base + delta is a 64-bit number, asked without computing it."""
    if delta >= 0:
        return base <= _I64_MAX - delta
    return base >= _I64_MIN - delta


def _difference_fits(value: int, base: int) -> bool:
    if base >= 0:
        return value >= _I64_MIN + base
    return value <= _I64_MAX + base
