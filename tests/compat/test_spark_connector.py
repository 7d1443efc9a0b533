"""Spark's own Kafka connector against this broker: batch and stream, both ways.

It needs its jars, named in HEADRACE_SPARK_KAFKA_JARS; `make testspark` runs it.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pipeline.presence import why_no_spark

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

JOB = """
import sys
from pyspark.sql import SparkSession
bootstrap, jars, folder, first, second = sys.argv[1:]
builder = SparkSession.builder.master("local[2]").config("spark.jars", jars).config("spark.ui.enabled", "false")
spark = builder.config("spark.log.level", "ERROR").config("spark.sql.shuffle.partitions", "2").getOrCreate()
base = {"kafka.bootstrap.servers": bootstrap}
rows = spark.range(500).selectExpr("cast(id % 7 AS string) AS key", "cast(id AS string) AS value")
rows.write.format("kafka").options(**base, topic=first).save()
read = spark.read.format("kafka").options(**base, subscribe=first).load()
assert sorted(int(r.value) for r in read.select("value").collect()) == list(range(500))
stream = spark.readStream.format("kafka").options(**base, subscribe=first, startingOffsets="earliest")
stream = stream.option("maxOffsetsPerTrigger", "200").load().select("key", "value")
write = stream.writeStream.format("kafka").options(**base, topic=second, checkpointLocation=folder)
write.trigger(availableNow=True).start().awaitTermination()
found = spark.read.format("kafka").options(**base, subscribe=second).load()
assert sorted(int(r.value) for r in found.select("value").collect()) == list(range(500))
spark.stop()
"""


def test_sparks_own_connector_reads_and_writes_topics(
    bootstrap: str, make_topic: Callable[..., str], tmp_path: Path
) -> None:
    if (reason := why_no_spark()) is not None:
        pytest.skip(reason)
    jars = os.environ.get("HEADRACE_SPARK_KAFKA_JARS")
    if not jars:
        pytest.skip("no jars of Spark's own connector: name them in HEADRACE_SPARK_KAFKA_JARS")
    done = subprocess.run(
        [sys.executable, "-c", JOB, bootstrap, jars, str(tmp_path), make_topic(2), make_topic(2)],
        env={**os.environ, "PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-4000:]
