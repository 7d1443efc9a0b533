"""The Spark source's readers as Spark calls them, for tests without a Spark session."""

import asyncio
import json
import pickle
from collections.abc import Callable
from typing import Any

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from headrace.client.arrow_write import ArrowWriter
from headrace.pipeline.ahead import HandsOverRows
from headrace.pipeline.source import SCHEMA
from headrace.testing import Broker
from pyspark_headrace import DefaultSource

OpenStream = Callable[..., Any]


def write(broker: Broker, topic: str, values: list[bytes], **columns: Any) -> None:
    async def run() -> None:
        async with ArrowWriter({"bootstrap.servers": broker.bootstrap}) as writer:
            await writer.send_arrow(topic, pa.table({"value": pa.array(values, pa.binary()), **columns}))

    asyncio.run(run())


def schema_of(text: str) -> StructType:
    """The schema of a few columns; Spark's own reader of such text needs a JVM."""
    headers = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))
    kinds = {"binary": BinaryType(), "string": StringType(), "int": IntegerType(), "bigint": LongType()}
    kinds |= {"timestamp": TimestampType(), "array<struct<key:string,value:binary>>": headers}
    text = text.replace("key: string, value: binary", "key:string,value:binary")
    return StructType(
        [StructField(name, kinds[kind]) for name, kind in (c.split() for c in text.split(", "))]
    )


def source(broker: Broker, topic: str, **options: str) -> DefaultSource:
    return DefaultSource({"kafka.bootstrap.servers": broker.bootstrap, "subscribe": topic, **options})


def batch_rows(broker: Broker, topic: str, schema: str = SCHEMA, **options: str) -> list[dict[str, Any]]:
    reader = source(broker, topic, **options).reader(schema_of(schema))
    parts = reader.partitions()
    reader = pickle.loads(pickle.dumps(reader))  # tasks get it pickled
    return [row for part in parts for batch in reader.read(part) for row in batch.to_pylist()]


def stream_rows(reader: Any, start: dict[str, Any], end: dict[str, Any]) -> list[bytes]:
    task = pickle.loads(pickle.dumps(reader))
    parts = reader.partitions(json.loads(json.dumps(start)), json.loads(json.dumps(end)))
    read = [row["value"] for part in parts for batch in task.read(part) for row in batch.to_pylist()]
    if isinstance(reader, HandsOverRows):
        assert len(parts) == 1
        handed = [row["value"] for batch in reader.getCache(start, end) for row in batch.to_pylist()]
        assert handed == read, "what goes to Spark with the task is what the task reads"
    return read
