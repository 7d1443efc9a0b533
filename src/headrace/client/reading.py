"""Where a consumer reads: its partitions, positions, and the offsets there are.

Owns the half of the consumer that has nothing to do with groups or with handing out records. Invariants: `position`
is the offset of the next record that will be handed out, whatever was fetched or buffered ahead; after `seek`
nothing from before it is handed out. Extended by `consumer`.
"""

import asyncio
from collections.abc import Iterable, Mapping

from headrace.base.errors import ErrorCode, KafkaError
from headrace.client.cluster import Cluster
from headrace.client.config import ConsumerConfig
from headrace.client.errors import ClientError, RequestTimedOut
from headrace.client.fetcher import Fetcher
from headrace.client.offsets import EARLIEST, LATEST, UNKNOWN_OFFSET, OffsetAndTimestamp, list_offsets
from headrace.client.retry import with_retries
from headrace.client.topics import TopicPartition


class Reading:
    """Partitions and positions of a consumer."""

    config: ConsumerConfig
    cluster: Cluster
    _fetcher: Fetcher

    def _moved(self, partition: TopicPartition) -> None:
        """Forget what was buffered of a partition that is read from elsewhere now."""
        raise NotImplementedError

    def _first_buffered(self, partition: TopicPartition) -> int | None:
        """The offset of the first record that was taken from the fetcher and not handed out."""
        raise NotImplementedError

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
        self._moved(partition)
        self._fetcher.wake()

    async def position(self, partition: TopicPartition) -> int:
        """The offset of the next record of this partition, found first if need be. Raises KafkaError."""
        state = self._fetcher.state(partition)
        now_s = asyncio.get_running_loop().time()
        deadline_s = now_s + self.config.default_api_timeout_ms / 1000
        while state.position == UNKNOWN_OFFSET:
            if now_s >= deadline_s:
                wait_ms = self.config.default_api_timeout_ms
                raise RequestTimedOut(f"no position of {partition} within {wait_ms} ms")
            self._fetcher.wake()
            now_s = await self._fetcher.wait(deadline_s)
            if self._fetcher.errors:
                raise self._fetcher.errors.popleft()
        waiting = self._first_buffered(partition)
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
