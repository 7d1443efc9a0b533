"""The partitions this broker holds, kept in step with the cluster's image.

Owns the map from topic and index to `Partition`. Invariant: it holds exactly the partitions that the image assigns to
this broker and whose logs could be opened; those that could not are remembered with their error, so that a client is
told why. Called by `Replicas` on every new image and by every handler that touches a partition.

A partition that is open takes up its role in the turn that brings the image: a leader that was deposed must not serve
one request more. A new one is opened when it is first asked for, or by `open_some` soon after the image that brought
it: making a thousand directories in one go would hold up every client for as long. For the same reason a partition that
is gone from the image, or from this broker, is gone for clients at once, but its log goes with `delete_some`, or when
its name is needed again.
"""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TypeAlias

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.log import get_logger
from headrace.cluster.image import ClusterImage, TopicImage
from headrace.replication.partition import Partition
from headrace.storage.log import PartitionLog

OpenLog: TypeAlias = Callable[[str, int, bytes], PartitionLog]

logger = get_logger(__name__)


class PartitionTable:
    """Partitions by topic and index."""

    def __init__(
        self,
        node_id: int,
        open_log: OpenLog,
        delete_log: Callable[[str, int], None],
        *,
        on_role: Callable[[Partition], None] = lambda partition: None,
        on_drop: Callable[[Partition], None] = lambda partition: None,
        known_end: Callable[[str, int], int] = lambda topic, index: 0,
        now_ms: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`on_role` hears of each new leader or epoch, `known_end` tells the high watermark that was written down."""
        self._node_id = node_id
        self._open_log = open_log
        self._delete_log = delete_log
        self._on_role = on_role
        self._on_drop = on_drop
        self._known_end = known_end
        self._now_ms = now_ms
        self._topics: dict[
            str, dict[int, Partition | KafkaError | TopicImage]
        ] = {}  # a topic: not opened yet
        self._unopened: deque[tuple[str, int]] = deque()
        self._failed: set[tuple[str, int]] = set()
        self._doomed: dict[tuple[str, int], None] = {}  # logs to delete, in the order they were dropped

    def __iter__(self) -> Iterator[Partition]:
        for partitions in self._topics.values():
            for partition in partitions.values():
                if isinstance(partition, Partition):
                    yield partition

    def get(self, topic: str, index: int) -> Partition:
        """The partition, or the error a client is to get instead."""
        try:
            partition = self._topics[topic][index]
        except KeyError:
            raise KafkaError(
                ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "this broker does not host the partition"
            ) from None
        if isinstance(partition, TopicImage):
            partition = self._topics[topic][index] = self._open(partition, index)
        if isinstance(partition, KafkaError):
            raise partition
        return partition

    def find(self, topic: str, index: int) -> Partition | None:
        """The partition if it is held here and usable."""
        partition = self._topics.get(topic, {}).get(index)
        return partition if isinstance(partition, Partition) else None

    def open_some(self, count: int) -> bool:
        """Open up to `count` partitions that nobody asked for yet; whether more are left."""
        while self._unopened and count > 0:
            name, index = self._unopened.popleft()
            topic = self._topics.get(name, {}).get(index)
            if isinstance(topic, TopicImage):
                self._topics[name][index] = self._open(topic, index)
                count -= 1
        return bool(self._unopened)

    def delete_some(self, count: int) -> bool:
        """Delete up to `count` logs of partitions that are gone; whether more are left."""
        for key in list(islice(self._doomed, count)):
            self._delete(key)
        return bool(self._doomed)

    def apply(self, old: ClusterImage, new: ClusterImage) -> None:
        """Take up what the new image assigns here, drop what it no longer does."""
        for name in old.topics.keys() - new.topics.keys():
            self._drop(name)
        for name, topic in new.topics.items():
            before = old.topics.get(name)
            if before is topic:
                continue
            if before is not None and before.id != topic.id:
                self._drop(name)
            self._take(topic)

    @property
    def unopened_for_trouble(self) -> list[tuple[str, int]]:
        """Partitions that are placed here and could not be opened."""
        return list(self._failed)

    def retry(self, image: ClusterImage) -> None:
        """Try again to open what could not be opened: a disk that was full may have room by now."""
        for name, index in self.unopened_for_trouble:
            self._topics[name][index] = self._open(image.topics[name], index)

    def _take(self, topic: TopicImage) -> None:
        held = self._topics.setdefault(topic.name, {})
        now_ms = self._now_ms()
        for index, registration in enumerate(topic.partitions):
            present = held.get(index)
            if self._node_id not in registration.replicas:
                if present is not None:
                    self._drop_one(topic.name, index, held.pop(index), ErrorCode.NOT_LEADER_OR_FOLLOWER)
            elif isinstance(present, Partition):
                if present.take(registration, self._node_id, now_ms):
                    self._on_role(present)
            elif not isinstance(present, KafkaError):
                held[index] = topic
                if present is None:
                    self._unopened.append((topic.name, index))

    def _open(self, topic: TopicImage, index: int) -> Partition | KafkaError:
        if (topic.name, index) in self._doomed:
            self._delete((topic.name, index))
        try:
            log = self._open_log(topic.name, index, topic.id)
        except (OSError, KafkaError) as error:
            if (topic.name, index) not in self._failed:
                self._failed.add((topic.name, index))
                logger.error(
                    "partition cannot be opened",
                    extra={"fields": {"topic": topic.name, "partition": index, "why": str(error)}},
                )
            return KafkaError(
                ErrorCode.KAFKA_STORAGE_ERROR, f"the log of this partition cannot be opened: {error}"
            )
        self._failed.discard((topic.name, index))
        registration = topic.partitions[index]
        alone = len(registration.replicas) == 1
        partition = Partition(
            topic.name,
            topic.id,
            index,
            registration.leader_epoch,
            log,
            high_watermark=None if alone else self._known_end(topic.name, index),
        )
        partition.take(registration, self._node_id, self._now_ms())
        self._on_role(partition)
        return partition

    def _drop(self, name: str) -> None:
        for index, partition in self._topics.pop(name, {}).items():
            self._drop_one(name, index, partition, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)

    def _drop_one(
        self, name: str, index: int, partition: Partition | KafkaError | TopicImage, error: ErrorCode
    ) -> None:
        self._doomed[name, index] = None
        self._failed.discard((name, index))
        if isinstance(partition, Partition):
            partition.leave(error)
            self._on_drop(partition)

    def _delete(self, key: tuple[str, int]) -> None:
        del self._doomed[key]
        self._delete_log(*key)
