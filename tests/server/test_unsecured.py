"""What is asked about identities, quotas and directories of a broker that has no users, no quotas and one directory."""

from typing import Any

import pytest

from headrace.base.errors import ErrorCode
from headrace.security.authorizer import Operation, ResourceType
from headrace.wire.apis import SUPPORTED, Api
from tests.server.desk import Denies, Desk

TOKENS = [
    Api.CREATE_DELEGATION_TOKEN,
    Api.RENEW_DELEGATION_TOKEN,
    Api.EXPIRE_DELEGATION_TOKEN,
    Api.DESCRIBE_DELEGATION_TOKEN,
]


def versions(api: Api) -> range:
    first, last = SUPPORTED[api]
    return range(first, last + 1)


@pytest.mark.parametrize("api", [Api.SASL_HANDSHAKE, Api.SASL_AUTHENTICATE])
def test_who_wants_sasl_is_told_that_this_is_not_the_place(api: Api) -> None:
    for version in versions(api):
        assert Desk().ask(api, version).error_code == ErrorCode.ILLEGAL_SASL_STATE


@pytest.mark.parametrize("api", TOKENS)
def test_nobody_gets_a_token_without_an_identity(api: Api) -> None:
    for version in versions(api):
        reply = Desk().ask(api, version)
        assert reply.error_code == ErrorCode.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED
        if api is Api.CREATE_DELEGATION_TOKEN:
            assert (reply.principal_name, reply.issue_timestamp_ms) == ("ANONYMOUS", -1)


@pytest.mark.parametrize("users", [None, []])
def test_there_are_no_users(users: list[Any] | None) -> None:
    reply = Desk().ask(Api.DESCRIBE_USER_SCRAM_CREDENTIALS, 0, {"users": users})
    assert (reply.error_code, reply.results) == (0, [])


def test_a_user_that_is_named_is_not_found_and_one_named_twice_is_told_so() -> None:
    users = [{"name": name} for name in ("alice", "bob", "bob")]
    reply = Desk().ask(Api.DESCRIBE_USER_SCRAM_CREDENTIALS, 0, {"users": users})
    assert {each.user: each.error_code for each in reply.results} == {
        "alice": ErrorCode.RESOURCE_NOT_FOUND,
        "bob": ErrorCode.DUPLICATE_RESOURCE,
    }


def part(kind: str, match_type: int = 2, match: str | None = None) -> dict[str, Any]:
    return {"entity_type": kind, "match_type": match_type, "match": match}


@pytest.mark.parametrize(
    ("filters", "code"),
    [
        ([], ErrorCode.NONE),
        ([part("user"), part("client-id", 0, "c")], ErrorCode.NONE),
        ([part("ip", 1)], ErrorCode.NONE),
        ([part("user", 0)], ErrorCode.INVALID_REQUEST),
        ([part("user", 1, "alice")], ErrorCode.INVALID_REQUEST),
        ([part("user", 9)], ErrorCode.INVALID_REQUEST),
        ([part("user"), part("user")], ErrorCode.INVALID_REQUEST),
        ([part("")], ErrorCode.INVALID_REQUEST),
        ([part("ip"), part("user")], ErrorCode.INVALID_REQUEST),
        ([part("planet")], ErrorCode.UNSUPPORTED_VERSION),
    ],
)
def test_no_quota_matches_and_filters_are_checked(filters: list[dict[str, Any]], code: ErrorCode) -> None:
    for version in versions(Api.DESCRIBE_CLIENT_QUOTAS):
        reply = Desk().ask(Api.DESCRIBE_CLIENT_QUOTAS, version, {"components": filters, "strict": False})
        assert (reply.error_code, reply.entries) == (code, None if code else [])


def moved(desk: Desk, *moves: tuple[str, str, int]) -> dict[tuple[str, int], int]:
    dirs = [{"path": path, "topics": [{"name": name, "partitions": [index]}]} for path, name, index in moves]
    reply = desk.ask(Api.ALTER_REPLICA_LOG_DIRS, 2, {"dirs": dirs})
    return {
        (topic.topic_name, each.partition_index): each.error_code
        for topic in reply.results
        for each in topic.partitions
    }


def test_replicas_are_where_they_should_be_or_the_directory_is_not_found() -> None:
    desk = Desk()
    desk.create("t", 2)
    unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert moved(desk) == {}
    assert moved(desk, ("memory", "t", 0), ("/elsewhere", "t", 1)) == {
        ("t", 0): ErrorCode.NONE,
        ("t", 1): ErrorCode.LOG_DIR_NOT_FOUND,
    }
    assert moved(desk, ("memory", "t", 9), ("memory", "none", 0)) == {("t", 9): unknown, ("none", 0): unknown}
    assert moved(desk, ("memory", "t", 0), ("/elsewhere", "t", 0)) == {("t", 0): ErrorCode.LOG_DIR_NOT_FOUND}
    desk.authorizer = Denies((Operation.ALTER, ResourceType.CLUSTER, None))
    assert moved(desk, ("memory", "t", 0)) == {("t", 0): ErrorCode.CLUSTER_AUTHORIZATION_FAILED}
