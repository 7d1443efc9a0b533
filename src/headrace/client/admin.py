"""Administration: topics, partitions, settings, the cluster.

Owns the admin requests and their typed results. Invariant: a call about several things answers for each of
them; a call about one thing raises. Whole-request failures that can pass (a lost connection, a moved
controller) are tried again until `default.api.timeout.ms`. Called by the command line and `headrace.testing`.
"""

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from headrace.base.errors import ErrorCode, KafkaError
from headrace.client.cluster import Cluster, Node, TopicInfo
from headrace.client.config import admin_config, settings
from headrace.client.connection import Connection
from headrace.client.errors import ClientError, ConfigError, error_code
from headrace.client.retry import with_retries
from headrace.client.transport import Connector
from headrace.wire.apis import Api
from headrace.wire.messages import Message

T = TypeVar("T")


class ResourceType(IntEnum):
    """What a setting belongs to."""

    TOPIC = 2
    BROKER = 4
    BROKER_LOGGER = 8


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


@dataclass(frozen=True, slots=True)
class NewTopic:
    """A topic to create; -1 takes the broker's default."""

    name: str
    partitions: int = -1
    replication_factor: int = -1
    config: Mapping[str, str] = field(default_factory=dict)


class Outcome(NamedTuple):
    """What became of one of several things."""

    name: str
    error: KafkaError | None


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
        return [_outcome(t.name, t.error_code, t.error_message) for t in reply.topics]

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
        return [_outcome(t.name, t.error_code, t.error_message) for t in reply.responses]

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

        return await self._retried(attempt)

    # -- cluster ----------------------------------------------------------------------------------------------------

    async def describe_cluster(self) -> tuple[str | None, int, list[Node]]:
        """The cluster's id, its controller, and its brokers."""

        async def attempt() -> tuple[str | None, int, list[Node]]:
            await self.cluster.describe([])
            nodes = sorted(self.cluster.nodes.values())
            return self.cluster.cluster_id, self.cluster.controller_id, nodes

        return await self._retried(attempt)

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

        return await self._retried(attempt)

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

        await self._retried(attempt)

    async def _owner(self, resource: ConfigResource) -> Connection:
        """Settings of one broker are asked of that broker, others of any."""
        if resource.type is ResourceType.TOPIC or resource.name == "":
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

    # -- inside -----------------------------------------------------------------------------------------------------

    async def _retried(self, attempt: Callable[[], Awaitable[T]]) -> T:
        return await with_retries(self.cluster, self.config.default_api_timeout_ms, attempt)

    async def _controller_call(self, api: Api, body: Mapping[str, Any], codes: Any) -> Message:
        async def attempt() -> Message:
            connection = await self.cluster.controller()
            reply = await connection.request(api, body)
            if ErrorCode.NOT_CONTROLLER in codes(reply):
                raise KafkaError(ErrorCode.NOT_CONTROLLER, "the controller has moved")
            return reply

        return await self._retried(attempt)


def _outcome(name: str, code: int, message: str | None) -> Outcome:
    error = None if code == 0 else KafkaError(error_code(code), message or error_code(code).name)
    return Outcome(name, error)


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
