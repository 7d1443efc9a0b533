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
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeAlias

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.log import get_logger
from headrace.client.cluster import Cluster
from headrace.client.config import consumer_config, settings
from headrace.client.error_policy import OnError, error_handler
from headrace.client.errors import ClientError, ConfigError, NotInGroup
from headrace.client.fetched import Chunk, ConsumerRecord
from headrace.client.fetcher import Fetcher
from headrace.client.incoming import Incoming
from headrace.client.offsets import UNKNOWN_OFFSET
from headrace.client.reading import Reading
from headrace.client.serializers import Deserializer, Format, deserializer_of
from headrace.client.statistics import Statistics, counted
from headrace.client.topics import OffsetAndMetadata, TopicPartition
from headrace.client.tracing import Tracing
from headrace.client.transport import Connector

if TYPE_CHECKING:
    from headrace.client.columnar import Makers
    from headrace.client.group import Group, RebalanceListener
    from headrace.client.processing import Handler, Mode, Order, Processor

__all__ = ["Consumer", "ConsumerRecord"]

STUCK_AFTER_S = 10.0
ATTEND_EVERY_S = 0.1
WORKERS = 16
PENDING_MAX = 1_000

DeliveryMode: TypeAlias = Literal["at_most_once", "at_least_once", "exactly_once"]
Offsets: TypeAlias = Mapping[TopicPartition, "OffsetAndMetadata | int"]
CommitCallback: TypeAlias = Callable[
    [Mapping[TopicPartition, OffsetAndMetadata], "KafkaError | None"], object
]

_log = get_logger(__name__)


class Consumer(Reading):
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
        key_deserializer: "Format | Deserializer | str | None" = None,
        value_deserializer: "Format | Deserializer | str | None" = None,
        on_error: OnError = "stop",
        tracing: bool = False,
        connector: Connector | None = None,
        random_source: random.Random | None = None,
        **keywords: object,
    ) -> None:
        values = _with_delivery(settings(config, keywords), delivery)
        self.config = consumer_config(values)
        self._values = values
        self.delivery = delivery
        self.cluster = Cluster(self.config, connector=connector, random_source=random_source)
        self._fetcher = Fetcher(self.config, self.cluster)
        self._ready: deque[ConsumerRecord] = deque()  # polled by iteration and not handed out yet
        self._on_error = error_handler(on_error)
        self._incoming = Incoming(
            deserializer_of(key_deserializer, "key_deserializer"),
            deserializer_of(value_deserializer, "value_deserializer"),
            self._on_error,
        )
        self._tracing = Tracing() if tracing else None
        self.makers: Makers | None = None  # of the tables that poll_arrow returns
        self._processor: Processor | None = None
        self._group: Group | None = None
        self._attended_s = 0.0
        self._stuck_s: float | None = None  # when to say what is missing; None while records come
        if self.config.group_id is not None:
            from headrace.client import group  # by far the larger half of a consumer

            self._group = group.Group(
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
            try:
                await self._fetcher.close()
            finally:
                await self.cluster.close()

    # -- what is read -----------------------------------------------------------------------------------------------

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Read these partitions from now on, from where `auto.offset.reset` says or where they were."""
        if self._group is not None and self._group.subscribed:
            raise ClientError(
                "this consumer has subscribed: its group assigns partitions",
                "use assign() or subscribe(), not both",
                ErrorCode.INVALID_REQUEST,
            )
        self._fetcher.assign(TopicPartition(*partition) for partition in partitions)
        self._drop_unassigned()

    def subscribe(
        self, topics: "Iterable[str] | str | re.Pattern[str]", listener: "RebalanceListener | None" = None
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
        self._drop_unassigned()

    @property
    def subscription(self) -> list[str]:
        """The topics subscribed to; those that a pattern matched so far."""
        return [] if self._group is None else list(self._group.topics())

    def _moved(self, partition: TopicPartition) -> None:
        self._ready = deque(r for r in self._ready if (r.topic, r.partition) != partition)
        self._incoming.keep(lambda record: (record.topic, record.partition) != partition)
        if self._processor is not None:
            self._processor.forget(frozenset([partition]))

    def _first_buffered(self, partition: TopicPartition) -> int | None:
        buffered = (*self._ready, *self._incoming.held)
        return next((r.offset for r in buffered if (r.topic, r.partition) == partition), None)

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

    def _need_group(self, what: str) -> "Group":
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
        for record in (*reversed(self._incoming.held), *reversed(self._ready)):
            partition = TopicPartition(record.topic, record.partition)
            if partition in out:
                out[partition] = record.offset
        if self._processor is not None:
            done = self._processor.committable()
            out |= {partition: done[partition] for partition in out if partition in done}
        return out

    # -- records ----------------------------------------------------------------------------------------------------

    async def poll(self, timeout_ms: float = 0, max_records: int | None = None) -> list[ConsumerRecord]:
        """Records at hand, or those that come within the timeout; an empty list when none do. Raises KafkaError."""
        count_max = self.config.max_poll_records if max_records is None else max_records
        if self._group is not None:
            await self._attend()
        if self._ready:
            return [self._ready.popleft() for _ in range(min(count_max, len(self._ready)))]
        records = [] if self._incoming.held else self._fetcher.take(count_max)
        if not records and not self._incoming.held:
            if timeout_ms <= 0:
                self._fetcher.wake()
                await asyncio.sleep(0)  # a loop of polls without a timeout must let the fetches run
                return records
            records = await self._poll_until(asyncio.get_running_loop().time() + timeout_ms / 1000, count_max)
        if self._incoming.needed:
            records = await self._incoming.decode(records)
        if records and self.delivery == "at_most_once":
            assert self._group is not None
            await self._group.commit(self._group.due())
        return records

    async def _poll_until(self, deadline_s: float, count_max: int) -> list[ConsumerRecord]:
        loop = asyncio.get_running_loop()
        stuck_s = self._stuck_s or loop.time() + STUCK_AFTER_S
        self._need_something_to_read()
        while True:
            self._fetcher.nudge()
            now_s = await self._fetcher.wait(min(deadline_s, stuck_s))
            if self._group is not None:
                await self._attend()
                now_s = max(now_s, loop.time())
            records = self._fetcher.take(count_max)
            if not records and now_s >= stuck_s:
                self._warn_when_stuck()
                stuck_s = now_s + STUCK_AFTER_S
            if records or now_s >= deadline_s:
                self._stuck_s = None if records else stuck_s
                return records

    async def _attend(self) -> None:
        if self._group is not None:
            await self._group.attend()
            self._attended_s = asyncio.get_running_loop().time()
            if self._ready or self._incoming.held:
                self._drop_unassigned()

    def _drop_unassigned(self) -> None:
        assigned = self._fetcher.assigned
        if any((r.topic, r.partition) not in assigned for r in self._ready):
            self._ready = deque(r for r in self._ready if (r.topic, r.partition) in assigned)
        self._incoming.keep(lambda record: (record.topic, record.partition) in assigned)

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
        wanted = [*self.subscription, *sorted({at.topic for at in self._fetcher.assigned})]
        missing = [name for name in wanted if self._partition_count(name) == 0]
        if missing and self.cluster.nodes:
            return f"topic {missing[0]!r} to be created: it does not exist, or was deleted"
        if self._group is not None and self._group.waits_for:
            return self._group.waits_for
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

    def _warn_when_stuck(self) -> None:
        reason = self.waits_for
        if reason:
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

    def feed(self, on_news: "Callable[[], object]") -> bool:
        """Call back whenever `take_ready` may find something; False where records must come through `poll`."""
        if self._group is not None or self._incoming.needed:
            return False
        self._fetcher.on_news = on_news
        return True

    def take_ready(self) -> bool:
        """Make ready for iteration what is at hand; whether there is anything. Raises as `poll`."""
        self._ready.extend(self._fetcher.take(self.config.max_poll_records))
        return bool(self._ready)

    @property
    def expectant(self) -> bool:
        """Whether nothing is at hand and a fetch is under way. May be asked by any thread."""
        return not self._ready and self._fetcher.expectant

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

    # -- columns ----------------------------------------------------------------------------------------------------

    async def poll_arrow(self, timeout_ms: float = 0, columns: Sequence[str] | None = None) -> Any:
        """What `poll` would give, as an Arrow table (`.to_pandas()` and `polars.from_arrow` follow). Needs pyarrow."""
        from headrace.client.arrow import DEFAULT_COLUMNS
        from headrace.client.columnar import poll_table

        return await poll_table(self, timeout_ms, columns or DEFAULT_COLUMNS)

    async def read_range(
        self,
        topic: str,
        partition: int,
        start: int | None = None,
        end: int | None = None,
        columns: Sequence[str] | None = None,
    ) -> Any:
        """The records of [start, end) as an Arrow table, beside whatever this consumer reads. Needs pyarrow."""
        from headrace.client.arrow import DEFAULT_COLUMNS
        from headrace.client.arrow_read import ArrowReader

        reader = ArrowReader(self._values, cluster=self.cluster)
        return await reader.table(topic, partition, start, end, columns or DEFAULT_COLUMNS)

    async def poll_chunks(self, deadline_s: float) -> list[Chunk]:
        """What was fetched for each partition, undecoded, or what comes before the deadline."""
        self._need_something_to_read()
        now_s = asyncio.get_running_loop().time()
        while True:
            await self._attend()
            chunks = self._fetcher.take_chunks()
            if chunks or now_s >= deadline_s:
                return chunks
            self._fetcher.nudge()
            now_s = await self._fetcher.wait(deadline_s)

    # -- processing -------------------------------------------------------------------------------------------------

    async def process(
        self,
        handler: "Handler",
        *,
        mode: "Mode" = "fifo",
        order: "Order | None" = None,
        workers: int | None = None,
        pending_max: int = PENDING_MAX,
    ) -> None:
        """Give every record to a coroutine function, until `stop_processing`, cancellation or an error.

        Mode `fifo` keeps the strict order of each partition (or, with `order="key"`, of each key), one record at a time
        unless more `workers` are asked for; mode `parallel` handles up to `workers` records at once, in order per key
        (or, with `order="record"`, in none). Commits pass only what is done; at most `pending_max` records are in hand.
        An error of the handler goes to `on_error` of the constructor.
        """
        from headrace.client.processing import Processor, default_order, describe

        chosen = order or default_order(mode)
        if (misfit := describe(mode, chosen)) is not None:
            raise ConfigError(misfit, "see the guide on modes")
        if self.delivery in ("at_most_once", "exactly_once"):
            raise ConfigError(
                f"process() commits what is done, which is not delivery={self.delivery}",
                "use delivery=at_least_once, or poll and commit yourself",
            )
        processor = Processor(
            self,
            self._traced(handler),
            mode=mode,
            order=chosen,
            workers=workers or (1 if mode == "fifo" else WORKERS),
            pending_max=pending_max,
            on_error=self._on_error,
        )
        self._processor = processor
        if self._group is not None:
            self._group.before_release = self._release
        try:
            await processor.run()
        finally:
            await self._end_processing(processor)

    def stop_processing(self) -> None:
        """Take no more records; `process` returns when those in hand are done."""
        if self._processor is not None:
            self._processor.stop()

    async def _end_processing(self, processor: "Processor") -> None:
        """Commit what is done, and go back to the first record that is not."""
        try:
            if self._group is not None and self.config.enable_auto_commit:
                await self._group.commit(self._group.due())
        except KafkaError as error:
            _log.warning("offsets were not committed", extra={"fields": {"reason": error.message}})
        finally:
            self._processor = None
            if self._group is not None:
                self._group.before_release = None
            for partition, offset in processor.committable().items():
                if partition in self._fetcher.assigned:
                    self._move(partition, offset, None)

    async def _release(self, partitions: frozenset[TopicPartition], lost: bool) -> None:
        if self._processor is not None:
            await self._processor.release(partitions, lost=lost)

    def _traced(self, handler: "Handler") -> "Handler":
        tracing = self._tracing
        if tracing is None:
            return handler

        async def traced(record: ConsumerRecord) -> object:
            with tracing.processing(record):
                return await handler(record)

        return traced

    def statistics(self) -> Statistics:
        """Counters since the consumer began, and gauges of now; `prometheus_text` renders them."""
        assigned = self._fetcher.assigned
        lags = {
            str(partition): float(max(0, state.high_watermark - state.position))
            for partition, state in assigned.items()
            if state.high_watermark != UNKNOWN_OFFSET and state.position != UNKNOWN_OFFSET
        }
        self._fetcher.counters.records_not_decoded = self._incoming.failures
        return counted(self._fetcher.counters) | {
            "assigned_partitions": len(assigned),
            "fetched_ahead_bytes": self._fetcher.held_bytes(),
            "lag": lags,
        }


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
