"""Looking after transactions through the admin client: list, describe, and abort one that hangs.

Functions over an `Admin`, which knows the cluster. Transactional ids are asked of every broker, details of the one
that coordinates the id, and producers of the leader of their partition. The command line is the caller.
"""

from collections.abc import Sequence
from typing import NamedTuple

from headrace.base.errors import ErrorCode, KafkaError
from headrace.client.admin import Admin
from headrace.client.connection import Connection
from headrace.client.errors import ClientError, error_code
from headrace.client.retry import with_retries
from headrace.client.topics import TopicPartition
from headrace.wire.apis import Api

KEY_TRANSACTION = 1
BATCHED_FROM = 4
RECLAIM_TIMEOUT_MS = 60_000


class TransactionListing(NamedTuple):
    """A transactional id and who coordinates it."""

    transactional_id: str
    coordinator: int
    producer_id: int
    state: str


class TransactionInfo(NamedTuple):
    """All that the coordinator tells of a transactional id."""

    transactional_id: str
    coordinator: int
    producer_id: int
    producer_epoch: int
    state: str
    timeout_ms: int
    start_ms: int
    partitions: tuple[TopicPartition, ...]


class ProducerInfo(NamedTuple):
    """A producer as a partition knows it."""

    producer_id: int
    epoch: int
    coordinator_epoch: int
    last_timestamp_ms: int
    open_from: int


def _check(code: int, message: str | None = None) -> None:
    if code:
        raise KafkaError(error_code(code), message or error_code(code).name)


async def list_transactions(
    admin: Admin, states: Sequence[str] = (), longer_than_ms: int = -1
) -> list[TransactionListing]:
    """Transactional ids of the whole cluster, by name."""
    await admin.cluster.describe([])
    found: list[TransactionListing] = []
    body = {"state_filters": list(states), "producer_id_filters": [], "duration_filter": longer_than_ms}
    for node_id in sorted(admin.cluster.nodes):

        async def attempt(node_id: int = node_id) -> list[TransactionListing]:
            connection = await admin.cluster.connection(node_id)
            reply = await connection.request(Api.LIST_TRANSACTIONS, body)
            _check(reply.error_code)
            if reply.unknown_state_filters:
                raise ClientError(
                    f"no transaction is ever {reply.unknown_state_filters[0]!r}",
                    "states are Empty, Ongoing, PrepareCommit, PrepareAbort, CompleteCommit and CompleteAbort",
                    ErrorCode.INVALID_REQUEST,
                )
            return [
                TransactionListing(each.transactional_id, node_id, each.producer_id, each.transaction_state)
                for each in reply.transaction_states
            ]

        found += await with_retries(admin.cluster, admin.config.default_api_timeout_ms, attempt)
    return sorted(found)


async def describe_transaction(admin: Admin, transactional_id: str) -> TransactionInfo:
    """One transactional id."""

    async def attempt() -> TransactionInfo:
        node_id, connection = await _coordinator(admin, transactional_id)
        reply = await connection.request(Api.DESCRIBE_TRANSACTIONS, {"transactional_ids": [transactional_id]})
        [each] = reply.transaction_states
        if each.error_code == ErrorCode.TRANSACTIONAL_ID_NOT_FOUND:
            raise ClientError(
                f"there is no transactional id {transactional_id!r}",
                "'headrace txn list' shows those that there are",
                ErrorCode.TRANSACTIONAL_ID_NOT_FOUND,
            )
        _check(each.error_code)
        return TransactionInfo(
            transactional_id,
            node_id,
            each.producer_id,
            each.producer_epoch,
            each.transaction_state,
            each.transaction_timeout_ms,
            each.transaction_start_time_ms,
            tuple(TopicPartition(topic.topic, index) for topic in each.topics for index in topic.partitions),
        )

    return await with_retries(admin.cluster, admin.config.default_api_timeout_ms, attempt)


async def _coordinator(admin: Admin, transactional_id: str) -> tuple[int, Connection]:
    connection = await admin.cluster.any_connection()
    batched = connection.version(Api.FIND_COORDINATOR) >= BATCHED_FROM
    keys = {"coordinator_keys": [transactional_id]} if batched else {"key": transactional_id}
    reply = await connection.request(Api.FIND_COORDINATOR, {"key_type": KEY_TRANSACTION, **keys})
    found = reply.coordinators[0] if batched else reply
    _check(found.error_code, found.error_message)
    if found.node_id not in admin.cluster.nodes:
        await admin.cluster.describe([])
    return found.node_id, await admin.cluster.connection(found.node_id)


async def abort_transaction(admin: Admin, transactional_id: str) -> None:
    """Shut the producer of an id out and abort what it has open."""
    await describe_transaction(admin, transactional_id)  # an unknown id would be made by what follows

    async def attempt() -> None:
        _, connection = await _coordinator(admin, transactional_id)
        body = {"transactional_id": transactional_id, "transaction_timeout_ms": RECLAIM_TIMEOUT_MS}
        _check((await connection.request(Api.INIT_PRODUCER_ID, body)).error_code)

    await with_retries(admin.cluster, admin.config.default_api_timeout_ms, attempt)


async def describe_producers(admin: Admin, where: TopicPartition) -> list[ProducerInfo]:
    """The producers of a partition, with where each one's open transaction began (-1: none is open)."""

    async def attempt() -> list[ProducerInfo]:
        connection = await _leader(admin, where)
        body = {"topics": [{"name": where.topic, "partition_indexes": [where.partition]}]}
        [topic] = (await connection.request(Api.DESCRIBE_PRODUCERS, body)).topics
        [partition] = topic.partitions
        _check(partition.error_code, partition.error_message)
        return [
            ProducerInfo(
                each.producer_id,
                each.producer_epoch,
                each.coordinator_epoch,
                each.last_timestamp,
                each.current_txn_start_offset,
            )
            for each in partition.active_producers
        ]

    return await with_retries(admin.cluster, admin.config.default_api_timeout_ms, attempt)


async def abort_hanging(admin: Admin, where: TopicPartition, start_offset: int) -> int:
    """Write an abort marker for the transaction that began at an offset of a partition; its producer's id.

    For a transaction that no coordinator knows of. One that a coordinator knows is aborted by its id.
    """
    producers = await describe_producers(admin, where)
    found = next((each for each in producers if each.open_from == start_offset), None)
    if found is None:
        opened = ", ".join(str(each.open_from) for each in producers if each.open_from >= 0)
        raise ClientError(
            f"no open transaction of {where.topic}-{where.partition} began at offset {start_offset}",
            f"open ones began at: {opened}" if opened else "none is open there",
            ErrorCode.INVALID_TXN_STATE,
        )
    marker = {
        "producer_id": found.producer_id,
        "producer_epoch": found.epoch,
        "transaction_result": False,
        "topics": [{"name": where.topic, "partition_indexes": [where.partition]}],
        "coordinator_epoch": max(found.coordinator_epoch, 0),
    }

    async def attempt() -> None:
        connection = await _leader(admin, where)
        reply = await connection.request(Api.WRITE_TXN_MARKERS, {"markers": [marker]})
        _check(reply.markers[0].topics[0].partitions[0].error_code)

    await with_retries(admin.cluster, admin.config.default_api_timeout_ms, attempt)
    return found.producer_id


async def _leader(admin: Admin, where: TopicPartition) -> Connection:
    admin.cluster.track(where.topic)
    await admin.cluster.refresh()
    leader = admin.cluster.leader(where)
    if leader is None:
        raise KafkaError(ErrorCode.LEADER_NOT_AVAILABLE, f"{where.topic}-{where.partition} has no leader")
    return await admin.cluster.connection(leader[0])
