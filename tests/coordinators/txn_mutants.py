"""Bugs planted in transactions, one at a time, to see that the simulation finds them.

Each is a mistake that an implementation has made or could make; `planted` puts it into the production code for as long
as it lasts. A mutant that no seed catches says that the simulation, not the code, is wrong.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from headrace.base.errors import ErrorCode
from headrace.coordinators import txn_shard
from headrace.coordinators.effects import Effects
from headrace.coordinators.txn_metadata import TransactionMetadata
from headrace.coordinators.txn_shard import TransactionShard
from headrace.storage import reads
from headrace.storage.producer_state import ProducerState
from headrace.storage.txn_index import TransactionIndex, collect

Patch = tuple[Any, str, Any]
MUTANTS: dict[str, Callable[[], list[Patch]]] = {}


def mutant(make: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
    """Register what replaces what."""
    MUTANTS[make.__name__.replace("_", "-")] = make
    return make


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The production code with one bug in it."""
    patches = [(owner, part, value, getattr(owner, part)) for owner, part, value in MUTANTS[name]()]
    for owner, attribute, value, _ in patches:
        setattr(owner, attribute, value)
    try:
        yield
    finally:
        for owner, attribute, _, original in patches:
            setattr(owner, attribute, original)


@mutant
def write_complete_before_every_partition_has_its_marker() -> list[Patch]:
    def go_on(self: TransactionShard, metadata: TransactionMetadata, now_ms: int, out: Effects) -> None:
        original(self, metadata, now_ms, out)
        if metadata.unmarked:
            metadata.unmarked.clear()
            self._complete(metadata, now_ms, out)

    original = TransactionShard._go_on
    return [(TransactionShard, "_go_on", go_on)]


@mutant
def leave_what_the_coordinator_before_had_decided() -> list[Patch]:
    return [(TransactionShard, "_begin_markers", _begin_only_live)]


def _begin_only_live(
    self: TransactionShard, metadata: TransactionMetadata, now_ms: int, out: Effects
) -> None:
    if metadata.last_epoch != -1 or metadata.marking:  # a loaded one has neither
        self._rounds += 1
        metadata.marking = self._rounds
        metadata.unmarked = set(metadata.value.partitions)
        self._go_on(metadata, now_ms, out)


@mutant
def send_markers_before_the_decision_is_stored() -> list[Patch]:
    original = TransactionShard._decide

    def decide(self: TransactionShard, metadata: TransactionMetadata, *rest: Any) -> None:
        out: Effects = rest[-1]
        committed, version, _, _, now_ms, _ = rest
        before = metadata.value
        metadata.value, _ = metadata.prepared(committed, version, -1, now_ms, fenced=False)
        metadata.unmarked = set(before.partitions)
        self._go_on(metadata, now_ms, out)
        metadata.value = before
        original(self, metadata, *rest)

    return [(TransactionShard, "_decide", decide)]


@mutant
def never_ask_again_for_a_marker_that_was_lost() -> list[Patch]:
    return [(txn_shard, "MARKER_RETRY_MS", 10**9)]


@mutant
def forget_transactions_that_time_out() -> list[Patch]:
    return [(TransactionShard, "_abort_timed_out", lambda self, now_ms, out: None)]


@mutant
def give_a_new_producer_the_epoch_of_the_old() -> list[Patch]:
    original = TransactionMetadata.initialized

    def initialized(self: TransactionMetadata, *rest: Any) -> Any:
        value, last = original(self, *rest)
        return (
            value
            if self.value.producer_epoch < 0
            else value._replace(producer_epoch=self.value.producer_epoch)
        ), last

    return [(TransactionMetadata, "initialized", initialized)]


@mutant
def begin_anew_without_ending_what_is_open() -> list[Patch]:
    def fence(
        self: TransactionShard, metadata: TransactionMetadata, done: Any, now_ms: int, out: Effects
    ) -> None:
        value = metadata.value._replace(
            producer_epoch=metadata.value.producer_epoch + 1, partitions=frozenset(), state=txn_shard.EMPTY
        )
        metadata.pending = txn_shard.EMPTY

        def stored(error: ErrorCode, now_ms: int, out: Effects) -> None:
            metadata.pending = None
            if error is ErrorCode.NONE:
                metadata.apply(value, -1)
            done(error)

        out.store([(txn_shard.txn_key(metadata.transactional_id), txn_shard.txn_value(value))], stored)

    return [(TransactionShard, "_fence", fence)]


@mutant
def answer_from_memory_without_making_sure() -> list[Patch]:
    def confirm(self: TransactionShard, metadata: Any, error: ErrorCode, done: Any, out: Effects) -> None:
        done(error)

    return [(TransactionShard, "_confirm", confirm)]


@mutant
def say_that_an_id_is_unknown_without_making_sure() -> list[Patch]:
    def deny(self: TransactionShard, transactional_id: str, done: Any, out: Effects) -> None:
        done(ErrorCode.INVALID_PRODUCER_ID_MAPPING)

    return [(TransactionShard, "_deny", deny)]


@mutant
def take_markers_of_a_coordinator_that_was_replaced() -> list[Patch]:
    return [(ProducerState, "check_marker", lambda self, *args, **kwargs: None)]


@mutant
def take_records_without_asking_the_coordinator() -> list[Patch]:
    return [(ProducerState, "is_in_transaction", lambda self, producer_id, epoch: True)]


@mutant
def take_a_batch_twice() -> list[Patch]:
    return [(ProducerState, "check", lambda self, header, origin=None: None)]


@mutant
def let_readers_past_open_transactions() -> list[Patch]:
    return [(ProducerState, "first_unstable_offset", lambda self, high_watermark: None)]


@mutant
def look_for_aborted_transactions_in_one_segment_only() -> list[Patch]:
    def first_only(indexes: Iterable[TransactionIndex], from_offset: int, to_offset: int) -> Any:
        return collect(list(indexes)[:1], from_offset, to_offset)

    return [(reads, "collect", first_only)]


@mutant
def lose_the_transaction_index_in_recovery() -> list[Patch]:
    original = TransactionIndex.load
    return [(TransactionIndex, "load", lambda self, entries: original(self, ()))]
