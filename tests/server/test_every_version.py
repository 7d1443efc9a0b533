"""Every version of every API that is advertised can be asked for: none of them fails in the broker."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from headrace.base.errors import ErrorCode
from headrace.testing import Broker
from headrace.wire.apis import SUPPORTED, Api
from headrace.wire.messages import Message
from headrace.wire.schema import Field, message_schema
from tests.server.raw import RawClient, batch

TOPIC = "every-version"
FIRST_ANSWERED = {Api.PRODUCE: 3}
"""Produce is advertised for versions that carry formats which are refused."""
NAMED = {
    "resource_type": 2,
    "session_epoch": -1,
    "acks": 1,
    "replica_id": -1,
    "endpoint_type": 1,
    "timestamp": -1,
}
"""Where the name alone says what makes sense; everything else takes what its type suggests."""


def filled(fields: Sequence[Field], version: int, topic_id: bytes) -> dict[str, Any]:
    """A request that says something in every field that its version has: lists of one, the topic for every name."""
    return {f.name: _value(f, version, topic_id) for f in fields if f.in_version(version)}


def _value(field: Field, version: int, topic_id: bytes) -> Any:
    if field.name in NAMED:
        return NAMED[field.name]
    kind = field.type.removeprefix("[]")
    values = {"string": TOPIC, "uuid": topic_id, "bool": False, "records": batch(b"x"), "bytes": b""}
    value: Any = filled(field.children, version, topic_id) if field.children else values.get(kind, 0)
    return [value] if field.type.startswith("[]") else value


def codes(value: object) -> Iterator[int]:
    """Every error code in a reply."""
    if isinstance(value, Message):
        for name, each in value.__dict__.items():
            if name == "error_code":
                yield each
            yield from codes(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from codes(each)


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with Broker() as running:
        yield running


@pytest.mark.parametrize("api", SUPPORTED, ids=lambda api: api.name)
def test_every_version_is_answered_without_a_failure_of_the_broker(broker: Broker, api: Api) -> None:
    first, last = SUPPORTED[api]
    first = FIRST_ANSWERED.get(api, first)
    with RawClient(broker.host, broker.port) as client:
        for version in range(first, last + 1):
            [topic] = client.call(Api.METADATA, 12, {"topics": [{"name": TOPIC}]}).topics
            body = filled(message_schema(api, "request").fields, version, topic.topic_id)
            reply = client.call(api, version, body)
            assert ErrorCode.UNKNOWN_SERVER_ERROR not in set(codes(reply)), (version, reply)
