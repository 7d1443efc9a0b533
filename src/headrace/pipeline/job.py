"""The form of a pipeline: what a file says, checked.

Owns the words and the parts; nothing here reads or runs anything. Made by `jobfile`, used by everything that runs a
pipeline.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.pipeline.decode import Decoder

DECODERS = ("json", "csv", "avro", "protobuf", "string", "raw")
BY_SCHEMA = ("json", "csv")
BY_DECODER = ("avro", "protobuf")
FRAMINGS = ("none", "registry")
FILE_FORMATS = ("csv", "json", "parquet", "orc", "text")
OUTPUT_MODES = ("append", "update", "complete")
DELIVERIES = ("exactly_once", "at_least_once")
SINK_KINDS = ("topic", "parquet", "delta", "console")
UNITS = ("millisecond", "second", "minute", "hour", "day", "week")
RECORD_COLUMNS = {
    "key": "binary",
    "value": "binary",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp",
    "timestampType": "int",
}
KEPT = ("key", "topic", "partition", "offset", "timestamp")
DEFAULT_BOOTSTRAP = "127.0.0.1:9092"
DEFAULT_MASTER = "local[*]"
DELTA_CONFIG = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}


@dataclass(frozen=True)
class Decode:
    """How the value of a record becomes columns; `keep` are columns of the record itself that stay beside them."""

    format: str = "raw"
    schema: str | None = None
    framed: bool = False
    decoder: Decoder | None = None
    keep: tuple[str, ...] = ()


@dataclass(frozen=True)
class SourceSpec:
    """Topics, or files to join with."""

    name: str
    line: int
    topic: str | None
    pattern: str | None
    files: str | None
    format: str | None
    schema: str | None
    starting: Mapping[str, str]
    decode: Decode
    watermark: tuple[str, str] | None
    options: Mapping[str, str]

    @property
    def subscription(self) -> dict[str, str]:
        """What the source is told to read; empty for files."""
        if self.topic is not None:
            return {"subscribe": self.topic}
        return {"subscribePattern": self.pattern} if self.pattern is not None else {}


@dataclass(frozen=True)
class Step:
    """A new view made of others: by SQL, by a Python function, or by leaving out what was there before."""

    name: str
    line: int
    sql: str | None
    python: str | None
    dedup: tuple[str, ...]
    sources: tuple[str, ...]


@dataclass(frozen=True)
class SinkSpec:
    """Where a view goes: `kind` is topic, parquet, delta or console, `to` the topic's name or the path."""

    source: str
    line: int
    kind: str
    to: str
    key: str | None
    value: str
    mode: str
    delivery: str
    partition_by: tuple[str, ...]
    options: Mapping[str, str]

    @property
    def label(self) -> str:
        return f"{self.kind} {self.to}".strip()


@dataclass(frozen=True)
class Job:
    """A pipeline file, checked."""

    path: Path
    name: str
    bootstrap: str
    kafka: Mapping[str, str]
    master: str
    config: Mapping[str, str]
    sources: tuple[SourceSpec, ...]
    steps: tuple[Step, ...]
    sinks: tuple[SinkSpec, ...]
    every: str | None
    checkpoint: str
    dead_letters: str | None

    @property
    def client(self) -> dict[str, str]:
        """Kafka's client keys, as the options of a source or sink carry them."""
        return {"kafka.bootstrap.servers": self.bootstrap, **{f"kafka.{k}": v for k, v in self.kafka.items()}}
