"""Batches of records on their way to one partition, and the promises given for them.

Owns the life of a batch: open (takes records), closed, in flight, done. Invariants: a batch ends exactly
once, with an offset or an error; all its records end with it; its records keep the order in which they were
added. One future serves a whole batch, because a future for each record would cost more than the rest of
`send`; a `Delivery` is a place in a batch, and asks it. Called by `accumulator` and `sender`.
"""

import asyncio
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeAlias

from headrace.base.errors import KafkaError
from headrace.client.errors import SerializationFailed
from headrace.client.topics import TopicPartition
from headrace.records.batch import NO_SEQUENCE
from headrace.records.builder import close_batch
from headrace.records.codec import Delivery, RecordBuffer, RecordMetadata

# More than the lengths, deltas and counts of a record, or of a header of one, can take.
RECORD_OVERHEAD_BYTES = 64
HEADER_OVERHEAD_BYTES = 10
NO_OFFSET = -1

Headers: TypeAlias = Sequence[tuple[str, bytes | None]]
# The place of a batch in its partition; the halves of batch (7,) are (7, 0) and (7, 1).
Order: TypeAlias = tuple[int, ...]


class ProducerId(NamedTuple):
    """The identity that a broker checks sequences against."""

    producer_id: int
    epoch: int


NO_PRODUCER = ProducerId(-1, -1)


def as_bytes(name: str, value: Any) -> bytes | None:
    """A key or value as bytes. Raises SerializationFailed when it is something else."""
    if value is None or type(value) is bytes:
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise SerializationFailed(
        f"the {name} is {type(value).__name__}, not bytes",
        f"encode it, or give the producer a {name}_serializer",
    )


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


class Batch(RecordBuffer):
    """Records for one partition that are sent, acknowledged and retried together."""

    __slots__ = (
        "admitted",
        "attempts",
        "callbacks",
        "created_s",
        "deadline_s",
        "encoded",
        "ended",
        "error",
        "future_made",
        "last_error",
        "log_append_time_ms",
        "offset",
        "order",
        "partition",
        "parts",
        "producer",
        "retry_at_s",
        "sent_s",
        "sequence",
        "unsure",
    )

    def __init__(
        self, partition: TopicPartition, order: Order, limit_bytes: int, created_s: float, deadline_s: float
    ) -> None:
        super().__init__(limit_bytes)
        self.partition = partition
        self.order = order
        self.created_s = created_s
        self.deadline_s = deadline_s
        self.admitted = False  # whether it is in its partition's queue
        self.attempts = 0
        self.retry_at_s = 0.0
        self.sent_s = 0.0
        self.producer = NO_PRODUCER
        self.sequence = NO_SEQUENCE
        self.unsure = False  # whether the broker may have it although no acknowledgement came
        self.encoded: bytearray | None = None
        self.ended = False
        self.future_made: asyncio.Future[None] | None = None
        self.error: KafkaError | None = None
        self.last_error: KafkaError | None = None
        self.offset = NO_OFFSET
        self.log_append_time_ms = -1
        self.parts: list[tuple[int, Batch]] | None = None
        self.callbacks: list[tuple[int, Callable[[Delivery], object], Delivery]] | None = None

    @property
    def done(self) -> bool:
        """Whether its outcome is known."""
        return self.ended

    @property
    def future(self) -> "asyncio.Future[None]":
        """Done when it is; made for the first who asks, because most batches are never waited for."""
        if self.future_made is None:
            self.future_made = asyncio.get_running_loop().create_future()
            if self.ended:
                self.future_made.set_result(None)
        return self.future_made

    def assign(self, producer: ProducerId, sequence: int) -> None:
        """Give it the identity and sequence that it is (from now on) sent with."""
        self.producer, self.sequence, self.encoded = producer, sequence, None

    def encode(self, compression: int, level: int | None, *, transactional: bool = False) -> bytearray:
        """The batch's bytes, the same on every attempt."""
        if self.encoded is None:
            self.encoded = close_batch(
                self,
                compression=compression,
                compression_level=level,
                producer_id=self.producer.producer_id,
                producer_epoch=self.producer.epoch,
                base_sequence=self.sequence,
                transactional=transactional,
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
            start += part.record_count
        assert start == self.record_count
        callbacks, self.callbacks = self.callbacks, None
        for place, callback, delivery in callbacks or ():
            self.call_at(place, callback, delivery)
        self.drop()
        self._end()

    def _finish(self) -> None:
        assert not self.ended, "a batch ends once"
        self._end()
        self.encoded = None
        self.drop()
        callbacks, self.callbacks = self.callbacks, None
        for _, callback, delivery in callbacks or ():
            _call(callback, delivery)

    def _end(self) -> None:
        self.ended = True
        if self.future_made is not None:
            self.future_made.set_result(None)

    # -- what promises ask ------------------------------------------------------------------------------------------

    def _find(self, place: int) -> "tuple[Batch, int]":
        """The batch that a record is in now, and its place there."""
        batch = self
        while batch.parts is not None:
            start, part = next((s, p) for s, p in reversed(batch.parts) if s <= place)
            batch, place = part, place - start
        return batch, place

    def done_at(self, place: int) -> bool:
        return self._find(place)[0].done

    def error_at(self, place: int) -> KafkaError | None:
        batch, _ = self._find(place)
        if not batch.done:
            raise asyncio.InvalidStateError("the record is not acknowledged yet")
        return batch.error

    def result_at(self, place: int) -> RecordMetadata:
        error = self.error_at(place)
        if error is not None:
            raise error
        batch, place = self._find(place)
        timestamp_ms = batch.log_append_time_ms
        if timestamp_ms < 0:
            timestamp_ms = batch.timestamp_at(place)
        offset = batch.offset + place if batch.offset >= 0 else NO_OFFSET
        return RecordMetadata(batch.partition.topic, batch.partition.partition, offset, timestamp_ms)

    def call_at(self, place: int, callback: Callable[[Delivery], object], delivery: Delivery) -> None:
        batch, place = self._find(place)
        if batch.done:
            _call(callback, delivery)
        elif batch.callbacks is None:
            batch.callbacks = [(place, callback, delivery)]
        else:
            batch.callbacks.append((place, callback, delivery))

    def wait_at(self, place: int) -> Generator[Any, None, RecordMetadata]:
        while not self.done_at(place):
            # Shielded, because the future is shared with the other records of the batch.
            yield from asyncio.shield(self._find(place)[0].future).__await__()
        return self.result_at(place)


def _call(callback: Callable[[Delivery], object], delivery: Delivery) -> None:
    """Tell someone how a record fared; if that raises, it is theirs to mend, and the others are told all the same."""
    try:
        callback(delivery)
    except Exception as error:
        context = {"message": "a callback of a delivery failed", "exception": error}
        asyncio.get_running_loop().call_exception_handler(context)
