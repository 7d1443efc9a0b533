"""What one partition remembers of its idempotent and transactional producers.

Owns, for each producer id that wrote here, its epoch, its last five batches, its open transaction and the
epoch of the coordinator that last ended one. Invariant: the table is a function of the log's batches (and of
expiry), so that replaying the log from any snapshot gives the same table; nothing in here is written before
the batch that caused it is in the log. `PartitionLog` calls `check` before it writes a batch and `update`
after; recovery calls `load`, then `update` for each batch past the snapshot. Semantics are those of Kafka 4's
ProducerStateManager and ProducerAppendInfo.

A producer without an entry may start at any sequence number: its records may have been removed by retention
or DeleteRecords, or its entry may have expired, and refusing it would stop a healthy producer for good.
"""

from collections.abc import Iterator
from typing import NamedTuple, NoReturn

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.log import get_logger
from headrace.records.batch import (
    CONTROL_BIT,
    NO_PRODUCER_EPOCH,
    NO_SEQUENCE,
    SEQUENCE_MAX,
    TRANSACTIONAL_BIT,
    BatchHeader,
    BatchInfo,
)
from headrace.storage.markers import EndTransactionMarker
from headrace.storage.origin import Origin
from headrace.storage.producer_entry import (
    NO_OFFSET,
    ProducerEntry,
    RememberedBatch,
    decode_snapshot,
    encode_snapshot,
)
from headrace.storage.txn_index import AbortedTransaction

PRODUCERS_MAX = 50_000
"""Entries in one partition's table. Past it, the tenth that wrote longest ago is forgotten as if expired."""


TRANSACTION_VERSION_2 = 2
"""From this version (KIP-890) the coordinator raises the producer epoch with every marker."""

_new_tuple = tuple.__new__

logger = get_logger(__name__)


class Duplicate(NamedTuple):
    """A batch that is in the log already: what its producer is answered."""

    first_offset: int
    last_offset: int
    timestamp: int


class CompletedTransaction(NamedTuple):
    """A transaction whose marker is in the log: the line that the transaction index needs of it."""

    producer_id: int
    first_offset: int
    last_offset: int
    aborted: bool


# Partitions that never saw an idempotent producer share these and allocate nothing; they are replaced, never
# changed.
_NO_PRODUCERS: dict[int, ProducerEntry] = {}
_NO_TRANSACTIONS: dict[int, int] = {}


class ProducerState:
    """The producers of one partition. Single owner, no locks."""

    __slots__ = ("_guards", "_name", "_ongoing", "_producers", "_unreplicated")

    def __init__(self, name: str = "") -> None:
        self._name = name
        self._producers = _NO_PRODUCERS
        # First offset of an open transaction -> its producer. Transactions open in log order, so insertion
        # order is offset order.
        self._ongoing = _NO_TRANSACTIONS
        # First offset -> marker offset of transactions that ended at or above the high watermark.
        self._unreplicated = _NO_TRANSACTIONS
        # Producers whose first records wait for the coordinator's word that they belong to a transaction.
        self._guards: dict[int, object] | None = None

    def __len__(self) -> int:
        return len(self._producers)

    def __iter__(self) -> Iterator[ProducerEntry]:
        return iter(self._producers.values())

    def get(self, producer_id: int) -> ProducerEntry | None:
        """The entry of one producer, to look at."""
        return self._producers.get(producer_id)

    # -- appends ---------------------------------------------------------------------------------------------

    def check(self, header: BatchHeader, origin: Origin = Origin.CLIENT) -> Duplicate | None:
        """May this data batch be appended? None: yes. A duplicate: no, answer with it. Else KafkaError."""
        producer_id = header.producer_id
        if producer_id < 0 or origin == Origin.REPLICA:
            return None
        entry = self._producers.get(producer_id)
        if entry is None:
            return None
        epoch = header.producer_epoch
        sequence = header.base_sequence
        if origin == Origin.CLIENT and epoch == entry.epoch:
            last_sequence = entry.batches[-1].last_sequence if entry.batches else NO_SEQUENCE
            if sequence != last_sequence + 1 and not (sequence == 0 and last_sequence == SEQUENCE_MAX):
                duplicate = entry.find_duplicate(sequence, header.last_sequence)
                if duplicate is not None:
                    return Duplicate(duplicate.first_offset, duplicate.last_offset, duplicate.timestamp)
                raise KafkaError(
                    ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
                    f"Out of order sequence number for producer {producer_id} in partition {self._name}: "
                    f"{sequence} (incoming seq. number), {last_sequence} (current end sequence number)",
                )
        elif epoch < entry.epoch:
            self._refuse_epoch(producer_id, epoch, entry.epoch)
        elif origin == Origin.CLIENT and sequence != 0 and entry.epoch != NO_PRODUCER_EPOCH:
            raise KafkaError(
                ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
                f"Invalid sequence number for new epoch of producer {producer_id} in partition {self._name}: "
                f"{epoch} (request epoch), {sequence} (seq. number), {entry.epoch} (current producer epoch)",
            )
        if entry.transaction_first_offset >= 0 and not header.attributes & TRANSACTIONAL_BIT:
            raise KafkaError(
                ErrorCode.INVALID_TXN_STATE,
                f"Expected transactional write from producer {producer_id} in partition {self._name}",
            )
        return None

    def check_marker(
        self,
        header: BatchHeader,
        marker: EndTransactionMarker,
        origin: Origin = Origin.COORDINATOR,
        transaction_version: int = 0,
    ) -> None:
        """May this end-of-transaction marker be appended? KafkaError when it comes from a zombie."""
        entry = self._producers.get(header.producer_id)
        if entry is None or origin == Origin.REPLICA:
            return
        epoch = header.producer_epoch
        if epoch < entry.epoch:
            self._refuse_epoch(header.producer_id, epoch, entry.epoch)
        if (
            transaction_version >= TRANSACTION_VERSION_2
            and epoch == entry.epoch
            and entry.transaction_first_offset >= 0
        ):
            # A marker of this version carries a raised epoch. The same epoch with nothing open is a retry,
            # and harmless.
            self._refuse_epoch(header.producer_id, epoch, entry.epoch)
        if entry.coordinator_epoch > marker.coordinator_epoch:
            raise KafkaError(
                ErrorCode.TRANSACTION_COORDINATOR_FENCED,
                f"Invalid coordinator epoch for producerId {header.producer_id} in partition {self._name}: "
                f"{marker.coordinator_epoch} (zombie), {entry.coordinator_epoch} (current)",
            )

    def _refuse_epoch(self, producer_id: int, epoch: int, current: int) -> NoReturn:
        raise KafkaError(
            ErrorCode.INVALID_PRODUCER_EPOCH,
            f"Epoch of producer {producer_id} in {self._name} is {epoch}, "
            f"which is not valid after the last seen epoch {current}",
        )

    def update(
        self,
        header: BatchHeader,
        first_offset: int,
        max_timestamp: int | None = None,
        marker: EndTransactionMarker | None = None,
    ) -> CompletedTransaction | None:
        """Remember a batch that is in the log now, at `first_offset`.

        `max_timestamp` replaces the header's where the log stamped its own. A control batch comes with its
        marker; when that ended a transaction, the result goes to the transaction index and then to
        `complete_transaction`.
        """
        if header.producer_id < 0:
            return None
        return self._apply(
            header.producer_id,
            header.producer_epoch,
            header.attributes,
            header.last_sequence,
            first_offset,
            header.last_offset_delta,
            header.max_timestamp if max_timestamp is None else max_timestamp,
            marker,
        )

    def replay(
        self, batch: BatchInfo, marker: EndTransactionMarker | None = None
    ) -> CompletedTransaction | None:
        """`update` for a batch that recovery found in the log."""
        if batch.producer_id < 0:
            return None
        return self._apply(
            batch.producer_id,
            batch.producer_epoch,
            batch.attributes,
            batch.last_sequence,
            batch.base_offset,
            batch.last_offset - batch.base_offset,
            batch.max_timestamp,
            marker,
        )

    def _apply(
        self,
        producer_id: int,
        epoch: int,
        attributes: int,
        last_sequence: int,
        first_offset: int,
        offset_delta: int,
        timestamp: int,
        marker: EndTransactionMarker | None,
    ) -> CompletedTransaction | None:
        if attributes & CONTROL_BIT and marker is None:
            return None  # other control records, or a marker that compaction emptied: nothing to remember
        entry = self._producers.get(producer_id)
        if entry is None:
            entry = self._add(producer_id)
        if epoch != entry.epoch:
            entry.batches.clear()
            entry.epoch = epoch
        entry.last_timestamp = timestamp
        if attributes & CONTROL_BIT:
            assert marker is not None
            return self._end_transaction(entry, first_offset, marker)
        # Not through the class, which would cost as much as all the rest: this runs for every batch.
        batch = (last_sequence, first_offset + offset_delta, offset_delta, timestamp)
        entry.batches.append(_new_tuple(RememberedBatch, batch))
        if attributes & TRANSACTIONAL_BIT and entry.transaction_first_offset < 0:
            entry.transaction_first_offset = first_offset
            if self._ongoing is _NO_TRANSACTIONS:
                self._ongoing = {}
            self._ongoing[first_offset] = producer_id
            if self._guards:
                self._guards.pop(producer_id, None)
        return None

    def _end_transaction(
        self, entry: ProducerEntry, offset: int, marker: EndTransactionMarker
    ) -> CompletedTransaction | None:
        if self._guards:
            self._guards.pop(entry.producer_id, None)
        first_offset = entry.transaction_first_offset
        entry.coordinator_epoch = marker.coordinator_epoch
        entry.transaction_first_offset = NO_OFFSET
        if first_offset < 0:
            return None  # a marker without data moves nothing
        return CompletedTransaction(entry.producer_id, first_offset, offset, not marker.committed)

    def _add(self, producer_id: int) -> ProducerEntry:
        if self._producers is _NO_PRODUCERS:
            self._producers = {}
        elif len(self._producers) >= PRODUCERS_MAX:
            self._forget_oldest()
        entry = self._producers[producer_id] = ProducerEntry(producer_id)
        return entry

    def _forget_oldest(self) -> None:
        idle = sorted(
            (e.last_offset, e.producer_id) for e in self._producers.values() if e.transaction_first_offset < 0
        )
        forgotten = idle[: max(1, PRODUCERS_MAX // 10)]
        for _, producer_id in forgotten:
            del self._producers[producer_id]
        logger.warning(
            "producer table full, oldest entries forgotten",
            extra={
                "fields": {"partition": self._name, "forgotten": len(forgotten), "kept": len(self._producers)}
            },
        )

    # -- transactions ----------------------------------------------------------------------------------------

    def first_unstable_offset(self, high_watermark: int) -> int | None:
        """The first offset of the oldest transaction that is open, or ended at or above the high watermark."""
        if self._unreplicated:
            self.on_high_watermark(high_watermark)
        ongoing = next(iter(self._ongoing)) if self._ongoing else None
        if not self._unreplicated:
            return ongoing
        unreplicated = min(self._unreplicated)
        return unreplicated if ongoing is None else min(ongoing, unreplicated)

    def is_in_transaction(self, producer_id: int, epoch: int) -> bool:
        """Whether the producer has a transaction open here, so that more of its records may come."""
        entry = self._producers.get(producer_id)
        return entry is not None and entry.transaction_first_offset >= 0 and entry.epoch == epoch

    def guard(self, producer_id: int) -> object:
        """Taken before the coordinator is asked about a producer: worth nothing any more once a marker came in."""
        if self._guards is None or len(self._guards) >= PRODUCERS_MAX:
            self._guards = {}
        return self._guards.setdefault(producer_id, object())

    def is_guarded(self, producer_id: int, guard: object) -> bool:
        """Whether no marker came in since the guard was taken."""
        return self._guards is not None and self._guards.get(producer_id) is guard

    def first_undecided_offset(self) -> int | None:
        """The first offset of the oldest transaction that is open, whatever is replicated."""
        return next(iter(self._ongoing), None)

    def last_stable_offset_after(self, completed: CompletedTransaction) -> int:
        """The last stable offset once `completed` counts, for its line in the transaction index."""
        for first_offset, producer_id in self._ongoing.items():
            if producer_id != completed.producer_id:
                return first_offset
        return completed.last_offset + 1

    def complete_transaction(self, completed: CompletedTransaction) -> AbortedTransaction | None:
        """No longer open, but unstable until its marker is replicated. If it was aborted: the index's line of it."""
        stable = self.last_stable_offset_after(completed)
        producer_id = self._ongoing.pop(completed.first_offset, None)
        assert producer_id is not None, f"{completed} was not started in {self._name}"
        if self._unreplicated is _NO_TRANSACTIONS:
            self._unreplicated = {}
        self._unreplicated[completed.first_offset] = completed.last_offset
        if not completed.aborted:
            return None
        return AbortedTransaction(producer_id, completed.first_offset, completed.last_offset, stable)

    def on_high_watermark(self, high_watermark: int) -> None:
        """Transactions whose marker lies below the high watermark are stable."""
        if self._unreplicated:
            for first_offset in [f for f, last in self._unreplicated.items() if last < high_watermark]:
                del self._unreplicated[first_offset]

    on_log_start_offset = on_high_watermark
    """A deleted head of the log takes its ended transactions with it; producers stay until they expire."""

    def oldest_transaction_timestamp(self) -> int | None:
        """When the oldest open transaction last wrote; tells a hanging one."""
        for producer_id in self._ongoing.values():
            entry = self._producers.get(producer_id)
            return None if entry is None else entry.last_timestamp
        return None

    # -- expiry, snapshots -----------------------------------------------------------------------------------

    def expire(self, now_ms: int, expiration_ms: int) -> int:
        """Forget producers that wrote nothing for `expiration_ms` and have no open transaction; how many."""
        limit = now_ms - expiration_ms
        gone = [e.producer_id for e in self if e.last_timestamp <= limit and e.transaction_first_offset < 0]
        for producer_id in gone:
            del self._producers[producer_id]
        if gone and not self._producers:
            self._producers = _NO_PRODUCERS
        return len(gone)

    def clear(self) -> None:
        """Forget everything; a rebuild (`load`, then `update` for the batches that follow) comes next."""
        self._producers = _NO_PRODUCERS
        self._ongoing = _NO_TRANSACTIONS
        self._unreplicated = _NO_TRANSACTIONS
        self._guards = None

    def snapshot(self) -> bytes:
        """The table as the content of a `.snapshot` file."""
        return encode_snapshot(self._producers.values())

    def load(self, data: bytes, now_ms: int | None = None, expiration_ms: int = 0) -> None:
        """Replace the table by a snapshot, less what expired since. `CorruptSnapshot` changes nothing."""
        entries = decode_snapshot(data)
        self.clear()
        if entries:
            self._producers = entries
            opened = sorted(
                (e.transaction_first_offset, e.producer_id) for e in self if e.transaction_first_offset >= 0
            )
            if opened:
                self._ongoing = dict(opened)
        if now_ms is not None:
            self.expire(now_ms, expiration_ms)
