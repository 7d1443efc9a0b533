"""A Spark source and sink in Python that do nothing: what Spark itself takes for a micro-batch of such ones.

The source has a few rows at hand whenever it is asked, and the sink throws them away, so no broker has a part in it.
Used by `spark`, beside the time of a batch from topic to topic.
"""

import statistics
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)

ROWS = 200  # about as many as come in a batch at 1 000 a second
SECONDS = 15.0


class FloorReader(DataSourceStreamReader):
    """Always has the same rows."""

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 (Spark's name)
        return {"ms": 0}

    def latestOffset(self) -> dict[str, int]:  # noqa: N802 (Spark's name)
        return {"ms": int(time.monotonic() * 1000)}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        yield pa.RecordBatch.from_arrays([pa.array([b"x" * 20] * ROWS, pa.binary())], names=["value"])


class FloorWriter(DataSourceStreamArrowWriter):
    """Takes rows and does nothing with them."""

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return WriterCommitMessage()


class Floor(DataSource):
    """`format("floor")`."""

    @classmethod
    def name(cls) -> str:
        return "floor"

    def schema(self) -> str:
        return "value binary"

    def streamReader(self, schema: Any) -> DataSourceStreamReader:  # noqa: N802 (Spark's name)
        return FloorReader()

    def streamWriter(self, schema: Any, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802 (Spark's name)
        return FloorWriter()


def batch_ms(progress: list[Any], counted: int) -> float:
    """How long a micro-batch took, at the median of the last ones that had rows."""
    taken = [one.durationMs["triggerExecution"] for one in progress if one.numInputRows]
    return statistics.median(taken[-counted:])


def floor_ms(spark: Any, folder: str, turn: int, counted: int) -> float:
    """The time of a micro-batch in which nothing is done."""
    spark.dataSource.register(Floor)
    rows = spark.readStream.format("floor").load()
    query = rows.writeStream.format("floor").option("checkpointLocation", f"{folder}/floor-{turn}").start()
    try:
        time.sleep(SECONDS)
        return batch_ms(query.recentProgress, counted)
    finally:
        query.stop()
