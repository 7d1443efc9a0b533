"""What a batch must satisfy before it enters a log: Kafka's LogValidator, by headers wherever that is enough.

Bytes, a topic's settings and the time go in; the bytes to append come out, or KafkaError with the code that
Kafka answers. Nothing of the log is looked at here (sequence numbers are `producer_state`'s). Invariant: what is
returned is exactly one whole batch of magic 2 whose CRC is right and whose records number as many as its offsets.
The payload is inflated or walked only where a setting of the topic asks for it: a codec of its own, compaction
(records need keys), a bound on how old records may be. `PartitionLog.append` is the caller.
"""

import struct
from typing import Final, NamedTuple, NoReturn

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.settings import TopicConfig
from headrace.records.batch import (
    ATTRIBUTES_POSITION,
    COMPRESSION_MASK,
    CONTROL_BIT,
    HEADER_SIZE,
    LOG_OVERHEAD,
    MAGIC_POSITION,
    MAGIC_V2,
    MAX_TIMESTAMP_POSITION,
    NO_TIMESTAMP,
    TIMESTAMP_TYPE_BIT,
    TRANSACTIONAL_BIT,
    BatchHeader,
    assign,
    crc_ok,
    parse_header,
    placed,
    seal,
    set_log_append_time,
)
from headrace.records.builder import iter_records, recompress
from headrace.records.codec import NULL_KEY, Record, check_records
from headrace.records.compression import INFLATED_BYTES_MAX, decompress
from headrace.records.crc import crc32c
from headrace.storage.markers import EndTransactionMarker, parse_marker
from headrace.storage.origin import Origin
from headrace.storage.producer_state import ProducerState

LENGTH_POSITION: Final = 8
_LENGTH: Final = struct.Struct(">i")
_TIMESTAMP: Final = struct.Struct(">q")
_LENGTH_MIN: Final = 14  # of the oldest format: what Kafka takes for a length at all
_COMPRESSION_ID_MAX: Final = 4
_COMPRESSION_IDS: Final = {"uncompressed": 0, "none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
_UNBOUNDED_MS: Final = 2**63 - 1


class RecordsRefused(KafkaError):
    """A batch is refused because of records in it, told by their number in the batch."""

    def __init__(self, code: ErrorCode, message: str, record_errors: list[tuple[int, str]]) -> None:
        super().__init__(code, message)
        self.record_errors = record_errors


class Validated(NamedTuple):
    """A batch that may be appended. `data` is the caller's memory unless the batch had to be recompressed."""

    data: memoryview
    header: BatchHeader
    log_append_time_ms: int
    """-1 where the records keep their own timestamps."""


def validate(data: memoryview, config: TopicConfig, now_ms: int) -> Validated:
    """Check the records of one partition of a Produce request, and stamp or recompress them as the topic asks."""
    size = len(data)
    if size < HEADER_SIZE or data[MAGIC_POSITION] != MAGIC_V2:
        _refuse_non_batch(data)
    header = parse_header(data)
    (
        base_offset,
        batch_length,
        _,
        _,
        crc,
        attributes,
        last_offset_delta,
        _,
        max_timestamp,
        producer_id,
        _,
        base_sequence,
        record_count,
    ) = header
    if batch_length + LOG_OVERHEAD != size:
        data = _only_batch(data, header)
        size = len(data)
    if base_offset != 0:
        raise KafkaError(
            ErrorCode.INVALID_RECORD,
            f"The baseOffset of the record batch should be 0, but it is {base_offset}",
        )
    if size > config.max_message_bytes:
        _refuse_size(size, config)
    if crc32c(data[ATTRIBUTES_POSITION:]) != crc:
        raise KafkaError(ErrorCode.CORRUPT_MESSAGE, "Record is corrupt (stored crc does not match)")
    if size > config.segment_bytes:
        raise KafkaError(
            ErrorCode.RECORD_LIST_TOO_LARGE,
            f"Message batch size is {size} bytes which exceeds the maximum configured segment size of "
            f"{config.segment_bytes}",
        )
    if record_count != last_offset_delta + 1 or record_count <= 0:
        raise KafkaError(
            ErrorCode.INVALID_RECORD,
            f"Inconsistent batch: {record_count} records for offsets 0 to {last_offset_delta}",
        )
    if attributes & (CONTROL_BIT | COMPRESSION_MASK):
        _check_attributes(attributes)
    if producer_id >= 0 and base_sequence < 0:
        raise KafkaError(
            ErrorCode.INVALID_RECORD,
            f"Invalid sequence number {base_sequence} in record batch with producerId {producer_id}",
        )
    if "compact" in config.cleanup_policy:
        _check_keys(data, header)
    wanted = config.compression_type
    if wanted != "producer" and _COMPRESSION_IDS[wanted] != attributes & COMPRESSION_MASK:
        again = recompress(
            data, _COMPRESSION_IDS[wanted], level=_level(wanted, config), limit=INFLATED_BYTES_MAX
        )
        data = memoryview(bytearray(again))
        header = parse_header(data)
        if len(data) > config.max_message_bytes:
            _refuse_size(len(data), config)
        if len(data) > config.segment_bytes:
            raise KafkaError(
                ErrorCode.RECORD_LIST_TOO_LARGE,
                f"Message batch size is {len(data)} bytes under the topic's compression.type, which exceeds the "
                f"maximum configured segment size of {config.segment_bytes}",
            )
    if config.message_timestamp_type == "LogAppendTime":
        return _stamp(data, header, now_ms)
    if attributes & TIMESTAMP_TYPE_BIT:
        data, header = _clear_timestamp_type(data)
    if max_timestamp - now_ms > config.message_timestamp_after_max_ms:
        data, header = _check_newest(data, now_ms, config)
    if config.message_timestamp_before_max_ms != _UNBOUNDED_MS:
        _check_oldest(data, now_ms, config)
    return Validated(data, header, NO_TIMESTAMP)


def is_zstd(data: memoryview) -> bool:
    """Whether a batch says that it is compressed with a codec that older clients do not know."""
    return (
        len(data) >= HEADER_SIZE
        and data[ATTRIBUTES_POSITION + 1] & COMPRESSION_MASK == _COMPRESSION_IDS["zstd"]
    )


def is_transactional(data: memoryview) -> bool:
    """Whether a batch says that it is part of a transaction."""
    return len(data) >= HEADER_SIZE and bool(data[ATTRIBUTES_POSITION + 1] & TRANSACTIONAL_BIT)


def check_trusted(
    data: memoryview, next_offset: int, leader_epoch: int, origin: Origin, producers: ProducerState
) -> list[tuple[BatchHeader, EndTransactionMarker | None]]:
    """Check batches that a coordinator or the leader hands in: their headers, and what control batches say.

    Of a coordinator's batches the offsets and the epoch are written into `data`; a leader's have theirs.
    """
    batches = []
    position = 0
    while position < len(data):
        header = parse_header(data, position)
        if origin is Origin.COORDINATOR:  # sealed a moment ago, in this process
            assign(data, position, next_offset, leader_epoch)
            header = placed(header, next_offset, leader_epoch)
        elif not crc_ok(data, position, header.size):
            raise KafkaError(ErrorCode.CORRUPT_MESSAGE, f"Corrupt batch to be appended at {next_offset}")
        if header.base_offset < next_offset or header.last_offset_delta < 0:
            raise KafkaError(
                ErrorCode.INVALID_RECORD,
                f"Out of order offset {header.base_offset} in a batch to be appended at {next_offset}",
            )
        marker = None
        if header.is_control and header.record_count:
            record = iter_records(data[position : position + header.size])[0]
            marker = parse_marker(record.key, record.value)
            if marker is not None:
                producers.check_marker(header, marker, origin)
        else:
            producers.check(header, origin)
        batches.append((header, marker))
        next_offset = header.next_offset
        position += header.size
    if not batches:
        raise KafkaError(ErrorCode.INVALID_RECORD, "No batches to append")
    return batches


def _refuse_size(size: int, config: TopicConfig) -> NoReturn:
    raise KafkaError(
        ErrorCode.MESSAGE_TOO_LARGE,
        f"The record batch size is {size} bytes which exceeds the maximum configured value of "
        f"{config.max_message_bytes}",
    )


def _level(codec: str, config: TopicConfig) -> int | None:
    """The topic's compression level for a codec that has one."""
    if codec == "gzip":
        return None if config.compression_gzip_level == -1 else config.compression_gzip_level
    if codec == "zstd":
        return config.compression_zstd_level
    return config.compression_lz4_level if codec == "lz4" else None


def _stamp(data: memoryview, header: BatchHeader, now_ms: int) -> Validated:
    data = _writable(data)
    set_log_append_time(data, 0, len(data), now_ms)
    return Validated(data, parse_header(data), now_ms)


def _clear_timestamp_type(data: memoryview) -> tuple[memoryview, BatchHeader]:
    """A producer does not choose the topic's timestamp type: Kafka writes the topic's over it."""
    data = _writable(data)
    data[ATTRIBUTES_POSITION + 1] &= ~TIMESTAMP_TYPE_BIT & 0xFF
    seal(data, 0, len(data))
    return data, parse_header(data)


def _writable(data: memoryview) -> memoryview:
    return memoryview(bytearray(data)) if data.readonly else data


def _check_attributes(attributes: int) -> None:
    if attributes & CONTROL_BIT:
        raise KafkaError(ErrorCode.INVALID_RECORD, "Clients are not allowed to write control records")
    if attributes & COMPRESSION_MASK > _COMPRESSION_ID_MAX:
        raise KafkaError(
            ErrorCode.UNSUPPORTED_COMPRESSION_TYPE,
            f"Unknown compression type id: {attributes & COMPRESSION_MASK}",
        )


def _check_keys(data: memoryview, header: BatchHeader) -> None:
    payload = decompress(header.compression, data[HEADER_SIZE:], INFLATED_BYTES_MAX)
    if check_records(payload, header.record_count) & NULL_KEY:
        reason = "Compacted topic cannot accept message without key"
        keyless = [number for number, record in enumerate(iter_records(data)) if record.key is None]
        _refuse_records(ErrorCode.INVALID_RECORD, [(number, reason) for number in keyless])


def _check_oldest(data: memoryview, now_ms: int, config: TopicConfig) -> None:
    """The header tells the newest record's time, but not the oldest's."""
    limit = now_ms - config.message_timestamp_before_max_ms
    old = [
        (number, _out_of_range(record, now_ms, config))
        for number, record in enumerate(iter_records(data))
        if NO_TIMESTAMP != record.timestamp < limit
    ]
    if old:
        _refuse_records(ErrorCode.INVALID_TIMESTAMP, old)


def _check_newest(data: memoryview, now_ms: int, config: TopicConfig) -> tuple[memoryview, BatchHeader]:
    """The header's latest timestamp is too far ahead: so is a record's, or the header does not tell the truth."""
    limit = now_ms + config.message_timestamp_after_max_ms
    records = iter_records(data)
    ahead = [
        (number, _out_of_range(record, now_ms, config))
        for number, record in enumerate(records)
        if record.timestamp > limit
    ]
    if ahead:
        _refuse_records(ErrorCode.INVALID_TIMESTAMP, ahead)
    data = _writable(data)
    _TIMESTAMP.pack_into(data, MAX_TIMESTAMP_POSITION, max([record.timestamp for record in records]))
    seal(data, 0, len(data))
    return data, parse_header(data)


def _out_of_range(record: Record, now_ms: int, config: TopicConfig) -> str:
    earliest = now_ms - config.message_timestamp_before_max_ms
    latest = now_ms + config.message_timestamp_after_max_ms
    return (
        f"Timestamp {record.timestamp} of message with offset {record.offset} is out of range. "
        f"The timestamp should be within [{earliest}, {latest}]"
    )


def _refuse_records(code: ErrorCode, errors: list[tuple[int, str]]) -> NoReturn:
    """As Kafka tells it: in a sentence, with the first few; the reply carries the list too."""
    if code is ErrorCode.INVALID_TIMESTAMP:
        message = "One or more records have been rejected due to invalid timestamp"
    else:
        message = (
            f"One or more records have been rejected due to {len(errors)} record errors in total, "
            f"and only showing the first three errors at most: {[reason for _, reason in errors[:3]]}"
        )
    raise RecordsRefused(code, message, errors)


def _refuse_non_batch(data: memoryview) -> NoReturn:
    """Say what bytes are that do not begin with a batch of magic 2, in the order in which Kafka finds out."""
    if len(data) > MAGIC_POSITION:
        _check_head(data)
        if data[MAGIC_POSITION] != MAGIC_V2:
            raise KafkaError(
                ErrorCode.INVALID_RECORD,
                "Produce requests are only allowed to contain record batches with magic version 2",
            )
    raise KafkaError(
        ErrorCode.INVALID_RECORD, "Produce requests must have at least one record batch per partition"
    )


def _check_head(data: memoryview) -> int:
    """Length and magic of what should be a batch; the size it states."""
    length: int = _LENGTH.unpack_from(data, LENGTH_POSITION)[0]
    if length < _LENGTH_MIN:
        raise KafkaError(
            ErrorCode.CORRUPT_MESSAGE,
            f"Record size {length} is less than the minimum record overhead ({_LENGTH_MIN})",
        )
    magic = data[MAGIC_POSITION]
    if magic > MAGIC_V2:
        raise KafkaError(ErrorCode.CORRUPT_MESSAGE, f"Invalid magic found in record: {magic}")
    return length + LOG_OVERHEAD


def _only_batch(data: memoryview, header: BatchHeader) -> memoryview:
    """The one batch in `data`, whose length is not that of the batch. What follows it may only be one cut short."""
    if header.size > len(data):
        raise KafkaError(
            ErrorCode.INVALID_RECORD, "Produce requests must have at least one record batch per partition"
        )
    rest = data[header.size :]
    if len(rest) > MAGIC_POSITION and _check_head(rest) <= len(rest):
        raise KafkaError(
            ErrorCode.INVALID_RECORD,
            "Produce requests are only allowed to contain exactly one record batch per partition",
        )
    return data[: header.size]
