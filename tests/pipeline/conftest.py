"""One broker and, where pyspark and Java are there, one Spark session for the tests of the pipeline."""

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from headrace.testing import Broker
from tests.pipeline.presence import why_no_spark

if TYPE_CHECKING:
    from tests.pipeline.readers import OpenStream

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


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with Broker() as running:
        yield running


@pytest.fixture(scope="session")
def spark_allowed() -> None:
    """Skips what starts Spark where it cannot run, or where nobody asked for it."""
    if (reason := why_no_spark()) is not None:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def spark(spark_allowed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The one session of this process."""
    from pyspark.sql import SparkSession

    from tests.pipeline.spark_home import spark_home

    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local[2,3]").appName("headrace tests")
    for name, value in SESSION_CONFIG.items():
        builder = builder.config(name, value)
    jars = os.environ.get("HEADRACE_SPARK_KAFKA_JARS")
    if jars:
        builder = builder.config("spark.jars", jars)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_HOME", str(spark_home(tmp_path_factory.mktemp("spark"))))
        session = builder.getOrCreate()
    yield session
    session.stop()


@pytest.fixture
def open_stream() -> Iterator["OpenStream"]:
    """Opens stream readers, and stops them as Spark does."""
    from headrace.pipeline.source import SCHEMA
    from tests.pipeline.readers import schema_of, source

    opened: list[Any] = []

    def open_one(broker: Broker, topic: str, **options: str) -> Any:
        opened.append(source(broker, topic, **options).streamReader(schema_of(SCHEMA)))
        return opened[-1]

    yield open_one
    for reader in opened:
        reader.stop()
