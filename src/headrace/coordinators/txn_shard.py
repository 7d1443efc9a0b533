"""The transactional ids of one partition of `__transaction_state`: every request of a transaction, as a step.

Takes a request and the time, and writes into an `Effects`: records to store, timers, what is to be told. Invariants:
a client is told of a step when its record is committed; markers go out only after the decision (Prepare) is committed,
and Complete is written only after every partition has its marker, so a coordinator that takes over goes on where the
old one stopped; nobody begins anything while a change or markers are under way. Who adds partitions meanwhile waits for
that to be over, as a producer does whose next transaction follows at once, or is told to come back
(CONCURRENT_TRANSACTIONS): a client does so after 20 ms or more, markers take two or three.

What a client must not retry (a fatal error, or the good news that what it asks for is done already) is told from memory
only after the same state was stored again. A coordinator that was replaced and does not know it could not do that, so
it cannot tell a client what is no longer true. Errors and their order are Kafka 4's. Pure; the runtime calls it.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, NamedTuple

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.log import get_logger
from headrace.base.settings import BrokerConfig
from headrace.coordinators.effects import Effects, TimerKey
from headrace.coordinators.txn_ends import judge_version_1, judge_version_2
from headrace.coordinators.txn_metadata import (
    VERSION_2,
    Partition,
    TransactionMetadata,
    is_exhausted,
)
from headrace.coordinators.txn_records import (
    NO_EPOCH,
    NO_PRODUCER_ID,
    TxnValue,
    decode_txn_key,
    decode_txn_value,
    txn_key,
    txn_value,
)
from headrace.coordinators.txn_states import (
    DEAD,
    EMPTY,
    EPOCH_FENCE,
    IDLE,
    ONGOING,
    PREPARE_COMMIT,
    PREPARED,
    TxnState,
    stored_error,
)

MARKER_RETRY_MS: Final = 100
EXPIRED_AT_ONCE_MAX: Final = 1000
ABORT_TIMER: Final[TimerKey] = ("", "abort")
EXPIRE_TIMER: Final[TimerKey] = ("", "expire")
MARKERS: Final = "markers"
WAITING: Final = "waiting"
WAIT_MS_MAX: Final = 1000
WAITING_MAX: Final = 16
"""How many wait for one transactional id, and how long; then they are told to come back."""

_PASSING: Final = frozenset(
    {
        ErrorCode.NONE,
        ErrorCode.INVALID_PRODUCER_EPOCH,  # the partition saw a newer epoch: this transaction ended there before
    }
)

logger = get_logger(__name__)


class Markers(NamedTuple):
    """Markers to be written: what to put into each partition."""

    transactional_id: str
    marking: int
    producer_id: int
    epoch: int
    committed: bool
    partitions: tuple[Partition, ...]
    client_version: int


class Ended(NamedTuple):
    """The answer to the end of a transaction."""

    error: ErrorCode
    producer_id: int = NO_PRODUCER_ID
    epoch: int = NO_EPOCH


Done = Callable[[ErrorCode], None]
Initialized = Callable[[Ended], None]
Verified = Callable[[dict[Partition, ErrorCode]], None]


class TransactionShard:
    """The state machine of one partition."""

    def __init__(self, config: Callable[[], BrokerConfig], send: Callable[[Markers], None]) -> None:
        self._config = config
        self._send = send
        self._rounds = 0
        self.transactions: dict[str, TransactionMetadata] = {}

    # -- what the runtime calls ----------------------------------------------------------------------------------------

    def replay(self, key: bytes, value: bytes | None) -> None:
        """Take up a committed record. One that cannot be read is passed over, or the whole shard would be lost."""
        try:
            transactional_id = decode_txn_key(key)
            if transactional_id is None:
                return
            if value is None:
                self.transactions.pop(transactional_id, None)
            else:
                found = decode_txn_value(value)
                self.transactions[transactional_id] = TransactionMetadata(transactional_id, found)
        except KafkaError as error:
            logger.error("a record of a transaction cannot be read", extra={"fields": {"why": error.message}})

    def replay_open(self, producer_id: int, key: bytes, value: bytes | None) -> None:
        """Records of transactions are not written in transactions: one that says so is passed over."""

    def end_transaction(self, producer_id: int, committed: bool) -> None:
        """As `replay_open`."""

    def loaded(self, now_ms: int, out: Effects) -> None:
        """Go on with what the coordinator before this one had decided and not finished."""
        for metadata in self.transactions.values():
            if metadata.state in PREPARED:
                self._begin_markers(metadata, now_ms, out)
        out.start(ABORT_TIMER, self._config().transaction_abort_timed_out_transaction_cleanup_interval_ms)
        out.start(EXPIRE_TIMER, self._config().transaction_remove_expired_transaction_cleanup_interval_ms)

    def unload(self, error: ErrorCode, now_ms: int, out: Effects) -> None:
        """This broker no longer coordinates these: whoever leads the partition now knows all that is stored."""
        for metadata in self.transactions.values():
            metadata.release(error, now_ms, out)
        self.transactions.clear()

    def on_timer(self, key: TimerKey, now_ms: int, out: Effects) -> None:
        config = self._config()
        if key == ABORT_TIMER:
            self._abort_timed_out(now_ms, out)
            out.start(key, config.transaction_abort_timed_out_transaction_cleanup_interval_ms)
        elif key == EXPIRE_TIMER:
            self._expire(now_ms, out)
            out.start(key, config.transaction_remove_expired_transaction_cleanup_interval_ms)
        else:
            metadata = self.transactions.get(key[0])
            if metadata is None:
                return
            if key[1] == WAITING:
                metadata.release(ErrorCode.CONCURRENT_TRANSACTIONS, now_ms, out)
            elif metadata.state in PREPARED and metadata.pending is None:
                self._go_on(metadata, now_ms, out)

    # -- InitProducerId ------------------------------------------------------------------------------------------------

    def needs_producer_id(self, transactional_id: str, may_be_new: bool) -> bool:
        """Whether `initialize`, for an id that may be new, or `end` will want a producer id that nobody had before."""
        metadata = self.transactions.get(transactional_id)
        return may_be_new if metadata is None else is_exhausted(metadata.value.producer_epoch)

    def initialize(
        self,
        transactional_id: str,
        timeout_ms: int,
        expected: tuple[int, int] | None,
        new_producer_id: int,
        done: Initialized,
        now_ms: int,
        out: Effects,
    ) -> None:
        """A producer begins: shut out the one before it, end what that one left open, give it an epoch."""
        if not 0 < timeout_ms <= self._config().transaction_max_timeout_ms:
            done(Ended(ErrorCode.INVALID_TRANSACTION_TIMEOUT))
            return
        metadata = self.transactions.get(transactional_id)
        if metadata is None:
            value = TxnValue(
                new_producer_id,
                NO_PRODUCER_ID,
                NO_PRODUCER_ID,
                NO_EPOCH,
                timeout_ms,
                EMPTY,
                frozenset(),
                now_ms,
                -1,
                0,
            )
            metadata = self.transactions[transactional_id] = TransactionMetadata(transactional_id, value)
        if metadata.is_busy:
            done(Ended(ErrorCode.CONCURRENT_TRANSACTIONS))
        elif not metadata.expects(expected):
            self._confirm(metadata, ErrorCode.PRODUCER_FENCED, lambda error: done(Ended(error)), out)
        elif metadata.state is ONGOING:
            # The client comes back while the abort is under way, and gets its own epoch when that is over.
            self._fence(
                metadata,
                lambda error: done(Ended(error or ErrorCode.CONCURRENT_TRANSACTIONS)),
                now_ms,
                out,
            )
        else:
            self._give_epoch(metadata, timeout_ms, expected, new_producer_id, done, now_ms, out)

    def _give_epoch(
        self,
        metadata: TransactionMetadata,
        timeout_ms: int,
        expected: tuple[int, int] | None,
        new_producer_id: int,
        done: Initialized,
        now_ms: int,
        out: Effects,
    ) -> None:
        if metadata.is_rotation_due(expected) and new_producer_id == NO_PRODUCER_ID:
            done(Ended(ErrorCode.CONCURRENT_TRANSACTIONS))  # the state changed while an id was fetched
            return
        try:
            value, last_epoch = metadata.initialized(expected, new_producer_id, timeout_ms, now_ms)
        except KafkaError as error:
            self._confirm(metadata, error.code, lambda error: done(Ended(error)), out)
            return

        def stored(error: ErrorCode, now_ms: int, out: Effects) -> None:
            if error is ErrorCode.NONE:
                done(Ended(error, value.producer_id, value.producer_epoch))
                return
            if metadata.value.producer_epoch == NO_EPOCH:  # nothing was ever stored of it
                self._forget(metadata)
            done(Ended(error))

        self._store(metadata, value, last_epoch, stored, out)

    # -- partitions ----------------------------------------------------------------------------------------------------

    def add_partitions(
        self,
        transactional_id: str,
        producer_id: int,
        epoch: int,
        partitions: Iterable[Partition],
        client_version: int,
        done: Done,
        now_ms: int,
        out: Effects,
        waits: bool = False,
    ) -> None:
        """Partitions become part of the transaction, which begins with the first."""
        metadata = self.transactions.get(transactional_id)
        added = frozenset(partitions)
        if metadata is None:
            self._deny(transactional_id, done, out)
        elif metadata.is_busy and waits and len(metadata.waiting) < WAITING_MAX:

            def again(error: ErrorCode, now_ms: int, out: Effects) -> None:
                if error is not ErrorCode.NONE:
                    done(error)
                else:
                    self.add_partitions(
                        transactional_id, producer_id, epoch, added, client_version, done, now_ms, out
                    )

            metadata.waiting.append(again)
            out.start((transactional_id, WAITING), WAIT_MS_MAX)
        elif metadata.is_busy:
            done(ErrorCode.CONCURRENT_TRANSACTIONS)
        elif (error := metadata.knows(producer_id, epoch)) is not ErrorCode.NONE:
            self._confirm(metadata, error, done, out)
        elif metadata.state is ONGOING and added <= metadata.value.partitions:
            self._confirm(metadata, ErrorCode.NONE, done, out)
        else:
            value = metadata.with_partitions(added, client_version, now_ms)
            self._store(metadata, value, metadata.last_epoch, lambda error, now_ms, out: done(error), out)

    def verify_partitions(
        self,
        transactional_id: str,
        producer_id: int,
        epoch: int,
        partitions: Iterable[Partition],
        done: Verified,
        out: Effects,
    ) -> None:
        """Whether each of the partitions is in the transaction at hand: for their leaders, before they take records."""
        wanted = tuple(partitions)

        def all_are(error: ErrorCode) -> None:
            done(dict.fromkeys(wanted, error))

        metadata = self.transactions.get(transactional_id)
        if metadata is None:
            self._deny(transactional_id, all_are, out)
        elif (error := metadata.knows(producer_id, epoch)) is not ErrorCode.NONE:
            self._confirm(metadata, error, all_are, out)
        elif metadata.state in PREPARED:
            all_are(ErrorCode.CONCURRENT_TRANSACTIONS)
        else:
            missing = [each for each in wanted if each not in metadata.value.partitions]
            answers = dict.fromkeys(wanted, ErrorCode.NONE) | dict.fromkeys(
                missing, ErrorCode.TRANSACTION_ABORTABLE
            )
            if missing:
                self._confirm(
                    metadata,
                    ErrorCode.TRANSACTION_ABORTABLE,
                    lambda error: (
                        done(answers) if error is ErrorCode.TRANSACTION_ABORTABLE else all_are(error)
                    ),
                    out,
                )
            else:
                done(answers)

    # -- EndTxn --------------------------------------------------------------------------------------------------------

    def end(
        self,
        transactional_id: str,
        producer_id: int,
        epoch: int,
        committed: bool,
        client_version: int,
        new_producer_id: int,
        done: Initialized,
        now_ms: int,
        out: Effects,
    ) -> None:
        """Commit or abort. Told when the decision is committed; markers follow."""
        metadata = self.transactions.get(transactional_id)
        if metadata is None:
            self._deny(transactional_id, lambda error: done(Ended(error)), out)
            return
        if client_version >= VERSION_2:
            error, begins = judge_version_2(metadata, producer_id, epoch, committed)
        else:
            error, begins = judge_version_1(metadata, producer_id, epoch, committed)
        if begins:
            self._decide(metadata, committed, client_version, new_producer_id, done, now_ms, out)
        elif error is ErrorCode.CONCURRENT_TRANSACTIONS:
            done(Ended(error))
        else:
            value = metadata.value

            def confirmed(told: ErrorCode) -> None:
                known = told is ErrorCode.NONE
                done(Ended(told, value.producer_id, value.producer_epoch) if known else Ended(told))

            self._confirm(metadata, error, confirmed, out)

    def _decide(
        self,
        metadata: TransactionMetadata,
        committed: bool,
        client_version: int,
        new_producer_id: int,
        done: Initialized,
        now_ms: int,
        out: Effects,
    ) -> None:
        next_producer_id = NO_PRODUCER_ID
        if client_version >= VERSION_2 and is_exhausted(metadata.value.producer_epoch):
            if new_producer_id == NO_PRODUCER_ID:
                done(Ended(ErrorCode.CONCURRENT_TRANSACTIONS))  # the state changed while an id was fetched
                return
            next_producer_id = new_producer_id
        value, last_epoch = metadata.prepared(
            committed, client_version, next_producer_id, now_ms, fenced=False
        )

        def stored(error: ErrorCode, now_ms: int, out: Effects) -> None:
            if error is not ErrorCode.NONE:
                done(Ended(error))
                return
            after = metadata.completed(now_ms)
            done(Ended(error, after.producer_id, after.producer_epoch))
            self._begin_markers(metadata, now_ms, out)

        self._store(metadata, value, last_epoch, stored, out)

    def _fence(self, metadata: TransactionMetadata, done: Done, now_ms: int, out: Effects) -> None:
        """Shut the producer out and abort its transaction."""
        value, last_epoch = metadata.prepared(
            False, metadata.value.client_version, NO_PRODUCER_ID, now_ms, fenced=True
        )

        def stored(error: ErrorCode, now_ms: int, out: Effects) -> None:
            done(error)
            if error is ErrorCode.NONE:
                self._begin_markers(metadata, now_ms, out)

        self._store(metadata, value, last_epoch, stored, out, begins=EPOCH_FENCE)

    # -- markers -------------------------------------------------------------------------------------------------------

    def _begin_markers(self, metadata: TransactionMetadata, now_ms: int, out: Effects) -> None:
        self._rounds += 1
        metadata.marking = self._rounds
        metadata.unmarked = set(metadata.value.partitions)
        self._go_on(metadata, now_ms, out)

    def _go_on(self, metadata: TransactionMetadata, now_ms: int, out: Effects) -> None:
        """Send the markers that are missing, or write down that none is."""
        value = metadata.value
        if not metadata.unmarked:
            self._complete(metadata, now_ms, out)
            return
        markers = Markers(
            metadata.transactional_id,
            metadata.marking,
            value.producer_id,
            value.producer_epoch,
            value.state is PREPARE_COMMIT,
            tuple(sorted(metadata.unmarked)),
            value.client_version,
        )
        out.reply(lambda _: self._send(markers), {})

    def marked(
        self,
        transactional_id: str,
        marking: int,
        results: Sequence[tuple[Partition, ErrorCode]],
        now_ms: int,
        out: Effects,
    ) -> None:
        """Partitions have their marker, or would not take it: those are asked again after a while."""
        metadata = self.transactions.get(transactional_id)
        if metadata is None or metadata.marking != marking or metadata.state not in PREPARED:
            return
        for where, error in results:
            if error in _PASSING:
                metadata.unmarked.discard(where)
        if not metadata.unmarked:
            if metadata.pending is None:
                self._complete(metadata, now_ms, out)
        elif any(error not in _PASSING for _, error in results):
            out.start((transactional_id, MARKERS), MARKER_RETRY_MS)

    def _complete(self, metadata: TransactionMetadata, now_ms: int, out: Effects) -> None:
        def stored(error: ErrorCode, now_ms: int, out: Effects) -> None:
            if error is not ErrorCode.NONE:
                out.start((metadata.transactional_id, MARKERS), MARKER_RETRY_MS)

        self._store(metadata, metadata.completed(now_ms), metadata.last_epoch, stored, out)

    # -- time ----------------------------------------------------------------------------------------------------------

    def _abort_timed_out(self, now_ms: int, out: Effects) -> None:
        for metadata in self.transactions.values():
            value = metadata.value
            over = value.start_ms + value.timeout_ms <= now_ms
            if metadata.state is ONGOING and over and metadata.pending is None:
                logger.info(
                    "transaction timed out, aborted",
                    extra={"fields": {"transactional_id": metadata.transactional_id}},
                )
                self._fence(metadata, lambda error: None, now_ms, out)

    def _expire(self, now_ms: int, out: Effects) -> None:
        limit_ms = now_ms - self._config().transactional_id_expiration_ms
        gone = [
            metadata
            for metadata in self.transactions.values()
            if metadata.state in IDLE
            and metadata.pending is None
            and metadata.value.last_update_ms <= limit_ms
        ]
        for metadata in gone[:EXPIRED_AT_ONCE_MAX]:
            metadata.begin(DEAD)
            out.store([(txn_key(metadata.transactional_id), None)], partial(self._expired, metadata))
        if gone:
            logger.info("transactional ids expired", extra={"fields": {"ids": len(gone)}})

    def _expired(self, metadata: TransactionMetadata, error: ErrorCode, now_ms: int, out: Effects) -> None:
        metadata.pending = None
        if error is ErrorCode.NONE:
            self._forget(metadata)
        self._release(metadata, now_ms, out)

    def _forget(self, metadata: TransactionMetadata) -> None:
        if self.transactions.get(metadata.transactional_id) is metadata:
            del self.transactions[metadata.transactional_id]

    # -- storing -------------------------------------------------------------------------------------------------------

    def _store(
        self,
        metadata: TransactionMetadata,
        value: TxnValue,
        last_epoch: int,
        then: Callable[[ErrorCode, int, Effects], None],
        out: Effects,
        begins: TxnState | None = None,
    ) -> None:
        """Store the next value; it counts, and `then` is told, when it is committed."""
        metadata.begin(value.state if begins is None else begins)

        def stored(error: ErrorCode, now_ms: int, out: Effects) -> None:
            if error is ErrorCode.NONE:
                metadata.apply(value, last_epoch)
            else:
                metadata.pending = None
            then(stored_error(error), now_ms, out)
            self._release(metadata, now_ms, out)

        out.store([(txn_key(metadata.transactional_id), txn_value(value))], stored)

    def _release(self, metadata: TransactionMetadata, now_ms: int, out: Effects) -> None:
        if metadata.waiting and not metadata.is_busy:
            out.stop((metadata.transactional_id, WAITING))
            metadata.release(ErrorCode.NONE, now_ms, out)

    def _confirm(self, metadata: TransactionMetadata, error: ErrorCode, done: Done, out: Effects) -> None:
        """Tell what is known without a change, once it is sure that this is still the coordinator."""

        def stored(failed: ErrorCode, now_ms: int, out: Effects) -> None:
            done(stored_error(failed) if failed is not ErrorCode.NONE else error)

        if metadata.pending is not None:  # another record is on its way, and must stay the last one
            done(ErrorCode.CONCURRENT_TRANSACTIONS)
        elif metadata.value.producer_epoch == NO_EPOCH:
            done(error)
        else:
            out.store([(txn_key(metadata.transactional_id), txn_value(metadata.value))], stored)

    def _deny(self, transactional_id: str, done: Done, out: Effects) -> None:
        """Tell that the id is unknown, as `_confirm` does: a tombstone says so in the log."""

        def stored(failed: ErrorCode, now_ms: int, out: Effects) -> None:
            done(ErrorCode.INVALID_PRODUCER_ID_MAPPING if failed is ErrorCode.NONE else stored_error(failed))

        out.store([(txn_key(transactional_id), None)], stored)
