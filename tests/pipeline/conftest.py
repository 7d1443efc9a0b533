"""One broker and, where pyspark and Java are there, one Spark session for the tests of the pipeline."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.testing import Broker

SESSION_CONFIG = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.stopTimeout": "60s",
    "spark.driver.memory": "1g",
    # Sessions of a minute: what the best compiler and collector would give is not earned back.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.log.level": "ERROR",
}


def missing_for_spark() -> str | None:
    """What keeps Spark from running here, in a word for the person who reads the report."""
    try:
        import pyspark  # noqa: F401
    except ImportError:
        return "pyspark is not installed: make testspark installs it"
    if shutil.which("java") is None:
        return "no Java found: install a runtime of version 17 (Debian: apt install openjdk-17-jre-headless)"
    found = subprocess.run(["java", "-version"], capture_output=True, check=False)
    return None if found.returncode == 0 else "java does not run here"


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with Broker() as running:
        yield running


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """The one session of this process."""
    if os.environ.get("HEADRACE_SPARK") != "1":
        pytest.skip("a Spark session takes its time: make testspark runs these")
    missing = missing_for_spark()
    if missing is not None:
        pytest.skip(missing)
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local[2,3]").appName("headrace tests")
    for name, value in SESSION_CONFIG.items():
        builder = builder.config(name, value)
    jars = os.environ.get("HEADRACE_SPARK_KAFKA_JARS")
    if jars:
        builder = builder.config("spark.jars", jars)
    session = builder.getOrCreate()
    yield session
    session.stop()
