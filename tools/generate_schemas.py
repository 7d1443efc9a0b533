"""Writes src/headrace/wire/schemas.txt from kio's message classes: one merged description of each Kafka message.

kio has one class for each version of each message. Here the versions of a message become one tree of fields, each
with the versions that have it, so that a handler sees one message whatever the version. Run it after upgrading kio:

    .venv/bin/python tools/generate_schemas.py

A line of the output is `name type first-last [?first-last] [#tag] [=default]`, indented by depth: `[]` is an array of
the struct below it, `{}` that struct itself, `[]int32` an array of a primitive; `?` the versions in which null is
allowed.
"""

import importlib
import types
import typing
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from kio.schema.index import api_key_map, schema_name_map
from kio.static.constants import EntityType

OUTPUT = Path(__file__).resolve().parent.parent / "src" / "headrace" / "wire" / "schemas.txt"
# kio reads some integers as durations and instants; on the wire they are integers, and Kafka's own names end in "Ms".
INTEGERS = {
    "timedelta_i32": "int32",
    "timedelta_i64": "int64",
    "datetime_i64": "int64",
    "error_code": "int16",
}


@dataclass
class Node:
    """One field of a merged message."""

    name: str
    type: str
    tag: int | None
    default: str
    versions: list[int] = field(default_factory=list)
    nullable: list[int] = field(default_factory=list)
    children: list["Node"] = field(default_factory=list)

    @property
    def identity(self) -> tuple[object, ...]:
        return self.name, self.type, self.tag


def describe(cls: type, version: int) -> list[Node]:
    """The fields of one kio class."""
    hints = typing.get_type_hints(cls)
    nodes = []
    for item in fields(cls):
        kind, nullable = hints[item.name], False
        if isinstance(kind, types.UnionType):
            options = [o for o in typing.get_args(kind) if o is not type(None)]
            nullable, kind = len(options) < len(typing.get_args(kind)), options[0]
        array = typing.get_origin(kind) is tuple
        inner = typing.get_args(kind)[0] if array else kind
        primitive = item.metadata.get("kafka_type")
        name = item.name
        if primitive in INTEGERS and primitive != "error_code":
            name += "_ms"
        children: list[Node] = []
        if primitive is None:
            spelled = "[]" if array else "{}"
            children = describe(inner, version)
        else:
            spelled = ("[]" if array else "") + INTEGERS.get(primitive, primitive)
        if spelled == "uuid" or primitive in INTEGERS:
            nullable = (
                False  # kio reads the zero id and the time -1 as None; on the wire they are what they are
            )
        nodes.append(
            Node(
                name,
                spelled,
                item.metadata.get("tag"),
                default_of(item.default, spelled),
                [version],
                [version] if nullable else [],
                children,
            )
        )
    return nodes


def default_of(value: Any, spelled: str) -> str:
    """A default that differs from the type's own zero, as text."""
    if value is None and spelled == "int64":
        return "-1"  # a time that is not known
    if value is MISSING or value is None:
        return "null" if value is None and spelled != "uuid" else ""
    if hasattr(value, "total_seconds"):
        value = round(value.total_seconds() * 1000)
    if hasattr(value, "timestamp"):
        value = round(value.timestamp() * 1000)
    if spelled == "{}" or value in (0, "", False, ()):
        return ""
    return str(int(value)) if spelled.startswith(("int", "uint", "bool")) else str(value)


def merge(into: list[Node], new: list[Node]) -> list[Node]:
    """The fields of one more version put among those of the versions before it, each list keeping its order."""
    merged: list[Node] = []
    rest = list(into)
    for node in new:
        position = next((i for i, old in enumerate(rest) if old.identity == node.identity), None)
        if position is None:
            merged.append(node)
            continue
        merged.extend(rest[:position])
        old = rest[position]
        rest = rest[position + 1 :]
        old.versions += node.versions
        old.nullable += node.nullable
        old.default = node.default
        old.children = merge(old.children, node.children)
        merged.append(old)
    return merged + rest


def span(versions: list[int]) -> str:
    """`first-last` of consecutive versions."""
    assert versions == list(range(versions[0], versions[-1] + 1)), versions
    return f"{versions[0]}-{versions[-1]}"


def write(nodes: list[Node], depth: int, lines: list[str]) -> None:
    for node in nodes:
        parts = [node.name, node.type, span(node.versions)]
        if node.nullable:
            parts.append("?" + span(node.nullable))
        if node.tag is not None:
            parts.append(f"#{node.tag}")
        if node.default:
            parts.append(f"={node.default}")
        lines.append(" " * depth + " ".join(parts))
        write(node.children, depth + 1, lines)


def main() -> None:
    lines: list[str] = []
    for key, name in sorted(api_key_map.items()):
        versions = schema_name_map[name]
        for side in (EntityType.request, EntityType.response):
            tree: list[Node] = []
            flexible = []
            for version in sorted(versions):
                path, _, cls = versions[version][side].partition(":")
                entity = getattr(importlib.import_module(path), cls)
                tree = merge(tree, describe(entity, version))
                flexible += [version] if entity.__flexible__ else []
            first = flexible[0] if flexible else "none"
            lines.append(f"{side.name} {key} {name} {span(sorted(versions))} flexible={first}")
            write(tree, 1, lines)
    OUTPUT.write_text("\n".join(lines) + "\n")
    print(f"{OUTPUT}: {len(lines)} lines")


if __name__ == "__main__":
    main()
