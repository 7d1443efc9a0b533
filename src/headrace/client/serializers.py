"""From people's values to bytes and back: bytes, text, integers, JSON, msgpack, Avro, Protobuf, JSON Schema.

Owns the formats. A serializer is a callable `(value, context)` that returns bytes or None, a deserializer the reverse;
None stays None, because it is a tombstone. Invariant: whatever goes wrong inside is a SerializationFailed that names
the topic, the field and the cause. Formats with schemas frame their bytes as Confluent's do (`framing`), with an id
that a registry gives; without a registry the schema is known to both sides and nothing is put before the data. Avro
needs `headrace[avro]`, Protobuf the classes that protoc made and `headrace[protobuf]`. Called by `producer` and
`consumer`.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from headrace.client.errors import SerializationFailed
from headrace.client.framing import NO_SCHEMA_ID, SchemaIds, frame, unframe
from headrace.client.json_schema import check_json


class Context(NamedTuple):
    """What is being written or read."""

    topic: str
    field: Literal["key", "value"]

    @property
    def subject(self) -> str:
        """The name under which a registry keeps the schema of this field."""
        return f"{self.topic}-{self.field}"


Serializer: TypeAlias = Callable[[Any, Context], "bytes | None"]
Deserializer: TypeAlias = Callable[["bytes | None", Context], Any]


class Format(Protocol):
    """A format in both directions."""

    def encode(self, value: Any, context: Context) -> bytes | None: ...
    def decode(self, data: bytes | None, context: Context) -> Any: ...


class String:
    """Text, UTF-8 unless another encoding is named."""

    def __init__(self, encoding: str = "utf-8") -> None:
        self._encoding = encoding

    def encode(self, value: str | None, context: Context) -> bytes | None:
        return None if value is None else value.encode(self._encoding)

    def decode(self, data: bytes | None, context: Context) -> str | None:
        return None if data is None else data.decode(self._encoding)


class Bytes:
    """Bytes as they are."""

    def encode(self, value: Any, context: Context) -> bytes | None:
        if value is None or isinstance(value, bytes):
            return value
        if isinstance(value, bytearray | memoryview):
            return bytes(value)
        raise TypeError(f"expected bytes, got {type(value).__name__}")

    def decode(self, data: bytes | None, context: Context) -> bytes | None:
        return data


class Int:
    """A whole number of 4 or 8 bytes, big-endian, as Java's Integer and Long serializers write it."""

    def __init__(self, size_bytes: Literal[4, 8] = 8) -> None:
        self._size_bytes = size_bytes

    def encode(self, value: int | None, context: Context) -> bytes | None:
        return None if value is None else value.to_bytes(self._size_bytes, "big", signed=True)

    def decode(self, data: bytes | None, context: Context) -> int | None:
        if data is None:
            return None
        if len(data) != self._size_bytes:
            raise ValueError(f"{len(data)} bytes where {self._size_bytes} were expected")
        return int.from_bytes(data, "big", signed=True)


class Json:
    """JSON; with a type (a dataclass, a msgspec Struct, `dict[str, int]` …) values of that type, checked."""

    def __init__(self, kind: Any = Any) -> None:
        import msgspec  # here, as everything that most programs do without: it takes a third of the client's import

        self._encoder = msgspec.json.Encoder()
        self._decoder = msgspec.json.Decoder(kind)

    def encode(self, value: Any, context: Context) -> bytes | None:
        return None if value is None else self._encoder.encode(value)

    def decode(self, data: bytes | None, context: Context) -> Any:
        return None if data is None else self._decoder.decode(data)


class Msgpack:
    """MessagePack, typed as `Json` is."""

    def __init__(self, kind: Any = Any) -> None:
        import msgspec

        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(kind)

    def encode(self, value: Any, context: Context) -> bytes | None:
        return None if value is None else self._encoder.encode(value)

    def decode(self, data: bytes | None, context: Context) -> Any:
        return None if data is None else self._decoder.decode(data)


class JsonSchema:
    """JSON that fits a schema (the keywords that `json_schema` lists), framed when there is a registry."""

    def __init__(self, schema: Mapping[str, Any], registry: SchemaIds | None = None) -> None:
        self._json = Json()
        self._schema = dict(schema)
        self._text = _json_text(self._schema)
        self._registry = registry

    def encode(self, value: Any, context: Context) -> bytes | None:
        if value is None:
            return None
        check_json(self._schema, value)
        data = self._json.encode(value, context)
        assert data is not None
        return _framed(self._registry, context, "JSON", self._text, data)

    def decode(self, data: bytes | None, context: Context) -> Any:
        if data is None:
            return None
        schema_id, body = _unframed(self._registry, data)
        value = self._json.decode(body, context)
        schema = self._schema
        if self._registry is not None and schema_id != NO_SCHEMA_ID:
            schema = _from_json(self._registry.schema_of(schema_id))
        check_json(schema, value)
        return value


class Avro:
    """Avro of one record schema, framed when there is a registry; reads what other versions of the schema wrote."""

    def __init__(self, schema: Mapping[str, Any] | str, registry: SchemaIds | None = None) -> None:
        try:
            import fastavro
        except ImportError:
            raise SerializationFailed(
                "Avro needs the package fastavro", "install it with: pip install 'headrace[avro]'"
            ) from None
        self._avro: Any = fastavro
        self._source = _from_json(schema) if isinstance(schema, str) else dict(schema)
        self._schema = fastavro.parse_schema(self._source)
        self._text = _json_text(self._source)
        self._registry = registry
        self._writers: dict[int, Any] = {}

    def encode(self, value: Any, context: Context) -> bytes | None:
        if value is None:
            return None
        from io import BytesIO

        out = BytesIO()
        self._avro.schemaless_writer(out, self._schema, value)
        return _framed(self._registry, context, "AVRO", self._text, out.getvalue())

    def decode(self, data: bytes | None, context: Context) -> Any:
        if data is None:
            return None
        from io import BytesIO

        schema_id, body = _unframed(self._registry, data)
        source = BytesIO(body)
        value = self._avro.schemaless_reader(source, self._writer(schema_id), self._schema)
        if source.read(1):
            raise ValueError("there are bytes left after the record")
        return value

    def _writer(self, schema_id: int) -> Any:
        if self._registry is None or schema_id == NO_SCHEMA_ID:
            return self._schema
        if schema_id not in self._writers:
            if len(self._writers) >= SCHEMAS_CACHED_MAX:
                self._writers.clear()
            text = self._registry.schema_of(schema_id)
            self._writers[schema_id] = self._avro.parse_schema(_from_json(text))
        return self._writers[schema_id]


class Protobuf:
    """Messages of one class that protoc made, framed (with the message's index) when there is a registry."""

    def __init__(self, message: Any, registry: SchemaIds | None = None, schema: str = "") -> None:
        self._message = message
        self._schema = schema
        self._registry = registry

    def encode(self, value: Any, context: Context) -> bytes | None:
        if value is None:
            return None
        if not isinstance(value, self._message):
            raise TypeError(f"expected {self._message.__name__}, got {type(value).__name__}")
        data = bytes(value.SerializeToString())
        if self._registry is None:
            return data
        # One zero byte stands for "the first message of the file", the only one that is written here.
        return _framed(self._registry, context, "PROTOBUF", self._schema, b"\x00" + data)

    def decode(self, data: bytes | None, context: Context) -> Any:
        if data is None:
            return None
        schema_id, body = _unframed(self._registry, data)
        if schema_id != NO_SCHEMA_ID:
            _, body = message_indexes(body)
        message = self._message()
        message.ParseFromString(body)
        return message


SCHEMAS_CACHED_MAX = 1_000
FORMATS: dict[str, Callable[[], Format]] = {
    "bytes": Bytes,
    "string": String,
    "int": Int,
    "json": Json,
    "msgpack": Msgpack,
}


def serializer_of(chosen: "Format | Serializer | str | None", name: str) -> Serializer | None:
    """A serializer from what the constructor was given: a format, its name, or a callable."""
    found = _format_of(chosen, name)
    encode = getattr(found, "encode", found)
    if encode is None:
        return None

    def serialize(value: Any, context: Context) -> bytes | None:
        try:
            data: bytes | None = encode(value, context)
            return data
        except SerializationFailed:
            raise
        except Exception as error:
            raise SerializationFailed(
                f"the {context.field} of a record for topic {context.topic!r} cannot be written: {error}",
                f"it is {type(value).__name__}; does that fit the {name}?",
            ) from error

    return serialize


def deserializer_of(chosen: "Format | Deserializer | str | None", name: str) -> Deserializer | None:
    """A deserializer from what the constructor was given; errors are the caller's to place."""
    found = _format_of(chosen, name)
    decode: Deserializer | None = getattr(found, "decode", found)
    return decode


def _format_of(chosen: Any, name: str) -> Any:
    if not isinstance(chosen, str):
        return chosen
    if chosen not in FORMATS:
        raise SerializationFailed(
            f"{name}={chosen!r}: no such format", f"the formats are {', '.join(FORMATS)}"
        )
    return FORMATS[chosen]()


def _framed(registry: SchemaIds | None, context: Context, kind: str, schema: str, data: bytes) -> bytes:
    if registry is None:
        return data
    return frame(registry.id_of(context.subject, kind, schema), data)


def _unframed(registry: SchemaIds | None, data: bytes) -> tuple[int, bytes]:
    return (NO_SCHEMA_ID, data) if registry is None else unframe(data)


def message_indexes(body: bytes) -> tuple[list[int], bytes]:
    """The indexes that say which message of its file this is (none: the first), and what follows. Raises ValueError."""
    count, pos = _varint(body, 0)
    indexes = []
    for _ in range(count):
        index, pos = _varint(body, pos)
        indexes.append(index)
    return indexes, body[pos:]


def _varint(data: bytes, pos: int) -> tuple[int, int]:
    raw = shift = 0
    while True:
        if pos >= len(data) or shift > 28:
            raise ValueError("the message's index is cut short")
        raw |= (data[pos] & 0x7F) << shift
        pos += 1
        if not data[pos - 1] & 0x80:
            return (raw >> 1) ^ -(raw & 1), pos
        shift += 7


def _json_text(schema: Any) -> str:
    import json  # only for those who use schemas: it would slow down every client's start

    return json.dumps(schema, sort_keys=True)


def _from_json(text: str) -> Any:
    import json

    return json.loads(text)
