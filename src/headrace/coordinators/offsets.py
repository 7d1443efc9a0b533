"""Committed offsets of the groups of one shard.

Owns what is committed, nothing that still could be undone: an offset enters when its record is committed, by the same
`put` that replays it after a restart. Invariant: a group is in the table as long as it has an offset. Also decides
which offsets are past their time. Pure; `GroupShard` is the caller.
"""

from collections.abc import Iterable, Iterator

from headrace.coordinators.classic_group import ClassicGroup
from headrace.coordinators.consumer_group import ConsumerGroup
from headrace.coordinators.group_states import EMPTY, STABLE
from headrace.coordinators.rebalance import CONSUMER
from headrace.coordinators.records import NEVER, OffsetKey, OffsetValue

Partition = tuple[str, int]


class CommittedOffsets:
    """Offsets by group, topic and partition."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[Partition, OffsetValue]] = {}

    def __len__(self) -> int:
        return sum(len(offsets) for offsets in self._groups.values())

    def put(self, key: OffsetKey, value: OffsetValue | None) -> None:
        """A record says that an offset is committed, or with None that it is gone."""
        group, topic, partition = key
        offsets = self._groups.get(group)
        if value is not None:
            if offsets is None:
                offsets = self._groups[group] = {}
            offsets[topic, partition] = value
        elif offsets is not None:
            offsets.pop((topic, partition), None)
            if not offsets:
                del self._groups[group]

    def get(self, group: str, topic: str, partition: int) -> OffsetValue | None:
        offsets = self._groups.get(group)
        return None if offsets is None else offsets.get((topic, partition))

    def of(self, group: str) -> dict[Partition, OffsetValue]:
        """All offsets of a group, by partition. To be read only."""
        return self._groups.get(group, {})

    def keys_of_topics(self, topics: set[str]) -> Iterator[OffsetKey]:
        """The offsets of these topics, of all groups."""
        for group, offsets in self._groups.items():
            for topic, partition in offsets:
                if topic in topics:
                    yield OffsetKey(group, topic, partition)


def expired(
    group: ClassicGroup | ConsumerGroup,
    offsets: Iterable[tuple[Partition, OffsetValue]],
    now_ms: int,
    retention_ms: int,
) -> tuple[list[Partition], bool]:
    """The partitions whose offsets are past their time, and whether that leaves the group with none.

    The time runs from when a classic group became empty; for what a group of consumers no longer subscribes to, and
    for simple consumers that never were a group, from the commit. What members at work read does not expire.
    """
    if isinstance(group, ConsumerGroup):
        return _past(offsets, now_ms, retention_ms, group.subscribed_names(), None)
    working = group.protocol_type is not None and group.state is not EMPTY
    if working and not (
        group.state is STABLE and group.protocol_type == CONSUMER and group.topics is not None
    ):
        return [], not any(True for _ in offsets)
    read = group.topics if working and group.topics is not None else set()
    emptied = group.protocol_type is not None and group.state is EMPTY and group.state_timestamp_ms >= 0
    return _past(offsets, now_ms, retention_ms, read, group.state_timestamp_ms if emptied else None)


def _past(
    offsets: Iterable[tuple[Partition, OffsetValue]],
    now_ms: int,
    retention_ms: int,
    read: set[str],
    since_ms: int | None,
) -> tuple[list[Partition], bool]:
    gone, none_left = [], True
    for partition, value in offsets:
        begins_ms = value.commit_timestamp_ms if since_ms is None else since_ms
        if value.expire_timestamp_ms != NEVER:
            over = now_ms >= value.expire_timestamp_ms
        else:
            over = now_ms - begins_ms >= retention_ms
        if over and partition[0] not in read:
            gone.append(partition)
        else:
            none_left = False
    return gone, none_left
