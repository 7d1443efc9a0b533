"""One transactional id: what is stored of it, what is being stored, and the next value of each step (pure).

Invariants: `value` is what the log holds, as far as it is committed; at most one change is on its way (`pending`), and
while there is one, or markers are still being written, nobody else begins another; epochs only rise, and a producer
id whose epochs are used up is replaced by the next. `TransactionShard` decides which step is due, this says what it
makes.
"""

from typing import Final

from headrace.base.errors import ErrorCode, KafkaError
from headrace.coordinators.effects import Effects, Then
from headrace.coordinators.txn_records import NO_EPOCH, NO_PRODUCER_ID, TxnValue
from headrace.coordinators.txn_states import (
    COMPLETE_ABORT,
    COMPLETE_COMMIT,
    EMPTY,
    IDLE,
    ONGOING,
    PREDECESSORS,
    PREPARE_ABORT,
    PREPARE_COMMIT,
    PREPARED,
    TxnState,
)

EPOCH_MAX: Final = 2**15 - 1
VERSION_2: Final = 2
"""The transaction.version from which every transaction has an epoch of its own."""
NO_START_MS: Final = -1

Partition = tuple[str, int]


def is_exhausted(epoch: int) -> bool:
    """Whether a producer may not be given a higher epoch: the highest is kept for shutting it out."""
    return epoch >= EPOCH_MAX - 1


class TransactionMetadata:
    """A transactional id and where its transaction stands."""

    __slots__ = (
        "last_epoch",
        "marking",
        "pending",
        "transactional_id",
        "unmarked",
        "value",
        "waiting",
    )

    def __init__(self, transactional_id: str, value: TxnValue) -> None:
        self.transactional_id = transactional_id
        self.value = value
        self.last_epoch = NO_EPOCH
        """The epoch before the last raise, so that a client that did not hear of it can ask again."""
        self.pending: TxnState | None = None
        self.unmarked: set[Partition] = set()
        """Partitions that still need the marker."""
        self.marking = 0
        """Which round of markers is under way, so that an answer to an earlier one is not taken for it."""
        self.waiting: list[Then] = []
        """Who is to be told when nothing is under way any more, or why that is not waited for."""

    @property
    def state(self) -> TxnState:
        return self.value.state

    @property
    def is_busy(self) -> bool:
        """Whether a change is on its way to the log, or markers to partitions: come back later."""
        return self.pending is not None or self.state in PREPARED

    def knows(self, producer_id: int, epoch: int) -> ErrorCode:
        """Whether this is the producer at work."""
        if producer_id != self.value.producer_id:
            return ErrorCode.INVALID_PRODUCER_ID_MAPPING
        return ErrorCode.NONE if epoch == self.value.producer_epoch else ErrorCode.PRODUCER_FENCED

    # -- the next value ------------------------------------------------------------------------------------------------

    def is_rotation_due(self, expected: tuple[int, int] | None) -> bool:
        """Whether a producer that begins anew needs a new id."""
        epoch = self.value.producer_epoch
        return is_exhausted(epoch) and (expected is None or expected[1] == epoch)

    def expects(self, expected: tuple[int, int] | None) -> bool:
        """Whether the id that a producer says it had leads to this one."""
        if expected is None or self.value.producer_epoch == NO_EPOCH:
            return True
        producer_id, epoch = expected
        previous = self.value.previous_producer_id
        return producer_id == self.value.producer_id or (producer_id == previous and is_exhausted(epoch))

    def initialized(
        self, expected: tuple[int, int] | None, new_producer_id: int, timeout_ms: int, now_ms: int
    ) -> tuple[TxnValue, int]:
        """Value and last epoch for a producer that begins anew. PRODUCER_FENCED when another did since."""
        value, epoch = self.value, self.value.producer_epoch
        if self.is_rotation_due(expected):
            assert new_producer_id != NO_PRODUCER_ID, "no producer id to go on with"
            made = self._empty(new_producer_id, 0, timeout_ms, now_ms, value.producer_id)
            return made, epoch if expected is not None else NO_EPOCH
        raised, last = epoch + 1, NO_EPOCH
        if expected is not None:
            last = epoch
            if epoch != NO_EPOCH and expected[1] != epoch:
                if expected[1] != self.last_epoch or self.last_epoch == NO_EPOCH:
                    raise KafkaError(ErrorCode.PRODUCER_FENCED, "a newer producer has this transactional id")
                raised, last = epoch, self.last_epoch  # it did not hear of the raise that it asked for
        return self._empty(value.producer_id, raised, timeout_ms, now_ms, value.previous_producer_id), last

    def _empty(
        self, producer_id: int, epoch: int, timeout_ms: int, now_ms: int, previous_producer_id: int
    ) -> TxnValue:
        return self.value._replace(
            producer_id=producer_id,
            previous_producer_id=previous_producer_id,
            next_producer_id=NO_PRODUCER_ID,
            producer_epoch=epoch,
            timeout_ms=timeout_ms,
            state=EMPTY,
            partitions=frozenset(),
            last_update_ms=now_ms,
            start_ms=NO_START_MS,
        )

    def with_partitions(self, added: frozenset[Partition], client_version: int, now_ms: int) -> TxnValue:
        begins = self.state in IDLE
        return self.value._replace(
            state=ONGOING,
            partitions=self.value.partitions | added,
            start_ms=now_ms if begins else self.value.start_ms,
            last_update_ms=now_ms,
            client_version=client_version,
        )

    def _raised(self, by: int) -> TxnValue:
        return self.value._replace(producer_epoch=min(self.value.producer_epoch + by, EPOCH_MAX))

    def prepared(
        self, committed: bool, client_version: int, next_producer_id: int, now_ms: int, fenced: bool
    ) -> tuple[TxnValue, int]:
        """Value and last epoch of the decision. With version 2 the marker's epoch is above that of the records."""
        value = self.value
        last = NO_EPOCH if fenced else self.last_epoch
        if fenced:
            # With version 2 one more, so that the producer shut out does not take this for the end that it asked for.
            value = self._raised(1 + (client_version >= VERSION_2))
        elif client_version >= VERSION_2:
            value, last = self._raised(1), value.producer_epoch
        return value._replace(
            state=PREPARE_COMMIT if committed else PREPARE_ABORT,
            next_producer_id=next_producer_id,
            start_ms=now_ms if self.state in IDLE else value.start_ms,
            last_update_ms=now_ms,
            client_version=client_version,
        ), last

    def completed(self, now_ms: int) -> TxnValue:
        """All partitions have their markers: the transaction is over, and a used-up producer id replaced."""
        value = self.value
        producer_id, epoch, previous = value.producer_id, value.producer_epoch, value.previous_producer_id
        if value.next_producer_id != NO_PRODUCER_ID:
            producer_id, epoch, previous = value.next_producer_id, 0, value.producer_id
        return value._replace(
            producer_id=producer_id,
            previous_producer_id=previous,
            next_producer_id=NO_PRODUCER_ID,
            producer_epoch=epoch,
            state=COMPLETE_COMMIT if self.state is PREPARE_COMMIT else COMPLETE_ABORT,
            partitions=frozenset(),
            last_update_ms=now_ms,
        )

    # -- steps ---------------------------------------------------------------------------------------------------------

    def begin(self, state: TxnState) -> None:
        """A change to `state` is on its way to the log."""
        assert self.pending is None, f"{self.transactional_id}: {state.name} during {self.pending}"
        assert self.state in PREDECESSORS[state], (
            f"{self.transactional_id}: {self.state.name} to {state.name}"
        )
        self.pending = state

    def apply(self, value: TxnValue, last_epoch: int) -> None:
        """The change is committed."""
        self.pending = None
        self.value = value
        self.last_epoch = last_epoch

    def release(self, error: ErrorCode, now_ms: int, out: Effects) -> None:
        """Tell those who wait, in their order; one of them may begin something, and keep the next from it."""
        waiting, self.waiting = self.waiting, []
        for each in waiting:
            each(error, now_ms, out)
