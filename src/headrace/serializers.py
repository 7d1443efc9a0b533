"""Formats of keys and values, to be given to producers and consumers.

from headrace.serializers import Avro, Json

Producer(bootstrap_servers="127.0.0.1:9092", value_serializer=Json(Order))
"""

from headrace.client.framing import SchemaIds
from headrace.client.serializers import (
    Avro,
    Bytes,
    Context,
    Deserializer,
    Format,
    Int,
    Json,
    JsonSchema,
    Msgpack,
    Protobuf,
    Serializer,
    String,
)

__all__ = [
    "Avro",
    "Bytes",
    "Context",
    "Deserializer",
    "Format",
    "Int",
    "Json",
    "JsonSchema",
    "Msgpack",
    "Protobuf",
    "SchemaIds",
    "Serializer",
    "String",
]
