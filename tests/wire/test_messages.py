"""Every message of every API and version, checked against kio's own encoder and decoder."""

import dataclasses
import datetime
import importlib
import io
import types
import typing
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kio.schema.index import api_key_map, schema_name_map
from kio.serial import entity_reader, entity_writer
from kio.static.constants import EntityType

from headrace.wire.messages import (
    Malformed,
    decode_request,
    decode_response,
    encode_request,
    encode_request_parts,
    encode_response,
)

CASES = [
    (key, name, version, side)
    for key, name in sorted(api_key_map.items())
    for version in sorted(schema_name_map[name])
    for side in ("request", "response")
]


def kio_class(name: str, version: int, side: str) -> type:
    path, _, cls = schema_name_map[name][version][EntityType[side]].partition(":")
    return getattr(importlib.import_module(path), cls)


def sample(cls: type, depth: int, number: int) -> tuple[object, dict]:
    """A kio object with a distinct value in each field, and the same as the mapping our encoder takes."""
    hints = typing.get_type_hints(cls)
    values, body = {}, {}
    for item in dataclasses.fields(cls):
        number += 1
        kind = hints[item.name]
        if isinstance(kind, types.UnionType):
            kind = next(o for o in typing.get_args(kind) if o is not type(None))
        array = typing.get_origin(kind) is tuple
        inner = typing.get_args(kind)[0] if array else kind
        primitive = item.metadata.get("kafka_type")
        name = item.name
        if primitive is None:
            value, ours = sample(inner, depth + 1, number)
        else:
            value, ours = primitive_sample(primitive, number)
            if primitive.startswith(("timedelta", "datetime")):
                name += "_ms"
        values[item.name] = (value, value) if array else value
        body[name] = [ours, ours] if array else ours
    return cls(**values), body


def primitive_sample(kind: str, number: int) -> tuple[object, object]:
    match kind:
        case "bool":
            return number % 2 == 0, number % 2 == 0
        case "string":
            return f"text{number}", f"text{number}"
        case "bytes" | "records":
            return b"raw%d" % number, b"raw%d" % number
        case "uuid":
            return UUID(int=number), UUID(int=number).bytes
        case "float64":
            return number + 0.5, number + 0.5
        case "timedelta_i32" | "timedelta_i64":
            return datetime.timedelta(milliseconds=number), number
        case "datetime_i64":
            moment = datetime.datetime.fromtimestamp(number, datetime.UTC)
            return moment, number * 1000
        case "error_code":
            from kio.schema.errors import ErrorCode

            return ErrorCode(number % 40), number % 40
    return number % 100, number % 100


def plain(message: object) -> object:
    if isinstance(message, list):
        return [plain(item) for item in message]
    if isinstance(message, memoryview):
        return bytes(message)
    if hasattr(message, "__dict__"):
        return {name: plain(value) for name, value in vars(message).items()}
    return message


def contains(whole: object, part: object) -> bool:
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(contains(whole[k], v) for k, v in part.items())
    if isinstance(part, list):
        return isinstance(whole, list) and len(whole) == len(part) and all(map(contains, whole, part))
    return whole == part


@pytest.mark.parametrize("key, name, version, side", CASES, ids=str)
def test_every_message_is_encoded_and_decoded_as_kio_does(key, name, version, side):
    theirs, body = sample(kio_class(name, version, side), 0, 0)
    buffer = io.BytesIO()
    entity_writer(type(theirs))(buffer, theirs)
    encode = encode_request if side == "request" else encode_response
    decode = decode_request if side == "request" else decode_response
    assert encode(key, version, body) == buffer.getvalue()
    assert contains(plain(decode(key, version, memoryview(buffer.getvalue()))), body)


@pytest.mark.parametrize("key, name, version, side", CASES, ids=str)
def test_an_empty_body_is_encoded_from_the_defaults_and_kio_reads_it(key, name, version, side):
    encode = encode_request if side == "request" else encode_response
    raw = encode(key, version, {})
    _, size = entity_reader(kio_class(name, version, side))(raw, 0)
    assert size == len(raw)


@pytest.mark.parametrize("version", [1, 9, 12])
def test_an_array_that_claims_more_than_the_frame_holds_is_refused_before_it_is_allocated(version):
    absurd = b"\xff\xff\xff\xff\x0f" if version >= 9 else b"\x7f\xff\xff\xff"
    with pytest.raises(Malformed):
        decode_request(3, version, absurd + bytes(64))


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.sampled_from([c for c in CASES if c[3] == "request"]), st.data())
def test_broken_requests_are_malformed_and_nothing_worse(case, data):
    key, name, version, _ = case
    _theirs, body = sample(kio_class(name, version, "request"), 0, 0)
    raw = bytearray(encode_request(key, version, body))
    for _ in range(data.draw(st.integers(1, 4))):
        if raw:
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    try:
        decode_request(key, version, memoryview(raw)[:cut])
    except Malformed:
        pass


def test_a_field_that_no_version_knows_is_a_bug_and_raises():
    with pytest.raises(TypeError, match="tpoics"):
        encode_response(3, 12, {"tpoics": []})


def test_fields_absent_from_an_old_version_hold_their_defaults():
    request = decode_request(3, 1, encode_request(3, 1, {"topics": [{"name": "a"}]}))
    assert request.allow_auto_topic_creation is True
    assert request.topics[0].topic_id == bytes(16)


@pytest.mark.parametrize("version", [3, 9, 13])
def test_large_record_sets_go_out_as_they_are_between_the_other_parts(version: int) -> None:
    large, other = bytearray(b"x" * 100_000), b"y" * 50_000
    body = {
        "transactional_id": None,
        "acks": 1,
        "timeout_ms": 5,
        "topic_data": [
            {
                "name": "t",
                "topic_id": bytes(16),
                "partition_data": [
                    {"index": index, "records": records}
                    for index, records in enumerate((large, b"small", None, other))
                ],
            }
        ],
    }
    parts = encode_request_parts(0, version, body)
    assert b"".join(parts) == encode_request(0, version, body)
    assert [part for part in parts if part is large or part is other] == [large, other], "not copied"
    assert sum(map(len, parts)) - len(large) - len(other) < 200
