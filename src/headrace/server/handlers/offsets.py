"""ListOffsets, OffsetForLeaderEpoch and DeleteRecords: where a partition begins, ends and changes hands.

Behaviour. ListOffsets by timestamp gives the first record at or after it; the special timestamps are latest (-1,
bounded by the reader's isolation), earliest (-2), the record with the largest timestamp (-3), the earliest kept locally
(-4, here the same as earliest), and two that speak of tiered storage (-5, -6, not known here: offset -1). Whatever is
found, nothing past the end that the reader may see is told of. Leader epochs are checked where the version carries one.
DeleteRecords moves the log start up to the high watermark (-1) or to an offset below it, and is answered when every
live replica has moved its own, or REQUEST_TIMED_OUT. Followers refuse all three.
"""

from collections import Counter
from collections.abc import Awaitable
from typing import Any

from headrace.base.errors import ErrorCode, KafkaError
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
CONSUMER = -1


def handle_list_offsets(broker: Broker, context: RequestContext, request: Message) -> Body:
    """Offsets by timestamp, partition by partition."""
    asked = [(topic.name, p.partition_index) for topic in request.topics for p in topic.partitions]
    twice = {key for key, count in Counter(asked).items() if count > 1}
    topics = []
    for topic in request.topics:
        allowed = context.authorize(Operation.DESCRIBE, ResourceType.TOPIC, topic.name)
        partitions: list[dict[str, Any]] = []
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
            partitions.append(answer)
        topics.append({"name": topic.name, "partitions": partitions})
    return {"throttle_time_ms": context.throttle_ms, "topics": topics}


def offset_at(partition: Partition, timestamp: int, isolation: int) -> tuple[int, int, int]:
    """(offset, timestamp, leader epoch) for a timestamp, real or special."""
    log = partition.log
    end = partition.last_stable_offset() if isolation == READ_COMMITTED else partition.high_watermark
    if timestamp not in KNOWN_AT_ONCE and not partition.end_is_known:
        raise KafkaError(ErrorCode.OFFSET_NOT_AVAILABLE, "the end of the log is not known yet")
    if timestamp == LATEST:
        return end, -1, partition.leader_epoch
    if timestamp in (EARLIEST, EARLIEST_LOCAL):
        return log.log_start_offset, -1, log.epochs.epoch_for_offset(log.log_start_offset)
    if timestamp in (LATEST_TIERED, EARLIEST_PENDING_UPLOAD):
        return UNKNOWN
    if timestamp == MAX_TIMESTAMP:
        found = log.max_timestamp_offset()
        return UNKNOWN if found is None or found.offset >= end else found
    return log.offset_for_timestamp(timestamp, end) or UNKNOWN


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
                epoch, end = partition.log.epoch_end_offset(wanted.leader_epoch)
                if request.replica_id == CONSUMER:
                    end = min(end, partition.high_watermark)
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
    topics = []
    waiting: list[tuple[dict[str, Any], Partition]] = []
    for topic in request.topics:
        allowed = context.authorize(Operation.DELETE, ResourceType.TOPIC, topic.name)
        partitions: list[dict[str, Any]] = []
        for wanted in topic.partitions:
            answer: dict[str, Any] = {"partition_index": wanted.partition_index, "low_watermark": -1}
            try:
                if not allowed:
                    raise KafkaError(ErrorCode.TOPIC_AUTHORIZATION_FAILED)
                partition = broker.partition(topic.name, wanted.partition_index)
                answer["low_watermark"] = _delete_before(partition, wanted.offset)
                if partition.low_watermark(broker.is_alive) < answer["low_watermark"]:
                    waiting.append((answer, partition))
            except KafkaError as error:
                answer["error_code"] = error.code
            partitions.append(answer)
        topics.append({"name": topic.name, "partitions": partitions})
    body = {"throttle_time_ms": context.throttle_ms, "topics": topics}
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
