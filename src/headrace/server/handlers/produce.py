"""Produce: records of many partitions in, each appended as one batch.

Behaviour. Partitions are appended in the order of the request, at once; the reply leaves when every one of them is as
safe as its acks ask: 0 is not answered at all (an error closes the connection, the only sign a client would notice), 1
waits for a flush where the topic wants one before acknowledgement, -1 also for the high watermark, within the request's
timeout. A partition that another broker leads is refused, and from version 10 on told where; who may have been deposed
without knowing does not judge sequence numbers. Versions: 0 to 2 carry
message formats that are gone and are refused as a whole; zstd is taken from 7 on; 13 names topics by id. The first
records of a transaction in a partition are taken when the transaction's coordinator says that they belong to it; from
version 12 on the client leaves it to the broker to add the partition.
"""

from headrace.base.clock import Timer
from headrace.base.errors import ErrorCode, KafkaError
from headrace.cluster.names import is_internal
from headrace.records.batch import parse_header
from headrace.replication.partition import Partition
from headrace.security.authorizer import Operation, ResourceType
from headrace.server.broker import Broker
from headrace.server.broker_verify import Asked, produce_error
from headrace.server.leaders import Leader, endpoints_of, leader_of
from headrace.server.session import Exchange
from headrace.storage.validator import RecordsRefused, is_transactional, is_zstd
from headrace.wire.produce import (
    TOPIC_IDS_FROM,
    VERSION_MIN,
    ProducePartition,
    ProduceResult,
    ProduceTopic,
    decode_produce,
    encode_produce_reply,
)

ACKS_NONE, ACKS_LEADER, ACKS_ALL = 0, 1, -1
ADMIN_CLIENT_ID = "__admin_client"  # whom Kafka lets write to the cluster's own topics
ZSTD_FROM = 7
KNOWS_ABORTABLE_FROM = 11
ADDS_PARTITIONS_FROM = 12
FINAL_FOR_PRODUCERS = frozenset((ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, ErrorCode.UNKNOWN_PRODUCER_ID))
"""What producers do not get over, and a leader that was deposed without knowing would say of what it has not seen."""


def handle_produce(broker: Broker, exchange: Exchange, frame: memoryview, body: int) -> None:
    """Append, then answer when the records are as safe as was asked."""
    context = exchange.context
    if context.version < VERSION_MIN:
        exchange.drop(f"Produce version {context.version} carries a message format that is no longer taken")
        return
    request = decode_produce(context.version, frame, body)
    pending = _Pending(broker, exchange, request.acks, request.timeout_ms, request.transactional_id)
    for topic in request.topics:
        name, refusal = _resolve(broker, exchange, topic, request.acks, request.transactional_id)
        slot = pending.topic(topic)
        for partition in topic.partitions:
            if refusal is not None:
                pending.refuse(slot, partition.partition, refusal)
            else:
                pending.append(slot, name, partition)
    pending.all_appended()


def _resolve(
    broker: Broker, exchange: Exchange, topic: ProduceTopic, acks: int, transactional_id: str | None
) -> tuple[str, KafkaError | None]:
    """The topic's name, or why nothing of it can be appended."""
    name = topic.name
    if exchange.context.version >= TOPIC_IDS_FROM:
        known = broker.image.topic_by_id(topic.topic_id)
        if known is None:
            return "", KafkaError(ErrorCode.UNKNOWN_TOPIC_ID, "no topic has this id")
        name = known.name
    if not exchange.context.authorize(Operation.WRITE, ResourceType.TOPIC, name):
        return name, KafkaError(ErrorCode.TOPIC_AUTHORIZATION_FAILED)
    if acks not in (ACKS_NONE, ACKS_LEADER, ACKS_ALL):
        return name, KafkaError(ErrorCode.INVALID_REQUIRED_ACKS, f"acks is {acks}; it may be 0, 1 or -1")
    if transactional_id is not None and not exchange.context.authorize(
        Operation.WRITE, ResourceType.TRANSACTIONAL_ID, transactional_id
    ):
        return name, KafkaError(ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
    return name, None


class _Pending:
    """A produce request whose partitions are being made safe."""

    __slots__ = (
        "_acks",
        "_broker",
        "_exchange",
        "_leaders",
        "_now_ms",
        "_timeout_ms",
        "_timer",
        "_topics",
        "_transactional_id",
        "_unsafe",
        "_waiting",
    )

    def __init__(
        self,
        broker: Broker,
        exchange: Exchange,
        acks: int,
        timeout_ms: int,
        transactional_id: str | None = None,
    ) -> None:
        self._transactional_id = transactional_id
        self._broker = broker
        self._exchange = exchange
        self._acks = acks
        self._timeout_ms = timeout_ms
        self._now_ms = broker.clock.now_ms()
        self._topics: list[tuple[ProduceTopic, list[ProduceResult]]] = []
        self._unsafe: set[tuple[int, int]] = set()  # (topic, partition) by their places in the request
        self._waiting = 1  # one for the loop over the partitions itself
        self._timer: Timer | None = None
        self._leaders: set[Leader] = set()

    def topic(self, topic: ProduceTopic) -> list[ProduceResult]:
        results: list[ProduceResult] = []
        self._topics.append((topic, results))
        return results

    def refuse(self, results: list[ProduceResult], index: int, error: KafkaError, topic: str = "") -> None:
        bad = error.record_errors if isinstance(error, RecordsRefused) else ()
        leader = self._leader(topic, index, error.code)
        results.append(
            ProduceResult(index, error.code, message=error.message, leader=leader, record_errors=bad)
        )

    def _leader(self, topic: str, index: int, error: ErrorCode) -> Leader | None:
        """Whom to ask instead, where that is what the error means."""
        leader = leader_of(self._broker.image, topic, index, error)
        if leader is not None:
            self._leaders.add(leader)
        return leader

    def append(self, results: list[ProduceResult], topic: str, data: ProducePartition) -> None:
        try:
            if is_internal(topic) and self._exchange.context.client_id != ADMIN_CLIENT_ID:
                raise KafkaError(
                    ErrorCode.INVALID_TOPIC_EXCEPTION, f"Cannot append to internal topic {topic}"
                )
            partition = self._broker.partition(topic, data.partition)
            if self._acks == ACKS_ALL:
                partition.check_min_insync()
            if data.records is None or len(data.records) == 0:
                raise KafkaError(ErrorCode.INVALID_RECORD, "no records for this partition")
            records = memoryview(data.records)
            if self._exchange.context.version < ZSTD_FROM and is_zstd(records):
                raise KafkaError(
                    ErrorCode.UNSUPPORTED_COMPRESSION_TYPE,
                    f"Produce requests below version {ZSTD_FROM} are not allowed to use ZStandard compression",
                )
            if is_transactional(records) and not self._is_verified(results, partition, records):
                return
            result, wait = self._append(partition, records)
        except KafkaError as error:
            self.refuse(results, data.partition, error, topic)
            return
        results.append(result)
        if wait is not None:
            self._wait(results, len(results) - 1, partition, *wait)

    def _append(
        self, partition: Partition, records: memoryview
    ) -> tuple[ProduceResult, tuple[int, bool, bool] | None]:
        """Append, or KafkaError; the result, and what it has to wait for, if for anything."""
        try:
            appended = partition.append(records, self._now_ms)
        except KafkaError as error:
            if error.code in FINAL_FOR_PRODUCERS and self._broker.replication.is_in_doubt:
                raise KafkaError(
                    ErrorCode.NOT_LEADER_OR_FOLLOWER, "the controller is not heard of; another may lead"
                ) from error
            raise
        result = ProduceResult(
            partition.index,
            ErrorCode.NONE,
            appended.first_offset,
            appended.log_append_time_ms,
            appended.log_start_offset,
        )
        flush_due = appended.flush_due
        if flush_due:
            self._broker.flush(partition)
        if self._acks == ACKS_NONE:
            return result, None
        wait = (appended.last_offset + 1, flush_due, self._acks == ACKS_ALL)
        return result, None if partition.is_safe(*wait) else wait

    def _is_verified(self, results: list[ProduceResult], partition: Partition, records: memoryview) -> bool:
        """Whether records of a transaction may be appended at once; if not, they are once the coordinator says so."""
        if self._transactional_id is None:
            raise KafkaError(
                ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
                "transactional records without a transactional id",
            )
        version = self._exchange.context.version
        header = parse_header(records)
        producer_id, epoch = header.producer_id, header.producer_epoch
        adds = version >= ADDS_PARTITIONS_FROM
        asked = Asked(self._transactional_id, producer_id, epoch, adds)
        where = (partition.topic, partition.index)
        state, verifier = partition.log.producer_state, self._broker.verifier
        unasked = state.is_in_transaction(producer_id, epoch) or not (
            adds or self._broker.config.transaction_partition_verification_enable
        )
        if unasked and not verifier.is_waiting(asked, where):
            return True
        guard = state.guard(producer_id)
        kept = memoryview(bytes(records))  # the request's own memory is used again before the answer comes
        place, at = len(self._topics) - 1, len(results)
        results.append(ProduceResult(partition.index, ErrorCode.REQUEST_TIMED_OUT))
        self._waiting += 1

        def verified(error: ErrorCode) -> None:
            try:
                refusal = produce_error(error, adds, version >= KNOWS_ABORTABLE_FROM)
                if refusal is not None:
                    raise refusal
                if not state.is_in_transaction(producer_id, epoch) and not state.is_guarded(
                    producer_id, guard
                ):  # a marker came in: of this transaction, or once more of the one before
                    raise KafkaError(
                        ErrorCode.NOT_ENOUGH_REPLICAS, "a transaction ended meanwhile; to be verified again"
                    )
                if self._broker.partition(*where) is not partition:
                    raise KafkaError(ErrorCode.NOT_LEADER_OR_FOLLOWER, "the topic was made anew meanwhile")
                if self._acks == ACKS_ALL:
                    partition.check_min_insync()
                result, wait = self._append(partition, kept)
            except KafkaError as failed:
                leader = self._leader(*where, failed.code)
                result = ProduceResult(partition.index, failed.code, message=failed.message, leader=leader)
                wait = None
            if not self._exchange.done:
                results[at] = result
                if wait is not None:
                    self._wait(results, at, partition, *wait, place=place)
                self._one_less()

        verifier.ask(asked, where, verified)
        return False

    def _wait(
        self,
        results: list[ProduceResult],
        at: int,
        partition: Partition,
        end: int,
        flushed: bool,
        replicated: bool,
        place: int | None = None,
    ) -> None:
        self._waiting += 1
        unsafe = (len(self._topics) - 1 if place is None else place, at)
        self._unsafe.add(unsafe)

        def done(error: ErrorCode) -> None:
            if self._exchange.done:
                return  # timed out before
            self._unsafe.discard(unsafe)
            if error is not ErrorCode.NONE:
                leader = self._leader(partition.topic, partition.index, error)
                results[at] = ProduceResult(partition.index, error, leader=leader)
            self._one_less()

        partition.when_safe(end, flushed, replicated, done)

    def all_appended(self) -> None:
        if self._waiting > 1:
            self._timer = self._broker.call_later(max(self._timeout_ms, 0), self._time_out)
            self._exchange.on_gone = self._gone
        self._one_less()

    def _one_less(self) -> None:
        self._waiting -= 1
        if self._waiting == 0:
            self._finish()

    def _time_out(self) -> None:
        """Not safe in time. What was appended stays: the client may find it there when it tries again."""
        if self._exchange.done:
            return
        for topic, at in self._unsafe:
            results = self._topics[topic][1]
            results[at] = ProduceResult(results[at].partition, ErrorCode.REQUEST_TIMED_OUT)
        self._timer = None
        self._finish()

    def _gone(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._exchange.done = True

    def _finish(self) -> None:
        exchange, waited = self._exchange, self._timer is not None
        if self._timer is not None:
            self._timer.cancel()
        if self._acks != ACKS_NONE:
            endpoints = endpoints_of(self._broker.image, self._leaders) if self._leaders else None
            reply = encode_produce_reply(
                exchange.context.version, self._topics, exchange.context.throttle_ms, endpoints
            )
            if waited:  # what ended that may have ended it for others too: they are sent together
                self._broker.flush_later(exchange.reply_unsent(reply))
            else:
                exchange.reply(reply)
            return
        failed = [
            result for _, results in self._topics for result in results if result.error != ErrorCode.NONE
        ]
        if failed:
            exchange.drop(f"a produce with acks=0 failed: {ErrorCode(failed[0].error).name}")
        else:
            exchange.reply_nothing()
