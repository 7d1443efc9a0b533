"""One short job on real Spark, wherever pyspark and Java are: table, stream, exactly once, a wrong option.

`make test` runs it; what is more than that is in the tests that `make testspark` runs.
"""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.testing import Broker
from tests.pipeline.presence import why_spark_cannot_run
from tests.pipeline.spark_like import committed_values

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

COUNT = 600

JOB = """
import sys
from pyspark.sql import SparkSession
bootstrap, folder, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
builder = builder.config("spark.log.level", "ERROR").config("spark.driver.memory", "600m")
builder = builder.config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
spark = builder.getOrCreate()
base = {"kafka.bootstrap.servers": bootstrap}
rows = spark.range(0, count, numPartitions=2).selectExpr("cast(id % 7 AS string) AS key", "cast(id AS string) AS value")
rows.write.format("headrace").options(**base, topic="slice-in").mode("append").save()
found = spark.read.format("headrace").options(**base, subscribe="slice-in").load()
assert found.columns == ["key", "value", "topic", "partition", "offset", "timestamp", "timestampType"], found.columns
assert sorted(int(row.value) for row in found.select("value").collect()) == list(range(count))

def stream():
    read = spark.readStream.format("headrace").options(**base, subscribe="slice-in", startingOffsets="earliest")
    write = read.option("maxOffsetsPerTrigger", "400").load().select("key", "value").writeStream.format("headrace")
    write = write.options(**base, topic="slice-out", checkpointLocation=folder)
    query = write.trigger(availableNow=True).start()
    query.awaitTermination()

stream()
rows.selectExpr("key", "concat('again ', value) AS value").write.format("headrace").options(
    **base, topic="slice-in"
).mode("append").save()
stream()
try:
    spark.read.format("headrace").options(**base, subscribe="slice-in", startingOfsets="earliest").load().count()
except Exception as error:
    assert "Did you mean 'startingOffsets'" in str(error), error
else:
    raise AssertionError("a wrong option was taken")
spark.stop()
"""


def test_spark_reads_and_writes_topics_and_copies_one_exactly_once(tmp_path: Path) -> None:
    if (reason := why_spark_cannot_run()) is not None:
        pytest.skip(reason)
    with Broker() as broker:
        for topic in ("slice-in", "slice-out"):
            broker.create_topic(topic, 2)
        done = subprocess.run(
            [sys.executable, "-c", JOB, broker.bootstrap, str(tmp_path / "checkpoint"), str(COUNT)],
            env={**os.environ, "PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable},
            capture_output=True,
            text=True,
            check=False,
            timeout=280,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        copied = asyncio.run(committed_values(broker.bootstrap, "slice-out", 2))
    expected = [b"%d" % n for n in range(COUNT)]
    assert copied == sorted(expected + [b"again " + value for value in expected])
