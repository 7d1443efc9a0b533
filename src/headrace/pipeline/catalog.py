"""What the driver asks of brokers: which partitions there are, and which offsets they have.

Owns one client of the driver and the questions of a source. Invariant: every question ends in an answer or an error
within the client's time-outs; a topic is told apart from another of the same name by its id. Called by `source`.
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from headrace.base.errors import ErrorCode, KafkaError
from headrace.client.arrow_read import ArrowReader, OffsetsGone
from headrace.client.arrow_txn import CommittedOffset, Coordination
from headrace.client.errors import Disconnected, RequestTimedOut
from headrace.client.offsets import missing_partition
from headrace.client.retry import with_retries
from headrace.client.topics import TopicPartition
from headrace.pipeline.ahead import RANGES_AT_ONCE_MAX
from headrace.pipeline.options import EARLIEST, LATEST, OptionError, PerPartition, SourceOptions
from headrace.pipeline.ranges import OffsetRange, Offsets
from headrace.wire.messages import Message

T = TypeVar("T")
COMMIT_TIMEOUT_MS = 10_000
FIRST_CONTACT_TIMEOUT_MS = 10_000  # a driver is often started again beside the brokers that it lost


class Catalog:
    """A blocking client for the questions of a source. Can be pickled: connections are made again where needed."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._runner: asyncio.Runner | None = None
        self._reader: ArrowReader | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options, "_runner": None, "_reader": None}

    def close(self) -> None:
        """Close the connections; the next question opens them again."""
        if self._runner is not None and self._reader is not None:
            self._runner.run(self._reader.close())
            self._runner.close()
        self._runner = self._reader = None

    def _run(self, ask: Callable[[ArrowReader], Awaitable[T]]) -> T:
        if self._runner is None or self._reader is None:
            self._runner = asyncio.Runner()
            self._reader = ArrowReader(self._options.consumer)
            self._reader.cluster.first_contact_timeout_ms = FIRST_CONTACT_TIMEOUT_MS
        reader = self._reader

        async def asked() -> T:
            return await ask(reader)

        for attempt in range(self._options.offset_retries):
            try:
                return self._runner.run(asked())
            except KafkaError as error:
                # What no broker answered was tried again by the client, until its own time-out.
                final = isinstance(error, Disconnected | RequestTimedOut) or not error.retriable
                if final or attempt == self._options.offset_retries - 1:
                    raise
                time.sleep(self._options.offset_retry_interval_ms / 1000)
        raise AssertionError("unreachable")

    # -- topics -----------------------------------------------------------------------------------------------------

    def partitions(self) -> list[TopicPartition]:
        """All partitions that the options subscribe to, as of now, in order."""
        options = self._options
        if options.strategy == "assign":
            found = [TopicPartition(topic, n) for topic, numbers in options.assigned.items() for n in numbers]
            self._run(lambda reader: self._describe(reader, options.topics))
            return sorted(found)
        if options.strategy == "subscribe":
            names = options.topics
        else:
            pattern = re.compile(options.subscription)
            names = [name for name in self._run(self._all_names) if pattern.fullmatch(name)]
        counts = self._run(lambda reader: self._describe(reader, names))
        return sorted(TopicPartition(name, n) for name, numbers in counts.items() for n in numbers)

    def topic_ids(self, names: Iterable[str]) -> dict[str, str]:
        """The ids of topics that were asked about before, as text; empty where nobody asked or a broker has none."""
        if self._reader is None:
            return dict.fromkeys(names, "")
        ids = {name: self._reader.cluster.topic_id(name) for name in names}
        return {name: topic_id.hex() if any(topic_id) else "" for name, topic_id in ids.items()}

    async def _all_names(self, reader: ArrowReader) -> list[str]:
        reply = await _described(reader, None)  # what was learned before may be of topics that are gone
        return [topic.name for topic in reply.topics if not topic.is_internal and topic.error_code == 0]

    async def _describe(self, reader: ArrowReader, names: list[str]) -> dict[str, list[int]]:
        for name in names:
            reader.cluster.track(name)
        await _described(reader, names)
        found = {}
        for name in names:
            info = reader.cluster.topics.get(name)
            if info is None or info.error is not ErrorCode.NONE:
                raise missing_partition(reader.cluster, TopicPartition(name, 0))
            found[name] = sorted(info.partitions)
        return found

    # -- offsets ----------------------------------------------------------------------------------------------------

    def earliest(self, partitions: Iterable[TopicPartition]) -> Offsets:
        """Where each partition begins."""
        return self._list(dict.fromkeys(partitions, EARLIEST))

    def latest(self, partitions: Iterable[TopicPartition]) -> Offsets:
        """Where each partition ends: for read_committed, where what is decided ends."""
        return self._list(dict.fromkeys(partitions, LATEST))

    def at_times(self, times: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]:
        """The first offset at or after a time; None where there is no such record."""
        found = self._list(times)
        return {p: offset if offset >= 0 else None for p, offset in found.items()}

    def _list(self, wanted: Mapping[TopicPartition, int]) -> Offsets:
        if not wanted:
            return {}
        answers = self._run(lambda reader: reader.list_offsets(wanted))
        self.epochs = {p: answer.leader_epoch for p, answer in answers.items()}
        return {p: answer.offset for p, answer in answers.items()}

    def read(self, ranges: Iterable[OffsetRange], columns: Sequence[str], bytes_max: int) -> list[Any] | None:
        """The record batches of small ranges, in order; None when they are larger than that, or not all there."""
        room = asyncio.Semaphore(RANGES_AT_ONCE_MAX)
        held = 0

        async def one(reader: ArrowReader, part: OffsetRange) -> list[Any]:
            nonlocal held
            found = []
            patience = self._options.poll_timeout_ms
            async with room:
                batches = reader.read_range(
                    part.topic, part.partition, part.start, part.end, columns, no_progress_timeout_ms=patience
                )
                async with aclosing(batches):
                    async for batch in batches:
                        held += batch.nbytes
                        if held > bytes_max:
                            break
                        found.append(batch)
            return found

        async def every(reader: ArrowReader) -> list[list[Any]]:
            nonlocal held
            held = 0
            found = await asyncio.gather(*(one(reader, part) for part in ranges), return_exceptions=True)
            for error in found:  # only when all have ended: nothing of it goes on behind the next question
                if isinstance(error, BaseException):
                    raise error
            return [batches for batches in found if isinstance(batches, list)]

        try:
            found = self._run(every)
        except OffsetsGone:
            return None  # what to do about that is the task's
        return [batch for batches in found for batch in batches] if held <= bytes_max else None

    def resolve_start(self, partitions: list[TopicPartition], streaming: bool) -> Offsets:
        """The offsets that the starting options mean. Raises OptionError."""
        options = self._options
        default = LATEST if streaming else EARLIEST
        if options.starting_timestamp is not None:
            return self._by_time(partitions, options.starting_timestamp, default, starting=True)
        return self._by_offset(partitions, options.starting, default, "startingOffsets")

    def resolve_end(self, partitions: list[TopicPartition]) -> Offsets:
        """The offsets that the ending options mean. Raises OptionError."""
        options = self._options
        if options.ending_timestamp is not None:
            return self._by_time(partitions, options.ending_timestamp, LATEST, starting=False)
        return self._by_offset(partitions, options.ending, LATEST, "endingOffsets")

    def _by_offset(
        self, partitions: list[TopicPartition], given: str | PerPartition, default: int, name: str
    ) -> Offsets:
        if isinstance(given, str):
            return self.earliest(partitions) if given == "earliest" else self.latest(partitions)
        _check_named(given, partitions, name)
        wanted = {p: given.get(p.topic, {}).get(p.partition, default) for p in partitions}
        ends = {
            **self.earliest([p for p, offset in wanted.items() if offset == EARLIEST]),
            **self.latest([p for p, offset in wanted.items() if offset == LATEST]),
        }
        return {p: ends.get(p, offset) for p, offset in wanted.items()}

    def _by_time(
        self, partitions: list[TopicPartition], given: int | PerPartition, default: int, *, starting: bool
    ) -> Offsets:
        name = "startingOffsetsByTimestamp" if starting else "endingOffsetsByTimestamp"
        if isinstance(given, int):
            times = dict.fromkeys(partitions, given)
        else:
            _check_named(given, partitions, name)
            times = {
                p: given[p.topic][p.partition] for p in partitions if p.partition in given.get(p.topic, {})
            }
        found = self.at_times(times)
        without = [p for p, offset in found.items() if offset is None]
        if without and starting and not self._options.latest_when_no_timestamp:
            raise OptionError(
                f"No offset matched from request of topic-partition {without[0].topic}-{without[0].partition} and "
                f"timestamp {times[without[0]]}."
            )
        rest = [p for p in partitions if p not in times]
        ends = self.latest([*without, *(rest if default == LATEST else [])])
        if default == EARLIEST:
            ends |= self.earliest(rest)
        return {p: ends[p] if (offset := found.get(p)) is None else offset for p in partitions}

    # -- progress ---------------------------------------------------------------------------------------------------

    def publish(self, group: str, offsets: Offsets) -> None:
        """Commit offsets to a group without members, so that lag shows where people look for it."""

        async def commit(reader: ArrowReader) -> None:
            calls = Coordination(reader.cluster, COMMIT_TIMEOUT_MS)
            for topic in sorted({p.topic for p in offsets}):
                mine = {p.partition: CommittedOffset(o, "") for p, o in offsets.items() if p.topic == topic}
                await calls.store_offsets(group, topic, mine)

        self._run(commit)


async def _described(reader: ArrowReader, names: list[str] | None) -> Message:
    """What brokers say of topics; asked again while none answers."""
    return await with_retries(
        reader.cluster, reader.config.default_api_timeout_ms, lambda: reader.cluster.describe(names)
    )


def _check_named(given: PerPartition, partitions: list[TopicPartition], name: str) -> None:
    """Offsets may be named for some partitions only, but not for any that are not read."""
    known = set(partitions)
    for topic, numbers in given.items():
        for number in numbers:
            if (topic, number) not in known:
                raise OptionError(
                    f"Option '{name}' names partition {number} of '{topic}', which is not among those subscribed to."
                )
