"""Takes batches from the accumulator to the brokers, and brings each to its end.

Owns the requests in flight, the producer id and epoch, and the choice between retry, failure and a new epoch.
Invariants: a partition's records reach its log in the order they were added, each once, as long as
idempotence is on and the broker keeps its producer state; at most `max.in.flight.requests.per.connection`
requests wait at a broker; every batch ends by its deadline. Each step is a callback on one event loop (a task that
is woken would cost several times as much for a record that goes alone), so there is nothing to lock.

How order survives retries. Several batches of a partition may be in flight, numbered by sequence. When one
fails, those behind it are refused by the broker (a gap in the sequence) and come back too; each is put back
at its place and sent again only when nothing before it is unanswered. When a batch is given up although it
had a number, or the broker lost track, the numbers cannot be continued: the partition goes on under the next
epoch, from 0. Before that nothing may be in flight, and a batch that the broker may have without our knowing
is first sent again under its old number: it is then acknowledged as a duplicate, or refused as out of order,
which proves that it is not there. The first batch under an id and epoch goes alone: a broker that does not
know the producer takes any sequence, so a second one could be taken while the first is refused. Without
idempotence a retry may overtake, as in Kafka, unless only one request may be in flight.
"""

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.ids import ZERO_ID
from headrace.base.log import get_logger
from headrace.client.accumulator import Accumulator, PartitionQueue
from headrace.client.batches import NO_OFFSET, NO_PRODUCER, Batch, ProducerId
from headrace.client.cluster import Cluster
from headrace.client.config import ProducerConfig
from headrace.client.connection import Connection, Heard
from headrace.client.errors import ClientError, DeliveryTimedOut, error_code
from headrace.client.partitioner import NodeLoad
from headrace.client.statistics import ProducerCounters
from headrace.client.topics import TopicPartition
from headrace.records.batch import NO_SEQUENCE
from headrace.wire.apis import Api
from headrace.wire.messages import Message

if TYPE_CHECKING:
    from headrace.client.transactions import Transactions

NEVER_S = float("inf")
EPOCH_MAX = 32_767
BY_NAME_HIGHEST = 12
TRANSACTIONAL_HIGHEST = 11  # from 12 on a broker takes a transactional produce for the newer protocol

# After these the broker's idea of our sequence and ours differ.
_LOST_TRACK = frozenset(
    {ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, ErrorCode.UNKNOWN_PRODUCER_ID, ErrorCode.INVALID_PRODUCER_EPOCH}
)

_NO_SUCH_TOPIC = frozenset({ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID})

# After these the batch may be in the log all the same.
_PERHAPS_WRITTEN = frozenset(
    {
        ErrorCode.REQUEST_TIMED_OUT,
        ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        ErrorCode.KAFKA_STORAGE_ERROR,
        ErrorCode.UNKNOWN_SERVER_ERROR,
    }
)

_log = get_logger(__name__)


class Sender:
    """The sending half of one producer."""

    def __init__(
        self,
        config: ProducerConfig,
        cluster: Cluster,
        accumulator: Accumulator,
        loads: dict[int, NodeLoad],
        transactions: "Transactions | None" = None,
    ) -> None:
        self._config = config
        self._cluster = cluster
        self._accumulator = accumulator
        self._loads = loads
        self._transactions = transactions
        self.counters = ProducerCounters()
        self._producer = NO_PRODUCER
        self._loop = asyncio.get_running_loop()
        self.now_s = self._loop.time
        self._woken = False
        self._alarm: asyncio.TimerHandle | None = None  # when to look without being woken; may be too early
        self._alarm_s = NEVER_S
        self._expires_s = 0.0  # no batch is past its deadline before this
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._metadata_failures = 0
        self._stopped = False
        self.hurry = 0  # how many flushes run: then nothing lingers

    # -- life -------------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Look for work soon: something was added, answered or connected."""
        if not self._woken:
            self._woken = True
            self._loop.call_soon(self._step)

    def sent_at_once(self, partition: TopicPartition) -> bool:
        """Send what a partition has that waits for no answer, without a detour over the event loop; whether it went."""
        queue = self._accumulator.active[partition]
        if queue.in_flight or self._stopped:
            return False
        if not self._sent_alone(queue):
            self._step()
        return bool(queue.in_flight)

    def _sent_alone(self, queue: PartitionQueue) -> bool:
        """Send the one new batch of a partition without a look at all the others, if nothing stands in its way."""
        if self._alarm is None or self._transactions is not None:
            return False  # nobody watches the deadline yet, or there is more to heed
        if len(queue.waiting) != 1 or queue.waiting[0].attempts or queue.needs_new_epoch:
            return False
        leader = self._cluster.leader(queue.partition)
        load = None if leader is None else self._loads.get(leader[0])
        if leader is None or load is None or load.in_flight or load.throttled_until_s > self._loop.time():
            return False
        connection = self._cluster.ready_connection(leader[0])
        if connection is None or (self._config.enable_idempotence and self._producer == NO_PRODUCER):
            return False
        self._send(leader[0], connection, [(queue, self._take(queue))])
        return True

    async def stop(self, error: KafkaError) -> None:
        """End all tasks and fail whatever is left."""
        self._stopped = True
        if self._alarm is not None:
            self._alarm.cancel()
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for batch in list(self._accumulator):
            queue = self._accumulator.active[batch.partition]
            self._give_up(queue, batch, error)

    def _spawn(self, name: str, work: Any, *arguments: Any) -> None:
        """Run a background step unless the one of that name is running already."""
        if name not in self._tasks:
            coroutine: Coroutine[Any, Any, None] = work(*arguments)
            task = asyncio.create_task(coroutine, name=f"headrace producer {name}")
            self._tasks[name] = task
            task.add_done_callback(partial(self._ended, name))

    def _ended(self, name: str, task: "asyncio.Task[None]") -> None:
        del self._tasks[name]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broke(name, error)
        self.wake()

    def _broke(self, name: str, error: BaseException) -> None:
        """A bug in this module must not become a silent hang."""
        _log.error("producer task failed", exc_info=error, extra={"fields": {"task": name}})
        failure = ClientError(f"the producer failed: {error!r}", "please report this with the log")
        for batch in list(self._accumulator):
            self._give_up(self._accumulator.active[batch.partition], batch, failure)

    def _step(self, now_s: float = 0.0) -> None:
        """Give up what is late, send what can be sent, and see to it that the next moment is not missed.

        It is `now_s` or later: the clock may be a tick behind the timer that rang.
        """
        self._woken = False
        if self._stopped:
            return
        try:
            now_s = max(now_s, self._loop.time())
            if self._cluster.stale(now_s):
                self._want_metadata()
            if now_s >= self._expires_s:
                # A batch that is added later has a later deadline than one that was added now would have.
                self._expires_s = min(self._expire(now_s), now_s + self._config.delivery_timeout_ms / 1000)
            next_s = min(self._expires_s, self._drain(now_s))
        except Exception as error:
            self._broke("sender", error)
            return
        if next_s < self._alarm_s:
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm_s = next_s
            self._alarm = self._loop.call_at(next_s, self._on_alarm)

    def _on_alarm(self) -> None:
        now_s = self._alarm_s
        self._alarm, self._alarm_s = None, NEVER_S
        self._step(now_s)

    # -- sending ----------------------------------------------------------------------------------------------------

    def _drain(self, now_s: float) -> float:
        """Send all that may be sent now; returns when to look again."""
        if self._transactions is not None and self._transactions.broken:
            self.discard(self._transactions.failure())
        next_s = NEVER_S
        ready: dict[int, list[PartitionQueue]] = {}
        for queue in self._accumulator.active.values():
            at_s = self._ready_at(queue, now_s)
            if at_s > now_s:
                next_s = min(next_s, at_s)
                continue
            leader = self._cluster.leader(queue.partition)
            if leader is None:
                self._want_metadata()
            elif not queue.in_flight or queue.node_id == leader[0]:
                # What is in flight to the old leader must be answered before more goes to the new one.
                ready.setdefault(leader[0], []).append(queue)
        for node_id, queues in ready.items():
            next_s = min(next_s, self._send_to(node_id, queues, now_s))
        return next_s

    def _ready_at(self, queue: PartitionQueue, now_s: float) -> float:
        """When the first batch of a queue may be sent; NEVER_S when an answer must come first."""
        if not queue.waiting:
            return NEVER_S
        if self._transactions is not None:
            if queue.needs_new_epoch or not self._transactions.may_send(queue.partition):
                return NEVER_S
        elif queue.needs_new_epoch:
            if queue.in_flight:
                return NEVER_S
            if not queue.waiting[0].unsure:
                self._next_epoch(queue)
        head = queue.waiting[0]
        if head.retry_at_s > now_s:
            return head.retry_at_s
        if head.attempts and not queue.first_unanswered(head):
            return NEVER_S
        if self._config.enable_idempotence and queue.in_flight and not queue.confirmed:
            return NEVER_S
        accumulator = self._accumulator
        if len(queue.waiting) > 1 or self.hurry or accumulator.pressed or accumulator.closed(head):
            return now_s
        return head.created_s + self._config.linger_ms / 1000

    def _send_to(self, node_id: int, queues: list[PartitionQueue], now_s: float) -> float:
        load = self._loads.setdefault(node_id, NodeLoad())
        if load.throttled_until_s > now_s:
            return load.throttled_until_s
        connection = self._cluster.ready_connection(node_id)
        if connection is None:
            self._spawn(f"connect {node_id}", self._connect, node_id)
            return NEVER_S
        if self._config.enable_idempotence and self._producer == NO_PRODUCER:
            if self._transactions is None:
                self._spawn("init producer id", self._init_producer_id)
            return NEVER_S
        while load.in_flight < self._config.max_in_flight_requests_per_connection:
            picked = self._pick(queues, now_s)
            if not picked:
                break
            self._send(node_id, connection, picked)
        return NEVER_S

    def _pick(self, queues: list[PartitionQueue], now_s: float) -> list[tuple[PartitionQueue, Batch]]:
        """One batch of each queue that has one ready, as many as a request may hold."""
        picked: list[tuple[PartitionQueue, Batch]] = []
        size_bytes = 0
        for queue in queues:
            if self._ready_at(queue, now_s) > now_s:
                continue
            batch = queue.waiting[0]
            if picked and size_bytes + batch.size_bytes > self._config.max_request_size:
                continue
            batch = self._take(queue)
            size_bytes += batch.size_bytes
            picked.append((queue, batch))
        return picked

    def _take(self, queue: PartitionQueue) -> Batch:
        batch = queue.waiting[0]
        self._accumulator.close(batch)  # before it is numbered: another thread may be adding to it
        self._identify(queue, batch)
        return self._accumulator.take(queue)

    def _identify(self, queue: PartitionQueue, batch: Batch) -> None:
        """Number a batch that has not been sent before."""
        if not self._config.enable_idempotence or batch.sequence != NO_SEQUENCE:
            return
        if queue.producer != self._producer and not queue.in_flight:
            queue.adopt(self._producer)
        queue.number(batch)

    def _send(self, node_id: int, connection: Connection, picked: list[tuple[PartitionQueue, Batch]]) -> None:
        topics: dict[str, list[dict[str, Any]]] = {}
        for queue, batch in picked:
            queue.node_id = node_id
            batch.attempts += 1
            records = batch.encode(
                self._config.compression,
                self._config.compression_level,
                transactional=self._transactions is not None,
            )
            topics.setdefault(batch.partition.topic, []).append(
                {"index": batch.partition.partition, "records": records}
            )
        ids = {name: self._cluster.topic_id(name) for name in topics}
        body = {
            "transactional_id": self._config.transactional_id,
            "acks": self._config.acks,
            "timeout_ms": self._config.request_timeout_ms,
            "topic_data": [
                {"name": name, "topic_id": ids[name], "partition_data": data} for name, data in topics.items()
            ],
        }
        highest = BY_NAME_HIGHEST if ZERO_ID in ids.values() else None
        if self._transactions is not None:
            highest = TRANSACTIONAL_HIGHEST
        self.counters.produce_requests += 1
        self._loads[node_id].in_flight += 1
        names = {ids[name]: name for name in ids}
        heard = partial(self._answered, node_id, picked, names, self._loop.time())
        try:
            if self._config.acks == 0:
                connection.send_only(Api.PRODUCE, body, highest=highest)
                drained = asyncio.ensure_future(connection.drain())
                drained.add_done_callback(partial(_drained, heard))
            else:
                connection.ask(Api.PRODUCE, body, heard, highest=highest)
        except KafkaError as error:
            self._loop.call_soon(heard, None, error)

    # -- answers ----------------------------------------------------------------------------------------------------

    def _answered(
        self,
        node_id: int,
        sent: list[tuple[PartitionQueue, Batch]],
        names: dict[bytes, str],
        sent_s: float,
        reply: Message | None,
        error: BaseException | None,
    ) -> None:
        """A request has ended: with its answer, with neither answer nor error (acks=0), or with an error."""
        load = self._loads[node_id]
        load.in_flight -= 1
        now_s = self._loop.time()
        load.answered((now_s - sent_s) * 1000)
        if self._stopped:
            return
        if error is not None:
            failure = error if isinstance(error, KafkaError) else ClientError(f"cannot send: {error!r}")
            for queue, batch in sent:
                self._failed(queue, batch, failure, now_s)
            self._want_metadata()
        elif reply is None:
            for queue, batch in sent:
                self._succeeded(queue, batch, NO_OFFSET, -1)
        else:
            if reply.throttle_time_ms > 0:
                load.throttled_until_s = now_s + reply.throttle_time_ms / 1000
            self._settle(sent, names, reply, now_s)
        if self._accumulator.active:
            self.wake()

    def _settle(
        self, sent: list[tuple[PartitionQueue, Batch]], names: dict[bytes, str], reply: Message, now_s: float
    ) -> None:
        results: dict[tuple[str, int], Message] = {}
        for topic in reply.responses:
            name = topic.name or names.get(bytes(topic.topic_id), "")
            for result in topic.partition_responses:
                results[name, result.index] = result
        for queue, batch in sent:
            answer = results.get(batch.partition)
            if answer is None:
                missing = KafkaError(
                    ErrorCode.UNKNOWN_SERVER_ERROR, f"the answer says nothing about {batch.partition}"
                )
                self._failed(queue, batch, missing, now_s)
                continue
            code = error_code(answer.error_code)
            if code in (ErrorCode.NONE, ErrorCode.DUPLICATE_SEQUENCE_NUMBER):
                offset = answer.base_offset if code is ErrorCode.NONE else NO_OFFSET
                self._succeeded(queue, batch, offset, answer.log_append_time_ms)
                continue
            leader = answer.current_leader
            learned = self._cluster.learn_leader(
                batch.partition, leader.leader_id, leader.leader_epoch, reply.node_endpoints or []
            )
            error = KafkaError(code, f"{batch.partition}: {answer.error_message or code.name}")
            self._failed(queue, batch, error, now_s)
            if error.retriable and not learned:
                self._want_metadata()

    def _succeeded(self, queue: PartitionQueue, batch: Batch, offset: int, log_append_time_ms: int) -> None:
        queue.confirmed = queue.confirmed or batch.producer == queue.producer
        counters = self.counters
        counters.batches_acknowledged += 1
        counters.records_acknowledged += batch.record_count
        counters.bytes_acknowledged += batch.size_bytes
        if not batch.done:  # it may have been given up for its deadline while the answer was on its way
            batch.succeed(offset, log_append_time_ms)
        self._accumulator.finish(queue, batch)

    def _failed(self, queue: PartitionQueue, batch: Batch, error: KafkaError, now_s: float) -> None:
        """One attempt failed: split, try again, or give up."""
        if batch.done:
            # Given up while in flight, and nobody knows whether it was written.
            self._give_up(queue, batch, error)
            return
        queue.in_flight.remove(batch)
        batch.last_error = error
        if isinstance(error, ClientError) or error.code in _PERHAPS_WRITTEN:
            batch.unsure = True
        elif error.code is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER:
            batch.unsure = False
        if error.code is ErrorCode.MESSAGE_TOO_LARGE and batch.record_count > 1:
            self.counters.batch_splits += 1
            self._accumulator.split(queue, batch)
            return
        lost_track = self._config.enable_idempotence and error.code in _LOST_TRACK
        if lost_track and self._transactions is not None and queue.first_unanswered(batch):
            self._give_up(queue, batch, error)  # within a transaction nothing can begin anew
            return
        if lost_track and batch.producer == queue.producer and queue.first_unanswered(batch):
            _log.info(
                "new producer epoch",
                extra={"fields": {"partition": str(batch.partition), "code": error.code.name}},
            )
            queue.needs_new_epoch = True
        if not (error.retriable or lost_track) or batch.attempts > self._config.retries:
            self._give_up(queue, batch, error)
            return
        self.counters.batch_retries += 1
        batch.retry_at_s = now_s + self._cluster.backoff.wait_ms(batch.attempts) / 1000
        queue.put_back(batch)

    def _give_up(self, queue: PartitionQueue, batch: Batch, error: KafkaError) -> None:
        if self._transactions is not None:
            self._transactions.fail(error)
        if batch.sequence != NO_SEQUENCE:
            queue.needs_new_epoch = True
            if self._transactions is not None:
                self._transactions.lost_track()
        if not batch.done:
            self.counters.records_failed += batch.record_count
            batch.fail(error)
        self._accumulator.finish(queue, batch)

    def _expire(self, now_s: float) -> float:
        """Give up what is past its deadline; returns the next deadline."""
        next_s = NEVER_S
        for queue in list(self._accumulator.active.values()):
            while queue.waiting and queue.waiting[0].deadline_s <= now_s:
                batch = queue.waiting[0]
                self._give_up(queue, batch, self._too_late(batch))
            for batch in queue.in_flight:
                if batch.done:
                    continue
                if batch.deadline_s <= now_s:
                    batch.fail(self._too_late(batch))  # its bytes are held until the request ends
                else:
                    next_s = min(next_s, batch.deadline_s)
            if queue.waiting:
                next_s = min(next_s, queue.waiting[0].deadline_s)
        return next_s

    def _too_late(self, batch: Batch) -> DeliveryTimedOut:
        reason = batch.last_error or self._cluster.last_error
        because = f"; the last error: {reason}" if reason is not None else ""
        wait_ms = self._config.delivery_timeout_ms
        hint = "the cluster may be down or overloaded; delivery.timeout.ms sets how long to try"
        if isinstance(reason, KafkaError) and reason.code in _NO_SUCH_TOPIC:
            hint = f"was topic {batch.partition.topic!r} deleted? 'headrace topic list' tells which there are"
        return DeliveryTimedOut(
            f"a record for {batch.partition} was not acknowledged within {wait_ms} ms{because}", hint
        )

    # -- transactions -----------------------------------------------------------------------------------------------

    def adopt(self, producer: ProducerId) -> None:
        """Go on under the identity that the transactional id has now; nothing is in flight."""
        self._producer = producer
        for queue in self._accumulator.queues.values():
            queue.adopt(producer)

    def discard(self, error: KafkaError) -> None:
        """Fail what was not sent yet: its transaction is aborted."""
        for queue in list(self._accumulator.active.values()):
            for batch in list(queue.waiting):
                if batch.sequence != NO_SEQUENCE:
                    queue.needs_new_epoch = True
                    assert self._transactions is not None
                    self._transactions.lost_track()
                batch.fail(error)
                self._accumulator.finish(queue, batch)

    # -- what sending needs -----------------------------------------------------------------------------------------

    def _next_epoch(self, queue: PartitionQueue) -> None:
        """Let a partition go on from sequence 0 under an identity that the broker has not seen there."""
        self.counters.epoch_bumps += 1
        if self._config.enable_idempotence and queue.producer == self._producer:
            spent = self._producer.epoch >= EPOCH_MAX
            bumped = ProducerId(self._producer.producer_id, self._producer.epoch + 1)
            self._producer = NO_PRODUCER if spent else bumped
        if self._producer == NO_PRODUCER:
            self._spawn("init producer id", self._init_producer_id)
        queue.adopt(self._producer)

    async def _init_producer_id(self) -> None:
        failures = 0
        while self._accumulator.active:
            try:
                connection = await self._cluster.any_connection()
                body = {"transactional_id": None, "transaction_timeout_ms": 2**31 - 1}
                reply = await connection.request(Api.INIT_PRODUCER_ID, body)
                if reply.error_code == 0:
                    self._producer = ProducerId(reply.producer_id, reply.producer_epoch)
                    return
                code = error_code(reply.error_code)
                raise KafkaError(code, f"the broker gives no producer id: {code.name}")
            except KafkaError as error:
                if not error.retriable:
                    for batch in list(self._accumulator):
                        self._give_up(self._accumulator.active[batch.partition], batch, error)
                    return
                self._cluster.last_error = error
            failures += 1
            await asyncio.sleep(self._cluster.backoff.wait_ms(failures) / 1000)

    async def _connect(self, node_id: int) -> None:
        try:
            await self._cluster.connection(node_id)
        except KafkaError:
            self._want_metadata()

    def _want_metadata(self) -> None:
        self._spawn("metadata", self._refresh_metadata)

    async def _refresh_metadata(self) -> None:
        """Refresh once, then hold back for a moment: whoever still lacks something asks again."""
        try:
            await self._cluster.refresh(create=True)
            self._metadata_failures = 0
        except KafkaError:
            self._metadata_failures += 1
        self.wake()
        await asyncio.sleep(self._cluster.backoff.wait_ms(max(1, self._metadata_failures)) / 1000)


def _drained(heard: Heard, drained: "asyncio.Future[None]") -> None:
    if not drained.cancelled():
        heard(None, drained.exception())
