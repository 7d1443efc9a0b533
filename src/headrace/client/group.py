"""A consumer's life in a group: subscription, listener, positions, commits.

Owns what is subscribed to and what is owned, and when offsets are committed. Talks to the coordinator through a
member (`classic_member`, `broker_assigned_member`) and to the partitions through `fetcher`. Invariants: a partition
is committed no further than what was handed out and asked past; before a partition is given up in peace, what is
done of it is committed (when commits are automatic) and the listener has run; of a lost partition nothing is
committed. Called by `consumer`.
"""

import asyncio
import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Protocol, runtime_checkable

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.log import get_logger
from headrace.client.broker_assigned_member import BrokerAssignedMember
from headrace.client.classic_member import ClassicMember
from headrace.client.cluster import Cluster
from headrace.client.commits import NOBODY, MemberIdentity, commit_offsets, fetch_committed
from headrace.client.config import ConsumerConfig
from headrace.client.coordinator import Coordinator, CoordinatorKind
from headrace.client.errors import ClientError, NotInGroup
from headrace.client.fetcher import Fetcher
from headrace.client.membership import Member
from headrace.client.topics import OffsetAndMetadata, TopicPartition

PENDING_COMMITS_MAX = 100

_log = get_logger(__name__)


@runtime_checkable
class RebalanceListener(Protocol):
    """Hears of partitions that come and go; each method may be a coroutine. Runs inside poll, commit and close."""

    def on_assigned(self, partitions: list[TopicPartition]) -> Awaitable[None] | None:
        """These are read from now on; seek here to begin elsewhere."""
        ...

    def on_revoked(self, partitions: list[TopicPartition]) -> Awaitable[None] | None:
        """These will go to others after this returns; commit here what is done."""
        ...

    def on_lost(self, partitions: list[TopicPartition]) -> Awaitable[None] | None:
        """Others may have these already; nothing can be committed."""
        ...


class Group:
    """One consumer's part in one group."""

    def __init__(
        self,
        config: ConsumerConfig,
        cluster: Cluster,
        fetcher: Fetcher,
        consumed: Callable[[], dict[TopicPartition, int]],
        *,
        auto_commit: bool,
    ) -> None:
        assert config.group_id is not None
        self._config = config
        self._cluster = cluster
        self._fetcher = fetcher
        self._consumed = consumed
        self._auto_commit = auto_commit
        self.coordinator = Coordinator(cluster, CoordinatorKind.GROUP, config.group_id)
        self._member: Member | None = None
        self._names: tuple[str, ...] = ()
        self._pattern: re.Pattern[str] | None = None
        self._matched_s = float("-inf")
        self._listener: RebalanceListener | None = None
        self._committed: dict[TopicPartition, int] = {}
        self._next_commit_s = 0.0
        self._commits: set[asyncio.Task[None]] = set()
        self.before_release: Callable[[frozenset[TopicPartition], bool], Awaitable[None]] | None = None

    # -- subscription -----------------------------------------------------------------------------------------------

    def subscribe(
        self, names: Iterable[str], pattern: "re.Pattern[str] | None", listener: RebalanceListener | None
    ) -> None:
        """Take part in the group for these topics, or for all that match the pattern."""
        self._names = tuple(dict.fromkeys(names))
        self._pattern = pattern
        self._matched_s = float("-inf")
        self._listener = listener
        for name in self._names:
            self._cluster.track(name)
        if self._member is None:
            if self._config.group_protocol == "classic":
                self._member = ClassicMember(self._config, self.coordinator, self)
            else:
                self._member = BrokerAssignedMember(self._config, self.coordinator, self)
            delay_s = self._config.auto_commit_interval_ms / 1000
            self._next_commit_s = asyncio.get_running_loop().time() + delay_s
        else:
            self._member.resubscribe()

    async def unsubscribe(self) -> None:
        """Leave the group."""
        if self._member is not None:
            await self.revoke(self.owned, lost=False)
            member, self._member = self._member, None
            await member.close()
        self._names, self._pattern = (), None

    @property
    def subscribed(self) -> bool:
        return self._member is not None

    def topics(self) -> tuple[str, ...]:
        return self._names

    async def _match(self) -> None:
        """Look which topics the pattern means now."""
        now_s = asyncio.get_running_loop().time()
        if self._pattern is None or (now_s - self._matched_s) * 1000 < self._config.metadata_max_age_ms:
            return
        self._matched_s = now_s
        try:
            reply = await self._cluster.describe(None)
        except KafkaError as error:
            self._matched_s = float("-inf")
            self._cluster.last_error = error
            if not error.retriable:
                raise
            return
        names = tuple(
            sorted(
                topic.name
                for topic in reply.topics
                if self._pattern.fullmatch(topic.name)
                and not (topic.is_internal and self._config.exclude_internal_topics)
            )
        )
        if names != self._names:
            for name in names:
                self._cluster.track(name)
            self._names = names
            if self._member is not None:
                self._member.resubscribe()

    # -- between polls ----------------------------------------------------------------------------------------------

    async def attend(self) -> None:
        """What a group needs from time to time, in the consumer's own time. Raises KafkaError."""
        if self._member is None:
            return
        await self._match()
        await self._member.attend()
        if self._auto_commit:
            now_s = asyncio.get_running_loop().time()
            if now_s >= self._next_commit_s:
                self._next_commit_s = now_s + self._config.auto_commit_interval_ms / 1000
                self.commit_soon(self.due(), None)

    @property
    def waits_for(self) -> str:
        """What the member waits for; empty when nothing."""
        return "" if self._member is None else self._member.waits_for

    # -- the member's side ------------------------------------------------------------------------------------------

    @property
    def owned(self) -> frozenset[TopicPartition]:
        return frozenset(self._fetcher.assigned)

    async def revoke(self, partitions: frozenset[TopicPartition], *, lost: bool) -> None:
        if not partitions:
            return
        if self.before_release is not None:
            await self.before_release(partitions, lost)
        if not lost and self._auto_commit:
            await self._commit_quietly({p: o for p, o in self.due().items() if p in partitions})
        listener = self._listener
        try:
            if listener is not None:
                await _told((listener.on_lost if lost else listener.on_revoked)(sorted(partitions)))
        finally:
            self._fetcher.assign(p for p in list(self._fetcher.assigned) if p not in partitions)
            for partition in partitions:
                self._committed.pop(partition, None)

    async def adopt(
        self,
        partitions: frozenset[TopicPartition],
        committed: Mapping[TopicPartition, OffsetAndMetadata],
    ) -> None:
        added = sorted(partitions - self.owned)
        self._fetcher.assign(sorted(partitions))
        for partition in added:
            offset = committed.get(partition)
            if offset is not None:
                self._fetcher.state(partition).move(offset.offset)
                self._committed[partition] = offset.offset
            elif self._config.auto_offset_reset == "none":
                self._fetcher.refuse(
                    partition,
                    ClientError(
                        f"group {self._config.group_id!r} has committed nothing for {partition}",
                        "seek, or set auto.offset.reset to earliest or latest",
                        ErrorCode.OFFSET_OUT_OF_RANGE,
                    ),
                )
        if self._listener is not None:
            await _told(self._listener.on_assigned(added))
        self._fetcher.wake()

    def notify(self) -> None:
        self._fetcher.notify()

    # -- commits ----------------------------------------------------------------------------------------------------

    @property
    def identity(self) -> MemberIdentity:
        """Who commits."""
        return NOBODY if self._member is None else self._member.identity

    def due(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """What was handed out and is not committed yet."""
        return {
            partition: OffsetAndMetadata(position)
            for partition, position in self._consumed().items()
            if self._committed.get(partition) != position
        }

    async def commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        """Commit these; returns when they are stored. Raises KafkaError."""
        await self._settle_commits()
        await self._commit(offsets)

    async def _commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        if self._member is not None and self.identity.generation < 0:
            raise NotInGroup(
                f"cannot commit: this consumer is not (or no longer) a member of group {self._config.group_id!r}",
                "poll first; then process again what it gives",
            )
        await commit_offsets(self.coordinator, self.identity, offsets, self._config.default_api_timeout_ms)
        self._committed.update({partition: entry.offset for partition, entry in offsets.items()})

    def commit_soon(
        self,
        offsets: Mapping[TopicPartition, OffsetAndMetadata],
        callback: "Callable[[Mapping[TopicPartition, OffsetAndMetadata], KafkaError | None], object] | None",
    ) -> None:
        """Commit beside whatever comes next. Raises ClientError when too many such commits wait already."""
        if not offsets:
            return
        if len(self._commits) >= PENDING_COMMITS_MAX:
            raise ClientError(f"more than {PENDING_COMMITS_MAX} commits wait", "await commit() now and then")
        before = list(self._commits)

        async def work() -> None:
            if before:  # commits of one consumer must not overtake each other
                await asyncio.gather(*before, return_exceptions=True)
            failure: KafkaError | None = None
            try:
                await self._commit(offsets)
            except KafkaError as error:
                failure = error
                if callback is None:
                    _log.warning(
                        "offsets were not committed",
                        extra={"fields": {"group": self._config.group_id, "reason": error.message}},
                    )
            if callback is not None:
                callback(offsets, failure)

        task = asyncio.create_task(work(), name="headrace consumer commit")
        self._commits.add(task)
        task.add_done_callback(self._commits.discard)

    async def _settle_commits(self) -> None:
        if self._commits:
            await asyncio.gather(*self._commits, return_exceptions=True)

    async def _commit_quietly(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        try:
            await self.commit(offsets)
        except KafkaError as error:
            _log.warning(
                "offsets were not committed before partitions went",
                extra={"fields": {"group": self._config.group_id, "reason": error.message}},
            )

    async def committed(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """What the group committed, None where it did not."""
        wanted = list(partitions)
        found = await fetch_committed(self.coordinator, wanted, self._config.default_api_timeout_ms)
        return {partition: found.get(partition) for partition in wanted}

    async def close(self, *, commit: bool) -> None:
        """Commit what is due, unless told not to; tell the listener; leave the group."""
        if not commit:
            self._auto_commit = False
        if self._member is None:
            if self._auto_commit:
                await self._commit_quietly(self.due())
            return
        await self._settle_commits()
        try:
            await self.revoke(self.owned, lost=False)
        finally:
            await self._member.close()


async def _told(result: Awaitable[None] | None) -> None:
    if inspect.isawaitable(result):
        await result
