"""Spark reading and writing topics: `headrace` beside Spark's own `kafka` format, same session, same broker, same rows.

    HEADRACE_SPARK_KAFKA_JARS=a.jar,b.jar .venv/bin/python -m benchmarks.spark [rows]

The jars are those of Spark's own connector; without them only `headrace` is measured. Each job runs once to warm up,
then three times; the median counts.
"""

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from headrace.client.arrow_write import ArrowWriter
from headrace.testing import Broker

ROWS = 2_000_000
CHUNK = 100_000
RUNS = 3
JSON_SCHEMA = "id bigint, customer string, amount double, note string"


async def fill(bootstrap: str, topic: str, rows: int, value: Callable[[int], bytes]) -> None:
    table = pa.table({"value": pa.array([value(n) for n in range(CHUNK)], pa.binary())})
    async with ArrowWriter({"bootstrap.servers": bootstrap}) as writer:
        for _ in range(rows // CHUNK):
            await writer.send_arrow(topic, table)


def plain(number: int) -> bytes:
    return b"%0100d" % number


def order(number: int) -> bytes:
    made = {"id": number, "customer": f"c{number % 1000}", "amount": number / 7, "note": "x" * 20}
    return json.dumps(made).encode()


def measure(rows: int, job: Callable[[], None]) -> float:
    job()
    taken = []
    for _ in range(RUNS):
        started_s = time.monotonic()
        job()
        taken.append(time.monotonic() - started_s)
    return rows / statistics.median(taken)


def main() -> None:
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F

    rows = int(sys.argv[1]) if len(sys.argv) > 1 else ROWS
    os.environ["PYSPARK_PYTHON"] = sys.executable
    jars = os.environ.get("HEADRACE_SPARK_KAFKA_JARS")
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.ui.showConsoleProgress", "false").config("spark.log.level", "ERROR")
    spark = (builder.config("spark.jars", jars) if jars else builder).getOrCreate()
    forms = ["headrace", "kafka"] if jars else ["headrace"]
    with tempfile.TemporaryDirectory() as folder, Broker(data_dir=folder) as broker:
        for topic in ("plain", "json", "out"):
            broker.create_topic(topic, 2)
        asyncio.run(fill(broker.bootstrap, "plain", rows, plain))
        asyncio.run(fill(broker.bootstrap, "json", rows, order))
        base = {"kafka.bootstrap.servers": broker.bootstrap}

        def table(form: str, topic: str) -> Any:
            return spark.read.format(form).options(**base, subscribe=topic).load()

        def count(form: str) -> None:
            table(form, "plain").agg(F.count("*"), F.sum(F.length("value"))).collect()

        def parse(form: str) -> None:
            parsed = table(form, "json").select(
                F.from_json(F.col("value").cast("string"), JSON_SCHEMA).alias("r")
            )
            parsed.agg(F.count("r.id"), F.sum("r.amount")).collect()

        written = spark.range(0, rows // 2, numPartitions=2).selectExpr(
            "lpad(cast(id AS string), 100, '0') AS value"
        )

        def write(form: str, **options: str) -> None:
            written.write.format(form).options(**base, topic="out", **options).mode("append").save()

        jobs: list[tuple[str, str, int, Callable[[], None]]] = []
        for form in forms:
            jobs.append(("read", form, rows, lambda form=form: count(form)))  # type: ignore[misc]
            jobs.append(("read and parse JSON", form, rows, lambda form=form: parse(form)))  # type: ignore[misc]
            jobs.append(("write at least once", form, rows // 2, lambda form=form: write(form)))  # type: ignore[misc]
        jobs.append(
            ("write exactly once", "headrace", rows // 2, lambda: write("headrace", delivery="exactly_once"))
        )
        for what, form, size, job in jobs:
            print(
                json.dumps({"job": what, "format": form, "rows_per_s": round(measure(size, job))}), flush=True
            )
    spark.stop()


if __name__ == "__main__":
    main()
