"""The requests of transactions and of committed offsets, each tried again where that can help.

Owns finding coordinators and the calls to them. Invariant: a call returns when the coordinator has done it, or
raises a KafkaError that says why not; being fenced is never retried. Versions are those in which a client adds
partitions itself and an epoch stays the same over a commit (Kafka 2.5 and later), because a transaction here may be
ended by another process than the one that wrote it. Called by `arrow_write` and the Spark sink's ledger.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from headrace.base.errors import ErrorCode, KafkaError
from headrace.client.cluster import Cluster, Node
from headrace.client.connection import Connection
from headrace.client.errors import Unsupported, error_code, raise_for
from headrace.client.retry import with_retries
from headrace.client.topics import TopicPartition
from headrace.wire.apis import Api
from headrace.wire.messages import Message

FIND_COORDINATOR_HIGHEST: Final = 3
ADD_PARTITIONS_HIGHEST: Final = 3
ADD_OFFSETS_HIGHEST: Final = 3
END_TXN_HIGHEST: Final = 4
TXN_OFFSET_COMMIT_HIGHEST: Final = 3
OFFSET_COMMIT_HIGHEST: Final = 7
OFFSET_FETCH_HIGHEST: Final = 7
INIT_PRODUCER_ID_HIGHEST: Final = 4
COORDINATORS_KNOWN_MAX: Final = 1_000
KEY_GROUP: Final = 0
KEY_TRANSACTION: Final = 1

_MOVED: Final = (
    ErrorCode.NOT_COORDINATOR,
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
)
# A marker of the transaction before, or of one that was just fenced, is still being written.
_PASSING: Final = (ErrorCode.CONCURRENT_TRANSACTIONS, ErrorCode.UNSTABLE_OFFSET_COMMIT)
FENCED: Final = (
    ErrorCode.PRODUCER_FENCED,
    ErrorCode.INVALID_PRODUCER_EPOCH,
    ErrorCode.INVALID_PRODUCER_ID_MAPPING,
    ErrorCode.INVALID_TXN_STATE,
)


@dataclass(frozen=True, slots=True)
class TransactionalProducer:
    """Who writes a transaction: what another process needs to end it."""

    transactional_id: str
    producer_id: int
    epoch: int


class CommittedOffset(NamedTuple):
    """What a group holds for a partition."""

    offset: int
    metadata: str


class _Again(KafkaError):
    """Something that passes."""

    @property
    def retriable(self) -> bool:
        return True


class Coordination:
    """Calls to the coordinators of transactions and groups."""

    def __init__(self, cluster: Cluster, timeout_ms: int) -> None:
        self.cluster = cluster
        self._timeout_ms = timeout_ms
        self._known: dict[tuple[int, str], int] = {}

    # -- transactions -----------------------------------------------------------------------------------------------

    async def init(self, transactional_id: str, transaction_timeout_ms: int) -> TransactionalProducer:
        """Take a transactional id over: whoever had it is fenced, and what it had open is aborted."""
        body = {"transactional_id": transactional_id, "transaction_timeout_ms": transaction_timeout_ms}
        reply = await self._ask(
            KEY_TRANSACTION, transactional_id, Api.INIT_PRODUCER_ID, body, INIT_PRODUCER_ID_HIGHEST
        )
        return TransactionalProducer(transactional_id, reply.producer_id, reply.producer_epoch)

    async def add_partitions(
        self, producer: TransactionalProducer, partitions: Iterable[TopicPartition]
    ) -> None:
        """Make partitions part of the transaction, before anything of it is written there."""
        topics: dict[str, list[int]] = {}
        for partition in partitions:
            topics.setdefault(partition.topic, []).append(partition.partition)
        body = {
            "v3_and_below_transactional_id": producer.transactional_id,
            "v3_and_below_producer_id": producer.producer_id,
            "v3_and_below_producer_epoch": producer.epoch,
            "v3_and_below_topics": [{"name": n, "partitions": numbers} for n, numbers in topics.items()],
        }
        await self._ask(
            KEY_TRANSACTION,
            producer.transactional_id,
            Api.ADD_PARTITIONS_TO_TXN,
            body,
            ADD_PARTITIONS_HIGHEST,
        )

    async def commit_offsets(
        self, producer: TransactionalProducer, group: str, topic: str, offsets: Mapping[int, CommittedOffset]
    ) -> None:
        """Commit offsets of a group as part of the transaction."""
        who = {
            "transactional_id": producer.transactional_id,
            "producer_id": producer.producer_id,
            "producer_epoch": producer.epoch,
            "group_id": group,
        }
        await self._ask(
            KEY_TRANSACTION, producer.transactional_id, Api.ADD_OFFSETS_TO_TXN, who, ADD_OFFSETS_HIGHEST
        )
        body = {**who, "topics": [_offsets_of(topic, offsets)]}
        await self._ask(KEY_GROUP, group, Api.TXN_OFFSET_COMMIT, body, TXN_OFFSET_COMMIT_HIGHEST)

    async def end(self, producer: TransactionalProducer, *, commit: bool) -> None:
        """Commit or abort; also what another process wrote, and again what was ended the same way before."""
        body = {
            "transactional_id": producer.transactional_id,
            "producer_id": producer.producer_id,
            "producer_epoch": producer.epoch,
            "committed": commit,
        }
        await self._ask(KEY_TRANSACTION, producer.transactional_id, Api.END_TXN, body, END_TXN_HIGHEST)

    async def open_transactions(self, prefix: str) -> list[str]:
        """The transactional ids with this prefix that have something open; none where brokers cannot tell."""

        async def attempt() -> set[str]:
            await self.cluster.describe([])  # a broker that is gone by the next attempt has none open
            found = set()
            for node_id in list(self.cluster.nodes):
                connection = await self.cluster.connection(node_id)
                try:
                    reply = await connection.request(
                        Api.LIST_TRANSACTIONS,
                        {"state_filters": ["Ongoing"], "producer_id_filters": []},
                        highest=0,
                    )
                except Unsupported:
                    continue
                raise_for(reply.error_code, None, f"open transactions of broker {node_id}")
                found |= {state.transactional_id for state in reply.transaction_states}
            return found

        names = await with_retries(self.cluster, self._timeout_ms, attempt)
        return sorted(name for name in names if name.startswith(prefix))

    # -- offsets of a group -----------------------------------------------------------------------------------------

    async def fetch_offsets(
        self, group: str, topic: str, partitions: Iterable[int], *, stable: bool
    ) -> dict[int, CommittedOffset]:
        """What the group has committed for these partitions; `stable` waits until no transaction about it is open."""
        body = {
            "group_id": group,
            "topics": [{"name": topic, "partition_indexes": list(partitions)}],
            "require_stable": stable,
        }
        reply = await self._ask(KEY_GROUP, group, Api.OFFSET_FETCH, body, OFFSET_FETCH_HIGHEST)
        return {
            result.partition_index: CommittedOffset(result.committed_offset, result.metadata or "")
            for found in reply.topics
            for result in found.partitions
            if result.committed_offset >= 0
        }

    async def store_offsets(self, group: str, topic: str, offsets: Mapping[int, CommittedOffset]) -> None:
        """Commit offsets of a group that has no members."""
        body = {"group_id": group, "member_id": "", "topics": [_offsets_of(topic, offsets)]}
        await self._ask(KEY_GROUP, group, Api.OFFSET_COMMIT, body, OFFSET_COMMIT_HIGHEST)

    # -- inside -----------------------------------------------------------------------------------------------------

    async def _ask(self, kind: int, key: str, api: Api, body: dict[str, Any], highest: int) -> Message:
        async def attempt() -> Message:
            try:
                connection = await self._coordinator(kind, key)
                reply = await connection.request(api, body, highest=highest)
            except KafkaError:
                self._known.pop((kind, key), None)
                raise
            for code, about in _errors_of(reply):
                if code in _MOVED:
                    self._known.pop((kind, key), None)
                if code in _MOVED or code in _PASSING:
                    raise _Again(code, f"{api.name} for {key}: {code.name}")
                if code is not ErrorCode.NONE:
                    raise KafkaError(code, f"{api.name} for {key}{about}: {code.name}")
            return reply

        return await with_retries(self.cluster, self._timeout_ms, attempt)

    async def _coordinator(self, kind: int, key: str) -> Connection:
        node_id = self._known.get((kind, key))
        if node_id is None:
            if not self.cluster.nodes:
                await self.cluster.describe([])
            connection = await self.cluster.any_connection()
            reply = await connection.request(
                Api.FIND_COORDINATOR, {"key": key, "key_type": kind}, highest=FIND_COORDINATOR_HIGHEST
            )
            raise_for(reply.error_code, reply.error_message, f"coordinator of {key}")
            if len(self._known) >= COORDINATORS_KNOWN_MAX:
                del self._known[next(iter(self._known))]
            node_id = self._known[kind, key] = int(reply.node_id)
            self.cluster.nodes.setdefault(node_id, Node(node_id, reply.host, reply.port, None))
        return await self.cluster.connection(node_id)


def _offsets_of(topic: str, offsets: Mapping[int, CommittedOffset]) -> dict[str, Any]:
    entries = [
        {"partition_index": number, "committed_offset": value.offset, "committed_metadata": value.metadata}
        for number, value in offsets.items()
    ]
    return {"name": topic, "partitions": entries}


def _errors_of(reply: Message) -> list[tuple[ErrorCode, str]]:
    """Every error code of an answer, wherever it stands, and what it is about."""
    found: list[tuple[ErrorCode, str]] = []
    whole = getattr(reply, "error_code", 0)
    if whole:
        found.append((error_code(whole), ""))
    for topic in getattr(reply, "results_by_topic_v3_and_below", None) or []:
        found += [
            (error_code(p.partition_error_code), f" ({topic.name}-{p.partition_index})")
            for p in topic.results_by_partition
            if p.partition_error_code
        ]
    for topic in getattr(reply, "topics", None) or []:
        found += [
            (error_code(p.error_code), f" ({topic.name}-{p.partition_index})")
            for p in topic.partitions
            if p.error_code
        ]
    # What names the cause goes before what only follows from it.
    return sorted(found, key=lambda item: item[0] is ErrorCode.OPERATION_NOT_ATTEMPTED)
