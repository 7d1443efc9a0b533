"""Raft's storage on disk: a partition log whose offsets are indexes and whose leader epochs are terms.

Owns the directory of the metadata log: its segments, the `quorum-state` file, the snapshots. An entry is one record,
entries written together are one batch for each term, and those that are Raft's own carry a key. Invariants: what is
found at opening is made durable before anyone relies on it; the log joins the newest snapshot, or is replaced by it; a
cut is exact, although a log can only be cut between batches: the part of the batch that stays is written aside first,
so that no crash can take entries that this node has promised to have. Used by the driver.

After a crash the partition's recovery has cut a torn tail already; what Raft adds is this order: a received snapshot is
durable before the log it replaces goes, and term and vote are durable before a message that depends on them leaves.
"""

import contextlib
from collections.abc import Iterator
from typing import Final

from headrace.base.clock import Clock
from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.log import get_logger
from headrace.consensus.raft import quorum_state, snapshot_file
from headrace.consensus.raft.messages import Entry, EntryKind, HardState, SnapshotChunk, SnapshotMeta
from headrace.consensus.raft.ready import Ready
from headrace.consensus.raft.storage import SyncTicket, take
from headrace.records.batch import parse_header
from headrace.records.builder import build_batch, iter_batches, iter_records
from headrace.storage.files import FileSystem
from headrace.storage.flush import FlushTicket
from headrace.storage.log import PartitionLog
from headrace.storage.origin import Origin

KEYS: Final = {EntryKind.DATA: None, EntryKind.LEADER: b"leader", EntryKind.VOTERS: b"voters"}
KINDS: Final = {key: kind for kind, key in KEYS.items()}
BATCH_BYTES_MAX: Final = (
    512 * 1024
)  # entries written together are split past this, so that reading stays cheap
RECENT_BYTES_MAX: Final = 1024 * 1024  # entries at the end of the log that are kept in memory, for followers
ALL: Final = 1 << 62
KEPT_NAME: Final = "kept-entries"

logger = get_logger(__name__)


class DurableTicket:
    """What one sync has to write: the hard state, if it changed, and the log's own flush."""

    def __init__(
        self, fs: FileSystem, directory: str, state: HardState | None, log: FlushTicket | None
    ) -> None:
        self._fs: Final = fs
        self._directory: Final = directory
        self._state: Final = state
        self.log: Final = log

    @property
    def writes_state(self) -> bool:
        """Whether there is more to do than the log's flush."""
        return self._state is not None

    def run(self) -> None:
        if self._state is not None:
            quorum_state.write_state(self._fs, self._directory, self._state)
        if self.log is not None:
            self.log.run()


class SnapshotTicket:
    """A snapshot of the application's being written."""

    def __init__(self, fs: FileSystem, path: str, meta: SnapshotMeta, data: bytes) -> None:
        self._fs: Final = fs
        self._path: Final = path
        self._data: Final = data
        self.meta: Final = meta

    def run(self) -> None:
        self._fs.write_atomic(self._path, self._data)


class DurableStorage:
    """See the module."""

    def __init__(self, log: PartitionLog, clock: Clock, *, flushes_log: bool = True) -> None:
        """Take over a log that has been recovered. `flushes_log` is False where the host flushes it with others."""
        self.log: Final = log
        self._fs: Final = log.fs
        self._directory: Final = log.directory
        self._clock: Final = clock
        self._flushes_log: Final = flushes_log
        self._recent: list[Entry] = []
        self._recent_first = log.log_end_offset
        self._recent_bytes = 0
        self.hard_state = quorum_state.read_state(self._fs, self._directory)
        self._state_dirty = False
        self.snapshot = snapshot_file.find_newest(self._fs, self._directory)
        self._open()

    # -- opening ---------------------------------------------------------------------------------------------

    def _open(self) -> None:
        fs, log, directory = self._fs, self.log, self._directory
        with contextlib.suppress(FileNotFoundError):
            fs.remove(f"{directory}/{snapshot_file.INCOMING_NAME}")
        self._restore_kept()
        meta = self.snapshot
        if log.log_start_offset > meta.end:
            raise KafkaError(
                ErrorCode.KAFKA_STORAGE_ERROR,
                f"the metadata log begins at {log.log_start_offset}, and a snapshot reaches {meta.end}: "
                f"a file of {directory} is missing",
            )
        if log.log_end_offset < meta.end or not self._joins(meta):
            logger.warning(
                "the metadata log is replaced by its snapshot",
                extra={"fields": {"log_end_offset": log.log_end_offset, "snapshot": meta.end}},
            )
            log.truncate_fully(meta.end)
        log.flush()
        fs.sync_dir(directory)  # a process that was killed may have left names that no one synced
        snapshot_file.remove_older(fs, directory, meta.end)
        self._recent_first = log.log_end_offset

    def _joins(self, meta: SnapshotMeta) -> bool:
        """Whether the log has the entries that the snapshot stands for, as far as it reaches back."""
        log = self.log
        return log.log_start_offset == meta.end or log.epochs.epoch_for_offset(meta.end - 1) == meta.term

    # -- reading ---------------------------------------------------------------------------------------------

    @property
    def start(self) -> int:
        return self.log.log_start_offset

    @property
    def end(self) -> int:
        return self.log.log_end_offset

    def terms(self) -> list[tuple[int, int]]:
        return [(entry.epoch, entry.start_offset) for entry in self.log.epochs.entries]

    def entries(self, start: int, end: int, max_bytes: int) -> list[Entry]:
        assert self.start <= start <= end <= self.end, (self.start, start, end, self.end)
        if start >= self._recent_first:
            return take(self._recent, start - self._recent_first, end - self._recent_first, max_bytes)
        found: list[Entry] = []
        size = 0
        for index, entry in self._read(start, max_bytes):
            size += entry.size
            if index >= end or (found and size > max_bytes):
                break
            found.append(entry)
        return found

    def _read(self, start: int, max_bytes: int) -> Iterator[tuple[int, Entry]]:
        """Entries from `start` on, from the files."""
        log = self.log
        while start < log.log_end_offset:
            data = log.read(start, max_bytes, max_offset=log.log_end_offset).read()
            if not data:
                raise KafkaError(
                    ErrorCode.KAFKA_STORAGE_ERROR,
                    f"{log.name} ends at {log.log_end_offset}, and has nothing at {start}",
                )
            for header, batch in iter_batches(data):
                for record in iter_records(batch):
                    if record.offset >= start:
                        kind = KINDS.get(record.key, EntryKind.DATA)
                        yield record.offset, Entry(header.partition_leader_epoch, record.value or b"", kind)
                start = header.next_offset

    def read_chunk(self, position: int, max_bytes: int) -> tuple[bytes, bool]:
        file = self._fs.open(snapshot_file.path_of(self._directory, self.snapshot))
        data = file.pread(max_bytes, position)
        return data, position + len(data) >= file.size()

    def read_snapshot(self) -> bytes:
        """The application's part of the newest snapshot."""
        data = self._fs.read(snapshot_file.path_of(self._directory, self.snapshot))
        return data[snapshot_file.split(data)[1] :]

    # -- writing ---------------------------------------------------------------------------------------------

    def write(self, ready: Ready) -> None:
        if ready.hard_state is not None:
            self.hard_state = ready.hard_state
            self._state_dirty = True
        try:
            for chunk in ready.chunks:
                self._write_chunk(chunk)
            if ready.installed is not None:
                self._install(ready.installed)
        except OSError as error:
            raise KafkaError(
                ErrorCode.KAFKA_STORAGE_ERROR, f"a snapshot cannot be stored: {error.strerror}"
            ) from error
        if ready.entries:
            if ready.first < self.end:
                self._cut(ready.first)
            self._append(ready.entries)

    def _append(self, entries: list[Entry]) -> None:
        first, now_ms = self.end, self._clock.now_ms()
        data = _encode(first, entries, now_ms)
        self.log.append(data, leader_epoch=entries[-1].term, now_ms=now_ms, origin=Origin.REPLICA)
        self._recent += entries
        self._recent_bytes += sum([entry.size for entry in entries])
        if self._recent_bytes > 2 * RECENT_BYTES_MAX:
            self._forget_recent()

    def _forget_recent(self) -> None:
        """Keep the last entries only, as many as the bound allows."""
        count = size = 0
        for entry in reversed(self._recent):
            if size + entry.size > RECENT_BYTES_MAX:
                break
            count += 1
            size += entry.size
        del self._recent[: len(self._recent) - count]
        self._recent_first, self._recent_bytes = self.end - count, size

    def _cut(self, end: int) -> None:
        """Cut the log so that it ends at `end`, also in the middle of a batch."""
        log = self.log
        head = log.read(end, 1, max_offset=log.log_end_offset).ranges[0]
        base = max(parse_header(head.read()).base_offset, log.log_start_offset)
        kept = self.entries(base, end, ALL) if base < end else []
        path = f"{self._directory}/{KEPT_NAME}"
        if kept:
            self._fs.write_atomic(path, bytes(_encode(base, kept, self._clock.now_ms())))
        new_end = log.truncate_to(end)
        assert new_end == base, f"the log was cut to {new_end}, its batch begins at {base}"
        self._recent.clear()
        self._recent_first, self._recent_bytes = base, 0
        if kept:
            self._append(kept)
            log.active.file().sync()  # not the log's own flush: one may be under way
            self._fs.remove(path)
            self._fs.sync_dir(self._directory)

    def _restore_kept(self) -> None:
        """Finish a cut that a crash interrupted: entries that were to stay must not be lost."""
        path = f"{self._directory}/{KEPT_NAME}"
        if not self._fs.exists(path):
            return
        data = self._fs.read(path)
        base, log = parse_header(data).base_offset, self.log
        kept_end = max(header.next_offset for header, _ in iter_batches(data))
        if log.log_end_offset <= kept_end:
            # The cut was made. What is there of these entries was written after it, and perhaps never synced.
            if log.log_end_offset > base:
                log.truncate_to(base)
            log.append(
                data,
                leader_epoch=parse_header(data).partition_leader_epoch,
                now_ms=self._clock.now_ms(),
                origin=Origin.REPLICA,
            )
            log.flush()
        self._fs.remove(path)

    # -- snapshots -------------------------------------------------------------------------------------------

    def _write_chunk(self, chunk: SnapshotChunk) -> None:
        file = self._fs.open(f"{self._directory}/{snapshot_file.INCOMING_NAME}", create=True)
        if chunk.position == 0:
            file.truncate(0)
        file.pwrite(chunk.data, chunk.position)

    def _install(self, meta: SnapshotMeta) -> None:
        """The snapshot that was received takes the place of the log. Waits for the disk: it is rare."""
        fs, directory = self._fs, self._directory
        incoming = f"{directory}/{snapshot_file.INCOMING_NAME}"
        snapshot_file.check_whole(fs, incoming)
        fs.open(incoming).sync()
        fs.rename(incoming, snapshot_file.path_of(directory, meta))
        fs.sync_dir(directory)
        self.log.truncate_fully(meta.end)
        self.snapshot = meta
        self._recent.clear()
        self._recent_first, self._recent_bytes = meta.end, 0
        snapshot_file.remove_older(fs, directory, meta.end)

    def begin_snapshot(self, meta: SnapshotMeta, body: bytes) -> SnapshotTicket:
        """A ticket that writes the application's state as of `meta`, which the node has given."""
        data = snapshot_file.encode(meta, body, self._clock.now_ms())
        return SnapshotTicket(self._fs, snapshot_file.path_of(self._directory, meta), meta, data)

    def finish_snapshot(self, ticket: SnapshotTicket, keep_entries: int = 0) -> bool:
        """Take a snapshot that is durable; entries below it go, but for the last `keep_entries`.

        False when a newer one has come from the leader meanwhile. What cannot be removed now goes with the next one.
        """
        meta, log = ticket.meta, self.log
        if meta.end <= self.snapshot.end:
            return False
        self.snapshot = meta
        with contextlib.suppress(OSError, KafkaError):
            log.roll(self._clock.now_ms())
            log.delete_records(max(log.log_start_offset, meta.end - keep_entries))
            snapshot_file.remove_older(self._fs, self._directory, meta.end)
        return True

    # -- syncing ---------------------------------------------------------------------------------------------

    def begin_sync(self) -> DurableTicket:
        state = self.hard_state if self._state_dirty else None
        self._state_dirty = False
        log_ticket = self.log.begin_flush() if self._flushes_log else None
        return DurableTicket(self._fs, self._directory, state, log_ticket)

    def finish_sync(self, ticket: SyncTicket, error: BaseException | None) -> None:
        assert isinstance(ticket, DurableTicket)
        if ticket.log is not None:
            self.log.finish_flush(ticket.log, error)


def _encode(first: int, entries: list[Entry], now_ms: int) -> bytearray:
    """Entries from index `first` on as record batches: one for each term, more when they are large."""
    data = bytearray()
    rows: list[tuple[int, bytes | None, bytes, tuple[()]]] = []
    size = 0
    for number, entry in enumerate(entries):
        rows.append((now_ms, KEYS[EntryKind(entry.kind)], entry.data, ()))
        size += entry.size
        following = entries[number + 1] if number + 1 < len(entries) else None
        if following is None or following.term != entry.term or size + following.size > BATCH_BYTES_MAX:
            base = first + number + 1 - len(rows)
            data += build_batch(rows, base_offset=base, partition_leader_epoch=entry.term)
            rows, size = [], 0
    return data
