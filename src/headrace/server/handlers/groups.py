"""JoinGroup, SyncGroup, Heartbeat, LeaveGroup, DescribeGroups, ListGroups and DeleteGroups: classic groups.

Behaviour. From the wire to the group coordinator and back; what a group does is told in
`coordinators.classic_group`. A join or sync that has to wait holds back its connection's later replies, as in
Kafka. Versions: JoinGroup has a new member come again with the id it is given from 4 on, and tells a leader to keep
the assignment from 9 on; before 1 the session timeout is the rebalance timeout too. SyncGroup must name the
protocol from 5 on. LeaveGroup takes many members from 3 on; before, the one member's error is the reply's. A
heartbeat while the coordinator loads is well received, as in Kafka, so that no member leaves for nothing. Where the
client is known to bear it, the reply to a heartbeat is held for a while, so that a rebalance that begins is told at
once and not with the next one; a later request of the connection ends the wait.
DescribeGroups tells a group that does not exist as Dead, from version 6 with GROUP_ID_NOT_FOUND; groups of the
consumer protocol are for `consumer_groups`.
"""

from collections.abc import Awaitable, Mapping
from functools import lru_cache
from typing import Any

from headrace.base.clock import Timer
from headrace.base.errors import ErrorCode, KafkaError
from headrace.coordinators.group_states import join_error, sync_error
from headrace.coordinators.membership import JoinRequest
from headrace.security.authorizer import Operation, ResourceType
from headrace.server.broker import Broker
from headrace.server.context import RequestContext
from headrace.server.router import Body, DirectHandler, Handler
from headrace.server.session import Exchange
from headrace.wire.apis import Api
from headrace.wire.messages import Message, decode_request, encode_response

STRING_BYTES_MAX = 32_767
"""What fits into a string of the records that groups are stored as."""
UTF8_BYTES_A_CHARACTER_MAX = 4
REBALANCE_TIMEOUT_FROM = 1
KNOWN_MEMBER_IDS_FROM = 4
NULL_PROTOCOL_FROM = 7
SKIP_ASSIGNMENT_FROM = 9
SYNC_NAMES_PROTOCOL_FROM = 5
LEAVE_BATCHED_FROM = 3
PATIENT_CLIENTS = ("rdkafka", "apache-kafka-java")
"""Part of what they call themselves: those whose heartbeats go beside their other work and may be held for news."""
HEARTBEATS_REMEMBERED_MAX = 8192
HEARTBEAT_REMEMBERED_BYTES_MAX = 256
"""A member says the same in every heartbeat of a generation."""
HEARTBEAT_REPLIES_REMEMBERED_MAX = 256
NOT_FOUND_FROM = 6
GROUP_OPERATIONS = (
    Operation.READ,
    Operation.DELETE,
    Operation.DESCRIBE,
    Operation.DESCRIBE_CONFIGS,
    Operation.ALTER_CONFIGS,
)


def is_storable(text: str | None) -> bool:
    return (
        text is None
        or len(text) * UTF8_BYTES_A_CHARACTER_MAX <= STRING_BYTES_MAX
        or len(text.encode()) <= STRING_BYTES_MAX
    )


def _check_group(context: RequestContext, group_id: str) -> ErrorCode:
    """Why a member's request is refused before a group is looked for."""
    if not context.authorize(Operation.READ, ResourceType.GROUP, group_id):
        return ErrorCode.GROUP_AUTHORIZATION_FAILED
    return ErrorCode.NONE if group_id and is_storable(group_id) else ErrorCode.INVALID_GROUP_ID


# -- members -----------------------------------------------------------------------------------------------------------


def handle_join_group(broker: Broker, context: RequestContext, request: Message) -> Body | Awaitable[Body]:
    """Become a member, or stay one through a rebalance. The reply comes when the rebalance is over."""
    error = _check_group(context, request.group_id)
    protocols = tuple([(each.name, bytes(each.metadata)) for each in request.protocols])
    texts = (request.group_instance_id, request.protocol_type, *[name for name, _ in protocols])
    if error is ErrorCode.NONE and not all(is_storable(text) for text in texts):
        error = ErrorCode.INVALID_REQUEST
    if error is not ErrorCode.NONE:
        return _joined(context, join_error(error, request.member_id))
    session_ms = request.session_timeout_ms
    rebalance_ms = request.rebalance_timeout_ms if context.version >= REBALANCE_TIMEOUT_FROM else session_ms
    join = JoinRequest(
        request.member_id,
        request.group_instance_id,
        context.client_id or "",
        f"/{context.client_host}",
        session_ms,
        max(rebalance_ms, 0),
        request.protocol_type,
        protocols,
        context.version >= KNOWN_MEMBER_IDS_FROM,
        context.version >= SKIP_ASSIGNMENT_FROM,
    )
    try:
        answer = broker.groups.join(request.group_id, join)
    except KafkaError as refused:
        return _joined(context, join_error(refused.code, request.member_id))
    return _joined(context, answer) if isinstance(answer, Mapping) else _joined_later(context, answer)


async def _joined_later(context: RequestContext, answer: Awaitable[Body]) -> Body:
    return _joined(context, await answer)


def _joined(context: RequestContext, answer: Body) -> Body:
    body = {"throttle_time_ms": context.throttle_ms, "protocol_name": None, "members": [], **answer}
    if body["protocol_name"] is None and context.version < NULL_PROTOCOL_FROM:
        body["protocol_name"] = ""
    body["leader"] = body.get("leader") or ""
    return body


def handle_sync_group(broker: Broker, context: RequestContext, request: Message) -> Body | Awaitable[Body]:
    """Learn what is assigned to a member; the leader brings the assignment."""
    error = _check_group(context, request.group_id)
    unnamed = request.protocol_type is None or request.protocol_name is None
    if error is ErrorCode.NONE and context.version >= SYNC_NAMES_PROTOCOL_FROM and unnamed:
        error = ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    if error is not ErrorCode.NONE:
        return {"throttle_time_ms": context.throttle_ms, **sync_error(error)}
    try:
        answer = broker.groups.sync(
            request.group_id,
            request.member_id,
            request.group_instance_id,
            request.generation_id,
            request.protocol_type,
            request.protocol_name,
            [(each.member_id, bytes(each.assignment)) for each in request.assignments],
        )
    except KafkaError as refused:
        return {"throttle_time_ms": context.throttle_ms, **sync_error(refused.code)}
    if isinstance(answer, Mapping):
        return {"throttle_time_ms": context.throttle_ms, **answer}
    return _later(context, answer)


async def _later(context: RequestContext, answer: Awaitable[Body]) -> Body:
    return {"throttle_time_ms": context.throttle_ms, **await answer}


class HeldHeartbeat:
    """A heartbeat whose reply waits for news: a rebalance, the connection's next request, or its time.

    Answered once; whoever comes later finds nobody there.
    """

    __slots__ = ("_exchange", "_timer")

    def __init__(self, exchange: Exchange) -> None:
        self._exchange: Exchange | None = exchange
        self._timer: Timer | None = None

    def wait(self, broker: Broker, hold_ms: int) -> None:
        assert self._exchange is not None
        self._timer = broker.call_later(hold_ms, self.release)
        self._exchange.on_gone = self._gone
        self._exchange.wait_for_next(self.release)

    def tell(self, body: Body) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            if self._timer is not None:
                self._timer.cancel()
            _reply_heartbeat(exchange, body["error_code"])

    def release(self) -> None:
        self.tell({"error_code": ErrorCode.NONE})

    def _gone(self) -> None:
        self._exchange = None
        if self._timer is not None:
            self._timer.cancel()


def handle_heartbeat(broker: Broker, exchange: Exchange, frame: memoryview, body: int) -> None:
    """Say that a member lives; hear whether it has to join again."""
    context = exchange.context
    data = bytes(frame[body:])
    read = _known_heartbeat if len(data) <= HEARTBEAT_REMEMBERED_BYTES_MAX else _read_heartbeat
    group_id, member_id, instance_id, generation = read(context.version, data)
    error = _check_group(context, group_id)
    if error is ErrorCode.NONE:
        try:
            error = broker.groups.heartbeat(group_id, member_id, instance_id, generation)
        except KafkaError as refused:
            loading = refused.code is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
            _reply_heartbeat(exchange, ErrorCode.NONE if loading else refused.code)
            return
    software = context.peer.software
    if error is ErrorCode.NONE and software and any(name in software for name in PATIENT_CLIENTS):
        held = HeldHeartbeat(exchange)
        if hold_ms := broker.groups.watch(group_id, member_id, held.tell):
            held.wait(broker, hold_ms)
            return
    _reply_heartbeat(exchange, error)


def _read_heartbeat(version: int, data: bytes) -> tuple[str, str, str | None, int]:
    request = decode_request(Api.HEARTBEAT, version, data)
    return request.group_id, request.member_id, request.group_instance_id, request.generation_id


_known_heartbeat = lru_cache(maxsize=HEARTBEATS_REMEMBERED_MAX)(_read_heartbeat)


def _reply_heartbeat(exchange: Exchange, error: ErrorCode) -> None:
    context = exchange.context
    exchange.reply(_heartbeat_reply(context.version, context.throttle_ms, error))


@lru_cache(maxsize=HEARTBEAT_REPLIES_REMEMBERED_MAX)
def _heartbeat_reply(version: int, throttle_ms: int, error: ErrorCode) -> bytes:
    body = {"throttle_time_ms": throttle_ms, "error_code": error}
    return encode_response(Api.HEARTBEAT, version, body)


async def handle_leave_group(broker: Broker, context: RequestContext, request: Message) -> Body:
    """Take members out of a group."""
    error = _check_group(context, request.group_id)
    batched = context.version >= LEAVE_BATCHED_FROM
    leaving = (
        [(each.member_id, each.group_instance_id) for each in request.members]
        if batched
        else [(request.member_id, None)]
    )
    results: list[tuple[str, str | None, ErrorCode]] = []
    if error is ErrorCode.NONE:
        try:
            answer = broker.groups.leave(request.group_id, leaving)
            results = answer if isinstance(answer, list) else await answer
        except KafkaError as refused:
            error = refused.code
    if not batched and results:
        error = results[0][2]
    members = [
        {"member_id": member_id, "group_instance_id": instance_id, "error_code": code}
        for member_id, instance_id, code in results
    ]
    return {"throttle_time_ms": context.throttle_ms, "error_code": error, "members": members}


# -- admin -------------------------------------------------------------------------------------------------------------


def handle_describe_groups(broker: Broker, context: RequestContext, request: Message) -> Body:
    """Groups with their members."""
    groups = [_described(broker, context, group_id) for group_id in request.groups]
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
    if not context.authorize(Operation.DESCRIBE, ResourceType.GROUP, group_id):
        return {"group_id": group_id, "error_code": ErrorCode.GROUP_AUTHORIZATION_FAILED, "members": []}
    try:
        found = broker.groups.describe(group_id)
    except KafkaError as error:
        return {"group_id": group_id, "error_code": error.code, "members": []}
    if found is not None:
        return found
    missing: dict[str, Any] = {
        "group_id": group_id,
        "group_state": "Dead",
        "error_code": ErrorCode.NONE,
        "members": [],
    }
    if context.version >= NOT_FOUND_FROM:
        missing["error_code"] = ErrorCode.GROUP_ID_NOT_FOUND
        missing["error_message"] = f"Group {group_id} not found."
    return missing


def handle_list_groups(broker: Broker, context: RequestContext, request: Message) -> Body:
    """All groups, or those in some states or of some types."""
    states = {state.lower() for state in request.states_filter}
    types = {kind.lower() for kind in request.types_filter}
    all_groups = context.authorize(Operation.DESCRIBE, ResourceType.CLUSTER)
    try:
        listed = broker.groups.listed()
    except KafkaError as error:
        return {"throttle_time_ms": context.throttle_ms, "error_code": error.code, "groups": []}
    groups = [
        group
        for group in listed
        if (not states or group["group_state"].lower() in states)
        and (not types or group["group_type"] in types)
        and (all_groups or context.authorize(Operation.DESCRIBE, ResourceType.GROUP, group["group_id"]))
    ]
    return {"throttle_time_ms": context.throttle_ms, "error_code": ErrorCode.NONE, "groups": groups}


async def handle_delete_groups(broker: Broker, context: RequestContext, request: Message) -> Body:
    """Delete groups without members, and their offsets."""
    results = []
    for group_id in dict.fromkeys(request.groups_names):
        if not context.authorize(Operation.DELETE, ResourceType.GROUP, group_id):
            error = ErrorCode.GROUP_AUTHORIZATION_FAILED
        else:
            try:
                answer = broker.groups.delete_group(group_id)
                error = answer if isinstance(answer, ErrorCode) else await answer
            except KafkaError as refused:
                error = refused.code
        results.append({"group_id": group_id, "error_code": error})
    return {"throttle_time_ms": context.throttle_ms, "results": results}


HANDLERS: dict[Api, Handler] = {
    Api.JOIN_GROUP: handle_join_group,
    Api.SYNC_GROUP: handle_sync_group,
    Api.LEAVE_GROUP: handle_leave_group,
    Api.DESCRIBE_GROUPS: handle_describe_groups,
    Api.LIST_GROUPS: handle_list_groups,
    Api.DELETE_GROUPS: handle_delete_groups,
}
DIRECT: dict[Api, DirectHandler] = {Api.HEARTBEAT: handle_heartbeat}
