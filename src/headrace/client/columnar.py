"""Arrow tables through an ordinary producer and consumer: whole batches, no Python loop over records.

Owns the step between tables and the client's batches; the codec between columns and bytes is `records.columns`, its
Arrow side `arrow`. Invariants: rows keep their order within a partition, and a row's partition is that of its key
as `send` would choose it; what `poll_table` returns is what `poll` would have, and moves the position as far. Needs
pyarrow. Called by `producer` and `consumer`.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headrace.base.errors import ErrorCode
from headrace.client.arrow import TableMaker, concat, partitions_of, rows_of
from headrace.client.errors import ClientError, RecordTooLarge
from headrace.client.fetched import Chunk
from headrace.records.batch import HEADER_SIZE
from headrace.records.codec import Delivery
from headrace.records.columns import add_batch

if TYPE_CHECKING:
    from headrace.client.consumer import Consumer
    from headrace.client.producer import Producer

BATCH_BYTES = 512 * 1024
OFFSET_END = 2**63 - 1


async def send_table(producer: "Producer", topic: str, table: Any, names: dict[str, Any]) -> list[Delivery]:
    """Send the rows of a table or record batch; a promise for each batch they were put into."""
    count = await producer.partitions(topic)
    size_max = min(max(producer.config.batch_size, BATCH_BYTES), producer.config.max_request_size)
    partition_name = names.pop("partition")
    out: list[Delivery] = []
    for turn, batch in enumerate(table.to_batches() if hasattr(table, "to_batches") else [table]):
        if not batch.num_rows:
            continue
        rows = rows_of(batch, **names)
        rows.digests = False
        order, starts = rows.assign(partitions_of(batch, partition_name), count, turn)
        now_ms = time.time_ns() // 1_000_000
        for number in range(count):
            at, last = starts[number], starts[number + 1]
            while at < last:
                framed = bytearray(size_max)
                done = rows.encode(order, at, last, framed, HEADER_SIZE, now_ms)
                if done == at:
                    raise RecordTooLarge(
                        f"a row is larger than max.request.size={producer.config.max_request_size}",
                        "raise max.request.size, and max.message.bytes of the topic",
                    )
                del framed[rows.position :]
                times_ms = (rows.first_timestamp(order[at], now_ms), rows.latest_timestamp)
                delivery = await producer.send_framed(topic, number, framed, done - at, times_ms)
                out.append(delivery)
                at = done
    return out


async def poll_table(consumer: "Consumer", timeout_ms: float, columns: Sequence[str]) -> Any:
    """What was fetched, as one Arrow table; an empty one when nothing comes within the timeout."""
    if consumer.ready_records:
        raise ClientError(
            "records that iteration has polled are still waiting",
            "read by iteration or by poll_arrow, not both",
            ErrorCode.INVALID_REQUEST,
        )
    deadline_s = asyncio.get_running_loop().time() + timeout_ms / 1000
    chunks = await consumer.poll_chunks(deadline_s)
    return concat([batch for chunk in chunks for batch in _batches(chunk, columns)], columns)


def _batches(chunk: Chunk, columns: Sequence[str]) -> list[Any]:
    """The records of one fetch of one partition as Arrow record batches, one for each kind of timestamp."""
    maker = TableMaker(*chunk.partition, columns)
    held = maker.new_columns()
    out = []
    timestamp_type = 0
    for header, view in chunk.visible():
        kind = int(header.is_log_append_time)
        if kind != timestamp_type and held.row_count:
            out.append(maker.make(held, timestamp_type))
            held = maker.new_columns()
        timestamp_type = kind
        add_batch(held, header, view, chunk.next_offset, OFFSET_END)
    if held.row_count:
        out.append(maker.make(held, timestamp_type))
    return out
