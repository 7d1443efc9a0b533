"""Whole batches: from records to bytes and back.

Puts together what the layer has: header, codec, compression. Invariant: a batch built here is byte for byte
what Kafka's own clients build of the same records (compressed bytes aside, which are the codec's own
business).

Callers: the client, coordinators and the metadata log, and storage where it must look inside a batch.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from headrace.base.errors import ErrorCode, KafkaError
from headrace.records.batch import (
    COMPRESSION_MASK,
    CONTROL_BIT,
    HEADER_SIZE,
    LOG_OVERHEAD,
    MAGIC_V2,
    NO_PARTITION_LEADER_EPOCH,
    NO_PRODUCER_EPOCH,
    NO_PRODUCER_ID,
    NO_SEQUENCE,
    NO_TIMESTAMP,
    TIMESTAMP_TYPE_BIT,
    TRANSACTIONAL_BIT,
    BatchHeader,
    Buffer,
    Record,
    TimestampType,
    crc_ok,
    pack_header,
    parse_header,
    seal,
)
from headrace.records.codec import RecordBuffer, RecordInput, decode_records, encode_record, encode_records
from headrace.records.compression import INFLATED_BYTES_MAX, compress, decompress


def build_batch(
    records: Sequence[RecordInput],
    *,
    base_offset: int = 0,
    partition_leader_epoch: int = NO_PARTITION_LEADER_EPOCH,
    compression: int = 0,
    timestamp_type: TimestampType = TimestampType.CREATE_TIME,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = NO_PRODUCER_EPOCH,
    base_sequence: int = NO_SEQUENCE,
    transactional: bool = False,
    control: bool = False,
    compression_level: int | None = None,
) -> bytes:
    """One batch of (timestamp_ms, key, value, headers), the first of them setting its base timestamp."""
    if not records:
        raise ValueError("a batch holds at least one record")
    attributes = compression & COMPRESSION_MASK
    if timestamp_type is TimestampType.LOG_APPEND_TIME:
        attributes |= TIMESTAMP_TYPE_BIT
    if transactional:
        attributes |= TRANSACTIONAL_BIT
    if control:
        attributes |= CONTROL_BIT
    base_timestamp = records[0][0]
    out = bytearray(HEADER_SIZE)
    count, max_timestamp = encode_records(out, records, base_timestamp)
    header = BatchHeader(
        base_offset,
        len(out) - LOG_OVERHEAD,
        partition_leader_epoch,
        MAGIC_V2,
        0,  # the CRC is for `seal`
        attributes,
        count - 1,
        base_timestamp,
        max_timestamp,
        producer_id,
        producer_epoch,
        base_sequence,
        count,
    )
    if compression:
        return finish_batch(header, out, compression_level)
    pack_header(out, 0, header)
    seal(out, 0, len(out))
    return bytes(out)


def close_batch(
    buffer: RecordBuffer,
    *,
    compression: int = 0,
    compression_level: int | None = None,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = NO_PRODUCER_EPOCH,
    base_sequence: int = NO_SEQUENCE,
    transactional: bool = False,
) -> bytearray:
    """The batch of what a buffer was filled with; without compression, in the buffer's own memory."""
    attributes = compression & COMPRESSION_MASK
    if transactional:
        attributes |= TRANSACTIONAL_BIT
    out = buffer.whole()
    if compression:
        payload = compress(compression, memoryview(out)[HEADER_SIZE:], compression_level)
        out = bytearray(HEADER_SIZE)
        out += payload
    header = BatchHeader(
        base_offset=0,
        batch_length=len(out) - LOG_OVERHEAD,
        partition_leader_epoch=NO_PARTITION_LEADER_EPOCH,
        magic=MAGIC_V2,
        crc=0,
        attributes=attributes,
        last_offset_delta=buffer.record_count - 1,
        base_timestamp=buffer.base_timestamp,
        max_timestamp=buffer.max_timestamp,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        record_count=buffer.record_count,
    )
    pack_header(out, 0, header)
    seal(out, 0, len(out))
    return out


def rebuild_batch(
    header: BatchHeader, records: Sequence[Record], *, compression_level: int | None = None
) -> bytes:
    """The batch of `header` with only these of its records left, each at its own offset.

    The offset range, the producer's fields and the attributes stay, as compaction must leave them; the base
    timestamp stays too, because with a delete horizon it is not a record's. Records keep their timestamps.
    """
    out = bytearray(HEADER_SIZE)
    max_timestamp = NO_TIMESTAMP
    for record in records:
        timestamp = header.base_timestamp if header.is_log_append_time else record.timestamp
        delta = record.offset - header.base_offset
        if not 0 <= delta <= header.last_offset_delta:
            raise ValueError(f"offset {record.offset} is outside its batch")
        encode_record(out, delta, timestamp, header.base_timestamp, record.key, record.value, record.headers)
        max_timestamp = max(max_timestamp, record.timestamp)
    if header.is_log_append_time or not records:
        max_timestamp = header.max_timestamp
    return finish_batch(
        header._replace(record_count=len(records), max_timestamp=max_timestamp), out, compression_level
    )


def recompress(
    batch: Buffer, compression: int, *, level: int | None = None, limit: int = INFLATED_BYTES_MAX
) -> bytes:
    """The same batch under another codec (0 for none); its records are copied, not decoded."""
    header = parse_header(batch)
    out = bytearray(HEADER_SIZE)
    if header.record_count:
        out += _inflate(header, batch, limit)
    attributes = (header.attributes & ~COMPRESSION_MASK) | (compression & COMPRESSION_MASK)
    return finish_batch(header._replace(attributes=attributes), out, level)


def iter_records(batch: Buffer, *, limit: int = INFLATED_BYTES_MAX) -> list[Record]:
    """The records of the one batch at the start of `batch`; `limit` bounds what it may inflate to.

    The CRC is the caller's to check (`crc_ok`): on the way from a broker's own disk it has been.
    """
    return read_records(parse_header(batch), batch, None, limit=limit)


def read_records(
    header: BatchHeader,
    batch: Buffer,
    place: tuple[type, str, int, int, int] | None,
    *,
    limit: int = INFLATED_BYTES_MAX,
) -> list[Any]:
    """The records of a batch, of the type and from the offset that `place` says (see `codec.decode_records`)."""
    if header.record_count == 0:  # compaction leaves such batches, to keep what a producer last wrote
        return []
    payload = _inflate(header, batch, limit)
    append_time = header.max_timestamp if header.is_log_append_time else NO_TIMESTAMP
    return decode_records(
        payload, header.record_count, header.base_offset, header.base_timestamp, append_time, place
    )


def iter_batches(
    buf: Buffer, pos: int = 0, *, check_crc: bool = True
) -> Iterator[tuple[BatchHeader, memoryview]]:
    """The whole batches of a run of them, such as a Fetch reply's; one cut short at its end is left out."""
    view = memoryview(buf)
    while len(view) - pos >= HEADER_SIZE:
        header = parse_header(view, pos)
        if header.size > len(view) - pos:
            return
        if check_crc and not crc_ok(view, pos, header.size):
            raise KafkaError(ErrorCode.CORRUPT_MESSAGE, f"batch at offset {header.base_offset} fails its CRC")
        yield header, view[pos : pos + header.size]
        pos += header.size


def _inflate(header: BatchHeader, batch: Buffer, limit: int) -> memoryview:
    if header.size > len(batch):
        raise KafkaError(ErrorCode.CORRUPT_MESSAGE, "a batch is cut short")
    return decompress(header.compression, memoryview(batch)[HEADER_SIZE : header.size], limit)


def finish_batch(header: BatchHeader, out: bytearray, level: int | None = None) -> bytes:
    """Compress what `out` holds behind its room for a header, and write that header with lengths and CRC."""
    return bytes(finish_in_place(header, out, level))


def finish_in_place(header: BatchHeader, out: bytearray, level: int | None = None) -> bytearray:
    """As `finish_batch`, without a copy: it is `out` itself unless it was compressed."""
    if not header.record_count:
        header = header._replace(attributes=header.attributes & ~COMPRESSION_MASK)
    if header.compression:
        payload = compress(header.compression, memoryview(out)[HEADER_SIZE:], level)
        out = bytearray(HEADER_SIZE)
        out += payload
    pack_header(out, 0, header._replace(batch_length=len(out) - LOG_OVERHEAD))
    seal(out, 0, len(out))
    return out
