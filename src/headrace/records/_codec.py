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

from headrace.base.errors import ErrorCode, KafkaError
from headrace.records.batch import BatchInfo, Buffer, Record, Scan, ScanStop
from headrace.records.crc import crc32c

Header = tuple[str, bytes | None]
RecordInput = tuple[int, bytes | None, bytes | None, Iterable[Header]]

# What check_records found.
NULL_KEY = 1
NULL_VALUE = 2

# The least a record takes: seven one-byte fields. A header: two.
_RECORD_BYTES_MIN = 7
_HEADER_BYTES_MIN = 2

_new_tuple = tuple.__new__
_unpack_header = struct.Struct(">qiibIhiqqqhii").unpack_from


class _Cursor:
    """A position in a batch's records; every read is checked against the end of the record it is in."""

    data: bytes
    pos: int
    end: int
    size: int

    def __init__(self, data: bytes) -> None:
        self.owner = data
        self.data = data
        self.pos = 0
        self.end = len(data)
        self.size = len(data)

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
            if pos >= self.end or shift > shift_max:
                raise _invalid("a number is cut short or too long")
            byte = self.data[pos]
            pos += 1
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

    def skip_headers(self) -> None:
        for _ in range(self.header_count()):
            length = self.length()
            if length < 0:
                raise _invalid("a header has no key")
            self.pos += length
            length = self.length()
            if length > 0:
                self.pos += length

    def headers(self) -> tuple[Header, ...]:
        count = self.header_count()
        if count == 0:
            return ()
        headers = []
        for _ in range(count):
            length = self.length()
            if length < 0:
                raise _invalid("a header has no key")
            key = self.data[self.pos : self.pos + length].decode("utf-8", "surrogateescape")
            self.pos += length
            headers.append((key, self.nullable_bytes()))
        return tuple(headers)

    def nullable_bytes(self) -> bytes | None:
        length = self.length()
        if length < 0:
            return None
        start = self.pos
        self.pos = start + length
        return self.data[start : start + length]


def decode_records(
    payload: Buffer, count: int, base_offset: int, base_timestamp: int, append_time: int = -1
) -> list[Record]:
    """The `count` records of an inflated batch. `append_time`, unless -1, is the time of each of them."""
    cursor = _Cursor(payload if type(payload) is bytes else bytes(payload))
    _check_count(cursor, count)
    if base_offset < 0 or base_offset > 0x7FFFFFFF00000000:
        raise _invalid("a base offset is out of range")
    records = []
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
        records.append(_new_tuple(Record, (base_offset + offset_delta, timestamp, key, value, headers)))
    _check_consumed(cursor)
    return records


def check_records(payload: Buffer, count: int) -> int:
    """Check that these are `count` well-formed records with offset deltas 0, 1, 2...; NULL_* bits."""
    cursor = _Cursor(payload if type(payload) is bytes else bytes(payload))
    _check_count(cursor, count)
    flags = 0
    for index in range(count):
        cursor.begin_record()
        cursor.varint(63)
        if cursor.varint(28) != index:
            raise _invalid("offset deltas are not consecutive")
        length = cursor.length()
        if length < 0:
            flags |= NULL_KEY
        else:
            cursor.pos += length
        length = cursor.length()
        if length < 0:
            flags |= NULL_VALUE
        else:
            cursor.pos += length
        cursor.skip_headers()
        cursor.end_record()
    _check_consumed(cursor)
    return flags


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


def scan(buf: Buffer, pos: int, end: int, min_offset: int = 0) -> Scan:
    """Walk the whole batches in buf[pos:end], and stop at the first that is cut short or is none.

    A batch counts when its length is sane, its magic is 2, its offsets go on from `min_offset` and its CRC
    is right.
    """
    view = memoryview(buf)
    if pos < 0 or end > len(view) or end < pos:
        raise ValueError("a range outside the buffer")
    batches: list[BatchInfo] = []
    stop = 0
    needed = 0
    next_offset = min_offset
    while pos < end:
        if end - pos < 61:
            stop = 1
            needed = 61
            break
        (
            base_offset,
            batch_length,
            leader_epoch,
            magic,
            crc,
            attributes,
            last_offset_delta,
            _base_timestamp,
            max_timestamp,
            producer_id,
            producer_epoch,
            base_sequence,
            _record_count,
        ) = _unpack_header(view, pos)
        if batch_length < 49:
            stop = 2
            break
        if magic != 2:
            stop = 3
            break
        if base_offset < next_offset or base_offset > 0x7FFFFFFF00000000 or last_offset_delta < 0:
            stop = 4
            break
        size = batch_length + 12
        if size > end - pos:
            stop = 1
            needed = size
            break
        if crc32c(view[pos + 21 : pos + size]) != crc:
            stop = 5
            break
        last_offset = base_offset + last_offset_delta
        last_sequence = -1 if base_sequence == -1 else (base_sequence + last_offset_delta) & 0x7FFFFFFF
        batches.append(
            _new_tuple(
                BatchInfo,
                (
                    pos,
                    size,
                    base_offset,
                    last_offset,
                    max_timestamp,
                    leader_epoch,
                    attributes,
                    producer_id,
                    producer_epoch,
                    base_sequence,
                    last_sequence,
                ),
            )
        )
        next_offset = last_offset + 1
        pos += size
    return Scan(pos, ScanStop(stop), needed, next_offset, batches)


def find_offset(buf: Buffer, pos: int, end: int, target: int) -> tuple[int, bool]:
    """The position of the first batch from `pos` on whose last offset is `target` or later, by headers alone.

    With False, that batch is not in buf[pos:end]: the position is where the next header to read begins,
    which may be beyond `end`, since the bodies need not be there.
    """
    if pos < 0 or end > len(buf):
        raise ValueError("a range outside the buffer")
    while end - pos >= 61:
        if _i64(buf, pos) + _i32(buf, pos + 23) >= target:
            return pos, True
        pos += _batch_size(buf, pos)
    return pos, False


def find_timestamp(buf: Buffer, pos: int, end: int, target: int) -> tuple[int, bool]:
    """As `find_offset`, for the first batch whose latest timestamp is `target` or later."""
    if pos < 0 or end > len(buf):
        raise ValueError("a range outside the buffer")
    while end - pos >= 61:
        if _i64(buf, pos + 35) >= target:
            return pos, True
        pos += _batch_size(buf, pos)
    return pos, False


def _batch_size(buf: Buffer, pos: int) -> int:
    length = _i32(buf, pos + 8)
    if length < 49 or buf[pos + 16] != 2:
        raise KafkaError(ErrorCode.CORRUPT_MESSAGE, "the bytes of a log are no batch")
    return length + 12


def _i32(buf: Buffer, pos: int) -> int:
    value = (buf[pos] << 24) | (buf[pos + 1] << 16) | (buf[pos + 2] << 8) | buf[pos + 3]
    return value - 0x100000000 if value >= 0x80000000 else value


def _i64(buf: Buffer, pos: int) -> int:
    low = _i32(buf, pos + 4)
    if low < 0:
        low += 0x100000000
    return _i32(buf, pos) * 0x100000000 + low


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
        return base <= 0x7FFFFFFFFFFFFFFF - delta
    return base >= -0x7FFFFFFFFFFFFFFF - 1 - delta


def _difference_fits(value: int, base: int) -> bool:
    if base >= 0:
        return value >= -0x7FFFFFFFFFFFFFFF - 1 + base
    return value <= 0x7FFFFFFFFFFFFFFF + base


def _check_count(cursor: _Cursor, count: int) -> None:
    if count < 0 or count > cursor.size // _RECORD_BYTES_MIN:
        raise _invalid("a record count does not fit its batch")


def _check_consumed(cursor: _Cursor) -> None:
    if cursor.pos != cursor.size:
        raise _invalid("a batch is longer than its records")


def _invalid(message: str) -> KafkaError:
    return KafkaError(ErrorCode.INVALID_RECORD, message)
