"""AlterPartition: leaders propose another ISR.

Behaviour. Asked by brokers only, of the active controller; others answer NOT_CONTROLLER. Decided in
`cluster/partition_control.py`; answered when committed. Versions: 2 without, 3 with the broker epochs of the members.
Left out: leader recovery, which is always "recovered".
"""

from typing import Any

from headrace.base.errors import ErrorCode
from headrace.cluster.partition_control import ANY_EPOCH, IsrAnswer, IsrProposal
from headrace.security.authorizer import Operation, ResourceType
from headrace.server.broker import Broker
from headrace.server.context import RequestContext
from headrace.server.router import Body, Handler
from headrace.wire.apis import Api
from headrace.wire.messages import Message

EPOCHS_FROM = 3


async def handle_alter_partition(broker: Broker, context: RequestContext, request: Message) -> Body:
    """Decide on the ISRs that one leader proposes."""
    if not context.authorize(Operation.CLUSTER_ACTION, ResourceType.CLUSTER):
        return {"error_code": ErrorCode.CLUSTER_AUTHORIZATION_FAILED}
    with_epochs = context.version >= EPOCHS_FROM
    proposals = [
        IsrProposal(
            topic.topic_id,
            partition.partition_index,
            partition.leader_epoch,
            partition.partition_epoch,
            tuple([(each.broker_id, each.broker_epoch) for each in partition.new_isr_with_epochs])
            if with_epochs
            else tuple([(member, ANY_EPOCH) for member in partition.new_isr]),
        )
        for topic in request.topics
        for partition in topic.partitions
    ]
    error, answers = await broker.member.controller.alter_partitions(
        request.broker_id, request.broker_epoch, proposals
    )
    topics: dict[bytes, list[dict[str, Any]]] = {}
    for answer in answers:
        topics.setdefault(answer.topic_id, []).append(_told(answer))
    return {
        "throttle_time_ms": context.throttle_ms,
        "error_code": error,
        "topics": [{"topic_id": key, "partitions": partitions} for key, partitions in topics.items()],
    }


def _told(answer: IsrAnswer) -> dict[str, Any]:
    told: dict[str, Any] = {"partition_index": answer.index, "error_code": answer.error}
    if answer.registration is not None:
        now = answer.registration
        told |= {
            "leader_id": now.leader,
            "leader_epoch": now.leader_epoch,
            "isr": now.isr,
            "partition_epoch": now.partition_epoch,
        }
    return told


HANDLERS: dict[Api, Handler] = {Api.ALTER_PARTITION: handle_alter_partition}
