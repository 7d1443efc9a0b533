"""Values of records in Avro and Protobuf as columns, decoded in Spark's Python workers.

Owns the way from bytes to Arrow rows, with or without the framing of a schema registry. Invariant: a value that cannot
be decoded never ends the task: its row has the reason instead, and every other row is as if it were not there. Needs
nothing of Spark; a decoder can be pickled and parses its schema again where it arrives. Called by `plan`, and by
`jobfile` to learn the columns.

JSON and CSV are Spark's own to decode, in the JVM. Avro is not, because Spark keeps that in a jar of its own.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa

from headrace.client.framing import unframe
from headrace.client.serializers import message_indexes
from headrace.pipeline.schemas import avro_type, is_map, parse_avro, parse_protobuf, protobuf_type, spark_type

REASON_CHARACTERS_MAX: Final = 300
NULL_REASON: Final = "the value is null"

Read = Callable[[bytes], Any]


@dataclass
class Decoder:
    """Decodes one field of one source. `writers` are the schemas that framed values may name by their id."""

    format: str
    schema: bytes
    framed: bool
    message: str = ""
    writers: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._read: Read | None = None
        self._type: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_read": None, "_type": None}

    @property
    def type(self) -> Any:
        """The Arrow type of a decoded value. Raises SchemaError."""
        self._prepare()
        return self._type

    @property
    def columns(self) -> dict[str, str]:
        """The columns of a decoded value, as Spark writes their types. Raises SchemaError."""
        return {column.name: spark_type(column.type) for column in self.type}

    @property
    def result(self) -> str:
        """What `decode` returns, as Spark writes it: the value, or why there is none."""
        return f"struct<value: {spark_type(self.type)}, reason: string>"

    def decode(self, values: Any) -> Any:
        """An Arrow array of bytes as one of structs `value, reason`."""
        read = self._prepare()
        rows: list[Any] = []
        reasons: list[str | None] = []
        for value in values.to_pylist():
            row, reason = None, NULL_REASON
            if value is not None:
                row, reason = _tried(read, value)
            rows.append(row)
            reasons.append(reason if row is None else None)
        try:
            decoded = pa.array(rows, self._type)
        except (pa.ArrowException, ValueError, TypeError, OverflowError):
            decoded = self._one_by_one(rows, reasons)
        return pa.StructArray.from_arrays(
            [decoded, pa.array(reasons, pa.string())],
            fields=[pa.field("value", self._type), pa.field("reason", pa.string())],
        )

    def _one_by_one(self, rows: list[Any], reasons: list[str | None]) -> Any:
        """Rows of which at least one has a value that its type cannot hold."""
        for at, row in enumerate(rows):
            try:
                pa.array([row], self._type)
            except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
                rows[at], reasons[at] = None, _said(error)
        return pa.array(rows, self._type)

    def _prepare(self) -> Read:
        if self._read is None:
            self._type, self._read = _avro(self) if self.format == "avro" else _protobuf(self)
        return self._read


def _tried(read: Read, value: bytes) -> tuple[Any, str]:
    try:
        return read(value), ""
    except Exception as error:  # whatever a decoder finds wrong with bytes from outside
        return None, _said(error)


def _said(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, EOFError | IndexError) or type(error).__name__ == "EOFError":
        text = "the value ends in the middle of a field"
    return text[:REASON_CHARACTERS_MAX]


# -- Avro --------------------------------------------------------------------------------------------------------------


def _avro(decoder: Decoder) -> tuple[Any, Read]:
    import fastavro

    reader = parse_avro(decoder.schema.decode())
    writers = {number: parse_avro(text) for number, text in decoder.writers.items()}

    def read(value: bytes) -> Any:
        writer = reader
        if decoder.framed:
            number, value = unframe(value)
            if writers:
                if number not in writers:
                    raise ValueError(f"no schema with the id {number} is known")
                writer = writers[number]
        source = io.BytesIO(value)
        row = fastavro.schemaless_reader(source, writer, reader)
        left = len(value) - source.tell()
        if left:
            raise ValueError(f"{left} bytes are left after the record")
        return row

    return avro_type(reader), read


# -- Protobuf ----------------------------------------------------------------------------------------------------------


def _protobuf(decoder: Decoder) -> tuple[Any, Read]:
    message, file = parse_protobuf(decoder.schema, decoder.message)

    def read(value: bytes) -> Any:
        if decoder.framed:
            _, body = unframe(value)
            indexes, value = message_indexes(body)
            name = _named_by(file, indexes or [0])
            if name != decoder.message:
                raise ValueError(f"it is a {name}, not a {decoder.message}")
        found = message()
        found.ParseFromString(value)
        return _plain(found)

    return protobuf_type(message.DESCRIPTOR), read


def _named_by(file: Any, indexes: list[int]) -> str:
    """The message that a registry's framing means by its place in the file."""
    level = list(file.message_types_by_name.values())
    found = None
    for index in indexes:
        if not 0 <= index < len(level):
            raise ValueError(f"the schema has no message at the place {indexes}")
        found = level[index]
        level = [nested for nested in found.nested_types if not nested.GetOptions().map_entry]
    return str(found.full_name) if found is not None else ""


def _plain(message: Any) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for one in message.DESCRIPTOR.fields:
        value = getattr(message, one.name)
        if is_map(one):
            inner = one.message_type.fields_by_name["value"]
            row[one.name] = [(key, _one(inner, value[key])) for key in value]
        elif one.is_repeated:
            row[one.name] = [_one(one, item) for item in value]
        elif one.has_presence and not message.HasField(one.name):
            row[one.name] = None
        else:
            row[one.name] = _one(one, value)
    return row


def _one(one: Any, value: Any) -> Any:
    if one.message_type is not None:
        if one.message_type.full_name == "google.protobuf.Timestamp":
            return value.seconds * 1_000_000 + value.nanos // 1000
        return _plain(value)
    if one.enum_type is not None:
        found = one.enum_type.values_by_number.get(value)
        return found.name if found is not None else str(value)
    if one.type in (4, 6):
        return Decimal(value)
    return value
