"""The consumer: records of assigned partitions, in order.

Owns the public surface: `assign`, `seek`, `poll`, iteration, offsets. What happens inside: `fetcher` reads
ahead, `fetched` decodes, `offsets` asks for offsets. Invariants: `poll` returns within its timeout;
`position` is the offset of the next record that will be handed out. Called by the command line and by
people's programs.

    async with Consumer({"bootstrap.servers": "127.0.0.1:9092", "auto.offset.reset": "earliest"}) as consumer:
        consumer.assign([TopicPartition("orders", 0)])
        async for record in consumer: ...
"""

import asyncio
import random
from collections import deque
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Self

from headrace.base.errors import ErrorCode, KafkaError
from headrace.client.cluster import Cluster
from headrace.client.config import consumer_config
from headrace.client.errors import ClientError, RequestTimedOut
from headrace.client.fetched import ConsumerRecord
from headrace.client.fetcher import Fetcher
from headrace.client.offsets import EARLIEST, LATEST, UNKNOWN_OFFSET, OffsetAndTimestamp, list_offsets
from headrace.client.retry import with_retries
from headrace.client.topics import TopicPartition
from headrace.client.transport import Connector

__all__ = ["Consumer", "ConsumerRecord"]


class Consumer:
    """Reads assigned partitions. Configuration is Kafka's consumer keys."""

    def __init__(
        self,
        config: Mapping[str, object],
        *,
        connector: Connector | None = None,
        random_source: random.Random | None = None,
    ) -> None:
        self.config = consumer_config(config)
        self.cluster = Cluster(self.config, connector=connector, random_source=random_source)
        self._fetcher = Fetcher(self.config, self.cluster)
        self._ready: deque[ConsumerRecord] = deque()  # polled by iteration and not handed out yet

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop reading and close the connections."""
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
        self._fetcher.assign(TopicPartition(*partition) for partition in partitions)
        self._ready = deque(r for r in self._ready if (r.topic, r.partition) in self._fetcher.assigned)

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

    # -- records ----------------------------------------------------------------------------------------------------

    async def poll(self, timeout_ms: float = 0, max_records: int | None = None) -> list[ConsumerRecord]:
        """Records at hand, or those that come within the timeout; an empty list when none do. Raises KafkaError."""
        count_max = self.config.max_poll_records if max_records is None else max_records
        if self._ready:
            return [self._ready.popleft() for _ in range(min(count_max, len(self._ready)))]
        records = self._fetcher.take(count_max)
        if records or timeout_ms <= 0:
            if not records:
                self._fetcher.wake()
                await asyncio.sleep(0)  # a loop of polls without a timeout must let the fetches run
            return records
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                while not records:
                    self._fetcher.wake()
                    await self._fetcher.wait()
                    records = self._fetcher.take(count_max)
        except TimeoutError:
            pass
        return records

    def __aiter__(self) -> "Consumer":
        return self

    async def __anext__(self) -> ConsumerRecord:
        while not self._ready:
            self._ready.extend(await self.poll(self.config.default_api_timeout_ms))
        return self._ready.popleft()
