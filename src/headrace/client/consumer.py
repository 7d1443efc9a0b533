"""The consumer: records of topics or partitions, in order, alone or as a member of a group.

Owns the public surface: `subscribe` and `assign`, `poll` and iteration, `seek`, offsets, `commit`. What happens
inside: `group` takes part in a group, `fetcher` reads ahead, `fetched` decodes, `offsets` asks for offsets.
Invariants: `poll` returns within its timeout, and what it waits for can be read in `waits_for`; `position` is the
offset of the next record that will be handed out; what is committed was handed out before. Called by the command
line and by people's programs.

    async with Consumer(bootstrap_servers="127.0.0.1:9092", group_id="billing") as consumer:
        consumer.subscribe(["orders"])
        async for record in consumer: ...
"""

import asyncio
import random
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from types import TracebackType
from typing import Literal, NamedTuple, Self, TypeAlias

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.log import get_logger
from headrace.client.cluster import Cluster
from headrace.client.commits import OffsetAndMetadata
from headrace.client.config import consumer_config, settings
from headrace.client.errors import ClientError, ConfigError, NotInGroup, RequestTimedOut
from headrace.client.fetched import ConsumerRecord
from headrace.client.fetcher import Fetcher
from headrace.client.group import Group, RebalanceListener
from headrace.client.offsets import EARLIEST, LATEST, UNKNOWN_OFFSET, OffsetAndTimestamp, list_offsets
from headrace.client.retry import with_retries
from headrace.client.topics import TopicPartition
from headrace.client.transport import Connector

__all__ = ["Consumer", "ConsumerRecord", "RebalanceListener"]

STUCK_AFTER_S = 10.0
ATTEND_EVERY_S = 0.1

DeliveryMode: TypeAlias = Literal["at_most_once", "at_least_once", "exactly_once"]
Offsets: TypeAlias = Mapping[TopicPartition, "OffsetAndMetadata | int"]
CommitCallback: TypeAlias = Callable[
    [Mapping[TopicPartition, OffsetAndMetadata], "KafkaError | None"], object
]

_log = get_logger(__name__)


class Consumer:
    """Reads topics. Configuration is Kafka's consumer keys, in a mapping or as keywords (`group_id="g"`).

    `delivery` names what happens when a program ends in the middle: `at_most_once` commits records before it hands them
    out, `at_least_once` (the default in a group) after, now and then; `exactly_once` reads only what was committed and
    leaves commits to a producer's transaction.
    """

    def __init__(
        self,
        config: Mapping[str, object] | None = None,
        *,
        delivery: DeliveryMode | None = None,
        connector: Connector | None = None,
        random_source: random.Random | None = None,
        **keywords: object,
    ) -> None:
        values = _with_delivery(settings(config, keywords), delivery)
        self.config = consumer_config(values)
        self.delivery = delivery
        self.cluster = Cluster(self.config, connector=connector, random_source=random_source)
        self._fetcher = Fetcher(self.config, self.cluster)
        self._ready: deque[ConsumerRecord] = deque()  # polled by iteration and not handed out yet
        self._group: Group | None = None
        self._attended_s = 0.0
        self._warned_s = 0.0
        if self.config.group_id is not None:
            self._group = Group(
                self.config,
                self.cluster,
                self._fetcher,
                self._consumed,
                auto_commit=self.config.enable_auto_commit,
            )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error the last records may not have been processed: they are read again, not committed.
        await self.close(commit=error is None)

    async def close(self, *, commit: bool = True) -> None:
        """Commit what was handed out (if commits are automatic, and `commit`), leave the group, disconnect."""
        try:
            if self._group is not None and not self._fetcher.closed:
                await self._group.close(commit=commit)
        finally:
            await self._fetcher.close()
            await self.cluster.close()

    # -- what is read -----------------------------------------------------------------------------------------------

    async def partitions(self, topic: str) -> list[TopicPartition]:
        """The partitions of a topic. Raises KafkaError when it does not exist."""
        self.cluster.track(topic)

        async def attempt() -> list[TopicPartition]:
            await self.cluster.refresh()
            info = self.cluster.topics.get(topic)
            if info is None or info.error is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                raise ClientError(
                    f"topic {topic!r} does not exist",
                    "'headrace topic list' shows those that do",
                    ErrorCode.INVALID_REQUEST,
                )
            if info.error is not ErrorCode.NONE:
                raise KafkaError(info.error, f"topic {topic!r}: {info.error.name}")
            return [TopicPartition(topic, number) for number in sorted(info.partitions)]

        return await with_retries(self.cluster, self.config.default_api_timeout_ms, attempt)

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Read these partitions from now on, from where `auto.offset.reset` says or where they were."""
        if self._group is not None and self._group.subscribed:
            raise ClientError(
                "this consumer has subscribed: its group assigns partitions",
                "use assign() or subscribe(), not both",
                ErrorCode.INVALID_REQUEST,
            )
        self._fetcher.assign(TopicPartition(*partition) for partition in partitions)
        self._ready = deque(r for r in self._ready if (r.topic, r.partition) in self._fetcher.assigned)

    def subscribe(
        self, topics: "Iterable[str] | str | re.Pattern[str]", listener: RebalanceListener | None = None
    ) -> None:
        """Read these topics together with the other members of the group. A pattern matches whole names."""
        group = self._need_group("subscribe")
        if self._fetcher.assigned and not group.subscribed:
            raise ClientError(
                "this consumer has assigned partitions itself",
                "use assign() or subscribe(), not both",
                ErrorCode.INVALID_REQUEST,
            )
        if isinstance(topics, re.Pattern):
            group.subscribe((), topics, listener)
            return
        names = [topics] if isinstance(topics, str) else list(topics)
        if not names:
            raise ClientError("no topics to subscribe to", "unsubscribe() leaves the group")
        group.subscribe(names, None, listener)

    async def unsubscribe(self) -> None:
        """Leave the group, or drop what was assigned."""
        if self._group is not None:
            await self._group.unsubscribe()
        self._fetcher.assign(())
        self._ready.clear()

    @property
    def subscription(self) -> list[str]:
        """The topics subscribed to; those that a pattern matched so far."""
        return [] if self._group is None else list(self._group.topics())

    @property
    def assignment(self) -> list[TopicPartition]:
        """The partitions being read."""
        return list(self._fetcher.assigned)

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Hand out nothing of these until they are resumed."""
        for partition in partitions:
            self._fetcher.state(partition).paused = True

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Go on with paused partitions."""
        for partition in partitions:
            self._fetcher.state(partition).paused = False
        self._fetcher.wake()

    # -- where ------------------------------------------------------------------------------------------------------

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Go on at this offset."""
        if offset < 0:
            raise ClientError(
                f"cannot seek to offset {offset}", "offsets begin at 0", ErrorCode.INVALID_REQUEST
            )
        self._move(partition, offset, None)

    def seek_to_beginning(self, partitions: Iterable[TopicPartition]) -> None:
        """Go on at the first record there is."""
        for partition in partitions:
            self._move(partition, UNKNOWN_OFFSET, EARLIEST)

    def seek_to_end(self, partitions: Iterable[TopicPartition]) -> None:
        """Go on after the last record there is."""
        for partition in partitions:
            self._move(partition, UNKNOWN_OFFSET, LATEST)

    def seek_to_time(self, partitions: Iterable[TopicPartition], timestamp_ms: int) -> None:
        """Go on at the first record of this time or later; at the end when there is none."""
        for partition in partitions:
            self._move(partition, UNKNOWN_OFFSET, timestamp_ms)

    def _move(self, partition: TopicPartition, offset: int, reset_to: int | None) -> None:
        self._fetcher.state(partition).move(offset, reset_to)
        self._ready = deque(r for r in self._ready if (r.topic, r.partition) != partition)
        self._fetcher.wake()

    async def position(self, partition: TopicPartition) -> int:
        """The offset of the next record of this partition, found first if need be. Raises KafkaError."""
        state = self._fetcher.state(partition)
        deadline_s = asyncio.get_running_loop().time() + self.config.default_api_timeout_ms / 1000
        try:
            async with asyncio.timeout_at(deadline_s):
                while state.position == UNKNOWN_OFFSET:
                    self._fetcher.wake()
                    await self._fetcher.wait()
                    if self._fetcher.errors:
                        raise self._fetcher.errors.popleft()
        except TimeoutError:
            raise RequestTimedOut(
                f"no position of {partition} within {self.config.default_api_timeout_ms} ms"
            ) from None
        waiting = next((r.offset for r in self._ready if (r.topic, r.partition) == partition), None)
        return state.position if waiting is None else waiting

    def high_watermark(self, partition: TopicPartition) -> int | None:
        """The end of what can be read, as the last fetch saw it; the last stable offset when reading committed."""
        state = self._fetcher.state(partition)
        end = state.last_stable_offset if self.config.read_committed else state.high_watermark
        return None if end == UNKNOWN_OFFSET else end

    async def lag(self, partition: TopicPartition) -> int:
        """How many offsets lie between the position and the end of what can be read. Raises KafkaError."""
        end = self.high_watermark(partition)
        position = await self.position(partition)
        if end is None:
            end = (await self.end_offsets([partition]))[partition]
        return max(0, end - position)

    async def beginning_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The first offset of each partition."""
        found = await self._list(dict.fromkeys(partitions, EARLIEST))
        return {partition: answer.offset for partition, answer in found.items()}

    async def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The offset after the last record that can be read, of each partition."""
        found = await self._list(dict.fromkeys(partitions, LATEST))
        return {partition: answer.offset for partition, answer in found.items()}

    async def offsets_for_times(
        self, times_ms: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """The first record at or after a time, of each partition; None where there is none."""
        found = await self._list(times_ms)
        return {p: None if answer.offset == UNKNOWN_OFFSET else answer for p, answer in found.items()}

    async def _list(self, wanted: Mapping[TopicPartition, int]) -> dict[TopicPartition, OffsetAndTimestamp]:
        return await list_offsets(
            self.cluster,
            wanted,
            read_committed=self.config.read_committed,
            timeout_ms=self.config.default_api_timeout_ms,
        )

    # -- commits ----------------------------------------------------------------------------------------------------

    async def commit(self, offsets: Offsets | None = None) -> None:
        """Store offsets for the group (None: all that was handed out); returns when they are. Raises KafkaError."""
        group = self._need_group("commit")
        self._refuse_commits_beside_transactions()
        await group.commit(group.due() if offsets is None else _entries(offsets))

    def commit_soon(self, offsets: Offsets | None = None, callback: CommitCallback | None = None) -> None:
        """Store offsets without waiting; `callback(offsets, error)` hears of the outcome, or else the log does."""
        group = self._need_group("commit")
        self._refuse_commits_beside_transactions()
        group.commit_soon(group.due() if offsets is None else _entries(offsets), callback)

    async def committed(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """What the group has committed; None where it has nothing."""
        return await self._need_group("committed").committed(partitions)

    def group_metadata(self) -> "GroupMetadata":
        """Who this consumer is in its group: what a transaction needs to commit offsets in its name."""
        group = self._need_group("group_metadata")
        assert self.config.group_id is not None
        return GroupMetadata(self.config.group_id, *group.identity)

    def _refuse_commits_beside_transactions(self) -> None:
        if self.delivery == "exactly_once":
            raise ClientError(
                "delivery=exactly_once commits offsets in transactions only",
                "use 'await tx.commit_offsets(consumer)'",
                ErrorCode.INVALID_REQUEST,
            )

    def _need_group(self, what: str) -> Group:
        if self._group is None:
            raise NotInGroup(f"{what} needs a group", "set group.id", ErrorCode.INVALID_GROUP_ID)
        return self._group

    def consumed(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """The offset after the last record that was handed out, of each partition: what a commit would store."""
        return {partition: OffsetAndMetadata(offset) for partition, offset in self._consumed().items()}

    def _consumed(self) -> dict[TopicPartition, int]:
        out = {
            partition: state.position
            for partition, state in self._fetcher.assigned.items()
            if state.position != UNKNOWN_OFFSET
        }
        for record in reversed(self._ready):
            partition = TopicPartition(record.topic, record.partition)
            if partition in out:
                out[partition] = record.offset
        return out

    # -- records ----------------------------------------------------------------------------------------------------

    async def poll(self, timeout_ms: float = 0, max_records: int | None = None) -> list[ConsumerRecord]:
        """Records at hand, or those that come within the timeout; an empty list when none do. Raises KafkaError."""
        count_max = self.config.max_poll_records if max_records is None else max_records
        await self._attend()
        if self._ready:
            return [self._ready.popleft() for _ in range(min(count_max, len(self._ready)))]
        records = self._fetcher.take(count_max)
        if not records:
            if timeout_ms <= 0:
                self._fetcher.wake()
                await asyncio.sleep(0)  # a loop of polls without a timeout must let the fetches run
                return records
            records = await self._poll_until(asyncio.get_running_loop().time() + timeout_ms / 1000, count_max)
        if records and self.delivery == "at_most_once":
            assert self._group is not None
            await self._group.commit(self._group.due())
        return records

    async def _poll_until(self, deadline_s: float, count_max: int) -> list[ConsumerRecord]:
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        self._need_something_to_read()
        while True:
            self._fetcher.wake()
            try:
                async with asyncio.timeout_at(min(deadline_s, loop.time() + STUCK_AFTER_S)):
                    await self._fetcher.wait()
            except TimeoutError:
                pass
            await self._attend()
            records = self._fetcher.take(count_max)
            now_s = loop.time()
            if records or now_s >= deadline_s:
                return records
            if now_s - begun_s >= STUCK_AFTER_S:
                self._warn_when_stuck(now_s)

    async def _attend(self) -> None:
        if self._group is not None:
            await self._group.attend()
            self._attended_s = asyncio.get_running_loop().time()
            if self._ready:
                assigned = self._fetcher.assigned
                if any((r.topic, r.partition) not in assigned for r in self._ready):
                    self._ready = deque(r for r in self._ready if (r.topic, r.partition) in assigned)

    def _need_something_to_read(self) -> None:
        subscribed = self._group is not None and self._group.subscribed
        if not subscribed and not self._fetcher.assigned:
            raise ClientError(
                "nothing to read: no topic was subscribed to and no partition assigned",
                "call subscribe() or assign() first",
                ErrorCode.INVALID_REQUEST,
            )

    @property
    def waits_for(self) -> str:
        """What keeps records from coming, in words; empty when there are simply none."""
        if self._group is not None and self._group.waits_for:
            return self._group.waits_for
        missing = [name for name in self.subscription if self._partition_count(name) == 0]
        if missing:
            return f"topic {missing[0]!r} to be created"
        if self._group is not None and self._group.subscribed and not self._fetcher.assigned:
            return f"partitions: group {self.config.group_id!r} has given this member none"
        if self._fetcher.assigned and all(s.paused for s in self._fetcher.assigned.values()):
            return "resume(): all partitions are paused"
        unknown = [str(p) for p, s in self._fetcher.assigned.items() if s.position == UNKNOWN_OFFSET]
        if unknown:
            return f"the offset of {unknown[0]} to begin at{self._last_error()}"
        failing = [str(p) for p, s in self._fetcher.assigned.items() if s.failures]
        return f"{failing[0]}{self._last_error()}" if failing else ""

    def _partition_count(self, topic: str) -> int:
        info = self.cluster.topics.get(topic)
        return 0 if info is None else len(info.partitions)

    def _last_error(self) -> str:
        return f" (the last error: {self.cluster.last_error})" if self.cluster.last_error is not None else ""

    def _warn_when_stuck(self, now_s: float) -> None:
        reason = self.waits_for
        if reason and now_s - self._warned_s >= STUCK_AFTER_S:
            self._warned_s = now_s
            _log.warning(
                f"the consumer waits for {reason}", extra={"fields": {"group": self.config.group_id}}
            )

    async def batches(
        self, max_records: int | None = None, timeout_ms: float | None = None
    ) -> AsyncIterator[list[ConsumerRecord]]:
        """Lists of records as they come, for ever; with a timeout also empty ones."""
        wait_ms = self.config.default_api_timeout_ms if timeout_ms is None else timeout_ms
        while True:
            records = await self.poll(wait_ms, max_records)
            if records or timeout_ms is not None:
                yield records

    @property
    def ready_records(self) -> "deque[ConsumerRecord]":
        """Records that iteration polled and has not handed out."""
        return self._ready

    def __aiter__(self) -> "Consumer":
        return self

    async def __anext__(self) -> ConsumerRecord:
        if self._ready:
            if self._group is None:
                return self._ready.popleft()
            if asyncio.get_running_loop().time() - self._attended_s > ATTEND_EVERY_S:
                await self._attend()
        while not self._ready:
            self._ready.extend(await self.poll(self.config.default_api_timeout_ms))
        return self._ready.popleft()


class GroupMetadata(NamedTuple):
    """A member of a group, as transactions name it."""

    group_id: str
    generation: int
    member_id: str
    instance_id: str | None


def _entries(offsets: Offsets) -> dict[TopicPartition, OffsetAndMetadata]:
    return {
        TopicPartition(*partition): entry
        if isinstance(entry, OffsetAndMetadata)
        else OffsetAndMetadata(entry)
        for partition, entry in offsets.items()
    }


def _with_delivery(values: dict[str, object], delivery: DeliveryMode | None) -> dict[str, object]:
    """The keys that a named delivery mode stands for. Raises ConfigError when others contradict it."""
    if delivery is None:
        return values
    modes: dict[str, dict[str, object]] = {
        "at_most_once": {"enable.auto.commit": False},
        "at_least_once": {"enable.auto.commit": True},
        "exactly_once": {"enable.auto.commit": False, "isolation.level": "read_committed"},
    }
    if delivery not in modes:
        raise ConfigError(f"no delivery mode {delivery!r}", f"the modes are {', '.join(modes)}")
    if values.get("group.id") is None:
        raise ConfigError(f"delivery={delivery} needs a group, to remember what was read", "set group.id")
    for name, wanted in modes[delivery].items():
        if name in values and str(values[name]).lower() != str(wanted).lower():
            raise ConfigError(f"delivery={delivery} needs {name}={wanted}", f"remove {name}, or the mode")
    return values | modes[delivery]
