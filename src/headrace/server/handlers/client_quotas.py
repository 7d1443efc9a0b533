"""DescribeClientQuotas on a cluster that has none: the filter is checked as Kafka checks it, and nothing matches.

Setting quotas does not exist yet, so there are none to tell of.
"""

from headrace.base.errors import ErrorCode, KafkaError
from headrace.security.authorizer import Operation, ResourceType
from headrace.server.broker import Broker
from headrace.server.context import RequestContext
from headrace.server.router import Body, Handler
from headrace.wire.apis import Api
from headrace.wire.messages import Message

USER, CLIENT_ID, IP = "user", "client-id", "ip"
EXACT, DEFAULT, ANY = 0, 1, 2


def handle_describe_client_quotas(broker: Broker, context: RequestContext, request: Message) -> Body:
    """The quotas that match a filter: none."""
    try:
        if not context.authorize(Operation.DESCRIBE_CONFIGS, ResourceType.CLUSTER):
            raise KafkaError(ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
        _check_filter(request.components)
    except KafkaError as error:
        return {
            "throttle_time_ms": context.throttle_ms,
            "error_code": error.code,
            "error_message": error.message,
            "entries": None,
        }
    return {"throttle_time_ms": context.throttle_ms, "error_message": "", "entries": []}


def _check_filter(components: list[Message]) -> None:
    seen: set[str] = set()
    for each in components:
        kind = each.entity_type
        if not kind:
            raise _refused("an entity type is empty")
        if kind in seen:
            raise _refused(f"entity type {kind} is named twice")
        if each.match_type not in (EXACT, DEFAULT, ANY):
            raise _refused(f"{each.match_type} is not a way to match")
        if (each.match is None) == (each.match_type == EXACT):
            raise _refused("a name goes with an exact match, and only with one")
        if kind not in (USER, CLIENT_ID, IP):
            raise KafkaError(ErrorCode.UNSUPPORTED_VERSION, f"entity type {kind} is not known")
        seen.add(kind)
    if IP in seen and len(seen) > 1:
        raise _refused("quotas of addresses go with no other entity")


def _refused(why: str) -> KafkaError:
    return KafkaError(ErrorCode.INVALID_REQUEST, f"Invalid filter: {why}.")


HANDLERS: dict[Api, Handler] = {Api.DESCRIBE_CLIENT_QUOTAS: handle_describe_client_quotas}
