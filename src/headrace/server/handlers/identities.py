"""SaslHandshake, SaslAuthenticate, DescribeUserScramCredentials and delegation tokens where nobody has an identity.

Kafka's answers on a listener without authentication. Who asks for SASL there, or for a token, is told that this is not
the place for it, and not left to guess why a connection was closed; no user has credentials, so none is found. Nothing
is ever stored here. What would make users or tokens is not among these APIs: it does not exist yet.
"""

from collections import Counter
from typing import Any

from headrace.base.errors import ErrorCode, KafkaError
from headrace.security.authorizer import Operation, ResourceType
from headrace.server.broker import Broker
from headrace.server.context import RequestContext
from headrace.server.router import Body, Handler
from headrace.wire.apis import Api
from headrace.wire.messages import Message

NOT_SASL = "This listener does not authenticate: a SaslAuthenticate request has no place here."
NEVER_MS = -1
REQUESTER_FROM = 3


def handle_sasl_handshake(broker: Broker, context: RequestContext, request: Message) -> Body:
    """There is no mechanism to agree on."""
    return {"error_code": ErrorCode.ILLEGAL_SASL_STATE, "mechanisms": []}


def handle_sasl_authenticate(broker: Broker, context: RequestContext, request: Message) -> Body:
    """Nobody is asked who they are."""
    return {"error_code": ErrorCode.ILLEGAL_SASL_STATE, "error_message": NOT_SASL, "auth_bytes": b""}


def handle_describe_user_scram_credentials(broker: Broker, context: RequestContext, request: Message) -> Body:
    """No user has credentials."""
    if not context.authorize(Operation.DESCRIBE, ResourceType.CLUSTER):
        raise KafkaError(ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
    named = Counter(user.name for user in request.users or ())
    results = [_unknown_user(name, times) for name, times in named.items()]
    return {"throttle_time_ms": context.throttle_ms, "error_message": "", "results": results}


def _unknown_user(name: str, times: int) -> dict[str, Any]:
    error, why = (
        ErrorCode.RESOURCE_NOT_FOUND,
        f"Attempt to describe a user credential that does not exist: {name}",
    )
    if times > 1:
        error, why = (
            ErrorCode.DUPLICATE_RESOURCE,
            f"Cannot describe SCRAM credentials for the same user twice: {name}",
        )
    return {"user": name, "error_code": error, "error_message": why, "credential_infos": []}


def handle_create_delegation_token(broker: Broker, context: RequestContext, request: Message) -> Body:
    """A token stands for somebody who has proved who they are, and nobody has."""
    kind, name = context.principal
    requester = {"token_requester_principal_type": kind, "token_requester_principal_name": name}
    return {
        **_token_refusal(context),
        "principal_type": kind,
        "principal_name": name,
        "issue_timestamp_ms": NEVER_MS,
        "expiry_timestamp_ms": NEVER_MS,
        "max_timestamp_ms": NEVER_MS,
        **(requester if context.version >= REQUESTER_FROM else {}),
    }


def handle_describe_delegation_token(broker: Broker, context: RequestContext, request: Message) -> Body:
    """Tokens are shown to those who have proved who they are."""
    return _token_refusal(context)


def handle_change_delegation_token(broker: Broker, context: RequestContext, request: Message) -> Body:
    """As `handle_describe_delegation_token`, for renewing and expiring."""
    return {**_token_refusal(context), "expiry_timestamp_ms": NEVER_MS}


def _token_refusal(context: RequestContext) -> dict[str, Any]:
    return {
        "throttle_time_ms": context.throttle_ms,
        "error_code": ErrorCode.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED,
    }


HANDLERS: dict[Api, Handler] = {
    Api.SASL_HANDSHAKE: handle_sasl_handshake,
    Api.SASL_AUTHENTICATE: handle_sasl_authenticate,
    Api.DESCRIBE_USER_SCRAM_CREDENTIALS: handle_describe_user_scram_credentials,
    Api.CREATE_DELEGATION_TOKEN: handle_create_delegation_token,
    Api.RENEW_DELEGATION_TOKEN: handle_change_delegation_token,
    Api.EXPIRE_DELEGATION_TOKEN: handle_change_delegation_token,
    Api.DESCRIBE_DELEGATION_TOKEN: handle_describe_delegation_token,
}
