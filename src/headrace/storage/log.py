"""One partition's log: an append-only run of segments, with what it knows of producers and leader epochs.

Owned by one loop, so there are no locks; only a `FlushTicket` ever runs elsewhere. Invariants: offsets rise without
gaps from `log_start_offset` to `log_end_offset` (a replica of a compacted log may have gaps); an append is all or
nothing, whatever the disk does; everything below `flushed_offset` survives a power cut. `LogManager` opens and closes
it, replication appends and reads, the flusher flushes. Reading, trimming and recovery are in `reads`, `trims` and
`recovery`.

When a write fails (full disk, I/O error) the batch is refused with KAFKA_STORAGE_ERROR and the log goes on: the next
one may succeed. When a sync fails, the kernel may have dropped pages it had accepted, so what is in the log beyond
`flushed_offset` is in doubt: the log is `failed`, refuses writes until it is recovered by a restart, and serves reads.
"""

import os
import zlib
from bisect import bisect_right
from typing import Final, NamedTuple, NoReturn

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.log import get_logger
from headrace.base.settings import TopicConfig
from headrace.records.batch import TRANSACTIONAL_BIT, assign
from headrace.storage import reads, trims
from headrace.storage.epochs import CHECKPOINT_NAME, EpochCache, EpochEntry
from headrace.storage.files import FileSystem
from headrace.storage.flush import FlushTicket
from headrace.storage.hanging import abort_older
from headrace.storage.origin import Origin
from headrace.storage.producer_state import ProducerState
from headrace.storage.producers import SNAPSHOT_SUFFIX
from headrace.storage.segment import Segment
from headrace.storage.validator import check_trusted, validate

LogSlice = reads.LogSlice
TimestampOffset = reads.TimestampOffset

logger = get_logger(__name__)


class Appended(NamedTuple):
    """What became of an append."""

    first_offset: int
    last_offset: int
    log_append_time_ms: int
    """-1 where records keep their own timestamps."""
    log_start_offset: int
    duplicate: bool
    """The log has the batch already, at these offsets; nothing was written."""
    flush_due: bool
    """The topic's flush policy asks for a flush now; with flush.messages=1, before the acknowledgement."""
    max_timestamp: int


class PartitionLog:
    """The log of one partition. See the module."""

    __slots__ = (
        "_bases",
        "_dirty",
        "_new_names",
        "_ticket",
        "_unsynced",
        "config",
        "directory",
        "epochs",
        "failed",
        "flushed_offset",
        "fs",
        "garbage",
        "generation",
        "log_end_offset",
        "log_start_offset",
        "partition",
        "producer_state",
        "segments",
        "size_bytes",
        "topic",
    )

    def __init__(
        self,
        fs: FileSystem,
        directory: str,
        topic: str,
        partition: int,
        config: TopicConfig,
        *,
        start_offset: int = 0,
        now_ms: int = 0,
    ) -> None:
        """An empty log in a directory that exists. `recovery.open_log` makes one of files that are there."""
        self.fs: Final = fs
        self.directory: Final = directory
        self.topic: Final = topic
        self.partition: Final = partition
        self.config = config
        self.log_start_offset = start_offset
        self.log_end_offset = start_offset
        self.flushed_offset = start_offset
        self.size_bytes = 0
        self.failed = False
        self.producer_state = ProducerState(directory)
        self.epochs = EpochCache()
        self.segments: list[Segment] = [Segment(fs, directory, start_offset, created_ms=now_ms)]
        self._bases: list[int] = [start_offset]
        # Segments with bytes that no flush has taken yet, and sealed ones' other files likewise.
        self._dirty: list[Segment] = []
        self._unsynced: list[Segment] = []
        self.garbage: list[str] = []
        """Files of deleted segments that the next flush removes."""
        self._new_names = True
        self.generation = 0  # changes whenever the log is cut
        self._ticket: FlushTicket | None = None

    def __repr__(self) -> str:
        return f"PartitionLog({self.name}, {self.log_start_offset}..{self.log_end_offset})"

    @property
    def name(self) -> str:
        return f"{self.topic}-{self.partition}"

    @property
    def active(self) -> Segment:
        return self.segments[-1]

    def reconfigure(self, config: TopicConfig) -> None:
        """The topic's settings changed."""
        self.config = config

    def segment_number(self, offset: int) -> int:
        """The number of the last segment that starts at or below `offset`; 0 when none does."""
        if offset >= self._bases[-1]:
            return len(self._bases) - 1
        return max(0, bisect_right(self._bases, offset) - 1)

    # -- appending -------------------------------------------------------------------------------------------

    def append(
        self,
        data: memoryview | bytearray | bytes,
        *,
        leader_epoch: int,
        now_ms: int,
        origin: Origin = Origin.CLIENT,
    ) -> Appended:
        """Append batches, or raise KafkaError and leave the log as it was. Offsets are written into `data`."""
        if self.failed:
            self._refuse_failed()
        view = data if type(data) is memoryview else memoryview(data)
        if origin is not Origin.CLIENT:
            return self._append_trusted(view, leader_epoch, now_ms, origin)
        config = self.config
        view, header, log_append_time_ms = validate(view, config, now_ms)
        if header.producer_id >= 0:
            if header.attributes & TRANSACTIONAL_BIT:
                abort_older(self, header.producer_id, header.producer_epoch, leader_epoch, now_ms)
            duplicate = self.producer_state.check(header)
            if duplicate is not None:
                first, last, timestamp = duplicate
                flush_due = config.flush_messages == 1 and last >= self.flushed_offset
                return Appended(first, last, timestamp, self.log_start_offset, True, flush_due, timestamp)
        first_offset = self.log_end_offset
        last_offset = first_offset + header.last_offset_delta
        max_timestamp = header.max_timestamp
        size = len(view)
        if view.readonly:
            view = memoryview(bytearray(view))
        assign(view, 0, first_offset, leader_epoch)
        try:
            segment = self.segments[-1]
            if segment.size and self._roll_due(segment, size, last_offset, max_timestamp, now_ms):
                segment = self.roll(now_ms)
            position = segment.write(view)
        except OSError as error:
            self._refuse_write(error)
        segment.account(position, size, last_offset, max_timestamp, config.index_interval_bytes)
        if header.producer_id >= 0:
            self.producer_state.update(header, first_offset)
        if leader_epoch != self.epochs.latest_epoch and leader_epoch >= 0:
            self.epochs.assign(leader_epoch, first_offset)
        self._appended(segment, size, last_offset + 1, position)
        return Appended(
            first_offset,
            last_offset,
            log_append_time_ms,
            self.log_start_offset,
            False,
            last_offset + 1 - self.flushed_offset >= config.flush_messages,
            max_timestamp,
        )

    def _append_trusted(self, view: memoryview, leader_epoch: int, now_ms: int, origin: Origin) -> Appended:
        """Batches from a coordinator (offsets are assigned here) or from the leader (they are kept)."""
        if view.readonly and origin is Origin.COORDINATOR:
            view = memoryview(bytearray(view))
        batches = check_trusted(view, self.log_end_offset, leader_epoch, origin, self.producer_state)
        first_offset = batches[0][0].base_offset
        last_offset = batches[-1][0].last_offset
        max_timestamp = max([header.max_timestamp for header, _ in batches])
        try:
            segment = self.active
            if segment.size and self._roll_due(segment, len(view), last_offset, max_timestamp, now_ms):
                segment = self.roll(now_ms)
            position = start = segment.write(view)
        except OSError as error:
            self._refuse_write(error)
        for header, marker in batches:
            segment.account(
                position,
                header.size,
                header.last_offset,
                header.max_timestamp,
                self.config.index_interval_bytes,
            )
            position += header.size
            completed = self.producer_state.update(header, header.base_offset, None, marker)
            if completed is not None:
                segment.txn_index.append(self.producer_state.complete_transaction(completed))
            if header.partition_leader_epoch >= 0:
                self.epochs.assign(header.partition_leader_epoch, header.base_offset)
        self._appended(segment, len(view), last_offset + 1, start)
        flush_due = last_offset + 1 - self.flushed_offset >= self.config.flush_messages
        return Appended(first_offset, last_offset, -1, self.log_start_offset, False, flush_due, max_timestamp)

    def _appended(self, segment: Segment, size: int, end_offset: int, position: int) -> None:
        self.log_end_offset = end_offset
        self.size_bytes += size
        if position == 0:
            self._new_names = True
        dirty = self._dirty
        if not dirty or dirty[-1] is not segment:
            dirty.append(segment)

    def _refuse_failed(self) -> NoReturn:
        raise KafkaError(
            ErrorCode.KAFKA_STORAGE_ERROR, f"A sync of {self.name} failed; it takes no writes until a restart"
        )

    def _refuse_write(self, error: OSError) -> NoReturn:
        logger.error("write refused, the disk would not take it", extra={"fields": self._fields(error)})
        raise KafkaError(
            ErrorCode.KAFKA_STORAGE_ERROR, f"Error while writing to {self.name}: {error.strerror}"
        ) from error

    # -- rolling ---------------------------------------------------------------------------------------------

    def _roll_due(self, segment: Segment, size: int, last_offset: int, timestamp: int, now_ms: int) -> bool:
        config = self.config
        if segment.size + size > config.segment_bytes or not segment.can_hold(last_offset):
            return True
        first_timestamp = segment.first_timestamp
        age_ms = timestamp - first_timestamp if first_timestamp >= 0 else now_ms - segment.created_ms
        if age_ms > self._segment_ms - config.segment_jitter_ms and age_ms > self._roll_age_ms(segment):
            return True
        return segment.indexes_full(config.segment_index_bytes)

    @property
    def _segment_ms(self) -> int:
        """segment.ms, or less: the active segment is not compacted, so a record may not stay in it for longer."""
        config = self.config
        if "compact" in config.cleanup_policy:
            return min(config.segment_ms, config.max_compaction_lag_ms)
        return config.segment_ms

    def _roll_age_ms(self, segment: Segment) -> int:
        """segment.ms less a share of segment.jitter.ms that is the segment's own and always the same."""
        jitter_ms = self.config.segment_jitter_ms
        if jitter_ms <= 0:
            return self._segment_ms
        return self._segment_ms - zlib.crc32(segment.log_path.encode()) % (jitter_ms + 1)

    def roll(self, now_ms: int = 0) -> Segment:
        """Seal the active segment and start the next at the log's end. OSError leaves the log as it was."""
        active = self.active
        if not active.size:
            return active
        active.seal()
        self.fs.write_atomic(
            self.snapshot_path(self.log_end_offset), self.producer_state.snapshot(), durable=False
        )
        segment = Segment(self.fs, self.directory, self.log_end_offset, created_ms=now_ms)
        self.segments.append(segment)
        self._bases.append(segment.base_offset)
        self._unsynced.append(active)
        self._new_names = True
        return segment

    def roll_if_due(self, now_ms: int) -> bool:
        """Roll a segment that has been open for segment.ms, although nothing is appended to it."""
        active = self.active
        if not active.size or now_ms - active.created_ms <= self._roll_age_ms(active):
            return False
        self.roll(now_ms)
        return True

    def end_of(self, segment: Segment) -> int:
        """The offset where a segment ends: the base of the next, or the log's end."""
        number = bisect_right(self._bases, segment.base_offset)
        return self._bases[number] if number < len(self._bases) else self.log_end_offset

    @property
    def epochs_path(self) -> str:
        return f"{self.directory}/{CHECKPOINT_NAME}"

    def snapshot_path(self, offset: int) -> str:
        return f"{self.directory}/{offset:020d}{SNAPSHOT_SUFFIX}"

    # -- reading ---------------------------------------------------------------------------------------------

    def read(self, offset: int, max_bytes: int, *, max_offset: int, min_one_batch: bool = True) -> LogSlice:
        """See `reads.read`."""
        try:
            return reads.read(self, offset, max_bytes, max_offset, min_one_batch)
        except OSError as error:
            self._refuse_read(error)

    def aborted_transactions(self, offset: int, found: LogSlice, max_offset: int) -> list[tuple[int, int]]:
        """See `reads.aborted_transactions`."""
        try:
            return reads.aborted_transactions(self, offset, found, max_offset)
        except OSError as error:
            self._refuse_read(error)

    def offset_for_timestamp(self, timestamp: int, max_offset: int) -> TimestampOffset | None:
        """See `reads.offset_for_timestamp`."""
        try:
            return reads.offset_for_timestamp(self, timestamp, max_offset)
        except OSError as error:
            self._refuse_read(error)

    def max_timestamp_offset(self) -> TimestampOffset | None:
        """See `reads.max_timestamp_offset`."""
        try:
            return reads.max_timestamp_offset(self)
        except OSError as error:
            self._refuse_read(error)

    def epoch_end_offset(self, epoch: int) -> EpochEntry:
        """The largest epoch at or below `epoch` and where it ends; (-1, -1) when that is not known."""
        return self.epochs.end_offset_for(epoch, self.log_end_offset)

    def _refuse_read(self, error: OSError) -> NoReturn:
        logger.error("read failed", extra={"fields": self._fields(error)})
        raise KafkaError(
            ErrorCode.KAFKA_STORAGE_ERROR, f"Error while reading from {self.name}: {error.strerror}"
        ) from error

    # -- flushing --------------------------------------------------------------------------------------------

    @property
    def recovery_point(self) -> int:
        """Where a scan after a crash must start: the base of the first segment that is not wholly durable.

        The indexes of the active segment are never synced, so it is scanned even when all of it is flushed.
        """
        offset = min(self.flushed_offset, self.active.base_offset)
        for sealed in (self._ticket.sealed if self._ticket else [], self._unsynced):
            if sealed:
                offset = min(offset, sealed[0].base_offset)
        return offset

    @property
    def flush_wanted(self) -> bool:
        """There is work for a thread that no client waits for.

        Sealed segments are to be synced, so that a restart need not scan them, or files of deleted ones removed.
        """
        return bool(self._unsynced or self.garbage) and self._ticket is None and not self.failed

    def begin_flush(self) -> FlushTicket | None:
        """A ticket that makes all of the log durable, or None when it is. One at a time; KafkaError once failed."""
        assert self._ticket is None, f"two flushes of {self.name} at once"
        if self.failed:
            self._refuse_failed()
        durable = self.flushed_offset == self.log_end_offset and not self._unsynced
        if durable and not self.epochs.dirty and not self.garbage:
            return None
        others = []
        for segment in self._unsynced:
            others += [segment.index.path, segment.time_index.path, segment.txn_index.path]
            others.append(self.snapshot_path(self.end_of(segment)))
        texts = [(self.epochs_path, self.epochs.encode())] if self.epochs.dirty else []
        directories = [self.directory, os.path.dirname(self.directory)] if self._new_names else []
        ticket = self._ticket = FlushTicket(
            self.fs,
            self.log_end_offset,
            self.generation,
            [segment.log_path for segment in self._dirty],
            others,
            texts,
            directories,
            self.garbage,
            self._dirty,
            self._unsynced,
        )
        self.epochs.dirty = False
        self._dirty = []
        self._unsynced = []
        self.garbage = []
        self._new_names = False
        return ticket

    def finish_flush(self, ticket: FlushTicket, error: BaseException | None = None) -> None:
        """Take the outcome of a ticket that has run."""
        assert ticket is self._ticket, "not the flush under way"
        self._ticket = None
        if error is None:
            # After a truncation, bytes below the target may be newer than the sync: the next flush counts.
            if ticket.generation == self.generation:
                self.flushed_offset = ticket.target_offset
            else:
                self.epochs.dirty = (
                    True  # the ticket may have written older ones over those of the truncation
                )
        elif ticket.lost:
            self.fail(error)
        else:
            # Nothing was lost, only not written (a full disk): all of it is still to be flushed.
            logger.error("flush failed, to be tried again", extra={"fields": self._fields(error)})
            kept = set(self.segments)
            self._dirty = [s for s in ticket.dirty if s in kept and s not in self._dirty] + self._dirty
            self._unsynced = [s for s in ticket.sealed if s in kept] + self._unsynced
            self._new_names = self.epochs.dirty = True
            self.garbage = ticket.garbage + self.garbage

    def flush(self) -> None:
        """Make everything durable before returning; blocks, so for start-up, shutdown and tests."""
        ticket = self.begin_flush()
        if ticket is None:
            return
        try:
            ticket.run()
        except OSError as error:
            self.finish_flush(ticket, error)
            raise KafkaError(
                ErrorCode.KAFKA_STORAGE_ERROR, f"Error while flushing {self.name}: {error.strerror}"
            ) from error
        self.finish_flush(ticket)

    def fail(self, error: BaseException) -> None:
        self.failed = True
        logger.error(
            "sync failed, the partition takes no writes until a restart",
            extra={"fields": self._fields(error)},
        )

    def _fields(self, error: BaseException) -> dict[str, object]:
        return {
            "partition": self.name,
            "errno": getattr(error, "errno", None),
            "error": getattr(error, "strerror", None) or str(error),
        }

    # -- trimming and closing --------------------------------------------------------------------------------

    def delete_records(self, before: int) -> int:
        """See `trims.delete_records`."""
        try:
            return trims.delete_records(self, before)
        except OSError as error:
            self._refuse_write(error)

    def truncate_to(self, offset: int) -> int:
        """See `trims.truncate_to`."""
        try:
            return trims.truncate_to(self, offset)
        except OSError as error:
            self._refuse_write(error)

    def truncate_fully(self, new_start: int) -> None:
        """See `trims.truncate_fully`."""
        try:
            trims.truncate_fully(self, new_start)
        except OSError as error:
            self._refuse_write(error)

    def apply_retention(self, now_ms: int, limit_offset: int) -> int:
        """See `trims.apply_retention`."""
        return trims.apply_retention(self, now_ms, limit_offset)

    def replace_segments(self, segments: list[Segment], *, truncated: bool) -> None:
        """The log consists of these segments from now on: for `trims` and `recovery`."""
        assert segments, "a log has a segment, be it empty"
        self.segments = segments
        self._bases = [segment.base_offset for segment in segments]
        self.size_bytes = sum([segment.size for segment in segments])
        kept = set(segments)
        self._dirty = [segment for segment in self._dirty if segment in kept]
        self._unsynced = [
            segment for segment in self._unsynced if segment in kept and segment is not self.active
        ]
        if truncated:
            self.generation += 1

    def excuse(self, segments: list[Segment]) -> None:
        """Tell a flush under way that these segments' files are about to go."""
        if self._ticket is not None:
            self._ticket.excused.update([segment.log_path for segment in segments])

    def names_changed(self) -> None:
        """Files were renamed: the next flush syncs the directory."""
        self._new_names = True

    def is_settled(self, segment: Segment) -> bool:
        """Whether a sealed segment, its indexes and the snapshot at its end are known to be durable."""
        pending = self._ticket.dirty + self._ticket.sealed if self._ticket else []
        return segment not in self._unsynced and segment not in self._dirty and segment not in pending

    def mark_unsynced(self, first: int) -> None:
        """Recovery read the segments from number `first` on: they are whole, but nobody knows if they are synced."""
        self._dirty = [segment for segment in self.segments[first:] if segment.size]
        self._unsynced = self.segments[first:-1]
        self._new_names = True
        self.flushed_offset = min(self.segments[first].base_offset, self.log_end_offset)

    def close(self, clean: bool = True) -> None:
        """Give up the files. A clean close leaves nothing for recovery to do; KafkaError when it cannot."""
        try:
            if clean and not self.failed:
                self._close_cleanly()
        finally:
            self.excuse(self.segments)  # the owner may remove the directory now
            for segment in self.segments:
                segment.forget()

    def _close_cleanly(self) -> None:
        try:
            self.active.write_indexes()
            if len(self.segments) > 1:
                self.active.create()  # else the one before it would be taken for the active one
            if self.log_end_offset > self.log_start_offset or len(self.producer_state):
                path = self.snapshot_path(self.log_end_offset)
                self.fs.write_atomic(path, self.producer_state.snapshot(), durable=False)
                self.fs.open(path).sync()
                self._new_names = True
            for file in self.active.index_files():
                file.sync()
        except OSError as error:
            self._refuse_write(error)
        if self.epochs.dirty or self.flushed_offset < self.log_end_offset or self._unsynced or self.garbage:
            self.flush()
        elif self._new_names and self.size_bytes:
            self.fs.sync_dir(self.directory)

    def delete(self) -> None:
        """Remove the partition from the disk. Readers that hold a range read on."""
        for segment in self.segments:
            segment.forget()
        self.fs.rmtree(self.directory)
