"""The record batch of format v2: its 61-byte header, read and patched in place.

A batch is one contiguous run of bytes; its header describes it completely, so the broker never looks inside
on the produce and fetch paths. Invariant: everything from the attributes on is covered by the CRC, and only
`base_offset` and `partition_leader_epoch` lie before it, which is why `assign` costs the same for 1 KB as
for 1 MB.

    base_offset i64 | batch_length i32 | partition_leader_epoch i32 | magic i8 | crc u32
    -- covered by the CRC --
    attributes i16 | last_offset_delta i32 | base_timestamp i64 | max_timestamp i64
    producer_id i64 | producer_epoch i16 | base_sequence i32 | record_count i32 | records

Callers: storage (validation, append, recovery), replication, the client, and the rest of this layer.
"""

import struct
from enum import IntEnum
from typing import Final, NamedTuple, NoReturn, TypeAlias

from headrace.base.errors import ErrorCode, KafkaError
from headrace.records.crc import crc32c

Buffer: TypeAlias = bytes | bytearray | memoryview

MAGIC_V2: Final = 2
HEADER_SIZE: Final = 61
LOG_OVERHEAD: Final = 12  # base_offset and batch_length: the bytes that batch_length does not count
BATCH_LENGTH_MIN: Final = HEADER_SIZE - LOG_OVERHEAD

MAGIC_POSITION: Final = 16  # the same in every message format, so that older ones can be told apart
CRC_POSITION: Final = 17
ATTRIBUTES_POSITION: Final = 21  # the first byte that the CRC covers
LAST_OFFSET_DELTA_POSITION: Final = 23
MAX_TIMESTAMP_POSITION: Final = 35

COMPRESSION_MASK: Final = 0x07
TIMESTAMP_TYPE_BIT: Final = 0x08
TRANSACTIONAL_BIT: Final = 0x10
CONTROL_BIT: Final = 0x20
DELETE_HORIZON_BIT: Final = 0x40

NO_PRODUCER_ID: Final = -1
NO_PRODUCER_EPOCH: Final = -1
NO_SEQUENCE: Final = -1
NO_PARTITION_LEADER_EPOCH: Final = -1
NO_TIMESTAMP: Final = -1

SEQUENCE_MAX: Final = 0x7FFFFFFF

_HEADER: Final = struct.Struct(">qiibIhiqqqhii")
_U32: Final = struct.Struct(">I")
_I64: Final = struct.Struct(">q")
assert _HEADER.size == HEADER_SIZE

_unpack_header = _HEADER.unpack_from
_unpack_u32 = _U32.unpack_from
_pack_i64 = _I64.pack_into
_pack_i32 = struct.Struct(">i").pack_into
_new_tuple = tuple.__new__


class TimestampType(IntEnum):
    """What a record's timestamp means, as the attribute bit spells it."""

    CREATE_TIME = 0
    LOG_APPEND_TIME = 1


class Record(NamedTuple):
    """One decoded record. A header key that is not UTF-8 keeps its bytes as surrogate escapes."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


class BatchHeader(NamedTuple):
    """The header's fields in wire order."""

    base_offset: int
    batch_length: int
    partition_leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def size(self) -> int:
        """Bytes of the whole batch."""
        return self.batch_length + LOG_OVERHEAD

    @property
    def last_offset(self) -> int:
        return self.base_offset + self.last_offset_delta

    @property
    def next_offset(self) -> int:
        return self.base_offset + self.last_offset_delta + 1

    @property
    def compression(self) -> int:
        """The codec's number in `headrace.records.compression`; 5 to 7 are no codec."""
        return self.attributes & COMPRESSION_MASK

    @property
    def is_transactional(self) -> bool:
        return self.attributes & TRANSACTIONAL_BIT != 0

    @property
    def is_control(self) -> bool:
        return self.attributes & CONTROL_BIT != 0

    @property
    def is_log_append_time(self) -> bool:
        return self.attributes & TIMESTAMP_TYPE_BIT != 0

    @property
    def has_delete_horizon(self) -> bool:
        """Whether base_timestamp is the time from which tombstones may go, not a record's time."""
        return self.attributes & DELETE_HORIZON_BIT != 0

    @property
    def has_producer_id(self) -> bool:
        return self.producer_id > NO_PRODUCER_ID

    @property
    def last_sequence(self) -> int:
        """The sequence of the last record; sequences wrap from 2^31-1 to 0."""
        if self.base_sequence == NO_SEQUENCE:
            return NO_SEQUENCE
        return add_sequence(self.base_sequence, self.last_offset_delta)


class BatchInfo(NamedTuple):
    """What recovery needs to know of one batch that `codec.scan` found whole."""

    position: int
    size: int
    base_offset: int
    last_offset: int
    max_timestamp: int
    partition_leader_epoch: int
    attributes: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    last_sequence: int


class ScanStop(IntEnum):
    """Why a scan stopped. After a BAD one, the bytes at its position are no batch, or not one of this log."""

    END = 0
    NEED_MORE = 1
    BAD_LENGTH = 2
    BAD_MAGIC = 3
    BAD_OFFSET = 4
    BAD_CRC = 5
    GAP = 6

    @property
    def corrupt(self) -> bool:
        return ScanStop.BAD_LENGTH <= self <= ScanStop.BAD_CRC


class Scan(NamedTuple):
    """The outcome of `codec.scan`: whole batches up to `position`, and why it went no further.

    `needed_bytes` counts from `position`: what the batch there needs before it can be judged (NEED_MORE
    only).
    """

    position: int
    stop: ScanStop
    needed_bytes: int
    next_offset: int
    batches: list[BatchInfo]


class SegmentScan:
    """What recovery learns of one segment, carried from one call of `codec.scan_segment` to the next.

    `offset_entries` and `time_entries` are the segment's index files as Kafka writes them; `epochs` holds
    (leader epoch, first offset) wherever the epoch changed. With `stop_at_gaps` the scan ends with GAP before a
    batch that is whole but skips offsets: base offsets are outside the CRC, so the caller may want to look around
    before it believes one; having set `next_offset` to it, it goes on.
    """

    __slots__ = (
        "base_offset",
        "batch_count",
        "bytes_since_entry",
        "epochs",
        "index_interval_bytes",
        "indexed_timestamp",
        "leader_epoch",
        "max_timestamp",
        "max_timestamp_offset",
        "next_offset",
        "offset_entries",
        "stop_at_gaps",
        "time_entries",
    )

    def __init__(self, base_offset: int, index_interval_bytes: int, *, stop_at_gaps: bool = False) -> None:
        self.base_offset = base_offset
        self.stop_at_gaps = stop_at_gaps
        self.batch_count = 0
        self.index_interval_bytes = index_interval_bytes
        self.next_offset = base_offset
        self.bytes_since_entry = 0
        self.max_timestamp = NO_TIMESTAMP
        self.max_timestamp_offset = base_offset
        self.indexed_timestamp = NO_TIMESTAMP
        self.leader_epoch = NO_PARTITION_LEADER_EPOCH
        self.offset_entries = bytearray()
        self.time_entries = bytearray()
        self.epochs: list[tuple[int, int]] = []


def add_sequence(sequence: int, increment: int) -> int:
    """Kafka's sequence arithmetic: non-negative 32-bit, and the number after 2^31-1 is 0."""
    return (sequence + increment) & SEQUENCE_MAX


def parse_header(buf: Buffer, pos: int = 0) -> BatchHeader:
    """The header at `pos`. Refuses what is no v2 batch; says nothing about the CRC or the bytes after it."""
    try:
        fields = _unpack_header(buf, pos)
    except struct.error:
        _refuse_short(buf, pos)
    header = _new_tuple(BatchHeader, fields)
    if header.magic != MAGIC_V2:
        _refuse_magic(header.magic)
    if header.batch_length < BATCH_LENGTH_MIN:
        raise KafkaError(
            ErrorCode.CORRUPT_MESSAGE,
            f"batch length {header.batch_length} is below the {BATCH_LENGTH_MIN} bytes of an empty batch",
        )
    return header


def crc_ok(buf: Buffer, pos: int, size: int) -> bool:
    """Whether the batch of `size` bytes at `pos` is all there and has the CRC it states."""
    view = memoryview(buf)
    if size < HEADER_SIZE or pos < 0 or pos + size > len(view):
        return False
    stated: int = _unpack_u32(view, pos + CRC_POSITION)[0]
    return crc32c(view[pos + ATTRIBUTES_POSITION : pos + size]) == stated


def assign(buf: bytearray | memoryview, pos: int, base_offset: int, leader_epoch: int) -> None:
    """Give the batch its place in the log. Both fields lie outside the CRC."""
    _pack_i64(buf, pos, base_offset)
    _pack_i32(buf, pos + LOG_OVERHEAD, leader_epoch)


def placed(header: BatchHeader, base_offset: int, leader_epoch: int) -> BatchHeader:
    """The header of a batch that was given its place by `assign`."""
    return _new_tuple(BatchHeader, (base_offset, header.batch_length, leader_epoch, *header[3:]))


def set_log_append_time(buf: bytearray | memoryview, pos: int, size: int, ms: int) -> None:
    """Make `ms` the time of every record of the batch, and restate the CRC, which covers both fields."""
    buf[pos + ATTRIBUTES_POSITION + 1] |= TIMESTAMP_TYPE_BIT
    _pack_i64(buf, pos + MAX_TIMESTAMP_POSITION, ms)
    seal(buf, pos, size)


def seal(buf: bytearray | memoryview, pos: int, size: int) -> None:
    """State the CRC of the batch of `size` bytes at `pos`."""
    _U32.pack_into(buf, pos + CRC_POSITION, crc32c(memoryview(buf)[pos + ATTRIBUTES_POSITION : pos + size]))


def pack_header(buf: bytearray | memoryview, pos: int, header: BatchHeader) -> None:
    """Write the header's fields at `pos` as they are (its CRC too: see `seal`)."""
    _HEADER.pack_into(buf, pos, *header)


def _refuse_short(buf: Buffer, pos: int) -> NoReturn:
    """Say why fewer than 61 bytes are no batch: an older message can be that short, and is told so."""
    if pos >= 0 and pos + MAGIC_POSITION < len(buf):
        magic = buf[pos + MAGIC_POSITION]
        if magic in (0, 1):
            _refuse_magic(magic)
    raise KafkaError(ErrorCode.CORRUPT_MESSAGE, "fewer bytes than a batch header")


def _refuse_magic(magic: int) -> NoReturn:
    if magic in (0, 1):
        raise KafkaError(
            ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT,
            f"message format {magic} is not supported, only record batches of magic {MAGIC_V2}",
        )
    raise KafkaError(ErrorCode.CORRUPT_MESSAGE, f"magic {magic} is no message format")
