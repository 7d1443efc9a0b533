"""Transactions of a producer: records and offsets that become visible together or not at all.

Owns the state of the transactional id: its producer id and epoch, which partitions are in the open transaction, and
whether it can still be committed. `sender` asks it before a batch of a new partition leaves, `producer` begins and
ends. Invariants: no batch leaves before the coordinator knows its partition; a transaction in which anything failed
can only be aborted; after a fatal error (another producer took the id) nothing is sent any more; an end that was
begun is tried until the coordinator has answered. Called by `producer` and `sender`.

    async with producer.transaction() as tx:
        await tx.send("out", b"…")
        await tx.commit_offsets(consumer)
"""

import asyncio
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Self

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.log import get_logger
from headrace.client.batches import NO_PRODUCER, ProducerId
from headrace.client.cluster import Cluster
from headrace.client.commits import offset_topics
from headrace.client.config import ProducerConfig
from headrace.client.consumer import Consumer, GroupMetadata
from headrace.client.coordinator import Coordinator, CoordinatorKind
from headrace.client.errors import ClientError, Fenced, TransactionFailed, error_code
from headrace.client.group_protocol import by_topic
from headrace.client.topics import OffsetAndMetadata, TopicPartition
from headrace.wire.apis import Api

# The last version in which a client names the partitions of a transaction itself, as clusters of every age expect.
ADD_PARTITIONS_HIGHEST = 3
END_HIGHEST = 4
OFFSETS_HIGHEST = 4

_FENCED = frozenset({ErrorCode.PRODUCER_FENCED, ErrorCode.INVALID_PRODUCER_EPOCH})
_LOST_ID = frozenset(
    {ErrorCode.INVALID_PRODUCER_ID_MAPPING, ErrorCode.UNKNOWN_PRODUCER_ID, ErrorCode.TRANSACTION_ABORTABLE}
)

_log = get_logger(__name__)


class State(Enum):
    """Where the transactional id stands."""

    NEW = "not initialised"
    READY = "ready"
    OPEN = "in a transaction"
    FAILED = "in a transaction that can only be aborted"
    ENDING = "ending a transaction"
    FATAL = "unusable"


class Transactions:
    """The transactional half of one producer."""

    def __init__(self, config: ProducerConfig, cluster: Cluster, wake: Callable[[], None]) -> None:
        assert config.transactional_id is not None
        self._config = config
        self._id = config.transactional_id
        self._coordinator = Coordinator(cluster, CoordinatorKind.TRANSACTION, self._id)
        self._wake = wake
        self.state = State.NEW
        self.producer = NO_PRODUCER
        self._error: KafkaError | None = None
        self._added: set[TopicPartition] = set()
        self._wanted: set[TopicPartition] = set()
        self._adding: asyncio.Task[None] | None = None
        self._has_offsets = False
        self._needs_new_epoch = False

    # -- what may be done -------------------------------------------------------------------------------------------

    def check_can_send(self) -> None:
        """Raise unless a transaction is open in which all went well so far."""
        if self.state is State.OPEN:
            return
        if self._error is not None:
            raise self.failure()
        raise ClientError(
            f"a producer with transactional.id={self._id} sends in transactions only",
            "use 'async with producer.transaction() as tx:'",
            ErrorCode.INVALID_TXN_STATE,
        )

    def fail(self, error: KafkaError) -> None:
        """Something of the transaction failed: it can only be aborted, or, if the id is another's, nothing can."""
        if self.state is State.FATAL:
            return
        if error.code in _FENCED or error.fatal:
            self.state = State.FATAL
        elif self.state in (State.OPEN, State.ENDING):
            self.state = State.FAILED
        self._error = self._error or error

    @property
    def broken(self) -> bool:
        """Whether nothing of the transaction can be sent any more."""
        return self.state in (State.FAILED, State.FATAL)

    def lost_track(self) -> None:
        """Sequences cannot go on under this epoch: the next transaction needs another."""
        self._needs_new_epoch = True

    def failure(self) -> KafkaError:
        """Why it is broken, with what to do."""
        error = self._error
        assert error is not None
        if self.state is State.FATAL:
            if error.code in _FENCED:
                return Fenced(
                    f"another producer took over transactional.id={self._id}",
                    "close this one; each running producer needs an id of its own",
                )
            return error
        return TransactionFailed(f"the transaction can only be aborted: {error.message}", error.hint)

    # -- the sender's questions -------------------------------------------------------------------------------------

    def may_send(self, partition: TopicPartition) -> bool:
        """Whether the coordinator knows the partition; if not, it is told, and the sender woken."""
        if partition in self._added:
            return True
        if self.state is State.OPEN or self.state is State.ENDING:
            self._wanted.add(partition)
            if self._adding is None or self._adding.done():
                self._adding = asyncio.create_task(self._add_partitions(), name="headrace transaction")
        return False

    async def _add_partitions(self) -> None:
        while self._wanted:
            wanted = frozenset(self._wanted)

            async def attempt(wanted: frozenset[TopicPartition] = wanted) -> None:
                topics = [{"name": t, "partitions": numbers} for t, numbers in by_topic(wanted).items()]
                body = {
                    "v3_and_below_transactional_id": self._id,
                    "v3_and_below_producer_id": self.producer.producer_id,
                    "v3_and_below_producer_epoch": self.producer.epoch,
                    "v3_and_below_topics": topics,
                }
                reply = await self._coordinator.request(
                    Api.ADD_PARTITIONS_TO_TXN, body, highest=ADD_PARTITIONS_HIGHEST
                )
                for topic in reply.results_by_topic_v3_and_below:
                    for result in topic.results_by_partition:
                        if result.partition_error_code != ErrorCode.OPERATION_NOT_ATTEMPTED:
                            where = f"{topic.name}-{result.partition_index}"
                            self._check(result.partition_error_code, f"add {where} to the transaction")

            try:
                await self._coordinator.retried(self._config.max_block_ms, attempt)
            except KafkaError as error:
                self._wanted.clear()
                self.fail(error)
                self._wake()
                return
            self._added |= wanted
            self._wanted -= wanted
            self._wake()

    # -- beginning and ending ---------------------------------------------------------------------------------------

    async def initialise(self) -> bool:
        """Make this producer the owner of its id, once, or again when its epoch is spent. Returns whether it was."""
        if self.state is State.FATAL:
            raise self.failure()
        if self.state is not State.NEW and not self._needs_new_epoch:
            return False
        known = self.producer if self._needs_new_epoch else NO_PRODUCER

        async def attempt() -> ProducerId:
            body = {
                "transactional_id": self._id,
                "transaction_timeout_ms": self._config.transaction_timeout_ms,
                "producer_id": known.producer_id,
                "producer_epoch": known.epoch,
            }
            reply = await self._coordinator.request(Api.INIT_PRODUCER_ID, body)
            self._check(reply.error_code, f"take over transactional.id={self._id}")
            return ProducerId(reply.producer_id, reply.producer_epoch)

        try:
            self.producer = await self._coordinator.retried(self._config.max_block_ms, attempt)
        except KafkaError as error:
            self.fail(error)
            raise (self.failure() if self.broken else error) from None
        self._needs_new_epoch = False
        self.state = State.READY
        return True

    def begin(self) -> None:
        """Open a transaction."""
        if self.state is State.FATAL:
            raise self.failure()
        if self.state is not State.READY:
            raise ClientError(
                f"cannot begin a transaction: the producer is {self.state.value}",
                "one transaction of a producer at a time",
                ErrorCode.INVALID_TXN_STATE,
            )
        self.state = State.OPEN

    def begin_to_end(self) -> None:
        """No more sends: what is on its way decides how it ends."""
        if self.state is State.OPEN:
            self.state = State.ENDING

    async def end(self, *, commit: bool) -> None:
        """End the transaction; everything of it is acknowledged or has failed by now. Raises KafkaError."""
        if self.state is State.FATAL or (commit and self.state is State.FAILED):
            raise self.failure()
        if self._adding is not None:
            await asyncio.gather(self._adding, return_exceptions=True)
        if self._added or self._has_offsets:
            await self._end(commit)
        self._added.clear()
        self._wanted.clear()
        self._has_offsets = False
        self._error = None
        self.state = State.READY

    async def _end(self, commit: bool) -> None:
        what = "commit the transaction" if commit else "abort the transaction"

        async def attempt() -> None:
            body = {
                "transactional_id": self._id,
                "producer_id": self.producer.producer_id,
                "producer_epoch": self.producer.epoch,
                "committed": commit,
            }
            reply = await self._coordinator.request(Api.END_TXN, body, highest=END_HIGHEST)
            self._check(reply.error_code, what)

        try:
            await self._coordinator.retried(self._config.max_block_ms, attempt)
        except KafkaError as error:
            if not commit and error.code in _LOST_ID:
                self._needs_new_epoch = True  # the coordinator has no such transaction: nothing to abort
                return
            self.fail(error)
            if self.state is not State.FATAL and commit:
                self.state = State.FAILED
            raise self.failure() from error

    async def commit_offsets(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata], group: GroupMetadata
    ) -> None:
        """Make these offsets part of the transaction. Raises KafkaError."""
        self.check_can_send()
        if not offsets:
            return
        groups = Coordinator(self._coordinator.cluster, CoordinatorKind.GROUP, group.group_id)

        async def announce() -> None:
            body = {
                "transactional_id": self._id,
                "producer_id": self.producer.producer_id,
                "producer_epoch": self.producer.epoch,
                "group_id": group.group_id,
            }
            reply = await self._coordinator.request(Api.ADD_OFFSETS_TO_TXN, body)
            self._check(reply.error_code, f"add offsets of group {group.group_id!r} to the transaction")

        async def write() -> None:
            body = {
                "transactional_id": self._id,
                "group_id": group.group_id,
                "producer_id": self.producer.producer_id,
                "producer_epoch": self.producer.epoch,
                "generation_id": group.generation,
                "member_id": group.member_id,
                "group_instance_id": group.instance_id,
                "topics": offset_topics(offsets),
            }
            reply = await groups.request(Api.TXN_OFFSET_COMMIT, body, highest=OFFSETS_HIGHEST)
            for topic in reply.topics:
                for result in topic.partitions:
                    self._check(result.error_code, f"commit offsets of group {group.group_id!r}")

        try:
            await self._coordinator.retried(self._config.max_block_ms, announce)
            self._has_offsets = True
            await groups.retried(self._config.max_block_ms, write)
        except KafkaError as error:
            self.fail(error)
            raise self.failure() from error

    def _check(self, number: int, what: str) -> None:
        code = error_code(number)
        if code is not ErrorCode.NONE:
            raise KafkaError(code, f"cannot {what}: {code.name}")


class Transaction:
    """One transaction: committed when its block ends, aborted when that raises."""

    def __init__(self, producer: Any, transactions: Transactions) -> None:
        self._producer = producer
        self._transactions = transactions
        self.send = producer.send

    async def __aenter__(self) -> Self:
        if await self._transactions.initialise():
            self._producer.adopt(self._transactions.producer)
        self._transactions.begin()
        self._producer.gate(False)
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            try:
                await self.commit()
            except KafkaError as failure:
                if not failure.fatal and self._transactions.state is State.FAILED:
                    await self.abort()
                raise
        elif self._transactions.state in (State.OPEN, State.FAILED, State.ENDING):
            try:
                await self.abort()
            except KafkaError as failure:
                # What broke the transaction is what the caller must hear.
                _log.warning("cannot abort the transaction", extra={"fields": {"reason": failure.message}})

    async def commit_offsets(
        self,
        consumer: "Consumer | GroupMetadata",
        offsets: "Mapping[TopicPartition, OffsetAndMetadata] | None" = None,
    ) -> None:
        """Commit what the consumer handed out (or these offsets) together with the records. Raises KafkaError."""
        if isinstance(consumer, Consumer):
            group = consumer.group_metadata()
            offsets = consumer.consumed() if offsets is None else offsets
        else:
            group = consumer
        await self._transactions.commit_offsets(offsets or {}, group)

    async def commit(self) -> None:
        """End it now, with everything that was sent."""
        self._producer.gate(True)
        self._transactions.begin_to_end()
        await self._producer.flush()
        await self._transactions.end(commit=True)

    async def abort(self) -> None:
        """End it now, as if nothing had been sent."""
        self._producer.gate(True)
        self._transactions.begin_to_end()
        await self._producer.discard()
        await self._transactions.end(commit=False)
