"""The replicas of a broker on its loop, its links and its disk: the edge around `replication.replicas`.

Owns the timer that replication asked for, the file of high watermarks, and the way of a fetch to another broker and
back. Invariant: what comes back is handed to `Replicas` in the turn in which it arrives, so that a follower's answer,
the append and the next question are one turn of the loop. Made by the broker; `connect` gives it the links and the way
to the controller, which a broker alone does not have.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from headrace.base.clock import Timer
from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.log import get_logger
from headrace.base.settings import BrokerConfig
from headrace.cluster.partition_control import IsrProposal
from headrace.replication.fetcher import FetchLimits
from headrace.replication.isr import Answered, Controller
from headrace.replication.partition import Partition
from headrace.replication.replicas import Replicas, ReplicaSettings
from headrace.replication.serving import FetchReply
from headrace.server.peers import Lane, Peers
from headrace.storage.checkpoints import OffsetCheckpoint, Offsets
from headrace.wire.apis import Api
from headrace.wire.fetch import FetchRequest
from headrace.wire.fetch_replica import VERSION, decode_fetch_reply, encode_fetch
from headrace.wire.primitives import Malformed

if TYPE_CHECKING:
    from headrace.server.broker import Broker

HIGH_WATERMARKS_NAME = "replication-offset-checkpoint"
ANSWER_TIMEOUT_MS = 10_000
HEARTBEATS_MISSED = 2  # after so many a leader may have been deposed without knowing
"""How long a leader may be silent beyond the time a fetch waits there, before the connection is given up."""
RACK_AWARE = "RackAwareReplicaSelector"

logger = get_logger(__name__)


class BrokerReplicas:
    """See the module."""

    def __init__(self, broker: "Broker", loop: asyncio.AbstractEventLoop) -> None:
        self._broker = broker
        self._loop = loop
        self._clock = broker.clock
        self._peers: Peers | None = None
        self._controller: Controller | None = None
        self._timer: Timer | None = None
        self._timer_ms = 0.0
        self._checkpoint = OffsetCheckpoint(broker.logs.fs, HIGH_WATERMARKS_NAME)
        self._known: Offsets = {}
        self._written: Offsets = {}
        self._written_ms = self._clock.monotonic_ms()
        self._writing = False
        self.replicas = Replicas(
            broker.node_id,
            self,
            self,
            broker.open_log,
            broker.logs.delete,
            replica_settings(broker.config),
            lambda topic, index: self._known.get((topic, index), 0),
        )

    def load(self) -> None:
        """Read what the process before this one wrote."""
        self._known = self._checkpoint.read()
        self._written = dict(self._known)

    def connect(self, peers: Peers, controller: Controller) -> None:
        """There are other brokers, and this is the way to them."""
        self._peers = peers
        self._controller = controller

    def stop(self) -> None:
        """Follow nobody any more, and write down the high watermarks."""
        if self._timer is not None:
            self._timer.cancel()
        self._peers = None
        try:
            self._checkpoint.write(self._high_watermarks())
        except OSError as error:
            logger.error("high watermarks cannot be written", extra={"fields": {"why": str(error)}})

    # -- what replication asks of the world ----------------------------------------------------------------------------

    def now_ms(self) -> float:
        return self._clock.monotonic_ms()

    def wall_ms(self) -> int:
        return self._clock.now_ms()

    def defer(self, work: Callable[[], None]) -> None:
        self._loop.call_soon(work)

    def wake_at(self, at_ms: float) -> None:
        if self._timer is not None:
            if self._timer_ms <= at_ms:
                return
            self._timer.cancel()
        self._timer_ms = at_ms
        self._timer = self._loop.call_later(max(at_ms - self.now_ms(), 0) / 1000, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.replicas.tick()

    def flush(self, partition: Partition) -> None:
        self._broker.flush(partition)

    def truncated(self, partition: Partition) -> None:
        self._broker.logs.truncated(partition.log)

    def send_fetch(self, leader: int, number: int, request: FetchRequest) -> None:
        peers, replicas = self._peers, self.replicas
        if peers is None:
            return  # a broker that is stopping, or alone with the replicas of others: nobody is there to ask

        def done(view: memoryview | None, error: KafkaError | None) -> None:
            if view is None:
                replicas.lost(leader, number)
                return
            try:
                code, session_id, topics = decode_fetch_reply(view)
            except Malformed as malformed:
                logger.error(
                    "a leader's reply cannot be read",
                    extra={"fields": {"leader": leader, "why": str(malformed)}},
                )
                replicas.lost(leader, number)
                return
            replicas.replied(leader, number, FetchReply(ErrorCode(code), session_id, topics))

        timeout_ms = request.max_wait_ms + ANSWER_TIMEOUT_MS
        link = peers.link(leader, Lane.FETCH)
        link.call(Api.FETCH, VERSION, [encode_fetch(request)], done, timeout_ms)

    def alter_partitions(self, proposals: Sequence[IsrProposal], answered: Answered) -> None:
        if self._controller is None:
            answered(None)
        else:
            self._controller.alter_partitions(proposals, answered)

    # -- periodic work -------------------------------------------------------------------------------------------------

    def _is_heard(self, within_ms: float) -> bool:
        """Whether the controller is known to have counted on this broker so lately."""
        heard_ms = self._broker.member.registration.heard_ms
        return heard_ms is not None and self.now_ms() - heard_ms <= within_ms

    @property
    def is_in_doubt(self) -> bool:
        """Whether others may lead by now what is led here: heartbeats are overdue, as after a pause of the process."""
        return not self._is_heard(HEARTBEATS_MISSED * self._broker.config.broker_heartbeat_interval_ms)

    def tick(self) -> None:
        """What is due: lagging followers, and the high watermarks for the next start."""
        self.replicas.tick()
        self.replicas.hear_controller(self._is_heard(self._broker.config.broker_session_timeout_ms))
        interval_ms = self._broker.config.replica_high_watermark_checkpoint_interval_ms
        if self._writing or self.now_ms() - self._written_ms < interval_ms:
            return
        self._written_ms = self.now_ms()
        current = self._high_watermarks()
        if current == self._written:
            return

        def write() -> None:
            self._checkpoint.write(current, durable=False)

        def written(error: Exception | None) -> None:
            self._writing = False
            if error is None:
                self._written = current
            else:
                logger.error("high watermarks cannot be written", extra={"fields": {"why": str(error)}})

        self._writing = self._broker.logs.submit(write, written)

    def _high_watermarks(self) -> Offsets:
        """Those of partitions with more than one replica: one that is alone has its own log's end."""
        found = {(p.topic, p.index): p.high_watermark for p in self.replicas if len(p.replicas) > 1}
        for key, offset in self._known.items():
            if key not in found and self._broker.is_replica_here(*key):
                found[key] = offset  # not opened yet
        return found


def replica_settings(config: BrokerConfig) -> ReplicaSettings:
    """What replication reads of the broker's settings."""
    return ReplicaSettings(
        lag_max_ms=config.replica_lag_time_max_ms,
        limits=FetchLimits(
            config.replica_fetch_wait_max_ms,
            config.replica_fetch_response_max_bytes,
            config.replica_fetch_max_bytes,
        ),
        leader_rate=config.leader_replication_throttled_rate,
        follower_rate=config.follower_replication_throttled_rate,
        eager=is_rack_aware(config),
    )


def is_rack_aware(config: BrokerConfig) -> bool:
    """Whether consumers are sent to replicas in their own rack."""
    return (config.replica_selector_class or "").endswith(RACK_AWARE)
