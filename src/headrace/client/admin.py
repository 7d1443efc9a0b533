"""Administration: topics, partitions, settings, the cluster.

Owns the admin requests and their typed results. Invariant: a call about several things answers for each of
them; a call about one thing raises. Whole-request failures that can pass (a lost connection, a moved
controller) are tried again until `default.api.timeout.ms`. Called by the command line and `headrace.testing`.
"""

import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.ids import ZERO_ID
from headrace.client.cluster import Cluster, Node, TopicInfo
from headrace.client.config import admin_config, settings
from headrace.client.connection import Connection
from headrace.client.errors import ClientError, ConfigError, error_code
from headrace.client.retry import with_retries
from headrace.client.topics import TopicPartition
from headrace.client.transport import Connector
from headrace.wire.apis import Api
from headrace.wire.messages import Message

if TYPE_CHECKING:
    from headrace.client.access_admin import AclFilter, AclRule
    from headrace.client.admin_txn import ProducerInfo, TransactionInfo, TransactionListing
    from headrace.client.cluster_admin import ClusterInfo, Election, QuorumInfo, Reassignment
    from headrace.client.group_admin import GroupInfo, GroupLag, GroupListing
    from headrace.client.log_admin import LogDirectory
    from headrace.client.topics import OffsetAndMetadata

T = TypeVar("T")

UNKNOWN_TOPIC_TIMEOUT_MS = 3_000
"""How long a topic that no broker knows is asked for: one that was just created is known everywhere sooner."""


class ResourceType(IntEnum):
    """What a setting belongs to."""

    TOPIC = 2
    BROKER = 4
    BROKER_LOGGER = 8
    CLIENT_METRICS = 16
    GROUP = 32


class ConfigSource(IntEnum):
    """Where the value of a setting comes from."""

    UNKNOWN = 0
    DYNAMIC_TOPIC_CONFIG = 1
    DYNAMIC_BROKER_CONFIG = 2
    DYNAMIC_DEFAULT_BROKER_CONFIG = 3
    STATIC_BROKER_CONFIG = 4
    DEFAULT_CONFIG = 5
    DYNAMIC_BROKER_LOGGER_CONFIG = 6
    CLIENT_METRICS_CONFIG = 7
    GROUP_CONFIG = 8


class ConfigOp(IntEnum):
    """How a setting is changed."""

    SET = 0
    DELETE = 1
    APPEND = 2
    SUBTRACT = 3


class NewTopic(NamedTuple):
    """A topic to create; -1 takes the broker's default."""

    name: str
    partitions: int = -1
    replication_factor: int = -1
    config: Mapping[str, str] = MappingProxyType({})


class Outcome(NamedTuple):
    """What became of one of several things."""

    name: str
    error: KafkaError | None


class ClusterSummary(NamedTuple):
    """A cluster as metadata tells of it."""

    cluster_id: str | None
    controller_id: int
    nodes: list[Node]


class ConfigResource(NamedTuple):
    """The owner of settings: a topic by name, or a broker by id ("" for the default of all brokers)."""

    type: ResourceType
    name: str

    @property
    def topic(self) -> str:
        """The topic's name; "" for a broker."""
        return self.name if self.type is ResourceType.TOPIC else ""


class ConfigEntry(NamedTuple):
    """One setting as a broker reports it."""

    name: str
    value: str | None
    source: ConfigSource
    read_only: bool
    sensitive: bool
    documentation: str | None


class Admin:
    """An admin client. Use it as `async with Admin({"bootstrap.servers": …}) as admin:`."""

    def __init__(
        self,
        config: Mapping[str, object] | None = None,
        *,
        connector: Connector | None = None,
        random_source: random.Random | None = None,
        **keywords: object,
    ) -> None:
        self.config = admin_config(settings(config, keywords))
        self.cluster = Cluster(self.config, connector=connector, random_source=random_source)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self.cluster.close()

    # -- topics -----------------------------------------------------------------------------------------------------

    async def create_topics(
        self, topics: Sequence[NewTopic], *, validate_only: bool = False
    ) -> list[Outcome]:
        """Create topics (or only check that they could be created)."""
        body = {
            "topics": [
                {
                    "name": topic.name,
                    "num_partitions": topic.partitions,
                    "replication_factor": topic.replication_factor,
                    "assignments": [],
                    "configs": [{"name": name, "value": value} for name, value in topic.config.items()],
                }
                for topic in topics
            ],
            "timeout_ms": self.config.request_timeout_ms,
            "validate_only": validate_only,
        }
        reply = await self._controller_call(
            Api.CREATE_TOPICS, body, lambda r: [t.error_code for t in r.topics]
        )
        outcomes = [_outcome(t.name, t.error_code, t.error_message) for t in reply.topics]
        return _in_order(outcomes, [topic.name for topic in topics])

    async def create_topic(self, topic: NewTopic, *, validate_only: bool = False) -> None:
        """Create one topic; KafkaError when it is refused."""
        _raise_first(await self.create_topics([topic], validate_only=validate_only))

    async def delete_topics(self, names: Sequence[str]) -> list[Outcome]:
        """Delete topics by name."""
        body = {
            "topics": [{"name": name} for name in names],
            "topic_names": list(names),
            "timeout_ms": self.config.request_timeout_ms,
        }
        reply = await self._controller_call(
            Api.DELETE_TOPICS, body, lambda r: [t.error_code for t in r.responses]
        )
        outcomes = [_outcome(t.name, t.error_code, t.error_message) for t in reply.responses]
        return _in_order(outcomes, names)

    async def create_partitions(self, name: str, total: int, *, validate_only: bool = False) -> None:
        """Raise the number of partitions of a topic to `total`; KafkaError when it is refused."""
        body = {
            "topics": [{"name": name, "count": total, "assignments": None}],
            "timeout_ms": self.config.request_timeout_ms,
            "validate_only": validate_only,
        }
        reply = await self._controller_call(
            Api.CREATE_PARTITIONS, body, lambda r: [result.error_code for result in r.results]
        )
        results = [_outcome(r.name, r.error_code, r.error_message) for r in reply.results]
        _raise_first(results, topic=name)

    async def list_topics(self) -> list[TopicInfo]:
        """All topics, by name."""
        return await self._topics(None)

    async def describe_topics(self, names: Sequence[str]) -> list[TopicInfo]:
        """These topics; one that does not exist has its error in it."""
        return await self._topics(names)

    async def _topics(self, names: Sequence[str] | None) -> list[TopicInfo]:
        async def attempt() -> list[TopicInfo]:
            reply = await self.cluster.describe(names)
            found = [self.cluster.topics[topic.name] for topic in reply.topics]
            for topic in found:
                if topic.error is ErrorCode.LEADER_NOT_AVAILABLE:
                    raise KafkaError(topic.error, f"{topic.name} has no leader yet")
            return sorted(found, key=lambda topic: topic.name)

        return await self.retried(attempt)

    # -- cluster ----------------------------------------------------------------------------------------------------

    async def describe_cluster(self) -> ClusterSummary:
        """The cluster's id, its controller, and its brokers."""

        async def attempt() -> ClusterSummary:
            await self.cluster.describe([])
            nodes = sorted(self.cluster.nodes.values())
            return ClusterSummary(self.cluster.cluster_id, self.cluster.controller_id, nodes)

        return await self.retried(attempt)

    # -- settings ---------------------------------------------------------------------------------------------------

    async def describe_configs(
        self, resource: ConfigResource, names: Sequence[str] | None = None, *, documentation: bool = False
    ) -> list[ConfigEntry]:
        """The settings of one resource (None: all), by name; KafkaError when it is refused."""
        body = {
            "resources": [
                {
                    "resource_type": int(resource.type),
                    "resource_name": resource.name,
                    "configuration_keys": None if names is None else list(names),
                }
            ],
            "include_synonyms": False,
            "include_documentation": documentation,
        }

        async def attempt() -> list[ConfigEntry]:
            connection = await self._owner(resource)
            reply = await connection.request(Api.DESCRIBE_CONFIGS, body)
            (result,) = reply.results
            outcome = _outcome(resource.name, result.error_code, result.error_message)
            _raise_first([outcome], topic=resource.topic)
            return sorted(_entry(item) for item in result.configs)

        return await self.retried(attempt)

    async def alter_configs(
        self,
        resource: ConfigResource,
        changes: Sequence[tuple[ConfigOp, str, str | None]],
        *,
        validate_only: bool = False,
    ) -> None:
        """Set, unset, append to or subtract from settings of one resource; KafkaError when it is refused."""
        body = {
            "resources": [
                {
                    "resource_type": int(resource.type),
                    "resource_name": resource.name,
                    "configs": [
                        {"name": name, "config_operation": int(op), "value": value}
                        for op, name, value in changes
                    ],
                }
            ],
            "validate_only": validate_only,
        }

        async def attempt() -> None:
            connection = await self._owner(resource)
            reply = await connection.request(Api.INCREMENTAL_ALTER_CONFIGS, body)
            results = [_outcome(r.resource_name, r.error_code, r.error_message) for r in reply.responses]
            _raise_first(results, topic=resource.topic)

        await self.retried(attempt)

    async def _owner(self, resource: ConfigResource) -> Connection:
        """Settings of one broker are asked of that broker, others of any."""
        of_broker = resource.type in (ResourceType.BROKER, ResourceType.BROKER_LOGGER)
        if not of_broker or resource.name == "":
            return await self.cluster.any_connection()
        try:
            node_id = int(resource.name)
        except ValueError:
            raise ConfigError(
                f"{resource.name!r} is not a broker id", "broker ids are whole numbers"
            ) from None
        if node_id not in self.cluster.nodes:
            await self.cluster.describe([])
        if node_id not in self.cluster.nodes:
            known = ", ".join(map(str, sorted(self.cluster.nodes)))
            raise ClientError(
                f"there is no broker {node_id}", f"the brokers are: {known}", ErrorCode.INVALID_REQUEST
            )
        return await self.cluster.connection(node_id)

    # -- groups, logs, brokers, transactions: each kind in a module of its own, loaded when it is needed -------------

    async def list_groups(
        self, *, states: Sequence[str] = (), types: Sequence[str] = ()
    ) -> "list[GroupListing]":
        """All groups, by name, or those in these states and of these types."""
        from headrace.client.group_admin import list_groups

        return await list_groups(self, states=states, types=types)

    async def describe_group(self, group_id: str) -> "GroupInfo":
        """One group with its members."""
        from headrace.client.group_admin import describe_group

        return await describe_group(self, group_id)

    async def delete_groups(self, group_ids: Sequence[str]) -> list[Outcome]:
        """Delete groups that have no members."""
        from headrace.client.group_admin import delete_groups

        return await delete_groups(self, group_ids)

    async def group_offsets(
        self, group_id: str, partitions: Iterable[TopicPartition] | None = None
    ) -> "dict[TopicPartition, OffsetAndMetadata]":
        """What a group has committed."""
        from headrace.client.group_admin import group_offsets

        return await group_offsets(self, group_id, partitions)

    async def group_lag(self, group_id: str) -> "dict[TopicPartition, GroupLag]":
        """How far a group is behind, by partition."""
        from headrace.client.group_admin import group_lag

        return await group_lag(self, group_id)

    async def alter_group_offsets(
        self, group_id: str, offsets: "Mapping[TopicPartition, OffsetAndMetadata | int]"
    ) -> None:
        """Set the offsets of a group that has no members."""
        from headrace.client.group_admin import alter_group_offsets

        await alter_group_offsets(self, group_id, offsets)

    async def delete_group_offsets(
        self, group_id: str, partitions: Iterable[TopicPartition]
    ) -> "dict[TopicPartition, KafkaError | None]":
        """Forget offsets of a group; None is done."""
        from headrace.client.group_admin import delete_group_offsets

        return await delete_group_offsets(self, group_id, partitions)

    async def remove_members(self, group_id: str, instance_ids: Sequence[str]) -> list[Outcome]:
        """Remove static members from a classic group."""
        from headrace.client.group_admin import remove_members

        return await remove_members(self, group_id, instance_ids)

    async def delete_records(
        self, before: Mapping[TopicPartition, int]
    ) -> "dict[TopicPartition, int | KafkaError]":
        """Drop records before an offset (-1: all); the new first offset, or why not."""
        from headrace.client.log_admin import delete_records

        return await delete_records(self, before)

    async def describe_log_dirs(
        self, brokers: Iterable[int] | None = None
    ) -> "dict[int, list[LogDirectory]]":
        """The data directories of brokers."""
        from headrace.client.log_admin import describe_log_dirs

        return await describe_log_dirs(self, brokers)

    async def list_config_resources(self, kinds: Iterable[ResourceType] = ()) -> list[ConfigResource]:
        """The resources that have settings of their own."""
        from headrace.client.log_admin import list_config_resources

        return await list_config_resources(self, kinds)

    async def describe_features(self) -> dict[str, int]:
        """The finalized features and their levels."""
        from headrace.client.log_admin import describe_features

        return await describe_features(self)

    async def update_features(self, levels: Mapping[str, int], *, validate_only: bool = False) -> None:
        """Raise the levels of features, or only check that they could be raised."""
        from headrace.client.log_admin import update_features

        await update_features(self, levels, validate_only=validate_only)

    async def describe_brokers(self) -> "ClusterInfo":
        """The registered brokers, fenced ones too."""
        from headrace.client.cluster_admin import describe_brokers

        return await describe_brokers(self)

    async def describe_quorum(self) -> "QuorumInfo":
        """Leader, voters and observers of the metadata log."""
        from headrace.client.cluster_admin import describe_quorum

        return await describe_quorum(self)

    async def alter_reassignments(
        self, wanted: "Mapping[TopicPartition, tuple[int, ...] | None]"
    ) -> "dict[TopicPartition, KafkaError | None]":
        """Move partitions to these replicas; None as replicas ends a move."""
        from headrace.client.cluster_admin import alter_reassignments

        return await alter_reassignments(self, wanted)

    async def list_reassignments(self) -> "dict[TopicPartition, Reassignment]":
        """Every partition that is being moved."""
        from headrace.client.cluster_admin import list_reassignments

        return await list_reassignments(self)

    async def elect_leaders(
        self, kind: "Election", partitions: Iterable[TopicPartition] | None = None
    ) -> "dict[TopicPartition, KafkaError | None]":
        """Elect leaders of these partitions, or of all."""
        from headrace.client.cluster_admin import elect_leaders

        return await elect_leaders(self, kind, partitions)

    async def unregister_broker(self, node_id: int) -> None:
        """Make the cluster forget a broker."""
        from headrace.client.cluster_admin import unregister_broker

        await unregister_broker(self, node_id)

    async def add_voter(self, node_id: int, address: str, directory_id: bytes = ZERO_ID) -> None:
        """Let an observer of the metadata log vote."""
        from headrace.client.cluster_admin import add_voter

        await add_voter(self, node_id, address, directory_id)

    async def remove_voter(self, node_id: int, directory_id: bytes = ZERO_ID) -> None:
        """Let a voter of the metadata log vote no more."""
        from headrace.client.cluster_admin import remove_voter

        await remove_voter(self, node_id, directory_id)

    async def describe_acls(self, wanted: "AclFilter") -> "list[AclRule]":
        """The access rules that a filter means."""
        from headrace.client.access_admin import describe_acls

        return await describe_acls(self, wanted)

    async def create_acls(self, rules: "Sequence[AclRule]") -> list[KafkaError | None]:
        """Add access rules; for each None, or why it was refused."""
        from headrace.client.access_admin import create_acls

        return await create_acls(self, rules)

    async def delete_acls(self, filters: "Sequence[AclFilter]") -> "list[list[AclRule] | KafkaError]":
        """Remove access rules; for each filter those that were removed, or why none were."""
        from headrace.client.access_admin import delete_acls

        return await delete_acls(self, filters)

    async def list_transactions(self, states: Sequence[str] = ()) -> "list[TransactionListing]":
        """Transactional ids of the cluster, or those in these states."""
        from headrace.client.admin_txn import list_transactions

        return await list_transactions(self, states)

    async def describe_transaction(self, transactional_id: str) -> "TransactionInfo":
        """One transactional id."""
        from headrace.client.admin_txn import describe_transaction

        return await describe_transaction(self, transactional_id)

    async def abort_transaction(self, transactional_id: str) -> None:
        """Shut the producer of an id out and abort what it has open."""
        from headrace.client.admin_txn import abort_transaction

        await abort_transaction(self, transactional_id)

    async def describe_producers(self, where: TopicPartition) -> "list[ProducerInfo]":
        """The producers of a partition."""
        from headrace.client.admin_txn import describe_producers

        return await describe_producers(self, where)

    async def abort_hanging(self, where: TopicPartition, start_offset: int) -> int:
        """Abort the transaction that began at an offset; its producer's id."""
        from headrace.client.admin_txn import abort_hanging

        return await abort_hanging(self, where, start_offset)

    # -- inside -----------------------------------------------------------------------------------------------------

    async def retried(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """The result of `attempt`, tried again while that may help, for `default.api.timeout.ms`."""
        timeout_ms = self.config.default_api_timeout_ms
        return await with_retries(self.cluster, timeout_ms, attempt, UNKNOWN_TOPIC_TIMEOUT_MS)

    async def _controller_call(self, api: Api, body: Mapping[str, Any], codes: Any) -> Message:
        async def attempt() -> Message:
            connection = await self.cluster.controller()
            reply = await connection.request(api, body)
            if ErrorCode.NOT_CONTROLLER in codes(reply):
                raise KafkaError(ErrorCode.NOT_CONTROLLER, "the controller has moved, or none is active")
            return reply

        return await self.retried(attempt)


def _outcome(name: str, code: int, message: str | None) -> Outcome:
    error = None if code == 0 else KafkaError(error_code(code), message or error_code(code).name)
    return Outcome(name, error)


def _in_order(outcomes: list[Outcome], names: Sequence[str]) -> list[Outcome]:
    """As they were asked for: a broker may answer in any order."""
    return sorted(
        outcomes, key=lambda outcome: names.index(outcome.name) if outcome.name in names else len(names)
    )


def _raise_first(outcomes: Sequence[Outcome], topic: str = "") -> None:
    """Raise the first error there is, with the topic's name before a message of the broker that lacks it."""
    for _, error in outcomes:
        if error is not None and topic not in error.message:
            raise KafkaError(error.code, f"topic {topic!r}: {error.message}")
        if error is not None:
            raise error


def _entry(item: Message) -> ConfigEntry:
    try:
        source = ConfigSource(item.config_source)
    except ValueError:
        source = ConfigSource.UNKNOWN
    return ConfigEntry(item.name, item.value, source, item.read_only, item.is_sensitive, item.documentation)
