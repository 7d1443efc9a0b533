"""A broker reduced to what the admin handlers ask of it, and the round trip of a request through the wire's codecs.

Commits are applied at once, or refused, as a test wants it. Bodies go through the encoder and decoder of the version
under test, so a handler that says what its version cannot carry is found out.
"""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from itertools import count
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

from headrace.base.clock import ManualClock
from headrace.base.errors import KafkaError
from headrace.base.settings import BrokerConfig, broker_config
from headrace.cluster.image import BROKER_RESOURCE, EMPTY, ClusterImage, apply
from headrace.cluster.records import BrokerRecord, MetadataRecord
from headrace.consensus.raft.driver import RaftDriver
from headrace.consensus.raft.node import RaftNode
from headrace.consensus.raft.storage import MemoryStorage
from headrace.security.authorizer import ANONYMOUS, Operation, Principal, ResourceType
from headrace.server.context import Peer, RequestContext
from headrace.server.handlers import (
    client_quotas,
    cluster,
    configs,
    identities,
    log_dirs,
    partitions,
    quorum,
    topics,
)
from headrace.server.member import Member
from headrace.server.router import Handler
from headrace.storage.memory import MemoryFileSystem
from headrace.wire.apis import Api
from headrace.wire.messages import Message, decode_request, decode_response, encode_request, encode_response

HANDLERS: dict[Api, Handler] = {
    **topics.HANDLERS,
    **configs.HANDLERS,
    **cluster.HANDLERS,
    **partitions.HANDLERS,
    **quorum.HANDLERS,
    **log_dirs.HANDLERS,
    **identities.HANDLERS,
    **client_quotas.HANDLERS,
}
NODE = 1


class LogSize(NamedTuple):
    topic: str
    partition: int
    size_bytes: int


class Denies:
    """An authorizer that refuses some (operation, resource type, name); a name of None stands for any."""

    def __init__(self, *denied: tuple[Operation, ResourceType, str | None]) -> None:
        self._denied = denied

    def allows(
        self, principal: Principal, host: str, operation: Operation, resource: ResourceType, name: str
    ) -> bool:
        return all(
            (operation, resource) != (each[0], each[1]) or each[2] not in (None, name)
            for each in self._denied
        )


class NoWorld:
    """A world in which a lone node has nobody to send to, and a disk that is done at once."""

    def __init__(self) -> None:
        self.syncs = 0

    def sync(self, ticket: object) -> None:
        self.syncs += 1

    def apply(self, first: int, entries: object) -> None:
        """Nothing is made of it."""


def elected() -> RaftNode:
    """The metadata log of a cluster of one, with one entry: that this node leads."""
    storage, world = MemoryStorage(), NoWorld()
    node = RaftNode(NODE, {NODE: "host1:9001"}, storage, Random(1))
    driver = RaftDriver(node, storage, world)  # type: ignore[arg-type]
    node.tick()
    driver.pump()
    while world.syncs:
        world.syncs -= 1
        driver.synced(None)
    return node


class Desk:
    """The broker that handlers are given."""

    def __init__(
        self, static: Mapping[str, str] | None = None, brokers: int = 1, voters: Sequence[int] = (NODE,)
    ) -> None:
        self.node_id = NODE
        self.cluster_id = "a-cluster-of-its-own-1"
        self.clock = ManualClock(1_700_000_000_000)
        self._static = dict(static or {})
        self._ids = count(1)
        self.refuse_commits: KafkaError | None = None
        self.image: ClusterImage = apply(
            EMPTY, [BrokerRecord(n, f"host{n}", 9000 + n, None, 1) for n in range(1, brokers + 1)]
        )
        self.committed: list[MetadataRecord] = []
        self.log_sizes: list[LogSize] = []
        self.logs = SimpleNamespace(data_dir="memory", fs=MemoryFileSystem(), sizes=lambda: self.log_sizes)
        self.authorizer: Any = Denies()
        quorum = SimpleNamespace(leader=NODE, voters=dict.fromkeys(voters, "host:9000"))
        self.member: Any = Member(
            SimpleNamespace(quorum=quorum),
            None,
            None,
            SimpleNamespace(ask=self._ask),
            None,
        )  # type: ignore[arg-type]

    @property
    def config(self) -> BrokerConfig:
        return broker_config(
            self._static,
            cluster=self.image.config(BROKER_RESOURCE, ""),
            broker=self.image.config(BROKER_RESOURCE, str(NODE)),
        )

    @property
    def metadata(self) -> Any:
        return SimpleNamespace(pending=self.image, quorum=SimpleNamespace(node=elected(), leader=NODE))

    def new_topic_id(self) -> bytes:
        return next(self._ids).to_bytes(16, "big")

    async def commit(self, records: Sequence[MetadataRecord]) -> None:
        if self.refuse_commits is not None and records:
            raise self.refuse_commits
        self.committed += records
        self.image = apply(self.image, records)

    def ask(self, api: Api, version: int, body: Mapping[str, Any] | None = None) -> Message:
        """The decoded reply to a request of one version."""
        request = decode_request(api, version, encode_request(api, version, body or {}), 0)
        peer = Peer(ANONYMOUS, "localhost", self.authorizer, 1)
        context = RequestContext(api, version, 1, "test", peer, 0)
        result = HANDLERS[api](self, context, request)
        if not isinstance(result, Mapping):
            result = asyncio.run(_awaited(result))
        return decode_response(api, version, encode_response(api, version, result), 0)

    async def _ask(self, api: Api, version: int, body: Mapping[str, Any]) -> Message:
        """The reply to a request that the broker itself makes."""
        request = decode_request(api, version, encode_request(api, version, body), 0)
        context = RequestContext(api, version, 1, None, Peer(ANONYMOUS, "", Denies(), 1), 0)
        result: Any = HANDLERS[api](self, context, request)
        return decode_response(api, version, encode_response(api, version, await result), 0)

    def create(self, name: str, partitions: int = 1, **configs: str) -> None:
        """Make a topic that must not be refused; settings with underscores for dots."""
        entries = [{"name": key.replace("_", "."), "value": value} for key, value in configs.items()]
        topic = {"name": name, "num_partitions": partitions, "replication_factor": 1, "configs": entries}
        [result] = self.ask(Api.CREATE_TOPICS, 7, {"topics": [topic], "timeout_ms": 1000}).topics
        assert result.error_code == 0, result.error_message


async def _awaited(result: Awaitable[Mapping[str, Any]]) -> Mapping[str, Any]:
    return await result
