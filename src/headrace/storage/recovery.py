"""Opening a partition from what a previous process, or a crash, left in its directory.

After a clean close nothing is scanned: the last segment's batches behind its last index entry tell where the log ends.
Otherwise every segment from the recovery point on is read whole (`scan`): the log is cut after the last batch that is
all there, and indexes, leader epochs and producer state are rebuilt. Older segments were synced with their indexes, so
they are only checked for signs of damage. Invariants: what is served afterwards is one run of batches, each of which
was synced with its CRC known good or has just been checked; nothing is dropped without a line in the log; segments
behind a hole are kept under another name (`.corrupt`), not deleted. `LogManager` calls `open_log` at start, in threads.
"""

from typing import Final

from headrace.base.errors import KafkaError
from headrace.base.log import get_logger
from headrace.base.settings import TopicConfig
from headrace.records.batch import BatchHeader
from headrace.storage.epochs import CorruptEpochs, EpochCache
from headrace.storage.files import FileSystem
from headrace.storage.log import PartitionLog
from headrace.storage.producers import (
    Replay,
    load_snapshot,
    rebuild_producers,
    remember_recent,
    replay_headers,
)
from headrace.storage.scan import Scanned, scan_segment
from headrace.storage.segment import (
    DELETED_SUFFIX,
    INDEX_SUFFIX,
    LOG_SUFFIX,
    NO_TIMESTAMP,
    SUFFIXES,
    TIME_INDEX_SUFFIX,
    Segment,
)
from headrace.storage.swaps import CLEANED_SUFFIX, SWAP_SUFFIX
from headrace.storage.trims import spare_name
from headrace.storage.txn_index import TXN_INDEX_SUFFIX

OFFSET_MAX: Final = 2**63 - 1
LEFTOVER_SUFFIXES: Final = (DELETED_SUFFIX, CLEANED_SUFFIX, ".tmp")

logger = get_logger(__name__)


def open_log(
    fs: FileSystem,
    directory: str,
    topic: str,
    partition: int,
    config: TopicConfig,
    *,
    clean: bool,
    recovery_point: int = 0,
    log_start_offset: int = 0,
    now_ms: int = 0,
) -> PartitionLog:
    """The log in `directory`, ready for use. OSError when the directory itself cannot be read."""
    return _Opening(fs, directory, topic, partition, config, log_start_offset, now_ms).run(
        clean, recovery_point
    )


class _Opening:
    """One partition being opened: the steps share the log under construction."""

    def __init__(
        self,
        fs: FileSystem,
        directory: str,
        topic: str,
        partition: int,
        config: TopicConfig,
        log_start_offset: int,
        now_ms: int,
    ) -> None:
        self.fs = fs
        self.directory = directory
        self.config = config
        self.log_start_offset = log_start_offset
        self.now_ms = now_ms
        self._names: set[str] = set()
        self.log = PartitionLog(
            fs, directory, topic, partition, config, start_offset=log_start_offset, now_ms=now_ms
        )

    def run(self, clean: bool, recovery_point: int) -> PartitionLog:
        log = self.log
        segments = self._load_segments()
        if not segments:
            return log
        log.replace_segments(segments, truncated=False)
        if not (clean and self._open_clean()):
            first = len(segments) - 1 if clean else log.segment_number(max(recovery_point, 0))
            self._recover(first)
            log.mark_unsynced(min(first, len(log.segments) - 1))
        log.log_start_offset = max(self.log_start_offset, log.segments[0].base_offset)
        if log.log_start_offset > log.log_end_offset:
            # Records above the log start offset were lost with it: its offsets must not be given out again.
            log.truncate_fully(log.log_start_offset)
        log.epochs.truncate_from_end(log.log_end_offset + 1)
        log.epochs.truncate_from_start(log.log_start_offset)
        self._fill_in_epochs()
        return log

    # -- files -----------------------------------------------------------------------------------------------

    def _load_segments(self) -> list[Segment]:
        """The segments whose `.log` is there, oldest first; leftovers of unfinished work are cleared away."""
        for name in self.fs.listdir(self.directory):
            if name.endswith(LEFTOVER_SUFFIXES) and not self._completes_a_swap(name):
                self._remove(name, "left over from unfinished work")
        for name in self.fs.listdir(self.directory):
            if name.endswith(LOG_SUFFIX + SWAP_SUFFIX):
                self._complete_swap(name)
            elif name.endswith(SWAP_SUFFIX) and not name.endswith(TXN_INDEX_SUFFIX + SWAP_SUFFIX):
                self._remove(name, "index of a swapped segment, to be rebuilt")
        for name in self.fs.listdir(self.directory):
            if name.endswith(TXN_INDEX_SUFFIX + SWAP_SUFFIX):
                path = f"{self.directory}/{name}"
                self.fs.rename(path, path.removesuffix(SWAP_SUFFIX))
        names = set(self.fs.listdir(self.directory))
        bases = {base for name in names if (base := _base_offset(name, LOG_SUFFIX)) is not None}
        for name in sorted(names):
            for suffix in (INDEX_SUFFIX, TIME_INDEX_SUFFIX, TXN_INDEX_SUFFIX):
                if (base := _base_offset(name, suffix)) is not None and base not in bases:
                    self._remove(name, "index without a segment")
        self._names = names
        return [self._segment(base) for base in sorted(bases)]

    def _completes_a_swap(self, name: str) -> bool:
        """Take the transaction index of a segment that was being swapped in one step further, if this is one."""
        suffix = TXN_INDEX_SUFFIX + CLEANED_SUFFIX
        if not name.endswith(suffix):
            return False
        stem = f"{self.directory}/{name.removesuffix(suffix)}"
        if not self.fs.exists(stem + LOG_SUFFIX + SWAP_SUFFIX):
            return False
        self.fs.rename(stem + suffix, stem + TXN_INDEX_SUFFIX + SWAP_SUFFIX)
        return True

    def _segment(self, base_offset: int) -> Segment:
        size = self.fs.size(f"{self.directory}/{base_offset:020d}{LOG_SUFFIX}")
        return Segment(self.fs, self.directory, base_offset, size, self.now_ms)

    def _complete_swap(self, name: str) -> None:
        """A cleaned segment that was about to take the place of the ones it was made from."""
        base_offset = int(name.removesuffix(LOG_SUFFIX + SWAP_SUFFIX))
        path = f"{self.directory}/{name}"
        swapped = Segment(self.fs, self.directory, base_offset, self.fs.size(path), self.now_ms)
        swapped.log_path = path
        scanned = scan_segment(swapped, self.config.index_interval_bytes, end_offset=OFFSET_MAX)
        if scanned.valid_bytes != swapped.size:
            self._remove(name, "swapped segment is not whole, the originals are used")
            index = name.removesuffix(LOG_SUFFIX + SWAP_SUFFIX) + TXN_INDEX_SUFFIX + SWAP_SUFFIX
            if self.fs.exists(f"{self.directory}/{index}"):
                self._remove(index, "index of a segment that is not used")
            return
        for other in self.fs.listdir(self.directory):
            for suffix in SUFFIXES:
                base = _base_offset(other, suffix)
                if base is not None and base_offset <= base < max(scanned.next_offset, base_offset + 1):
                    self._remove(other, "replaced by a swapped segment")
        self.fs.rename(path, path.removesuffix(SWAP_SUFFIX))

    def _remove(self, name: str, reason: str) -> None:
        logger.info("file removed", extra={"fields": {"file": f"{self.directory}/{name}", "reason": reason}})
        self.fs.remove(f"{self.directory}/{name}")

    # -- after a clean close ---------------------------------------------------------------------------------

    def _open_clean(self) -> bool:
        """Open without a scan. False when the last segment does not look as a clean close leaves it."""
        log = self.log
        for number, segment in enumerate(log.segments[:-1]):
            if self._lacks_index(segment) and not self._rebuild_sealed(number):
                return True
        active = log.active
        try:
            log.log_end_offset = active.open_tail(self.config.index_interval_bytes)
        except (KafkaError, OSError) as error:
            logger.warning(
                "segment was not closed in order",
                extra={"fields": {"file": active.log_path, "error": str(error)}},
            )
            return False
        self._finish_without_scan()
        return True

    def _finish_without_scan(self) -> None:
        """Take epochs and producers from their files, and what those lack from batch headers."""
        log = self.log
        log.flushed_offset = log.log_end_offset
        self._load_epochs(len(log.segments))
        rebuild_producers(log)
        remember_recent(log)

    def _lacks_index(self, segment: Segment) -> bool:
        """Whether an index file is missing that a sealed segment of this size has."""
        if segment.size <= 2 * self.config.index_interval_bytes + self.config.max_message_bytes:
            return segment.size > 0 and _name(segment.time_index.path) not in self._names
        return not {_name(segment.index.path), _name(segment.time_index.path)} <= self._names

    # -- after a crash ---------------------------------------------------------------------------------------

    def _recover(self, first: int) -> None:
        """Scan the segments from number `first` on, look over the ones before it."""
        log = self.log
        for number in range(first):
            end_offset = log.segments[number + 1].base_offset
            whole = self._looks_whole(log.segments[number], end_offset)
            if not whole and not self._rebuild_sealed(number):
                return
        base_offset = log.segments[first].base_offset
        self._load_epochs(first)
        log.epochs.truncate_from_end(base_offset)
        replay_headers(log, load_snapshot(log, base_offset), base_offset)
        replay = Replay(log.producer_state)
        log.log_end_offset = base_offset
        number = first
        while number < len(log.segments):
            scanned = self._scan(number, log.epochs, replay)
            log.log_end_offset = scanned.next_offset
            self._accept(number, scanned)
            log.segments[number].txn_index.load(replay.aborted)
            replay.aborted.clear()
            number += 1
        replay.finish()

    def _looks_whole(self, segment: Segment, end_offset: int) -> bool:
        """Whether a synced segment and its indexes agree, as far as the batches behind the last entry show."""
        last, newest = segment.index.last(), segment.time_index.last()
        start = last[1] if last else 0
        next_offset, end = segment.base_offset, 0
        holder: BatchHeader | None = None  # of the largest timestamp
        try:
            for position, header in segment.headers(start):
                if last is not None and position == start and header.last_offset != last[0]:
                    return False
                if position - start > self.config.index_interval_bytes:
                    return False
                if header.max_timestamp > (newest[0] if newest else NO_TIMESTAMP):
                    return False
                if newest is not None and header.last_offset == newest[1]:
                    holder = header
                next_offset, end = header.next_offset, position + header.size
            if newest is not None and holder is None:
                located = segment.locate(newest[1])
                holder = segment.header_at(located[0]) if located else None
        except KafkaError:
            return False
        if newest is not None and (holder is None or (holder.max_timestamp, holder.last_offset) != newest):
            return False
        return end == segment.size and next_offset == end_offset

    def _rebuild_sealed(self, number: int) -> bool:
        """Scan a segment that should have needed none. False when the log turned out to end there."""
        log = self.log
        scanned = self._scan(number)
        count = len(log.segments)
        self._accept(number, scanned)
        if len(log.segments) == count:
            return True
        log.log_end_offset = scanned.next_offset
        self._finish_without_scan()
        return False

    def _scan(self, number: int, epochs: EpochCache | None = None, replay: Replay | None = None) -> Scanned:
        segments = self.log.segments
        end_offset = segments[number + 1].base_offset if number + 1 < len(segments) else None
        return scan_segment(segments[number], self.config.index_interval_bytes, end_offset, epochs, replay)

    def _accept(self, number: int, scanned: Scanned) -> None:
        """Make a segment what the scan found; put aside the ones behind it when it does not lead up to them."""
        log = self.log
        segment = log.segments[number]
        following = log.segments[number + 1 : number + 2]
        cut_bytes = segment.size - scanned.valid_bytes
        if cut_bytes:
            self._cut(segment, scanned, keep=bool(following))
        # Compaction leaves gaps inside a segment, never at its end: what is missing there was lost.
        gap = bool(following) and scanned.next_offset != following[0].base_offset
        if following and (cut_bytes or gap):
            self._quarantine(log.segments[number + 1 :], scanned.next_offset)
            following = []
            log.replace_segments(log.segments[: number + 1], truncated=False)
            cut_bytes = 0  # counted anew
        segment.load_indexes(scanned.offset_entries, scanned.time_entries, scanned.newest)
        if following:
            segment.seal()
        log.size_bytes -= cut_bytes

    def _cut(self, segment: Segment, scanned: Scanned, keep: bool) -> None:
        """Cut a segment after its last whole batch; `keep` a copy of what is cut if it may be more than a torn end."""
        cut_bytes = segment.size - scanned.valid_bytes
        logger.warning(
            "log truncated at recovery",
            extra={
                "fields": {
                    "partition": self.log.name,
                    "file": segment.log_path,
                    "log_end_offset": scanned.next_offset,
                    "position": scanned.valid_bytes,
                    "cut_bytes": cut_bytes,
                    "reason": scanned.stop.name,
                }
            },
        )
        if keep or self._batch_follows(segment, scanned):
            copy = self.fs.open(spare_name(self.fs, segment.log_path), create=True)
            copy.pwrite(segment.file().pread(cut_bytes, scanned.valid_bytes), 0)
            copy.sync()
        segment.cut(scanned.valid_bytes)

    def _batch_follows(self, segment: Segment, scanned: Scanned) -> bool:
        """Whether behind a damaged batch there is another: then this is no torn end, but damage in the middle."""
        try:
            damaged = segment.header_at(scanned.valid_bytes)
            after = damaged and segment.header_at(scanned.valid_bytes + damaged.size)
        except (KafkaError, OSError):
            return False
        return bool(damaged and after and after.base_offset == damaged.next_offset)

    def _quarantine(self, segments: list[Segment], end_offset: int) -> None:
        """Keep segments that cannot be served, under another name, for an operator to look at."""
        for segment in segments:
            segment.remove_indexes()
            if not segment.size:
                self.fs.remove(segment.log_path)
                continue
            spare = spare_name(self.fs, segment.log_path)
            logger.error(
                "segment behind a hole put aside",
                extra={
                    "fields": {
                        "partition": self.log.name,
                        "file": segment.log_path,
                        "renamed": spare,
                        "bytes": segment.size,
                        "log_end_offset": end_offset,
                    }
                },
            )
            self.fs.rename(segment.log_path, spare)
        self.fs.sync_dir(self.directory)

    def _load_epochs(self, synced: int) -> None:
        """Take the epochs from their checkpoint, or from the headers of the first `synced` segments."""
        epochs = self.log.epochs
        try:
            epochs.load(self.fs.read(self.log.epochs_path))
            return
        except FileNotFoundError:
            pass
        except CorruptEpochs as error:
            logger.warning(
                "leader epochs are rebuilt",
                extra={"fields": {"partition": self.log.name, "error": str(error)}},
            )
        for segment in self.log.segments[:synced]:
            for _, header in segment.headers():
                if header.partition_leader_epoch > epochs.latest_epoch:
                    epochs.assign(header.partition_leader_epoch, header.base_offset)

    def _fill_in_epochs(self) -> None:
        """Find the epochs of batches before the first one that is known.

        The log start offset may be older than the epochs: both move at DeleteRecords, but are written down apart.
        """
        log = self.log
        known = log.epochs.entries
        first_known = known[0].start_offset if known else log.log_end_offset
        if first_known <= log.log_start_offset or log.log_start_offset == log.log_end_offset:
            return
        log.epochs.clear()
        for segment in log.segments:
            for _, header in segment.headers():
                if header.base_offset >= first_known or header.partition_leader_epoch < 0:
                    break
                if header.partition_leader_epoch > log.epochs.latest_epoch:
                    log.epochs.assign(header.partition_leader_epoch, header.base_offset)
        for entry in known:
            log.epochs.assign(*entry)
        log.epochs.truncate_from_start(log.log_start_offset)


def _base_offset(name: str, suffix: str) -> int | None:
    """The base offset in a segment file's name, None for any other file."""
    stem = name.removesuffix(suffix)
    return int(stem) if stem != name and len(stem) == 20 and stem.isdecimal() else None


def _name(path: str) -> str:
    return path.rsplit("/", 1)[1]
