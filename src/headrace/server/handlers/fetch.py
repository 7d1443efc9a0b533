"""Fetch: byte ranges of many partitions out, at once or when there is enough.

Behaviour. Answered at once when `min_bytes` are there, a partition has an error, nothing is asked for, or the client
does not want to wait; otherwise parked on its partitions until data comes or `max_wait_ms` is over. Records are never
decoded: the reply is heads around ranges of segment files. The first partition with data gets at least one whole batch
however small the limits are, so that a reader always gets on. A reader that was catching up, by large replies, is told
once, at once, when it has reached the end; only then does it wait: programs that read to the end need not spend
`max_wait_ms` there, and clients that ask for many partitions hear of the other ones sooner. With read_committed a reply
ends before the first open transaction and lists the aborted ones in it. Versions: sessions from 7, leader epochs
checked from 9, topic ids from 13. Followers' fetches are served in `replica_fetch`. A consumer that says its rack may
be sent to a follower there, and may read from one; others read from the leader. A leader that does not know yet where
its predecessor's log ended for clients tells OFFSET_NOT_AVAILABLE, if that is still so when the wait is over.
"""

from headrace.base.clock import Timer
from headrace.base.errors import ErrorCode, KafkaError
from headrace.replication.partition import READ_COMMITTED, Partition
from headrace.security.authorizer import Operation, ResourceType
from headrace.server.broker import Broker
from headrace.server.broker_replicas import is_rack_aware
from headrace.server.fetch_sessions import NO_SESSION, FetchSession, Key
from headrace.server.handlers.replica_fetch import serve_follower
from headrace.server.leaders import NO_REPLICA, endpoints_of, leader_of, preferred_replica
from headrace.server.session import Exchange
from headrace.wire.fetch import (
    TOPIC_IDS_FROM,
    FetchPartition,
    FetchRequest,
    FetchResult,
    decode_fetch,
    encode_fetch_reply,
)

WAITED_FOR = (ErrorCode.NONE, ErrorCode.OFFSET_NOT_AVAILABLE)
DEBUGGING_CONSUMER = -2  # a reader that compares replicas, and asks each of them
BULK_BYTES = 256 * 1024  # a reply of this much is one to a reader that is catching up


def handle_fetch(broker: Broker, exchange: Exchange, frame: memoryview, body: int) -> None:
    """Read, and answer now or when there is enough."""
    context = exchange.context
    version = context.version
    request = decode_fetch(version, frame, body)
    if request.replica_id >= 0:
        serve_follower(broker, exchange, request)
        return
    uses_ids = version >= TOPIC_IDS_FROM
    try:
        session = broker.fetch_sessions.open(request, uses_ids, broker.clock.monotonic_ms())
    except KafkaError as error:
        parts, size = encode_fetch_reply(version, [], throttle_time_ms=context.throttle_ms, error=error.code)
        exchange.reply_parts(parts, size)  # type: ignore[arg-type]
        return
    _Fetch(broker, exchange, request, session).start()


class _Fetch:
    """A fetch under way: what it wants, and where it is parked."""

    __slots__ = (
        "_broker",
        "_exchange",
        "_found",
        "_parked",
        "_request",
        "_session",
        "_timer",
        "_wanted",
        "_whole",
    )

    def __init__(
        self, broker: Broker, exchange: Exchange, request: FetchRequest, session: FetchSession | None
    ) -> None:
        self._broker = broker
        self._exchange = exchange
        self._request = request
        self._session = session
        self._whole = (
            session is None or session.epoch == 1
        )  # the first reply of a session holds every partition
        if session is None:
            self._wanted: list[tuple[Key, FetchPartition]] = [
                ((topic.name, topic.topic_id, partition.partition), partition)
                for topic in request.topics
                for partition in topic.partitions
            ]
        else:
            self._wanted = list(session.partitions.items())
        self._found: list[tuple[Partition, int]] = []  # what was last read of each, charged when it is sent
        self._parked: list[Partition] = []
        self._timer: Timer | None = None

    def start(self) -> None:
        results, size, urgent = self._read()
        request = self._request
        caught_up = size == 0 and self._exchange.reads_in_bulk
        self._exchange.reads_in_bulk = size >= BULK_BYTES
        if urgent or caught_up or not self._wanted or size >= request.min_bytes or request.max_wait_ms <= 0:
            self._answer(results)
            return
        self._park()
        self._timer = self._broker.call_later(request.max_wait_ms, self._time_out)
        self._exchange.on_gone = self._leave

    def _read(self) -> tuple[list[tuple[Key, FetchResult]], int, bool]:
        """What there is now: the results, their bytes of records, and whether one of them cannot wait."""
        broker, request = self._broker, self._request
        left = min(request.max_bytes, broker.config.fetch_max_bytes)
        results: list[tuple[Key, FetchResult]] = []
        total, urgent = 0, False
        self._found = []
        for key, wanted in self._wanted:
            result = self._read_one(key, wanted, left, total == 0)
            if result.size:
                total += result.size
                left -= result.size
            urgent |= result.error not in WAITED_FOR or result.preferred_read_replica != NO_REPLICA
            results.append((key, result))
        return results, total, urgent

    def _read_one(self, key: Key, wanted: FetchPartition, left: int, first: bool) -> FetchResult:
        isolation = self._request.isolation_level
        partition: Partition | None = None
        try:
            partition = self._partition(key)
            partition.check_epoch(wanted.leader_epoch)
            if not partition.end_is_known:
                raise KafkaError(ErrorCode.OFFSET_NOT_AVAILABLE, "the end of the log is not known yet")
            if self._request.rack_id:
                preferred = self._elsewhere(partition, wanted.offset)
                if preferred is not None:
                    return preferred
            piece = partition.read(wanted.offset, max(min(wanted.max_bytes, left), 0), isolation, first)
        except KafkaError as error:
            if error.code is ErrorCode.OFFSET_OUT_OF_RANGE and partition is not None:
                return FetchResult(
                    key[2],
                    error.code,
                    partition.high_watermark,
                    partition.last_stable_offset(),
                    partition.log.log_start_offset,
                )
            return FetchResult(key[2], error.code, leader=self._leader(key, error.code))
        if piece.size:
            self._found.append((partition, piece.size))
        return FetchResult(
            key[2],
            ErrorCode.NONE,
            partition.high_watermark,
            partition.last_stable_offset(),
            partition.log.log_start_offset,
            partition.aborted_in(wanted.offset, piece) if isolation == READ_COMMITTED else None,
            -1,
            piece.ranges,
            piece.size,
        )

    def _partition(self, key: Key) -> Partition:
        name, topic_id, index = key
        broker = self._broker
        if topic_id:
            known = broker.image.topic_by_id(topic_id)
            if known is None:
                raise KafkaError(ErrorCode.UNKNOWN_TOPIC_ID, "no topic has this id")
            name = known.name
        if not self._exchange.context.authorize(Operation.READ, ResourceType.TOPIC, name):
            raise KafkaError(ErrorCode.TOPIC_AUTHORIZATION_FAILED)
        anywhere = bool(self._request.rack_id) or self._request.replica_id == DEBUGGING_CONSUMER
        return broker.replica(name, index) if anywhere else broker.partition(name, index)

    def _elsewhere(self, partition: Partition, offset: int) -> FetchResult | None:
        """Where a consumer that says its rack is sent to, or told to wait; None when it reads here."""
        if not partition.is_leader:
            if offset > partition.log.log_end_offset:
                raise KafkaError(ErrorCode.OFFSET_NOT_AVAILABLE, "this replica has not got that far")
            return None
        if not is_rack_aware(self._broker.config):
            return None
        node_id = preferred_replica(self._broker.image, partition, self._request.rack_id, offset)
        if node_id == NO_REPLICA:
            return None
        return FetchResult(
            partition.index,
            ErrorCode.NONE,
            partition.high_watermark,
            partition.last_stable_offset(),
            partition.log.log_start_offset,
            preferred_read_replica=node_id,
        )

    def _leader(self, key: Key, error: ErrorCode) -> tuple[int, int] | None:
        """Whom to ask instead, where that is what the error means."""
        name, topic_id, index = key
        return leader_of(self._broker.image, self._broker.image.names.get(topic_id, name), index, error)

    def _park(self) -> None:
        """Wait on every partition that there may be more of."""
        for key, _ in self._wanted:
            try:
                partition = self._partition(key)
            except KafkaError:
                continue  # an error would have been answered at once
            partition.add_reader(self._wake)
            self._parked.append(partition)

    def _leave(self) -> None:
        """Stop waiting."""
        for partition in self._parked:
            partition.remove_reader(self._wake)
        self._parked.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake(self) -> None:
        """There may be more: answer, or go on waiting."""
        results, size, urgent = self._read()
        if urgent or size >= self._request.min_bytes:
            self._leave()
            self._answer(results)
            return
        for partition in self._parked:
            partition.add_reader(self._wake)

    def _time_out(self) -> None:
        self._leave()
        self._answer(self._read()[0])

    def _answer(self, results: list[tuple[Key, FetchResult]]) -> None:
        session, context = self._session, self._exchange.context
        for partition, size in self._found:
            partition.bytes_out += size
        if session is not None:
            if not self._whole:
                results = [(key, result) for key, result in results if session.changed(key, result)]
            for key, result in results:
                session.sent(key, result)
        topics: dict[tuple[str, bytes], list[FetchResult]] = {}
        for (name, topic_id, _), result in results:
            topics.setdefault((name, topic_id), []).append(result)
        leaders = [result.leader for _, result in results if result.leader is not None]
        parts, size = encode_fetch_reply(
            context.version,
            [(name, topic_id, found) for (name, topic_id), found in topics.items()],
            throttle_time_ms=context.throttle_ms,
            session_id=NO_SESSION if session is None else session.id,
            endpoints=endpoints_of(self._broker.image, leaders) if leaders else None,
        )
        self._exchange.reply_parts(parts, size)  # type: ignore[arg-type]
