"""Values survive their format, misfits are named, and what cannot be decoded goes where it was told to go."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import Consumer, Producer, TopicPartition
from headrace.client.error_policy import DeadLetter
from headrace.client.errors import ConfigError, SerializationFailed
from headrace.client.framing import frame, unframe
from headrace.client.json_schema import check_json
from headrace.client.serializers import (
    Avro,
    Bytes,
    Context,
    Int,
    Json,
    JsonSchema,
    Msgpack,
    Protobuf,
    String,
    deserializer_of,
    serializer_of,
)

WHERE = Context("orders", "value")
ORDER_SCHEMA = {
    "type": "record",
    "name": "Order",
    "fields": [{"name": "id", "type": "long"}, {"name": "what", "type": "string"}],
}


class Registry:
    """A schema registry in memory."""

    def __init__(self) -> None:
        self.schemas: list[tuple[str, str, str]] = []

    def id_of(self, subject: str, kind: str, schema: str) -> int:
        entry = (subject, kind, schema)
        if entry not in self.schemas:
            self.schemas.append(entry)
        return self.schemas.index(entry)

    def schema_of(self, schema_id: int) -> str:
        return self.schemas[schema_id][2]


class Order(msgspec.Struct):
    id: int
    what: str


@pytest.mark.parametrize(
    "form, value",
    [
        (Bytes(), b"\x00\xff"),
        (String(), "grün"),
        (String("latin-1"), "grün"),
        (Int(), -(2**63)),
        (Int(4), 2**31 - 1),
        (Json(), {"a": [1, None, "x"]}),
        (Json(Order), Order(1, "tea")),
        (Msgpack(), {"a": [1, None, b"x"]}),
        (Msgpack(Order), Order(1, "tea")),
        (JsonSchema({"type": "object", "required": ["id"]}), {"id": 1}),
        (Avro(ORDER_SCHEMA), {"id": 1, "what": "tea"}),
    ],
)
def test_a_value_survives_its_format_and_none_stays_none(form: Any, value: Any) -> None:
    encoded = form.encode(value, WHERE)
    assert isinstance(encoded, bytes)
    assert form.decode(encoded, WHERE) == value
    assert form.encode(None, WHERE) is None
    assert form.decode(None, WHERE) is None


def test_protobuf_messages_survive_with_and_without_a_registry() -> None:
    from google.protobuf.struct_pb2 import Value

    message = Value(string_value="tea")
    for registry in (None, Registry()):
        form = Protobuf(Value, registry, 'syntax = "proto3";')
        encoded = form.encode(message, WHERE)
        assert encoded is not None
        assert form.decode(encoded, WHERE) == message
    assert encoded[:6] == b"\x00\x00\x00\x00\x00\x00", "magic, id, and the index of the first message"
    nested = frame(0, b"\x04\x02\x00" + message.SerializeToString())
    assert form.decode(nested, WHERE) == message, "indexes that another client wrote are passed over"


@given(st.integers(0, 2**32 - 1), st.binary())
def test_what_was_framed_is_unframed(schema_id: int, data: bytes) -> None:
    assert unframe(frame(schema_id, data)) == (schema_id, data)


def test_framing_refuses_what_has_no_schema_id() -> None:
    with pytest.raises(ValueError, match="too few"):
        unframe(b"\x00\x00")
    with pytest.raises(ValueError, match="not written with a schema registry"):
        unframe(b"{12345}")


def test_avro_reads_with_its_own_schema_what_another_version_wrote() -> None:
    registry = Registry()
    older = Avro(ORDER_SCHEMA, registry)
    fields = [*ORDER_SCHEMA["fields"], {"name": "count", "type": "int", "default": 1}]
    newer = Avro(json.dumps({**ORDER_SCHEMA, "fields": fields}), registry)
    encoded = older.encode({"id": 1, "what": "tea"}, WHERE)
    assert newer.decode(encoded, WHERE) == {"id": 1, "what": "tea", "count": 1}
    assert [entry[:2] for entry in registry.schemas] == [("orders-value", "AVRO")]


@pytest.mark.parametrize(
    "form, value",
    [
        ("string", 5),
        ("int", "five"),
        ("int", 2**70),
        ("bytes", "text"),
        (Avro(ORDER_SCHEMA), {"id": "x", "what": "tea"}),
        (JsonSchema({"type": "object"}), [1]),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_its_topic_and_type(form: Any, value: Any) -> None:
    serialize = serializer_of(form, "value_serializer")
    assert serialize is not None
    with pytest.raises(SerializationFailed, match="value of a record for topic 'orders'") as caught:
        serialize(value, WHERE)
    assert type(value).__name__ in caught.value.hint
    assert not caught.value.retriable


def test_an_unknown_format_is_refused_with_those_there_are() -> None:
    with pytest.raises(SerializationFailed, match="no such format") as caught:
        deserializer_of("jsn", "value_deserializer")
    assert "json" in caught.value.hint


@pytest.mark.parametrize(
    "schema, good, bad, says",
    [
        ({"type": "integer", "minimum": 1}, [1, 7, 2.0], [0, True, "1", 1.5], r"\$"),
        ({"enum": ["a", 1]}, ["a", 1], ["b", True], "none of"),
        ({"type": ["string", "null"], "maxLength": 2}, ["ab", None], ["abc"], "longer than 2"),
        ({"pattern": "^a+$"}, ["aa", 5], ["b"], "does not match"),
        ({"items": {"type": "number"}, "uniqueItems": True}, [[1, 2.5], []], [[1, "x"], [1, 1]], r"\$\[1\]"),
        ({"prefixItems": [{"const": 1}], "items": False}, [[1]], [[2], [1, 1]], r"\$\[[01]\]"),
        (
            {"additionalProperties": False, "properties": {"a": True}},
            [{"a": 1}],
            [{"b": 1}],
            "no property 'b'",
        ),
        ({"required": ["a"]}, [{"a": None}, "x"], [{}], "'a' is missing"),
        ({"oneOf": [{"minimum": 3}, {"maximum": 5}]}, [1, 9], [4], "fits 2"),
        ({"anyOf": [{"const": 1}, {"const": 2}]}, [1, 2], [3], "fits none"),
        ({"allOf": [{"minimum": 1}, {"multipleOf": 2}]}, [2], [1], "multiple of 2"),
        ({"not": {"type": "null"}}, [1], [None], "must not be"),
        ({"if": {"minimum": 10}, "then": {"multipleOf": 10}}, [3, 20], [11], "multiple of 10"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "string"}}}, ["a"], [1], "not of type string"),
        ({"contains": {"const": 1}}, [[0, 1]], [[0]], "no item"),
        ({"dependentRequired": {}}, [], [1], "'dependentRequired' is not supported"),
    ],
)
def test_a_json_schema_lets_through_what_fits_and_nothing_else(
    schema: Any, good: list[Any], bad: list[Any], says: str
) -> None:
    for value in good:
        check_json(schema, value)
    for value in bad:
        with pytest.raises(ValueError, match=says):
            check_json(schema, value)


def test_records_that_cannot_be_decoded_stop_skip_or_go_to_the_dead_letter_topic(
    cluster_bootstrap: str, new_topic: Callable[..., str], run: Callable[..., Any]
) -> None:
    topic, dead = new_topic(), new_topic()
    where = TopicPartition(topic, 0)
    config = {"bootstrap.servers": cluster_bootstrap, "auto.offset.reset": "earliest"}

    async def read(count: int, **options: Any) -> list[Any]:
        async with Consumer(config, value_deserializer="json", **options) as consumer:
            consumer.assign([where])
            found: list[Any] = []
            while len(found) < count:
                found += [record.value for record in await consumer.poll(5_000)]
            return found

    async def body() -> None:
        async with Producer(config, key_serializer="string", value_serializer="json") as producer:
            await producer.send(topic, {"n": 0}, key="k")
        async with Producer(config) as raw:
            await raw.send(topic, b"{broken", key=b"k", headers=[("h", b"1")])
            await raw.send(topic, b'{"n":2}')
            await raw.flush()
            assert await read(2, on_error="skip") == [{"n": 0}, {"n": 2}]
            assert await read(2, on_error=DeadLetter(raw, dead)) == [{"n": 0}, {"n": 2}]
        async with Consumer(config, value_deserializer="json") as consumer:
            consumer.assign([where])
            assert [record.value for record in await consumer.poll(5_000)] == [{"n": 0}]
            for _ in range(2):
                with pytest.raises(SerializationFailed, match="at offset 1 cannot be decoded"):
                    await consumer.poll(5_000)
            assert await consumer.position(where) == 1
            consumer.seek(where, 2)
            assert [record.value for record in await consumer.poll(5_000)] == [{"n": 2}]
        async with Consumer(config) as consumer:
            consumer.assign([TopicPartition(dead, 0)])
            record = await anext(consumer)
            assert (record.key, record.value) == (b"k", b"{broken")
            headers = dict(record.headers)
            assert headers["h"] == b"1"
            assert headers["headrace.origin.topic"] == topic.encode()
            assert headers["headrace.origin.offset"] == b"1"
            assert b"cannot be decoded" in (headers["headrace.origin.error"] or b"")

    run(body())
    with pytest.raises(ConfigError, match="on_error"):
        Consumer(config, on_error="ignore")  # type: ignore[arg-type]
