"""The merged message schemas: which field is in which version of which message. Read from `schemas.txt`, on first
use.

`schemas.txt` is made by tools/generate_schemas.py, which also says how its lines are spelled. Only the messages that
are asked for are turned into objects, so that a broker that serves ten APIs holds the fields of ten APIs.
"""

from functools import cache
from os.path import dirname, join  # pathlib alone would take as long to import as this package
from typing import Literal, NamedTuple, TypeAlias

Side: TypeAlias = Literal["request", "response"]

_SCHEMAS = join(dirname(__file__), "schemas.txt")


class Field(NamedTuple):
    """One field of a message, with the versions that have it."""

    name: str
    type: str
    first: int
    last: int
    nullable: tuple[int, int] | None
    tag: int | None
    default: object
    children: list["Field"]

    def in_version(self, version: int) -> bool:
        return self.first <= version <= self.last

    def nullable_in(self, version: int) -> bool:
        return self.nullable is not None and self.nullable[0] <= version <= self.nullable[1]


class MessageSchema(NamedTuple):
    """One message in all its versions."""

    api: int
    name: str
    side: Side
    first: int
    last: int
    flexible_from: int | None
    fields: list[Field]

    def flexible(self, version: int) -> bool:
        return self.flexible_from is not None and version >= self.flexible_from


@cache
def message_schema(api: int, side: Side) -> MessageSchema:
    """The schema of one side of an API; KeyError when Kafka has no such API."""
    head, body = _blocks()[(api, side)]
    _, _, name, versions, flexible = head.split()
    first, last = _span(versions)
    flexible_from = flexible.removeprefix("flexible=")
    return MessageSchema(
        api, name, side, first, last, None if flexible_from == "none" else int(flexible_from), _parse(body)
    )


@cache
def _blocks() -> dict[tuple[int, Side], tuple[str, list[str]]]:
    blocks: dict[tuple[int, Side], tuple[str, list[str]]] = {}
    body: list[str] = []
    with open(_SCHEMAS) as file:
        text = file.read()
    for line in text.splitlines():
        if line[0] == " ":
            body.append(line)
            continue
        body = []
        side, api, _ = line.split(" ", 2)
        blocks[(int(api), "request" if side == "request" else "response")] = (line, body)
    return blocks


def _parse(lines: list[str]) -> list[Field]:
    root: list[Field] = []
    levels = [root]
    for line in lines:
        depth = len(line) - len(line.lstrip(" "))
        item = _field(line.split())
        del levels[depth:]
        levels[-1].append(item)
        levels.append(item.children)
    return root


def _field(words: list[str]) -> Field:
    name, kind, versions, *marks = words
    first, last = _span(versions)
    nullable: tuple[int, int] | None = None
    tag: int | None = None
    default = zero_value(kind)
    for mark in marks:
        sign, value = mark[0], mark[1:]
        if sign == "?":
            nullable = _span(value)
        elif sign == "#":
            tag = int(value)
        else:
            default = None if value == "null" else _default(kind, value)
    return Field(name, kind, first, last, nullable, tag, default, [])


def _span(text: str) -> tuple[int, int]:
    first, last = text.split("-")
    return int(first), int(last)


def zero_value(kind: str) -> object:
    """What a field of this type holds where the schema names no default."""
    if kind.startswith("[]"):
        return ()
    zeros: dict[str, object] = {
        "string": "",
        "bytes": b"",
        "records": None,
        "uuid": bytes(16),
        "bool": False,
        "float64": 0.0,
    }
    return zeros.get(kind, 0)


def _default(kind: str, value: str) -> object:
    if kind == "bool":
        return value not in ("0", "False")
    return value if kind == "string" else int(value)
