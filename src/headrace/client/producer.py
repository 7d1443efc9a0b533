"""The producer: records in, promises out.

Owns the public surface: `send`, `flush`, `close`. What happens inside: `partitioner` chooses, `accumulator`
holds, `sender` sends. Invariants: `send` waits only for metadata and for room in the buffer, and for at most
`max.block.ms`; every promise ends; `close` returns only when all of them have. Called by the command line and
by people's programs.

    async with Producer({"bootstrap.servers": "127.0.0.1:9092"}) as producer:
        delivery = await producer.send("orders", b"value", key=b"key")    # in the buffer
        metadata = await delivery                                          # acknowledged
"""

import asyncio
import random
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from headrace.base.errors import ErrorCode, KafkaError
from headrace.client.accumulator import Accumulator
from headrace.client.batches import Batch, Delivery, Headers, RecordMetadata, size_upper_bound
from headrace.client.cluster import Cluster, TopicInfo
from headrace.client.config import producer_config
from headrace.client.errors import BufferFull, ClientError, Closed, RecordTooLarge
from headrace.client.partitioner import Partitioner, StickyPartitioner
from headrace.client.retry import with_retries
from headrace.client.sender import Sender
from headrace.client.topics import TopicPartition
from headrace.client.transport import Connector
from headrace.records.batch import HEADER_SIZE

__all__ = ["Delivery", "Producer", "RecordMetadata"]


class Producer:
    """Sends records to topics. Configuration is Kafka's producer keys; idempotent by default."""

    def __init__(
        self,
        config: Mapping[str, object],
        *,
        partitioner: Partitioner | None = None,
        connector: Connector | None = None,
        random_source: random.Random | None = None,
    ) -> None:
        self.config = producer_config(config)
        self.cluster = Cluster(self.config, connector=connector, random_source=random_source)
        self._partitioner = partitioner or StickyPartitioner(self.config.batch_size, self.cluster.random)
        self._accumulator = Accumulator(self.config)
        self._sender: Sender | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error nobody waits for what is still on its way.
        await self.close(timeout_ms=None if error is None else 0)

    async def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Headers = (),
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> Delivery:
        """Put a record into the buffer; the promise it returns ends when it is acknowledged.

        Raises KafkaError when the topic is not known, the record can never fit, or the buffer stays full.
        """
        if self._closed:
            raise Closed("the producer is closed")
        info = self.cluster.topics.get(topic)
        if info is None or not info.partitions:
            info = await self._topic(topic, self.config.max_block_ms)
        size_bytes = size_upper_bound(key, value, headers)
        if size_bytes + HEADER_SIZE > self.config.max_request_size:
            raise RecordTooLarge(
                f"a record of {size_bytes} bytes is larger than max.request.size={self.config.max_request_size}",
                "raise max.request.size, and max.message.bytes of the topic",
            )
        if partition is None:
            partition = self._partitioner(info, key, size_bytes)
        elif partition not in info.partitions:
            await self._require_partition(topic, partition)
        now_ms = time.time_ns() // 1_000_000 if timestamp_ms is None else timestamp_ms
        fields = (now_ms, key, value, headers)
        accumulator = self._accumulator
        fast = accumulator.append_fast((topic, partition), fields, size_bytes)
        if fast is not None:
            return fast
        if not accumulator.has_room(size_bytes):
            await self._wait_for_room(size_bytes)
        now_s = asyncio.get_running_loop().time()
        delivery, look = accumulator.append(TopicPartition(topic, partition), fields, size_bytes, now_s)
        if accumulator.pressed:
            accumulator.wake_next()
        if look:
            self._sending().wake()
        return delivery

    async def partitions(self, topic: str, timeout_ms: int | None = None) -> int:
        """How many partitions a topic has (asking the cluster, which may create it). Raises KafkaError."""
        wait_ms = self.config.max_block_ms if timeout_ms is None else timeout_ms
        return len((await self._topic(topic, wait_ms)).partitions)

    async def flush(self) -> None:
        """Send what is buffered without waiting for more; returns when all of it is acknowledged or has failed."""
        sender = self._sending()
        sender.hurry += 1
        sender.wake()
        try:
            while pending := [batch for batch in self._accumulator if not batch.done]:
                await self._finished(pending)
        finally:
            sender.hurry -= 1

    async def close(self, timeout_ms: int | None = None) -> None:
        """Flush, for at most `timeout_ms`; fail what is left; close the connections."""
        if self._closed:
            return
        self._closed = True
        try:
            async with asyncio.timeout(None if timeout_ms is None else timeout_ms / 1000):
                if self._sender is not None:
                    await self.flush()
        except TimeoutError:
            pass
        finally:
            if self._sender is not None:
                await self._sender.stop(Closed("the producer was closed before the record was acknowledged"))
            await self.cluster.close()

    @property
    def buffered_bytes(self) -> int:
        """Bytes of records that are not acknowledged yet."""
        return self._accumulator.held_bytes

    # -- inside -----------------------------------------------------------------------------------------------------

    def _sending(self) -> Sender:
        if self._sender is None:
            self._sender = Sender(self.config, self.cluster, self._accumulator)
            self._sender.start()
        return self._sender

    async def _finished(self, batches: list[Batch]) -> None:
        """Wait for these; their halves, when one is split, are found by the next look."""
        await asyncio.wait([batch.future for batch in batches])

    async def _wait_for_room(self, size_bytes: int) -> None:
        self._sending().wake()  # what lingers must go now
        try:
            async with asyncio.timeout(self.config.max_block_ms / 1000):
                await self._accumulator.wait_for_room(size_bytes)
        except TimeoutError:
            reason = f": {self.cluster.last_error}" if self.cluster.last_error is not None else ""
            size, wait_ms = self.config.buffer_memory, self.config.max_block_ms
            raise BufferFull(
                f"the buffer of {size} bytes had no room for {wait_ms} ms{reason}",
                "send more slowly, or raise buffer.memory or max.block.ms",
            ) from None
        if self._closed:
            raise Closed("the producer was closed")

    async def _topic(self, topic: str, timeout_ms: int) -> TopicInfo:
        self.cluster.track(topic)

        async def attempt() -> TopicInfo:
            await self.cluster.refresh(create=True)
            info = self.cluster.topics.get(topic)
            if info is None or info.error is not ErrorCode.NONE or not info.partitions:
                code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if info is None else info.error
                raise KafkaError(code, f"topic {topic!r}: {code.name}")
            return info

        try:
            return await with_retries(self.cluster, timeout_ms, attempt)
        except KafkaError as error:
            if error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                raise _unknown_topic(topic) from None
            raise

    async def _require_partition(self, topic: str, partition: int) -> None:
        """Look at fresh metadata, which may have a partition that is new; raise when it has not."""
        count = len((await self._topic(topic, self.config.max_block_ms)).partitions)
        if not 0 <= partition < count:
            raise ClientError(
                f"topic {topic!r} has {count} partitions, so there is no partition {partition}",
                f"use 0 to {count - 1}",
                ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            )


def _unknown_topic(topic: str) -> ClientError:
    return ClientError(
        f"topic {topic!r} does not exist",
        f"'headrace topic create {topic}' creates it",
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    )
