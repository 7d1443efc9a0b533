"""OffsetFetch: where a group's consumers left off.

Behaviour. No group can commit here yet, so the truth about every partition is that nothing is committed: offset -1
without an error, which sends a consumer to its `auto.offset.reset`, as on a Kafka that never saw the group. It is
served before groups are, because consumers that assign partitions by themselves ask it too (librdkafka 2.15 crashes
its process when the API is not there). Versions: one group before 8, many from then on, topics by id from 10. Left
out: OffsetCommit and the groups themselves, until there is a coordinator for them.
"""

from typing import Any

from headrace.base.errors import ErrorCode
from headrace.security.authorizer import Operation, ResourceType
from headrace.server.broker import Broker
from headrace.server.context import RequestContext
from headrace.server.router import Body, Handler
from headrace.wire.apis import Api
from headrace.wire.messages import Message

GROUPS_FROM = 8
TOPIC_IDS_FROM = 10
NOTHING_COMMITTED = -1


def handle_offset_fetch(broker: Broker, context: RequestContext, request: Message) -> Body:
    """The committed offsets of groups: none."""
    if context.version >= GROUPS_FROM:
        groups = [_group(broker, context, group.group_id, group.topics) for group in request.groups]
        return {"throttle_time_ms": context.throttle_ms, "groups": groups}
    answer = _group(broker, context, request.group_id, request.topics)
    del answer["group_id"]
    return {"throttle_time_ms": context.throttle_ms, **answer}


def _group(
    broker: Broker, context: RequestContext, group_id: str, topics: list[Message] | None
) -> dict[str, Any]:
    if not context.authorize(Operation.DESCRIBE, ResourceType.GROUP, group_id):
        return {"group_id": group_id, "topics": [], "error_code": ErrorCode.GROUP_AUTHORIZATION_FAILED}
    answers = [_topic(broker, context, topic) for topic in topics or ()]
    return {"group_id": group_id, "topics": answers, "error_code": ErrorCode.NONE}


def _topic(broker: Broker, context: RequestContext, topic: Message) -> dict[str, Any]:
    name, error = topic.name, ErrorCode.NONE
    named: dict[str, Any] = {"name": name}
    if context.version >= TOPIC_IDS_FROM:
        known = broker.image.topic_by_id(topic.topic_id)
        name, error = ("", ErrorCode.UNKNOWN_TOPIC_ID) if known is None else (known.name, ErrorCode.NONE)
        named = {"topic_id": topic.topic_id}
    if error is ErrorCode.NONE and not context.authorize(Operation.DESCRIBE, ResourceType.TOPIC, name):
        error = ErrorCode.TOPIC_AUTHORIZATION_FAILED
    partitions = [
        {
            "partition_index": index,
            "committed_offset": NOTHING_COMMITTED,
            "committed_leader_epoch": -1,
            "metadata": "",
            "error_code": error,
        }
        for index in topic.partition_indexes
    ]
    return {**named, "partitions": partitions}


HANDLERS: dict[Api, Handler] = {Api.OFFSET_FETCH: handle_offset_fetch}
