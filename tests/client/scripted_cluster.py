"""A cluster inside the test: brokers that speak the protocol over a scripted transport and fail as they are told.

It keeps one log a partition and checks producers' sequences as Kafka does: what it holds is what a real broker would.
`fates` is a list of what happens to produce requests, one after the other, `fetch_fates` the same for fetches; after
their end everything succeeds.
"""

import asyncio
from collections import deque
from collections.abc import Iterable
from enum import Enum
from typing import Any, NamedTuple

from headrace.base.errors import ErrorCode
from headrace.client.errors import Disconnected
from headrace.client.transport import FrameHandler, FrameStream
from headrace.records.batch import SEQUENCE_MAX, assign, parse_header
from headrace.records.builder import iter_records
from headrace.wire.apis import Api
from headrace.wire.headers import encode_response_header, parse_request_header
from headrace.wire.messages import decode_request, encode_response

TOPIC = "t"
TOPIC_ID = bytes(range(16))
REMEMBERED_BATCHES = 5


class Fate(Enum):
    """What happens to one produce request."""

    FINE = "fine"
    SLOW = "slow"
    LOST_BEFORE = "the connection ends before the broker sees it"
    LOST_AFTER = "the connection ends before the answer leaves"
    LEADER_MOVED = "the partition's leader has moved"
    TIMED_OUT_AFTER = "appended, but answered as timed out"
    NOT_ENOUGH_REPLICAS = "refused, may be tried again"
    STUCK = "never answered"
    FORGOT_PRODUCER = "the broker has lost its producer state"
    TOO_LARGE = "the batch is too large, if it has more than one record"
    FATAL = "refused for good"


class FetchFate(Enum):
    """What happens to one fetch request."""

    FINE = "fine"
    EMPTY = "nothing new within the wait"
    CUT = "the last batch of the answer is cut short"
    SLOW = "slow"
    LOST = "the connection ends"
    STUCK = "never answered"
    LEADER_MOVED = "the partition's leader has moved"
    NOT_AVAILABLE = "refused, may be tried again"
    DAMAGED = "a bit is flipped on the way"


class Stored(NamedTuple):
    """A batch in a log."""

    producer_id: int
    epoch: int
    sequence: int
    values: list[bytes]
    base_offset: int


class Log:
    """One partition: batches, and the sequence check."""

    def __init__(self) -> None:
        self.batches: list[Stored] = []
        self.raw: list[bytes] = []
        self.producers: dict[int, tuple[int, deque[Stored]]] = {}
        self.end_offset = 0

    @property
    def values(self) -> list[bytes]:
        return [value for batch in self.batches for value in batch.values]

    def too_large(self, data: Any) -> bool:
        """Whether a limit lowered for this batch alone refuses it: not one taken before, nor a single record."""
        header = parse_header(data)
        identity = (header.producer_id, header.producer_epoch, header.base_sequence)
        return header.record_count > 1 and all(batch[:3] != identity for batch in self.batches)

    def append(self, data: Any) -> tuple[ErrorCode, int]:
        header = parse_header(data)
        records = iter_records(data)
        batch = Stored(
            header.producer_id,
            header.producer_epoch,
            header.base_sequence,
            [record.value or b"" for record in records],
            self.end_offset,
        )
        if batch.producer_id >= 0:
            refused = self._check(batch)
            if refused is not None:
                return refused
        self.batches.append(batch)
        stored = bytearray(data)
        assign(memoryview(stored), 0, batch.base_offset, 0)
        self.raw.append(bytes(stored))
        self.end_offset += len(batch.values)
        return ErrorCode.NONE, batch.base_offset

    def read(self, offset: int, size_max: int) -> bytes:
        """Whole batches from the one that holds `offset`, at least one, about as many bytes as asked for."""
        out = b""
        for raw in self.raw:
            if parse_header(raw).last_offset < offset:
                continue
            if out and len(out) + len(raw) > size_max:
                break
            out += raw
        return out

    def _check(self, batch: Stored) -> tuple[ErrorCode, int] | None:
        epoch, recent = self.producers.get(batch.producer_id, (-1, deque(maxlen=REMEMBERED_BATCHES)))
        if batch.epoch < epoch:
            return ErrorCode.INVALID_PRODUCER_EPOCH, -1
        if batch.epoch > epoch:
            if epoch >= 0 and batch.sequence != 0:
                return ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, -1
            recent = deque(maxlen=REMEMBERED_BATCHES)
        for known in recent:
            if known.sequence == batch.sequence and len(known.values) == len(batch.values):
                return ErrorCode.NONE, known.base_offset
        if recent:
            last = recent[-1]
            expected = (last.sequence + len(last.values)) & SEQUENCE_MAX
            if batch.sequence != expected:
                return ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, -1
        recent.append(batch)
        self.producers[batch.producer_id] = (batch.epoch, recent)
        return None


class ScriptedCluster:
    """Brokers 1…N, one topic."""

    def __init__(
        self,
        *,
        brokers: int = 2,
        partitions: int = 2,
        fates: Iterable[Fate] = (),
        fetch_fates: Iterable[FetchFate] = (),
    ) -> None:
        self.nodes = list(range(1, brokers + 1))
        self.logs = [Log() for _ in range(partitions)]
        self.leaders = [self.nodes[at % brokers] for at in range(partitions)]
        self.epochs = [0] * partitions
        self.fates = deque(fates)
        self.fetch_fates = deque(fetch_fates)
        self.next_producer_id = 1000
        self.in_flight: dict[object, int] = {}
        self.in_flight_max = 0
        self.produce_requests = 0
        self.delay_s = 0.001
        self.produce_delays_s: dict[int, float] = {}  # of brokers that answer produce requests more slowly

    @property
    def bootstrap(self) -> str:
        return ",".join(f"broker:{9000 + node}" for node in self.nodes)

    async def connect(self, host: str, port: int, handler: FrameHandler) -> FrameStream:
        """The `Connector`."""
        if port - 9000 not in self.nodes:
            raise Disconnected(f"cannot connect to {host}:{port}")
        return _Stream(self, port - 9000, handler)

    # -- requests ---------------------------------------------------------------------------------------------------

    def answer(self, stream: "_Stream", frame: bytes) -> None:
        head = parse_request_header(frame)
        api = Api(head.api)
        request = decode_request(api, head.version, frame, head.body)
        if api is Api.PRODUCE:
            self._produce(stream, head, request)
            return
        if api is Api.FETCH:
            self._fetch(stream, head, request)
            return
        if api is Api.LIST_OFFSETS:
            self._reply(stream, head, self._list_offsets(stream.node, request), self.delay_s)
            return
        body = {
            Api.API_VERSIONS: self._api_versions,
            Api.METADATA: self._metadata,
            Api.INIT_PRODUCER_ID: self._init_producer_id,
        }[api]()
        self._reply(stream, head, body, self.delay_s)

    def _reply(self, stream: "_Stream", head: Any, body: dict[str, Any], delay_s: float) -> None:
        payload = encode_response_header(head.api, head.version, head.correlation_id)
        payload += encode_response(head.api, head.version, body)
        stream.answer_later(payload, delay_s)

    def _api_versions(self) -> dict[str, Any]:
        spoken = {
            Api.PRODUCE: (3, 13),
            Api.FETCH: (4, 17),
            Api.LIST_OFFSETS: (1, 9),
            Api.METADATA: (0, 13),
            Api.API_VERSIONS: (0, 4),
            Api.INIT_PRODUCER_ID: (0, 5),
        }
        keys = [{"api_key": int(a), "min_version": lo, "max_version": hi} for a, (lo, hi) in spoken.items()]
        return {"error_code": 0, "api_keys": keys}

    def _metadata(self) -> dict[str, Any]:
        partitions = [
            {
                "error_code": 0,
                "partition_index": at,
                "leader_id": leader,
                "leader_epoch": self.epochs[at],
                "replica_nodes": self.nodes,
                "isr_nodes": self.nodes,
                "offline_replicas": [],
            }
            for at, leader in enumerate(self.leaders)
        ]
        return {
            "brokers": [{"node_id": n, "host": "broker", "port": 9000 + n, "rack": None} for n in self.nodes],
            "cluster_id": "scripted",
            "controller_id": self.nodes[0],
            "topics": [
                {
                    "error_code": 0,
                    "name": TOPIC,
                    "topic_id": TOPIC_ID,
                    "is_internal": False,
                    "partitions": partitions,
                }
            ],
        }

    def _init_producer_id(self) -> dict[str, Any]:
        self.next_producer_id += 1
        return {"error_code": 0, "producer_id": self.next_producer_id, "producer_epoch": 0}

    def _produce(self, stream: "_Stream", head: Any, request: Any) -> None:
        self.produce_requests += 1
        fate = self.fates.popleft() if self.fates else Fate.FINE
        if fate is Fate.LOST_BEFORE:
            stream.lose()
            return
        results = []
        for topic in request.topic_data:
            for part in topic.partition_data:
                code, offset = self._append(stream.node, part, fate)
                results.append({"index": part.index, "error_code": int(code), "base_offset": offset})
        if fate is Fate.LOST_AFTER:
            stream.lose()
        elif fate is Fate.STUCK:
            stream.stuck = True  # answers leave in order, so nothing behind it is answered either
        elif request.acks != 0:
            body = {"responses": [{"name": TOPIC, "topic_id": TOPIC_ID, "partition_responses": results}]}
            delay_s = self.produce_delays_s.get(stream.node, self.delay_s)
            self._reply(stream, head, body, 0.5 if fate is Fate.SLOW else delay_s)

    def _move_leader(self, at: int) -> None:
        self.leaders[at] = self.nodes[(self.nodes.index(self.leaders[at]) + 1) % len(self.nodes)]
        self.epochs[at] += 1

    def _list_offsets(self, node: int, request: Any) -> dict[str, Any]:
        results = []
        for part in request.topics[0].partitions:
            at = part.partition_index
            led = self.leaders[at] == node
            code = ErrorCode.NONE if led else ErrorCode.NOT_LEADER_OR_FOLLOWER
            offset = self.logs[at].end_offset if part.timestamp == -1 else 0
            results.append({"partition_index": at, "error_code": int(code), "offset": offset if led else -1})
        return {"topics": [{"name": TOPIC, "partitions": results}]}

    def _fetch(self, stream: "_Stream", head: Any, request: Any) -> None:
        fate = self.fetch_fates.popleft() if self.fetch_fates else FetchFate.FINE
        if fate is FetchFate.LOST:
            stream.lose()
            return
        if fate is FetchFate.STUCK:
            stream.stuck = True
            return
        results = []
        for part in request.topics[0].partitions:
            at = part.partition
            if fate is FetchFate.LEADER_MOVED:
                self._move_leader(at)
            code, data = ErrorCode.NONE, b""
            if self.leaders[at] != stream.node:
                code = ErrorCode.NOT_LEADER_OR_FOLLOWER
            elif fate is FetchFate.NOT_AVAILABLE:
                code = ErrorCode.OFFSET_NOT_AVAILABLE
            elif not 0 <= part.fetch_offset <= self.logs[at].end_offset:
                code = ErrorCode.OFFSET_OUT_OF_RANGE
            elif fate is not FetchFate.EMPTY:
                data = self._damaged(self.logs[at].read(part.fetch_offset, part.partition_max_bytes), fate)
            end = self.logs[at].end_offset if code is ErrorCode.NONE else -1
            result = {"partition_index": at, "error_code": int(code), "high_watermark": end, "records": data}
            results.append({**result, "last_stable_offset": end, "log_start_offset": 0})
        waited = fate is FetchFate.EMPTY or not any(result["records"] for result in results)
        body = {"responses": [{"topic": TOPIC, "topic_id": TOPIC_ID, "partitions": results}]}
        self._reply(stream, head, body, 0.5 if waited or fate is FetchFate.SLOW else self.delay_s)

    def _damaged(self, data: bytes, fate: FetchFate) -> bytes:
        if fate is FetchFate.CUT and data and len(data) > parse_header(data).size:
            return data[:-7]
        if fate is FetchFate.DAMAGED and data:
            return data[:-1] + bytes([data[-1] ^ 1])
        return data

    def _append(self, node: int, part: Any, fate: Fate) -> tuple[ErrorCode, int]:
        at = part.index
        if fate is Fate.LEADER_MOVED:
            self._move_leader(at)
        if self.leaders[at] != node:
            return ErrorCode.NOT_LEADER_OR_FOLLOWER, -1
        if fate is Fate.NOT_ENOUGH_REPLICAS:
            return ErrorCode.NOT_ENOUGH_REPLICAS, -1
        if fate is Fate.FATAL:
            return ErrorCode.INVALID_RECORD, -1
        if fate is Fate.TOO_LARGE and self.logs[at].too_large(part.records):
            return ErrorCode.MESSAGE_TOO_LARGE, -1
        if fate is Fate.FORGOT_PRODUCER and self.logs[at].producers:
            self.logs[at].producers.clear()
            return ErrorCode.UNKNOWN_PRODUCER_ID, -1
        code, offset = self.logs[at].append(part.records)
        if fate is Fate.TIMED_OUT_AFTER and code is ErrorCode.NONE:
            return ErrorCode.REQUEST_TIMED_OUT, -1
        return code, offset


class _Stream:
    """One connection to one scripted broker. Answers leave in order, as on a socket."""

    def __init__(self, cluster: ScriptedCluster, node: int, handler: FrameHandler) -> None:
        self.cluster = cluster
        self.node = node
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        self.stuck = False
        self._closed = False
        self._free_at_s = 0.0
        self._unanswered = 0
        self._answers: deque[bytes] = deque()

    def send(self, *parts: bytes | bytearray | memoryview) -> None:
        if self._closed:
            raise Disconnected("closed")
        self._unanswered += 1
        self.cluster.in_flight_max = max(self.cluster.in_flight_max, self._unanswered)
        self._loop.call_soon(self._receive, b"".join(parts))

    def _receive(self, frame: bytes) -> None:
        if not self._closed and not self.stuck:
            self.cluster.answer(self, frame)

    def answer_later(self, payload: bytes, delay_s: float) -> None:
        self._free_at_s = max(self._free_at_s, self._loop.time() + delay_s)
        self._answers.append(payload)
        # Timers of the same moment may fire in any order, so each takes whichever answer is next.
        self._loop.call_at(self._free_at_s, self._deliver)

    def _deliver(self) -> None:
        payload = self._answers.popleft()
        if not self._closed:
            self._unanswered -= 1
            self._handler.on_frame(memoryview(payload))

    def lose(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.call_soon(self._handler.on_closed, ConnectionResetError("scripted"))

    async def drain(self) -> None:
        await asyncio.sleep(0)

    def close(self) -> None:
        self.lose()

    def abort(self) -> None:
        self.lose()
