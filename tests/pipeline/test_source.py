"""The Spark source's readers, called as Spark calls them, against a real broker and without a Spark session."""

import asyncio

import pyarrow as pa
import pytest

from headrace.client.admin import Admin
from headrace.testing import Broker
from tests.pipeline.spark_like import Query

pytest.importorskip("pyspark")

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from headrace.pipeline.options import OptionError
from headrace.pipeline.source import SCHEMA_WITH_HEADERS, DataLoss
from pyspark_headrace import DefaultSource
from tests.pipeline.readers import OpenStream, batch_rows, schema_of, stream_rows, write


def test_a_batch_reads_every_record_with_the_columns_of_sparks_own_source(broker: Broker) -> None:
    broker.create_topic("batch", 2)
    write(broker, "batch", [b"a", b"b", b"c"], partition=pa.array([0, 1, 1], pa.int32()))
    rows = batch_rows(broker, "batch", SCHEMA_WITH_HEADERS)
    assert [(r["partition"], r["offset"], r["value"]) for r in rows] == [
        (0, 0, b"a"),
        (1, 0, b"b"),
        (1, 1, b"c"),
    ]
    assert all(r["key"] is None and r["headers"] is None and r["timestampType"] == 0 for r in rows)
    assert all(r["topic"] == "batch" and r["timestamp"] is not None for r in rows)


def test_the_schema_given_is_the_columns_read(broker: Broker) -> None:
    broker.create_topic("projected", 1)
    write(broker, "projected", [b"a"])
    assert batch_rows(broker, "projected", "value binary, offset bigint") == [{"value": b"a", "offset": 0}]
    with pytest.raises(OptionError, match="cast it after reading"):
        batch_rows(broker, "projected", "value string")
    with pytest.raises(OptionError, match="not one of"):
        batch_rows(broker, "projected", "colour string")


def test_offsets_by_number_time_and_part_are_respected(broker: Broker) -> None:
    broker.create_topic("bounded", 2)
    times = pa.array([1000, 2000, 3000, 4000], pa.timestamp("ms", tz="UTC"))
    write(
        broker, "bounded", [b"0", b"1", b"2", b"3"], partition=pa.array([0] * 4, pa.int32()), timestamp=times
    )
    write(broker, "bounded", [b"other"], partition=pa.array([1], pa.int32()), timestamp=times[:1])

    def values(**options: str) -> list[bytes]:
        return [row["value"] for row in batch_rows(broker, "bounded", "value binary", **options)]

    assert values(startingOffsets='{"bounded":{"0":2,"1":-2}}') == [b"2", b"3", b"other"]
    assert values(startingOffsets='{"bounded":{"0":3}}') == [b"3", b"other"]
    assert values(endingOffsets='{"bounded":{"0":1,"1":0}}') == [b"0"]
    assert values(startingOffsetsByTimestamp='{"bounded":{"0":2500}}') == [b"2", b"3", b"other"]
    assert values(endingTimestamp="3000") == [b"0", b"1", b"other"]
    with pytest.raises(OptionError, match="No offset matched"):
        values(startingTimestamp="5000")
    assert values(startingTimestamp="5000", startingOffsetsByTimestampStrategy="latest") == []
    with pytest.raises(OptionError, match="not among those subscribed"):
        values(startingOffsets='{"bounded":{"7":0}}')
    assert len(values(minPartitions="3", maxRecordsPerPartition="1")) == 5


def test_topics_are_found_by_assignment_and_pattern(broker: Broker) -> None:
    for name in ("found-1", "found-2"):
        broker.create_topic(name, 2)
        write(broker, name, [name.encode()], partition=pa.array([1], pa.int32()))
    base = {"kafka.bootstrap.servers": broker.bootstrap}
    for options in ({"subscribePattern": "found-.*"}, {"assign": '{"found-1":[1],"found-2":[0,1]}'}):
        reader = DefaultSource({**base, **options}).reader(schema_of("value binary"))
        found = [r["value"] for p in reader.partitions() for b in reader.read(p) for r in b.to_pylist()]
        assert found == [b"found-1", b"found-2"]


def test_records_of_aborted_transactions_are_passed_over_and_nothing_waits_for_them(broker: Broker) -> None:
    broker.create_topic("committed", 1)

    async def story() -> None:
        query = Query(broker.bootstrap, "committed")
        await query.run_batch(0, [[b"yes"]])
        await query.prepare(1, 0, [b"no"])
        await query.restarted().run_batch(1, [[b"also"]])  # which aborts what the run before left

    asyncio.run(story())
    options = {"kafka.isolation.level": "read_committed", "kafkaConsumer.pollTimeoutMs": "20000"}
    assert [r["value"] for r in batch_rows(broker, "committed", **options)] == [b"yes", b"also"]
    assert [r["value"] for r in batch_rows(broker, "committed")] == [b"yes", b"no", b"also"]


def test_a_stream_goes_on_where_it_was_and_takes_no_more_than_its_limit(
    broker: Broker, open_stream: OpenStream
) -> None:
    broker.create_topic("stream", 2)
    write(
        broker,
        "stream",
        [b"%d" % i for i in range(10)],
        partition=pa.array([i % 2 for i in range(10)], pa.int32()),
    )
    reader = open_stream(broker, "stream", startingOffsets="earliest", maxOffsetsPerTrigger="4")
    start = reader.initialOffset()
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMaxRows(4)
    seen: list[bytes] = []
    while (end := reader.latestOffset(start, limit)) != start:
        rows = stream_rows(reader, start, end)
        assert len(rows) == 4 or len(seen) == 8
        assert stream_rows(reader, start, end) == rows, "a replay reads the same"
        seen += rows
        reader.commit(end)
        start = end
    assert sorted(seen) == sorted(b"%d" % i for i in range(10))
    write(broker, "stream", [b"new"])
    assert stream_rows(reader, start, reader.latestOffset(start, ReadAllAvailable())) == [b"new"]


def test_available_now_ends_where_the_topic_ended_when_it_began(
    broker: Broker, open_stream: OpenStream
) -> None:
    broker.create_topic("now", 1)
    write(broker, "now", [b"before"])
    reader = open_stream(broker, "now", startingOffsets="earliest")
    reader.prepareForTriggerAvailableNow()
    start = reader.initialOffset()
    write(broker, "now", [b"after"])
    end = reader.latestOffset(start, ReadAllAvailable())
    assert stream_rows(reader, start, end) == [b"before"]
    assert reader.latestOffset(end, ReadAllAvailable()) == end


def test_a_least_number_of_rows_is_waited_for(broker: Broker, open_stream: OpenStream) -> None:
    broker.create_topic("least", 1)
    options = {"startingOffsets": "earliest", "minOffsetsPerTrigger": "3", "maxTriggerDelay": "1h"}
    reader = open_stream(broker, "least", **options)
    start, limit = reader.initialOffset(), reader.getDefaultReadLimit()
    write(broker, "least", [b"1", b"2"])
    assert reader.latestOffset(start, limit) == start
    write(broker, "least", [b"3"])
    assert len(stream_rows(reader, start, reader.latestOffset(start, limit))) == 3


def test_a_least_number_of_bytes_bounds_a_batch(broker: Broker, open_stream: OpenStream) -> None:
    broker.create_topic("bytes", 1)
    write(broker, "bytes", [b"x" * 100] * 50)
    reader = open_stream(broker, "bytes", startingOffsets="earliest", maxBytesPerTrigger="1500")
    start = reader.initialOffset()
    rows = stream_rows(reader, start, reader.latestOffset(start, reader.getDefaultReadLimit()))
    assert 5 <= len(rows) <= 15


async def recreate(broker: Broker, topic: str) -> None:
    async with Admin({"bootstrap.servers": broker.bootstrap}) as admin:
        await admin.delete_topics([topic])


def test_a_topic_created_anew_is_told_apart(broker: Broker, open_stream: OpenStream) -> None:
    broker.create_topic("anew", 1)
    write(broker, "anew", [b"1", b"2"])
    reader = open_stream(broker, "anew", startingOffsets="earliest")
    end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    asyncio.run(recreate(broker, "anew"))
    broker.create_topic("anew", 1)
    write(broker, "anew", [b"3", b"4", b"5"])
    with pytest.raises(DataLoss, match="created again"):
        open_stream(broker, "anew").latestOffset(end, ReadAllAvailable())
    tolerant = open_stream(broker, "anew", onDataLoss="report")
    assert stream_rows(tolerant, end, tolerant.latestOffset(end, ReadAllAvailable())) == [b"3", b"4", b"5"]


def test_records_that_are_gone_fail_the_query_or_are_passed_over(broker: Broker) -> None:
    broker.create_topic("gone", 1)
    write(broker, "gone", [b"1", b"2"])
    with pytest.raises(DataLoss, match="Offsets 2 to 8 of gone-0 are not there"):
        batch_rows(broker, "gone", endingOffsets='{"gone":{"0":9}}')
    rows = batch_rows(broker, "gone", endingOffsets='{"gone":{"0":9}}', failOnDataLoss="false")
    assert [row["value"] for row in rows] == [b"1", b"2"]


def test_a_checkpoint_of_another_source_is_refused(broker: Broker, open_stream: OpenStream) -> None:
    broker.create_topic("foreign", 1)
    reader = open_stream(broker, "foreign")
    with pytest.raises(OptionError, match="did not write"):
        reader.latestOffset({"foreign": {"0": 5}}, ReadAllAvailable())
