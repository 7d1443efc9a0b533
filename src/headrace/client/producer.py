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
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.log import get_logger
from headrace.client.accumulator import Accumulator
from headrace.client.batches import Batch, Headers, ProducerId, as_bytes, size_upper_bound
from headrace.client.cluster import Cluster, TopicInfo
from headrace.client.config import producer_config, settings
from headrace.client.errors import BufferFull, ClientError, Closed, ConfigError, RecordTooLarge
from headrace.client.outgoing import Outgoing, ProducerInterceptor, ProducerRecord
from headrace.client.partitioner import NodeLoad, PerRecord, Spreader, key_partition, named_partitioner
from headrace.client.retry import with_retries
from headrace.client.sender import Sender
from headrace.client.serializers import Format, Serializer, serializer_of
from headrace.client.statistics import ProducerCounters, Statistics, counted
from headrace.client.topics import TopicPartition
from headrace.client.tracing import Tracing
from headrace.client.transport import Connector
from headrace.records.batch import HEADER_SIZE
from headrace.records.codec import Delivery, Pending, Portal, RecordMetadata, Route

if TYPE_CHECKING:
    from headrace.client.columnar import Spares
    from headrace.client.transactions import Transaction, Transactions

__all__ = ["Delivery", "Producer", "RecordMetadata"]

STUCK_AFTER_S = 10.0
NO_OTHER_BYTES = 2**62  # stay: there is no other partition to go to
TABLE_BATCH_BYTES = 512 * 1024  # of rows that come as a table: they need not wait for one another

_log = get_logger(__name__)


class Producer:
    """Sends records to topics. Configuration is Kafka's producer keys, in a mapping or as keywords (`linger_ms=5`).

    Idempotent by default. `partitioner` may be a callable `(topic, key, value) -> partition`, or an object of
    `headrace.client.partitioner`; without it the key `partitioner` names one. With a `transactional.id`, records are
    sent in transactions only.
    """

    def __init__(
        self,
        config: Mapping[str, object] | None = None,
        *,
        partitioner: "Spreader | PerRecord | str | None" = None,
        key_serializer: "Format | Serializer | str | None" = None,
        value_serializer: "Format | Serializer | str | None" = None,
        interceptors: Sequence[ProducerInterceptor] = (),
        tracing: bool = False,
        connector: Connector | None = None,
        random_source: random.Random | None = None,
        **keywords: object,
    ) -> None:
        if isinstance(partitioner, str):
            keywords["partitioner"], partitioner = partitioner, None
        self.config = producer_config(settings(config, keywords))
        self.cluster = Cluster(self.config, connector=connector, random_source=random_source)
        self.cluster.on_partitions_changed = self._partitions_changed
        self.loads: dict[int, NodeLoad] = {}
        chosen = partitioner or named_partitioner(
            self.config.partitioner,
            ignore_keys=self.config.partitioner_ignore_keys,
            source=self.cluster.random,
            loads=self.loads,
            clock_s=time.monotonic,
        )
        self._per_record: PerRecord | None = None if hasattr(chosen, "choose") else chosen
        self._spreader: Spreader | None = chosen if self._per_record is None else None  # type: ignore[assignment]
        self._accumulator = Accumulator(self.config)
        self._path = self._accumulator.path
        self._sender: Sender | None = None
        self._transactions: Transactions | None = None
        if self.config.transactional_id is not None:
            from headrace.client import transactions  # as much code again as all the rest of a producer

            self._transactions = transactions.Transactions(self.config, self.cluster, self._wake)
            self._accumulator.gate(True)
        self._outgoing = Outgoing(
            serializer_of(key_serializer, "key_serializer"),
            serializer_of(value_serializer, "value_serializer"),
            interceptors,
            Tracing() if tracing else None,
        )
        self._prepares = self._outgoing.needed
        self.spares: Spares | None = None  # memory that send_arrow fills again
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error nobody waits for what is still on its way.
        await self.close(timeout_ms=None if error is None else 0)

    # -- sending ----------------------------------------------------------------------------------------------------

    async def send(
        self,
        topic: str,
        value: Any,
        *,
        key: Any = None,
        headers: Headers = (),
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> Delivery:
        """Put a record into the buffer; the promise it returns ends when it is acknowledged.

        Key and value are bytes or None, or whatever the serializers take. Raises KafkaError when the topic is not
        known, the record can never fit, or the buffer stays full.
        """
        if self._prepares:
            return await self._send_prepared(
                ProducerRecord(topic, value, key, headers, partition, timestamp_ms)
            )
        delivery = self._path.append(topic, value, key, headers, partition, timestamp_ms)
        if delivery is not None:
            return delivery
        return await self._send_the_long_way(topic, value, key, headers, partition, timestamp_ms)

    def short_way(self, portal: Portal) -> "Callable[..., Pending | None] | None":
        """What appends a record when nothing stands in the way, callable from any thread where it is compiled.

        From here on promises are for threads without an event loop, and wait through the portal; and batches are opened
        ahead, so whoever puts the first record into one sees to it that `begun` is called.
        """
        self._path.portal = portal
        return None if self._prepares else self._path.append  # type: ignore[return-value]

    def begun(self, batch: Batch) -> None:
        """A thread has put the first record into a batch that was opened ahead."""
        sender = self._sending()
        if self._accumulator.admit(batch, sender.now_s()):
            self._look(sender, batch.partition)

    def _look(self, sender: Sender, partition: TopicPartition) -> bool:
        """Let the sender see a new or a full batch; whether it has left already."""
        if self.config.linger_ms == 0 and sender.sent_at_once(partition):
            return True
        sender.wake()
        return False

    async def _send_prepared(self, given: ProducerRecord) -> Delivery:
        record, span = self._outgoing.prepare(given)
        topic, value, key, headers, partition, timestamp_ms = record
        try:
            delivery = self._path.append(topic, value, key, headers, partition, timestamp_ms)
            if delivery is None:
                delivery = await self._send_the_long_way(topic, value, key, headers, partition, timestamp_ms)
        except KafkaError as error:
            self._outgoing.failed(span, error)
            raise
        self._outgoing.follow(delivery, span)
        return delivery

    async def _send_the_long_way(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        headers: Headers,
        partition: int | None,
        timestamp_ms: int | None,
    ) -> Delivery:
        self._check_can_send()
        key, value = as_bytes("key", key), as_bytes("value", value)
        info = self.cluster.topics.get(topic)
        if info is None or not info.partitions:
            info = await self._known(topic)
        size_bytes = size_upper_bound(key, value, headers)
        if size_bytes + HEADER_SIZE > self.config.max_request_size:
            raise RecordTooLarge(
                f"a record of {size_bytes} bytes is larger than max.request.size={self.config.max_request_size}",
                "raise max.request.size, and max.message.bytes of the topic",
            )
        by_key = self._spreader is not None and self._spreader.by_key
        route = self._accumulator.route(topic, len(info.partitions), by_key)
        if partition is None:
            partition = self._place(info, route, key, value, size_bytes)
        elif partition not in info.partitions:
            await self._require_partition(topic, partition)
        accumulator = self._accumulator
        if not accumulator.has_room(size_bytes):
            await self._wait_for_room(size_bytes)
        now_ms = time.time_ns() // 1_000_000 if timestamp_ms is None else timestamp_ms
        where = TopicPartition(topic, partition)
        sender = self._sending()
        delivery, look = accumulator.append(where, now_ms, key, value, headers, sender.now_s())
        if accumulator.pressed:
            accumulator.wake_next()
        if look and not self._look(sender, where):
            await asyncio.sleep(0)  # a loop of sends that never waits must let batches leave
        return delivery

    def _check_can_send(self) -> None:
        if self._closed:
            raise Closed("the producer is closed", "make another one")
        if self._transactions is not None:
            self._transactions.check_can_send()

    def _place(
        self, info: TopicInfo, route: Route, key: bytes | None, value: bytes | None, size_bytes: int
    ) -> int:
        """The partition of a record that names none."""
        if self._per_record is not None:
            chosen = self._per_record(info, key, value)
            if chosen not in info.partitions:
                raise ClientError(
                    f"the partitioner chose partition {chosen!r} of topic {info.name!r}, which has "
                    f"{len(info.partitions)}",
                    f"it must return 0 to {len(info.partitions) - 1}",
                    ErrorCode.INVALID_PARTITIONS,
                )
            return chosen
        assert self._spreader is not None
        if key is not None and self._spreader.by_key:
            return key_partition(key, route.partition_count)
        previous = route.sticky
        if 0 <= previous < route.partition_count:
            batch = route.open_batches[previous]
            if batch is None or not batch.record_count:
                # Its batch has left before it was full: the partition has not had its share yet.
                route.sticky_left -= size_bytes
                if route.sticky_left > 0:
                    return previous
        chosen = self._spreader.choose(info, previous)
        share = self.config.batch_size - size_bytes
        route.stick(chosen, share if route.partition_count > 1 else NO_OTHER_BYTES)
        return chosen

    async def send_records(
        self,
        topic: str,
        partition: int,
        records: bytes | bytearray | memoryview,
        count: int,
        *,
        base_timestamp_ms: int,
        max_timestamp_ms: int,
    ) -> Delivery:
        """Send one batch of `count` records that are encoded already, as the record codec encodes them.

        Offset deltas begin at 0 and timestamps are deltas to `base_timestamp_ms`. The promise is that of the first
        record; the others follow it. Raises KafkaError as `send` does.
        """
        framed = bytearray(HEADER_SIZE)
        framed += records
        return await self.send_framed(topic, partition, framed, count, (base_timestamp_ms, max_timestamp_ms))

    async def send_framed(
        self, topic: str, partition: int, framed: bytearray, count: int, times_ms: tuple[int, int]
    ) -> Delivery:
        """As `send_records`, of records that stand behind room for the header of a batch, which is taken over."""
        self._check_can_send()
        info = await self._known(topic)
        if partition not in info.partitions:
            await self._require_partition(topic, partition)
        size_bytes = len(framed) - HEADER_SIZE
        if len(framed) > self.config.max_request_size:
            raise RecordTooLarge(
                f"a batch of {size_bytes} bytes is larger than max.request.size={self.config.max_request_size}",
                "make smaller batches, or raise max.request.size",
            )
        accumulator = self._accumulator
        if not accumulator.has_room(size_bytes):
            await self._wait_for_room(size_bytes)
        now_s = asyncio.get_running_loop().time()
        where = TopicPartition(topic, partition)
        delivery = accumulator.append_encoded(where, framed, count, times_ms, now_s)
        if accumulator.pressed:
            accumulator.wake_next()
        self._sending().wake()
        await asyncio.sleep(0)
        return delivery

    async def send_arrow(
        self,
        topic: str,
        table: Any,
        *,
        key: str | None = "key",
        value: str | None = "value",
        headers: str | None = "headers",
        timestamp: str | None = "timestamp",
        partition: str = "partition",
    ) -> list[Delivery]:
        """Send the rows of an Arrow table; a promise for each batch they were put into. Needs pyarrow.

        The arguments name the columns; those that the table lacks are null, and without a partition column rows go
        to the partition of their key. Raises KafkaError as `send` does.
        """
        from headrace.client.columnar import Spares, send_table

        if self.spares is None:
            self.spares = Spares()
        names = {"key": key, "value": value, "headers": headers, "timestamp": timestamp}
        count = len((await self._known(topic)).partitions)
        size_max = min(max(self.config.batch_size, TABLE_BATCH_BYTES), self.config.max_request_size)
        size_max = self._accumulator.limit(topic, size_max)
        return await send_table(self, topic, count, size_max, table, {**names, "partition": partition})

    # -- transactions -----------------------------------------------------------------------------------------------

    def transaction(self) -> "Transaction":
        """A transaction, to be used with `async with`: committed at its end, aborted when the block raises."""
        if self._transactions is None:
            raise ConfigError(
                "transactions need a transactional.id", "give the producer one, unique to this process"
            )
        from headrace.client.transactions import Transaction

        return Transaction(self, self._transactions)

    def gate(self, shut: bool) -> None:
        """Called by transactions: whether sends must be looked at one by one."""
        self._accumulator.gate(shut)

    def adopt(self, producer: ProducerId) -> None:
        """Called by transactions: go on under this identity."""
        self._sending().adopt(producer)

    async def discard(self) -> None:
        """Called by transactions: drop what was not sent, and wait for the rest."""
        aborted = ClientError("the transaction was aborted", code=ErrorCode.TRANSACTION_ABORTABLE)
        self._accumulator.admit_begun(self._sending().now_s())
        self._sending().discard(aborted)
        await self.flush()

    async def partitions(self, topic: str, timeout_ms: int | None = None) -> int:
        """How many partitions a topic has (asking the cluster, which may create it). Raises KafkaError."""
        wait_ms = self.config.max_block_ms if timeout_ms is None else timeout_ms
        return len((await self._topic(topic, wait_ms)).partitions)

    async def flush(self) -> None:
        """Send what is buffered without waiting for more; returns when all of it is acknowledged or has failed."""
        sender = self._sending()
        self._accumulator.admit_begun(sender.now_s())
        sender.hurry += 1
        sender.wake()
        try:
            while pending := [batch for batch in self._accumulator if not batch.done]:
                await self._finished(pending)
        finally:
            sender.hurry -= 1

    async def close(self, timeout_ms: float | None = None) -> None:
        """Flush, for at most `timeout_ms`; fail what is left; close the connections."""
        if self._closed:
            return
        self._closed = True
        self._accumulator.gate(True)
        try:
            async with asyncio.timeout(None if timeout_ms is None else timeout_ms / 1000):
                if self._sender is not None:
                    await self.flush()
        except TimeoutError:
            pass
        finally:
            try:
                if self._sender is not None:
                    await self._sender.stop(
                        Closed("the producer was closed before the record was acknowledged")
                    )
            finally:
                await self.cluster.close()

    def statistics(self) -> Statistics:
        """Counters since the producer began, and gauges of now; `prometheus_text` renders them."""
        counters = ProducerCounters() if self._sender is None else self._sender.counters
        return counted(counters) | {
            "buffered_bytes": self._accumulator.held_bytes,
            "requests_in_flight": {str(node): load.in_flight for node, load in self.loads.items()},
            "request_latency_ms": {str(node): round(load.latency_ms, 3) for node, load in self.loads.items()},
        }

    @property
    def buffered_bytes(self) -> int:
        """Bytes of records that are not acknowledged yet."""
        return self._accumulator.held_bytes

    # -- inside -----------------------------------------------------------------------------------------------------

    def _sending(self) -> Sender:
        if self._sender is None:
            self._sender = Sender(
                self.config, self.cluster, self._accumulator, self.loads, self._transactions
            )
        return self._sender

    def _wake(self) -> None:
        self._sending().wake()

    def _partitions_changed(self, topic: str) -> None:
        self._accumulator.forget_route(topic)

    async def _known(self, topic: str) -> TopicInfo:
        """What is known of a topic, asking the cluster only when nothing is. Raises KafkaError."""
        info = self.cluster.topics.get(topic)
        if info is None or not info.partitions:
            info = await self._topic(topic, self.config.max_block_ms)
        return info

    async def _finished(self, batches: list[Batch]) -> None:
        """Wait for these, and say why when it takes long; their halves, after a split, are found by the next look."""
        futures = [batch.future for batch in batches]
        _, waiting = await asyncio.wait(futures, timeout=STUCK_AFTER_S)
        if waiting:
            _log.warning(f"the producer waits for {self.waits_for}")

    @property
    def waits_for(self) -> str:
        """What keeps records from being acknowledged, in words; empty when none wait."""
        if not self._accumulator.held_bytes:
            return ""
        waiting = [batch for batch in self._accumulator if not batch.done]
        errors = [batch.last_error for batch in waiting if batch.last_error is not None]
        reason = errors[0] if errors else self.cluster.last_error
        partitions = sorted({str(batch.partition) for batch in waiting})
        because = f" (the last error: {reason})" if reason is not None else ""
        return f"acknowledgements of {len(waiting)} batches of {', '.join(partitions[:3])}{because}"

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
                ErrorCode.INVALID_PARTITIONS,
            )


def _unknown_topic(topic: str) -> ClientError:
    return ClientError(
        f"topic {topic!r} does not exist",
        f"'headrace topic create {topic}' creates it",
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    )
