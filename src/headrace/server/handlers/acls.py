"""DescribeAcls, CreateAcls, DeleteAcls on a broker without rules: everyone may do everything, and is told so.

Kafka's answer of a broker that has no authorizer configured, for each thing asked: clients probe for it to learn
whether the cluster is secured. Nothing is ever stored here, so nobody can take a rule for one that holds.
"""

from headrace.base.errors import ErrorCode
from headrace.security.authorizer import Operation, ResourceType
from headrace.server.broker import Broker
from headrace.server.context import RequestContext
from headrace.server.router import Body, Handler
from headrace.wire.apis import Api
from headrace.wire.messages import Message

NO_AUTHORIZER = "No Authorizer is configured."


def handle_describe_acls(broker: Broker, context: RequestContext, request: Message) -> Body:
    """No rules, because there is nobody who would follow them."""
    return {"throttle_time_ms": context.throttle_ms, **_refusal(context, Operation.DESCRIBE)}


def handle_create_acls(broker: Broker, context: RequestContext, request: Message) -> Body:
    """Each rule is refused."""
    refusal = _refusal(context, Operation.ALTER)
    return {"throttle_time_ms": context.throttle_ms, "results": [refusal for _ in request.creations]}


def handle_delete_acls(broker: Broker, context: RequestContext, request: Message) -> Body:
    """Each filter is refused."""
    refusal = _refusal(context, Operation.ALTER)
    return {"throttle_time_ms": context.throttle_ms, "filter_results": [refusal for _ in request.filters]}


def _refusal(context: RequestContext, operation: Operation) -> dict[str, object]:
    if not context.authorize(operation, ResourceType.CLUSTER):
        return {"error_code": ErrorCode.CLUSTER_AUTHORIZATION_FAILED, "error_message": None}
    return {"error_code": ErrorCode.SECURITY_DISABLED, "error_message": NO_AUTHORIZER}


HANDLERS: dict[Api, Handler] = {
    Api.DESCRIBE_ACLS: handle_describe_acls,
    Api.CREATE_ACLS: handle_create_acls,
    Api.DELETE_ACLS: handle_delete_acls,
}
