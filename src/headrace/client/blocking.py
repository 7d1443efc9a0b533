"""The same clients without asyncio: each call returns when its work is done.

Owns a thread with an event loop for every client, on which the asynchronous twin runs, and the crossing between it and
the caller's thread. Invariants: results and errors are those of the twin; a wait can be interrupted (Ctrl-C), which
cancels the call and leaves the client usable; after `close` the thread is gone. A producer may be used by several
threads, a consumer by one at a time. Compiled, `send` appends in the caller's thread and rings over there once a batch,
without waiting; interpreted, it crosses over and back for every record. The public names are in `headrace.blocking`.
"""

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from headrace.base.errors import KafkaError
from headrace.client.admin import Admin as AsyncAdmin
from headrace.client.batches import Headers
from headrace.client.consumer import Consumer as AsyncConsumer
from headrace.client.consumer import DeliveryMode
from headrace.client.errors import ClientError, Closed
from headrace.client.fetched import ConsumerRecord
from headrace.client.group import RebalanceListener
from headrace.client.producer import Producer as AsyncProducer
from headrace.client.topics import TopicPartition
from headrace.client.transactions import Transaction as AsyncTransaction
from headrace.records.codec import COMPILED, Delivery, Pending, RecordMetadata

P = ParamSpec("P")
T = TypeVar("T")

START_TIMEOUT_S = 30.0
FEED_WAIT_S = 1.0  # then the long way, which also says what is missing


class _Call:
    """A coroutine that another thread waits for: `ended` is locked until its outcome is there.

    Half the steps of asyncio.run_coroutine_threadsafe, and one lock instead of a condition with several.
    """

    __slots__ = ("_task", "_work", "ended", "error", "result")

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self._work = work
        self._task: asyncio.Task[None] | None = None
        self.result: Any = None
        self.error: BaseException | None = Closed("the client was closed meanwhile")
        self.ended = threading.Lock()
        self.ended.acquire()

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(self._left)

    async def _run(self) -> None:
        try:
            self.result = await self._work
            self.error = None
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self.error = error
        self.ended.release()

    def _left(self, task: "asyncio.Task[None]") -> None:
        if task.cancelled():  # before it began
            self._work.close()
            self.ended.release()

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


class Portal:
    """A thread that runs an event loop for others."""

    def __init__(self, name: str) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        if not self._ready.wait(START_TIMEOUT_S):
            raise ClientError(f"the thread {name!r} did not start within {START_TIMEOUT_S:.0f} s")

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            self._loop = runner.get_loop()
            self._loop.call_soon(self._ready.set)
            self._loop.run_forever()

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine over there and return its result here. Raises what it raises."""
        loop = self._loop
        if loop is None or not loop.is_running():
            work.close()
            raise Closed("the client is closed", "make another one")
        if threading.current_thread() is self._thread:
            work.close()
            raise ClientError(
                "a blocking call from the client's own thread would wait for itself",
                "do it from another thread; callbacks of deliveries must not block",
            )
        call = _Call(work)
        loop.call_soon_threadsafe(call.start)
        try:
            if not call.ended.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
                raise TimeoutError
        except BaseException:
            loop.call_soon_threadsafe(call.cancel)
            raise
        if call.error is not None:
            raise call.error
        result: T = call.result
        return result

    def run(self, step: Callable[[], T]) -> T:
        """Run a plain function over there."""

        async def work() -> T:
            return step()

        return self.call(work())

    def wait(self, delivery: Delivery, timeout_s: float | None) -> RecordMetadata:
        """Where a record went, once that is known. Raises what went wrong, or TimeoutError."""

        async def work() -> RecordMetadata:
            return await delivery

        return self.call(work(), timeout_s)

    def soon(self, step: Callable[..., object], *arguments: Any) -> None:
        """Run a plain function over there, without waiting for it."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(step, *arguments)

    def stop(self) -> None:
        """End the loop and the thread."""
        if self._loop is not None and self._loop.is_running():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()


def _loop_factory() -> "Callable[[], asyncio.AbstractEventLoop] | None":
    """uvloop's event loop where it is installed: it sends large buffers without copying them."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


class _Client:
    """What the blocking twins share: a portal and, behind it, the asynchronous client."""

    _portal: Portal
    _inner: Any

    def _start(self, name: str, make: Callable[[], Any]) -> None:
        self._portal = Portal(f"headrace {name}")
        try:
            self._inner = self._portal.run(make)
        except BaseException:
            self._portal.stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._portal.call(self._inner.__aexit__(kind, error, trace))
        finally:
            self._portal.stop()

    def close(self) -> None:
        """As the asynchronous twin's; then the thread ends."""
        self._end(self._inner.close())

    def _end(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            self._portal.call(work)
        except Closed:
            pass
        finally:
            self._portal.stop()


def _waits(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """The blocking form of a coroutine method."""

    @functools.wraps(method)
    def call(self: Any, /, *arguments: P.args, **keywords: P.kwargs) -> T:
        portal: Portal = self._portal
        return portal.call(method(self._inner, *arguments, **keywords))

    return call


def _crosses(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """The blocking form of a plain method that must run on the event loop."""

    @functools.wraps(method)
    def call(self: Any, /, *arguments: P.args, **keywords: P.kwargs) -> T:
        portal: Portal = self._portal
        return portal.run(lambda: method(self._inner, *arguments, **keywords))

    return call


class Producer(_Client):
    """Sends records to topics; see `headrace.Producer`."""

    def __init__(self, config: Mapping[str, object] | None = None, **options: Any) -> None:
        self._start("producer", lambda: AsyncProducer(config, **options))
        append = self._inner.short_way(self._portal)
        self._append = append if COMPILED else None

    def send(
        self,
        topic: str,
        value: Any,
        *,
        key: Any = None,
        headers: Headers = (),
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> Pending:
        """Put a record into the buffer, waiting for room if need be. Raises KafkaError."""
        pending: Pending | None = None
        if self._append is not None and not headers:
            pending = self._append(topic, value, key, (), partition, timestamp_ms)
        if pending is None:
            pending = self._portal.call(
                self._inner.send(
                    topic, value, key=key, headers=headers, partition=partition, timestamp_ms=timestamp_ms
                )
            )
        assert pending is not None
        if pending.place == 0 and not pending.batch.admitted:  # type: ignore[union-attr]
            self._portal.soon(self._inner.begun, pending.batch)
        return pending

    def send_arrow(self, topic: str, table: Any, **names: Any) -> list[Pending]:
        """As the asynchronous twin's: a promise for each batch that rows were put into."""
        sent: list[Pending] = self._portal.call(self._inner.send_arrow(topic, table, **names))
        return sent

    statistics = _crosses(AsyncProducer.statistics)
    flush = _waits(AsyncProducer.flush)
    partitions = _waits(AsyncProducer.partitions)

    def close(self, timeout_ms: float | None = None) -> None:
        """Flush, for at most `timeout_ms`; fail what is left; then the thread ends."""
        self._end(self._inner.close(timeout_ms))

    def transaction(self) -> "Transaction":
        """A transaction, to be used with `with`."""
        return Transaction(self, self._portal, self._inner.transaction())

    @property
    def waits_for(self) -> str:
        """What keeps records from being acknowledged, in words."""
        return self._portal.run(lambda: str(self._inner.waits_for))

    @property
    def buffered_bytes(self) -> int:
        """Bytes of records that are not acknowledged yet."""
        return int(self._inner.buffered_bytes)


class Transaction:
    """One transaction: committed when its block ends, aborted when that raises."""

    def __init__(self, producer: Producer, portal: Portal, inner: AsyncTransaction) -> None:
        self._portal = portal
        self._inner = inner
        self.send = producer.send

    def __enter__(self) -> Self:
        self._portal.call(self._inner.__aenter__())
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._portal.call(self._inner.__aexit__(kind, error, trace))

    def commit_offsets(self, consumer: "Consumer") -> None:
        """Commit what the consumer handed out together with the records. Raises KafkaError."""
        metadata, offsets = consumer._portal.run(
            lambda: (consumer._inner.group_metadata(), consumer._inner.consumed())
        )
        self._portal.call(self._inner.commit_offsets(metadata, offsets))


class _ThreadedListener:
    """Runs a blocking listener beside the loop, so that it may commit and seek."""

    def __init__(self, listener: RebalanceListener) -> None:
        self._listener = listener

    async def on_assigned(self, partitions: list[TopicPartition]) -> None:
        await asyncio.to_thread(self._listener.on_assigned, partitions)

    async def on_revoked(self, partitions: list[TopicPartition]) -> None:
        await asyncio.to_thread(self._listener.on_revoked, partitions)

    async def on_lost(self, partitions: list[TopicPartition]) -> None:
        await asyncio.to_thread(self._listener.on_lost, partitions)


class _Feed:
    """Brings what arrives to the thread that waits for it, in the step of the event loop in which it arrives.

    No task is woken and nothing is asked for across threads, so that a record that comes alone costs one crossing.
    A thread says that it waits before it looks whether there will be news, and news come before the loop looks whether
    anyone waits: whichever is first, the other sees it.
    """

    def __init__(self, inner: AsyncConsumer) -> None:
        self._inner = inner
        self._waiting = False
        self._error: KafkaError | None = None
        self._filled = threading.Lock()
        self._filled.acquire()
        self._usable = inner.feed(self._on_news)

    def wait(self) -> bool:
        """Whether records have been made ready; False when they must be asked for. Raises KafkaError."""
        if not self._usable:
            return False
        self._filled.acquire(blocking=False)  # what came after an earlier wait was given up
        self._waiting = True
        if not self._inner.expectant:
            self._waiting = False
            return False
        filled = self._filled.acquire(timeout=FEED_WAIT_S)
        self._waiting = False
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return filled and bool(self._inner.ready_records)

    def _on_news(self) -> None:
        if not self._waiting:
            return
        try:
            if not self._inner.take_ready():
                return
        except KafkaError as error:
            self._error = error
        self._waiting = False
        self._filled.release()


class Consumer(_Client):
    """Reads topics; see `headrace.Consumer`. Iterate over it, or `poll`."""

    def __init__(
        self,
        config: Mapping[str, object] | None = None,
        *,
        delivery: DeliveryMode | None = None,
        **options: Any,
    ) -> None:
        self._start("consumer", lambda: AsyncConsumer(config, delivery=delivery, **options))
        self._feed = _Feed(self._inner)

    def subscribe(self, topics: Any, listener: RebalanceListener | None = None) -> None:
        """As the asynchronous twin's; the listener runs in a thread of its own and may use this consumer."""
        wrapped = None if listener is None else _ThreadedListener(listener)
        self._portal.run(lambda: self._inner.subscribe(topics, wrapped))

    poll = _waits(AsyncConsumer.poll)
    commit = _waits(AsyncConsumer.commit)
    committed = _waits(AsyncConsumer.committed)
    position = _waits(AsyncConsumer.position)
    lag = _waits(AsyncConsumer.lag)
    partitions = _waits(AsyncConsumer.partitions)
    unsubscribe = _waits(AsyncConsumer.unsubscribe)
    poll_arrow = _waits(AsyncConsumer.poll_arrow)
    read_range = _waits(AsyncConsumer.read_range)
    beginning_offsets = _waits(AsyncConsumer.beginning_offsets)
    end_offsets = _waits(AsyncConsumer.end_offsets)
    offsets_for_times = _waits(AsyncConsumer.offsets_for_times)
    assign = _crosses(AsyncConsumer.assign)
    commit_soon = _crosses(AsyncConsumer.commit_soon)
    pause = _crosses(AsyncConsumer.pause)
    resume = _crosses(AsyncConsumer.resume)
    seek = _crosses(AsyncConsumer.seek)
    seek_to_beginning = _crosses(AsyncConsumer.seek_to_beginning)
    seek_to_end = _crosses(AsyncConsumer.seek_to_end)
    seek_to_time = _crosses(AsyncConsumer.seek_to_time)
    high_watermark = _crosses(AsyncConsumer.high_watermark)
    consumed = _crosses(AsyncConsumer.consumed)
    statistics = _crosses(AsyncConsumer.statistics)
    stop_processing = _crosses(AsyncConsumer.stop_processing)

    def process(self, handler: Callable[[ConsumerRecord], object], **options: Any) -> None:
        """As the asynchronous twin's; the handler is a plain function, and each of its calls runs in a thread."""

        async def in_thread(record: ConsumerRecord) -> object:
            return await asyncio.to_thread(handler, record)

        self._portal.call(self._inner.process(in_thread, **options))

    @property
    def assignment(self) -> list[TopicPartition]:
        """The partitions being read."""
        return self._portal.run(lambda: list(self._inner.assignment))

    @property
    def waits_for(self) -> str:
        """What keeps records from coming, in words."""
        return self._portal.run(lambda: str(self._inner.waits_for))

    def batches(
        self, max_records: int | None = None, timeout_ms: float | None = None
    ) -> Iterator[list[ConsumerRecord]]:
        """Lists of records as they come, for ever; with a timeout also empty ones."""
        while True:
            records = self.poll(60_000 if timeout_ms is None else timeout_ms, max_records)
            if records or timeout_ms is not None:
                yield records

    def __iter__(self) -> "Iterator[ConsumerRecord]":
        return self

    def __next__(self) -> ConsumerRecord:
        ready = self._inner.ready_records
        record: ConsumerRecord
        if ready or self._feed.wait():
            record = self._inner.ready_records.popleft()
        else:
            record = self._portal.call(self._inner.__anext__())
        return record


class Admin(_Client):
    """Administration; see `headrace.Admin`."""

    def __init__(self, config: Mapping[str, object] | None = None, **options: Any) -> None:
        self._start("admin", lambda: AsyncAdmin(config, **options))

    create_topics = _waits(AsyncAdmin.create_topics)
    create_topic = _waits(AsyncAdmin.create_topic)
    delete_topics = _waits(AsyncAdmin.delete_topics)
    create_partitions = _waits(AsyncAdmin.create_partitions)
    list_topics = _waits(AsyncAdmin.list_topics)
    describe_topics = _waits(AsyncAdmin.describe_topics)
    describe_cluster = _waits(AsyncAdmin.describe_cluster)
    describe_configs = _waits(AsyncAdmin.describe_configs)
    alter_configs = _waits(AsyncAdmin.alter_configs)
    list_groups = _waits(AsyncAdmin.list_groups)
    describe_group = _waits(AsyncAdmin.describe_group)
    delete_groups = _waits(AsyncAdmin.delete_groups)
    group_offsets = _waits(AsyncAdmin.group_offsets)
    group_lag = _waits(AsyncAdmin.group_lag)
    alter_group_offsets = _waits(AsyncAdmin.alter_group_offsets)
    delete_group_offsets = _waits(AsyncAdmin.delete_group_offsets)
    remove_members = _waits(AsyncAdmin.remove_members)
    delete_records = _waits(AsyncAdmin.delete_records)
    describe_log_dirs = _waits(AsyncAdmin.describe_log_dirs)
    list_config_resources = _waits(AsyncAdmin.list_config_resources)
    describe_features = _waits(AsyncAdmin.describe_features)
    update_features = _waits(AsyncAdmin.update_features)
    describe_brokers = _waits(AsyncAdmin.describe_brokers)
    describe_quorum = _waits(AsyncAdmin.describe_quorum)
    alter_reassignments = _waits(AsyncAdmin.alter_reassignments)
    list_reassignments = _waits(AsyncAdmin.list_reassignments)
    elect_leaders = _waits(AsyncAdmin.elect_leaders)
    unregister_broker = _waits(AsyncAdmin.unregister_broker)
    add_voter = _waits(AsyncAdmin.add_voter)
    remove_voter = _waits(AsyncAdmin.remove_voter)
    describe_acls = _waits(AsyncAdmin.describe_acls)
    create_acls = _waits(AsyncAdmin.create_acls)
    delete_acls = _waits(AsyncAdmin.delete_acls)
    list_transactions = _waits(AsyncAdmin.list_transactions)
    describe_transaction = _waits(AsyncAdmin.describe_transaction)
    abort_transaction = _waits(AsyncAdmin.abort_transaction)
    describe_producers = _waits(AsyncAdmin.describe_producers)
    abort_hanging = _waits(AsyncAdmin.abort_hanging)
