"""Batches of records on their way to one partition, and the promises given for them.

Owns the life of a batch: open (takes records), closed, in flight, done. Invariants: a batch ends exactly
once, with an offset or an error; all its records end with it; its records keep the order in which they were
added. One future serves a whole batch, because a future for each record would cost more than the rest of
`send`. Called by `accumulator` and `sender`.
"""

import asyncio
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeAlias

from headrace.base.errors import KafkaError
from headrace.client.topics import TopicPartition
from headrace.records.batch import HEADER_SIZE, NO_SEQUENCE
from headrace.records.builder import build_batch

# Attributes, and varints of length, timestamp delta, offset delta, key length, value length and header count.
RECORD_OVERHEAD_BYTES = 21
HEADER_OVERHEAD_BYTES = 10
NO_OFFSET = -1

Headers: TypeAlias = Sequence[tuple[str, bytes | None]]
# The place of a batch in its partition; the halves of batch (7,) are (7, 0) and (7, 1).
Order: TypeAlias = tuple[int, ...]
Fields: TypeAlias = tuple[int, bytes | None, bytes | None, Headers]


class RecordMetadata(NamedTuple):
    """Where a record went. The offset is -1 when the broker was not asked to say (acks=0)."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int


class ProducerId(NamedTuple):
    """The identity that a broker checks sequences against."""

    producer_id: int
    epoch: int


NO_PRODUCER = ProducerId(-1, -1)


def size_upper_bound(key: bytes | None, value: bytes | None, headers: Headers) -> int:
    """The most bytes that a record can take in a batch before compression."""
    size = (
        RECORD_OVERHEAD_BYTES
        + (len(key) if key is not None else 0)
        + (len(value) if value is not None else 0)
    )
    for name, content in headers:
        size += HEADER_OVERHEAD_BYTES + len(name) * 4 + (len(content) if content is not None else 0)
    return size


class Batch:
    """Records for one partition that are sent, acknowledged and retried together."""

    __slots__ = (
        "attempts",
        "callbacks",
        "created_s",
        "deadline_s",
        "encoded",
        "error",
        "future",
        "last_error",
        "log_append_time_ms",
        "offset",
        "order",
        "partition",
        "parts",
        "producer",
        "records",
        "retry_at_s",
        "sequence",
        "size_bytes",
        "unsure",
    )

    def __init__(self, partition: TopicPartition, order: Order, created_s: float, deadline_s: float) -> None:
        self.partition = partition
        self.order = order
        self.created_s = created_s
        self.deadline_s = deadline_s
        self.records: list[Fields] = []
        self.size_bytes = HEADER_SIZE
        self.attempts = 0
        self.retry_at_s = 0.0
        self.producer = NO_PRODUCER
        self.sequence = NO_SEQUENCE
        self.unsure = False  # whether the broker may have it although no acknowledgement came
        self.encoded: bytes | None = None
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.error: KafkaError | None = None
        self.last_error: KafkaError | None = None
        self.offset = NO_OFFSET
        self.log_append_time_ms = -1
        self.parts: list[tuple[int, Batch]] | None = None
        self.callbacks: list[tuple[Callable[[Delivery], object], Delivery]] | None = None

    @property
    def done(self) -> bool:
        """Whether its outcome is known."""
        return self.future.done()

    def add(self, fields: Fields, size_bytes: int) -> "Delivery":
        """Take one more record."""
        self.records.append(fields)
        self.size_bytes += size_bytes
        return Delivery(self, len(self.records) - 1)

    def assign(self, producer: ProducerId, sequence: int) -> None:
        """Give it the identity and sequence that it is (from now on) sent with."""
        self.producer, self.sequence, self.encoded = producer, sequence, None

    def encode(self, compression: int, level: int | None) -> bytes:
        """The batch's bytes, the same on every attempt."""
        if self.encoded is None:
            self.encoded = build_batch(
                self.records,
                compression=compression,
                compression_level=level,
                producer_id=self.producer.producer_id,
                producer_epoch=self.producer.epoch,
                base_sequence=self.sequence,
            )
        return self.encoded

    def succeed(self, offset: int, log_append_time_ms: int) -> None:
        """Acknowledged: the first record is at `offset`."""
        self.offset, self.log_append_time_ms = offset, log_append_time_ms
        self._finish()

    def fail(self, error: KafkaError) -> None:
        """Given up."""
        self.error = error
        self._finish()

    def split(self, into: "list[Batch]") -> None:
        """Hand the records over to smaller batches, in order; promises follow them."""
        start = 0
        self.parts = []
        for part in into:
            self.parts.append((start, part))
            start += len(part.records)
        assert start == len(self.records)
        for callback, delivery in self.callbacks or ():
            delivery.add_done_callback(callback)
        self.callbacks = None
        self.future.set_result(None)

    def _finish(self) -> None:
        assert not self.future.done(), "a batch ends once"
        self.future.set_result(None)
        self.encoded = None
        for callback, delivery in self.callbacks or ():
            callback(delivery)
        self.callbacks = None


class Delivery:
    """The promise for one record: await it, or ask for its `result` when it is `done`."""

    __slots__ = ("_batch", "_index")

    def __init__(self, batch: Batch, index: int) -> None:
        self._batch = batch
        self._index = index

    def _follow(self) -> Batch:
        """The batch that the record is in now."""
        while self._batch.parts is not None:
            start, part = next((s, p) for s, p in reversed(self._batch.parts) if s <= self._index)
            self._batch, self._index = part, self._index - start
        return self._batch

    def done(self) -> bool:
        """Whether the record's fate is known."""
        return self._follow().done

    def exception(self) -> KafkaError | None:
        """Why it failed, or None when it was acknowledged. Only when it is done."""
        batch = self._follow()
        if not batch.done:
            raise asyncio.InvalidStateError("the record is not acknowledged yet")
        return batch.error

    def result(self) -> RecordMetadata:
        """Where it went; raises what went wrong. Only when it is done."""
        error = self.exception()
        if error is not None:
            raise error
        batch = self._batch
        timestamp_ms = batch.log_append_time_ms
        if timestamp_ms < 0:
            timestamp_ms = batch.records[self._index][0]
        offset = batch.offset + self._index if batch.offset >= 0 else NO_OFFSET
        return RecordMetadata(batch.partition.topic, batch.partition.partition, offset, timestamp_ms)

    def add_done_callback(self, callback: "Callable[[Delivery], object]") -> None:
        """Call `callback(delivery)` when it is done; at once if it is."""
        batch = self._follow()
        if batch.done:
            callback(self)
        elif batch.callbacks is None:
            batch.callbacks = [(callback, self)]
        else:
            batch.callbacks.append((callback, self))

    def __await__(self) -> Generator[Any, None, RecordMetadata]:
        while not self.done():
            # Shielded, because the future is shared with the other records of the batch.
            yield from asyncio.shield(self._batch.future).__await__()
        return self.result()
