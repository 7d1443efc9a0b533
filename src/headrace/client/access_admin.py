"""Administration of access rules: who may do what to which topics, groups and ids.

Owns the requests about access control lists and their typed rules and filters. They take an `Admin`, whose connections
and retries they use. Invariant: every rule or filter that was given is answered for, in its place. A cluster without an
authorizer refuses them all with SECURITY_DISABLED. Called by `admin`.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from headrace.base.errors import ErrorCode, KafkaError
from headrace.client.admin import Admin
from headrace.client.errors import error_code
from headrace.wire.apis import Api
from headrace.wire.messages import Message


class AclResource(IntEnum):
    """What a rule is about."""

    ANY = 1
    TOPIC = 2
    GROUP = 3
    CLUSTER = 4
    TRANSACTIONAL_ID = 5
    DELEGATION_TOKEN = 6
    USER = 7


class AclPattern(IntEnum):
    """How a rule's name is compared; ANY and MATCH are for filters."""

    ANY = 1
    MATCH = 2
    LITERAL = 3
    PREFIXED = 4


class AclOperation(IntEnum):
    """What a rule allows or denies."""

    ANY = 1
    ALL = 2
    READ = 3
    WRITE = 4
    CREATE = 5
    DELETE = 6
    ALTER = 7
    DESCRIBE = 8
    CLUSTER_ACTION = 9
    DESCRIBE_CONFIGS = 10
    ALTER_CONFIGS = 11
    IDEMPOTENT_WRITE = 12
    CREATE_TOKENS = 13
    DESCRIBE_TOKENS = 14
    TWO_PHASE_COMMIT = 15


class AclPermission(IntEnum):
    """Whether a rule allows or denies; ANY is for filters."""

    ANY = 1
    DENY = 2
    ALLOW = 3


class AclRule(NamedTuple):
    """One rule: this principal (`User:name`), from this host, may or may not."""

    resource: AclResource
    name: str
    principal: str
    operation: AclOperation
    permission: AclPermission = AclPermission.ALLOW
    host: str = "*"
    pattern: AclPattern = AclPattern.LITERAL


class AclFilter(NamedTuple):
    """Which rules are meant; None and ANY stand for all."""

    resource: AclResource = AclResource.ANY
    name: str | None = None
    principal: str | None = None
    operation: AclOperation = AclOperation.ANY
    permission: AclPermission = AclPermission.ANY
    host: str | None = None
    pattern: AclPattern = AclPattern.ANY


async def describe_acls(admin: Admin, wanted: AclFilter) -> list[AclRule]:
    """The rules that a filter means. Raises KafkaError."""
    reply = await _ask(admin, Api.DESCRIBE_ACLS, _filter_body(wanted))
    _raise(reply.error_code, reply.error_message)
    return sorted(
        _rule(resource.resource_type, resource.resource_name, resource.pattern_type, acl)
        for resource in reply.resources
        for acl in resource.acls
    )


async def create_acls(admin: Admin, rules: Sequence[AclRule]) -> list[KafkaError | None]:
    """Add rules; for each None, or why it was refused."""
    creations = [
        {
            "resource_type": rule.resource,
            "resource_name": rule.name,
            "resource_pattern_type": rule.pattern,
            "principal": rule.principal,
            "host": rule.host,
            "operation": rule.operation,
            "permission_type": rule.permission,
        }
        for rule in rules
    ]
    reply = await _ask(admin, Api.CREATE_ACLS, {"creations": creations})
    return [_failure(result.error_code, result.error_message) for result in reply.results]


async def delete_acls(admin: Admin, filters: Sequence[AclFilter]) -> list[list[AclRule] | KafkaError]:
    """Remove rules; for each filter those that were removed, or why none were."""
    reply = await _ask(admin, Api.DELETE_ACLS, {"filters": [_filter_body(one) for one in filters]})
    out: list[list[AclRule] | KafkaError] = []
    for result in reply.filter_results:
        failures = [(acl.error_code, acl.error_message) for acl in result.matching_acls]
        failures.insert(0, (result.error_code, result.error_message))
        failure = next((found for code, text in failures if (found := _failure(code, text))), None)
        removed = sorted(
            _rule(acl.resource_type, acl.resource_name, acl.pattern_type, acl) for acl in result.matching_acls
        )
        out.append(removed if failure is None else failure)
    return out


async def _ask(admin: Admin, api: Api, body: dict[str, Any]) -> Message:
    async def attempt() -> Message:
        return await (await admin.cluster.any_connection()).request(api, body)

    return await admin.retried(attempt)


def _filter_body(wanted: AclFilter) -> dict[str, Any]:
    return {
        "resource_type_filter": wanted.resource,
        "resource_name_filter": wanted.name,
        "pattern_type_filter": wanted.pattern,
        "principal_filter": wanted.principal,
        "host_filter": wanted.host,
        "operation": wanted.operation,
        "permission_type": wanted.permission,
    }


def _rule(kind: int, name: str, pattern: int, acl: Message) -> AclRule:
    return AclRule(
        AclResource(kind),
        name,
        acl.principal,
        AclOperation(acl.operation),
        AclPermission(acl.permission_type),
        acl.host,
        AclPattern(pattern),
    )


def _failure(code: int, message: str | None) -> KafkaError | None:
    known = error_code(code)
    return None if known is ErrorCode.NONE else KafkaError(known, message or known.name)


def _raise(code: int, message: str | None) -> None:
    if (failure := _failure(code, message)) is not None:
        raise failure
