"""Every option of the source against Spark's own connector: the same job on both formats gives the same rows.

Skipped where the connector's jars are not named. `HEADRACE_SPARK_BOOTSTRAP` runs it against other brokers, such as real
Kafka.
"""

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headrace.client.arrow import HEADER_TYPE
from headrace.client.arrow_read import ArrowReader
from headrace.client.arrow_write import ArrowWriter
from headrace.testing import Broker
from headrace.testing.topics import create_topic
from tests.pipeline.spark_like import Query
from tests.testing.waiting import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

FORMATS = ("headrace", "kafka")
COUNT = 300
FIRST_MS = 1_700_000_000_000
STEP_MS = 1_000
COMPACTED = {"cleanup.policy": "compact", "segment.bytes": str(1 << 20), "min.cleanable.dirty.ratio": "0.01"}


@pytest.fixture(scope="module")
def bootstrap(spark: Any) -> Iterator[str]:
    if "spark.jars" not in dict(spark.sparkContext.getConf().getAll()):
        pytest.skip("no jars of Spark's own connector: name them in HEADRACE_SPARK_KAFKA_JARS")
    if foreign := os.environ.get("HEADRACE_SPARK_BOOTSTRAP"):
        yield foreign
        return
    with Broker(settings={"log.cleaner.backoff.ms": "0"}) as broker:
        yield broker.bootstrap


@pytest.fixture(scope="module")
def mixed(bootstrap: str) -> str:
    """Keys and none, headers and none, tombstones, times of their own, three partitions of which one is empty."""
    table = pa.table(
        {
            "key": pa.array([None if n % 5 == 0 else b"k%d" % (n % 17) for n in range(COUNT)], pa.binary()),
            "value": pa.array([None if n % 7 == 0 else b"value %d" % n for n in range(COUNT)], pa.binary()),
            "partition": pa.array([n % 2 for n in range(COUNT)], pa.int32()),
            "timestamp": pa.array(
                [FIRST_MS + n * STEP_MS for n in range(COUNT)], pa.timestamp("ms", tz="UTC")
            ),
            "headers": pa.array(
                [[("h", b"%d" % n), ("n", None)] if n % 3 == 0 else None for n in range(COUNT)], HEADER_TYPE
            ),
        }
    )
    create_topic(bootstrap, "mixed", 3, 1, {})
    write(bootstrap, "mixed", table)
    return "mixed"


def write(bootstrap: str, topic: str, table: pa.Table) -> None:
    async def run() -> None:
        async with ArrowWriter({"bootstrap.servers": bootstrap}) as writer:
            await writer.send_arrow(topic, table)

    asyncio.run(run())


def values(*rows: bytes) -> pa.Table:
    return pa.table({"value": pa.array(rows, pa.binary())})


def batch(spark: Any, bootstrap: str, form: str, **options: str) -> list[Any]:
    given = {"kafka.bootstrap.servers": bootstrap, **options}
    rows: list[Any] = spark.read.format(form).options(**given).load().collect()
    return sorted(rows, key=lambda row: (row.topic, row.partition, row.offset))


def at(n: int) -> int:
    """The time of a row."""
    return FIRST_MS + n * STEP_MS


MIXED = {"subscribe": "mixed"}
BATCHES: dict[str, dict[str, str]] = {
    "subscribe": MIXED,
    "assign": {"assign": '{"mixed":[1,2]}'},
    "subscribePattern": {"subscribePattern": "mix.*"},
    "includeHeaders": {**MIXED, "includeHeaders": "true"},
    "startingOffsets": {**MIXED, "startingOffsets": '{"mixed":{"0":5,"1":-2,"2":-2}}'},
    "endingOffsets": {**MIXED, "endingOffsets": '{"mixed":{"0":50,"1":-1,"2":0}}'},
    "both offsets": {
        **MIXED,
        "startingOffsets": '{"mixed":{"0":9,"1":9,"2":0}}',
        "endingOffsets": '{"mixed":{"0":9,"1":10,"2":0}}',
    },
    "startingTimestamp": {
        **MIXED,
        "startingTimestamp": str(at(100)),
        "startingOffsetsByTimestampStrategy": "latest",
    },
    "startingTimestamp between": {
        "assign": '{"mixed":[0,1]}',
        "startingTimestamp": str(at(100) + 1),
    },
    "startingOffsetsByTimestamp": {
        **MIXED,
        "startingOffsetsByTimestamp": json.dumps({"mixed": {"0": at(20), "1": at(30), "2": 0}}),
        "startingOffsetsByTimestampStrategy": "latest",
    },
    "endingTimestamp": {**MIXED, "endingTimestamp": str(at(200))},
    "endingOffsetsByTimestamp": {
        **MIXED,
        "endingOffsetsByTimestamp": json.dumps({"mixed": {"0": at(20), "1": at(10_000), "2": 0}}),
    },
    "times before offsets": {**MIXED, "endingTimestamp": str(at(50)), "endingOffsets": "latest"},
    "minPartitions": {**MIXED, "minPartitions": "7"},
    "maxRecordsPerPartition": {**MIXED, "maxRecordsPerPartition": "11"},
    "both splits": {**MIXED, "minPartitions": "9", "maxRecordsPerPartition": "50"},
    "read_committed": {**MIXED, "kafka.isolation.level": "read_committed"},
    "group": {**MIXED, "kafka.group.id": "oracle"},
    "groupIdPrefix": {**MIXED, "groupIdPrefix": "oracle-"},
    "fetch sizes": {**MIXED, "kafka.max.partition.fetch.bytes": "500", "kafka.fetch.max.bytes": "900"},
    "failOnDataLoss": {**MIXED, "failOnDataLoss": "false", "endingOffsets": '{"mixed":{"0":50,"1":7,"2":0}}'},
    "retries": {**MIXED, "fetchOffset.numRetries": "2", "fetchOffset.retryIntervalMs": "5"},
    "pollTimeoutMs": {**MIXED, "kafkaConsumer.pollTimeoutMs": "30000"},
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_has_the_rows_of_sparks_own(spark: Any, bootstrap: str, mixed: str, name: str) -> None:
    ours, theirs = (batch(spark, bootstrap, form, **BATCHES[name]) for form in FORMATS)
    assert ours == theirs
    assert (name == "both offsets") == (len(ours) == 1)
    assert ours


@pytest.mark.parametrize(
    ("splits", "differ"),
    [
        ({"minPartitions": "7"}, 0),
        # Spark's own has a task for an empty partition, and counts records only where minPartitions cuts too.
        ({}, -1),
        ({"maxRecordsPerPartition": "11"}, 25),
    ],
)
def test_a_batch_has_the_tasks_of_sparks_own_but_none_for_nothing(
    spark: Any, bootstrap: str, mixed: str, splits: dict[str, str], differ: int
) -> None:
    given = {"kafka.bootstrap.servers": bootstrap, **MIXED, **splits}
    ours, theirs = (
        spark.read.format(form).options(**given).load().rdd.getNumPartitions() for form in FORMATS
    )
    assert ours == theirs + differ


REFUSED: dict[str, dict[str, str]] = {
    "no topic": {},
    "two strategies": {**MIXED, "assign": '{"mixed":[0]}'},
    "start at latest": {**MIXED, "startingOffsets": "latest"},
    "end at earliest": {**MIXED, "endingOffsets": "earliest"},
    "no JSON": {**MIXED, "startingOffsets": "{nonsense"},
    "a partition that is not there": {**MIXED, "startingOffsets": '{"mixed":{"0":0,"1":0,"2":0,"7":0}}'},
    "no record so young": {**MIXED, "startingTimestamp": str(at(COUNT + 1))},
    "a start beyond the end": {**MIXED, "startingOffsets": '{"mixed":{"0":1000000,"1":0,"2":0}}'},
    "an end before the start": {
        **MIXED,
        "startingOffsets": '{"mixed":{"0":9,"1":0,"2":0}}',
        "endingOffsets": '{"mixed":{"0":5,"1":1,"2":0}}',
    },
    "no number": {**MIXED, "minPartitions": "many"},
    "a serializer": {**MIXED, "kafka.key.deserializer": "x"},
    "auto.offset.reset": {**MIXED, "kafka.auto.offset.reset": "latest"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_sparks_own_refuses_is_refused(spark: Any, bootstrap: str, mixed: str, name: str) -> None:
    for form in FORMATS:
        with pytest.raises(Exception, match=r"\w"):
            batch(spark, bootstrap, form, **REFUSED[name])


def test_committed_rows_are_the_same_beside_aborted_ones(spark: Any, bootstrap: str) -> None:
    create_topic(bootstrap, "txn", 1, 1, {})

    async def story() -> None:
        query = Query(bootstrap, "txn")
        await query.run_batch(0, [[b"a", b"b"]])
        await query.prepare(1, 0, [b"never"])
        await query.restarted().run_batch(1, [[b"c"]])  # which aborts what the run before left

    asyncio.run(story())
    for level, expected in (("read_committed", 3), ("read_uncommitted", 4)):
        given = {"subscribe": "txn", "kafka.isolation.level": level}
        ours, theirs = (batch(spark, bootstrap, form, **given) for form in FORMATS)
        assert ours == theirs
        assert len(ours) == expected


def test_a_compacted_topic_with_gaps_is_the_same(spark: Any, bootstrap: str) -> None:
    create_topic(bootstrap, "compacted", 1, 1, COMPACTED)
    count = 4_000
    noise = os.urandom(1_000)
    table = pa.table(
        {
            "key": pa.array([b"%d" % (n % 40) for n in range(count)], pa.binary()),
            "value": pa.array([noise + b"%d" % n for n in range(count)], pa.binary()),
        }
    )
    for first in range(0, count, 500):
        write(bootstrap, "compacted", table.slice(first, 500))

    async def kept() -> int:
        async with ArrowReader({"bootstrap.servers": bootstrap}) as reader:
            return int((await reader.table("compacted", 0, columns=["offset"])).num_rows)

    wait_until(lambda: asyncio.run(kept()) < count, "compaction")

    def both() -> tuple[list[Any], list[Any]]:
        found = [batch(spark, bootstrap, form, subscribe="compacted", minPartitions="5") for form in FORMATS]
        return found[0], found[1]

    def same() -> bool:  # compaction may go on between the two readings
        ours, theirs = both()
        return ours == theirs and 40 <= len(ours) < count

    wait_until(same, "the same rows from both formats")


def test_times_that_the_broker_gave_are_the_same(spark: Any, bootstrap: str) -> None:
    create_topic(bootstrap, "append-time", 1, 1, {"message.timestamp.type": "LogAppendTime"})
    write(bootstrap, "append-time", values(b"a", b"b"))
    ours, theirs = (batch(spark, bootstrap, form, subscribe="append-time") for form in FORMATS)
    assert ours == theirs
    assert [row.timestampType for row in ours] == [1, 1]


def streamed(
    spark: Any, bootstrap: str, form: str, checkpoint: Path, **options: str
) -> tuple[list[Any], list[int]]:
    """One run of a query until it has caught up: its rows and the sizes of its batches."""
    rows: list[Any] = []
    given = {"kafka.bootstrap.servers": bootstrap, **options}
    query = (
        spark.readStream.format(form)
        .options(**given)
        .load()
        .writeStream.foreachBatch(lambda frame, _: rows.extend(frame.collect()))
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    sizes = [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]]
    return sorted(rows, key=lambda row: (row.topic, row.partition, row.offset)), sizes


STREAMS: dict[str, dict[str, str]] = {
    "earliest": {"startingOffsets": "earliest"},
    "maxOffsetsPerTrigger": {"startingOffsets": "earliest", "maxOffsetsPerTrigger": "7"},
    "minOffsetsPerTrigger": {
        "startingOffsets": "earliest",
        "minOffsetsPerTrigger": "3",
        "maxOffsetsPerTrigger": "9",
        "maxTriggerDelay": "1ms",
    },
    "offsets": {"startingOffsets": '{"%s":{"0":3,"1":-2}}', "maxOffsetsPerTrigger": "5"},
    "headers": {"startingOffsets": "earliest", "includeHeaders": "true"},
    "timestamp": {"startingTimestamp": "0"},
    "latest": {},
    "read_committed": {"startingOffsets": "earliest", "kafka.isolation.level": "read_committed"},
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_has_the_batches_of_sparks_own_also_when_it_is_started_again(
    spark: Any, bootstrap: str, tmp_path: Path, name: str
) -> None:
    topic = f"stream-{name}"
    options = {key: value.replace("%s", topic) for key, value in STREAMS[name].items()}
    create_topic(bootstrap, topic, 2, 1, {})

    def more(first: int, count: int) -> None:
        table = values(*(b"%d" % n for n in range(first, first + count)))
        write(
            bootstrap,
            topic,
            table.append_column("partition", pa.array([n % 2 for n in range(count)], pa.int32())),
        )

    def both() -> list[tuple[list[Any], list[int]]]:
        return [
            streamed(spark, bootstrap, form, tmp_path / form, subscribe=topic, **options) for form in FORMATS
        ]

    more(0, 24)
    seen = 0
    for _ in range(2):
        ours, theirs = both()
        assert ours == theirs
        seen += len(ours[0])
        more(24, 10)
    assert seen == {"offsets": 31, "latest": 10}.get(name, 34)
