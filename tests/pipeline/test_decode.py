"""Avro and Protobuf values become columns; what cannot be decoded becomes a reason, and harms no other row."""

import io
import json
import pickle
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, timestamp_pb2

from headrace.client.framing import frame
from headrace.pipeline.ddl import SchemaError
from headrace.pipeline.decode import Decoder

NOW = datetime(2026, 5, 6, 7, 8, 9, 123000, tzinfo=UTC)
ORDER: dict[str, Any] = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "name", "type": ["null", "string"], "default": None},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}},
        {"name": "token", "type": {"type": "string", "logicalType": "uuid"}},
        {"name": "state", "type": {"type": "enum", "name": "State", "symbols": ["NEW", "PAID"]}},
        {"name": "tags", "type": {"type": "array", "items": "string"}},
        {"name": "more", "type": {"type": "map", "values": "double"}},
        {
            "name": "lines",
            "type": {
                "type": "array",
                "items": {
                    "type": "record",
                    "name": "Line",
                    "fields": [{"name": "state", "type": "shop.State"}],
                },
            },
        },
    ],
}
ROW: dict[str, Any] = {
    "id": 7,
    "name": None,
    "at": NOW,
    "day": date(2026, 5, 6),
    "price": Decimal("12.50"),
    "token": "6f1c1f5e-8a53-4c6e-9a55-0d3c1c4b4f9d",
    "state": "PAID",
    "tags": ["a", "b"],
    "more": {"x": 1.5},
    "lines": [{"state": "NEW"}],
}


def avro(schema: Any, row: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), row)
    return out.getvalue()


def decoded(decoder: Decoder, *values: bytes | None) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = decoder.decode(pa.array(values, pa.binary())).to_pylist()
    return rows


def test_avro_records_become_columns_in_a_worker() -> None:
    decoder: Decoder = pickle.loads(pickle.dumps(Decoder("avro", json.dumps(ORDER).encode(), framed=False)))
    assert decoder.columns == {
        "id": "bigint",
        "name": "string",
        "at": "timestamp",
        "day": "date",
        "price": "decimal(9,2)",
        "token": "string",
        "state": "string",
        "tags": "array<string>",
        "more": "map<string, double>",
        "lines": "array<struct<`state`: string>>",
    }
    (row,) = decoded(decoder, avro(ORDER, ROW))
    assert row == {"value": {**ROW, "more": [("x", 1.5)]}, "reason": None}


def test_avro_that_cannot_be_read_has_a_reason_and_harms_no_other() -> None:
    decoder = Decoder("avro", json.dumps(ORDER).encode(), framed=False)
    good = avro(ORDER, ROW)
    rows = decoded(decoder, good[:-3], good, None, good + b"x", b"", good)
    assert [row["value"] is not None for row in rows] == [False, True, False, False, False, True]
    assert rows[2]["reason"] == "the value is null"
    assert rows[3]["reason"] == "1 bytes are left after the record"
    assert all(row["reason"] for row in rows if row["value"] is None)


def test_framed_avro_is_read_by_the_schema_that_wrote_it() -> None:
    old = {"type": "record", "name": "O", "fields": [{"name": "id", "type": "int"}]}
    new = {
        **old,
        "fields": [{"name": "id", "type": "long"}, {"name": "to", "type": "string", "default": "-"}],
    }
    writers = {3: json.dumps(old), 12: json.dumps(new)}
    decoder = Decoder("avro", json.dumps(new).encode(), framed=True, writers=writers)
    rows = decoded(
        decoder,
        frame(3, avro(old, {"id": 1})),
        frame(12, avro(new, {"id": 2, "to": "x"})),
        frame(4, avro(old, {"id": 3})),
        avro(new, {"id": 4, "to": "yes"}),
        b"\x00",
    )
    assert [row["value"] for row in rows[:2]] == [{"id": 1, "to": "-"}, {"id": 2, "to": "x"}]
    assert rows[2]["reason"] == "no schema with the id 4 is known"
    assert "not written with a schema registry" in rows[3]["reason"]
    assert "too few for a schema's id" in rows[4]["reason"]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (["int", "string"], "field 'x': a union of int, string is no Spark column"),
        (
            {"type": "record", "name": "R", "fields": [{"name": "r", "type": ["null", "O"]}]},
            "does one hold itself",
        ),
    ],
)
def test_avro_that_has_no_columns_in_spark_is_refused(kind: Any, said: str) -> None:
    schema = {"type": "record", "name": "O", "fields": [{"name": "x", "type": kind}]}
    with pytest.raises(SchemaError, match=said):
        _ = Decoder("avro", json.dumps(schema).encode(), framed=False).columns


def test_unions_of_numbers_are_the_wider_one() -> None:
    fields = [{"name": "n", "type": ["null", "int", "long"]}, {"name": "f", "type": ["float", "double"]}]
    schema = {"type": "record", "name": "O", "fields": fields}
    decoder = Decoder("avro", json.dumps(schema).encode(), framed=False)
    assert decoder.columns == {"n": "bigint", "f": "double"}
    assert decoded(decoder, avro(schema, {"n": 5, "f": 0.5}))[0]["value"] == {"n": 5, "f": 0.5}


# -- Protobuf ----------------------------------------------------------------------------------------------------------


def descriptor_set() -> bytes:
    """`message Refund {…} message Order {…}` as protoc would write it."""
    file = descriptor_pb2.FileDescriptorProto(name="shop.proto", package="shop", syntax="proto3")
    file.dependency.append("google/protobuf/timestamp.proto")
    refund = file.message_type.add(name="Refund")
    refund.field.add(name="id", number=1, type=3, label=1)
    order = file.message_type.add(name="Order")
    state = order.enum_type.add(name="State")
    for number, name in enumerate(("NEW", "PAID")):
        state.value.add(name=name, number=number)
    line = order.nested_type.add(name="Line")
    line.field.add(name="what", number=1, type=9, label=1)
    entry = order.nested_type.add(name="MoreEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=9, label=1)
    entry.field.add(name="value", number=2, type=1, label=1)
    order.field.add(name="id", number=1, type=3, label=1)
    order.field.add(name="total", number=2, type=4, label=1)
    order.field.add(name="state", number=3, type=14, type_name=".shop.Order.State", label=1)
    order.field.add(name="lines", number=4, type=11, type_name=".shop.Order.Line", label=3)
    order.field.add(name="more", number=5, type=11, type_name=".shop.Order.MoreEntry", label=3)
    order.field.add(name="at", number=6, type=11, type_name=".google.protobuf.Timestamp", label=1)
    order.field.add(name="raw", number=7, type=12, label=1)
    order.oneof_decl.add(name="_note")
    order.field.add(name="note", number=8, type=9, label=1, oneof_index=0, proto3_optional=True)
    return descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString()


def order(**fields: Any) -> bytes:
    files = descriptor_pb2.FileDescriptorSet.FromString(descriptor_set())
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(timestamp_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(files.file[0])
    message = message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Order"))()
    message.id, message.total, message.state, message.raw = 5, 2**63, 1, b"\x00\x01"
    message.lines.add(what="bread")
    message.more["x"] = 0.5
    message.at.seconds, message.at.nanos = 1, 5_000
    for name, value in fields.items():
        setattr(message, name, value)
    return bytes(message.SerializeToString())


EXPECTED = {
    "id": 5,
    "total": Decimal(2**63),
    "state": "PAID",
    "lines": [{"what": "bread"}],
    "more": [("x", 0.5)],
    "at": datetime(1970, 1, 1, 0, 0, 1, 5, tzinfo=UTC),
    "raw": b"\x00\x01",
    "note": None,
}


def test_protobuf_messages_become_columns_in_a_worker() -> None:
    decoder: Decoder = pickle.loads(pickle.dumps(Decoder("protobuf", descriptor_set(), False, "shop.Order")))
    assert decoder.columns == {
        "id": "bigint",
        "total": "decimal(20,0)",
        "state": "string",
        "lines": "array<struct<`what`: string>>",
        "more": "map<string, double>",
        "at": "timestamp",
        "raw": "binary",
        "note": "string",
    }
    rows = decoded(decoder, order(), b"\xff\xff", order(note="!"), None)
    assert rows[0] == {"value": EXPECTED, "reason": None}
    assert rows[1]["value"] is None
    assert rows[1]["reason"]
    assert rows[2]["value"]["note"] == "!"
    assert rows[3]["reason"] == "the value is null"


def test_framed_protobuf_names_its_message_by_its_place_in_the_file() -> None:
    decoder = Decoder("protobuf", descriptor_set(), True, "shop.Order")
    second, first, nested = b"\x02\x02", b"\x00", b"\x04\x02\x00"  # counts and indexes are zigzag varints
    framed = [frame(1, places + order()) for places in (second, first, nested, b"\x02\x08")]
    rows = decoded(decoder, *framed)
    assert rows[0]["value"] == EXPECTED
    assert rows[1]["reason"] == "it is a shop.Refund, not a shop.Order"
    assert rows[2]["reason"] == "it is a shop.Order.Line, not a shop.Order"
    assert rows[3]["reason"] == "the schema has no message at the place [4]"


def test_a_message_that_is_not_in_its_descriptor_set_is_refused_with_the_nearest() -> None:
    with pytest.raises(SchemaError, match=r"did you mean shop\.Order\?"):
        _ = Decoder("protobuf", descriptor_set(), False, "shop.Ordr").columns
    with pytest.raises(SchemaError, match="protoc --include_imports"):
        _ = Decoder("protobuf", b"syntax = 3", False, "shop.Order").columns
