"""Spark's way of writing schemas (`id bigint, tags array<string>`), read without Spark.

Owns the check of such a text. Invariant: what Spark takes is not refused here: a type that is not in the table is, with
the nearest that is. Called by `jobfile` before a JVM is started.
"""

import re
from typing import Final

from headrace.pipeline.nodes import hint

TYPES: Final = (
    "boolean", "tinyint", "byte", "smallint", "short", "int", "integer", "bigint", "long", "float", "real", "double",
    "decimal", "dec", "numeric", "string", "char", "varchar", "binary", "date", "time", "timestamp", "timestamp_ntz",
    "timestamp_ltz", "interval", "variant", "void", "geometry", "geography", "array", "map", "struct",
)  # fmt: skip
_OPEN: Final = "<("
_CLOSE: Final = ">)"


class SchemaError(Exception):
    """The text is no schema; says where and what would be."""


def columns(text: str) -> dict[str, str]:
    """The columns of a schema and their types, in lower case. Raises SchemaError."""
    found: dict[str, str] = {}
    for part in _split(text):
        match = re.fullmatch(r"(`[^`]+`|[^\s:]+)\s*:?\s+(.+)|(`[^`]+`|[^\s:]+):(.+)", part, re.DOTALL)
        if match is None:
            raise SchemaError(f"'{part}' is no column: write a name and a type, as in 'id bigint'")
        name = (match[1] or match[3]).strip("`")
        kind = re.sub(
            r"\s+(not\s+null|comment\s+'.*|default\s+.*)+$", "", (match[2] or match[4]).strip(), flags=re.I
        )
        _check_type(name, kind)
        if name.lower() in {known.lower() for known in found}:
            raise SchemaError(f"column '{name}' is there twice")
        found[name] = kind.lower()
    if not found:
        raise SchemaError("it has no columns")
    return found


def _check_type(column: str, kind: str) -> None:
    word = re.match(r"[a-z_]+", kind.strip().lower())
    name = word[0] if word is not None else kind
    if name not in TYPES:
        raise SchemaError(f"column '{column}': no type '{name}': {hint(name, TYPES)}")
    inner = kind.strip()[len(name) :].strip()
    if name in ("array", "map", "struct"):
        if not (inner.startswith("<") and inner.endswith(">")):
            raise SchemaError(f"column '{column}': {name} wants its types in <>, as in array<string>")
        if name == "struct":
            columns(inner[1:-1])
        else:
            parts = _split(inner[1:-1])
            if len(parts) != (1 if name == "array" else 2):
                raise SchemaError(f"column '{column}': {kind} has {len(parts)} types")
            for part in parts:
                _check_type(column, part)


def _split(text: str) -> list[str]:
    """The parts between commas that are in no brackets."""
    parts, depth, begin = [], 0, 0
    for at, letter in enumerate(text):
        depth += (letter in _OPEN) - (letter in _CLOSE)
        if depth < 0:
            raise SchemaError(f"a '{letter}' too many in '{text.strip()}'")
        if letter == "," and depth == 0:
            parts.append(text[begin:at].strip())
            begin = at + 1
    if depth:
        raise SchemaError(f"a bracket is not closed in '{text.strip()}'")
    parts.append(text[begin:].strip())
    return [part for part in parts if part]
