"""One broker: its state, and what handlers may ask of it.

Owns the cluster's image as this broker knows it, the partitions it holds, fetch sessions, producer ids and the
periodic work. Invariant: all of it is touched only on the one event loop; what must not block the loop (fdatasync) is
given to the flusher and comes back to the loop. Handlers call it; `main` puts it together and starts it.
"""

import asyncio
import contextlib
import os
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from headrace.base.clock import Clock, Timer
from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.ids import ID_SIZE, ZERO_ID, format_id
from headrace.base.log import get_logger
from headrace.base.settings import BrokerConfig, TopicConfig, topic_config, usable_broker_config
from headrace.cluster.image import BROKER_RESOURCE, EMPTY, TOPIC_RESOURCE, ClusterImage
from headrace.cluster.records import MetadataRecord
from headrace.replication.partition import Partition
from headrace.server.broker_groups import GroupCoordinator
from headrace.server.broker_replicas import BrokerReplicas, replica_settings
from headrace.server.broker_txn import TransactionCoordinator
from headrace.server.broker_verify import Verifier
from headrace.server.fetch_sessions import FetchSessions
from headrace.server.member import Member
from headrace.server.metadata import MetadataStore
from headrace.server.peers import Peers
from headrace.server.producer_ids import ProducerIds
from headrace.server.session import Session
from headrace.storage.flusher import Flusher
from headrace.storage.log import PartitionLog
from headrace.storage.manager import LogManager, Wanted

TICK_MS = 500
PARTITIONS_CHANGED_A_TURN = 20
OPENING_TURN_MS = 20.0
"""How long logs are opened at a start before the loop gets its turn."""

logger = get_logger(__name__)


class Broker:
    """The state of one broker process."""

    def __init__(
        self,
        config: BrokerConfig,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        logs: LogManager,
        flusher: Flusher[PartitionLog],
        metadata: MetadataStore,
        cluster_id: str,
    ) -> None:
        self.config = config
        self.clock = clock
        self.logs = logs
        self.metadata = metadata
        self.node_id = config.node_id
        self.cluster_id = cluster_id
        self._loop = loop
        self._flusher = flusher
        self.replication = BrokerReplicas(self, loop)
        self.replicas = self.replication.replicas
        self._partitions = self.replicas.table
        self.fetch_sessions = FetchSessions(
            config.max_incremental_fetch_session_cache_slots, lambda: random.randrange(1, 2**31)
        )
        self.producer_ids = ProducerIds(self._reserve_producer_ids)
        self.peers: Peers | None = None
        """Links to other brokers, where there are others."""
        self.groups = GroupCoordinator(self)
        self.transactions = TransactionCoordinator(self)
        self.verifier = Verifier(self)
        self._following = False
        self.on_config: Callable[[BrokerConfig], None] = lambda config: None
        """Called when settings changed while running, for parts that handlers do not see."""
        self._ticker: Timer | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._unflushed: dict[Session, None] = {}

    # -- life ----------------------------------------------------------------------------------------------------------

    member: Member
    """How it reaches the rest of its cluster; given to it by the process before it starts."""

    async def start(self) -> None:
        """Take up the partitions that the metadata log assigns here."""
        self.peers = self.member.peers
        self.replication.connect(self.peers, self.member)
        await self._open_logs()
        image = self.image  # of now: it moved on while logs were opened
        self._reconfigure(image)
        self.replication.load()
        self.replicas.apply(EMPTY, image)
        self._follow_image()
        self.logs.put_aside_strays()
        self.logs.limit_offset = self._retention_limit
        self.metadata.on_change = self._on_change
        self.groups.apply(EMPTY, self.image)
        self.transactions.apply(self.image)
        self._tick()

    async def _open_logs(self) -> None:
        """Open what is here, a slice a turn of the loop: heartbeats and Raft's elections go on meanwhile."""
        image = self.image
        self._reconfigure(image)
        wanted = [
            Wanted(topic.name, index, topic.id, self.topic_config(topic.name, image))
            for topic in image.topics.values()
            for index, partition in enumerate(topic.partitions)
            if self.node_id in partition.replicas
        ]
        turn_ms = self.clock.monotonic_ms()
        for _ in self.logs.loading(wanted):
            if self.clock.monotonic_ms() - turn_ms >= OPENING_TURN_MS:
                await asyncio.sleep(0)
                turn_ms = self.clock.monotonic_ms()
        for want in wanted:
            topic = self.image.topics.get(want.topic)
            if topic is None or topic.id != want.topic_id or not self.is_replica_here(*want[:2]):
                self.logs.delete(*want[:2])  # deleted, or moved away, while it was opened

    async def stop(self) -> None:
        """Stop periodic work and whatever still runs for a client; put aside what was deleted."""
        if self._ticker is not None:
            self._ticker.cancel()
        self.groups.stop()
        self.transactions.stop()
        self.logs.cleaner.stop()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.replication.stop()
        self.logs.leave_the_rest()
        while self._partitions.delete_some(PARTITIONS_CHANGED_A_TURN):
            pass

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine of a request beside the others."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _tick(self) -> None:
        self._partitions.retry(self.image)
        self.logs.tick(self.clock.now_ms())
        self.replication.tick()
        self._ticker = self._loop.call_later(TICK_MS / 1000, self._tick)

    # -- what handlers ask ---------------------------------------------------------------------------------------------

    @property
    def image(self) -> ClusterImage:
        """What is committed."""
        return self.metadata.image

    def commit(self, records: Sequence[MetadataRecord]) -> "asyncio.Future[None]":
        """Append metadata records; done when they are committed and this broker has acted on them."""
        return self.metadata.commit(records)

    async def _reserve_producer_ids(self) -> tuple[int, int]:
        return await self.member.reserve_producer_ids()

    def new_topic_id(self) -> bytes:
        """A random id. None that begins with a hyphen in text, because tools would read it as an option."""
        while True:
            made = os.urandom(ID_SIZE)
            if not format_id(made).startswith("-") and made != ZERO_ID:
                return made

    def partition(self, topic: str, index: int) -> Partition:
        """A partition that this broker leads, or KafkaError."""
        partition = self.replica(topic, index)
        if not partition.is_leader:
            partition.check_leader()
        return partition

    def replica(self, topic: str, index: int) -> Partition:
        """A partition that this broker holds, as leader or follower, or KafkaError."""
        try:
            return self._partitions.get(topic, index)
        except KafkaError as error:
            if error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION and self._is_elsewhere(topic, index):
                raise KafkaError(ErrorCode.NOT_LEADER_OR_FOLLOWER, "no replica is here") from None
            raise

    def _is_elsewhere(self, topic: str, index: int) -> bool:
        found = self.image.topics.get(topic)
        return found is not None and 0 <= index < len(found.partitions)

    def is_replica_here(self, topic: str, index: int) -> bool:
        """Whether the image places a replica of the partition on this broker."""
        return (
            self._is_elsewhere(topic, index)
            and self.node_id in self.image.topics[topic].partitions[index].replicas
        )

    def is_alive(self, node_id: int) -> bool:
        """Whether a broker is registered and not fenced."""
        broker = self.image.brokers.get(node_id)
        return broker is not None and not broker.fenced

    async def when_deleted_everywhere(
        self, waiting: Sequence[tuple[dict[str, Any], Partition]], timeout_ms: int, body: dict[str, Any]
    ) -> dict[str, Any]:
        """`body`, once the live replicas begin where their leaders do; what is late gets an error in its answer."""
        moved = asyncio.Event()
        for _, partition in waiting:
            partition.when_deleted(moved.set)
        deadline = self._loop.time() + timeout_ms / 1000
        left = list(waiting)
        try:
            while left and self._loop.time() < deadline:
                moved.clear()
                left = [each for each in left if not _settle_deletion(*each, self.is_alive)]
                if left:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(moved.wait(), max(deadline - self._loop.time(), 0))
        finally:
            for _, partition in waiting:
                partition.not_waiting(moved.set)
        for answer, _ in left:
            answer |= {"error_code": ErrorCode.REQUEST_TIMED_OUT, "low_watermark": -1}
        return body

    def flush(self, partition: Partition) -> None:
        """Have the partition's log made durable; who waits for it is told by the partition."""
        self._flusher.request(partition.log)

    def on_flushed(self, log: PartitionLog) -> None:
        """The flusher is done with a log."""
        partition = self._partitions.find(log.topic, log.partition)
        if partition is not None and partition.log is log:
            self.replicas.on_flushed(partition)

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call back on the loop in its next turn."""
        self._loop.call_soon(callback)

    def flush_later(self, session: Session) -> None:
        """Have a session send what it was answered, once, when this turn's answers are all given."""
        if not self._unflushed:
            self._loop.call_soon(self._flush_sessions)
        self._unflushed[session] = None

    def _flush_sessions(self) -> None:
        sessions, self._unflushed = self._unflushed, {}
        for session in sessions:
            session.flush()

    def call_later(self, delay_ms: float, callback: Callable[[], None]) -> Timer:
        """Call back on the loop after a while, unless the timer is cancelled."""
        return self._loop.call_later(delay_ms / 1000, callback)

    # -- following the image -------------------------------------------------------------------------------------------

    def topic_config(self, topic: str, image: ClusterImage | None = None) -> TopicConfig:
        """A topic's effective settings."""
        return topic_config((image or self.image).config(TOPIC_RESOURCE, topic), self.config)

    def _on_change(self, old: ClusterImage, new: ClusterImage) -> None:
        # Who leads and who is in sync comes first: a setting may say how many of these it takes.
        self.replicas.apply(old, new)
        if old.configs is not new.configs:
            self._reconfigure(new)
        if old.topics is not new.topics:
            self._follow_image()
            self.groups.apply(old, new)
            self.transactions.apply(new)

    def _reconfigure(self, image: ClusterImage) -> None:
        """Take up settings that changed while running, for the broker and for each topic, as far as they can be."""
        self.config, left_out = usable_broker_config(
            self.config.static_values,
            cluster=image.config(BROKER_RESOURCE, ""),
            broker=image.config(BROKER_RESOURCE, str(self.node_id)),
        )
        for name, why in left_out:
            logger.error("a setting cannot be applied here", extra={"fields": {"setting": name, "why": why}})
        self.logs.reconfigure(self.config)
        self.replicas.configure(replica_settings(self.config))
        self.on_config(self.config)
        for partition in self._partitions:
            config = self.topic_config(partition.topic, image)
            if partition.log.config is not config:
                partition.log.reconfigure(config)

    def _follow_image(self) -> None:
        """Delete what the image no longer has and open what it brought, a slice a turn of the loop."""
        more = self._partitions.delete_some(PARTITIONS_CHANGED_A_TURN)
        more |= self._partitions.open_some(PARTITIONS_CHANGED_A_TURN)
        if more and not self._following:
            self._following = True
            self._loop.call_soon(self._follow_further)

    def _follow_further(self) -> None:
        self._following = False
        self._follow_image()

    def open_log(self, topic: str, index: int, topic_id: bytes) -> PartitionLog:
        """The log of a partition that the image places here."""
        return self.logs.create(topic, index, topic_id, self.topic_config(topic))

    def _retention_limit(self, log: PartitionLog) -> int:
        """Retention removes nothing that readers may not see yet."""
        partition = self._partitions.find(log.topic, log.partition)
        return log.log_start_offset if partition is None else partition.high_watermark


def _settle_deletion(answer: dict[str, Any], partition: Partition, is_alive: Callable[[int], bool]) -> bool:
    """Whether nothing is left to wait for: the replicas have done it, or this broker leads them no longer."""
    if not partition.is_leader:
        answer |= {"error_code": ErrorCode.NOT_LEADER_OR_FOLLOWER, "low_watermark": -1}
        return True
    wanted: int = answer["low_watermark"]
    return partition.low_watermark(is_alive) >= wanted
