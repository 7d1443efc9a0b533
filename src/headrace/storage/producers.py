"""Bringing a partition's producer state in line with its log, from snapshots and batches.

Owns which `.snapshot` files count: each holds the table as of the offset in its name, written at a roll or a clean
close. Invariant: after a rebuild the table is what replaying every batch up to the log's end would give, as far as the
log and its snapshots reach back, and no snapshot from beyond the log's end is left to mislead the next one.
`trims` rebuilds after a truncation, `recovery` at start.
"""

import contextlib
from collections import deque
from typing import TYPE_CHECKING, Final

from headrace.base.errors import KafkaError
from headrace.base.log import get_logger
from headrace.records.batch import CONTROL_BIT, TRANSACTIONAL_BIT, BatchInfo, Buffer
from headrace.records.builder import iter_records
from headrace.storage.markers import EndTransactionMarker, parse_marker
from headrace.storage.producer_entry import BATCHES_REMEMBERED, CorruptSnapshot
from headrace.storage.producer_state import ProducerState
from headrace.storage.txn_index import AbortedTransaction

if TYPE_CHECKING:
    from headrace.storage.files import FileSystem
    from headrace.storage.log import PartitionLog

SNAPSHOT_SUFFIX: Final = ".snapshot"
RECENT_ENTRIES: Final = 8  # index entries to go back from the end of the log: at least as many batches
RECENT_BYTES_MAX: Final = 1 << 20  # and how far without an index

logger = get_logger(__name__)


def snapshot_offsets(fs: "FileSystem", directory: str) -> list[int]:
    """The offsets that a partition has snapshots of, ascending."""
    names = [
        name.removesuffix(SNAPSHOT_SUFFIX) for name in fs.listdir(directory) if name.endswith(SNAPSHOT_SUFFIX)
    ]
    return sorted([int(name) for name in names if name.isdecimal()])


def load_snapshot(log: "PartitionLog", at_most: int) -> int:
    """Start the table from the latest good snapshot at or below `at_most`; the offset it reaches to.

    Later snapshots, and ones that cannot be trusted, are removed; so are those from before the first segment, because
    batches between them and the log are missing, and a producer whose last sequence is wrong would be refused for
    good, while one that is not known may go on. Without any the table is empty and reaches to the log's start.
    """
    log.producer_state.clear()
    first_offset = log.segments[0].base_offset
    for offset in reversed(snapshot_offsets(log.fs, log.directory)):
        path = log.snapshot_path(offset)
        if first_offset <= offset <= at_most:
            try:
                log.producer_state.load(log.fs.read(path))
                return offset
            except CorruptSnapshot as error:
                logger.warning(
                    "producer snapshot is damaged, an older one is used",
                    extra={"fields": {"file": path, "error": str(error)}},
                )
        with contextlib.suppress(FileNotFoundError):
            log.fs.remove(path)
    return first_offset


def rebuild_producers(log: "PartitionLog") -> None:
    """Make the table agree with the log: from the latest snapshot that applies, then batch by batch."""
    replay_headers(log, load_snapshot(log, log.log_end_offset), log.log_end_offset)


def remember_recent(log: "PartitionLog") -> None:
    """Give producers back the batches that a snapshot leaves out, as far as the end of the log shows them.

    A snapshot holds each producer's last batch only. A producer that had several on the way when the broker stopped
    sends all of them again; without this, all but the last would be refused as out of order. The snapshot is believed
    where the two differ: it has a checksum, and the log, which nobody scanned, may have been damaged since.
    """
    active = log.active
    if not len(log.producer_state) or not active.size:
        return
    entries = len(active.index)
    start = active.index.at(entries - RECENT_ENTRIES)[1] if entries > RECENT_ENTRIES else 0
    if start == 0 and active.size > RECENT_BYTES_MAX:
        return
    recent = ProducerState(log.name)
    for _, header in active.headers(start):
        if not header.is_control:
            recent.update(header, header.base_offset)
    for found in recent:
        known = log.producer_state.get(found.producer_id)
        if known is not None and known.batches and list(known.batches)[-1:] == list(found.batches)[-1:]:
            known.batches = found.batches


def replay_headers(log: "PartitionLog", from_offset: int, to_offset: int) -> None:
    """Take the batches from `from_offset` up to `to_offset` into the table, by their headers."""
    if from_offset >= to_offset:
        return
    replay = Replay(log.producer_state)
    for segment in log.segments[log.segment_number(from_offset) :]:
        if segment.base_offset >= to_offset:
            break  # not scanned yet: its bytes may be anything
        located = segment.locate(from_offset) if segment.size else None
        for position, header in segment.headers(located[0]) if located else ():
            if header.base_offset >= to_offset:
                break
            if header.producer_id < 0:
                continue
            batch = BatchInfo(
                position,
                header.size,
                header.base_offset,
                header.last_offset,
                header.max_timestamp,
                header.partition_leader_epoch,
                header.attributes,
                header.producer_id,
                header.producer_epoch,
                header.base_sequence,
                header.last_sequence,
            )
            control = header.is_control
            replay.add(batch, segment.file().pread(header.size, position) if control else b"")
    replay.finish()


class Replay:
    """Batches on their way into a table: of plain ones only each producer's last few matter, so they wait."""

    __slots__ = ("_state", "_waiting", "aborted")

    def __init__(self, state: ProducerState) -> None:
        self.aborted: list[AbortedTransaction] = []
        """The aborted transactions that ended in the batches so far, for the index; whoever takes them empties it."""
        self._state = state
        self._waiting: dict[int, deque[BatchInfo]] = {}

    def add(self, batch: BatchInfo, content: Buffer = b"") -> None:
        """The next batch of a producer; `content` is all of it, needed of control batches only."""
        producer_id = batch.producer_id
        if not batch.attributes & (CONTROL_BIT | TRANSACTIONAL_BIT):
            waiting = self._waiting.get(producer_id)
            if waiting is None:
                waiting = self._waiting[producer_id] = deque(maxlen=BATCHES_REMEMBERED)
            waiting.append(batch)
            return
        for earlier in self._waiting.pop(producer_id, ()):
            self._state.replay(earlier)
        marker = _marker(content) if batch.attributes & CONTROL_BIT else None
        completed = self._state.replay(batch, marker)
        if completed is not None:
            aborted = self._state.complete_transaction(completed)
            if aborted is not None:
                self.aborted.append(aborted)

    def finish(self) -> None:
        """Take over what waits. In the order of the log, so that a full table forgets the same producers."""
        batches = [batch for waiting in self._waiting.values() for batch in waiting]
        for batch in sorted(batches, key=lambda batch: batch.base_offset):
            self._state.replay(batch)
        self._waiting.clear()


def _marker(content: Buffer) -> EndTransactionMarker | None:
    try:
        records = iter_records(content)
        return parse_marker(records[0].key, records[0].value) if records else None
    except (
        KafkaError
    ) as error:  # the CRC was right, so it was written like this; it says nothing of a producer
        logger.warning("control batch cannot be read", extra={"fields": {"error": str(error)}})
        return None
