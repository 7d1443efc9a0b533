"""From a pipeline file to Spark's data frames: sources decoded, steps as views, rows as records.

Owns the meaning of each part of the file in Spark's terms. Invariant: a record that cannot be decoded is never dropped
in silence: it is kept out of the views and, when the file names a topic for dead letters, goes there with its origin
and the reason. Called by `runner`; the same plan serves a stream and a batch (backfill) of the same file.
"""

import importlib
import sys
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.pipeline.jobfile import Job, SinkSpec, SourceSpec, Step

CORRUPT = "_headrace_corrupt"
ORIGIN = ("topic", "partition", "offset", "timestamp")
REASON = "the value does not fit the schema"


@dataclass(frozen=True)
class Bounds:
    """What of a topic a batch run takes: option values of the source; None is the file's own."""

    starting: dict[str, str]
    ending: dict[str, str]


class PlanError(Exception):
    """A part of the file that Spark cannot make sense of; names the part."""


def build_views(spark: SparkSession, job: Job, bounds: Bounds | None) -> dict[str, DataFrame]:
    """Every source and step as a view, and the sources' raw records under `name!`. Raises PlanError."""
    views: dict[str, DataFrame] = {}
    for source in job.sources:
        if source.topic is None:
            views[source.name] = _files(spark, source)
        else:
            raw = _records(spark, job, source, bounds)
            views[source.name + "!"] = raw
            views[source.name] = _good(source, raw, streaming=bounds is None)
        views[source.name].createOrReplaceTempView(source.name)
    for step in job.steps:
        views[step.name] = _step(spark, job, step, views)
        views[step.name].createOrReplaceTempView(step.name)
    return views


def rows_for_topic(sink: SinkSpec, frame: DataFrame) -> DataFrame:
    """Key and value of the records that a sink writes."""
    if sink.value == "json":
        value = F.to_json(F.struct(*[F.col(f"`{name}`") for name in frame.columns]))
    else:
        value = F.expr(sink.value)
    columns = [value.alias("value")]
    if sink.key is not None:
        columns.append(F.expr(sink.key).cast("string").alias("key"))
    return frame.select(*columns)


def dead_letters(source: SourceSpec, raw: DataFrame) -> DataFrame | None:
    """The records of a source that cannot be decoded, as records with their origin in headers."""
    if source.decode.format not in ("json", "csv"):
        return None
    bad = _decoded(source, raw).where(F.col(CORRUPT).isNotNull())
    headers = [
        F.struct(
            F.lit(f"headrace.origin.{name}").alias("key"),
            F.encode(F.col(name).cast("string"), "UTF-8").alias("value"),
        )
        for name in ORIGIN
    ]
    reason = F.struct(F.lit("headrace.reason").alias("key"), F.encode(F.lit(REASON), "UTF-8").alias("value"))
    return bad.select("key", "value", F.array(*headers, reason).alias("headers"))


def _records(spark: SparkSession, job: Job, source: SourceSpec, bounds: Bounds | None) -> DataFrame:
    reader: Any = spark.readStream if bounds is None else spark.read
    options = {"kafka.bootstrap.servers": job.bootstrap, "subscribe": source.topic or ""}
    if bounds is None:
        options |= {"startingOffsets": source.starting, **source.options}
    else:
        stream_only = (
            "maxoffsetspertrigger",
            "minoffsetspertrigger",
            "maxtriggerdelay",
            "maxbytespertrigger",
        )
        options |= {name: value for name, value in source.options.items() if name.lower() not in stream_only}
        options |= {**bounds.starting, **bounds.ending}
    frame: DataFrame = reader.format("headrace").options(**options).load()
    return frame


def _files(spark: SparkSession, source: SourceSpec) -> DataFrame:
    reader = spark.read.format(source.format or "parquet")
    if source.schema is not None:
        reader = reader.schema(source.schema)
    if source.format == "csv":
        reader = reader.option("header", "true")
    return reader.load(source.files)


def _decoded(source: SourceSpec, raw: DataFrame) -> DataFrame:
    """The records with a struct `_decoded` and, for what does not fit, its text in `_headrace_corrupt`."""
    schema = f"{source.decode.schema}, {CORRUPT} string"
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": CORRUPT}
    text = F.col("value").cast("string")
    read = F.from_json if source.decode.format == "json" else F.from_csv
    decoded = raw.withColumn("_decoded", read(text, schema, options))
    null_is_bad = F.when(F.col("value").isNull(), F.lit("null")).otherwise(F.col(f"_decoded.{CORRUPT}"))
    return decoded.withColumn(CORRUPT, null_is_bad)


def _good(source: SourceSpec, raw: DataFrame, *, streaming: bool) -> DataFrame:
    if source.decode.format == "raw":
        frame = raw
    elif source.decode.format == "string":
        frame = raw.withColumn("value", F.col("value").cast("string")).withColumn(
            "key", F.col("key").cast("string")
        )
    else:
        decoded = _decoded(source, raw).where(F.col(CORRUPT).isNull())
        names = [name for name in decoded.schema["_decoded"].dataType.fieldNames() if name != CORRUPT]
        frame = decoded.select(*[F.col(f"_decoded.`{name}`").alias(name) for name in names])
    if source.watermark is not None and streaming:
        frame = frame.withWatermark(*source.watermark)
    return frame


def _step(spark: SparkSession, job: Job, step: Step, views: dict[str, DataFrame]) -> DataFrame:
    try:
        if step.sql is not None:
            return spark.sql(step.sql)
        module_name, function_name = (step.python or "").split(":", 1)
        sys.path.insert(0, str(job.path.parent.resolve()))
        function = getattr(importlib.import_module(module_name), function_name)
        made = function(views[step.source or ""])
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise PlanError(f"{job.path}: step '{step.name}': {first}") from error
    if not isinstance(made, DataFrame):
        raise PlanError(
            f"{job.path}: step '{step.name}': the function returned {type(made).__name__}, no DataFrame"
        )
    return made
