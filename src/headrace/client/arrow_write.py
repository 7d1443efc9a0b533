"""Writes Arrow tables to topics: columns to record batches, batches to leaders.

Owns a producer of whole batches: which rows go where, the numbers that make it idempotent, and what is on its way.
Invariants: rows of a partition are written in the order they were given, once, also over retries (one request a
partition is in flight, and a retry has the numbers of the first attempt); unacknowledged bytes are bounded by
`buffer.memory`; `flush` returns when everything is acknowledged by all in-sync replicas, or raises the first failure.
In a transaction nothing is visible before somebody ends it: see `prepared`. Called by the Spark sink's tasks.
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self

from headrace.base.clock import SystemClock
from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.ids import ZERO_ID
from headrace.client.arrow import partitions_of, rows_of
from headrace.client.arrow_txn import Coordination, TransactionalProducer
from headrace.client.cluster import Cluster
from headrace.client.config import ProducerConfig, producer_config
from headrace.client.errors import DeliveryTimedOut, error_code
from headrace.client.offsets import missing_partition
from headrace.client.retry import with_retries
from headrace.client.topics import TopicPartition
from headrace.records.batch import SEQUENCE_MAX
from headrace.records.columns import build_batch_of_rows
from headrace.wire.apis import Api

BATCH_BYTES: Final = 1_000_000  # below the default max.message.bytes: few batches cost both sides least
REQUEST_BYTES_MAX: Final = 8 * 1024 * 1024
PRODUCE_HIGHEST: Final = 11  # from 12 on a broker takes a transactional produce for the newer protocol
TRANSACTION_TIMEOUT_MS: Final = 15 * 60 * 1000
NO_PRODUCER: Final = TransactionalProducer("", -1, -1)


class _Waiting:
    """One encoded batch and how long it may still wait."""

    __slots__ = ("attempts", "batch", "deadline_s")

    def __init__(self, batch: bytes, deadline_s: float) -> None:
        self.batch = batch
        self.deadline_s = deadline_s
        self.attempts = 0


class _Queue:
    """What waits for one partition; its first batch may be in flight."""

    __slots__ = ("batches", "busy", "partition", "sequence")

    def __init__(self, partition: TopicPartition) -> None:
        self.partition = partition
        self.batches: deque[_Waiting] = deque()
        self.busy = False
        self.sequence = 0


class ArrowWriter:
    """Writes tables to topics. Its configuration is a producer's; `transactional_id` makes it one transaction.

    `coordination` are calls over connections of somebody else's, to be used and left open.
    """

    def __init__(
        self,
        config: Mapping[str, object],
        *,
        transactional_id: str | None = None,
        transaction_timeout_ms: int = TRANSACTION_TIMEOUT_MS,
        coordination: Coordination | None = None,
    ) -> None:
        self.config: ProducerConfig = producer_config(config)
        self._owns_cluster = coordination is None
        self.coordination = coordination or Coordination(Cluster(self.config), self.config.max_block_ms)
        self.cluster = self.coordination.cluster
        self.rows_written = 0
        self.digest = 0  # of the rows of a transaction, so that a replay can be told from something else
        self._transactional_id = transactional_id
        self._transaction_timeout_ms = transaction_timeout_ms
        self._batch_bytes = min(max(self.config.batch_size, BATCH_BYTES), self.config.max_request_size)
        self._producer = NO_PRODUCER
        self._queues: dict[TopicPartition, _Queue] = {}
        self._in_transaction: set[TopicPartition] = set()
        self._busy_nodes: set[int] = set()
        self._held_bytes = 0
        self._failure: KafkaError | None = None
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            await self.flush()
        await self.close()

    @property
    def prepared(self) -> TransactionalProducer:
        """Who wrote the open transaction: whoever has this can end it with `Coordination.end`."""
        return self._producer

    async def warm_up(self, topic: str) -> None:
        """Connect and ask what writing to a topic takes, while there are no rows yet. What fails shows in sending."""
        with suppress(KafkaError):
            self.cluster.track(topic)
            now_s = asyncio.get_running_loop().time()
            if topic not in self.cluster.topics or self.cluster.stale(now_s):
                await self.cluster.refresh()
            if self._transactional_id is None:
                await self._begin()

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
    ) -> None:
        """Write the rows of a table or record batch; returns when there is room for more, not when they are stored."""
        count = await self._partition_count(topic)
        await self._begin()
        batches = table.to_batches() if hasattr(table, "to_batches") else [table]
        for batch in batches:
            if batch.num_rows:
                rows = rows_of(batch, key=key, value=value, headers=headers, timestamp=timestamp)
                rows.digests = self._transactional_id is not None
                await self._send(topic, count, rows, partitions_of(batch, partition))
                self.rows_written += batch.num_rows
                self.digest = (self.digest + rows.content_digest) & (2**64 - 1)

    async def flush(self) -> None:
        """Wait until everything sent is acknowledged. Raises the first failure."""
        while self._failure is None and any(queue.batches for queue in self._queues.values()):
            self._pump()
            await self._wait()
        if self._failure is not None:
            raise self._failure

    async def close(self) -> None:
        """Close the connections; an open transaction stays open."""
        for task in list(self._tasks):
            task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            if self._owns_cluster:
                await self.cluster.close()

    # -- rows to batches --------------------------------------------------------------------------------------------

    async def _send(self, topic: str, count: int, rows: Any, given: memoryview | None) -> None:
        order, starts = rows.assign(given, count, self._turn)
        self._turn += 1
        loop = asyncio.get_running_loop()
        now_ms = SystemClock().now_ms()
        spans = [(n, starts[n], starts[n + 1]) for n in range(count) if starts[n] < starts[n + 1]]
        fresh = [TopicPartition(topic, n) for n, _, _ in spans]
        fresh = [p for p in fresh if p not in self._in_transaction]
        if self._transactional_id is not None and fresh:
            await self.coordination.add_partitions(self._producer, fresh)
            self._in_transaction.update(fresh)
        for number, at, last in spans:
            where = TopicPartition(topic, number)
            queue = self._queues.setdefault(where, _Queue(where))
            while at < last:
                first = at
                batch, at = build_batch_of_rows(
                    rows,
                    order,
                    at,
                    last,
                    size_max=self._batch_bytes,
                    now_ms=now_ms,
                    compression=self.config.compression,
                    compression_level=self.config.compression_level,
                    producer_id=self._producer.producer_id,
                    producer_epoch=self._producer.epoch,
                    base_sequence=queue.sequence,
                    transactional=self._transactional_id is not None,
                )
                queue.sequence = (queue.sequence + at - first) & SEQUENCE_MAX
                queue.batches.append(_Waiting(batch, loop.time() + self.config.delivery_timeout_ms / 1000))
                self._held_bytes += len(batch)
                self._pump()
                while self._held_bytes > self.config.buffer_memory and self._failure is None:
                    await self._wait()
                    self._pump()
                if self._failure is not None:
                    raise self._failure
        await asyncio.sleep(0)

    # -- batches to leaders -----------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Send to every leader that waits for nothing the first batch of each of its partitions."""
        by_node: dict[int, list[_Queue]] = {}
        lost = False
        for queue in self._queues.values():
            if queue.batches and not queue.busy:
                leader = self.cluster.leader(queue.partition)
                if leader is None:
                    lost = True
                elif leader[0] not in self._busy_nodes:
                    by_node.setdefault(leader[0], []).append(queue)
        for node_id, queues in by_node.items():
            picked: list[_Queue] = []
            size = 0
            for queue in queues:
                if picked and size + len(queue.batches[0].batch) > REQUEST_BYTES_MAX:
                    break
                picked.append(queue)
                size += len(queue.batches[0].batch)
                queue.busy = True
            self._busy_nodes.add(node_id)
            self._spawn(self._produce(node_id, picked))
        if lost and not self._tasks:
            self._spawn(self._look_again())

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and self._failure is None:
            self._failure = (
                error
                if isinstance(error, KafkaError)
                else KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, repr(error))
            )
        self._changed.set()

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _produce(self, node_id: int, queues: list[_Queue]) -> None:
        errors: dict[TopicPartition, KafkaError] = {}
        try:
            errors = await self._request(node_id, queues)
        except KafkaError as failure:
            errors = {queue.partition: failure for queue in queues}
        now_s = asyncio.get_running_loop().time()
        wait_ms = 0.0
        for queue in queues:
            waiting = queue.batches[0]
            error = errors.get(queue.partition)
            if error is None:
                queue.batches.popleft()
                self._held_bytes -= len(waiting.batch)
                continue
            waiting.attempts += 1
            if not error.retriable:
                raise error
            if now_s > waiting.deadline_s:
                raise DeliveryTimedOut(
                    f"rows for {queue.partition} were not acknowledged within {self.config.delivery_timeout_ms} ms; "
                    f"the last error: {error.message}",
                    "the cluster may be down or overloaded",
                )
            wait_ms = max(wait_ms, self.cluster.backoff.wait_ms(waiting.attempts))
        if errors:
            await self._refresh()
            await asyncio.sleep(wait_ms / 1000)
        for queue in queues:
            queue.busy = False
        self._busy_nodes.discard(node_id)
        self._pump()

    async def _request(self, node_id: int, queues: list[_Queue]) -> dict[TopicPartition, KafkaError]:
        topics: dict[str, list[dict[str, Any]]] = {}
        for queue in queues:
            entry = {"index": queue.partition.partition, "records": queue.batches[0].batch}
            topics.setdefault(queue.partition.topic, []).append(entry)
        body = {
            "transactional_id": self._transactional_id,
            "acks": self.config.acks or 1,
            "timeout_ms": self.config.request_timeout_ms,
            "topic_data": [{"name": n, "topic_id": ZERO_ID, "partition_data": d} for n, d in topics.items()],
        }
        connection = await self.cluster.connection(node_id)
        reply = await connection.request(Api.PRODUCE, body, highest=PRODUCE_HIGHEST)
        errors: dict[TopicPartition, KafkaError] = {}
        for topic in reply.responses:
            for result in topic.partition_responses:
                code = error_code(result.error_code)
                if code not in (ErrorCode.NONE, ErrorCode.DUPLICATE_SEQUENCE_NUMBER):
                    where = TopicPartition(topic.name, result.index)
                    errors[where] = KafkaError(code, f"{where}: {result.error_message or code.name}")
        return errors

    async def _look_again(self) -> None:
        await self._refresh()
        for queue in self._queues.values():
            if queue.batches and self.cluster.leader(queue.partition) is None:
                error = missing_partition(self.cluster, queue.partition)
                late = asyncio.get_running_loop().time() > queue.batches[0].deadline_s
                if late or not error.retriable:
                    raise error
        await asyncio.sleep(self.cluster.backoff.wait_ms(1) / 1000)

    async def _refresh(self) -> None:
        try:
            await self.cluster.refresh()
        except KafkaError as error:
            self.cluster.last_error = error

    # -- what writing needs -----------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        if self._producer is not NO_PRODUCER:
            return
        if self._transactional_id is not None:
            self._producer = await self.coordination.init(
                self._transactional_id, self._transaction_timeout_ms
            )
            return

        async def attempt() -> TransactionalProducer:
            connection = await self.cluster.any_connection()
            reply = await connection.request(
                Api.INIT_PRODUCER_ID, {"transactional_id": None, "transaction_timeout_ms": 2**31 - 1}
            )
            code = error_code(reply.error_code)
            if code is not ErrorCode.NONE:
                raise KafkaError(code, f"the broker gives no producer id: {code.name}")
            return TransactionalProducer("", reply.producer_id, reply.producer_epoch)

        self._producer = await with_retries(self.cluster, self.config.max_block_ms, attempt)

    async def _partition_count(self, topic: str) -> int:
        known = self.cluster.topics.get(topic)
        if known is not None and known.partitions and known.error is ErrorCode.NONE:
            return len(known.partitions)
        self.cluster.track(topic)

        async def attempt() -> int:
            await self.cluster.refresh(create=True)
            found = self.cluster.topics.get(topic)
            if found is None or found.error is not ErrorCode.NONE or not found.partitions:
                raise missing_partition(self.cluster, TopicPartition(topic, 0))
            return len(found.partitions)

        return await with_retries(self.cluster, self.config.max_block_ms, attempt)
