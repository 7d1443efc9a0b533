"""Real Spark on real brokers: what a job sees. `make testspark` runs these; `make test` says why it does not."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headrace.client.arrow import HEADER_TYPE
from headrace.client.arrow_write import ArrowWriter
from headrace.testing import Broker
from tests.pipeline.spark_like import committed_values

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


def write(broker: Broker, topic: str, table: pa.Table) -> None:
    async def run() -> None:
        async with ArrowWriter({"bootstrap.servers": broker.bootstrap}) as writer:
            await writer.send_arrow(topic, table)

    asyncio.run(run())


def values(rows: Iterator[bytes]) -> pa.Table:
    return pa.table({"value": pa.array(list(rows), pa.binary())})


def options(broker: Broker, **more: str) -> dict[str, str]:
    return {"kafka.bootstrap.servers": broker.bootstrap, **more}


def mixed(broker: Broker, topic: str) -> None:
    """Keys and none, headers and none, tombstones."""
    broker.create_topic(topic, 3)
    count = 500
    table = pa.table(
        {
            "key": pa.array([None if n % 5 == 0 else b"k%d" % (n % 17) for n in range(count)], pa.binary()),
            "value": pa.array([None if n % 7 == 0 else b"value %d" % n for n in range(count)], pa.binary()),
            "headers": pa.array(
                [[("h", b"%d" % n), ("n", None)] if n % 3 == 0 else None for n in range(count)], HEADER_TYPE
            ),
        }
    )
    write(broker, topic, table)


def rows_of(spark: Any, form: str, given: dict[str, str]) -> list[Any]:
    return sorted(
        spark.read.format(form).options(**given).load().collect(), key=lambda r: (r.partition, r.offset)
    )


def test_a_topic_is_a_table(spark: Any, broker: Broker) -> None:
    mixed(broker, "table")
    rows = rows_of(spark, "headrace", options(broker, subscribe="table", includeHeaders="true"))
    assert len(rows) == 500
    assert sum(row.value is None for row in rows) == 72
    assert {row.topic for row in rows} == {"table"}
    with pytest.raises(Exception, match="Did you mean 'startingOffsets'"):
        spark.read.format("headrace").options(
            **options(broker, subscribe="table", startingOfsets="x")
        ).load().count()


def test_rows_reach_a_topic_once_over_a_failed_task_and_a_replayed_batch(
    spark: Any, broker: Broker, tmp_path: Path
) -> None:
    from pyspark.sql import functions as F

    broker.create_topic("in", 2)
    broker.create_topic("out", 2)
    count = 900
    write(broker, "in", values(b"%d" % n for n in range(count)))
    failed = str(tmp_path / "failed")

    @F.udf(returnType="string", useArrow=False)
    def fails_once(value: str) -> str:
        from pathlib import Path

        if value == "450" and not Path(failed).exists():
            Path(failed).touch()
            raise RuntimeError("planted")
        return value

    def run() -> list[int]:
        read = spark.readStream.format("headrace").options(
            **options(broker, subscribe="in", startingOffsets="earliest", maxOffsetsPerTrigger="300")
        )
        rows = read.load().select(fails_once(F.col("value").cast("string")).alias("value"))
        query = (
            rows.writeStream.format("headrace")
            .options(**options(broker, topic="out", checkpointLocation=str(tmp_path / "checkpoint")))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return [progress["numInputRows"] for progress in query.recentProgress]

    assert run() == [300, 300, 300]
    assert Path(failed).exists()
    expected = sorted(b"%d" % n for n in range(count))
    assert asyncio.run(committed_values(broker.bootstrap, "out", 2)) == expected
    for note in (tmp_path / "checkpoint" / "commits").glob("*2*"):
        note.unlink()  # the driver died after the batch was written and before Spark had noted it
    run()
    assert asyncio.run(committed_values(broker.bootstrap, "out", 2)) == expected


def test_a_write_in_a_function_of_batches_is_once_over_a_replay_and_needs_a_name_for_a_second(
    spark: Any, broker: Broker, tmp_path: Path
) -> None:
    broker.create_topic("each-in", 2)
    broker.create_topic("each-out", 2)
    count = 600
    write(broker, "each-in", values(b"%d" % n for n in range(count)))
    given = options(broker, topic="each-out", delivery="exactly_once")

    def once(rows: Any, number: int) -> None:
        rows.select("value").write.format("headrace").options(**given).mode("append").save()

    def twice(rows: Any, number: int) -> None:
        once(rows, number)
        once(rows, number)

    def run(each: Any, checkpoint: str) -> None:
        read = spark.readStream.format("headrace").options(
            **options(broker, subscribe="each-in", startingOffsets="earliest", maxOffsetsPerTrigger="300")
        )
        writer = read.load().writeStream.foreachBatch(each).trigger(availableNow=True)
        writer.option("checkpointLocation", str(tmp_path / checkpoint)).start().awaitTermination()

    expected = sorted(b"%d" % n for n in range(count))
    run(once, "once")
    assert asyncio.run(committed_values(broker.bootstrap, "each-out", 2)) == expected
    for note in (tmp_path / "once" / "commits").glob("*1*"):
        note.unlink()
    run(once, "once")
    assert asyncio.run(committed_values(broker.bootstrap, "each-out", 2)) == expected
    with pytest.raises(Exception, match="transactionalIdPrefix"):
        run(twice, "twice")
