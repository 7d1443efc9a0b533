"""What the two kinds of group member have in common, and what they ask of the consumer they work for.

Owns the interfaces between `group` (which has the partitions, the listener and the offsets) and a member
(`classic_member` or `broker_assigned_member`, which talk to the coordinator). Invariant: listeners run only inside
the consumer's own calls (`attend`), never beside them, so that whoever processes records is never surprised in the
middle of one.
"""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Protocol

from headrace.base.errors import KafkaError
from headrace.client.commits import MemberIdentity
from headrace.client.config import ConsumerConfig
from headrace.client.coordinator import Coordinator
from headrace.client.topics import OffsetAndMetadata, TopicPartition


class Hooks(Protocol):
    """What a member asks of the consumer it works for."""

    @property
    def owned(self) -> frozenset[TopicPartition]:
        """The partitions being read."""
        ...

    def topics(self) -> tuple[str, ...]:
        """The topics subscribed to, a pattern replaced by what it matches."""
        ...

    async def revoke(self, partitions: frozenset[TopicPartition], *, lost: bool) -> None:
        """Stop reading these: commit, tell the listener, drop them. When lost, others may have them already."""
        ...

    async def adopt(
        self,
        partitions: frozenset[TopicPartition],
        committed: Mapping[TopicPartition, OffsetAndMetadata],
    ) -> None:
        """Read these and no others from now on, the new ones from where the group was."""
        ...

    def notify(self) -> None:
        """Let a poll that waits look again."""
        ...


class Member(Protocol):
    """One membership of one consumer in one group."""

    @property
    def identity(self) -> MemberIdentity:
        """Who commits."""
        ...

    @property
    def waits_for(self) -> str:
        """What it waits for, in words; empty when nothing."""
        ...

    async def attend(self) -> None:
        """Do what has to happen between polls. Raises KafkaError."""
        ...

    def resubscribe(self) -> None:
        """The subscription has changed."""
        ...

    async def close(self) -> None:
        """Leave the group (a static member stays) and stop."""
        ...


class PollClock:
    """When the consumer last polled; past `max.poll.interval.ms` it counts as stuck and its partitions go."""

    def __init__(self, config: ConsumerConfig) -> None:
        self._limit_s = config.max_poll_interval_ms / 1000
        self._polled_s = asyncio.get_running_loop().time()

    def polled(self) -> None:
        self._polled_s = asyncio.get_running_loop().time()

    @property
    def overdue(self) -> bool:
        return asyncio.get_running_loop().time() - self._polled_s > self._limit_s


async def refresh_if_stale(coordinator: Coordinator, topics: Iterable[str]) -> None:
    """Metadata must not grow old while nothing is fetched, and a topic that was not there may be there now."""
    known = coordinator.cluster.topics
    missing = any(topic not in known or not known[topic].partitions for topic in topics)
    if missing or coordinator.cluster.stale(asyncio.get_running_loop().time()):
        try:
            await coordinator.cluster.refresh()
        except KafkaError as error:
            coordinator.cluster.last_error = error
