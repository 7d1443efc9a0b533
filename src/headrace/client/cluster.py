"""What a client knows of the cluster, and its connection to each broker.

Owns metadata (brokers, topics, leaders, epochs, topic ids) and one connection a broker. Invariants: metadata
never goes back to an older leader epoch of the same topic; only one refresh runs at a time, and all who asked
share it; a broker that refuses connections is left alone for a time that grows with jitter; when no known
broker answers, the bootstrap addresses are tried again. Called by producer, consumer and admin, each of which
has its own.
"""

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.ids import ZERO_ID
from headrace.base.log import get_logger
from headrace.client.config import Address, CommonConfig
from headrace.client.connection import Connection
from headrace.client.errors import Closed, Disconnected, error_code
from headrace.client.topics import TopicPartition
from headrace.client.transport import Connector, socket_connector
from headrace.wire.apis import Api
from headrace.wire.messages import Message

TOPICS_TRACKED_MAX = 10_000
NO_NODE = -1
SHARED = ""  # the purpose of a connection that serves all requests which ask for no connection of their own
JITTER = 0.2
FINISH_TIMEOUT_MS = 10_000
# Before anything has ever answered, an address that refuses is most likely wrong: people should hear it soon. Who knows
# that it is right, because another process reached it, sets the cluster's own.
FIRST_CONTACT_TIMEOUT_MS = 3_000

_log = get_logger(__name__)


class Node(NamedTuple):
    """A broker as metadata names it."""

    node_id: int
    host: str
    port: int
    rack: str | None


class PartitionInfo(NamedTuple):
    """One partition as metadata describes it."""

    partition: int
    leader: int
    leader_epoch: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    offline: tuple[int, ...]
    error: ErrorCode


class TopicInfo(NamedTuple):
    """One topic as metadata describes it."""

    name: str
    topic_id: bytes
    internal: bool
    partitions: dict[int, PartitionInfo]
    error: ErrorCode


class Backoff:
    """Waits that grow by doubling, with jitter, so that clients that failed together do not return together."""

    def __init__(self, first_ms: int, max_ms: int, source: random.Random) -> None:
        self._first_ms, self._max_ms, self._random = first_ms, max_ms, source

    def wait_ms(self, failures: int) -> float:
        """How long to wait after this many failures in a row."""
        if failures <= 0:
            return 0.0
        base_ms = min(self._first_ms * 2.0 ** min(failures - 1, 30), float(self._max_ms))
        return base_ms * self._random.uniform(1 - JITTER, 1 + JITTER)


class _Link:
    """The connection to one address for one purpose, made when needed and made again when lost."""

    def __init__(self, address: Address, purpose: str) -> None:
        self.address = address
        self.purpose = purpose
        self.connection: Connection | None = None
        self.opening: asyncio.Task[Connection] | None = None
        self.failures = 0
        self.not_before_s = 0.0


class Cluster:
    """Metadata and connections of one client."""

    def __init__(
        self,
        config: CommonConfig,
        *,
        connector: Connector | None = None,
        random_source: random.Random | None = None,
    ) -> None:
        self.config = config
        self.random = random_source or random.Random()
        self.nodes: dict[int, Node] = {}
        self.topics: dict[str, TopicInfo] = {}
        self.controller_id = NO_NODE
        self.cluster_id: str | None = None
        self.last_error: Exception | None = None
        self.first_contact_timeout_ms = FIRST_CONTACT_TIMEOUT_MS
        self.backoff = Backoff(config.retry_backoff_ms, config.retry_backoff_max_ms, self.random)
        self._reconnect = Backoff(config.reconnect_backoff_ms, config.reconnect_backoff_max_ms, self.random)
        self._connector = connector or socket_connector(
            timeout_ms=config.socket_connection_setup_timeout_ms,
            receive_buffer_bytes=config.receive_buffer_bytes,
            send_buffer_bytes=config.send_buffer_bytes,
        )
        self._links: dict[tuple[Address, str], _Link] = {}
        self._names: dict[bytes, str] = {}
        self._tracked: dict[str, None] = {}
        self._refresh: asyncio.Task[None] | None = None
        self._refreshed_s = float("-inf")
        self._closed = False
        self.on_partitions_changed: Callable[[str], None] = lambda topic: None

    # -- metadata ---------------------------------------------------------------------------------------------------

    def leader(self, partition: TopicPartition) -> tuple[int, int] | None:
        """The leader's node id and epoch, when they are known."""
        topic = self.topics.get(partition.topic)
        info = topic.partitions.get(partition.partition) if topic is not None else None
        return None if info is None or info.leader == NO_NODE else (info.leader, info.leader_epoch)

    def topic_id(self, name: str) -> bytes:
        """The topic's id, or zeros when it is not known."""
        topic = self.topics.get(name)
        return topic.topic_id if topic is not None else ZERO_ID

    def topic_name(self, topic_id: bytes) -> str | None:
        """The name of the topic with this id."""
        return self._names.get(topic_id)

    def track(self, name: str) -> None:
        """Include this topic in every refresh from now on."""
        if name not in self._tracked:
            if len(self._tracked) >= TOPICS_TRACKED_MAX:
                oldest = next(iter(self._tracked))
                del self._tracked[oldest]
                self._forget(oldest)
            self._tracked[name] = None

    def stale(self, now_s: float) -> bool:
        """Whether metadata is older than it may be."""
        return (now_s - self._refreshed_s) * 1000 > self.config.metadata_max_age_ms

    async def refresh(self, *, create: bool = False) -> None:
        """Ask the cluster about all tracked topics. Raises when no broker answers; shared by all who ask meanwhile."""
        if self._refresh is None or self._refresh.done():
            self._refresh = asyncio.create_task(self._refresh_once(create))
            self._refresh.add_done_callback(_retrieve)
        await asyncio.shield(self._refresh)

    async def describe(self, names: Iterable[str] | None) -> Message:
        """The cluster's metadata about these topics (None: all of them), as it answers; also learned."""
        connection = await self.any_connection()
        topics = None if names is None else [{"name": name} for name in names]
        reply = await connection.request(Api.METADATA, {"topics": topics, "allow_auto_topic_creation": False})
        self._learn(reply)
        return reply

    async def _refresh_once(self, create: bool) -> None:
        try:
            connection = await self.any_connection()
            topics = [{"name": name} for name in self._tracked]
            body = {"topics": topics, "allow_auto_topic_creation": create}
            self._learn(await connection.request(Api.METADATA, body))
        except KafkaError as error:
            self.last_error = error
            raise
        self.last_error = None
        self._refreshed_s = asyncio.get_running_loop().time()

    def learn_leader(
        self, partition: TopicPartition, leader: int, epoch: int, nodes: Sequence[Message]
    ) -> bool:
        """Take a leader that an answer named in passing. Returns whether it is news."""
        topic = self.topics.get(partition.topic)
        info = topic.partitions.get(partition.partition) if topic is not None else None
        if topic is None or info is None or leader < 0 or epoch <= info.leader_epoch:
            return False
        for node in nodes:
            self.nodes[node.node_id] = Node(node.node_id, node.host, node.port, node.rack)
        if leader not in self.nodes:
            return False
        topic.partitions[partition.partition] = info._replace(leader=leader, leader_epoch=epoch)
        return True

    def _learn(self, reply: Message) -> None:
        if reply.brokers:
            self.nodes = {b.node_id: Node(b.node_id, b.host, b.port, b.rack) for b in reply.brokers}
        self.controller_id = reply.controller_id
        self.cluster_id = reply.cluster_id
        for topic in reply.topics:
            if topic.name is not None:
                self._learn_topic(topic)

    def _learn_topic(self, topic: Message) -> None:
        topic_id = bytes(topic.topic_id)
        known = self.topics.get(topic.name)
        same = known is not None and known.topic_id == topic_id
        if known is not None and not same:
            self._names.pop(known.topic_id, None)
        partitions = {}
        for p in topic.partitions:
            info = PartitionInfo(
                p.partition_index,
                p.leader_id,
                p.leader_epoch,
                tuple(p.replica_nodes),
                tuple(p.isr_nodes),
                tuple(p.offline_replicas),
                error_code(p.error_code),
            )
            before = known.partitions.get(p.partition_index) if known is not None and same else None
            # A broker that lags behind may still name the leader of an older epoch.
            older = before is not None and -1 < info.leader_epoch < before.leader_epoch
            partitions[p.partition_index] = before if before is not None and older else info
        code = error_code(topic.error_code)
        if known is not None and (not same or len(known.partitions) != len(partitions)):
            self.on_partitions_changed(topic.name)
        self.topics[topic.name] = TopicInfo(topic.name, topic_id, topic.is_internal, partitions, code)
        if topic_id != ZERO_ID:
            self._names[topic_id] = topic.name

    def _forget(self, name: str) -> None:
        topic = self.topics.pop(name, None)
        if topic is not None:
            self.on_partitions_changed(name)
            self._names.pop(topic.topic_id, None)

    # -- connections ------------------------------------------------------------------------------------------------

    def ready_connection(self, node_id: int, purpose: str = SHARED) -> Connection | None:
        """The connection to this broker if it is open already."""
        node = self.nodes.get(node_id)
        link = self._links.get(((node.host, node.port), purpose)) if node is not None else None
        if link is None or link.connection is None or not link.connection.usable:
            return None
        return link.connection

    async def connection(self, node_id: int, purpose: str = SHARED) -> Connection:
        """A connection to this broker, opened if need be. Raises Disconnected."""
        node = self.nodes.get(node_id)
        if node is None:
            raise Disconnected(f"broker {node_id} is not in the cluster's metadata")
        return await self._connect((node.host, node.port), purpose)

    async def own_connection(self, address: Address, purpose: str) -> Connection:
        """A connection for one purpose alone: its requests neither wait behind others nor hold them up."""
        return await self._connect(address, purpose)

    async def controller(self) -> Connection:
        """A connection to the controller (any broker that passes requests on to it will do)."""
        if self.controller_id == NO_NODE or self.controller_id not in self.nodes:
            await self.describe([])
        if self.controller_id in self.nodes:
            return await self.connection(self.controller_id)
        return await self.any_connection()

    async def any_connection(self) -> Connection:
        """A connection to whichever broker answers: an open one first, then known brokers, then bootstrap."""
        if self._closed:
            raise Closed("the client is closed")
        known = [(node.host, node.port) for node in self.nodes.values()]
        opened = [
            link.connection
            for link in self._links.values()
            if link.purpose == SHARED and link.connection and link.connection.usable
        ]
        if opened:
            return min(opened, key=lambda connection: connection.in_flight)
        self.random.shuffle(known)
        addresses = [*known, *(a for a in self.config.bootstrap_servers if a not in known)]
        failure: KafkaError | None = None
        # Those that may be tried at once come first; a stable sort keeps known brokers before bootstrap addresses.
        for address in sorted(
            addresses,
            key=lambda a: self._links[a, SHARED].not_before_s if (a, SHARED) in self._links else 0.0,
        ):
            try:
                return await self._connect(address)
            except KafkaError as error:
                failure = failure or error
        assert failure is not None
        raise failure

    async def _connect(self, address: Address, purpose: str = SHARED) -> Connection:
        if self._closed:
            raise Closed("the client is closed")
        link = self._links.get((address, purpose))
        if link is None:
            self._drop_unused_links()
            link = self._links[address, purpose] = _Link(address, purpose)
        if link.connection is not None and link.connection.usable:
            return link.connection
        if link.opening is None or link.opening.done():
            link.opening = asyncio.create_task(self._open(link))
            link.opening.add_done_callback(_retrieve)
        return await asyncio.shield(link.opening)

    async def _open(self, link: _Link) -> Connection:
        loop = asyncio.get_running_loop()
        if link.connection is not None and link.failures == 0:
            # Lost after it had worked: one wait of the shortest kind, then as for any other failure.
            link.connection = None
            link.failures = 1
            link.not_before_s = loop.time() + self._reconnect.wait_ms(1) / 1000
        delay_s = link.not_before_s - loop.time()
        if delay_s > 0:
            await asyncio.sleep(delay_s)
        host, port = link.address
        connection = Connection(
            host,
            port,
            client_id=self.config.client_id,
            connector=self._connector,
            timeout_ms=self.config.request_timeout_ms,
            handshake_timeout_ms=self.config.socket_connection_setup_timeout_ms,
        )
        try:
            await connection.open()
        except KafkaError as error:
            link.failures += 1
            link.not_before_s = loop.time() + self._reconnect.wait_ms(link.failures) / 1000
            self.last_error = error
            _log.debug(
                "cannot connect", extra={"fields": {"host": host, "port": port, "reason": error.message}}
            )
            raise
        if self._links.get((link.address, link.purpose)) is not link:
            connection.close()  # its address was forgotten meanwhile: nobody would ever close it
            raise Disconnected(f"{host}:{port} is no broker of the cluster any more")
        link.failures = 0
        link.connection = connection
        return connection

    def _drop_unused_links(self) -> None:
        """Forget addresses that are neither a broker's nor a bootstrap address, so that the table cannot grow."""
        wanted = {(n.host, n.port) for n in self.nodes.values()} | set(self.config.bootstrap_servers)
        for place in [p for p in self._links if p[0] not in wanted]:
            link = self._links.pop(place)
            if link.connection is not None:
                link.connection.close()

    async def close(self) -> None:
        """Close all connections; later calls raise Closed."""
        self._closed = True
        tasks: list[asyncio.Task[Any]] = [
            link.opening for link in self._links.values() if link.opening is not None
        ]
        if self._refresh is not None:
            tasks.append(self._refresh)
        for task in tasks:
            task.cancel()
        open_ones: list[Connection] = []
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
            open_ones += [link.connection for link in self._links.values() if link.connection is not None]
            await asyncio.gather(*(connection.finish(FINISH_TIMEOUT_MS) for connection in open_ones))
        finally:  # a close that is cancelled closes all the same
            for link in self._links.values():
                if link.connection is not None:
                    link.connection.close()


def _retrieve(task: "asyncio.Task[Any]") -> None:
    """Mark a failure as seen: all who waited may have been cancelled."""
    if not task.cancelled():
        task.exception()
