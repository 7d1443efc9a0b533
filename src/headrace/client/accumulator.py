"""Records waiting to be sent, by partition, within a bound on memory.

Owns the queues of batches and the count of bytes held. Invariants: a queue's batches are in the order their
records were added, also after a retry puts one back; bytes held never exceed `buffer.memory` (a single record
of any allowed size may always enter an empty buffer); a batch with a sequence number is sent again only when
no earlier one of its partition is unanswered. Pure but for the futures of those who wait for room: time is an
argument. Called by `producer` and `sender`.
"""

import asyncio
from collections import deque
from collections.abc import Iterator

from headrace.client.batches import NO_PRODUCER, Batch, Delivery, Fields, ProducerId
from headrace.client.config import ProducerConfig
from headrace.client.topics import TopicPartition
from headrace.records.batch import HEADER_SIZE, NO_SEQUENCE, SEQUENCE_MAX

QUEUES_MAX = 100_000


def advance_sequence(sequence: int, count: int) -> int:
    """The sequence `count` records later; it wraps to 0 after 2^31 - 1, as Kafka's does."""
    return (sequence + count) & SEQUENCE_MAX


class PartitionQueue:
    """One partition's batches that are not acknowledged yet."""

    __slots__ = (
        "confirmed",
        "in_flight",
        "needs_new_epoch",
        "next_sequence",
        "node_id",
        "order",
        "partition",
        "producer",
        "waiting",
    )

    def __init__(self, partition: TopicPartition) -> None:
        self.partition = partition
        self.waiting: deque[Batch] = deque()
        self.in_flight: list[Batch] = []
        self.node_id = -1  # where those in flight went
        self.order = 0
        self.producer = NO_PRODUCER
        self.confirmed = False  # whether the broker has taken a batch of this producer id and epoch
        self.next_sequence = 0
        self.needs_new_epoch = False

    @property
    def idle(self) -> bool:
        """Whether it holds nothing."""
        return not self.waiting and not self.in_flight

    def put_back(self, batch: Batch) -> None:
        """Queue a batch again, at its place in the order."""
        later = (at for at, other in enumerate(self.waiting) if other.order > batch.order)
        self.waiting.insert(next(later, len(self.waiting)), batch)

    def first_unanswered(self, batch: Batch) -> bool:
        """Whether no earlier batch that was sent is without its outcome."""
        return all(other.order > batch.order for other in self.in_flight) and all(
            other.order >= batch.order for other in self.waiting if other.sequence != NO_SEQUENCE
        )

    def adopt(self, producer: ProducerId) -> None:
        """Begin anew under another producer id or epoch: sequences of what still waits start at 0."""
        assert not self.in_flight
        self.producer, self.next_sequence = producer, 0
        self.confirmed = self.needs_new_epoch = False
        for batch in self.waiting:
            if batch.sequence != NO_SEQUENCE:
                self.number(batch)

    def number(self, batch: Batch) -> None:
        """Give a batch the next sequence."""
        batch.assign(self.producer, self.next_sequence)
        self.next_sequence = advance_sequence(self.next_sequence, len(batch.records))


class Accumulator:
    """All queues of a producer, and the room left in its buffer."""

    def __init__(self, config: ProducerConfig) -> None:
        self._config = config
        self._batch_bytes = min(config.batch_size, config.max_request_size)
        self.queues: dict[TopicPartition, PartitionQueue] = {}
        self.active: dict[TopicPartition, PartitionQueue] = {}
        self._open: dict[tuple[str, int], Batch] = {}  # the batch of each partition that takes records
        self.held_bytes = 0
        self._room: deque[asyncio.Future[None]] = deque()

    def __iter__(self) -> Iterator[Batch]:
        """Every batch that is held."""
        for queue in self.active.values():
            yield from queue.in_flight
            yield from queue.waiting

    # -- memory -----------------------------------------------------------------------------------------------------

    @property
    def pressed(self) -> bool:
        """Whether someone waits for room: then nothing lingers."""
        return bool(self._room)

    def has_room(self, size_bytes: int) -> bool:
        """Whether a record of this size may enter, those who came earlier first."""
        return not self._room and self._fits(size_bytes)

    def _fits(self, size_bytes: int) -> bool:
        return (
            self.held_bytes == 0 or self.held_bytes + size_bytes + HEADER_SIZE <= self._config.buffer_memory
        )

    async def wait_for_room(self, size_bytes: int) -> None:
        """Return when a record of this size may enter; in order of arrival."""
        place = self._room.append
        while self._room or not self._fits(size_bytes):
            ahead = asyncio.get_running_loop().create_future()
            place(ahead)
            try:
                await ahead
            except asyncio.CancelledError:
                if ahead in self._room:
                    self._room.remove(ahead)
                else:
                    self.wake_next()  # it was our turn, and now it is the next one's
                raise
            if self._fits(size_bytes):
                return
            place = self._room.appendleft  # not enough yet: stay first in line

    def release(self, size_bytes: int) -> None:
        """Give back the bytes of a batch that is done, and let the first in line look again."""
        self.held_bytes -= size_bytes
        assert self.held_bytes >= 0
        self.wake_next()

    def wake_next(self) -> None:
        """Let the first who waits for room look again; who enters calls this for the one behind."""
        if self._room:
            first = self._room.popleft()
            if not first.done():
                first.set_result(None)

    # -- batches ----------------------------------------------------------------------------------------------------

    def append_fast(self, key: tuple[str, int], fields: Fields, size_bytes: int) -> Delivery | None:
        """Add a record to a batch that is open and has room, the common case; None when there is none."""
        batch = self._open.get(key)
        if batch is None or self._room:
            return None
        filled, held = batch.size_bytes + size_bytes, self.held_bytes + size_bytes
        if filled > self._batch_bytes or held > self._config.buffer_memory:
            return None
        batch.size_bytes, self.held_bytes = filled, held
        records = batch.records
        records.append(fields)
        return Delivery(batch, len(records) - 1)

    def append(
        self, partition: TopicPartition, fields: Fields, size_bytes: int, now_s: float
    ) -> tuple[Delivery, bool]:
        """Add a record. Returns its promise and whether the sender should look (a new or a full batch)."""
        queue = self.active.get(partition)
        if queue is None:
            queue = self.active[partition] = self._queue(partition)
        batch = self._open.get(partition)
        fresh = batch is None or batch.size_bytes + size_bytes > self._batch_bytes
        if batch is None or fresh:
            batch = self._new_batch(queue, now_s)
        self.held_bytes += size_bytes
        delivery = batch.add(fields, size_bytes)
        return delivery, fresh or batch.size_bytes >= self._batch_bytes

    def take(self, queue: PartitionQueue) -> Batch:
        """The first batch of a queue, to be sent now; it takes no more records."""
        batch = queue.waiting.popleft()
        queue.in_flight.append(batch)
        if self._open.get(queue.partition) is batch:
            del self._open[queue.partition]
        return batch

    def _queue(self, partition: TopicPartition) -> PartitionQueue:
        queue = self.queues.get(partition)
        if queue is None:
            if len(self.queues) >= QUEUES_MAX:
                # What an idle queue knows is its sequence; without it the broker asks for a new epoch, and gets one.
                for idle in [key for key in self.queues if key not in self.active]:
                    del self.queues[idle]
            queue = self.queues[partition] = PartitionQueue(partition)
        return queue

    def _new_batch(self, queue: PartitionQueue, now_s: float) -> Batch:
        deadline_s = now_s + self._config.delivery_timeout_ms / 1000
        batch = Batch(queue.partition, (queue.order,), now_s, deadline_s)
        queue.order += 1
        queue.waiting.append(batch)
        self._open[queue.partition] = batch
        self.held_bytes += batch.size_bytes
        return batch

    def closed(self, batch: Batch) -> bool:
        """Whether it takes no more records: it was sent before, or is full."""
        return self._open.get(batch.partition) is not batch or batch.size_bytes >= self._batch_bytes

    def finish(self, queue: PartitionQueue, batch: Batch) -> None:
        """Forget a batch whose outcome is known."""
        if batch in queue.in_flight:
            queue.in_flight.remove(batch)
        elif batch in queue.waiting:
            queue.waiting.remove(batch)
            if self._open.get(queue.partition) is batch:
                del self._open[queue.partition]
        if queue.idle:
            self.active.pop(queue.partition, None)
        self.release(batch.size_bytes)

    def split(self, queue: PartitionQueue, batch: Batch) -> None:
        """Replace a batch that the broker finds too large by two halves, with the sequences it had."""
        middle = len(batch.records) // 2
        sequence = batch.sequence
        halves: list[Batch] = []
        for place, records in enumerate((batch.records[:middle], batch.records[middle:])):
            half = Batch(queue.partition, (*batch.order, place), batch.created_s, batch.deadline_s)
            half.records = records
            half.attempts = batch.attempts
            half.last_error = batch.last_error
            if sequence != NO_SEQUENCE:
                half.assign(batch.producer, sequence)
                sequence = advance_sequence(sequence, len(records))
            halves.append(half)
        share = (batch.size_bytes - HEADER_SIZE) // 2
        halves[0].size_bytes = HEADER_SIZE + share
        halves[1].size_bytes = batch.size_bytes - share
        self.held_bytes += HEADER_SIZE
        for half in halves:
            queue.put_back(half)
        batch.split(halves)
