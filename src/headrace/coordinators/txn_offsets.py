"""Offsets that were committed inside a transaction which is still open: nobody sees them until it ends.

Owns them by producer, because a marker names no more than that. Invariants: an entry comes from a committed record and
goes with a committed marker, live and at a restart alike; an offset that was committed outside the transaction after
the one inside it stays when the transaction ends, as the later of the two. Pure; `GroupShard` is the caller.
"""

from collections.abc import Iterable, Iterator

from headrace.coordinators.records import OffsetKey, OffsetValue


class PendingOffsets:
    """Offsets by producer, group and partition."""

    def __init__(self) -> None:
        self._producers: dict[int, dict[OffsetKey, OffsetValue | None]] = {}
        self._open: dict[str, dict[tuple[str, int], int]] = {}  # group -> partition -> how many producers

    def put(self, producer_id: int, key: OffsetKey, value: OffsetValue) -> None:
        """A record of an open transaction says that an offset is to be committed."""
        offsets = self._producers.setdefault(producer_id, {})
        if key not in offsets:
            partitions = self._open.setdefault(key.group, {})
            where = (key.topic, key.partition)
            partitions[where] = partitions.get(where, 0) + 1
        offsets[key] = value

    def overtake(self, key: OffsetKey) -> None:
        """The same offset was committed, or deleted, outside of a transaction: what is pending of it came before."""
        if key.group in self._open:
            for offsets in self._producers.values():
                if key in offsets:
                    offsets[key] = None

    def end(self, producer_id: int) -> Iterator[tuple[OffsetKey, OffsetValue]]:
        """The transaction ended: its offsets that still count, which are pending no more."""
        for key, value in self._producers.pop(producer_id, {}).items():
            partitions = self._open[key.group]
            where = (key.topic, key.partition)
            partitions[where] -= 1
            if not partitions[where]:
                del partitions[where]
                if not partitions:
                    del self._open[key.group]
            if value is not None:
                yield key, value

    def is_pending(self, group: str, topic: str, partition: int) -> bool:
        """Whether an open transaction may change this offset."""
        partitions = self._open.get(group)
        return partitions is not None and (topic, partition) in partitions

    def of(self, group: str) -> Iterable[tuple[str, int]]:
        """The partitions whose offsets an open transaction may change."""
        return self._open.get(group, {})

    def keys_of_topics(self, topics: set[str]) -> Iterator[OffsetKey]:
        """The offsets of these topics, of all groups, that an open transaction may change."""
        for group, partitions in self._open.items():
            for topic, partition in partitions:
                if topic in topics:
                    yield OffsetKey(group, topic, partition)

    def has_group(self, group: str) -> bool:
        """Whether an open transaction may change an offset of the group."""
        return group in self._open
