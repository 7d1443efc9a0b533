"""The replicas of one broker: leaders that serve followers, followers that fetch, and the image that says who is who.

Owns the table of partitions, the sessions of followers here, the fetchers to other leaders, and the queue of ISR
changes. Invariants: a partition is in at most one fetcher, that of the leader of its newest image; every change of role
takes effect in the turn that brings the image; a follower that stands outside the ISR is looked at again when it moves,
when any broker's registration changes, and from time to time, so that none is forgotten because nothing happens.

Pure, as its parts are: time is a function, the network, the controller and the timer are given (`Edge`). The broker
runs it on its loop and real connections; a simulator runs several on one clock.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.log import get_logger
from headrace.base.settings_types import LONG_MAX
from headrace.cluster.image import EMPTY, ClusterImage
from headrace.cluster.partition_control import ANY_EPOCH, IsrProposal
from headrace.replication.damage import find_damage, put_aside
from headrace.replication.fetcher import Fetcher, FetchLimits
from headrace.replication.follower import Follower
from headrace.replication.isr import Controller, IsrChanges
from headrace.replication.partition import Partition
from headrace.replication.serving import FetchReply, Reply, Session, Sessions
from headrace.replication.table import OpenLog, PartitionTable
from headrace.replication.throttle import Throttle, is_named
from headrace.wire.fetch import FetchRequest

logger = get_logger(__name__)

ISR_CHECK_MS_MAX = 2_000
"""How often leaders look for followers that lag, at the least; more often when the time a follower has is short."""


HELD_MS = 100
"""When a follower that a rate held back is looked at again."""


class ReplicaSettings(NamedTuple):
    """What the broker's settings say."""

    lag_max_ms: int
    limits: FetchLimits
    leader_rate: int = LONG_MAX
    """Bytes a second that throttled replicas are served, and below, fetched."""
    follower_rate: int = LONG_MAX
    eager: bool = False
    """Consumers may read from followers, so these hear of each high watermark at once."""


class Edge(Protocol):
    """What replicas need of the world."""

    def now_ms(self) -> float:
        """Time that never goes back."""
        ...

    def wall_ms(self) -> int:
        """Time as people have it."""
        ...

    def defer(self, work: Callable[[], None], /) -> None:
        """Do it at the end of this turn of the loop."""
        ...

    def wake_at(self, at_ms: float, /) -> None:
        """Call `tick` at this time at the latest."""
        ...

    def flush(self, partition: Partition, /) -> None:
        """Have a partition's log made durable; `on_flushed` is called after."""
        ...

    def truncated(self, partition: Partition, /) -> None:
        """A partition's log was cut: no crash may now find it marked as good past its end."""
        ...

    def send_fetch(self, leader: int, number: int, request: FetchRequest, /) -> None:
        """Send a fetch to another broker; `replied` or `lost` is called with its number."""
        ...


class Replicas:
    """See the module."""

    def __init__(
        self,
        node_id: int,
        edge: Edge,
        controller: Controller,
        open_log: OpenLog,
        delete_log: Callable[[str, int], None],
        settings: ReplicaSettings,
        known_end: Callable[[str, int], int] = lambda topic, index: 0,
    ) -> None:
        self.node_id = node_id
        self._edge = edge
        self._image = EMPTY
        self._settings = settings
        self.table = PartitionTable(
            node_id,
            open_log,
            delete_log,
            on_role=self._on_role,
            on_drop=self._on_drop,
            known_end=known_end,
            now_ms=edge.now_ms,
        )
        self._sessions = Sessions(self, edge.defer)
        self._controller = controller
        self._isr = IsrChanges(controller)
        self._fetchers: dict[int, Fetcher] = {}
        self._leader_of: dict[tuple[bytes, int], int] = {}
        self._pump_due: set[int] = set()
        self._pumping = False
        self._sending_isr = False
        self._checked_ms = 0.0
        self._unmended: dict[Partition, None] = {}
        """Damaged replicas whose disk did not let the damage be put aside: they follow nobody until it does."""
        self._alone = False
        self._served, self._fetched = Throttle(), Throttle()
        self.configure(settings)

    def __iter__(self) -> Iterator[Partition]:
        return iter(self.table)

    def configure(self, settings: ReplicaSettings) -> None:
        """The broker's settings changed."""
        self._settings = settings
        self._sessions.eager = settings.eager
        self._served.set_rate(settings.leader_rate, self._edge.now_ms())
        self._fetched.set_rate(settings.follower_rate, self._edge.now_ms())
        for fetcher in self._fetchers.values():
            fetcher.limits = settings.limits

    # -- the image -----------------------------------------------------------------------------------------------------

    def apply(self, old: ClusterImage, new: ClusterImage) -> None:
        """Be what the new image says."""
        self._image = new
        if old.topics is not new.topics:
            self.table.apply(old, new)
        if old.brokers is not new.brokers:
            self._sessions.keep_only(new.brokers)
            self._check_isr(self._edge.now_ms())
            self._pump_due.update(self._fetchers)
        self._pump_soon()

    def _on_role(self, partition: Partition) -> None:
        """A partition has another leader, or another epoch of the same."""
        partition.on_trouble = self._on_trouble
        if not self._is_sound(partition):
            self._unfollow(partition)
            return
        leader = partition.leader
        self._unfollow(partition, but=leader)
        if leader >= 0 and leader != self.node_id:
            fetcher = self._fetchers.get(leader)
            if fetcher is None:
                fetcher = self._fetchers[leader] = Fetcher(
                    leader,
                    self._settings.limits,
                    self._edge.flush,
                    self._edge.truncated,
                    holds_back=self._holds_back_fetch,
                    received=self._received,
                )
            fetcher.add(partition)
            self._leader_of[partition.topic_id, partition.index] = leader
            self._pump_due.add(leader)
            self._pump_soon()
        elif partition.wants_flush:
            self._edge.flush(partition)

    def _on_drop(self, partition: Partition) -> None:
        self._unmended.pop(partition, None)
        self._unfollow(partition)

    def _unfollow(self, partition: Partition, but: int = -1) -> None:
        key = (partition.topic_id, partition.index)
        before = self._leader_of.get(key, -1)
        if before not in (-1, but):
            del self._leader_of[key]
            self._fetchers[before].remove(*key)
            self._pump_due.add(before)

    @property
    def _broker_epoch(self) -> int:
        broker = self._image.brokers.get(self.node_id)
        return -1 if broker is None else broker.epoch

    # -- following -----------------------------------------------------------------------------------------------------

    def _pump_soon(self) -> None:
        if self._pump_due and not self._pumping:
            self._pumping = True
            self._edge.defer(self._pump_all)

    def _pump_all(self) -> None:
        self._pumping = False
        due, self._pump_due = self._pump_due, set()
        for leader in due:
            self._pump(leader)

    def _pump(self, leader: int) -> None:
        """Send what there is to say to a leader, and see to it that it goes on."""
        fetcher = self._fetchers[leader]
        asked = fetcher.request(self._edge.now_ms(), self.node_id, self._broker_epoch)
        if asked is not None:
            self._edge.send_fetch(leader, *asked)
        wake_ms = fetcher.wake_ms()
        if wake_ms is not None:
            self._edge.wake_at(wake_ms)

    def replied(self, leader: int, number: int, reply: FetchReply) -> None:
        """A leader answered a fetch."""
        fetcher = self._fetchers.get(leader)
        if fetcher is not None:
            fetcher.replied(number, reply, self._edge.now_ms(), self._edge.wall_ms())
            self._pump(leader)

    def lost(self, leader: int, number: int) -> None:
        """A fetch will not be answered."""
        fetcher = self._fetchers.get(leader)
        if fetcher is not None:
            fetcher.lost(number, self._edge.now_ms())
            self._pump(leader)

    def _is_held(self, partition: Partition) -> bool:
        replicas = partition.log.config.follower_replication_throttled_replicas
        return self.node_id not in partition.isr and is_named(replicas, partition.index, self.node_id)

    def _holds_back_fetch(self, partition: Partition) -> bool:
        throttle = self._fetched
        return throttle.limited and self._is_held(partition) and throttle.exceeded(self._edge.now_ms())

    def _received(self, partition: Partition, size: int) -> None:
        if self._fetched.limited and self._is_held(partition):
            self._fetched.spend(size)

    def on_flushed(self, partition: Partition) -> None:
        """The flusher is done with a partition's log."""
        partition.on_flushed()
        leader = self._leader_of.get((partition.topic_id, partition.index), -1)
        if leader >= 0:
            self._fetchers[leader].flushed(partition)
            self._pump_due.add(leader)
            self._pump_soon()

    # -- leading -------------------------------------------------------------------------------------------------------

    def fetch(self, request: FetchRequest, reply: Reply) -> Session | None:
        """Serve a follower's fetch; the session in which it waits, None when it was answered."""
        return self._sessions.fetch(request, self._edge.now_ms(), reply)

    def find(self, topic_id: bytes, index: int) -> Partition:
        """See `serving.Host`."""
        topic = self._image.topic_by_id(topic_id)
        if topic is None:
            raise KafkaError(ErrorCode.UNKNOWN_TOPIC_ID, "no topic has this id")
        return self.table.get(topic.name, index)

    def registered_epoch(self, node_id: int) -> int:
        """See `serving.Host`."""
        broker = self._image.brokers.get(node_id)
        return -1 if broker is None else broker.epoch

    def follower_moved(self, partition: Partition, follower: Follower) -> None:
        """See `serving.Host`."""
        if partition.may_join(follower, self._eligible):
            self._want(partition)

    def _is_held_by_leader(self, partition: Partition, follower: Follower) -> bool:
        replicas = partition.log.config.leader_replication_throttled_replicas
        node_id = follower.node_id
        return node_id not in partition.isr and is_named(replicas, partition.index, node_id)

    def holds_back(self, partition: Partition, follower: Follower) -> bool:
        """See `serving.Host`."""
        throttle, now_ms = self._served, self._edge.now_ms()
        if not throttle.limited or not self._is_held_by_leader(partition, follower):
            return False
        if not throttle.exceeded(now_ms):
            return False
        self._edge.wake_at(now_ms + HELD_MS)
        return True

    def sent(self, partition: Partition, follower: Follower, size: int) -> None:
        """See `serving.Host`."""
        if self._served.limited and self._is_held_by_leader(partition, follower):
            self._served.spend(size)

    def suspect(self, partition: Partition, follower: Follower) -> None:
        """See `serving.Host`."""
        damaged_at = find_damage(partition, follower.offset, follower.max_bytes)
        if damaged_at is not None:
            partition.note_damage(damaged_at)
        elif follower.is_stuck:
            self._want(partition)

    # -- trouble -------------------------------------------------------------------------------------------------------

    def _on_trouble(self, partition: Partition) -> None:
        """The disk failed a partition. A leader lets another lead; a follower mends what it can."""
        logger.error(
            "the disk failed a replica",
            extra={
                "fields": {
                    "partition": partition.log.name,
                    "leads": partition.is_leader,
                    "damaged_at": partition.damaged_at,
                }
            },
        )
        if partition.is_leader:
            self._want(partition)

    def _is_sound(self, partition: Partition) -> bool:
        """Put a damaged segment aside, to be fetched anew, if this replica is out of the ISR; False if it cannot be.

        Only before the leader of an epoch has heard of this replica: after that it may have asked the controller to
        take it into the ISR, for all that it has now.
        """
        self._unmended.pop(partition, None)
        try:
            if put_aside(partition):
                self._edge.truncated(partition)
                partition.damaged_at = None
        except (OSError, KafkaError) as error:
            self._unmended[partition] = None
            logger.error(
                "a damaged segment cannot be put aside",
                extra={"fields": {"partition": partition.log.name, "why": str(error)}},
            )
            return False
        return True

    def _eligible(self, node_id: int, broker_epoch: int) -> bool:
        """Whether a broker may be in sync anywhere: it is registered as it says, and not about to leave."""
        broker = self._image.brokers.get(node_id)
        return broker is not None and broker.may_lead and broker.epoch == broker_epoch

    def _want(self, partition: Partition) -> None:
        self._isr.want(partition)
        if not self._sending_isr:
            self._sending_isr = True
            self._edge.defer(self._send_isr)

    def _send_isr(self) -> None:
        self._sending_isr = False
        now_ms = self._edge.now_ms()
        self._isr.send(now_ms, self._settings.lag_max_ms, self._eligible)
        if self._isr.waiting:
            self._edge.wake_at(now_ms + 100)

    def _check_isr(self, now_ms: float) -> None:
        self._checked_ms = now_ms
        for partition in self.table:
            if partition.followers and partition.is_leader:
                partition.tell_log_start()
                if partition.wants_change(now_ms, self._settings.lag_max_ms, self._eligible):
                    self._want(partition)
        self._resign_unopened()

    def _resign_unopened(self) -> None:
        """Let others lead what this broker is to lead and has no log of, for want of room, say."""
        resignations = []
        for name, index in self.table.unopened_for_trouble:
            topic = self._image.topics[name]
            now = topic.partitions[index]
            others = [(member, ANY_EPOCH) for member in now.isr if member != self.node_id]
            if now.leader == self.node_id and others:
                resignations.append(
                    IsrProposal(topic.id, index, now.leader_epoch, now.partition_epoch, tuple(others))
                )
        if resignations:
            self._controller.alter_partitions(
                resignations, lambda errors: None
            )  # asked again with the next check

    def hear_controller(self, heard: bool) -> None:
        """Whether the controller has been heard of lately. Without it, replicas that all fetch go on as ever."""
        if heard and not self._alone:
            return
        self._alone = not heard
        silence_ms = 2 * self._settings.limits.max_wait_ms
        for partition in self.table:
            if partition.followers and partition.is_leader:
                partition.set_cut_off(self._alone, self._edge.now_ms(), silence_ms)

    # -- time ----------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """What time has made due."""
        now_ms = self._edge.now_ms()
        for leader, fetcher in self._fetchers.items():
            wake_ms = fetcher.wake_ms()
            if wake_ms is not None and wake_ms <= now_ms:
                self._pump(leader)
            elif wake_ms is not None:
                self._edge.wake_at(wake_ms)
        if now_ms - self._checked_ms >= min(self._settings.lag_max_ms / 2, ISR_CHECK_MS_MAX):
            self._check_isr(now_ms)
        self._sessions.release_held()
        for partition in list(self._unmended):
            self._on_role(partition)
        if self._isr.waiting:
            self._send_isr()
