"""Records waiting to be sent, by partition, within a bound on memory.

Owns the queues of batches and the count of bytes held. Invariants: a queue's batches are in the order their
records were added, also after a retry puts one back; bytes held never exceed `buffer.memory` (a single record
of any allowed size may always enter an empty buffer); a batch with a sequence number is sent again only when
no earlier one of its partition is unanswered. Pure but for the futures of those who wait for room: time is an
argument. Called by `producer` and `sender`.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterator

from headrace.base.log import get_logger
from headrace.client.batches import NO_PRODUCER, Batch, Headers, ProducerId
from headrace.client.config import ProducerConfig
from headrace.client.topics import TopicPartition
from headrace.records.batch import HEADER_SIZE, NO_SEQUENCE, SEQUENCE_MAX
from headrace.records.builder import iter_records
from headrace.records.codec import Delivery, Pending, Route, SendPath

QUEUES_MAX = 100_000

_log = get_logger(__name__)


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
        self.next_sequence = advance_sequence(self.next_sequence, batch.record_count)


class Accumulator:
    """All queues of a producer, and the room left in its buffer.

    `path` is the short way into a batch that is open, for all records but the first of a batch; what it needs to know
    is kept up to date here: which batches are open, and whether anyone must go the long way. Where threads beside the
    event loop use it (`path.portal`), the next batch of a partition is opened when one leaves, so that they need not
    wait for the loop to open it; it is admitted to its queue when it has begun.
    """

    def __init__(self, config: ProducerConfig) -> None:
        self._config = config
        self._batch_bytes = min(config.batch_size, config.max_request_size)
        self._limits: dict[str, int] = {}  # smaller ones, of topics whose brokers found batches too large
        self.queues: dict[TopicPartition, PartitionQueue] = {}
        self.active: dict[TopicPartition, PartitionQueue] = {}
        self._open: dict[tuple[str, int], Batch] = {}  # the batch of each partition that takes records
        self.path = SendPath(time.time_ns, config.buffer_memory)
        self._gated = False
        self._room: deque[asyncio.Future[None]] = deque()

    # -- the short way ----------------------------------------------------------------------------------------------

    def route(self, topic: str, partition_count: int, by_key: bool) -> Route:
        """How records of a topic find their batch, made anew when the number of partitions has changed."""
        route = self.path.routes.get(topic)
        if route is None or route.partition_count != partition_count:
            if len(self.path.routes) >= QUEUES_MAX:
                self.path.routes.clear()
            route = Route(partition_count, by_key)
            for number in range(partition_count):
                route.open_batches[number] = self._open.get((topic, number))
            self.path.routes[topic] = route
        return route

    def forget_route(self, topic: str) -> None:
        """The topic has changed: its records go the long way until it is known again."""
        self.path.routes.pop(topic, None)

    def gate(self, shut: bool) -> None:
        """Let records pass the short way, or send all of them the long way."""
        self._gated = shut
        self._mind_gate()

    def _mind_gate(self) -> None:
        self.path.shut = self._gated or bool(self._room)

    def _set_open(self, partition: TopicPartition, batch: Batch | None) -> None:
        if batch is None:
            self._open.pop(partition, None)
        else:
            self._open[partition] = batch
        route = self.path.routes.get(partition.topic)
        if route is not None and partition.partition < route.partition_count:
            route.open_batches[partition.partition] = batch

    @property
    def held_bytes(self) -> int:
        """Bytes of everything that is not done."""
        return self.path.held_bytes

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
            self._mind_gate()
            try:
                await ahead
            except asyncio.CancelledError:
                if ahead in self._room:
                    self._room.remove(ahead)
                    self._mind_gate()
                else:
                    self.wake_next()  # it was our turn, and now it is the next one's
                raise
            if self._fits(size_bytes):
                return
            place = self._room.appendleft  # not enough yet: stay first in line

    def release(self, size_bytes: int) -> None:
        """Give back the bytes of a batch that is done, and let the first in line look again."""
        self.path.hold(-size_bytes)
        assert self.held_bytes >= 0
        self.wake_next()

    def wake_next(self) -> None:
        """Let the first who waits for room look again; who enters calls this for the one behind."""
        if self._room:
            first = self._room.popleft()
            self._mind_gate()
            if not first.done():
                first.set_result(None)

    # -- batches ----------------------------------------------------------------------------------------------------

    def append(
        self,
        partition: TopicPartition,
        timestamp_ms: int,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
        now_s: float,
    ) -> tuple[Delivery, bool]:
        """Add a record. Returns its promise and whether the sender should look (a new or a full batch)."""
        queue = self._activate(partition)
        batch = self._open.get(partition)
        if batch is not None:
            delivery = self.path.append_to(batch, timestamp_ms, key, value, headers)
            admitted = self.admit(batch, now_s)
            if delivery is not None:
                return delivery, admitted or batch.size_bytes >= batch.limit_bytes
        batch = self._new_batch(queue, now_s)
        delivery = self.path.append_to(batch, timestamp_ms, key, value, headers)
        assert delivery is not None, "the first record of a batch always has room"
        self._enqueue(queue, batch)
        self._set_open(partition, batch)
        return delivery, True

    def append_encoded(
        self,
        partition: TopicPartition,
        framed: bytearray,
        count: int,
        times_ms: tuple[int, int],
        now_s: float,
    ) -> Delivery:
        """Add a whole batch of records that are encoded already, behind room for a header; the promise of the first."""
        queue = self._activate(partition)
        begun = self._open.get(partition)
        if begun is not None:
            self.admit(begun, now_s)
        batch = self._new_batch(queue, now_s)
        batch.fill(framed, count, *times_ms)
        self._enqueue(queue, batch)
        self.path.hold(batch.size_bytes - HEADER_SIZE)
        self._set_open(partition, None)
        portal = self.path.portal
        return Delivery(batch, 0) if portal is None else Pending(batch, 0, portal)

    def close(self, batch: Batch) -> None:
        """Let it take no more records: from here on its number of records is known."""
        if self._open.get(batch.partition) is batch:
            ahead = self.path.portal is not None
            self._set_open(
                batch.partition, self._new_batch(self._queue(batch.partition), 0.0) if ahead else None
            )

    def admit(self, batch: Batch, now_s: float) -> bool:
        """Queue a batch that was opened ahead and has begun; whether that was still to be done."""
        if batch.admitted or not batch.record_count:
            return False
        queue = self._activate(batch.partition)
        batch.order = (queue.order,)
        batch.created_s, batch.deadline_s = now_s, now_s + self._config.delivery_timeout_ms / 1000
        self._enqueue(queue, batch)
        return True

    def admit_begun(self, now_s: float) -> None:
        """Queue every batch that has begun, also one that nobody was told of: a signal may end a call at any point."""
        for batch in list(self._open.values()):
            self.admit(batch, now_s)

    def take(self, queue: PartitionQueue) -> Batch:
        """The first batch of a queue, to be sent now; it takes no more records."""
        batch = queue.waiting.popleft()
        queue.in_flight.append(batch)
        self.close(batch)
        return batch

    def _activate(self, partition: TopicPartition) -> PartitionQueue:
        queue = self.active.get(partition)
        if queue is None:
            queue = self.active[partition] = self._queue(partition)
        return queue

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
        limit = self.limit(queue.partition.topic, self._batch_bytes)
        return Batch(queue.partition, (queue.order,), limit, now_s, deadline_s)

    def limit(self, topic: str, size_bytes: int) -> int:
        """So many bytes, or fewer where brokers have found batches of that size too large."""
        return min(size_bytes, self._limits.get(topic, size_bytes))

    def _learn_limit(self, batch: Batch) -> None:
        """Make no more batches of a size that was refused: each would be sent in vain and taken apart."""
        topic = batch.partition.topic
        if len(self._limits) >= QUEUES_MAX:
            self._limits.clear()
        self._limits[topic] = limit = self.limit(topic, max(1, batch.size_bytes // 2))
        _log.warning(
            "the broker finds batches too large; from now on they are smaller",
            extra={"fields": {"topic": topic, "refused_bytes": batch.size_bytes, "limit_bytes": limit}},
        )

    def _enqueue(self, queue: PartitionQueue, batch: Batch) -> None:
        """Put a batch that has its first record at the end."""
        batch.admitted = True
        queue.order += 1
        queue.waiting.append(batch)
        self.path.hold(HEADER_SIZE)

    def closed(self, batch: Batch) -> bool:
        """Whether it takes no more records: it was sent before, or is full."""
        return self._open.get(batch.partition) is not batch or batch.size_bytes >= batch.limit_bytes

    def finish(self, queue: PartitionQueue, batch: Batch) -> None:
        """Forget a batch whose outcome is known."""
        if batch in queue.in_flight:
            queue.in_flight.remove(batch)
        elif batch in queue.waiting:
            queue.waiting.remove(batch)
            if self._open.get(queue.partition) is batch:
                self._set_open(queue.partition, None)
        if queue.idle:
            self.active.pop(queue.partition, None)
        self.release(batch.size_bytes)

    def split(self, queue: PartitionQueue, batch: Batch) -> None:
        """Replace a batch that the broker finds too large by two halves, with the sequences it had."""
        self._learn_limit(batch)
        middle = batch.record_count // 2
        records = iter_records(batch.encode(0, None))
        sequence = batch.sequence
        halves: list[Batch] = []
        for place, share in enumerate((records[:middle], records[middle:])):
            half = Batch(
                queue.partition, (*batch.order, place), batch.size_bytes, batch.created_s, batch.deadline_s
            )
            for _, timestamp, key, value, headers in share:
                half.append(timestamp, key, value, headers)
            half.attempts = batch.attempts
            half.last_error = batch.last_error
            if sequence != NO_SEQUENCE:
                half.assign(batch.producer, sequence)
                sequence = advance_sequence(sequence, half.record_count)
            halves.append(half)
        self.path.hold(sum(half.size_bytes for half in halves) - batch.size_bytes)
        for half in halves:
            queue.put_back(half)
        batch.split(halves)
