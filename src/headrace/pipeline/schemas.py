"""Avro and Protobuf schemas as Arrow types, and Arrow types as Spark writes them.

Owns which type of theirs becomes which of ours. Invariant: a schema that has no such form is refused here, before any
record is read, with the name of the field. Called by `decode` and, to check a file, by `jobfile`.

| Avro | Protobuf | Spark |
|---|---|---|
| boolean, string, bytes, float, double | bool, string, bytes, float, double | the same (bytes: binary) |
| int, long | int32, sint32, sfixed32; int64, sint64, sfixed64 | int, bigint |
| | uint32, fixed32; uint64, fixed64 | bigint; decimal(20,0) |
| enum, uuid; fixed | enum | string; binary |
| date; timestamp-*; local-timestamp-*; decimal | google.protobuf.Timestamp | date; timestamp; timestamp_ntz; decimal |
| time-* | | int or bigint, as stored |
| record, array, map | message, repeated, map | struct, array, map |
| a union with null | a field that may be absent | the other type, null where it is none |
| a union of int and long, of float and double | | bigint, double |
"""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from headrace.pipeline.ddl import SchemaError

UTC_MICROS: Final = pa.timestamp("us", tz="UTC")
DEPTH_MAX: Final = 50

_AVRO: Final = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "string": pa.string(),
    "enum": pa.string(),
    "fixed": pa.binary(),
}
_AVRO_LOGICAL: Final = {
    "date": pa.date32(),
    "timestamp-millis": UTC_MICROS,
    "timestamp-micros": UTC_MICROS,
    "local-timestamp-millis": pa.timestamp("us"),
    "local-timestamp-micros": pa.timestamp("us"),
}
# Read as they are stored: their Python form (UUID, time) has none in Arrow that Spark takes.
_AS_STORED: Final = ("uuid", "time-millis", "time-micros")
_PROTOBUF: Final = {
    1: pa.float64(), 2: pa.float32(), 3: pa.int64(), 4: pa.decimal128(20, 0), 5: pa.int32(), 6: pa.decimal128(20, 0),
    7: pa.int64(), 8: pa.bool_(), 9: pa.string(), 12: pa.binary(), 13: pa.int64(), 14: pa.string(), 15: pa.int32(),
    16: pa.int64(), 17: pa.int32(), 18: pa.int64(),
}  # fmt: skip
_SPARK: Final = {
    pa.bool_(): "boolean",
    pa.int32(): "int",
    pa.int64(): "bigint",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.binary(): "binary",
    pa.string(): "string",
    pa.date32(): "date",
    UTC_MICROS: "timestamp",
    pa.timestamp("us"): "timestamp_ntz",
}


def spark_type(kind: Any) -> str:
    """An Arrow type as Spark writes it."""
    if pa.types.is_struct(kind):
        return f"struct<{', '.join(f'`{field.name}`: {spark_type(field.type)}' for field in kind)}>"
    if pa.types.is_map(kind):
        return f"map<{spark_type(kind.key_type)}, {spark_type(kind.item_type)}>"
    if pa.types.is_list(kind):
        return f"array<{spark_type(kind.value_type)}>"
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    return _SPARK[kind]


# -- Avro --------------------------------------------------------------------------------------------------------------


def parse_avro(text: str) -> Any:
    """An Avro schema, as fastavro wants it and without what is read as stored. Raises SchemaError."""
    try:
        import fastavro
    except ImportError:
        raise SchemaError("Avro needs the package fastavro: pip install 'headrace[avro]'") from None
    try:
        return fastavro.parse_schema(_as_stored(json.loads(text)))
    except ValueError as error:
        raise SchemaError(f"no Avro schema: it is no JSON: {error}") from None
    except Exception as error:
        raise SchemaError(f"no Avro schema: {str(error) or type(error).__name__}") from None


def avro_type(schema: Any) -> Any:
    """The Arrow type of a parsed Avro schema, which must be a record. Raises SchemaError."""
    if not isinstance(schema, Mapping) or schema.get("type") != "record":
        raise SchemaError("the Avro schema is no record, so it gives no columns")
    return _Avro({}).type_of(schema, "", 0)


class _Avro:
    """Names of the types seen so far, since a schema uses them again by name."""

    def __init__(self, named: dict[str, Any]) -> None:
        self._named = named

    def type_of(self, schema: Any, where: str, depth: int) -> Any:
        if depth > DEPTH_MAX:
            raise SchemaError(
                f"field '{where}': types within types, more than {DEPTH_MAX} deep; does one hold itself?"
            )
        if isinstance(schema, list):
            return self._union(schema, where, depth)
        if isinstance(schema, str):
            if schema in self._named:
                return self.type_of(self._named[schema], where, depth + 1)
            if schema not in _AVRO:
                raise SchemaError(f"field '{where}': no Avro type '{schema}'")
            return _AVRO[schema]
        if "name" in schema:
            self._named[schema["name"]] = schema
        kind, logical = schema["type"], schema.get("logicalType")
        if kind == "record":
            fields = [
                pa.field(f["name"], self.type_of(f["type"], _join(where, f["name"]), depth + 1))
                for f in schema["fields"]
            ]
            return pa.struct(fields)
        if kind == "array":
            return pa.list_(self.type_of(schema["items"], where, depth + 1))
        if kind == "map":
            return pa.map_(pa.string(), self.type_of(schema["values"], where, depth + 1))
        if logical == "decimal":
            return pa.decimal128(schema["precision"], schema.get("scale", 0))
        if logical in _AVRO_LOGICAL:
            return _AVRO_LOGICAL[logical]
        return self.type_of(kind, where, depth + 1)

    def _union(self, members: list[Any], where: str, depth: int) -> Any:
        kinds = [self.type_of(member, where, depth + 1) for member in members if member != "null"]
        distinct = {spark_type(kind) for kind in kinds}
        if len(distinct) == 1:
            return kinds[0]
        if distinct == {"int", "bigint"}:
            return pa.int64()
        if distinct == {"float", "double"}:
            return pa.float64()
        raise SchemaError(
            f"field '{where}': a union of {', '.join(sorted(distinct)) or 'nothing'} is no Spark column"
        )


def _as_stored(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_as_stored(member) for member in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {name: _as_stored(value) for name, value in schema.items() if name != "default"}
    if "default" in schema:
        plain["default"] = copy.deepcopy(schema["default"])
    if plain.get("logicalType") in _AS_STORED:
        del plain["logicalType"]
    return plain


def schemas_by_id(directory: Path) -> dict[int, str]:
    """The schemas of a directory: the files `ID.avsc`, as a registry numbered them. Raises SchemaError."""
    if not directory.is_dir():
        raise SchemaError(f"{directory} is no directory of schemas")
    found = {int(path.stem): path.read_text() for path in directory.glob("*.avsc") if path.stem.isdigit()}
    if not found:
        raise SchemaError(f"{directory} holds no schema: name each by its id, as in 7.avsc")
    return found


# -- Protobuf ----------------------------------------------------------------------------------------------------------


def parse_protobuf(data: bytes, message: str) -> tuple[Any, Any]:
    """The class of a message and the descriptor of its file, from a descriptor set. Raises SchemaError."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, timestamp_pb2
    except ImportError:
        raise SchemaError("Protobuf needs the package protobuf: pip install 'headrace[protobuf]'") from None
    from headrace.pipeline.nodes import hint

    files = descriptor_pb2.FileDescriptorSet()
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(timestamp_pb2.DESCRIPTOR.serialized_pb)
    try:
        files.ParseFromString(data)
        for file in files.file:
            if file.name != timestamp_pb2.DESCRIPTOR.name:
                pool.Add(file)
        descriptor = pool.FindMessageTypeByName(message)
    except KeyError:
        names = [f"{file.package}.{m.name}".lstrip(".") for file in files.file for m in file.message_type]
        raise SchemaError(f"no message '{message}' in it: {hint(message, names)}") from None
    except Exception as error:
        raise SchemaError(
            f"no descriptor set of Protobuf ({error}): make one with "
            "'protoc --include_imports --descriptor_set_out=x.desc x.proto'"
        ) from None
    return message_factory.GetMessageClass(descriptor), descriptor.file


def protobuf_type(descriptor: Any, where: str = "", depth: int = 0) -> Any:
    """The Arrow type of a message. Raises SchemaError."""
    if depth > DEPTH_MAX:
        raise SchemaError(
            f"field '{where}': messages within messages, more than {DEPTH_MAX} deep; does one hold itself?"
        )
    if not descriptor.fields:
        raise SchemaError(f"message {descriptor.full_name} has no fields, so it gives no columns")
    fields = []
    for field in descriptor.fields:
        inner = _join(where, field.name)
        if is_map(field):
            entry = field.message_type.fields_by_name
            key, value = (
                _protobuf_one(entry["key"], inner, depth),
                _protobuf_one(entry["value"], inner, depth),
            )
            kind = pa.map_(key, value)
        else:
            kind = _protobuf_one(field, inner, depth)
            kind = pa.list_(kind) if field.is_repeated else kind
        fields.append(pa.field(field.name, kind))
    return pa.struct(fields)


def _protobuf_one(field: Any, where: str, depth: int) -> Any:
    if field.message_type is None:
        return _PROTOBUF[field.type]
    if field.message_type.full_name == "google.protobuf.Timestamp":
        return UTC_MICROS
    return protobuf_type(field.message_type, where, depth + 1)


def is_map(field: Any) -> bool:
    """Whether a field is a map, which Protobuf keeps as repeated entries."""
    return bool(field.message_type is not None and field.message_type.GetOptions().map_entry)


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
