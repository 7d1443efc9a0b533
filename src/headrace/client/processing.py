"""Records through a handler, one after the other or many at once, and commits of what is done.

Owns the lanes: records of one lane are handled one at a time and in order, and at most `workers` lanes run at once.
In mode `fifo` a lane is a partition (or a key); in mode `parallel` a lane is a key (or each record is its own).
Invariants: what may be committed of a partition never passes a record that is not done; at most `pending_max`
records are taken and not done, and while so many are, no more are taken though the group is still attended to; a
partition that goes to another member is waited for, and its records that had not begun are dropped. Called by
`consumer`.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, Literal, Protocol, TypeAlias

from headrace.base.errors import KafkaError
from headrace.client.error_policy import ErrorHandler
from headrace.client.fetched import ConsumerRecord
from headrace.client.topics import TopicPartition

POLL_MS = 200
HELD_UP_S = 0.1

Mode: TypeAlias = Literal["fifo", "parallel"]
Order: TypeAlias = Literal["partition", "key", "record"]
Handler: TypeAlias = Callable[[ConsumerRecord], "Awaitable[object]"]


class Polls(Protocol):
    """Where records come from."""

    async def poll(self, timeout_ms: float = 0, max_records: int | None = None) -> list[ConsumerRecord]: ...


class OffsetTracker:
    """Which records of one partition are done, and how far that goes without a gap."""

    def __init__(self) -> None:
        self._taken: deque[int] = deque()
        self._done: set[int] = set()
        self.committable: int | None = None

    def take(self, offset: int) -> None:
        """A record was taken; offsets come in ascending order."""
        assert not self._taken or offset > self._taken[-1]
        if self.committable is None:
            self.committable = offset
        self._taken.append(offset)

    def finish(self, offset: int) -> None:
        """A record is done."""
        self._done.add(offset)
        while self._taken and self._taken[0] in self._done:
            first = self._taken.popleft()
            self._done.discard(first)
            self.committable = first + 1

    @property
    def pending(self) -> int:
        """Records taken and not known to be done without a gap before them."""
        return len(self._taken)


class Processor:
    """One run of one handler over what a consumer reads."""

    def __init__(
        self,
        source: Polls,
        handler: Handler,
        *,
        mode: Mode,
        order: Order,
        workers: int,
        pending_max: int,
        on_error: ErrorHandler | None,
    ) -> None:
        assert workers > 0 and pending_max > 0
        self._source = source
        self._handler = handler
        self._mode = mode
        self._order = order
        self._workers = workers
        self._pending_max = pending_max
        self._on_error = on_error
        self._trackers: dict[TopicPartition, OffsetTracker] = {}
        self._lanes: dict[Hashable, deque[ConsumerRecord]] = {}
        self._waiting: deque[Hashable] = deque()  # lanes with work that no worker has yet
        self._running: dict[Hashable, asyncio.Task[None]] = {}
        self._busy: dict[TopicPartition, int] = {}  # records being handled now
        self._pending = 0
        self._progress = asyncio.Event()
        self._failure: BaseException | None = None
        self._stopped = False

    # -- running ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Process until `stop`, an error that is not handled, or cancellation. Raises what ended it."""
        try:
            while not self._stopped and self._failure is None:
                room = self._pending_max - self._pending
                records = await self._source.poll(POLL_MS if room and not self._running else 0, room)
                for record in records:
                    self._take(record)
                self._start_workers()
                if not records and (self._running or room <= 0):
                    await self._await_progress()
            await self._settle()
        finally:
            await self._cancel()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Take no more records; `run` returns when those being handled are done."""
        self._stopped = True
        self._progress.set()

    async def _await_progress(self) -> None:
        self._progress.clear()
        try:
            async with asyncio.timeout(HELD_UP_S):
                await self._progress.wait()
        except TimeoutError:
            pass

    async def _settle(self) -> None:
        """Let what has begun end; what has not begun is left for the next reader."""
        self._waiting.clear()
        for lane in self._lanes.values():
            lane.clear()
        if self._running:
            await asyncio.wait(list(self._running.values()))

    async def _cancel(self) -> None:
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def committable(self) -> dict[TopicPartition, int]:
        """How far each partition is done: what may be committed."""
        return {
            partition: tracker.committable
            for partition, tracker in self._trackers.items()
            if tracker.committable is not None
        }

    async def release(self, partitions: frozenset[TopicPartition], *, lost: bool) -> None:
        """Partitions are about to go: drop what has not begun, and (unless they are lost) wait for what has."""
        for lane in self._lanes.values():
            kept = deque(r for r in lane if TopicPartition(r.topic, r.partition) not in partitions)
            self._pending -= len(lane) - len(kept)
            lane.clear()
            lane.extend(kept)
        while not lost and any(self._busy.get(partition) for partition in partitions):
            await self._await_progress()

    def forget(self, partitions: frozenset[TopicPartition]) -> None:
        """Partitions have gone, or are read from elsewhere."""
        for partition in partitions:
            self._trackers.pop(partition, None)

    # -- lanes ------------------------------------------------------------------------------------------------------

    def _take(self, record: ConsumerRecord) -> None:
        partition = TopicPartition(record.topic, record.partition)
        self._trackers.setdefault(partition, OffsetTracker()).take(record.offset)
        self._pending += 1
        lane = self._lane_of(record, partition)
        queue = self._lanes.get(lane)
        if queue is None:
            queue = self._lanes[lane] = deque()
            self._waiting.append(lane)
        queue.append(record)

    def _lane_of(self, record: ConsumerRecord, partition: TopicPartition) -> Hashable:
        if self._order == "record" or (self._order == "key" and record.key is None and self._mode != "fifo"):
            return (partition, record.offset)
        if self._order == "key":
            return (partition, record.key)
        return partition

    def _start_workers(self) -> None:
        while self._waiting and len(self._running) < self._workers:
            lane = self._waiting.popleft()
            self._running[lane] = asyncio.create_task(self._work(lane), name="headrace worker")

    async def _work(self, lane: Hashable) -> None:
        queue = self._lanes[lane]
        try:
            while queue and self._failure is None:
                await self._handle(queue.popleft())
        finally:
            del self._lanes[lane]
            del self._running[lane]
            self._start_workers()
            self._progress.set()

    async def _handle(self, record: ConsumerRecord) -> None:
        partition = TopicPartition(record.topic, record.partition)
        tracker = self._trackers.get(partition)
        self._busy[partition] = self._busy.get(partition, 0) + 1
        try:
            try:
                await self._handler(record)
            except (KafkaError, Exception) as error:
                if self._on_error is None:
                    raise
                await self._on_error(record, error)
            # A partition that was lost and came back has another tracker: this record will be read again.
            if tracker is not None and self._trackers.get(partition) is tracker:
                tracker.finish(record.offset)
        except Exception as error:
            self._failure = self._failure or error
        finally:
            self._pending -= 1
            self._busy[partition] -= 1
            if not self._busy[partition]:
                del self._busy[partition]
            self._progress.set()


def default_order(mode: Mode) -> Order:
    """Mode `fifo` keeps the order of partitions, `parallel` that of keys."""
    return "partition" if mode == "fifo" else "key"


def describe(mode: Any, order: Any) -> str | None:
    """Why a mode and an order do not go together, or None."""
    if mode not in ("fifo", "parallel"):
        return f"no mode {mode!r}: it is 'fifo' or 'parallel'"
    allowed = {"fifo": ("partition", "key"), "parallel": ("key", "record", "partition")}[mode]
    if order not in allowed:
        return f"mode={mode} has no order={order!r}: it is one of {', '.join(allowed)}"
    return None
