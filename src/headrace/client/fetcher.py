"""Keeps assigned partitions supplied: fetches ahead of the reader, within a bound.

Owns positions, the fetches in flight (one a broker) and what they brought. Invariants: bytes held ahead are
bounded by `fetch.max.bytes` and one answer more; records of a partition are handed out in offset order
without gap or repeat, also across leader changes; after `seek` nothing fetched before it is handed out.
Fetches are full ones, without sessions. Called by `consumer`.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.ids import ZERO_ID
from headrace.base.log import get_logger
from headrace.client.assigned import Assigned
from headrace.client.cluster import NO_NODE, Cluster
from headrace.client.config import ConsumerConfig
from headrace.client.connection import Connection, Heard
from headrace.client.errors import ClientError, Closed, error_code
from headrace.client.fetched import Chunk, ConsumerRecord
from headrace.client.offsets import EARLIEST, LATEST, UNKNOWN_OFFSET, list_offsets, missing_partition
from headrace.client.statistics import ConsumerCounters
from headrace.client.topics import TopicPartition
from headrace.wire.apis import Api
from headrace.wire.messages import Message

BY_NAME_HIGHEST = 12
FULL_FETCH_EPOCH = -1
NEVER_S = float("inf")
PURPOSE = (
    "fetch"  # of a connection: a fetch that waits for records would hold up every other request behind it
)
CHUNKS_AHEAD_MAX = 2

_log = get_logger(__name__)


class Fetcher:
    """Reads assigned partitions ahead."""

    def __init__(self, config: ConsumerConfig, cluster: Cluster) -> None:
        self._config = config
        self._cluster = cluster
        self.assigned: dict[TopicPartition, Assigned] = {}
        self._busy_nodes: set[int] = set()
        self.errors: deque[KafkaError] = deque(maxlen=1)
        self._woken = False
        self._alarm: asyncio.TimerHandle | None = None  # when to look without being woken; may be too early
        self._alarm_s = NEVER_S
        self._news = False  # whether something has arrived since the last look
        self._readers: list[asyncio.Future[None]] = []  # who waits for it
        self._patience: asyncio.TimerHandle | None = None  # when readers look without news; may be too early
        self._patience_s = NEVER_S
        self._waited_until_s = 0.0
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._turn: deque[TopicPartition] = deque()
        self._closed = False
        self.on_news: Callable[[], object] | None = None  # called whenever readers have a reason to look
        self.counters = ConsumerCounters()

    @property
    def closed(self) -> bool:
        return self._closed

    # -- the reader's side ------------------------------------------------------------------------------------------

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Read these partitions and no others; those that stay keep their position."""
        before, self.assigned = self.assigned, {}
        for partition in partitions:
            self._cluster.track(partition.topic)
            self.assigned[partition] = before.get(partition) or Assigned(partition, self._reset_to())
        self._turn = deque(self.assigned)
        self.wake()

    def state(self, partition: TopicPartition) -> Assigned:
        """The state of an assigned partition. Raises ClientError when it is not assigned."""
        state = self.assigned.get(partition)
        if state is None:
            raise ClientError(f"{partition} is not assigned", "assign() it first", ErrorCode.INVALID_REQUEST)
        return state

    def wake(self) -> None:
        """Look for something to fetch, soon."""
        if not self._woken and not self._closed:
            self._woken = True
            asyncio.get_running_loop().call_soon(self._step)

    @property
    def expectant(self) -> bool:
        """Whether nothing is at hand and a fetch is under way, so that there will be news."""
        at_hand = self.errors or any(state.chunks for state in self.assigned.values())
        return bool(self._busy_nodes) and not at_hand

    def nudge(self) -> None:
        """Look for something to fetch, unless a fetch is under way whose answer will do so."""
        if not self._busy_nodes:
            self.wake()

    def take(self, count_max: int) -> list[ConsumerRecord]:
        """Records at hand, at most so many; partitions take turns. Raises what keeps a partition from being read."""
        out: list[ConsumerRecord] = []
        for _ in range(len(self._turn)):
            state = self.assigned[self._turn[0]]
            self._turn.rotate(-1)
            if not state.paused:
                self._take_from(state, count_max, out)
            if len(out) >= count_max:
                break
        if self.errors and not out:
            raise self.errors.popleft()
        self.counters.records_handed_out += len(out)
        return out

    def take_chunks(self) -> list[Chunk]:
        """All that was fetched and may be handed out, undecoded. Raises as `take` does."""
        out: list[Chunk] = []
        for state in self.assigned.values():
            while state.chunks and not state.paused:
                chunk = state.chunks.popleft()
                state.position = chunk.end_offset
                out.append(chunk)
        if out:
            self.wake()
        elif self.errors:
            raise self.errors.popleft()
        return out

    def _take_from(self, state: Assigned, count_max: int, out: list[ConsumerRecord]) -> None:
        while state.chunks and len(out) < count_max:
            chunk = state.chunks[0]
            try:
                records = chunk.take(count_max - len(out))
            except KafkaError as error:
                # Read again from here: the bytes may have been damaged on the way.
                state.move(state.position)
                self._fail(state, error)
                self.errors.append(error)
                return
            state.position = chunk.next_offset
            out += records
            if chunk.spent:
                state.chunks.popleft()
                self.wake()

    def refuse(self, partition: TopicPartition, error: KafkaError) -> None:
        """Do not read a partition until it is sought and resumed; the next look raises why."""
        state = self.state(partition)
        state.reset_to, state.paused = None, True
        self.errors.append(error)

    def notify(self) -> None:
        """Let whoever waits look again."""
        self._news = True
        for reader in self._readers:
            if not reader.done():
                reader.set_result(None)
        self._readers.clear()
        if self.on_news is not None:
            self.on_news()

    async def wait(self, until_s: float) -> float:
        """Return when something has arrived since the last look: records, an error, or progress without records.

        At `until_s` at the latest; now and then earlier, because one timer serves many waits. Returns what time it
        is: that of the timer, where the clock is a tick behind it.
        """
        loop = asyncio.get_running_loop()
        if not self._news:
            if until_s < self._patience_s:
                if self._patience is not None:
                    self._patience.cancel()
                self._patience_s = until_s
                self._patience = loop.call_at(until_s, self._end_patience)
            reader = loop.create_future()
            self._readers.append(reader)
            try:
                await reader
            finally:
                if reader in self._readers:  # cancelled
                    self._readers.remove(reader)
        self._news = False
        return max(loop.time(), self._waited_until_s)

    def _end_patience(self) -> None:
        self._waited_until_s = self._patience_s
        self._patience, self._patience_s = None, NEVER_S
        self.notify()

    async def close(self) -> None:
        """Stop fetching."""
        self._closed = True
        for timer in (self._alarm, self._patience):
            if timer is not None:
                timer.cancel()
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self.errors.append(Closed("the consumer is closed", "make another one"))
        self.notify()

    # -- the fetching side ------------------------------------------------------------------------------------------

    def _spawn(self, name: str, work: Any, *arguments: Any) -> None:
        if name not in self._tasks and not self._closed:
            task: asyncio.Task[None] = asyncio.create_task(work(*arguments), name=f"headrace consumer {name}")
            self._tasks[name] = task
            task.add_done_callback(partial(self._ended, name))

    def _ended(self, name: str, task: "asyncio.Task[None]") -> None:
        del self._tasks[name]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broke(name, error)
        self.wake()

    def _broke(self, name: str, error: BaseException) -> None:
        """A bug in this module must not become a silent hang."""
        _log.error("consumer task failed", exc_info=error, extra={"fields": {"task": name}})
        self.errors.append(ClientError(f"the consumer failed: {error!r}", "please report this with the log"))
        self.notify()

    def _step(self, now_s: float = 0.0) -> None:
        """Start what can be started, and see to it that the next moment is not missed. It is `now_s` or later."""
        self._woken = False
        if self._closed:
            return
        loop = asyncio.get_running_loop()
        try:
            next_s = self._look(max(now_s, loop.time()))
        except Exception as error:
            self._broke("fetcher", error)
            return
        if next_s < self._alarm_s:
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm_s = next_s
            self._alarm = loop.call_at(next_s, self._on_alarm)

    def _on_alarm(self) -> None:
        now_s = self._alarm_s
        self._alarm, self._alarm_s = None, NEVER_S
        self._step(now_s)

    def _look(self, now_s: float) -> float:
        """Start whatever can be started; returns when to look again."""
        next_s = now_s + self._config.metadata_max_age_ms / 1000
        if self._cluster.stale(now_s) and self.assigned:
            self._want_metadata()
        by_node: dict[int, list[Assigned]] = {}
        resets = False
        for state in self.assigned.values():
            if state.reset_to is not None:
                resets = True
            elif self._fetchable(state):
                if state.not_before_s > now_s:
                    next_s = min(next_s, state.not_before_s)
                    continue
                leader = self._cluster.leader(state.partition)
                if leader is None:
                    self._note_missing(state)
                    continue
                near = state.replica in self._cluster.nodes and now_s < state.replica_until_s
                node_id = state.replica if near else leader[0]
                if node_id not in self._busy_nodes:
                    by_node.setdefault(node_id, []).append(state)
        if resets:
            self._spawn("reset", self._reset)
        if self.held_bytes() < self._config.fetch_max_bytes:
            for node_id, states in by_node.items():
                self._fetch(node_id, states)
        return next_s

    def _fetchable(self, state: Assigned) -> bool:
        return not state.fetching and not state.paused and len(state.chunks) < CHUNKS_AHEAD_MAX

    def held_bytes(self) -> int:
        """Bytes fetched and not handed out."""
        return sum(chunk.size_bytes for state in self.assigned.values() for chunk in state.chunks)

    def _fetch(self, node_id: int, states: list[Assigned]) -> None:
        connection = self._cluster.ready_connection(node_id, PURPOSE)
        if connection is None:
            self._spawn(f"connect {node_id}", self._connect, node_id)
            return
        # Whoever was served first last time is served last this time, because an answer may be full before its end.
        states.sort(key=lambda state: (len(state.chunks), state.fetch_offset == state.high_watermark))
        generations = {state.partition: state.generation for state in states}
        try:
            self._request(connection, states, partial(self._answered, node_id, states, generations))
        except KafkaError as error:
            for state in states:
                self._fail(state, error)
            self._want_metadata()
            return
        self.counters.fetch_requests += 1
        self._busy_nodes.add(node_id)
        for state in states:
            state.fetching = True

    def _request(self, connection: Connection, states: list[Assigned], heard: Heard) -> None:
        topics: dict[str, list[dict[str, int]]] = {}
        for state in states:
            leader = self._cluster.leader(state.partition)
            entry = {
                "partition": state.partition.partition,
                "current_leader_epoch": leader[1] if leader is not None else -1,
                "fetch_offset": state.fetch_offset,
                "partition_max_bytes": self._config.max_partition_fetch_bytes,
            }
            topics.setdefault(state.partition.topic, []).append(entry)
        ids = {name: self._cluster.topic_id(name) for name in topics}
        body = {
            "replica_id": -1,
            "max_wait_ms": self._config.fetch_max_wait_ms,
            "min_bytes": self._config.fetch_min_bytes,
            "max_bytes": self._config.fetch_max_bytes,
            "isolation_level": int(self._config.read_committed),
            "session_id": 0,
            "session_epoch": FULL_FETCH_EPOCH,
            "topics": [
                {"topic": name, "topic_id": ids[name], "partitions": entries}
                for name, entries in topics.items()
            ],
            "rack_id": self._config.client_rack,
        }
        highest = BY_NAME_HIGHEST if ZERO_ID in ids.values() else None
        timeout_ms = self._config.request_timeout_ms + self._config.fetch_max_wait_ms
        connection.ask(Api.FETCH, body, heard, highest=highest, timeout_ms=timeout_ms)

    def _answered(
        self,
        node_id: int,
        states: list[Assigned],
        generations: dict[TopicPartition, int],
        reply: Message | None,
        error: BaseException | None,
    ) -> None:
        self._busy_nodes.discard(node_id)
        for state in states:
            state.fetching = False
        if reply is not None and reply.error_code:
            code = error_code(reply.error_code)
            error = KafkaError(code, f"fetch: {code.name}")
        if reply is None or error is not None:
            failure = error if isinstance(error, KafkaError) else ClientError(f"cannot fetch: {error!r}")
            for state in states:
                state.replica = NO_NODE
                self._fail(state, failure)
            if not failure.retriable:
                self.errors.append(failure)
            self._want_metadata()
            self.wake()
            self.notify()
            return
        for topic in reply.responses:
            name = topic.topic or self._cluster.topic_name(bytes(topic.topic_id)) or ""
            for result in topic.partitions:
                partition = TopicPartition(name, result.partition_index)
                current = self.assigned.get(partition)
                if current is not None and current.generation == generations.get(partition):
                    self._receive(current, result, reply)
        if any(state.fetch_offset < state.high_watermark for state in states):
            self._step()  # at once: more comes while the reader works
            self.notify()
        else:
            self.notify()
            self.wake()  # after the reader: the next fetch would only wait at the broker

    def _receive(self, state: Assigned, result: Message, reply: Message) -> None:
        code = error_code(result.error_code)
        if code is not ErrorCode.NONE:
            self._refused(state, code, result, reply)
            return
        state.failures, state.not_before_s = 0, 0.0
        state.high_watermark = result.high_watermark
        state.last_stable_offset = result.last_stable_offset
        state.log_start_offset = result.log_start_offset
        data = result.records
        if result.preferred_read_replica != NO_NODE:
            state.replica = result.preferred_read_replica
            age_s = self._config.metadata_max_age_ms / 1000
            state.replica_until_s = asyncio.get_running_loop().time() + age_s
        if data is None or len(data) == 0:
            return
        aborted = None
        if self._config.read_committed:
            aborted = [(item.producer_id, item.first_offset) for item in result.aborted_transactions or []]
        try:
            chunk = Chunk(
                state.partition,
                memoryview(data),
                state.fetch_offset,
                aborted,
                check_crcs=self._config.check_crcs,
            )
        except KafkaError as error:
            self._fail(state, error)
            self.errors.append(error)
            return
        if chunk.end_offset == state.fetch_offset:
            stuck = ClientError(
                f"{state.partition} at offset {state.fetch_offset}: no whole batch in {len(data)} bytes",
                "raise max.partition.fetch.bytes and fetch.max.bytes",
                ErrorCode.RECORD_LIST_TOO_LARGE,
            )
            self._fail(state, stuck)
            self.errors.append(stuck)
            return
        state.fetch_offset = chunk.end_offset
        state.chunks.append(chunk)
        self.counters.bytes_fetched += chunk.size_bytes

    def _refused(self, state: Assigned, code: ErrorCode, result: Message, reply: Message) -> None:
        error = KafkaError(code, f"fetch of {state.partition} at offset {state.fetch_offset}: {code.name}")
        if state.replica != NO_NODE:
            # A follower may lag behind, or no longer be one: the leader knows.
            state.replica = NO_NODE
            self._fail(state, error)
            return
        if code is ErrorCode.OFFSET_OUT_OF_RANGE:
            if state.chunks:
                self._fail(state, error)  # hand out first what was fetched before
                return
            if self._config.auto_offset_reset == "none":
                self._fail(state, error)
                self.errors.append(error)
                return
            _log.info(
                "offset out of range",
                extra={"fields": {"partition": str(state.partition), "offset": state.position}},
            )
            self.counters.offset_resets += 1
            state.move(UNKNOWN_OFFSET, self._reset_to())
            return
        self._fail(state, error)
        if not error.retriable:
            self.errors.append(error)
            return
        leader = result.current_leader
        nodes = reply.node_endpoints or []
        if self._cluster.learn_leader(state.partition, leader.leader_id, leader.leader_epoch, nodes):
            state.not_before_s = 0.0
        else:
            self._want_metadata()

    # -- what fetching needs ----------------------------------------------------------------------------------------

    def _reset_to(self) -> int:
        return EARLIEST if self._config.auto_offset_reset == "earliest" else LATEST

    async def _reset(self) -> None:
        """Find the offsets of all partitions that wait for one."""
        wanted = {s.partition: s.reset_to for s in self.assigned.values() if s.reset_to is not None}
        try:
            found = await list_offsets(
                self._cluster,
                wanted,
                read_committed=self._config.read_committed,
                timeout_ms=self._config.default_api_timeout_ms,
            )
        except KafkaError as error:
            self.errors.append(error)
            self.notify()
            await asyncio.sleep(self._cluster.backoff.wait_ms(1) / 1000)
            return
        for partition, answer in found.items():
            state = self.assigned.get(partition)
            if state is not None and state.reset_to == wanted[partition]:
                if answer.offset == UNKNOWN_OFFSET:  # nothing at or after that time: the end
                    state.reset_to = LATEST
                else:
                    state.move(answer.offset)
        self.notify()

    def _fail(self, state: Assigned, error: KafkaError) -> None:
        """Leave a partition alone for a while."""
        self.counters.fetch_errors += 1
        state.failures += 1
        now_s = asyncio.get_running_loop().time()
        state.not_before_s = now_s + self._cluster.backoff.wait_ms(state.failures) / 1000
        self._cluster.last_error = error

    def _note_missing(self, state: Assigned) -> None:
        error = missing_partition(self._cluster, state.partition)
        if self._cluster.topics.get(state.partition.topic) is not None and not error.retriable:
            self.errors.append(error)
            self.notify()
        self._fail(state, error)
        self._want_metadata()

    async def _connect(self, node_id: int) -> None:
        try:
            await self._cluster.connection(node_id, PURPOSE)
        except KafkaError as error:
            self._cluster.last_error = error
            self._want_metadata()

    def _want_metadata(self) -> None:
        self._spawn("metadata", self._refresh_metadata)

    async def _refresh_metadata(self) -> None:
        try:
            await self._cluster.refresh()
        except KafkaError as error:
            self._cluster.last_error = error
        self.wake()
        await asyncio.sleep(self._cluster.backoff.wait_ms(1) / 1000)
