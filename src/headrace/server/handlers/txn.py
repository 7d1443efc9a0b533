"""InitProducerId, AddPartitionsToTxn, AddOffsetsToTxn, EndTxn and WriteTxnMarkers: the life of a transaction.

Behaviour. From the wire to the transaction coordinator and back; what a transaction does is told in
`coordinators.txn_shard`. InitProducerId without a transactional id gives an idempotent producer a fresh id. Partitions
are added all or none: one that does not exist, or may not be written, keeps the others out (OPERATION_NOT_ATTEMPTED).
An id longer than a record can hold is refused as an empty one is. Markers for no partition are not told of.
Versions: clients below 2 (InitProducerId: 4) know no PRODUCER_FENCED and are told INVALID_PRODUCER_EPOCH. From 4 on
AddPartitionsToTxn is asked by brokers, for many transactions at once, to add or only to verify. EndTxn from 5 on means
transaction.version 2: every transaction has its own epoch, and the reply brings the next. WriteTxnMarkers is asked by
coordinators, and by an administrator who aborts what hangs. Left out: two-phase commit (InitProducerId 6).
"""

from collections.abc import Iterator, Mapping
from typing import Any

from headrace.base.errors import ErrorCode, KafkaError
from headrace.cluster.names import CONSUMER_OFFSETS_TOPIC, is_internal
from headrace.coordinators.group_hash import partition_for
from headrace.coordinators.txn_metadata import VERSION_2, Partition
from headrace.coordinators.txn_shard import Ended
from headrace.security.authorizer import Operation, ResourceType
from headrace.server.broker import Broker
from headrace.server.broker_markers import MarkerWrite, write_markers
from headrace.server.context import RequestContext
from headrace.server.handlers.cluster import make_internal_topic
from headrace.server.handlers.groups import is_storable
from headrace.server.router import Body, Handler
from headrace.storage.markers import EndTransactionMarker
from headrace.wire.apis import Api
from headrace.wire.messages import Message

FENCED_FROM = 2
INIT_FENCED_FROM = 4
BROKERS_ASK_FROM = 4
ABORTABLE_FROM = 5
END_BUMPS_FROM = 5


def _told(error: ErrorCode, version: int, fenced_from: int = FENCED_FROM) -> ErrorCode:
    """The error as this version of a client knows it."""
    if error is ErrorCode.PRODUCER_FENCED and version < fenced_from:
        return ErrorCode.INVALID_PRODUCER_EPOCH
    return error


def _check_id(context: RequestContext, transactional_id: str) -> ErrorCode:
    if not transactional_id or not is_storable(transactional_id):
        return ErrorCode.INVALID_REQUEST
    if not context.authorize(Operation.WRITE, ResourceType.TRANSACTIONAL_ID, transactional_id):
        return ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    return ErrorCode.NONE


# -- InitProducerId ----------------------------------------------------------------------------------------------------


async def handle_init_producer_id(broker: Broker, context: RequestContext, request: Message) -> Body:
    """An id and epoch to write with: fresh for an idempotent producer, the next one for a transactional id."""
    try:
        given = await _initialize(broker, context, request)
    except KafkaError as error:
        given = Ended(error.code)
    return {
        "throttle_time_ms": context.throttle_ms,
        "error_code": _told(given.error, context.version, INIT_FENCED_FROM),
        "producer_id": given.producer_id,
        "producer_epoch": given.epoch,
    }


async def _initialize(broker: Broker, context: RequestContext, request: Message) -> Ended:
    transactional_id: str | None = request.transactional_id
    if transactional_id is None:
        if not context.authorize(Operation.IDEMPOTENT_WRITE, ResourceType.CLUSTER):
            raise KafkaError(ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
    elif (refusal := _check_id(context, transactional_id)) is not ErrorCode.NONE:
        raise KafkaError(refusal)
    expected = (request.producer_id, request.producer_epoch)
    if (expected[0] == -1) != (expected[1] == -1):
        raise KafkaError(ErrorCode.INVALID_REQUEST, "a producer id comes with its epoch or not at all")
    if transactional_id is None:
        return Ended(ErrorCode.NONE, await broker.transactions.new_producer_id(), 0)
    return await broker.transactions.initialize(
        transactional_id, request.transaction_timeout_ms, None if expected == (-1, -1) else expected
    )


# -- partitions and offsets --------------------------------------------------------------------------------------------


async def handle_add_partitions_to_txn(broker: Broker, context: RequestContext, request: Message) -> Body:
    """Make partitions part of a transaction."""
    if context.version < BROKERS_ASK_FROM:
        results = await _add_for_client(broker, context, request)
        by_topic = _by_topic(request.v3_and_below_topics, results)
        return {"throttle_time_ms": context.throttle_ms, "results_by_topic_v3_and_below": by_topic}
    if not context.authorize(Operation.CLUSTER_ACTION, ResourceType.CLUSTER):
        return {
            "throttle_time_ms": context.throttle_ms,
            "error_code": ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
        }
    answers = []
    for each in request.transactions:
        results = await _add_for_broker(broker, context, each)
        by_topic = _by_topic(each.topics, results)
        answers.append({"transactional_id": each.transactional_id, "topic_results": by_topic})
    return {"throttle_time_ms": context.throttle_ms, "results_by_transaction": answers}


def _partitions(topics: list[Message]) -> list[Partition]:
    return [(topic.name, index) for topic in topics for index in topic.partitions]


def _by_topic(topics: list[Message], results: Mapping[Partition, ErrorCode]) -> list[dict[str, Any]]:
    """The results in the shape of the request, whatever it names twice or leaves empty."""
    return [
        {
            "name": topic.name,
            "results_by_partition": [
                {"partition_index": index, "partition_error_code": results[topic.name, index]}
                for index in topic.partitions
            ],
        }
        for topic in topics
    ]


async def _add_for_client(
    broker: Broker, context: RequestContext, request: Message
) -> dict[Partition, ErrorCode]:
    transactional_id = request.v3_and_below_transactional_id
    wanted = _partitions(request.v3_and_below_topics)
    error = _check_id(context, transactional_id)
    if error is ErrorCode.NONE:
        if refused := _all_or_none({each: _partition_error(broker, context, *each) for each in wanted}):
            return refused
        producer = (request.v3_and_below_producer_id, request.v3_and_below_producer_epoch)
        error = await _add(broker, transactional_id, producer, wanted, client_version=0)
    return dict.fromkeys(wanted, _told(error, context.version))


def _partition_error(broker: Broker, context: RequestContext, name: str, index: int) -> ErrorCode:
    allowed = context.authorize(Operation.WRITE, ResourceType.TOPIC, name)
    if not allowed or is_internal(name):
        return ErrorCode.TOPIC_AUTHORIZATION_FAILED
    return _existence_error(broker, name, index)


def _existence_error(broker: Broker, name: str, index: int) -> ErrorCode:
    topic = broker.image.topics.get(name)
    known = topic is not None and 0 <= index < len(topic.partitions)
    return ErrorCode.NONE if known else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def _all_or_none(errors: dict[Partition, ErrorCode]) -> dict[Partition, ErrorCode]:
    """What is told when some partitions cannot be part of a transaction; nothing when all can."""
    if not any(errors.values()):
        return {}
    return {where: error or ErrorCode.OPERATION_NOT_ATTEMPTED for where, error in errors.items()}


async def _add_for_broker(
    broker: Broker, context: RequestContext, each: Message
) -> dict[Partition, ErrorCode]:
    wanted = _partitions(each.topics)
    producer = (each.producer_id, each.producer_epoch)
    if not each.transactional_id:
        return dict.fromkeys(wanted, ErrorCode.INVALID_REQUEST)
    if refused := _all_or_none({where: _existence_error(broker, *where) for where in wanted}):
        return refused
    if not each.verify_only:
        return dict.fromkeys(wanted, await _add(broker, each.transactional_id, producer, wanted, VERSION_2))
    try:
        answer = broker.transactions.verify_partitions(each.transactional_id, producer, wanted)
        found = answer if isinstance(answer, dict) else await answer
    except KafkaError as error:
        return dict.fromkeys(wanted, error.code)
    if context.version < ABORTABLE_FROM:
        old = {ErrorCode.TRANSACTION_ABORTABLE: ErrorCode.INVALID_TXN_STATE}
        return {where: old.get(error, error) for where, error in found.items()}
    return found


async def _add(
    broker: Broker,
    transactional_id: str,
    producer: tuple[int, int],
    wanted: list[Partition],
    client_version: int,
) -> ErrorCode:
    # A broker asks for many producers on one connection: none of them may keep the others waiting.
    waits = client_version < VERSION_2
    try:
        answer = broker.transactions.add_partitions(transactional_id, producer, wanted, client_version, waits)
        return answer if isinstance(answer, ErrorCode) else await answer
    except KafkaError as error:
        return error.code


async def handle_add_offsets_to_txn(broker: Broker, context: RequestContext, request: Message) -> Body:
    """Make the offsets of a group part of a transaction: the partition that will hold them."""
    error = _check_id(context, request.transactional_id)
    if error is ErrorCode.NONE and not context.authorize(
        Operation.READ, ResourceType.GROUP, request.group_id
    ):
        error = ErrorCode.GROUP_AUTHORIZATION_FAILED
    if error is ErrorCode.NONE:
        await make_internal_topic(broker, CONSUMER_OFFSETS_TOPIC)
        topic = broker.image.topics.get(CONSUMER_OFFSETS_TOPIC)
        if topic is None or not topic.partitions:
            error = ErrorCode.COORDINATOR_NOT_AVAILABLE
        else:
            where = (CONSUMER_OFFSETS_TOPIC, partition_for(request.group_id, len(topic.partitions)))
            producer = (request.producer_id, request.producer_epoch)
            error = await _add(broker, request.transactional_id, producer, [where], client_version=0)
    return {"throttle_time_ms": context.throttle_ms, "error_code": _told(error, context.version)}


# -- the end -----------------------------------------------------------------------------------------------------------


async def handle_end_txn(broker: Broker, context: RequestContext, request: Message) -> Body:
    """Commit or abort."""
    error = _check_id(context, request.transactional_id)
    ended = Ended(error)
    if error is ErrorCode.NONE:
        version = VERSION_2 if context.version >= END_BUMPS_FROM else 0
        producer = (request.producer_id, request.producer_epoch)
        try:
            ended = await broker.transactions.end(
                request.transactional_id, producer, request.committed, version
            )
        except KafkaError as refused:
            ended = Ended(refused.code)
    return {
        "throttle_time_ms": context.throttle_ms,
        "error_code": _told(ended.error, context.version),
        "producer_id": ended.producer_id,
        "producer_epoch": ended.epoch,
    }


async def handle_write_txn_markers(broker: Broker, context: RequestContext, request: Message) -> Body:
    """Put markers into partitions that this broker leads; answered when all are committed."""
    if not context.authorize(Operation.CLUSTER_ACTION, ResourceType.CLUSTER):
        raise KafkaError(ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
    wanted = [
        MarkerWrite(
            topic.name,
            index,
            (each.producer_id, each.producer_epoch),
            EndTransactionMarker(each.transaction_result, each.coordinator_epoch),
            each.transaction_version,
        )
        for each in request.markers
        for topic in each.topics
        for index in topic.partition_indexes
    ]
    errors = iter(await write_markers(broker, wanted))
    markers = [
        marker for marker in request.markers if any(topic.partition_indexes for topic in marker.topics)
    ]
    return {"markers": [_written(marker, errors) for marker in markers]}


def _written(marker: Message, errors: Iterator[ErrorCode]) -> dict[str, Any]:
    topics = [
        {
            "name": topic.name,
            "partitions": [
                {"partition_index": index, "error_code": next(errors)} for index in topic.partition_indexes
            ],
        }
        for topic in marker.topics
    ]
    return {"producer_id": marker.producer_id, "topics": topics}


HANDLERS: dict[Api, Handler] = {
    Api.INIT_PRODUCER_ID: handle_init_producer_id,
    Api.ADD_PARTITIONS_TO_TXN: handle_add_partitions_to_txn,
    Api.ADD_OFFSETS_TO_TXN: handle_add_offsets_to_txn,
    Api.END_TXN: handle_end_txn,
    Api.WRITE_TXN_MARKERS: handle_write_txn_markers,
}
