"""Administration of the cluster itself: its brokers, its quorum, where replicas are and who leads.

Owns the admin requests about brokers and replicas, and their typed results. They take an `Admin`, whose connections
and retries they use. Invariant: a call about several partitions answers for each of them. Called by the command
line.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.ids import ZERO_ID
from headrace.client.admin import Admin
from headrace.client.errors import error_code
from headrace.client.retry import with_retries
from headrace.client.topics import TopicPartition
from headrace.wire.apis import Api
from headrace.wire.messages import Message

T = TypeVar("T")

METADATA_TOPIC = "__cluster_metadata"

Outcomes = dict[TopicPartition, KafkaError | None]
"""What became of each partition; None is done."""


class BrokerInfo(NamedTuple):
    """One broker, as the controller has it registered."""

    node_id: int
    host: str
    port: int
    rack: str | None
    fenced: bool


class ClusterInfo(NamedTuple):
    """Who is in the cluster."""

    cluster_id: str
    controller_id: int
    brokers: tuple[BrokerInfo, ...]


class QuorumInfo(NamedTuple):
    """Who keeps the metadata log, with the end of the log of each."""

    leader_id: int
    epoch: int
    voters: Mapping[int, int]
    observers: Mapping[int, int]


class Reassignment(NamedTuple):
    """A partition on its way from one set of replicas to another."""

    replicas: tuple[int, ...]
    adding: tuple[int, ...]
    removing: tuple[int, ...]


class Election(IntEnum):
    """Which leader is wanted: the first of the replicas, or any that lives although it may lack records."""

    PREFERRED = 0
    UNCLEAN = 1


async def describe_brokers(admin: Admin) -> ClusterInfo:
    """The registered brokers, those that are fenced too where the cluster can tell."""
    body = {
        "include_cluster_authorized_operations": False,
        "endpoint_type": 1,
        "include_fenced_brokers": True,
    }

    async def attempt() -> ClusterInfo:
        connection = await admin.cluster.any_connection()
        reply = await connection.request(Api.DESCRIBE_CLUSTER, body)
        _raise(reply.error_code, reply.error_message)
        brokers = (BrokerInfo(b.broker_id, b.host, b.port, b.rack, b.is_fenced) for b in reply.brokers)
        return ClusterInfo(reply.cluster_id, reply.controller_id, tuple(sorted(brokers)))

    return await _retried(admin, attempt)


async def describe_quorum(admin: Admin) -> QuorumInfo:
    """The leader, voters and observers of the metadata log."""
    body = {"topics": [{"topic_name": METADATA_TOPIC, "partitions": [{"partition_index": 0}]}]}

    async def attempt() -> QuorumInfo:
        connection = await admin.cluster.any_connection()
        reply = await connection.request(Api.DESCRIBE_QUORUM, body)
        _raise(reply.error_code, reply.error_message)
        (partition,) = reply.topics[0].partitions
        _raise(partition.error_code, partition.error_message)
        return QuorumInfo(
            partition.leader_id,
            partition.leader_epoch,
            {voter.replica_id: voter.log_end_offset for voter in partition.current_voters},
            {observer.replica_id: observer.log_end_offset for observer in partition.observers},
        )

    return await _retried(admin, attempt)


async def alter_reassignments(
    admin: Admin, wanted: Mapping[TopicPartition, tuple[int, ...] | None]
) -> Outcomes:
    """Move partitions to these replicas; None ends a move that is under way and goes back."""
    body = {
        "topics": [
            {
                "name": topic,
                "partitions": [
                    {"partition_index": at.partition, "replicas": None if to is None else list(to)}
                    for at in partitions
                    for to in (wanted[at],)
                ],
            }
            for topic, partitions in _by_topic(wanted).items()
        ],
        "timeout_ms": admin.config.request_timeout_ms,
        "allow_replication_factor_change": True,
    }
    reply = await _controller(admin, Api.ALTER_PARTITION_REASSIGNMENTS, body)
    return {
        TopicPartition(topic.name, p.partition_index): _failure(p.error_code, p.error_message)
        for topic in reply.responses
        for p in topic.partitions
    }


async def list_reassignments(admin: Admin) -> dict[TopicPartition, Reassignment]:
    """Every partition that is being moved."""
    body = {"topics": None, "timeout_ms": admin.config.request_timeout_ms}
    reply = await _controller(admin, Api.LIST_PARTITION_REASSIGNMENTS, body)
    return {
        TopicPartition(topic.name, p.partition_index): Reassignment(
            tuple(p.replicas), tuple(p.adding_replicas), tuple(p.removing_replicas)
        )
        for topic in reply.topics
        for p in topic.partitions
    }


async def elect_leaders(
    admin: Admin, kind: Election, partitions: Iterable[TopicPartition] | None
) -> Outcomes:
    """Elect leaders of these partitions (None: of all); those that need none are not an error."""
    groups = None if partitions is None else _by_topic(partitions)
    body = {
        "election_type": int(kind),
        "topic_partitions": None
        if groups is None
        else [
            {"topic": name, "partitions": [at.partition for at in group]} for name, group in groups.items()
        ],
        "timeout_ms": admin.config.request_timeout_ms,
    }
    reply = await _controller(admin, Api.ELECT_LEADERS, body)
    return {
        TopicPartition(topic.topic, p.partition_id): _failure(p.error_code, p.error_message)
        for topic in reply.replica_election_results
        for p in topic.partition_result
    }


async def unregister_broker(admin: Admin, node_id: int) -> None:
    """Make the cluster forget a broker that will not come back."""
    await _controller(admin, Api.UNREGISTER_BROKER, {"broker_id": node_id})


async def add_voter(admin: Admin, node_id: int, address: str, directory_id: bytes = ZERO_ID) -> None:
    """Let an observer of the metadata log vote; `address` is that of its listener for controllers."""
    host, _, port = address.rpartition(":")
    body = {
        "cluster_id": None,
        "timeout_ms": admin.config.request_timeout_ms,
        "voter_id": node_id,
        "voter_directory_id": directory_id,
        "listeners": [{"name": "CONTROLLER", "host": host, "port": int(port)}],
    }
    await _controller(admin, Api.ADD_RAFT_VOTER, body)


async def remove_voter(admin: Admin, node_id: int, directory_id: bytes = ZERO_ID) -> None:
    """Let a voter of the metadata log vote no more."""
    body = {"cluster_id": None, "voter_id": node_id, "voter_directory_id": directory_id}
    await _controller(admin, Api.REMOVE_RAFT_VOTER, body)


async def _controller(admin: Admin, api: Api, body: Mapping[str, Any]) -> Message:
    async def attempt() -> Message:
        connection = await admin.cluster.controller()
        reply = await connection.request(api, body)
        _raise(reply.error_code, getattr(reply, "error_message", None))
        return reply

    return await _retried(admin, attempt)


async def _retried(admin: Admin, attempt: Callable[[], Awaitable[T]]) -> T:
    return await with_retries(admin.cluster, admin.config.default_api_timeout_ms, attempt)


def _by_topic(partitions: Iterable[TopicPartition]) -> dict[str, list[TopicPartition]]:
    groups: dict[str, list[TopicPartition]] = {}
    for at in partitions:
        groups.setdefault(at.topic, []).append(at)
    return groups


def _failure(code: int, message: str | None) -> KafkaError | None:
    known = error_code(code)
    return None if known is ErrorCode.NONE else KafkaError(known, message or known.name)


def _raise(code: int, message: str | None) -> None:
    failure = _failure(code, message)
    if failure is not None:
        raise failure
