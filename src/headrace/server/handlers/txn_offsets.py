"""TxnOffsetCommit: offsets of a group that are committed, or not, with a transaction.

Behaviour. As OffsetCommit, after the transaction's coordinator has said that the group's partition of the topic of
offsets is part of the transaction; from version 5 on the client leaves it to the broker to add it. Versions: 3 brings
member and generation, which are checked when they are given; before 4 a client knows no TRANSACTION_ABORTABLE. What the
coordinator of the transaction cannot answer for now is told as the group's coordinator loading, which clients retry
without looking for another.
"""

from collections.abc import Awaitable

from headrace.base.errors import ErrorCode, KafkaError
from headrace.cluster.names import CONSUMER_OFFSETS_TOPIC
from headrace.coordinators.group_hash import partition_for
from headrace.coordinators.group_shard import Committer
from headrace.coordinators.records import NEVER
from headrace.security.authorizer import Operation, ResourceType
from headrace.server.broker import Broker
from headrace.server.broker_verify import Asked, verified_offsets
from headrace.server.context import RequestContext
from headrace.server.handlers.group_offsets import commit_offsets
from headrace.server.router import Body, Handler
from headrace.wire.apis import Api
from headrace.wire.messages import Message

KNOWS_ABORTABLE_FROM = 4
ADDS_PARTITION_FROM = 5


async def handle_txn_offset_commit(broker: Broker, context: RequestContext, request: Message) -> Body:
    """Store how far a group has read, to count when the transaction is committed."""
    producer = (request.producer_id, request.producer_epoch)
    refusal = ErrorCode.NONE
    if not context.authorize(Operation.WRITE, ResourceType.TRANSACTIONAL_ID, request.transactional_id):
        refusal = ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    else:
        topic = broker.image.topics.get(CONSUMER_OFFSETS_TOPIC)
        if topic is None or not topic.partitions:
            refusal = ErrorCode.COORDINATOR_NOT_AVAILABLE
        else:
            asked = Asked(request.transactional_id, *producer, context.version >= ADDS_PARTITION_FROM)
            index = partition_for(request.group_id, len(topic.partitions))
            refusal = await _verify(broker, asked, index, context.version >= KNOWS_ABORTABLE_FROM)
    who = Committer(
        request.group_id,
        request.member_id,
        request.group_instance_id,
        request.generation_id,
        NEVER,
        context.version,
        producer,
    )
    answer = commit_offsets(broker, context, request, who, refusal=refusal)
    return await answer if isinstance(answer, Awaitable) else answer


async def _verify(broker: Broker, asked: Asked, index: int, knows_abortable: bool) -> ErrorCode:
    try:
        state = broker.partition(CONSUMER_OFFSETS_TOPIC, index).log.producer_state
        return await verified_offsets(broker, asked, index, state, knows_abortable)
    except KafkaError as error:
        not_here = error.code is ErrorCode.NOT_LEADER_OR_FOLLOWER
        return ErrorCode.NOT_COORDINATOR if not_here else ErrorCode.COORDINATOR_NOT_AVAILABLE


HANDLERS: dict[Api, Handler] = {Api.TXN_OFFSET_COMMIT: handle_txn_offset_commit}
