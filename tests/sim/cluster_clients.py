"""Clients of a simulated cluster: producers that try again, readers, and one who administers. They speak the protocol.

Each has its own idea of who leads what, learned from whichever node it asked last and never going back in leader epoch,
and its own connections, which break like any other. What they are told goes to the oracle. Invariant: an idempotent
producer has one batch of a partition under way, and gives none up; so whatever it gets that is not an answer to that
batch is a bug. Driven by the kernel, made by the scenario.
"""

from collections import deque
from collections.abc import Callable, Mapping
from struct import Struct
from typing import Any

from headrace.base.errors import ErrorCode, KafkaError
from headrace.records.builder import build_batch, iter_batches, iter_records
from headrace.wire.apis import Api
from headrace.wire.fetch import FetchPartition, FetchRequest, FetchTopic
from headrace.wire.fetch_replica import VERSION as FETCH_VERSION
from headrace.wire.fetch_replica import decode_fetch_reply, encode_fetch
from headrace.wire.headers import encode_request_header, parse_response_header
from headrace.wire.messages import decode_response, encode_request
from tests.sim.cluster_loop import WALL_MS
from tests.sim.cluster_network import ClusterNetwork, Connection, frames_of
from tests.sim.cluster_oracle import ClusterOracle, Key
from tests.sim.kernel import MS, Kernel
from tests.sim.raft_oracle import Violation

_LENGTH = Struct(">i")
METADATA_VERSION, PRODUCE_VERSION, PRODUCER_ID_VERSION, OFFSETS_VERSION = 12, 12, 4, 7
TIMEOUT = 1_500 * MS
BACKOFF = 60 * MS
LATEST = -1
NOT_YET = (ErrorCode.OFFSET_NOT_AVAILABLE, ErrorCode.LEADER_NOT_AVAILABLE)
BROKEN_SEQUENCE = (
    ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
    ErrorCode.UNKNOWN_PRODUCER_ID,
    ErrorCode.INVALID_PRODUCER_EPOCH,
    ErrorCode.CORRUPT_MESSAGE,
    ErrorCode.INVALID_RECORD,
)

Answered = Callable[[memoryview | None], None]


class _Channel:
    """A client's connection to one node, and what is asked over it."""

    def __init__(self, client: "SimClient", node: int) -> None:
        self._client = client
        self._node = node
        self._connection: Connection | None = None
        self._unsent: list[bytes] = []
        self._asked: deque[tuple[int, int, int, Answered]] = deque()
        self.over = False
        client.net.connect(client.id, node, self._connected)

    def _connected(self, connection: Connection | None, refused: bool) -> None:
        if connection is None or connection.closed[0]:
            self.end()
            return
        if self.over:
            connection.close(0)
            return
        connection.ends[0] = self
        self._connection = connection
        unsent, self._unsent = self._unsent, []
        for data in unsent:
            connection.send(0, data)

    def ask(self, correlation: int, api: int, version: int, body: bytes, done: Answered) -> None:
        head = encode_request_header(api, version, correlation, f"client-{self._client.id}")
        data = _LENGTH.pack(len(head) + len(body)) + head + body
        self._asked.append((correlation, api, version, done))
        if self._connection is None:
            self._unsent.append(data)
        else:
            self._connection.send(0, data)

    def arrived(self, data: bytes) -> None:
        for frame in frames_of(data):
            correlation, api, version, done = self._asked.popleft()
            answered, body = parse_response_header(api, version, frame)
            assert answered == correlation, "replies come in the order of their requests"
            done(frame[body:])

    def broken(self, reset: bool) -> None:
        self.end()

    def overdue(self, correlation: int) -> None:
        """Give up if a request was not answered."""
        if self._asked and self._asked[0][0] <= correlation <= self._asked[-1][0]:  # asked in this order
            self.end()

    def end(self) -> None:
        """Be done with it: whatever was asked is not answered any more."""
        if self.over:
            return
        self.over = True
        self._client.channels.pop(self._node, None)
        if self._connection is not None:
            self._connection.close(0)
        asked, self._asked = self._asked, deque()
        for _, _, _, done in asked:
            done(None)


class SimClient:
    """A client: connections, and what it knows of the cluster."""

    def __init__(
        self, kernel: Kernel, net: ClusterNetwork, oracle: ClusterOracle, client_id: int, nodes: list[int]
    ) -> None:
        self.kernel = kernel
        self.net = net
        self.oracle = oracle
        self.id = client_id
        self.random = kernel.random
        self.nodes = nodes
        self.channels: dict[int, _Channel] = {}
        self.leaders: dict[Key, tuple[int, int]] = {}
        """Leader and epoch."""
        self.topic_ids: dict[str, bytes] = {}
        self._correlation = 0
        self._refreshing = False

    def call(self, node: int, api: int, version: int, body: bytes, done: Answered) -> None:
        """Ask a node; `done` gets the reply's body, or None when there is none."""
        channel = self.channels.get(node)
        if channel is None:
            channel = self.channels[node] = _Channel(self, node)
        self._correlation += 1
        channel.ask(self._correlation, api, version, body, done)
        self.kernel.after(TIMEOUT, channel.overdue, self._correlation)

    def request(
        self, node: int, api: Api, version: int, body: Mapping[str, Any], done: Callable[[Any], None]
    ) -> None:
        """As `call`, with the message decoded, or None."""

        def decoded(view: memoryview | None) -> None:
            done(None if view is None else decode_response(api, version, bytes(view)))

        self.call(node, api, version, encode_request(api, version, body), decoded)

    def any_node(self) -> int:
        return self.random.choice(self.nodes)

    def refresh(self, topic: str) -> None:
        """Learn who leads, from any node."""
        if self._refreshing:
            return
        self._refreshing = True

        def done(reply: Any) -> None:
            self._refreshing = False
            for found in () if reply is None else reply.topics:
                if found.error_code:
                    continue
                self.topic_ids[found.name] = found.topic_id
                for partition in found.partitions:
                    key = (found.name, partition.partition_index)
                    known = self.leaders.get(key, (-1, -1))
                    if partition.leader_epoch >= known[1] and partition.leader_id >= 0:
                        self.leaders[key] = (partition.leader_id, partition.leader_epoch)

        body = {"topics": [{"topic_id": bytes(16), "name": topic}], "allow_auto_topic_creation": False}
        self.request(self.any_node(), Api.METADATA, METADATA_VERSION, body, done)


class SimProducer(SimClient):
    """Produces to one partition, one batch after the other."""

    def __init__(self, *args: Any, key: Key, acks: int, gap: int) -> None:
        super().__init__(*args)
        self.key = key
        self.acks = acks
        self.gap = gap
        self.stopping = False
        self._producer: tuple[int, int] | None = None
        self._sequence = 0
        self._made = 0
        self._values: list[bytes] = []
        self.done_values: list[bytes] = []
        """Acknowledged, whatever that means with its acks."""
        self.sent_values: set[bytes] = set()
        self.kernel.after(1 + self.random.randrange(20 * MS), self.step)

    @property
    def idle(self) -> bool:
        return self.stopping and not self._values

    def _again(self, *, refresh: bool = True) -> None:
        if refresh:
            self.refresh(self.key[0])
        self.kernel.after(BACKOFF + self.random.randrange(BACKOFF), self.step)

    def step(self) -> None:
        if self.acks == -1 and self._producer is None:
            self._get_id()
            return
        if not self._values:
            if self.stopping:
                return
            for _ in range(self.random.choice((1, 1, 2, 4))):
                self._values.append(b"%d:%d" % (self.id, self._made))
                self._made += 1
            self.sent_values.update(self._values)
        leader = self.leaders.get(self.key)
        if leader is None:
            self._again()
            return
        self._produce(leader[0])

    def _get_id(self) -> None:
        def done(reply: Any) -> None:
            if reply is not None and reply.error_code == ErrorCode.NONE:
                self._producer = (reply.producer_id, reply.producer_epoch)
                self.step()
            else:
                self._again(refresh=False)

        body = {
            "transactional_id": None,
            "transaction_timeout_ms": 0,
            "producer_id": -1,
            "producer_epoch": -1,
        }
        self.request(self.any_node(), Api.INIT_PRODUCER_ID, PRODUCER_ID_VERSION, body, done)

    def _produce(self, node: int) -> None:
        values = self._values
        now_ms = WALL_MS + self.kernel.now // MS
        numbers: dict[str, int] = {}
        if self._producer is not None:
            numbers = {
                "producer_id": self._producer[0],
                "producer_epoch": self._producer[1],
                "base_sequence": self._sequence,
            }
        batch = build_batch([(now_ms, None, value, ()) for value in values], **numbers)  # type: ignore[arg-type]
        body = {
            "transactional_id": None,
            "acks": self.acks,
            "timeout_ms": 1_000,
            "topic_data": [
                {"name": self.key[0], "partition_data": [{"index": self.key[1], "records": batch}]}
            ],
        }

        def done(reply: Any) -> None:
            if reply is None:
                self._again()
                return
            result = reply.responses[0].partition_responses[0]
            self._answered(values, result.error_code, result.base_offset)

        self.request(node, Api.PRODUCE, PRODUCE_VERSION, body, done)

    def _answered(self, values: list[bytes], error: int, base_offset: int) -> None:
        if error == ErrorCode.NONE:
            if self.kernel.tracing:
                self.kernel.trace(f"client {self.id}: {values} at {base_offset} of {self.key}")
            if self.acks == -1:
                self.oracle.acknowledged(self.key, base_offset, values, f"client {self.id}")
        elif self.kernel.tracing:
            self.kernel.trace(f"client {self.id}: {ErrorCode(error).name} for {values} of {self.key}")
        if error == ErrorCode.NONE:
            pass
        elif error in BROKEN_SEQUENCE:
            raise Violation(
                f"producer {self.id} got {ErrorCode(error).name} for sequence {self._sequence} of {self.key}"
            )
        elif error != ErrorCode.DUPLICATE_SEQUENCE_NUMBER:
            self._again()
            return
        self.done_values += values
        self._sequence += len(values)
        self._values = []
        self.kernel.after(1 + self.random.randrange(self.gap), self.step)


class SimReader(SimClient):
    """Reads one partition from its beginning, and asks now and then where it ends."""

    def __init__(self, *args: Any, key: Key) -> None:
        super().__init__(*args)
        self.key = key
        self.position = 0
        self.end_seen = 0
        self.kernel.after(1 + self.random.randrange(20 * MS), self.step)

    def _again(self) -> None:
        self.refresh(self.key[0])
        self.kernel.after(BACKOFF + self.random.randrange(BACKOFF), self.step)

    def step(self) -> None:
        leader = self.leaders.get(self.key)
        topic_id = self.topic_ids.get(self.key[0])
        if leader is None or topic_id is None:
            self._again()
        elif self.random.random() < 0.1:
            self._look_for_end(*leader)
        else:
            self._fetch(topic_id, *leader)

    def _fetch(self, topic_id: bytes, node: int, epoch: int) -> None:
        position = self.position
        wanted = FetchPartition(self.key[1], epoch, position, -1, -1, 2_000)
        request = FetchRequest(-1, -1, 200, 1, 10_000, 0, 0, -1, [FetchTopic("", topic_id, [wanted])], [], "")

        def done(view: memoryview | None) -> None:
            if view is None:
                self._again()
                return
            reply = decode_fetch_reply(view)
            if reply.error or not reply.topics:
                self._again()
                return
            result = reply.topics[0][1][0]
            if result.error == ErrorCode.OFFSET_OUT_OF_RANGE:
                raise Violation(
                    f"reader {self.id}: {self.key} does not reach {position} at node {node} in epoch {epoch}"
                )
            if result.error:
                self._again()
                return
            if all(self._take(piece) for piece in result.ranges):
                self.kernel.after(1, self.step)
            else:
                self._again()

        self.call(node, Api.FETCH, FETCH_VERSION, encode_fetch(request), done)

    def _take(self, data: Any) -> bool:
        """Take what was fetched; False when it is damaged."""
        try:
            batches = list(iter_batches(data))
        except KafkaError:
            return False
        for _, batch in batches:
            for record in iter_records(batch):
                if record.offset < self.position:
                    continue
                if record.offset != self.position:
                    raise Violation(
                        f"reader {self.id}: {self.key} has nothing at {self.position}, and {record.value!r} at "
                        f"{record.offset}"
                    )
                self.oracle.was_read(self.key, record.offset, record.value or b"", f"reader {self.id}")
                self.position = record.offset + 1
        return True

    def _look_for_end(self, node: int, epoch: int) -> None:
        body = {
            "replica_id": -1,
            "isolation_level": 0,
            "topics": [
                {
                    "name": self.key[0],
                    "partitions": [
                        {
                            "partition_index": self.key[1],
                            "current_leader_epoch": epoch,
                            "timestamp": LATEST,
                        }
                    ],
                }
            ],
        }

        def done(reply: Any) -> None:
            if reply is None:
                self._again()
                return
            result = reply.topics[0].partitions[0]
            if result.error_code:
                self._again()
                return
            seen = max(self.end_seen, self.position)
            if result.offset < seen:
                raise Violation(
                    f"the end of {self.key} went from {seen} down to {result.offset} for reader {self.id}, "
                    f"told by node {node} in epoch {epoch}"
                )
            self.end_seen = result.offset
            self.kernel.after(1, self.step)

        self.request(node, Api.LIST_OFFSETS, OFFSETS_VERSION, body, done)


class SimAdmin(SimClient):
    """Has things changed, and tries until they are."""

    def until_done(
        self, api: Api, version: int, body: Mapping[str, Any], is_done: Callable[[Any], bool], tries: int
    ) -> None:
        """Ask any node until it says so, or `tries` are used up."""

        def done(reply: Any) -> None:
            if self.kernel.tracing and reply is not None:
                self.kernel.trace(f"admin: {api.name} {reply}")
            if (reply is None or not is_done(reply)) and tries > 1:
                self.kernel.after(
                    BACKOFF + self.random.randrange(BACKOFF),
                    self.until_done,
                    api,
                    version,
                    body,
                    is_done,
                    tries - 1,
                )

        self.request(self.any_node(), api, version, body, done)
