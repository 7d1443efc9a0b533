"""Asking the coordinator whether records belong to a transaction, before a partition takes the first of them (KIP-890).

A producer that was given up, or a request that was long on its way, must not open a transaction in a partition that no
coordinator knows of: nobody would ever end it. Clients of transaction.version 2 leave it to the broker to add the
partition; for others it is verified that they did. Owns the questions under way. Invariants: at most one question about
a transaction is under way; those who ask about the same partition of it are answered together, in the order in which
they asked, so that a producer's batches keep their order; each is answered once. Produce and TxnOffsetCommit call it.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from headrace.base.errors import ErrorCode, KafkaError
from headrace.cluster.names import CONSUMER_OFFSETS_TOPIC, TRANSACTION_STATE_TOPIC
from headrace.coordinators.group_hash import partition_for
from headrace.coordinators.txn_metadata import VERSION_2, Partition
from headrace.server.broker_coordinators import coordinator_of
from headrace.server.broker_markers import ask_peer
from headrace.storage.producer_state import ProducerState
from headrace.wire.apis import Api
from headrace.wire.messages import Message

if TYPE_CHECKING:
    from headrace.server.broker import Broker

Done: TypeAlias = Callable[[ErrorCode], None]

ADD_PARTITIONS_VERSION: Final = 5
WAITING_MAX: Final = 10_000
"""Partitions that questions under way are about; who asks beyond it is told to come back."""
RETRIES_MAX: Final = 6
"""How often it is asked again while the transaction before is still being ended, before the client is told to retry:
after 2 ms and then twice as long each time."""


class Asked(NamedTuple):
    """A producer's transaction, and whether the partition is to be added or must be in it already."""

    transactional_id: str
    producer_id: int
    epoch: int
    adds: bool


class _Questions:
    """What is asked about one transaction."""

    __slots__ = ("next", "under_way")

    def __init__(self) -> None:
        self.next: dict[Partition, int] = {}  # with how often it was asked before
        self.under_way = False


class Verifier:
    """See the module."""

    def __init__(self, broker: "Broker") -> None:
        self._broker = broker
        self._waiting: dict[tuple[Asked, Partition], list[Done]] = {}
        self._questions: dict[Asked, _Questions] = {}

    def is_waiting(self, asked: Asked, where: Partition) -> bool:
        """Whether somebody waits for the same: then whoever comes later has to, or would overtake."""
        return (asked, where) in self._waiting

    def ask(self, asked: Asked, where: Partition, done: Done) -> None:
        """Have `done` told NONE when the partition is in the transaction, or why not."""
        if not asked.transactional_id:
            done(ErrorCode.INVALID_REQUEST)
            return
        waiting = self._waiting.get((asked, where))
        if waiting is not None:
            waiting.append(done)
            return
        if len(self._waiting) >= WAITING_MAX:
            done(ErrorCode.COORDINATOR_NOT_AVAILABLE)
            return
        self._waiting[asked, where] = [done]
        questions = self._questions.get(asked)
        if questions is None:
            questions = self._questions[asked] = _Questions()
            self._broker.call_soon(lambda: self._go(asked))
        questions.next[where] = 0

    def _go(self, asked: Asked) -> None:
        questions = self._questions.get(asked)
        if questions is None or questions.under_way:
            return
        if not questions.next:
            del self._questions[asked]
            return
        wanted, questions.next = questions.next, {}
        questions.under_way = True

        def answered(results: Mapping[Partition, ErrorCode]) -> None:
            questions.under_way = False
            again: dict[Partition, int] = {}
            settled: list[tuple[ErrorCode, list[Done]]] = []
            for where, tries in wanted.items():
                error = results.get(where, ErrorCode.UNKNOWN_SERVER_ERROR)
                if error is ErrorCode.CONCURRENT_TRANSACTIONS and tries < RETRIES_MAX:
                    again[where] = tries + 1
                else:
                    settled.append((error, self._waiting.pop((asked, where))))
            if again:
                questions.next |= again
                self._broker.call_later(2 ** min(again.values()), lambda: self._go(asked))
            else:
                self._broker.call_soon(lambda: self._go(asked))
            for error, waiting in settled:
                for done in waiting:
                    done(error)

        self._send(asked, list(wanted), answered)

    def _send(
        self, asked: Asked, wanted: list[Partition], answered: Callable[[Mapping[Partition, ErrorCode]], None]
    ) -> None:
        coordinator = coordinator_of(self._broker, TRANSACTION_STATE_TOPIC, asked.transactional_id)
        if coordinator is None:
            answered(dict.fromkeys(wanted, ErrorCode.COORDINATOR_NOT_AVAILABLE))
        elif coordinator.id == self._broker.node_id:
            self._ask_here(asked, wanted, answered)
        else:
            self._ask_there(coordinator.id, asked, wanted, answered)

    def _ask_here(
        self, asked: Asked, wanted: list[Partition], answered: Callable[[Mapping[Partition, ErrorCode]], None]
    ) -> None:
        transactions = self._broker.transactions
        producer = (asked.producer_id, asked.epoch)
        try:
            if asked.adds:
                transactions.when_added(
                    asked.transactional_id,
                    producer,
                    wanted,
                    VERSION_2,
                    lambda error: answered(dict.fromkeys(wanted, error)),
                )
            else:
                transactions.when_verified(asked.transactional_id, producer, wanted, answered)
        except KafkaError as error:
            answered(dict.fromkeys(wanted, error.code))

    def _leadership(self, asked: Asked) -> tuple[int, int] | None:
        """Who coordinates the transaction, and in which epoch."""
        topic = self._broker.image.topics.get(TRANSACTION_STATE_TOPIC)
        if topic is None or not topic.partitions:
            return None
        partition = topic.partitions[partition_for(asked.transactional_id, len(topic.partitions))]
        return partition.leader, partition.leader_epoch

    def _ask_there(
        self,
        node_id: int,
        asked: Asked,
        wanted: list[Partition],
        answered: Callable[[Mapping[Partition, ErrorCode]], None],
    ) -> None:
        topics: dict[str, list[int]] = {}
        for name, index in wanted:
            topics.setdefault(name, []).append(index)
        body = {
            "transactions": [
                {
                    "transactional_id": asked.transactional_id,
                    "producer_id": asked.producer_id,
                    "producer_epoch": asked.epoch,
                    "verify_only": not asked.adds,
                    "topics": [{"name": name, "partitions": indexes} for name, indexes in topics.items()],
                }
            ]
        }

        led = self._leadership(asked)

        def replied(reply: Message | KafkaError) -> None:
            results: dict[Partition, ErrorCode] = {}
            if isinstance(reply, KafkaError):
                results = dict.fromkeys(wanted, reply.code)
            elif self._leadership(asked) != led:
                # Another coordinates by now. This one may not have known, and said what is no longer so.
                results = dict.fromkeys(wanted, ErrorCode.NOT_COORDINATOR)
            else:
                for transaction in reply.results_by_transaction:
                    for topic in transaction.topic_results:
                        for each in topic.results_by_partition:
                            results[topic.name, each.partition_index] = ErrorCode(each.partition_error_code)
            answered(results)

        ask_peer(self._broker, node_id, Api.ADD_PARTITIONS_TO_TXN, ADD_PARTITIONS_VERSION, body, replied)


_RETRIABLE: Final = frozenset(
    {
        ErrorCode.CONCURRENT_TRANSACTIONS,
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.NOT_COORDINATOR,
        ErrorCode.NETWORK_EXCEPTION,
        ErrorCode.REQUEST_TIMED_OUT,
    }
)


def produce_error(error: ErrorCode, adds: bool, knows_abortable: bool) -> KafkaError | None:
    """What a producer is told when its records could not be verified, in errors that its version retries rightly."""
    if error is ErrorCode.NONE:
        return None
    if error is ErrorCode.CONCURRENT_TRANSACTIONS and adds:
        return KafkaError(error, "the transaction before this one is still being ended")
    if error in _RETRIABLE:
        return KafkaError(
            ErrorCode.NOT_ENOUGH_REPLICAS,
            f"Unable to verify the partition has been added to the transaction: {error.name}",
        )
    if error is ErrorCode.PRODUCER_FENCED:
        return KafkaError(ErrorCode.INVALID_PRODUCER_EPOCH, "a newer producer has the transactional id")
    if error is ErrorCode.TRANSACTION_ABORTABLE and not knows_abortable:
        error = ErrorCode.INVALID_TXN_STATE
    return KafkaError(error, "Partition was not added to the transaction")


async def verified_offsets(
    broker: "Broker", asked: Asked, index: int, state: ProducerState, knows_abortable: bool
) -> ErrorCode:
    """Whether offsets may be stored as part of a transaction in a partition of the topic of offsets."""
    unasked = state.is_in_transaction(asked.producer_id, asked.epoch) or not (
        asked.adds or broker.config.transaction_partition_verification_enable
    )
    if unasked:
        return ErrorCode.NONE
    guard = state.guard(asked.producer_id)
    answer: asyncio.Future[ErrorCode] = asyncio.get_running_loop().create_future()

    def told(error: ErrorCode) -> None:
        if not answer.done():
            answer.set_result(error)

    broker.verifier.ask(asked, (CONSUMER_OFFSETS_TOPIC, index), told)
    error = await answer
    if error is ErrorCode.NONE:
        still = state.is_in_transaction(asked.producer_id, asked.epoch)
        if still or state.is_guarded(asked.producer_id, guard):
            return error
        return ErrorCode.COORDINATOR_LOAD_IN_PROGRESS  # a marker came in meanwhile: to be verified again
    if error is ErrorCode.CONCURRENT_TRANSACTIONS and asked.adds:
        return error
    if error in _RETRIABLE:
        return ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    if error is ErrorCode.PRODUCER_FENCED:
        return ErrorCode.INVALID_PRODUCER_EPOCH
    if error is ErrorCode.TRANSACTION_ABORTABLE and not knows_abortable:
        return ErrorCode.INVALID_TXN_STATE
    return error
