"""Records as columns: the compiled loops of `_arrow` and `_arrow_rows`, and the step from a whole batch to them.

Owns which of the two codecs is taken (as `codec` does) and the inflation in between. Knows nothing of pyarrow: what
comes out are the buffers that Arrow's format describes, so a broker never needs that package. Callers: the client's
Arrow modules.
"""

from headrace.base.errors import ErrorCode, KafkaError
from headrace.records import codec  # first, because it chooses between compiled and interpreted
from headrace.records._arrow import Columns
from headrace.records._arrow_rows import Rows, Source
from headrace.records.batch import (
    HEADER_SIZE,
    MAGIC_V2,
    NO_PARTITION_LEADER_EPOCH,
    NO_PRODUCER_EPOCH,
    NO_PRODUCER_ID,
    NO_SEQUENCE,
    NO_TIMESTAMP,
    TRANSACTIONAL_BIT,
    BatchHeader,
    Buffer,
)
from headrace.records.builder import finish_batch
from headrace.records.compression import INFLATED_BYTES_MAX, decompress

COMPILED = codec.COMPILED

__all__ = ["COMPILED", "Columns", "Rows", "Source", "add_batch", "build_batch_of_rows"]


def add_batch(
    columns: Columns,
    header: BatchHeader,
    batch: Buffer,
    first_offset: int,
    end_offset: int,
    *,
    limit: int = INFLATED_BYTES_MAX,
) -> int:
    """Take one batch's records from `first_offset` to before `end_offset` into the columns; how many they were."""
    if header.size > len(batch):
        raise KafkaError(ErrorCode.CORRUPT_MESSAGE, "a batch is cut short")
    if header.record_count == 0:
        return 0
    payload = decompress(header.compression, memoryview(batch)[HEADER_SIZE : header.size], limit)
    append_time = header.max_timestamp if header.is_log_append_time else NO_TIMESTAMP
    count: int = columns.add(
        payload,
        header.record_count,
        header.base_offset,
        header.base_timestamp,
        append_time,
        first_offset,
        end_offset,
    )
    return count


def build_batch_of_rows(
    rows: Rows,
    order: memoryview | None,
    first: int,
    last: int,
    *,
    size_max: int,
    now_ms: int,
    compression: int = 0,
    compression_level: int | None = None,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = NO_PRODUCER_EPOCH,
    base_sequence: int = NO_SEQUENCE,
    transactional: bool = False,
) -> tuple[bytes, int]:
    """One batch of rows order[first:…], at most `size_max` bytes before compression, and the index after its last.

    Raises MESSAGE_TOO_LARGE when not even the first row fits.
    """
    out = bytearray(size_max)
    done: int = rows.encode(order, first, last, out, HEADER_SIZE, now_ms)
    if done == first:
        raise KafkaError(
            ErrorCode.MESSAGE_TOO_LARGE, f"a row is larger than a batch of {size_max} bytes may be"
        )
    del out[rows.position :]
    row = first if order is None else order[first]
    header = BatchHeader(
        base_offset=0,
        batch_length=0,
        partition_leader_epoch=NO_PARTITION_LEADER_EPOCH,
        magic=MAGIC_V2,
        crc=0,
        attributes=compression | (TRANSACTIONAL_BIT if transactional else 0),
        last_offset_delta=done - first - 1,
        base_timestamp=rows.first_timestamp(row, now_ms),
        max_timestamp=rows.latest_timestamp,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        record_count=done - first,
    )
    return finish_batch(header, out, compression_level), done
