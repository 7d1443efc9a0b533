"""The compactor: takes the filthiest compacted log, has it cleaned by a thread, puts the result in place, and goes on.

Owns which log is being cleaned, how far each log is clean (`cleaner-offset-checkpoint`, Kafka's file), and the pace.
Invariants: one log at a time; a thread reads and writes at most `PORTION_BYTES` before the loop hears of it and decides
whether to go on, so it can be stopped, and held to log.cleaner.io.max.bytes.per.second, at any of these points; the
loop itself only decides and renames. What happens to the log meanwhile (appends, retention, deletion) is never waited
for: a segment that is gone when its successor is ready makes the cleaning void, and the next round begins anew.
`LogManager.tick` drives it; there is nothing to finish when it stops.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final

from headrace.base.errors import KafkaError
from headrace.base.log import get_logger
from headrace.base.settings import BrokerConfig
from headrace.storage.checkpoints import CLEANER_OFFSETS_NAME, OffsetCheckpoint, Offsets
from headrace.storage.cleanable import Candidate, filthiest
from headrace.storage.cleaning import CleanedSegment, Cleaning, Plan
from headrace.storage.files import FileSystem
from headrace.storage.log import PartitionLog
from headrace.storage.swaps import can_swap, discard_cleaned, swap_in

PORTION_BYTES: Final = 4 << 20
"""Read and written by a thread before it reports."""

RETRY_MS: Final = 60_000
"""How long a log is left alone whose cleaning the disk refused. One that is damaged is, until a restart."""

BURST_MS: Final = 1_000
"""How much of its pace the cleaner may save up."""

NEVER_MS: Final = 2**63 - 1

Done = Callable[[Exception | None], None]
Submit = Callable[[Callable[[], None], Done], bool]

logger = get_logger(__name__)


class _Job:
    """The cleaning under way. `advance` runs in a thread, all else on the loop."""

    def __init__(self, candidate: Candidate, cleaning: Cleaning, now_ms: int) -> None:
        self.log: Final = candidate.log
        self.cleaning: Final = cleaning
        self.begun_ms: Final = now_ms
        self.generation: Final = candidate.log.generation
        self.steps: Final[Iterator[int | CleanedSegment]] = cleaning.steps()
        self.spent_bytes = 0
        self.ready: CleanedSegment | None = None
        self.finished = False

    def advance(self, bytes_max: float) -> None:
        """Go on until a portion is done, a segment is ready or all is."""
        self.spent_bytes = 0
        while self.spent_bytes < bytes_max:
            step = next(self.steps, None)
            if step is None:
                self.finished = True
                return
            if isinstance(step, CleanedSegment):
                self.ready = step
                return
            self.spent_bytes += step


class Cleaner:
    """The compactor of one data directory."""

    def __init__(self, fs: FileSystem, config: BrokerConfig, submit: Submit, now_ms: int) -> None:
        self.config = config
        self._fs = fs
        self._submit = submit
        self._checkpoint = OffsetCheckpoint(fs, CLEANER_OFFSETS_NAME)
        self._offsets: Offsets = {}
        self._offsets_changed = False
        self._writing = False
        self._now_ms = now_ms
        self._look_at_ms = now_ms
        self._credit_bytes = 0.0
        self._job: _Job | None = None
        self._busy = False  # a thread has it
        self._pumping = False
        self._stopped = False
        self._left_alone: dict[PartitionLog, int] = {}
        self._logs: Callable[[], Iterable[PartitionLog]] = tuple
        self._limit_offset: Callable[[PartitionLog], int] = lambda log: log.log_start_offset

    def load(self) -> None:
        """Read how far the process before this one got."""
        self._offsets = self._checkpoint.read()

    def clean_offset(self, log: PartitionLog) -> int | None:
        """How far a log is clean; None when it never was cleaned."""
        return self._offsets.get((log.topic, log.partition))

    @property
    def working(self) -> bool:
        """Whether a cleaning is under way."""
        return self._job is not None

    def tick(
        self,
        logs: Callable[[], Iterable[PartitionLog]],
        limit_offset: Callable[[PartitionLog], int],
        now_ms: int,
    ) -> None:
        """Begin or go on with what is due. `limit_offset` tells a log's high watermark."""
        self._logs, self._limit_offset = logs, limit_offset
        rate = self.config.log_cleaner_io_max_bytes_per_second
        elapsed_ms = min(max(now_ms - self._now_ms, 0), BURST_MS)
        self._now_ms = now_ms
        self._credit_bytes = min(self._credit_bytes + rate * elapsed_ms / 1000, rate * BURST_MS / 1000)
        self._write_offsets()
        self._pump()

    def forget(self, topic: str, partition: int) -> None:
        """The log was deleted, or a new one of its name is made: what is known of it says nothing any more."""
        if self._offsets.pop((topic, partition), None) is not None:
            self._offsets_changed = True
        for log in [log for log in self._left_alone if (log.topic, log.partition) == (topic, partition)]:
            del self._left_alone[log]

    def truncated(self, log: PartitionLog) -> None:
        """A log was cut, or found to end early: what is fetched in place of what was clean has to be cleaned again."""
        key = (log.topic, log.partition)
        if self._offsets.get(key, 0) > log.log_end_offset:
            self._offsets[key] = log.log_end_offset
            self._offsets_changed = True
            self._write_offsets()

    def stop(self) -> None:
        """No more work is given to threads; what is under way is dropped, and begun anew after the next start."""
        self._stopped = True
        self._job = None

    # -- driving ---------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Give threads work as long as there is some and the pace allows it. Not recursive, whoever calls it."""
        if self._pumping:
            return
        self._pumping = True
        try:
            while not self._busy and not self._stopped and self._credit_bytes > 0:
                if self._job is None and not self._begin():
                    return
                job = self._job
                assert job is not None
                self._busy = True
                portion = partial(job.advance, min(PORTION_BYTES, self._credit_bytes))
                if not self._submit(portion, partial(self._portion_done, job)):
                    self._busy = False
                    return
        finally:
            self._pumping = False

    def _begin(self) -> bool:
        if not self.config.log_cleaner_enable or self._now_ms < self._look_at_ms:
            return False
        if self._left_alone:
            self._left_alone = {log: until for log, until in self._left_alone.items() if until > self._now_ms}
        logs = [log for log in self._logs() if log not in self._left_alone]
        candidate = filthiest(logs, self.clean_offset, self._limit_offset, self._now_ms)
        if candidate is None:
            self._look_at_ms = self._now_ms + self.config.log_cleaner_backoff_ms
            return False
        try:
            # Else the segment before it, which may end in a gap, would be the last after a crash.
            candidate.log.active.create()
        except OSError as error:
            self._give_up(candidate.log, error)
            return False
        self._job = _Job(candidate, Cleaning(make_plan(candidate, self.config, self._now_ms)), self._now_ms)
        return True

    def _portion_done(self, job: _Job, error: Exception | None) -> None:
        self._busy = False
        self._credit_bytes -= job.spent_bytes
        if job is not self._job:
            return
        log = job.log
        ready, job.ready = job.ready, None
        if error is None and ready is not None:
            if can_swap(log, ready.replaced):
                try:
                    swap_in(log, ready.segment, ready.replaced)
                except OSError as failure:
                    error = failure
            else:
                self._job = None
                self._submit(partial(discard_cleaned, self._fs, ready.segment), _ignore)
        if error is not None:
            self._job = None
            self._give_up(log, error)
        elif job.finished:
            self._job = None
            self._finish(job)
        self._pump()

    def _finish(self, job: _Job) -> None:
        cleaning, log = job.cleaning, job.log
        if log.failed or log.generation != job.generation:
            return  # what was cleaned is gone, or was cut and is another's by now
        self._offsets[log.topic, log.partition] = cleaning.clean_offset
        self._offsets_changed = True
        if cleaning.clean_offset <= cleaning.plan.first_dirty_offset:
            self._left_alone[log] = self._now_ms + RETRY_MS
        self._write_offsets()
        totals = cleaning.totals
        logger.info(
            "log compacted",
            extra={
                "fields": {
                    "partition": log.name,
                    "from_offset": cleaning.plan.first_dirty_offset,
                    "clean_offset": cleaning.clean_offset,
                    "keys": totals.keys,
                    "records_dropped": totals.records_dropped,
                    "bytes_read": totals.bytes_read,
                    "bytes_written": totals.bytes_written,
                    "ms": self._now_ms - job.begun_ms,
                }
            },
        )

    def _give_up(self, log: PartitionLog, error: Exception) -> None:
        if isinstance(error, FileNotFoundError):
            return  # deleted meanwhile, in part or as a whole; the next look tells
        damaged = isinstance(error, KafkaError)
        self._left_alone[log] = NEVER_MS if damaged else self._now_ms + RETRY_MS
        logger.error(
            "compaction failed, and is not tried again before a restart" if damaged else "compaction failed",
            extra={"fields": {"partition": log.name, "why": str(error)}},
        )

    # -- the checkpoint --------------------------------------------------------------------------------------

    def _write_offsets(self) -> None:
        if not self._offsets_changed or self._writing or self._stopped:
            return
        self._writing = True
        self._offsets_changed = False
        if not self._submit(partial(self._checkpoint.write, dict(self._offsets)), self._offsets_written):
            self._offsets_written(OSError("too much work waits for the disk"))

    def _offsets_written(self, error: Exception | None) -> None:
        self._writing = False
        if error is not None:
            self._offsets_changed = True
            logger.error(
                "cleaner checkpoint cannot be written, to be tried again",
                extra={"fields": {"why": str(error)}},
            )


def make_plan(candidate: Candidate, config: BrokerConfig, now_ms: int) -> Plan:
    """What a thread has to know to clean a log; taken now, because the log goes on changing."""
    log, end_offset = candidate.log, candidate.end_offset
    topic = log.config
    return Plan(
        fs=log.fs,
        directory=log.directory,
        segments=[segment for segment in log.segments[:-1] if segment.base_offset < end_offset],
        first_dirty_offset=candidate.first_dirty_offset,
        end_offset=end_offset,
        map_bytes_max=config.log_cleaner_dedupe_buffer_size,
        load_factor=config.log_cleaner_io_buffer_load_factor,
        segment_bytes=topic.segment_bytes,
        segment_index_bytes=topic.segment_index_bytes,
        index_interval_bytes=topic.index_interval_bytes,
        delete_retention_ms=topic.delete_retention_ms,
        now_ms=now_ms,
        last_offsets={entry.producer_id: entry.last_offset for entry in log.producer_state},
        last_epochs={entry.producer_id: entry.epoch for entry in log.producer_state},
        aborted=[
            entry
            for segment in log.segments
            for entry in segment.txn_index.entries()
            if entry.first_offset < end_offset
        ],
    )


def _ignore(error: Exception | None) -> None:
    """A file that is left over is overwritten by the next cleaning, or removed at the next start."""
