"""TxnOffsetCommit: offsets of a group that are committed, or not, with a transaction.

Behaviour. As OffsetCommit, after the transaction's coordinator has said that the group's partition of the topic of
offsets is part of the transaction, which it is asked only when there is an offset to store; from version 5 on the
client leaves it to the broker to add it. Versions: 3 brings member and generation, which are checked when they are
given; before 4 a client knows no TRANSACTION_ABORTABLE. What the coordinator of the transaction cannot answer for now
is told as the group's coordinator loading, which clients retry without looking for another.
"""

from collections.abc import Mapping
from typing import Any

from headrace.base.errors import ErrorCode, KafkaError
from headrace.cluster.names import CONSUMER_OFFSETS_TOPIC
from headrace.coordinators.group_hash import partition_for
from headrace.coordinators.group_shard import Commit, CommitResult, Committer
from headrace.coordinators.records import NEVER
from headrace.coordinators.txn_metadata import Partition
from headrace.security.authorizer import Operation, ResourceType
from headrace.server.broker import Broker
from headrace.server.broker_verify import Asked, verified_offsets
from headrace.server.context import RequestContext
from headrace.server.handlers.group_offsets import group_refusal, topic_error
from headrace.server.router import Body, Handler
from headrace.wire.apis import Api
from headrace.wire.messages import Message

KNOWS_ABORTABLE_FROM = 4
ADDS_PARTITION_FROM = 5


async def handle_txn_offset_commit(broker: Broker, context: RequestContext, request: Message) -> Body:
    """Store how far a group has read, to count when the transaction is committed."""
    refusal = ErrorCode.NONE
    if not context.authorize(Operation.WRITE, ResourceType.TRANSACTIONAL_ID, request.transactional_id):
        refusal = ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    refusal = refusal or group_refusal(context, request.group_id)
    commits: list[Commit] = []
    errors: dict[Partition, ErrorCode] = {}
    for topic in request.topics:
        found = broker.image.topics.get(topic.name)
        error = refusal or topic_error(context, found, topic.name)
        count = len(found.partitions) if found is not None else 0
        for each in topic.partitions:
            index = each.partition_index
            if error is ErrorCode.NONE and 0 <= index < count:
                metadata = each.committed_metadata or ""
                commits.append(
                    Commit(topic.name, index, each.committed_offset, each.committed_leader_epoch, metadata)
                )
            else:
                errors[topic.name, index] = error or ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    if commits:
        told = await _commit(broker, context.version, request, commits)
        errors |= {(name, index): code for name, index, code in told}
    return {"throttle_time_ms": context.throttle_ms, "topics": _answers(request, errors)}


async def _commit(broker: Broker, version: int, request: Message, commits: list[Commit]) -> CommitResult:
    error = await _verified(broker, version, request)
    if error is not ErrorCode.NONE:
        return [(each.topic, each.partition, error) for each in commits]
    who = Committer(
        request.group_id,
        request.member_id,
        request.group_instance_id,
        request.generation_id,
        NEVER,
        version,
        (request.producer_id, request.producer_epoch),
    )
    try:
        answer = broker.groups.commit(who, commits)
        return answer if isinstance(answer, list) else await answer
    except KafkaError as refused:
        return [(each.topic, each.partition, refused.code) for each in commits]


def _answers(request: Message, errors: Mapping[Partition, ErrorCode]) -> list[dict[str, Any]]:
    return [
        {
            "name": topic.name,
            "partitions": [
                {
                    "partition_index": each.partition_index,
                    "error_code": errors[topic.name, each.partition_index],
                }
                for each in topic.partitions
            ],
        }
        for topic in request.topics
        if topic.partitions
    ]


async def _verified(broker: Broker, version: int, request: Message) -> ErrorCode:
    """Whether the offsets of the group are part of the transaction, by now at the latest."""
    if not request.group_id:
        return ErrorCode.INVALID_GROUP_ID
    topic = broker.image.topics.get(CONSUMER_OFFSETS_TOPIC)
    if topic is None or not topic.partitions:
        return ErrorCode.COORDINATOR_NOT_AVAILABLE
    adds = version >= ADDS_PARTITION_FROM
    asked = Asked(request.transactional_id, request.producer_id, request.producer_epoch, adds)
    index = partition_for(request.group_id, len(topic.partitions))
    try:
        state = broker.partition(CONSUMER_OFFSETS_TOPIC, index).log.producer_state
        return await verified_offsets(broker, asked, index, state, version >= KNOWS_ABORTABLE_FROM)
    except KafkaError as error:
        not_here = error.code is ErrorCode.NOT_LEADER_OR_FOLLOWER
        return ErrorCode.NOT_COORDINATOR if not_here else ErrorCode.COORDINATOR_NOT_AVAILABLE


HANDLERS: dict[Api, Handler] = {Api.TXN_OFFSET_COMMIT: handle_txn_offset_commit}
