"""Confluent's wire framing: a zero byte, the schema's id in four bytes, the data.

Owns the five bytes, and what a registry client must be able to do to fill them in. Invariant: what `frame` wrote,
`unframe` reads; anything else is refused with a reason. Called by `serializers`; a registry client implements
`SchemaIds`.
"""

from struct import Struct
from typing import Protocol

MAGIC = 0
NO_SCHEMA_ID = -1

_HEAD = Struct(">bI")


class SchemaIds(Protocol):
    """What serializers need of a schema registry. Answers are kept by the registry client, so that a call is cheap."""

    def id_of(self, subject: str, kind: str, schema: str) -> int:
        """The id of a schema under a subject, registered if need be; `kind` is AVRO, JSON or PROTOBUF."""
        ...

    def schema_of(self, schema_id: int) -> str:
        """The text of the schema with this id."""
        ...


def frame(schema_id: int, data: bytes) -> bytes:
    """The data with its schema's id before it."""
    return _HEAD.pack(MAGIC, schema_id) + data


def unframe(data: bytes) -> tuple[int, bytes]:
    """The schema's id and the data. Raises ValueError."""
    if len(data) < _HEAD.size:
        raise ValueError(f"{len(data)} bytes are too few for a schema's id")
    magic, schema_id = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise ValueError(f"the first byte is {magic}, not 0: this was not written with a schema registry")
    return schema_id, data[_HEAD.size :]
