"""Reads ranges of partitions as Arrow record batches, in bounded memory.

Owns the fetches of one range after the other and the filter for aborted transactions. Invariants: every record from
`start` to before `end` that is there and, with read_committed, committed, is handed out once and in order; offsets
that are not there (compacted, aborted, control records) are passed over without waiting for them; what is held is
bounded by one answer, one ahead of it, and one record batch, or a few where a thread reads ahead. Records that
retention took away are `OffsetsGone`, with the range. Called by the Spark source and by people who want a table:
`async with ArrowReader(config) as r: await r.table(...)`.
"""

import asyncio
import heapq
import queue
import threading
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Any, Self

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.ids import ZERO_ID
from headrace.client.arrow import DEFAULT_COLUMNS, TableMaker, concat
from headrace.client.cluster import SHARED, Cluster
from headrace.client.config import ConsumerConfig, consumer_config
from headrace.client.errors import ClientError, RequestTimedOut, error_code
from headrace.client.offsets import EARLIEST, LATEST, OffsetAndTimestamp, list_offsets, missing_partition
from headrace.client.retry import with_retries
from headrace.client.topics import TopicPartition
from headrace.records.batch import HEADER_SIZE, BatchHeader, parse_header
from headrace.records.builder import iter_batches, iter_records
from headrace.records.columns import add_batch
from headrace.wire.apis import Api
from headrace.wire.messages import Message

ROWS_PER_BATCH_MAX = 16_384
BYTES_PER_BATCH_MAX = 4 * 1024 * 1024
FETCH_BYTES = 8 * 1024 * 1024
BATCHES_AHEAD = 2
SPARE = 8  # columns that grow are copied: the next have room for the bytes of the last and an eighth more
READING_THREAD = "read-range"
PURPOSE = "ranges"  # of a connection: behind a consumer's fetch that waits for records, ranges would wait too
FETCH_BY_NAME_HIGHEST = 12
NO_PROGRESS_TIMEOUT_MS = 120_000
CONTROL_ABORT = 0


class OffsetsGone(ClientError):
    """Records of a range are no longer there: [first, end) of a partition."""

    default_code = ErrorCode.OFFSET_OUT_OF_RANGE

    def __init__(self, message: str, hint: str = "", code: ErrorCode | None = None) -> None:
        super().__init__(message, hint, code)
        self.partition = TopicPartition("", -1)
        self.first = -1
        self.end = -1


def _gone(partition: TopicPartition, first: int, end: int) -> OffsetsGone:
    error = OffsetsGone(
        f"{partition}: offsets {first} to {end - 1} are no longer there",
        "they were deleted by retention or the topic was created anew",
    )
    error.partition, error.first, error.end = partition, first, end
    return error


class AbortedFilter:
    """Which batches of one answer belong to aborted transactions, by the list that came with it."""

    def __init__(self, aborted: Sequence[tuple[int, int]]) -> None:
        self._ahead = sorted((first, producer) for producer, first in aborted)
        self._aborting: set[int] = set()

    def hides(self, header: BatchHeader, batch: memoryview) -> bool:
        """Whether a batch, each in turn, holds nothing to hand out."""
        if header.is_control:
            if self._aborting or self._ahead:
                self._end(header, batch)
            return True
        if not header.is_transactional:
            return False
        while self._ahead and self._ahead[0][0] <= header.last_offset:
            self._aborting.add(heapq.heappop(self._ahead)[1])
        return header.producer_id in self._aborting

    def _end(self, header: BatchHeader, batch: memoryview) -> None:
        for record in iter_records(batch):
            kind = int.from_bytes((record.key or b"")[2:4], "big", signed=True)
            if record.key is not None and len(record.key) >= 4 and kind == CONTROL_ABORT:
                self._aborting.discard(header.producer_id)


class ArrowReader:
    """Reads ranges of partitions as Arrow. Its configuration is a consumer's."""

    def __init__(self, config: Mapping[str, object], *, cluster: Cluster | None = None) -> None:
        self.config: ConsumerConfig = consumer_config(config)
        self.cluster = cluster or Cluster(self.config)
        self._owns_cluster = cluster is None
        self._purpose = SHARED if self._owns_cluster else PURPOSE  # alone, one connection does for everything

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        if self._owns_cluster:
            await self.cluster.close()

    async def list_offsets(
        self, wanted: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, OffsetAndTimestamp]:
        """Offsets by time, or at the ends (EARLIEST, LATEST), as this reader's isolation level sees them."""
        return await list_offsets(
            self.cluster,
            wanted,
            read_committed=self.config.read_committed,
            timeout_ms=self.config.default_api_timeout_ms,
        )

    async def table(
        self,
        topic: str,
        partition: int,
        start: int | None = None,
        end: int | None = None,
        columns: Sequence[str] = DEFAULT_COLUMNS,
    ) -> Any:
        """One Arrow table of a range; None is the beginning, or the end as it is now. For what fits into memory."""
        where = TopicPartition(topic, partition)
        if start is None:
            start = (await self.list_offsets({where: EARLIEST}))[where].offset
        if end is None:
            end = (await self.list_offsets({where: LATEST}))[where].offset
        return concat([b async for b in self.read_range(topic, partition, start, end, columns)], columns)

    async def read_range(
        self,
        topic: str,
        partition: int,
        start: int,
        end: int,
        columns: Sequence[str] = DEFAULT_COLUMNS,
        *,
        no_progress_timeout_ms: int = NO_PROGRESS_TIMEOUT_MS,
    ) -> AsyncGenerator[Any, None]:
        """The records of [start, end) as Arrow record batches. Raises OffsetsGone where they are no longer there."""
        where = TopicPartition(topic, partition)
        maker = TableMaker(topic, partition, columns)
        held = maker.new_columns()
        timestamp_type = 0
        position = start
        ahead: asyncio.Task[Message] | None = None
        loop = asyncio.get_running_loop()
        progressed_s = loop.time()
        try:
            while position < end:
                answer = await (ahead or self._fetch(where, position))
                ahead = None
                data, filtering = self._records(where, position, end, answer)
                before = position
                reached = _end_of(data, position)
                if reached == position:
                    _check_whole(where, position, data)
                    if (loop.time() - progressed_s) * 1000 > no_progress_timeout_ms:
                        raise _stuck(where, position, end, answer, no_progress_timeout_ms)
                    continue
                progressed_s = loop.time()
                if reached < end:
                    ahead = asyncio.create_task(self._fetch(where, reached))
                    await asyncio.sleep(0)  # so that the request leaves before the decoding begins
                for header, batch in iter_batches(data, check_crc=self.config.check_crcs):
                    if header.last_offset < position or header.base_offset >= end:
                        continue
                    if filtering.hides(header, batch):
                        continue
                    kind = int(header.is_log_append_time)
                    if kind != timestamp_type and held.row_count:
                        yield maker.make(held, timestamp_type)
                        held = maker.new_columns(held.byte_count + held.byte_count // SPARE)
                    timestamp_type = kind
                    add_batch(held, header, batch, position, end)
                    if held.row_count >= ROWS_PER_BATCH_MAX or held.byte_count >= BYTES_PER_BATCH_MAX:
                        yield maker.make(held, timestamp_type)
                        held = maker.new_columns(held.byte_count + held.byte_count // SPARE)
                position = max(before, reached)
            if held.row_count:
                yield maker.make(held, timestamp_type)
        finally:
            if ahead is not None:
                ahead.cancel()
                await asyncio.gather(ahead, return_exceptions=True)

    def _records(
        self, where: TopicPartition, position: int, end: int, answer: Message
    ) -> tuple[memoryview, AbortedFilter]:
        code = error_code(answer.error_code)
        if code is ErrorCode.OFFSET_OUT_OF_RANGE:
            raise _gone(where, position, end)
        aborted = []
        if self.config.read_committed:
            aborted = [(item.producer_id, item.first_offset) for item in answer.aborted_transactions or []]
        return memoryview(answer.records or b""), AbortedFilter(aborted)

    async def _fetch(self, where: TopicPartition, position: int) -> Message:
        """The answer about one partition; tried again where its leader moved or a connection was lost."""
        self.cluster.track(where.topic)

        async def attempt() -> Message:
            leader = self.cluster.leader(where)
            if leader is None:
                await self.cluster.refresh()
                leader = self.cluster.leader(where)
                if leader is None:
                    raise missing_partition(self.cluster, where)
            try:
                connection = await self.cluster.connection(leader[0], self._purpose)
                topic_id = self.cluster.topic_id(where.topic)
                reply = await connection.request(
                    Api.FETCH,
                    self._request(where, leader[1], topic_id, position),
                    highest=FETCH_BY_NAME_HIGHEST if topic_id == ZERO_ID else None,
                    timeout_ms=self.config.request_timeout_ms + self.config.fetch_max_wait_ms,
                )
                return _partition_of(where, reply)
            except KafkaError as error:
                if error.retriable:
                    await self.cluster.refresh()
                raise

        return await with_retries(self.cluster, self.config.default_api_timeout_ms, attempt)

    def _request(self, where: TopicPartition, epoch: int, topic_id: bytes, position: int) -> dict[str, Any]:
        fetch_bytes = min(
            max(self.config.max_partition_fetch_bytes, FETCH_BYTES), self.config.fetch_max_bytes
        )
        entry = {
            "partition": where.partition,
            "current_leader_epoch": epoch,
            "fetch_offset": position,
            "partition_max_bytes": fetch_bytes,
        }
        return {
            "replica_id": -1,
            "max_wait_ms": self.config.fetch_max_wait_ms,
            "min_bytes": 1,
            "max_bytes": self.config.fetch_max_bytes,
            "isolation_level": int(self.config.read_committed),
            "session_id": 0,
            "session_epoch": -1,
            "topics": [{"topic": where.topic, "topic_id": topic_id, "partitions": [entry]}],
        }


def _partition_of(where: TopicPartition, reply: Message) -> Message:
    code = error_code(reply.error_code)
    for topic in reply.responses:
        for result in topic.partitions:
            if result.partition_index == where.partition:
                code = error_code(result.error_code)
                if code in (ErrorCode.NONE, ErrorCode.OFFSET_OUT_OF_RANGE):
                    found: Message = result
                    return found
    if code is ErrorCode.NONE:
        code = ErrorCode.UNKNOWN_SERVER_ERROR
    raise KafkaError(code, f"fetch of {where}: {code.name}")


def _end_of(data: memoryview, position: int) -> int:
    """The offset after the last whole batch."""
    at, end = 0, position
    while len(data) - at >= HEADER_SIZE:
        header = parse_header(data, at)
        if header.size > len(data) - at:
            break
        end = max(end, header.next_offset)
        at += header.size
    return end


def _check_whole(where: TopicPartition, position: int, data: memoryview) -> None:
    if len(data) >= HEADER_SIZE and parse_header(data).size > len(data):
        raise ClientError(
            f"{where} at offset {position}: no whole batch in {len(data)} bytes",
            "raise max.partition.fetch.bytes and fetch.max.bytes",
            ErrorCode.RECORD_LIST_TOO_LARGE,
        )


def _stuck(where: TopicPartition, position: int, end: int, answer: Message, waited_ms: int) -> KafkaError:
    return RequestTimedOut(
        f"{where}: no records from offset {position} on for {waited_ms} ms, wanted up to {end}; the high watermark is "
        f"{answer.high_watermark}, the last stable offset {answer.last_stable_offset}",
        "a transaction may be open, or the topic may have been cut back",
    )


def read_range(
    config: Mapping[str, object],
    topic: str,
    partition: int,
    start: int,
    end: int,
    columns: Sequence[str] = DEFAULT_COLUMNS,
    *,
    no_progress_timeout_ms: int = NO_PROGRESS_TIMEOUT_MS,
) -> Generator[Any, None, None]:
    """`ArrowReader.read_range` for code without an event loop, such as a Spark task.

    Batches are fetched and decoded in a thread, a few ahead of whoever takes them.
    """
    ahead: queue.Queue[Any] = queue.Queue(BATCHES_AHEAD)
    stopped = threading.Event()
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]] = []

    async def read() -> None:
        task = asyncio.current_task()
        assert task is not None
        running.append((asyncio.get_running_loop(), task))
        async with ArrowReader(config) as reader:
            # Whoever knows the offsets has asked for them: the address is right, though its broker may be restarting.
            reader.cluster.first_contact_timeout_ms = reader.config.default_api_timeout_ms
            batches = reader.read_range(
                topic, partition, start, end, columns, no_progress_timeout_ms=no_progress_timeout_ms
            )
            async with aclosing(batches):
                async for batch in batches:
                    if stopped.is_set():
                        return
                    ahead.put(batch)

    def work() -> None:
        try:
            asyncio.run(read())
        except BaseException as error:
            ahead.put(error)
        else:
            ahead.put(None)

    worker = threading.Thread(target=work, name=READING_THREAD, daemon=True)
    worker.start()
    taken: Any = b""
    try:
        while (taken := ahead.get()) is not None:
            if isinstance(taken, BaseException):
                raise taken
            yield taken
    finally:
        stopped.set()
        while taken is not None and not isinstance(taken, BaseException):  # given up in the middle
            for loop, task in running:
                with suppress(RuntimeError):  # it has just ended by itself
                    loop.call_soon_threadsafe(task.cancel)
            taken = ahead.get()
        worker.join()
