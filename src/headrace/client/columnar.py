"""Arrow tables through an ordinary producer and consumer: whole batches, no Python loop over records.

Owns the step between tables and the client's batches; the codec between columns and bytes is `records.columns`, its
Arrow side `arrow`. Invariants: rows keep their order within a partition, and a row's partition is that of its key
as `send` would choose it; what `poll_table` returns is what `poll` would have, and moves the position as far. Needs
pyarrow. Called by `producer` and `consumer`.
"""

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.base.errors import ErrorCode
from headrace.client.arrow import TableMaker, concat, partitions_of, rows_of
from headrace.client.errors import ClientError, RecordTooLarge
from headrace.client.fetched import Chunk
from headrace.client.topics import TopicPartition
from headrace.client.transport import unseen
from headrace.records.batch import HEADER_SIZE
from headrace.records.codec import Delivery
from headrace.records.columns import add_batch

if TYPE_CHECKING:
    from headrace.client.consumer import Consumer
    from headrace.client.producer import Producer

OFFSET_END = 2**63 - 1
MAKERS_MAX = 16
SPARE_BYTES_MAX = 16 * 1024 * 1024


class Spares:
    """Memory of batches that were acknowledged, to be filled again: new memory costs more than what is put into it.

    A producer keeps one. All buffers in it are meant for the size that was asked for last; one that somebody still
    looks at is let go.
    """

    def __init__(self) -> None:
        self._size = 0
        self._free: list[bytearray] = []

    def take(self, size: int) -> bytearray:
        if size != self._size:
            self._size = size
            self._free.clear()
        while self._free:
            buffer = self._free.pop()
            if unseen(buffer):
                buffer += bytes(size - len(buffer))
                return buffer
        return bytearray(size)

    def give(self, buffer: bytearray) -> None:
        if len(buffer) <= self._size and self._size * (len(self._free) + 1) <= SPARE_BYTES_MAX:
            self._free.append(buffer)


async def send_table(
    producer: "Producer", topic: str, count: int, size_max: int, table: Any, names: dict[str, Any]
) -> list[Delivery]:
    """Send the rows of a table or record batch to the `count` partitions of a topic; a promise for each batch made."""
    partition_name = names.pop("partition")
    spares = producer.spares if producer.config.acks else None  # with acks=0 nobody says when bytes have left
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
                framed = bytearray(size_max) if spares is None else spares.take(size_max)
                done = rows.encode(order, at, last, framed, HEADER_SIZE, now_ms)
                if done == at:  # larger than batches are: it goes alone
                    framed = bytearray(producer.config.max_request_size)
                    done = rows.encode(order, at, at + 1, framed, HEADER_SIZE, now_ms)
                if done == at:
                    raise RecordTooLarge(
                        f"a row is larger than max.request.size={producer.config.max_request_size}",
                        "raise max.request.size, and max.message.bytes of the topic",
                    )
                del framed[rows.position :]
                times_ms = (rows.first_timestamp(order[at], now_ms), rows.latest_timestamp)
                delivery = await producer.send_framed(topic, number, framed, done - at, times_ms)
                if spares is not None:
                    delivery.batch.call_at(0, partial(_give_back, spares, framed), delivery)
                out.append(delivery)
                at = done
    return out


class Makers:
    """The makers of one consumer's tables, kept because what is the same in all rows is made once in each."""

    def __init__(self) -> None:
        self._made: dict[tuple[TopicPartition, tuple[str, ...]], TableMaker] = {}

    def of(self, partition: TopicPartition, columns: Sequence[str]) -> TableMaker:
        place = partition, tuple(columns)
        maker = self._made.get(place)
        if maker is None:
            if len(self._made) >= MAKERS_MAX:
                self._made.clear()
            maker = self._made[place] = TableMaker(*partition, columns)
        return maker


def _give_back(spares: Spares, framed: bytearray, delivery: Delivery) -> None:
    """The batch is done: its memory can be filled again unless it failed, when it may still be on its way."""
    if delivery.batch.error_at(delivery.place) is None:
        spares.give(framed)


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
    if consumer.makers is None:
        consumer.makers = Makers()
    out: list[Any] = []
    for chunk in chunks:
        out += _batches(chunk, consumer.makers.of(chunk.partition, columns))
    return concat(out, columns)


def _batches(chunk: Chunk, maker: TableMaker) -> list[Any]:
    """The records of one fetch of one partition as Arrow record batches, one for each kind of timestamp."""
    held = maker.new_columns(chunk.size_bytes)
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
