"""From a pipeline file to Spark's data frames: sources decoded, steps as views, rows as records.

Owns the meaning of each part of the file in Spark's terms. Invariant: a record that cannot be decoded is never dropped
in silence: it is kept out of the views and, when the file names a topic for dead letters, goes there with its origin
and the reason. Called by `runner`; the same plan serves a stream and a batch (backfill) of the same file.
"""

import importlib
import sys
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.client.framing import MAGIC
from headrace.pipeline.decode import Decoder
from headrace.pipeline.job import BY_DECODER, BY_SCHEMA, Job, SinkSpec, SourceSpec, Step
from headrace.pipeline.spark_errors import first_line

CORRUPT = "_headrace_corrupt"
DECODED = "_headrace_decoded"
REASON = "_headrace_reason"
ORIGIN = ("topic", "partition", "offset", "timestamp")
DOES_NOT_FIT = "the value does not fit the schema"
IS_NULL = "the value is null"
NOT_FRAMED = "the value was not written with a schema registry: its first byte is not 0"
FRAME_BYTES = 5
STREAM_ONLY = ("maxoffsetspertrigger", "minoffsetspertrigger", "maxtriggerdelay", "maxbytespertrigger")


@dataclass(frozen=True)
class Bounds:
    """What of a topic a batch run takes: option values of the source."""

    starting: dict[str, str]
    ending: dict[str, str]


class PlanError(Exception):
    """A part of the file that Spark cannot make sense of; names file, line and part."""


@dataclass(frozen=True)
class Views:
    """Every source and step by name, and the records that could not be decoded, by source."""

    frames: dict[str, DataFrame]
    bad: dict[str, DataFrame]


def build_views(spark: SparkSession, job: Job, bounds: Bounds | None) -> Views:
    """All of a file's views; nothing is read yet. Raises PlanError."""
    views = Views({}, {})
    for source in job.sources:
        try:
            frame = _source(spark, job, source, bounds, views)
        except PlanError:
            raise
        except Exception as error:
            raise PlanError(
                f"{job.path}:{source.line}: source '{source.name}': {first_line(error)}"
            ) from error
        _register(views, source.name, frame)
    for step in job.steps:
        _register(views, step.name, _step(spark, job, step, views, streaming=bounds is None))
    for sink in job.sinks:
        try:
            rows_for(sink, views.frames[sink.source])
        except Exception as error:
            raise PlanError(f"{job.path}:{sink.line}: sink '{sink.label}': {first_line(error)}") from error
    return views


def rows_for(sink: SinkSpec, frame: DataFrame) -> DataFrame:
    """What a sink writes: for a topic, key and value of its records; else the rows as they are."""
    if sink.kind != "topic":
        return frame
    if sink.value == "json":
        value = F.to_json(F.struct(*[F.col(f"`{name}`") for name in frame.columns]))
    else:
        value = F.expr(sink.value)
    columns = [value.alias("value")]
    if sink.key is not None:
        columns.append(F.expr(sink.key).cast("string").alias("key"))
    return frame.select(*columns)


def letters(views: Views) -> DataFrame | None:
    """The records of all sources that could not be decoded, as records with origin and reason in headers."""
    every: DataFrame | None = None
    for bad in views.bad.values():
        headers = [_header(f"headrace.origin.{name}", F.col(name).cast("string")) for name in ORIGIN]
        reason = _header("headrace.reason", F.col(REASON))
        one = bad.select("key", "value", F.array(*headers, reason).alias("headers"))
        every = one if every is None else every.unionByName(one)
    return every


# -- sources -----------------------------------------------------------------------------------------------------------


def _register(views: Views, name: str, frame: DataFrame) -> None:
    views.frames[name] = frame
    frame.createOrReplaceTempView(name)


def _header(name: str, text: Column) -> Column:
    return F.struct(F.lit(name).alias("key"), F.encode(text, "UTF-8").alias("value"))


def _source(
    spark: SparkSession, job: Job, source: SourceSpec, bounds: Bounds | None, views: Views
) -> DataFrame:
    if not source.subscription:
        return _files(spark, job, source)
    raw = _records(spark, job, source, bounds)
    decode = source.decode
    if decode.format == "raw":
        frame = raw
    elif decode.format == "string":
        text = {name: F.col(name).cast("string") for name in ("key", "value")}
        frame = raw.withColumns(text)
    else:
        decoded = _decoded(source, raw)
        views.bad[source.name] = decoded.where(F.col(REASON).isNotNull())
        good = decoded.where(F.col(REASON).isNull())
        names = [name for name in good.schema[DECODED].dataType.fieldNames() if name != CORRUPT]
        columns = [F.col(f"{DECODED}.`{name}`").alias(name) for name in names]
        frame = good.select(*columns, *[F.col(name) for name in decode.keep])
    if source.watermark is not None and bounds is None:
        frame = frame.withWatermark(*source.watermark)
    return frame


def _records(spark: SparkSession, job: Job, source: SourceSpec, bounds: Bounds | None) -> DataFrame:
    reader: Any = spark.readStream if bounds is None else spark.read
    options = {**job.client, **source.subscription}
    if bounds is None:
        options |= {"progressGroup": job.name, **source.starting, **source.options}
    else:
        options |= {name: value for name, value in source.options.items() if name.lower() not in STREAM_ONLY}
        options |= {**bounds.starting, **bounds.ending}
    frame: DataFrame = reader.format("headrace").options(**options).load()
    return frame


def _files(spark: SparkSession, job: Job, source: SourceSpec) -> DataFrame:
    """Files to join with, which lie beside the pipeline file unless a whole path or address is given."""
    reader = spark.read.format(source.format or "parquet")
    if source.schema is not None:
        reader = reader.schema(source.schema)
    if source.format == "csv":
        reader = reader.option("header", "true").option("inferSchema", str(source.schema is None).lower())
    files = source.files or ""
    return reader.load(files if "://" in files else str(job.path.parent.resolve() / files))


def _decoded(source: SourceSpec, raw: DataFrame) -> DataFrame:
    """The records with a struct of their columns and, for those that cannot be decoded, the reason."""
    decode = source.decode
    if decode.format in BY_DECODER:
        decoder = decode.decoder
        assert decoder is not None, "a checked file has a decoder for these formats"
        made = _by(decoder)(F.col("value"))
        both = raw.withColumn(DECODED, made)
        return both.withColumns({DECODED: F.col(f"{DECODED}.value"), REASON: F.col(f"{DECODED}.reason")})
    assert decode.format in BY_SCHEMA, f"nothing decodes {decode.format}"
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": CORRUPT}
    value = F.col("value")
    body = F.expr(f"substring(value, {FRAME_BYTES + 1})") if decode.framed else value
    read = F.from_json if decode.format == "json" else F.from_csv
    decoded = raw.withColumn(
        DECODED, read(body.cast("string"), f"{decode.schema}, {CORRUPT} string", options)
    )
    reason = F.when(value.isNull(), F.lit(IS_NULL))
    if decode.framed:
        framed = F.expr(f"substring(value, 1, 1) = X'{MAGIC:02X}' AND length(value) >= {FRAME_BYTES}")
        reason = reason.when(~framed, F.lit(NOT_FRAMED))
    broken = F.col(f"{DECODED}.{CORRUPT}").isNotNull() | F.col(DECODED).isNull()
    return decoded.withColumn(REASON, reason.when(broken, F.lit(DOES_NOT_FIT)))


def _by(decoder: Decoder) -> Any:
    """A decoder as a function of columns. Spark goes by the annotations to learn that it is one of Arrow arrays."""

    def decode(values: pa.Array) -> pa.Array:
        return decoder.decode(values)

    return F.arrow_udf(decode, returnType=decoder.result)


# -- steps -------------------------------------------------------------------------------------------------------------


def _step(spark: SparkSession, job: Job, step: Step, views: Views, *, streaming: bool) -> DataFrame:
    try:
        if step.sql is not None:
            return spark.sql(step.sql)
        if step.dedup:
            frame, columns = views.frames[step.sources[0]], list(step.dedup)
            watermarked = any(
                source.name == step.sources[0] and source.watermark is not None for source in job.sources
            )
            if streaming and watermarked:
                return frame.dropDuplicatesWithinWatermark(columns)
            return frame.dropDuplicates(columns)
        made = _function(job, step)(*[views.frames[name] for name in step.sources])
    except Exception as error:
        raise PlanError(f"{job.path}:{step.line}: step '{step.name}': {first_line(error)}") from error
    if not isinstance(made, DataFrame) and not hasattr(made, "writeStream"):
        raise PlanError(
            f"{job.path}:{step.line}: step '{step.name}': the function returned {type(made).__name__}, no DataFrame"
        )
    return made


def _function(job: Job, step: Step) -> Any:
    """The function of a step. Its module lies beside the file, where workers cannot import it: they are sent it."""
    module_name, function_name = (step.python or "").split(":", 1)
    folder = str(job.path.parent.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = importlib.import_module(module_name)
    if str(getattr(module, "__file__", "")).startswith(folder):
        from pyspark import cloudpickle

        cloudpickle.register_pickle_by_value(module)
    return getattr(module, function_name)
