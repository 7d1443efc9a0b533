"""A partition as its leader sees it: what may be read, and who waits for what.

Owns the high watermark and two kinds of waiters: producers that wait until an offset is safe, and readers that wait
until there is more to read. Invariants: the high watermark never goes back; a record below it is on every replica
that counts and, when the topic asks for a flush before acknowledgement, on disk; a producer is told of success only
after the records it waits for are below the high watermark (acks=all) and flushed where the flush was due.

Called by the Produce, Fetch and ListOffsets handlers and by the flusher's completions, all on the one loop that owns
it.
"""

from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from headrace.base.errors import ErrorCode, KafkaError
from headrace.storage.log import Appended, LogSlice, PartitionLog
from headrace.storage.origin import Origin

Done: TypeAlias = Callable[[ErrorCode], None]
Wake: TypeAlias = Callable[[], None]

READ_COMMITTED = 1
FLUSH_EVERY_BATCH = 1  # flush.messages at which nothing unflushed may be read


class Partition:
    """One partition led by this broker."""

    __slots__ = (
        "_acks",
        "_flushes",
        "_readers",
        "high_watermark",
        "index",
        "leader_epoch",
        "log",
        "topic",
        "topic_id",
    )

    def __init__(self, topic: str, topic_id: bytes, index: int, leader_epoch: int, log: PartitionLog) -> None:
        self.topic = topic
        self.topic_id = topic_id
        self.index = index
        self.leader_epoch = leader_epoch
        self.log = log
        self.high_watermark = log.log_end_offset
        self._acks: deque[tuple[int, Done]] | None = None
        self._flushes: deque[tuple[int, Done]] | None = None
        self._readers: dict[Wake, None] | None = None

    def check_epoch(self, epoch: int) -> None:
        """Refuse a client whose idea of the leader is older or newer than ours; -1 asks for no check."""
        if epoch == -1 or epoch == self.leader_epoch:
            return
        if epoch < self.leader_epoch:
            raise KafkaError(
                ErrorCode.FENCED_LEADER_EPOCH, f"the leader epoch is {self.leader_epoch}, not {epoch}"
            )
        raise KafkaError(
            ErrorCode.UNKNOWN_LEADER_EPOCH, f"the leader epoch is {self.leader_epoch}, not yet {epoch}"
        )

    def append(self, records: memoryview, now_ms: int) -> Appended:
        """Append what a producer sent. The caller then waits with `when_safe` or not, by its acks."""
        appended = self.log.append(records, leader_epoch=self.leader_epoch, now_ms=now_ms)
        if not appended.duplicate:
            self.advance()
        return appended

    def append_from_coordinator(self, batches: bytes, now_ms: int) -> Appended:
        """Append what a coordinator of this broker wants stored. It waits with `when_safe`, always."""
        appended = self.log.append(
            memoryview(batches), leader_epoch=self.leader_epoch, now_ms=now_ms, origin=Origin.COORDINATOR
        )
        self.advance()
        return appended

    def is_safe(self, offset: int, flushed: bool, replicated: bool) -> bool:
        """Whether all below `offset` is flushed and replicated, as far as each is asked for."""
        return (not flushed or self.log.flushed_offset >= offset) and (
            not replicated or self.high_watermark >= offset
        )

    def when_safe(self, offset: int, flushed: bool, replicated: bool, done: Done) -> None:
        """Call `done` once `is_safe` holds, or with an error when it never will."""
        assert not self.is_safe(offset, flushed, replicated), "nothing to wait for"
        if replicated and self.high_watermark < offset:
            if self._acks is None:
                self._acks = deque()
            if flushed and self.log.flushed_offset < offset:
                done = _after_both(done)
            self._acks.append((offset, done))
        if flushed and self.log.flushed_offset < offset:
            if self._flushes is None:
                self._flushes = deque()
            self._flushes.append((offset, done))

    def advance(self) -> None:
        """Move the high watermark as far as it may go, and tell those who wait for it."""
        log = self.log
        flush_first = log.config.flush_messages == FLUSH_EVERY_BATCH
        limit = log.flushed_offset if flush_first else log.log_end_offset
        if limit <= self.high_watermark:
            return
        self.high_watermark = limit
        if self._acks:
            _release(self._acks, limit)
        if self._readers:
            self.wake_readers()

    def on_flushed(self) -> None:
        """The log reports more on disk, or that it can no longer be trusted."""
        if self.log.failed:
            self.fail_waiters(ErrorCode.KAFKA_STORAGE_ERROR)
            return
        if self._flushes:
            _release(self._flushes, self.log.flushed_offset)
        self.advance()

    def fail_waiters(self, error: ErrorCode) -> None:
        """Answer all who wait: what they wait for will not come here."""
        for waiters in (self._acks, self._flushes):
            while waiters:
                waiters.popleft()[1](error)
        self.wake_readers()

    def last_stable_offset(self) -> int:
        """The end of what a read_committed reader may see."""
        first_unstable = self.log.producer_state.first_unstable_offset(self.high_watermark)
        if first_unstable is None:
            return self.high_watermark
        return min(max(first_unstable, self.log.log_start_offset), self.high_watermark)

    def read(self, offset: int, max_bytes: int, isolation: int, min_one_batch: bool) -> LogSlice:
        """Byte ranges from `offset` to the end of what the reader may see."""
        limit = self.last_stable_offset() if isolation == READ_COMMITTED else self.high_watermark
        return self.log.read(offset, max_bytes, max_offset=limit, min_one_batch=min_one_batch)

    def aborted_in(self, offset: int, found: LogSlice) -> list[tuple[int, int]]:
        """(producer id, first offset) of the aborted transactions with records in what `read` gave from `offset` on."""
        return self.log.aborted_transactions(offset, found, self.last_stable_offset())

    def add_reader(self, wake: Wake) -> None:
        """Have `wake` called once when there may be more to read."""
        if self._readers is None:
            self._readers = {}
        self._readers[wake] = None

    def remove_reader(self, wake: Wake) -> None:
        if self._readers is not None:
            self._readers.pop(wake, None)

    def wake_readers(self) -> None:
        readers, self._readers = self._readers, None
        for wake in readers or ():
            wake()


def _release(waiters: deque[tuple[int, Done]], reached: int) -> None:
    """Tell those who waited for an offset that is reached. They stand in the order of their offsets."""
    while waiters and waiters[0][0] <= reached:
        waiters.popleft()[1](ErrorCode.NONE)


def _after_both(done: Done) -> Done:
    """A callback for two waits: passes on the second success or the first failure, once."""
    left = 2

    def either(error: ErrorCode) -> None:
        nonlocal left
        if left == 0:
            return
        left = 0 if error is not ErrorCode.NONE else left - 1
        if left == 0:
            done(error)

    return either
