"""ListOffsets, OffsetForLeaderEpoch and DeleteRecords: where a partition begins, ends and changes hands.

Behaviour. ListOffsets by timestamp gives the first record at or after it; the special timestamps are latest (-1,
bounded by the reader's isolation), earliest (-2), the record with the largest timestamp (-3), the earliest kept locally
(-4, here the same as earliest), and two that speak of tiered storage (-5, -6, not known here: offset -1). Whatever is
found, nothing past the end that the reader may see is told of. Leader epochs are checked where the version carries one.
DeleteRecords moves the log start up to the high watermark (-1) or to an offset below it, and is answered when every
live replica has moved its own, or REQUEST_TIMED_OUT; of a partition named twice the last word counts. Followers refuse
all three.
"""

from collections import Counter
from collections.abc import Awaitable, Mapping
from typing import Any

from headrace.base.errors import ErrorCode, KafkaError
from headrace.cluster.names import is_internal
from headrace.replication.partition import READ_COMMITTED, Partition
from headrace.security.authorizer import Operation, ResourceType
from headrace.server.broker import Broker
from headrace.server.context import RequestContext
from headrace.server.router import Body, Handler
from headrace.wire.apis import Api
from headrace.wire.messages import Message

LATEST, EARLIEST, MAX_TIMESTAMP, EARLIEST_LOCAL, LATEST_TIERED, EARLIEST_PENDING_UPLOAD = (
    -1,
    -2,
    -3,
    -4,
    -5,
    -6,
)
SPECIAL_FROM = {
    LATEST: 1,
    EARLIEST: 1,
    MAX_TIMESTAMP: 7,
    EARLIEST_LOCAL: 8,
    LATEST_TIERED: 9,
    EARLIEST_PENDING_UPLOAD: 11,
}
"""The version that brought each special timestamp; an older one is not understood."""
KNOWN_AT_ONCE = (EARLIEST, EARLIEST_LOCAL, LATEST_TIERED, EARLIEST_PENDING_UPLOAD)
"""Those that a leader can tell before it knows where its predecessor's log ended for clients."""
VERSION_NEVER = 2**15
OFFSET_NOT_AVAILABLE_FROM = 5
HIGH_WATERMARK = -1
UNKNOWN = (-1, -1, -1)
NO_EPOCH = -1


def handle_list_offsets(broker: Broker, context: RequestContext, request: Message) -> Body:
    """Offsets by timestamp, partition by partition."""
    asked = [(topic.name, p.partition_index) for topic in request.topics for p in topic.partitions]
    twice = {key for key, count in Counter(asked).items() if count > 1}
    topics: dict[str, dict[int, dict[str, Any]]] = {}
    for topic in request.topics:
        allowed = context.authorize(Operation.DESCRIBE, ResourceType.TOPIC, topic.name)
        for wanted in topic.partitions:
            answer: dict[str, Any] = {"partition_index": wanted.partition_index}
            try:
                if not allowed:
                    raise KafkaError(ErrorCode.TOPIC_AUTHORIZATION_FAILED)
                if (topic.name, wanted.partition_index) in twice:
                    raise KafkaError(ErrorCode.INVALID_REQUEST, "the partition is named twice")
                if wanted.timestamp < 0 and context.version < SPECIAL_FROM.get(
                    wanted.timestamp, VERSION_NEVER
                ):
                    raise KafkaError(ErrorCode.UNSUPPORTED_VERSION, "a special timestamp of a later version")
                partition = broker.partition(topic.name, wanted.partition_index)
                partition.check_epoch(wanted.current_leader_epoch)
                offset, timestamp, epoch = offset_at(partition, wanted.timestamp, request.isolation_level)
                answer |= {"offset": offset, "timestamp": timestamp, "leader_epoch": epoch}
            except KafkaError as error:
                code = error.code
                if code is ErrorCode.OFFSET_NOT_AVAILABLE and context.version < OFFSET_NOT_AVAILABLE_FROM:
                    code = ErrorCode.LEADER_NOT_AVAILABLE
                answer |= {"error_code": code, "offset": -1, "timestamp": -1}
            topics.setdefault(topic.name, {})[wanted.partition_index] = answer
    return {"throttle_time_ms": context.throttle_ms, "topics": _by_topic(topics)}


def _by_topic(topics: Mapping[str, Mapping[int, dict[str, Any]]]) -> list[dict[str, Any]]:
    """One answer for each partition, however often it was named; no topic without one."""
    return [{"name": name, "partitions": list(answers.values())} for name, answers in topics.items()]


def offset_at(partition: Partition, timestamp: int, isolation: int) -> tuple[int, int, int]:
    """(offset, timestamp, leader epoch) for a timestamp, real or special."""
    log = partition.log
    end = partition.last_stable_offset() if isolation == READ_COMMITTED else partition.high_watermark
    if timestamp not in KNOWN_AT_ONCE and not partition.end_is_known:
        raise KafkaError(ErrorCode.OFFSET_NOT_AVAILABLE, "the end of the log is not known yet")
    if timestamp == LATEST:
        return end, -1, partition.leader_epoch
    if timestamp in (EARLIEST, EARLIEST_LOCAL):
        return log.log_start_offset, -1, _epoch_at(partition, log.log_start_offset)
    if timestamp in (LATEST_TIERED, EARLIEST_PENDING_UPLOAD):
        return UNKNOWN
    if timestamp == MAX_TIMESTAMP:
        found = log.max_timestamp_offset()
        return UNKNOWN if found is None or found.offset >= end else found
    return log.offset_for_timestamp(timestamp, end) or UNKNOWN


def _epoch_at(partition: Partition, offset: int) -> int:
    """The epoch that an offset belongs to. The leader's own begins at the log's end, before it has written."""
    epoch = partition.log.epochs.epoch_for_offset(offset)
    return partition.leader_epoch if epoch == NO_EPOCH and offset == partition.log.log_end_offset else epoch


def _epoch_end(partition: Partition, epoch: int) -> tuple[int, int]:
    """The largest epoch at or below this one, and where it ended; the leader's own is one before it has written."""
    log, own = partition.log, partition.leader_epoch
    written = log.epochs.latest_epoch
    if epoch == NO_EPOCH or not written <= epoch <= own:
        return log.epoch_end_offset(epoch)
    return (epoch if epoch == own or written == NO_EPOCH else written), log.log_end_offset


def handle_offset_for_leader_epoch(broker: Broker, context: RequestContext, request: Message) -> Body:
    """Where a leader epoch ended, for a client or follower that looks for a common point."""
    topics = []
    for topic in request.topics:
        allowed = context.authorize(Operation.DESCRIBE, ResourceType.TOPIC, topic.topic)
        partitions: list[dict[str, Any]] = []
        for wanted in topic.partitions:
            answer: dict[str, Any] = {"partition": wanted.partition, "leader_epoch": -1, "end_offset": -1}
            try:
                if not allowed:
                    raise KafkaError(ErrorCode.TOPIC_AUTHORIZATION_FAILED)
                partition = broker.partition(topic.topic, wanted.partition)
                partition.check_epoch(wanted.current_leader_epoch)
                epoch, end = _epoch_end(partition, wanted.leader_epoch)
                # Not bounded by the high watermark, of which a new leader knows less than clients have read: they
                # would take their own position for one that was cut off.
                answer |= {"leader_epoch": epoch, "end_offset": end}
            except KafkaError as error:
                answer["error_code"] = error.code
            partitions.append(answer)
        topics.append({"topic": topic.topic, "partitions": partitions})
    return {"throttle_time_ms": context.throttle_ms, "topics": topics}


def handle_delete_records(
    broker: Broker, context: RequestContext, request: Message
) -> "Body | Awaitable[Body]":
    """Move log starts forward, and answer when every replica that is there has done so."""
    topics: dict[str, dict[int, dict[str, Any]]] = {}
    waiting: list[tuple[dict[str, Any], Partition]] = []
    last = {(topic.name, each.partition_index): each for topic in request.topics for each in topic.partitions}
    for topic in request.topics:
        allowed = context.authorize(Operation.DELETE, ResourceType.TOPIC, topic.name)
        for wanted in topic.partitions:
            if last[topic.name, wanted.partition_index] is not wanted:
                continue
            answer: dict[str, Any] = {"partition_index": wanted.partition_index, "low_watermark": -1}
            try:
                if not allowed:
                    raise KafkaError(ErrorCode.TOPIC_AUTHORIZATION_FAILED)
                if is_internal(topic.name):
                    raise KafkaError(ErrorCode.INVALID_TOPIC_EXCEPTION, "the topic is the cluster's own")
                partition = broker.partition(topic.name, wanted.partition_index)
                answer["low_watermark"] = _delete_before(partition, wanted.offset)
                if partition.low_watermark(broker.is_alive) < answer["low_watermark"]:
                    waiting.append((answer, partition))
            except KafkaError as error:
                answer["error_code"] = error.code
            topics.setdefault(topic.name, {})[wanted.partition_index] = answer
    body = {"throttle_time_ms": context.throttle_ms, "topics": _by_topic(topics)}
    return broker.when_deleted_everywhere(waiting, request.timeout_ms, body) if waiting else body


def _delete_before(partition: Partition, offset: int) -> int:
    log = partition.log
    if "delete" not in log.config.cleanup_policy:
        raise KafkaError(
            ErrorCode.POLICY_VIOLATION, "records of a topic that is only compacted are not deleted by offset"
        )
    if offset == HIGH_WATERMARK:
        offset = partition.high_watermark
    if not 0 <= offset <= partition.high_watermark:
        raise KafkaError(
            ErrorCode.OFFSET_OUT_OF_RANGE, f"{offset} is not between 0 and {partition.high_watermark}"
        )
    return partition.delete_before(offset)


HANDLERS: dict[Api, Handler] = {
    Api.LIST_OFFSETS: handle_list_offsets,
    Api.OFFSET_FOR_LEADER_EPOCH: handle_offset_for_leader_epoch,
    Api.DELETE_RECORDS: handle_delete_records,
}
