"""Messages of every API and version, from bytes to values and back, driven by the merged schemas.

A decoded `Message` has every field that any version of it has: those absent from the version on the wire hold the
schema's default. A body to encode is a plain mapping: what the version lacks is left out, what the mapping lacks
takes its default, and a key that no version knows is a bug and raises. Codecs are made on first use of an API and
version and kept. Produce and Fetch, the hot paths, have codecs of their own beside this one.
"""

from collections.abc import Callable, Mapping
from functools import cache
from struct import Struct
from struct import error as StructError
from typing import Any, TypeAlias

from headrace.wire.primitives import (
    Budget,
    Buffer,
    Malformed,
    Reader,
    Writer,
    length_reader,
    length_writer,
    read_uvarint,
    take,
    text,
    write_uvarint,
)
from headrace.wire.schema import Field, MessageSchema, Side, message_schema, zero_value

StructReader: TypeAlias = Callable[[Buffer, int, Budget], tuple["Message", int]]
StructWriter: TypeAlias = Callable[[bytearray, Mapping[str, Any]], None]

SPLICED_BYTES_MIN = 4096  # below this a copy costs less than another part

FIXED = {
    "bool": "?",
    "int8": "b",
    "int16": "h",
    "int32": "i",
    "int64": "q",
    "uint8": "B",
    "uint16": "H",
    "uint32": "I",
    "float64": "d",
    "uuid": "16s",
}


class Message:
    """A decoded message or a struct inside one: its fields are attributes."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"no version of this message has a field {name!r}; it has {sorted(self.__dict__)}"
        )

    def __repr__(self) -> str:
        return f"Message({self.__dict__!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Message) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]


def decode_request(api: int, version: int, buf: Buffer, pos: int = 0) -> Message:
    """The body of a request that begins at `pos`. Raises Malformed."""
    return _decode(api, "request", version, buf, pos)


def decode_response(api: int, version: int, buf: Buffer, pos: int = 0) -> Message:
    """The body of a response that begins at `pos`. Raises Malformed."""
    return _decode(api, "response", version, buf, pos)


def encode_request(api: int, version: int, body: Mapping[str, Any]) -> bytes:
    """The bytes of a request's body."""
    return _encode(api, "request", version, body)


def encode_request_parts(api: int, version: int, body: Mapping[str, Any]) -> list[Buffer]:
    """The bytes of a request's body in parts, in which large record sets are what was given, not copies of it."""
    out = _Parts()
    _message_writer(api, "request", version)(out, body)
    return out.parts()


def encode_response(api: int, version: int, body: Mapping[str, Any]) -> bytes:
    """The bytes of a response's body."""
    return _encode(api, "response", version, body)


class _Parts(bytearray):
    """What is written, without the record sets that belong between its bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.between: list[tuple[int, Buffer]] = []

    def splice(self, raw: Buffer) -> None:
        """Let these bytes follow what is written so far."""
        self.between.append((len(self), raw))

    def parts(self) -> list[Buffer]:
        """All of it, in order."""
        out: list[Buffer] = []
        begin = 0
        for end, raw in self.between:
            out += (bytes(self[begin:end]), raw)
            begin = end
        return [*out, bytes(self[begin:])]


def _decode(api: int, side: Side, version: int, buf: Buffer, pos: int) -> Message:
    try:
        message, _ = _message_reader(api, side, version)(buf, pos, Budget())
    except StructError:
        raise Malformed("message cut short") from None
    return message


def _encode(api: int, side: Side, version: int, body: Mapping[str, Any]) -> bytes:
    out = bytearray()
    _message_writer(api, side, version)(out, body)
    return bytes(out)


@cache
def _message_reader(api: int, side: Side, version: int) -> StructReader:
    schema = _checked(api, side, version)
    return struct_reader(schema.fields, version, schema.flexible(version))


@cache
def _message_writer(api: int, side: Side, version: int) -> StructWriter:
    schema = _checked(api, side, version)
    return struct_writer(schema.fields, version, schema.flexible(version))


def _checked(api: int, side: Side, version: int) -> MessageSchema:
    schema = message_schema(api, side)
    assert schema.first <= version <= schema.last, f"{schema.name} has no version {version}"
    return schema


def struct_reader(fields: list[Field], version: int, flexible: bool) -> StructReader:
    """A reader of one struct: fixed-width neighbours are unpacked together."""
    absent = absent_fields(fields)
    steps: list[tuple[Struct | None, Any]] = []
    tagged: dict[int, tuple[str, Reader]] = {}
    run: list[Field] = []

    def close_run() -> None:
        if run:
            steps.append((Struct(">" + "".join(FIXED[f.type] for f in run)), tuple(f.name for f in run)))
            run.clear()

    for item in fields:
        if not item.in_version(version):
            continue
        if item.tag is not None and flexible:
            tagged[item.tag] = (item.name, _field_reader(item, version, flexible))
        elif item.type in FIXED:
            run.append(item)
        else:
            close_run()
            steps.append((None, (item.name, _field_reader(item, version, flexible))))
    close_run()

    def read(buf: Buffer, pos: int, budget: Budget) -> tuple[Message, int]:
        values = absent.copy()
        for fixed, step in steps:
            if fixed is not None:
                values.update(zip(step, fixed.unpack_from(buf, pos)))
                pos += fixed.size
            else:
                values[step[0]], pos = step[1](buf, pos, budget)
        if flexible:
            count, pos = read_uvarint(buf, pos)
            for _ in range(count):
                tag, pos = read_uvarint(buf, pos)
                size, pos = read_uvarint(buf, pos)
                if pos + size > len(buf):
                    raise Malformed("tagged field longer than its message")
                if known := tagged.get(tag):
                    values[known[0]], _ = known[1](buf, pos, budget)
                pos += size
        message = Message()
        message.__dict__ = values
        return message, pos

    return read


def absent_fields(fields: list[Field]) -> dict[str, Any]:
    """Every field of a struct with what it holds where its message does not carry it."""
    return {item.name: _absent(item) for item in fields}


def _absent(item: Field) -> Any:
    """What a message holds for a field that its version does not carry."""
    if item.type == "{}":
        if item.default is None:
            return None
        inner = Message()
        inner.__dict__ = absent_fields(item.children)
        return inner
    return item.default


def _field_reader(item: Field, version: int, flexible: bool) -> Reader:
    kind, nullable = item.type, item.nullable_in(version)
    if kind == "[]":
        element = struct_reader(item.children, version, flexible)
        return _array_reader(
            item.name, element, _size_min(item.children, version, flexible), nullable, flexible
        )
    if kind.startswith("[]"):
        inner = _primitive_reader(item.name, kind[2:], False, flexible)
        return _array_reader(item.name, inner, _primitive_size_min(kind[2:], flexible), nullable, flexible)
    if kind == "{}":
        struct = struct_reader(item.children, version, flexible)
        return _nullable_struct_reader(struct) if nullable else struct
    return _primitive_reader(item.name, kind, nullable, flexible)


def _nullable_struct_reader(struct: StructReader) -> Reader:
    def read(buf: Buffer, pos: int, budget: Budget) -> tuple[Message | None, int]:
        if pos >= len(buf):
            raise Malformed("struct cut short")
        if buf[pos] == 0xFF:
            return None, pos + 1
        return struct(buf, pos + 1, budget)

    return read


def _array_reader(name: str, element: Reader, size_min: int, nullable: bool, flexible: bool) -> Reader:
    read_length = length_reader(flexible, wide=True)

    def read(buf: Buffer, pos: int, budget: Budget) -> tuple[list[Any] | None, int]:
        count, pos = read_length(buf, pos, budget)
        if count < 0:
            if nullable and count == -1:
                return None, pos
            raise Malformed(f"{name} may not be null")
        budget.spend(count, size_min, len(buf) - pos)
        items = []
        for _ in range(count):
            item, pos = element(buf, pos, budget)
            items.append(item)
        return items, pos

    return read


def _primitive_reader(name: str, kind: str, nullable: bool, flexible: bool) -> Reader:
    if kind in FIXED:
        fixed = Struct(">" + FIXED[kind])

        def read_fixed(buf: Buffer, pos: int, budget: Budget) -> tuple[Any, int]:
            return fixed.unpack_from(buf, pos)[0], pos + fixed.size

        return read_fixed
    read_length = length_reader(flexible, wide=kind != "string")
    convert: Callable[[Buffer], Any] = text if kind == "string" else lambda raw: raw

    def read(buf: Buffer, pos: int, budget: Budget) -> tuple[Any, int]:
        length, pos = read_length(buf, pos, budget)
        if length < 0:
            if nullable and length == -1:
                return None, pos
            raise Malformed(f"{name} may not be null")
        raw, pos = take(buf, pos, length)
        return convert(raw), pos

    return read


def _primitive_size_min(kind: str, flexible: bool) -> int:
    if kind in FIXED:
        return Struct(">" + FIXED[kind]).size
    return 1 if flexible else 2 if kind == "string" else 4


def _size_min(fields: list[Field], version: int, flexible: bool) -> int:
    """The fewest bytes a struct takes: what bounds the length of an array of it."""
    total = 1 if flexible else 0
    for item in fields:
        if not item.in_version(version) or (item.tag is not None and flexible):
            continue
        if item.type.startswith("[]"):
            total += 1 if flexible else 4
        elif item.type == "{}":
            total += 1 if item.nullable_in(version) else _size_min(item.children, version, flexible)
        else:
            total += _primitive_size_min(item.type, flexible)
    return max(total, 1)


def struct_writer(fields: list[Field], version: int, flexible: bool) -> StructWriter:
    """A writer of one struct from a mapping."""
    known = frozenset(f.name for f in fields)
    steps: list[tuple[str, Any, Writer]] = []
    tagged: list[tuple[int, str, Any, Writer]] = []
    for item in fields:
        if not item.in_version(version):
            continue
        writer = _field_writer(item, version, flexible)
        if item.tag is not None and flexible:
            tagged.append((item.tag, item.name, item.default, writer))
        else:
            steps.append((item.name, _fallback(item, version), writer))
    tagged.sort(key=lambda entry: entry[0])

    def write(out: bytearray, body: Mapping[str, Any]) -> None:
        if not known.issuperset(body):
            raise TypeError(f"no version of this message has the fields {sorted(set(body) - known)}")
        for name, default, writer in steps:
            writer(out, body.get(name, default))
        if flexible:
            _write_tags(out, body, tagged)

    return write


def _fallback(item: Field, version: int) -> Any:
    if item.type == "{}":
        return None if item.nullable_in(version) else {}
    if item.default is None and not item.nullable_in(version):
        return zero_value(item.type)  # the default came with the versions that allow null
    return item.default


def _write_tags(out: bytearray, body: Mapping[str, Any], tagged: list[tuple[int, str, Any, Writer]]) -> None:
    present = [
        (tag, body[name], writer)
        for tag, name, default, writer in tagged
        if name in body and body[name] != default and body[name] != []
    ]
    write_uvarint(out, len(present))
    for tag, value, writer in present:
        section = bytearray()
        writer(section, value)
        write_uvarint(out, tag)
        write_uvarint(out, len(section))
        out += section


def _field_writer(item: Field, version: int, flexible: bool) -> Writer:
    kind, nullable = item.type, item.nullable_in(version)
    if kind == "[]":
        return _array_writer(item.name, struct_writer(item.children, version, flexible), nullable, flexible)
    if kind.startswith("[]"):
        inner = _primitive_writer(item.name, kind[2:], False, flexible)
        return _array_writer(item.name, inner, nullable, flexible)
    if kind == "{}":
        struct = struct_writer(item.children, version, flexible)
        return _nullable_struct_writer(struct) if nullable else struct
    return _primitive_writer(item.name, kind, nullable, flexible)


def _nullable_struct_writer(struct: StructWriter) -> Writer:
    def write(out: bytearray, value: Mapping[str, Any] | None) -> None:
        if value is None:
            out.append(0xFF)
            return
        out.append(1)
        struct(out, value)

    return write


def _array_writer(name: str, element: Writer, nullable: bool, flexible: bool) -> Writer:
    write_length = length_writer(flexible, wide=True)

    def write(out: bytearray, value: Any) -> None:
        if value is None:
            if not nullable:
                raise TypeError(f"{name} may not be null in this version")
            write_length(out, -1)
            return
        write_length(out, len(value))
        for item in value:
            element(out, item)

    return write


def _primitive_writer(name: str, kind: str, nullable: bool, flexible: bool) -> Writer:
    if kind in FIXED:
        pack = Struct(">" + FIXED[kind]).pack

        def write_fixed(out: bytearray, value: Any) -> None:
            out += pack(value)

        return write_fixed
    write_length = length_writer(flexible, wide=kind != "string")

    def write(out: bytearray, value: Any) -> None:
        if value is None:
            if not nullable:
                raise TypeError(f"{name} may not be null in this version")
            write_length(out, -1)
            return
        raw = value.encode() if kind == "string" else value
        write_length(out, len(raw))
        if len(raw) >= SPLICED_BYTES_MIN and isinstance(out, _Parts):
            out.splice(raw)
        else:
            out += raw

    return write


__all__ = [
    "SPLICED_BYTES_MIN",
    "Malformed",
    "Message",
    "absent_fields",
    "decode_request",
    "decode_response",
    "encode_request",
    "encode_request_parts",
    "encode_response",
]
