"""The metadata log of a cluster of one: entries are committed when they are on this broker's disk.

Owns the log in the directory `__cluster_metadata-0`, an ordinary partition log whose records are opaque here.
Invariant: `done` of an append is called only after its entries, and all before them, are durable; entries are handed
back by `replay` in the order they were appended. This is the seam that replication of the metadata log replaces: the
callers know only "append, and be told when it is committed". Called by the server's metadata store.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeAlias

from headrace.base.errors import ErrorCode, KafkaError
from headrace.records.builder import build_batch, iter_batches, iter_records
from headrace.storage.flusher import Flusher
from headrace.storage.log import PartitionLog
from headrace.storage.origin import Origin

TOPIC: Final = "__cluster_metadata"
PARTITION: Final = 0
TOPIC_ID: Final = (1).to_bytes(16, "big")  # Kafka's own for this topic
LEADER_EPOCH: Final = 0
BATCH_ENTRIES_MAX: Final = 5_000
READ_BYTES: Final = 1024 * 1024

Done: TypeAlias = Callable[[KafkaError | None], None]


class MetadataLog:
    """Entries in order, each committed once durable."""

    def __init__(self, log: PartitionLog, flusher: Flusher[PartitionLog]) -> None:
        self._log = log
        self._flusher = flusher

    @property
    def end_offset(self) -> int:
        return self._log.log_end_offset

    def replay(self) -> Iterator[bytes]:
        """Every entry from the log's start to its end."""
        log = self._log
        offset = log.log_start_offset
        while offset < log.log_end_offset:
            data = log.read(offset, READ_BYTES, max_offset=log.log_end_offset).read()
            for header, batch in iter_batches(data):
                yield from [record.value for record in iter_records(batch) if record.value is not None]
                offset = header.next_offset

    def append(self, entries: Sequence[bytes], now_ms: int, done: Done) -> None:
        """Append entries; `done` is called with None once they are committed, or with why they are not."""
        for start in range(0, len(entries), BATCH_ENTRIES_MAX):
            batch = build_batch(
                [(now_ms, None, entry, ()) for entry in entries[start : start + BATCH_ENTRIES_MAX]]
            )
            self._log.append(
                bytearray(batch), leader_epoch=LEADER_EPOCH, now_ms=now_ms, origin=Origin.COORDINATOR
            )
        self._flusher.request(self._log, lambda error: done(None if error is None else _refused(error)))


def _refused(error: Exception) -> KafkaError:
    return KafkaError(ErrorCode.KAFKA_STORAGE_ERROR, f"the metadata log could not be made durable: {error}")
