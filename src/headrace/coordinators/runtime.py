"""Runs the state machines of an internal topic: one for each partition that this broker leads.

Follows the cluster's image: a shard is opened when the image makes this broker the partition's leader, closed, with
NOT_COORDINATOR to whoever waits, when it no longer is, and loaded anew when leadership was away in between. Shards are
loaded a slice a turn of the loop, with COORDINATOR_LOAD_IN_PROGRESS meanwhile. Invariant: a request is served by a
shard only while the image says that this broker leads its partition, and the cluster is heard of: what another took
since must not be answered for from what was known before. The broker calls it; groups and transactions each have one.
"""

from collections import deque
from collections.abc import Callable
from typing import Final, Generic

from headrace.base.clock import Timer
from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.log import get_logger
from headrace.cluster.image import TopicImage
from headrace.coordinators.group_states import append_error
from headrace.coordinators.shard import LOAD_BYTES_A_TURN, M, Machine, Shard, World

LOAD_RETRY_MS: Final = 200
"""How soon a partition that cannot be read is tried again."""
LOAD_WAIT_MS: Final = 5
"""How soon a shard that waits for the high watermark looks again."""

logger = get_logger(__name__)


class CoordinatorRuntime(Generic[M]):
    """The shards of one internal topic."""

    def __init__(self, world: World, new_machine: Callable[[], M]) -> None:
        self._world = world
        self._new_machine = new_machine
        self._topic_id: bytes | None = None
        self._shards: dict[int, Shard[M]] = {}
        self._loading: deque[Shard[M]] = deque()
        self._loader: Timer | None = None
        self._idle_turns = 0
        self._retry_ms = LOAD_WAIT_MS
        self.partition_count = 0
        """How many partitions the internal topic has; 0 as long as it does not exist."""

    # -- following the image -------------------------------------------------------------------------------------------

    def follow(self, topic: TopicImage | None, node_id: int) -> None:
        """The internal topic as the image has it now, to the broker of this id."""
        if topic is None or topic.id != self._topic_id:
            self.close()
        if topic is None:
            return
        self._topic_id = topic.id
        self.partition_count = len(topic.partitions)
        for index, partition in enumerate(topic.partitions):
            shard = self._shards.get(index)
            if partition.leader != node_id:
                if shard is not None:
                    del self._shards[index]
                    shard.close(ErrorCode.NOT_COORDINATOR)
            elif shard is None:
                self._open(index, partition.leader_epoch)
            elif partition.leader_epoch == shard.epoch + 1:
                shard.epoch = partition.leader_epoch  # nobody else can have led in between
            elif partition.leader_epoch != shard.epoch:
                shard.close(ErrorCode.NOT_COORDINATOR)
                self._open(index, partition.leader_epoch)
        self._load_later(0)

    def close(self, error: ErrorCode = ErrorCode.NOT_COORDINATOR) -> None:
        """Give up all partitions: the topic is gone, or the broker stops."""
        if self._loader is not None:
            self._loader.cancel()
            self._loader = None
        self._loading.clear()
        shards, self._shards = self._shards, {}
        self._topic_id, self.partition_count = None, 0
        for shard in shards.values():
            shard.close(error)

    def _open(self, index: int, epoch: int) -> None:
        shard = Shard(index, epoch, self._new_machine(), self._world, self._reload)
        self._shards[index] = shard
        self._loading.append(shard)

    def _reload(self, shard: Shard[M]) -> None:
        """What a machine took for stored is not: begin again with what is."""
        if self._shards.get(shard.index) is shard:
            self._open(shard.index, shard.epoch)
            shard.close(ErrorCode.COORDINATOR_NOT_AVAILABLE)
            self._load_later(0)

    # -- asking --------------------------------------------------------------------------------------------------------

    def shard(self, index: int) -> Shard[M]:
        """The shard, for whoever asks from outside, or the error that a client is to get until it can answer."""
        shard = self.held(index)
        if self._world.is_cut_off(index):
            raise KafkaError(ErrorCode.NOT_COORDINATOR, "cut off from the cluster; another may be by now")
        return shard

    def held(self, index: int) -> Shard[M]:
        """The shard, to go on with what it has begun; the log decides whether that counts. KafkaError as above.

        One that is asked for need not wait for its turn: a slice of it is loaded at once, and most are no more.
        """
        shard = self._shards.get(index)
        if shard is None:
            known = 0 <= index < self.partition_count
            raise KafkaError(ErrorCode.NOT_COORDINATOR if known else ErrorCode.COORDINATOR_NOT_AVAILABLE)
        if not shard.active:
            try:
                shard.load_some()
            except KafkaError as error:
                raise KafkaError(append_error(error.code), error.message) from None
            if not shard.active:
                raise KafkaError(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
        return shard

    def active(self) -> list[Shard[M]]:
        """All shards; COORDINATOR_LOAD_IN_PROGRESS while one is still loading."""
        if any(shard.is_begun for shard in self._shards.values()):
            raise KafkaError(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
        return [self.shard(index) for index in list(self._shards) if not self._world.is_cut_off(index)]

    # -- loading -------------------------------------------------------------------------------------------------------

    def _load_later(self, delay_ms: int) -> None:
        if self._loading and self._loader is None:
            self._loader = self._world.call_later(delay_ms, self._load_turn)

    def _load_turn(self) -> None:
        """A slice of one shard; the others wait their turn, and so does nobody else for long."""
        self._loader = None
        shard = self._loading.popleft()
        self._idle_turns += 1
        if not shard.active and not shard.closed:
            try:
                if shard.load_some() or shard.active:
                    self._idle_turns = 0
            except KafkaError as error:
                self._retry_ms = LOAD_RETRY_MS
                if not shard.failed_to_load:
                    shard.failed_to_load = True
                    fields = {"partition": shard.index, "why": str(error)}
                    logger.error("a coordinator cannot load", extra={"fields": fields})
            if not shard.active:
                self._loading.append(shard)
        if self._idle_turns < len(self._loading):
            self._load_later(0)
        else:  # each had its turn, and none can go on
            delay_ms, self._retry_ms, self._idle_turns = self._retry_ms, LOAD_WAIT_MS, 0
            self._load_later(delay_ms)


__all__ = ["LOAD_BYTES_A_TURN", "CoordinatorRuntime", "Machine", "Shard", "World"]
