"""Metadata, DescribeCluster, DescribeTopicPartitions and FindCoordinator.

Behaviour. What the cluster's image says, in the shape each API wants. Metadata creates topics that do not exist,
when the client and `auto.create.topics.enable` allow it, and answers when they are there (Kafka answers first and
has the client ask again). An empty list of topics asks for all in version 0 and for none above; topic ids are taken
from version 12. The first to look for the coordinator of a group, or of a transaction, has the topic of its records
made; while the cluster starts, that waits for brokers that should hold replicas of it, and clients ask again. Left out:
listeners of controllers apart from brokers.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.ids import ZERO_ID
from headrace.cluster.controller import NewTopic
from headrace.cluster.image import NO_LEADER, ClusterImage, PartitionRegistration, TopicImage
from headrace.cluster.names import (
    CONSUMER_OFFSETS_TOPIC,
    TRANSACTION_STATE_TOPIC,
    check_topic_name,
    is_internal,
)
from headrace.security.authorizer import CLUSTER_NAME, Operation, ResourceType
from headrace.server.broker import Broker
from headrace.server.broker_coordinators import coordinator_of
from headrace.server.context import RequestContext
from headrace.server.router import Body, Handler
from headrace.wire.apis import Api
from headrace.wire.messages import Message

NO_OPERATIONS = -(2**31)
IDS_IN_REQUESTS_FROM = 12
COORDINATORS_BATCHED_FROM = 4
ENDPOINT_BROKERS, ENDPOINT_CONTROLLERS = 1, 2
KEY_GROUP, KEY_TRANSACTION = 0, 1
COORDINATED_BY = {KEY_GROUP: CONSUMER_OFFSETS_TOPIC, KEY_TRANSACTION: TRANSACTION_STATE_TOPIC}
NO_NODE = {"node_id": -1, "host": "", "port": -1}
NO_TOPIC_YET = "The coordinator is not available."
BAD_KEY_TYPE = (
    "This most likely occurs because of a request being malformed by the client library or the message was sent to an "
    "incompatible broker. See the broker logs for more details."
)

_STAY_UNKNOWN = (ErrorCode.NONE, ErrorCode.TOPIC_ALREADY_EXISTS, ErrorCode.INVALID_REQUEST)
"""Why a topic is not made on being asked for, when the asker is told no more than that it is not there."""

_OPERATIONS = {
    ResourceType.TOPIC: (
        Operation.READ,
        Operation.WRITE,
        Operation.CREATE,
        Operation.DELETE,
        Operation.ALTER,
        Operation.DESCRIBE,
        Operation.DESCRIBE_CONFIGS,
        Operation.ALTER_CONFIGS,
    ),
    ResourceType.CLUSTER: (
        Operation.CREATE,
        Operation.ALTER,
        Operation.DESCRIBE,
        Operation.CLUSTER_ACTION,
        Operation.DESCRIBE_CONFIGS,
        Operation.ALTER_CONFIGS,
        Operation.IDEMPOTENT_WRITE,
    ),
}


def _operations(context: RequestContext, kind: ResourceType, name: str = CLUSTER_NAME) -> int:
    """What whoever asks may do with a resource, a bit for each operation."""
    return sum(1 << operation for operation in _OPERATIONS[kind] if context.authorize(operation, kind, name))


def _cluster_operations(context: RequestContext) -> int:
    if not context.authorize(Operation.DESCRIBE, ResourceType.CLUSTER):
        return 0
    return _operations(context, ResourceType.CLUSTER)


def _may_describe(context: RequestContext, name: str) -> bool:
    return context.authorize(Operation.DESCRIBE, ResourceType.TOPIC, name)


# -- metadata ----------------------------------------------------------------------------------------------------------


async def handle_metadata(broker: Broker, context: RequestContext, request: Message) -> Body:
    """Brokers and topics, created if they are asked for and may be."""
    wanted: list[Message] | None = request.topics
    if context.version == 0 and not wanted:
        wanted = None
    if wanted is None:
        topics = [
            _topic(broker.image, topic)
            for name, topic in broker.image.topics.items()
            if _may_describe(context, name)
        ]
    else:
        with_ids = any(topic.topic_id != ZERO_ID for topic in wanted)
        if _is_unclear(wanted, with_ids, context.version):
            code = ErrorCode.INVALID_REQUEST
            topics = [
                {"error_code": code, "name": each.name or "", "topic_id": each.topic_id} for each in wanted
            ]
        elif with_ids:
            topics = _by_id(broker, context, {topic.topic_id: None for topic in wanted})
        else:
            names = dict.fromkeys(topic.name for topic in wanted)
            topics = await _by_name(broker, context, names, request.allow_auto_topic_creation)
    if request.include_topic_authorized_operations:
        for topic in topics:
            if topic["name"] is not None:
                topic["topic_authorized_operations"] = _operations(context, ResourceType.TOPIC, topic["name"])
    reply: dict[str, Any] = {
        "throttle_time_ms": context.throttle_ms,
        "brokers": _brokers(broker),
        "cluster_id": broker.cluster_id,
        "controller_id": _controller(broker),
        "topics": topics,
    }
    if request.include_cluster_authorized_operations:
        reply["cluster_authorized_operations"] = _cluster_operations(context)
    return reply


def _is_unclear(wanted: list[Message], with_ids: bool, version: int) -> bool:
    """Whether a topic has neither name nor id, or an id that its version does not give a meaning."""
    if version < IDS_IN_REQUESTS_FROM and with_ids:
        return True
    return any(topic.name is None and topic.topic_id == ZERO_ID for topic in wanted)


def _by_id(broker: Broker, context: RequestContext, ids: Iterable[bytes]) -> list[dict[str, Any]]:
    """Topics by id. Ids are no secret, so one that may not be described is told apart from one that is not there."""
    topics = []
    for topic_id in ids:
        topic = broker.image.topic_by_id(topic_id)
        if topic is not None and _may_describe(context, topic.name):
            topics.append(_topic(broker.image, topic))
        elif topic_id != ZERO_ID:
            known = topic is not None
            code = ErrorCode.TOPIC_AUTHORIZATION_FAILED if known else ErrorCode.UNKNOWN_TOPIC_ID
            topics.append({"error_code": code, "name": None, "topic_id": topic_id, "partitions": []})
    return topics


async def _by_name(
    broker: Broker, context: RequestContext, names: Iterable[str], may_create: bool
) -> list[dict[str, Any]]:
    errors: dict[str, ErrorCode] = {}
    missing: list[str] = []
    create = may_create and broker.config.auto_create_topics_enable
    create_any = create and context.authorize(Operation.CREATE, ResourceType.CLUSTER)
    for name in names:
        if not _may_describe(context, name):
            errors[name] = ErrorCode.TOPIC_AUTHORIZATION_FAILED
        elif name not in broker.image.topics:
            if (
                create
                and not create_any
                and not context.authorize(Operation.CREATE, ResourceType.TOPIC, name)
            ):
                errors[name] = ErrorCode.TOPIC_AUTHORIZATION_FAILED
            else:
                missing.append(name)
    for name in missing:
        try:
            check_topic_name(name)
        except KafkaError as error:
            errors[name] = error.code
        else:
            errors[name] = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    if create:
        await _auto_create(
            broker, [n for n in missing if errors[n] is not ErrorCode.INVALID_TOPIC_EXCEPTION], errors
        )
    topics = []
    for name in names:
        topic = broker.image.topics.get(name)
        if topic is not None and errors.get(name) is not ErrorCode.TOPIC_AUTHORIZATION_FAILED:
            topics.append(_topic(broker.image, topic))
        else:
            code = errors.get(name, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
            topics.append(
                {"error_code": code, "name": name, "is_internal": is_internal(name), "partitions": []}
            )
    return topics


async def _auto_create(broker: Broker, names: list[str], errors: dict[str, ErrorCode]) -> None:
    """Create what can be; what cannot be gets its error. What another request is creating stays unknown for now."""
    made = {name: _auto_topic(broker, name) for name in names}
    errors.update({name: ErrorCode.LEADER_NOT_AVAILABLE for name, topic in made.items() if topic is None})
    wanted = [topic for topic in made.values() if topic is not None]
    if not wanted:
        return
    try:
        results = await broker.member.create_topics(wanted)
    except KafkaError as error:
        errors.update({topic.name: error.code for topic in wanted})
        return
    errors.update({name: code for name, code in results.items() if code not in _STAY_UNKNOWN})


def _auto_topic(broker: Broker, name: str) -> NewTopic | None:
    """The topic that asking for it makes; None when it is too early. The cluster's own are made the same for anyone."""
    config = broker.config
    if name == CONSUMER_OFFSETS_TOPIC:
        segment_bytes = max(config.offsets_topic_segment_bytes, 1 << 20)
        factor = config.offsets_topic_replication_factor
        partitions = config.offsets_topic_num_partitions
    elif name == TRANSACTION_STATE_TOPIC:
        segment_bytes = max(config.transaction_state_log_segment_bytes, 1 << 20)
        factor = config.transaction_state_log_replication_factor
        partitions = config.transaction_state_log_num_partitions
    else:
        return NewTopic(name)
    replicas = broker.member.internal_replicas(broker.image, factor, broker.clock.monotonic_ms())
    if replicas is None:
        return None
    settings: tuple[tuple[str, str], ...] = (
        ("cleanup.policy", "compact"),
        ("compression.type", "producer"),
        ("segment.bytes", str(segment_bytes)),
    )
    if name == TRANSACTION_STATE_TOPIC:
        settings += (("min.insync.replicas", str(config.transaction_state_log_min_isr)),)
    return NewTopic(name, partitions, replicas, (), settings)


def _topic(image: ClusterImage, topic: TopicImage) -> dict[str, Any]:
    return {
        "error_code": ErrorCode.NONE,
        "name": topic.name,
        "topic_id": topic.id,
        "is_internal": is_internal(topic.name),
        "partitions": [_partition(image, index, each) for index, each in enumerate(topic.partitions)],
    }


def _partition(image: ClusterImage, index: int, registration: PartitionRegistration) -> dict[str, Any]:
    leader = registration.leader if _lives(image, registration.leader) else NO_LEADER
    return {
        "error_code": ErrorCode.NONE if leader != NO_LEADER else ErrorCode.LEADER_NOT_AVAILABLE,
        "partition_index": index,
        "leader_id": leader,
        "leader_epoch": registration.leader_epoch,
        "replica_nodes": registration.replicas,
        "isr_nodes": registration.isr,
        "offline_replicas": [each for each in registration.replicas if not _lives(image, each)],
    }


def _lives(image: ClusterImage, broker_id: int) -> bool:
    broker = image.brokers.get(broker_id)
    return broker is not None and not broker.fenced


def _brokers(broker: Broker) -> list[dict[str, Any]]:
    return [
        {"node_id": each.id, "host": each.host, "port": each.port, "rack": each.rack}
        for each in broker.member.listed(broker.image, broker.clock.monotonic_ms())
    ]


def _controller(broker: Broker) -> int:
    """Whom clients may take for the controller: the active one if it is a broker, else this broker, which knows it."""
    leader = broker.member.leader
    return leader if leader is not None and _lives(broker.image, leader) else broker.node_id


# -- the cluster -------------------------------------------------------------------------------------------------------


def handle_describe_cluster(broker: Broker, context: RequestContext, request: Message) -> Body:
    """The brokers and who controls them."""
    endpoint = request.endpoint_type
    if endpoint == ENDPOINT_CONTROLLERS:
        raise KafkaError(
            ErrorCode.MISMATCHED_ENDPOINT_TYPE,
            "The request was sent to an endpoint of type BROKER, but we wanted an endpoint of type CONTROLLER",
        )
    if endpoint != ENDPOINT_BROKERS:
        raise KafkaError(ErrorCode.UNSUPPORTED_ENDPOINT_TYPE, f"Unsupported endpoint type {endpoint}")
    reply: dict[str, Any] = {
        "throttle_time_ms": context.throttle_ms,
        "endpoint_type": ENDPOINT_BROKERS,
        "cluster_id": broker.cluster_id,
        "controller_id": _controller(broker),
        "brokers": [
            {
                "broker_id": each.id,
                "host": each.host,
                "port": each.port,
                "rack": each.rack,
                "is_fenced": each.fenced,
            }
            for each in broker.image.brokers.values()
            if not each.fenced or request.include_fenced_brokers
        ],
    }
    if request.include_cluster_authorized_operations:
        reply["cluster_authorized_operations"] = _cluster_operations(context)
    return reply


def handle_describe_topic_partitions(broker: Broker, context: RequestContext, request: Message) -> Body:
    """Topics in order of their names, a page of partitions at a time."""
    asked = dict.fromkeys(topic.name for topic in request.topics)
    cursor = request.cursor
    after = "" if cursor is None else cursor.topic_name
    if cursor is not None and (cursor.partition_index < 0 or (asked and after not in asked)):
        bad = [_no_topic(name, ErrorCode.INVALID_REQUEST) for name in asked]
        return {"throttle_time_ms": context.throttle_ms, "topics": bad}
    names = sorted(name for name in asked or broker.image.topics if name >= after)
    refused = [name for name in names if not _may_describe(context, name)]
    limit = max(1, min(broker.config.max_request_partition_size_limit, request.response_partition_limit))
    topics, following = _page(
        broker.image,
        [name for name in names if name not in refused],
        {} if cursor is None else {after: cursor.partition_index},
        limit,
        bool(asked),
    )
    for topic in topics:
        topic["topic_authorized_operations"] = _operations(context, ResourceType.TOPIC, topic["name"])
    if asked:
        topics += [_no_topic(name, ErrorCode.TOPIC_AUTHORIZATION_FAILED) for name in refused]
    return {"throttle_time_ms": context.throttle_ms, "topics": topics, "next_cursor": following}


def _page(
    image: ClusterImage, names: list[str], starts: Mapping[str, int], limit: int, tell_missing: bool
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Up to `limit` partitions of these topics, and where the next page begins."""
    topics: list[dict[str, Any]] = []
    left = limit
    for name in names:
        if left == 0:
            return topics, {"topic_name": name, "partition_index": 0}
        topic = image.topics.get(name)
        if topic is None:
            if tell_missing:
                topics.append(_no_topic(name, _missing_code(name)))
            continue
        start = starts.get(name, 0)
        end = min(start + left, len(topic.partitions))
        partitions = [_partition(image, index, topic.partitions[index]) for index in range(start, end)]
        topics.append(
            {
                "error_code": ErrorCode.NONE,
                "name": name,
                "topic_id": topic.id,
                "is_internal": is_internal(name),
                "partitions": [
                    {**each, "eligible_leader_replicas": [], "last_known_elr": []} for each in partitions
                ],
            }
        )
        left -= len(partitions)
        if end < len(topic.partitions):
            return topics, {"topic_name": name, "partition_index": end}
    return topics, None


def _missing_code(name: str) -> ErrorCode:
    try:
        check_topic_name(name)
    except KafkaError as error:
        return error.code
    return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def _no_topic(name: str, code: ErrorCode) -> dict[str, Any]:
    return {
        "error_code": code,
        "name": name,
        "is_internal": is_internal(name),
        "partitions": [],
        "topic_authorized_operations": NO_OPERATIONS,
    }


# -- coordinators ------------------------------------------------------------------------------------------------------


async def make_internal_topic(broker: Broker, name: str) -> None:
    """Have one of the cluster's own topics be there."""
    if name not in broker.image.topics:
        await _auto_create(broker, [name], {})


async def handle_find_coordinator(broker: Broker, context: RequestContext, request: Message) -> Body:
    """Who coordinates a group or a transactional id: the leader of the partition that holds its records."""
    if request.key_type in COORDINATED_BY:
        await make_internal_topic(broker, COORDINATED_BY[request.key_type])
    if context.version >= COORDINATORS_BATCHED_FROM:
        found = [
            {"key": key} | _coordinator(broker, context, request.key_type, key, "")
            for key in request.coordinator_keys
        ]
        return {"throttle_time_ms": context.throttle_ms, "coordinators": found}
    answer = _coordinator(broker, context, request.key_type, request.key, "NONE")
    return {"throttle_time_ms": context.throttle_ms, **answer}


def _coordinator(broker: Broker, context: RequestContext, kind: int, key: str, fine: str) -> dict[str, Any]:
    if kind not in (KEY_GROUP, KEY_TRANSACTION):
        return {"error_code": ErrorCode.INVALID_REQUEST, "error_message": BAD_KEY_TYPE, **NO_NODE}
    resource, refusal = (
        (ResourceType.GROUP, ErrorCode.GROUP_AUTHORIZATION_FAILED)
        if kind == KEY_GROUP
        else (ResourceType.TRANSACTIONAL_ID, ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
    )
    if not context.authorize(Operation.DESCRIBE, resource, key):
        return {"error_code": refusal, "error_message": "Authorization failed.", **NO_NODE}
    found = coordinator_of(broker, COORDINATED_BY[kind], key)
    if found is None:
        return {"error_code": ErrorCode.COORDINATOR_NOT_AVAILABLE, "error_message": NO_TOPIC_YET, **NO_NODE}
    return {"error_message": fine, "node_id": found.id, "host": found.host, "port": found.port}


HANDLERS: dict[Api, Handler] = {
    Api.METADATA: handle_metadata,
    Api.DESCRIBE_CLUSTER: handle_describe_cluster,
    Api.DESCRIBE_TOPIC_PARTITIONS: handle_describe_topic_partitions,
    Api.FIND_COORDINATOR: handle_find_coordinator,
}
