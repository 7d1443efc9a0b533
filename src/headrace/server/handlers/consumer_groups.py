"""ConsumerGroupHeartbeat and ConsumerGroupDescribe: groups of the consumer protocol.

Behaviour. From the wire to the group coordinator and back; what a group does is told in `coordinators.consumer_group`.
What a request says of itself is checked here, with Kafka's words. Versions: from 1 on a member brings its own id and
may subscribe by a regular expression; before, the broker makes the id of a member that joins without one.
Where the client is known to bear it, a reply that would say nothing is held for a while, so that what the group has for
the member is told at once and not with its next heartbeat; a later request of the connection ends the wait.
"""

from collections.abc import Awaitable, Mapping
from typing import Any

from headrace.base.clock import Timer
from headrace.base.errors import ErrorCode, KafkaError
from headrace.coordinators.consumer_group import JOIN, LEAVE, LEAVE_STATIC, ConsumerGroup, HeartbeatRequest
from headrace.coordinators.consumer_records import Assignment
from headrace.coordinators.consumer_state import ConsumerMember
from headrace.security.authorizer import Operation, ResourceType
from headrace.server.broker import Broker
from headrace.server.broker_groups import new_member_id
from headrace.server.context import RequestContext
from headrace.server.handlers.groups import GROUP_OPERATIONS, is_storable
from headrace.server.router import Body, DirectHandler, Handler
from headrace.server.session import Exchange
from headrace.wire.apis import Api
from headrace.wire.messages import Message, decode_request, encode_response

MEMBER_IDS_FROM = 1
SUBSCRIPTION_BYTES_MAX = 200_000
"""How much a member may say of what it subscribes to: it is stored in one record."""
CLASSIC_MEMBER, CONSUMER_MEMBER = 0, 1
PATIENT_CLIENT = "rdkafka"
"""Part of what it calls itself. librdkafka leaves and commits while a heartbeat is unanswered, and when it was given
partitions reports at once; Kafka's Java client would leave only after the answer."""


def handle_consumer_group_heartbeat(broker: Broker, exchange: Exchange, frame: memoryview, body: int) -> None:
    """Be a member: join, report, give up and take partitions, leave."""
    context = exchange.context
    request = decode_request(Api.CONSUMER_GROUP_HEARTBEAT, context.version, bytes(frame[body:]))
    try:
        if not context.authorize(Operation.READ, ResourceType.GROUP, request.group_id):
            raise KafkaError(ErrorCode.GROUP_AUTHORIZATION_FAILED)
        _check(broker, context, request)
        answer = broker.groups.consumer_heartbeat(request.group_id, _heartbeat(context, request))
    except KafkaError as error:
        _reply(exchange, {"error_code": error.code, "error_message": error.message})
        return
    if not isinstance(answer, Mapping):
        broker.spawn(_reply_later(exchange, answer))
    elif not (_may_wait(context, request, answer) and HeldReport(broker, exchange, request, answer).waits()):
        _reply(exchange, answer)


def _reply(exchange: Exchange, answer: Body) -> None:
    context = exchange.context
    body = {"throttle_time_ms": context.throttle_ms, **answer}
    exchange.reply(encode_response(Api.CONSUMER_GROUP_HEARTBEAT, context.version, body))


async def _reply_later(exchange: Exchange, answer: Awaitable[Body]) -> None:
    _reply(exchange, await answer)


def _may_wait(context: RequestContext, request: Message, answer: Body) -> bool:
    """Whether the reply says nothing, to a client that bears to wait for one that does."""
    return (
        PATIENT_CLIENT in context.peer.software
        and answer["error_code"] is ErrorCode.NONE
        and 0 < request.member_epoch == answer["member_epoch"]
        and "assignment" not in answer
    )


class HeldReport:
    """A heartbeat whose reply waits for news of its group, for the connection's next request, or for its time.

    Answered once. Invariant: while nobody is answered the group knows that somebody waits, and no longer.
    """

    __slots__ = ("_answer", "_broker", "_exchange", "_request", "_timer")

    def __init__(self, broker: Broker, exchange: Exchange, request: Message, answer: Body) -> None:
        self._broker = broker
        self._exchange: Exchange | None = exchange
        self._request = request
        self._answer = answer
        self._timer: Timer | None = None

    def waits(self) -> bool:
        """Begin to wait, if the group has a mind to tell."""
        request, exchange = self._request, self._exchange
        assert exchange is not None
        hold_ms = self._broker.groups.watch_consumer(request.group_id, request.member_id, self._tell)
        if hold_ms:
            self._timer = self._broker.call_later(hold_ms, self._release)
            exchange.on_gone = self._gone
            exchange.wait_for_next(self._release)
        return hold_ms > 0

    def _tell(self, answer: Body) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            if self._timer is not None:
                self._timer.cancel()
            _reply(exchange, answer)

    def _release(self) -> None:
        if self._exchange is not None:
            self._broker.groups.unwatch_consumer(self._request.group_id, self._request.member_id)
            self._tell(self._answer)

    def _gone(self) -> None:
        if self._exchange is not None:
            self._exchange = None
            self._broker.groups.unwatch_consumer(self._request.group_id, self._request.member_id)
            if self._timer is not None:
                self._timer.cancel()


def _check(broker: Broker, context: RequestContext, request: Message) -> None:
    """Refuse what no group could make sense of."""
    if "consumer" not in broker.config.group_coordinator_rebalance_protocols:
        raise KafkaError(ErrorCode.UNSUPPORTED_VERSION, "The consumer group protocol is not enabled.")
    for name, text in (
        ("GroupId", request.group_id),
        ("InstanceId", request.instance_id),
        ("RackId", request.rack_id),
    ):
        if text is not None and not text.strip():
            raise KafkaError(ErrorCode.INVALID_REQUEST, f"{name} can't be empty.")
    if not request.member_id.strip() and (request.member_epoch != JOIN or context.version >= MEMBER_IDS_FROM):
        raise KafkaError(ErrorCode.INVALID_REQUEST, "MemberId can't be empty.")
    if request.member_epoch == JOIN:
        _check_join(request)
    elif request.member_epoch == LEAVE_STATIC and request.instance_id is None:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "InstanceId can't be null.")
    elif request.member_epoch < LEAVE_STATIC:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "MemberEpoch is invalid.")
    topics = request.subscribed_topic_names or ()
    names = (request.group_id, request.member_id, request.instance_id, request.rack_id, *topics)
    size = sum(map(len, topics)) + len(request.subscribed_topic_regex or "")
    if size > SUBSCRIPTION_BYTES_MAX or not all(is_storable(name) for name in names):
        raise KafkaError(ErrorCode.INVALID_REQUEST, "The request is too large to be stored.")
    assignor = request.server_assignor
    if assignor is not None and assignor not in broker.config.group_consumer_assignors:
        known = ", ".join(broker.config.group_consumer_assignors)
        raise KafkaError(
            ErrorCode.UNSUPPORTED_ASSIGNOR,
            f"ServerAssignor {assignor} is not supported. Supported assignors: {known}.",
        )


def _check_join(request: Message) -> None:
    if request.rebalance_timeout_ms == -1:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "RebalanceTimeoutMs must be provided in first request.")
    if request.topic_partitions is None or request.topic_partitions:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "TopicPartitions must be empty when (re-)joining.")
    if request.subscribed_topic_names is None and request.subscribed_topic_regex is None:
        raise KafkaError(
            ErrorCode.INVALID_REQUEST,
            "Either SubscribedTopicNames or SubscribedTopicRegex must be non-null when (re-)joining.",
        )


def _heartbeat(context: RequestContext, request: Message) -> HeartbeatRequest:
    topics = request.subscribed_topic_names
    owned = request.topic_partitions
    leaving = request.member_epoch in (LEAVE, LEAVE_STATIC)
    return HeartbeatRequest(
        request.member_id or new_member_id(),
        request.member_epoch,
        request.instance_id,
        request.rack_id,
        request.rebalance_timeout_ms,
        None if topics is None else tuple(topics),
        request.subscribed_topic_regex,
        request.server_assignor,
        None if owned is None or leaving else _owned(owned),
        context.client_id or "",
        f"/{context.client_host}",
    )


def _owned(topics: list[Message]) -> Assignment:
    return {bytes(topic.topic_id): frozenset(topic.partitions) for topic in topics if topic.partitions}


# -- describing --------------------------------------------------------------------------------------------------------


def handle_consumer_group_describe(broker: Broker, context: RequestContext, request: Message) -> Body:
    """Groups with their members, what they have, and what they are to have."""
    groups = [_described(broker, context, group_id) for group_id in request.group_ids]
    if request.include_authorized_operations:
        for group in groups:
            if group["error_code"] is ErrorCode.NONE:
                group["authorized_operations"] = sum(
                    1 << operation
                    for operation in GROUP_OPERATIONS
                    if context.authorize(operation, ResourceType.GROUP, group["group_id"])
                )
    return {"throttle_time_ms": context.throttle_ms, "groups": groups}


def _described(broker: Broker, context: RequestContext, group_id: str) -> dict[str, Any]:
    error, message = ErrorCode.NONE, None
    group = None
    if not context.authorize(Operation.DESCRIBE, ResourceType.GROUP, group_id):
        error = ErrorCode.GROUP_AUTHORIZATION_FAILED
    elif not group_id:
        error = ErrorCode.INVALID_GROUP_ID
    else:
        try:
            group = broker.groups.describe_consumers(group_id)
            if group is None:
                error, message = ErrorCode.GROUP_ID_NOT_FOUND, f"Group {group_id} not found."
        except KafkaError as refused:
            error, message = refused.code, refused.message or None
    if group is None:
        return {"error_code": error, "error_message": message, "group_id": group_id, "members": []}
    return {
        "error_code": ErrorCode.NONE,
        "group_id": group_id,
        "group_state": group.state.value,
        "group_epoch": group.epoch,
        "assignment_epoch": group.target_epoch,
        "assignor_name": group.assignor(),
        "members": [_member(broker, context, group, member) for member in group.members.values()],
    }


def _member(
    broker: Broker, context: RequestContext, group: ConsumerGroup, member: ConsumerMember
) -> dict[str, Any]:
    said = member.said
    return {
        "member_id": member.member_id,
        "instance_id": said.instance_id,
        "rack_id": said.rack_id,
        "member_epoch": member.epoch,
        "client_id": said.client_id,
        "client_host": said.client_host,
        "subscribed_topic_names": list(said.topics),
        "subscribed_topic_regex": said.regex or "",
        "assignment": _partitions(broker, context, member.current.assigned),
        "target_assignment": _partitions(broker, context, group.targets.get(member.member_id, {})),
        "member_type": CLASSIC_MEMBER if member.is_classic else CONSUMER_MEMBER,
    }


def _partitions(broker: Broker, context: RequestContext, assignment: Assignment) -> dict[str, Any]:
    topics = []
    for topic_id, partitions in assignment.items():
        name = broker.image.names.get(topic_id)
        if name is not None and context.authorize(Operation.DESCRIBE, ResourceType.TOPIC, name):
            topics.append({"topic_id": topic_id, "topic_name": name, "partitions": sorted(partitions)})
    return {"topic_partitions": topics}


HANDLERS: dict[Api, Handler] = {Api.CONSUMER_GROUP_DESCRIBE: handle_consumer_group_describe}
DIRECT: dict[Api, DirectHandler] = {Api.CONSUMER_GROUP_HEARTBEAT: handle_consumer_group_heartbeat}
