"""ListTransactions, DescribeTransactions, DescribeProducers and UpdateFeatures: looking after transactions.

Behaviour. A broker lists the transactional ids that it coordinates, and the producers of partitions that it leads: who
wants all of the cluster asks every broker. DescribeProducers tells where an open transaction began, which is what an
administrator needs to end one that hangs. UpdateFeatures changes all or nothing, and says of nothing but the whole why
it did not; a level below the present one has to be asked for as a downgrade. Versions: ListTransactions filters by age
from 1 on, where an id without a transaction is as old as can be, as in Kafka, and by a regular expression that the
whole id matches from 2 on; one costs what the ids are long, whatever it is.
"""

from typing import Any

from headrace.base.errors import ErrorCode, KafkaError
from headrace.cluster.features import check_update
from headrace.cluster.names import check_topic_name
from headrace.cluster.records import FeatureRecord
from headrace.coordinators.topic_regex import LEGAL, InvalidPattern, TopicRegex
from headrace.coordinators.txn_metadata import TransactionMetadata
from headrace.coordinators.txn_states import BY_NAME, DEAD, NAMES
from headrace.security.authorizer import Operation, ResourceType
from headrace.server.broker import Broker
from headrace.server.context import RequestContext
from headrace.server.router import Body, Handler
from headrace.wire.apis import Api
from headrace.wire.messages import Message

UPGRADE_TYPES_FROM = 1
UPGRADE, SAFE_DOWNGRADE, UNSAFE_DOWNGRADE = 1, 2, 3


def handle_list_transactions(broker: Broker, context: RequestContext, request: Message) -> Body:
    """The transactional ids that this broker coordinates."""
    try:
        known = broker.transactions.listed()
    except KafkaError as error:
        return {"throttle_time_ms": context.throttle_ms, "error_code": error.code}
    try:
        pattern = _pattern(request.transactional_id_pattern, known)
    except InvalidPattern:
        return {"throttle_time_ms": context.throttle_ms, "error_code": ErrorCode.INVALID_REGULAR_EXPRESSION}
    states = {BY_NAME[name] for name in request.state_filters if name in BY_NAME}
    now_ms = broker.clock.now_ms()

    def is_wanted(each: TransactionMetadata) -> bool:
        value = each.value
        return (
            value.state is not DEAD
            and (not request.state_filters or value.state in states)
            and (not request.producer_id_filters or value.producer_id in request.producer_id_filters)
            and (pattern is None or pattern.matches(each.transactional_id))
            and (request.duration_filter < 0 or value.start_ms < now_ms - request.duration_filter)
            and context.authorize(Operation.DESCRIBE, ResourceType.TRANSACTIONAL_ID, each.transactional_id)
        )

    return {
        "throttle_time_ms": context.throttle_ms,
        "error_code": ErrorCode.NONE,
        "unknown_state_filters": [name for name in request.state_filters if name not in BY_NAME],
        "transaction_states": [
            {
                "transactional_id": each.transactional_id,
                "producer_id": each.value.producer_id,
                "transaction_state": NAMES[each.state],
            }
            for each in known
            if is_wanted(each)
        ],
    }


def _pattern(text: str | None, known: list[TransactionMetadata]) -> TopicRegex | None:
    """What ids have to match; an empty pattern, as none, lets all through."""
    if not text:
        return None
    return TopicRegex(text, LEGAL.union(*(each.transactional_id for each in known)))


def handle_describe_transactions(broker: Broker, context: RequestContext, request: Message) -> Body:
    """Transactional ids with their open transactions."""
    states = [_described(broker, context, each) for each in request.transactional_ids]
    return {"throttle_time_ms": context.throttle_ms, "transaction_states": states}


def _described(broker: Broker, context: RequestContext, transactional_id: str) -> dict[str, Any]:
    answer: dict[str, Any] = {"transactional_id": transactional_id, "topics": []}
    if not transactional_id:
        return {**answer, "error_code": ErrorCode.INVALID_REQUEST}
    if not context.authorize(Operation.DESCRIBE, ResourceType.TRANSACTIONAL_ID, transactional_id):
        return {**answer, "error_code": ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED}
    try:
        found = broker.transactions.describe(transactional_id)
    except KafkaError as error:
        return {**answer, "error_code": error.code}
    if found is None:
        return {**answer, "error_code": ErrorCode.TRANSACTIONAL_ID_NOT_FOUND}
    value = found.value
    topics: dict[str, list[int]] = {}
    for topic, index in sorted(value.partitions):
        if context.authorize(Operation.DESCRIBE, ResourceType.TOPIC, topic):
            topics.setdefault(topic, []).append(index)
    return {
        "error_code": ErrorCode.NONE,
        "transactional_id": transactional_id,
        "transaction_state": NAMES[value.state],
        "transaction_timeout_ms": value.timeout_ms,
        "transaction_start_time_ms": value.start_ms,
        "producer_id": value.producer_id,
        "producer_epoch": value.producer_epoch,
        "topics": [{"topic": name, "partitions": indexes} for name, indexes in topics.items()],
    }


def handle_describe_producers(broker: Broker, context: RequestContext, request: Message) -> Body:
    """The producers that partitions know of, and where each one's open transaction began."""
    topics = []
    for topic in request.topics:
        allowed = context.authorize(Operation.READ, ResourceType.TOPIC, topic.name)
        partitions: list[dict[str, Any]] = []
        for index in topic.partition_indexes:
            answer: dict[str, Any] = {"partition_index": index, "active_producers": []}
            try:
                if not allowed:
                    raise KafkaError(ErrorCode.TOPIC_AUTHORIZATION_FAILED)
                check_topic_name(topic.name)
                state = broker.partition(topic.name, index).log.producer_state
                answer["active_producers"] = [
                    {
                        "producer_id": entry.producer_id,
                        "producer_epoch": entry.epoch,
                        "last_sequence": entry.last_sequence,
                        "last_timestamp": entry.last_timestamp,
                        "coordinator_epoch": entry.coordinator_epoch,
                        "current_txn_start_offset": entry.transaction_first_offset,
                    }
                    for entry in state
                ]
            except KafkaError as error:
                answer |= {"error_code": error.code, "error_message": error.message}
            partitions.append(answer)
        topics.append({"name": topic.name, "partitions": partitions})
    return {"throttle_time_ms": context.throttle_ms, "topics": topics}


async def handle_update_features(broker: Broker, context: RequestContext, request: Message) -> Body:
    """Give features of the cluster another level."""
    if not context.authorize(Operation.ALTER, ResourceType.CLUSTER):
        raise KafkaError(ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
    kept = broker.image.features
    names = [each.feature for each in request.feature_updates]
    try:
        if len(set(names)) < len(names):
            raise KafkaError(ErrorCode.INVALID_REQUEST, "a feature is named twice")
        for each in request.feature_updates:
            typed = context.version >= UPGRADE_TYPES_FROM
            if typed and each.upgrade_type not in (UPGRADE, SAFE_DOWNGRADE, UNSAFE_DOWNGRADE):
                raise KafkaError(
                    ErrorCode.INVALID_UPDATE_VERSION, f"{each.upgrade_type} is not a type of upgrade"
                )
            lowers = (
                each.upgrade_type in (SAFE_DOWNGRADE, UNSAFE_DOWNGRADE) if typed else each.allow_downgrade
            )
            check_update(kept, each.feature, each.max_version_level, lowers)
        if not request.validate_only:
            await broker.commit(
                [FeatureRecord(e.feature, e.max_version_level) for e in request.feature_updates]
            )
    except KafkaError as error:
        return {
            "throttle_time_ms": context.throttle_ms,
            "error_code": error.code,
            "error_message": error.message,
            "results": [],
        }
    return {
        "throttle_time_ms": context.throttle_ms,
        "error_message": None,
        "results": [{"feature": name, "error_code": 0, "error_message": None} for name in names],
    }


HANDLERS: dict[Api, Handler] = {
    Api.LIST_TRANSACTIONS: handle_list_transactions,
    Api.DESCRIBE_TRANSACTIONS: handle_describe_transactions,
    Api.DESCRIBE_PRODUCERS: handle_describe_producers,
    Api.UPDATE_FEATURES: handle_update_features,
}
