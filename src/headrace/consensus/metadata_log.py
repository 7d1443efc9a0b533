"""The metadata log of a cluster of one: entries are committed when they are on this broker's disk.

Owns the log in the directory `__cluster_metadata-0`, an ordinary partition log whose entries are opaque here, and the
snapshots beside it. Invariants: `done` of an append is called only after its entries, and all before them, are durable;
the entries of one append are one batch, so a crash keeps all of them or none; `replay` hands back, in order, entries
that make the state of all appends that were committed. Appends that wait together share one sync.

So that the log does not grow without end, its owner writes the whole state as a snapshot when `snapshot_due` says so;
once that is durable the log below it is cut, and older snapshots go. This is the seam that replication of the metadata
log replaces: callers know only "append, and be told when it is committed". Called by the server's metadata store.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeAlias

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.log import get_logger
from headrace.consensus.snapshots import encode_snapshot, find_snapshots, read_snapshot, snapshot_name
from headrace.records.builder import build_batch, iter_batches, iter_records
from headrace.storage.flusher import Flusher
from headrace.storage.log import PartitionLog
from headrace.storage.origin import Origin

TOPIC: Final = "__cluster_metadata"
PARTITION: Final = 0
TOPIC_ID: Final = (1).to_bytes(16, "big")  # Kafka's own for this topic
LEADER_EPOCH: Final = 0
READ_BYTES: Final = 1024 * 1024
SNAPSHOT_BYTES_DEFAULT: Final = 20 * 1024 * 1024

Done: TypeAlias = Callable[[KafkaError | None], None]

logger = get_logger(__name__)


class MetadataLog:
    """Entries in order, each committed once durable."""

    def __init__(
        self,
        log: PartitionLog,
        flusher: Flusher[PartitionLog],
        snapshot_bytes: int = SNAPSHOT_BYTES_DEFAULT,
    ) -> None:
        """`snapshot_bytes` is how far the log may grow between two snapshots."""
        self._log = log
        self._flusher = flusher
        self._snapshot_bytes = snapshot_bytes
        self._last_snapshot_bytes = 0
        self._bytes_since_snapshot = 0
        self._writing = False
        self.committed_offset = 0

    @property
    def end_offset(self) -> int:
        """The offset after the last entry, committed or not."""
        return self._log.log_end_offset

    def replay(self) -> Iterator[bytes]:
        """Entries that make the committed state: those of the newest snapshot, then the log's from there on."""
        log = self._log
        offset = 0
        if snapshots := find_snapshots(log.fs, log.directory):
            offset, path = snapshots[-1]
            yield from read_snapshot(log.fs, path)
        if offset < log.log_start_offset or offset > log.log_end_offset:
            raise KafkaError(
                ErrorCode.KAFKA_STORAGE_ERROR,
                f"the metadata log holds {log.log_start_offset} to {log.log_end_offset}, and a snapshot reaches "
                f"{offset}: a file of {log.directory} is missing",
            )
        while offset < log.log_end_offset:
            data = log.read(offset, READ_BYTES, max_offset=log.log_end_offset).read()
            for header, batch in iter_batches(data):
                yield from [record.value for record in iter_records(batch) if record.value is not None]
                offset = header.next_offset
                self._bytes_since_snapshot += header.size
        self.committed_offset = offset

    def append(self, entries: Sequence[bytes], now_ms: int, done: Done) -> None:
        """Append entries; `done` is called with None once they are committed, or with why they are not."""
        batch = build_batch([(now_ms, None, entry, ()) for entry in entries])
        self._log.append(
            bytearray(batch), leader_epoch=LEADER_EPOCH, now_ms=now_ms, origin=Origin.COORDINATOR
        )
        end_offset = self._log.log_end_offset
        self._bytes_since_snapshot += len(batch)

        def flushed(error: Exception | None) -> None:
            if error is None:
                self.committed_offset = end_offset
                done(None)
            else:
                done(_refused(error))

        self._flusher.request(self._log, flushed)

    @property
    def snapshot_due(self) -> bool:
        """Whether the log has grown enough for a snapshot: by the bound, and by more than the state itself takes."""
        enough = max(self._snapshot_bytes, self._last_snapshot_bytes)
        return not self._writing and self._bytes_since_snapshot >= enough

    def write_snapshot(self, entries: Sequence[bytes], now_ms: int) -> None:
        """Write the state of everything below `committed_offset`, in the background; then cut the log below it."""
        log, end_offset = self._log, self.committed_offset
        data = encode_snapshot(entries, now_ms)
        path = f"{log.directory}/{snapshot_name(end_offset, LEADER_EPOCH)}"
        grown = self._bytes_since_snapshot

        def written(error: Exception | None) -> None:
            self._writing = False
            if error is not None:  # the log still has everything; the next commit tries again
                logger.error("metadata snapshot failed", extra={"fields": {"path": path, "why": str(error)}})
                return
            self._last_snapshot_bytes = len(data)
            self._bytes_since_snapshot -= grown
            self._cut(end_offset, now_ms)

        self._writing = self._flusher.submit(lambda: log.fs.write_atomic(path, data), written)

    def _cut(self, end_offset: int, now_ms: int) -> None:
        """Drop what a durable snapshot has made superfluous. What cannot be dropped now is with the next one."""
        log = self._log
        with contextlib.suppress(OSError, KafkaError):
            if not log.failed:
                log.roll(now_ms)
                log.delete_records(end_offset)
            for offset, path in find_snapshots(log.fs, log.directory):
                if offset < end_offset:
                    log.fs.remove(path)


def _refused(error: Exception) -> KafkaError:
    return KafkaError(ErrorCode.KAFKA_STORAGE_ERROR, f"the metadata log could not be made durable: {error}")
