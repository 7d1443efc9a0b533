"""ApiVersions and InitProducerId: what a client asks before it does anything else.

ApiVersions lists what the router serves. From version 3 the client says its name and version, which must look like
names; version 4 adds nothing that a single broker has to say. InitProducerId gives an idempotent producer a fresh id
with epoch 0, also one that had an id before. Left out: transactional ids, until there is a coordinator for them.
"""

import re

from headrace.base.errors import ErrorCode, KafkaError
from headrace.security.authorizer import Operation, ResourceType
from headrace.server.broker import Broker
from headrace.server.context import RequestContext
from headrace.server.router import Body, Handler
from headrace.wire.apis import SUPPORTED, Api
from headrace.wire.messages import Message

SOFTWARE_FROM = 3

_SOFTWARE = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?")


def handle_api_versions(broker: Broker, context: RequestContext, request: Message) -> Body:
    """The APIs and versions served here."""
    keys = [
        {"api_key": api, "min_version": first, "max_version": last}
        for api, (first, last) in SUPPORTED.items()
    ]
    named = (request.client_software_name, request.client_software_version)
    if context.version >= SOFTWARE_FROM and not all(map(_SOFTWARE.fullmatch, named)):
        return {"error_code": ErrorCode.INVALID_REQUEST, "throttle_time_ms": context.throttle_ms}
    return {"api_keys": keys, "throttle_time_ms": context.throttle_ms, "finalized_features_epoch": 0}


async def handle_init_producer_id(broker: Broker, context: RequestContext, request: Message) -> Body:
    """An id for an idempotent producer, unlike any given before."""
    try:
        producer_id, epoch = await _assign(broker, context, request)
    except KafkaError as error:
        return {"error_code": error.code, "producer_id": -1, "producer_epoch": -1}
    return {"producer_id": producer_id, "producer_epoch": epoch, "throttle_time_ms": context.throttle_ms}


async def _assign(broker: Broker, context: RequestContext, request: Message) -> tuple[int, int]:
    if request.transactional_id is not None:
        if request.transactional_id == "":
            raise KafkaError(ErrorCode.INVALID_REQUEST, "an empty transactional id")
        raise KafkaError(ErrorCode.NOT_COORDINATOR, "this broker has no transaction coordinator yet")
    if not context.authorize(Operation.IDEMPOTENT_WRITE, ResourceType.CLUSTER):
        raise KafkaError(ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
    if (request.producer_id == -1) != (request.producer_epoch == -1):
        raise KafkaError(ErrorCode.INVALID_REQUEST, "a producer id comes with its epoch or not at all")
    return await broker.producer_ids.next(), 0


HANDLERS: dict[Api, Handler] = {
    Api.API_VERSIONS: handle_api_versions,
    Api.INIT_PRODUCER_ID: handle_init_producer_id,
}
