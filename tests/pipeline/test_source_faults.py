"""What the source says about bad input and lost data, and what it shows of its progress; without a Spark session."""

import asyncio
import importlib
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest

from headrace.base.errors import KafkaError
from headrace.client.admin import Admin
from headrace.client.topics import TopicPartition
from headrace.testing import Broker
from headrace.testing.ports import free_ports

pytest.importorskip("pyspark")

from pyspark.sql.datasource import EqualTo, GreaterThanOrEqual
from pyspark.sql.streaming.datasource import ReadAllAvailable

from headrace.pipeline.options import OptionError
from headrace.pipeline.ranges import OffsetRange
from headrace.pipeline.source import SCHEMA, DataLoss
from pyspark_headrace import DefaultSource
from tests.pipeline.readers import OpenStream, batch_rows, schema_of, source, stream_rows, write


def delete_before(broker: Broker, topic: str, offset: int) -> None:
    async def run() -> None:
        async with Admin({"bootstrap.servers": broker.bootstrap}) as admin:
            assert await admin.delete_records({TopicPartition(topic, 0): offset}) == {
                TopicPartition(topic, 0): offset
            }

    asyncio.run(run())


def delete_topic(broker: Broker, topic: str) -> None:
    async def run() -> None:
        async with Admin({"bootstrap.servers": broker.bootstrap}) as admin:
            await admin.delete_topics([topic])

    asyncio.run(run())


def test_records_deleted_under_a_stream_are_named_to_the_offset(
    broker: Broker, open_stream: OpenStream
) -> None:
    broker.create_topic("aged", 1)
    write(broker, "aged", [b"%d" % n for n in range(10)])
    first = open_stream(broker, "aged", startingOffsets="earliest")
    start = first.initialOffset()
    end = first.latestOffset(start, ReadAllAvailable())
    first.stop()
    delete_before(broker, "aged", 6)
    strict = open_stream(broker, "aged")
    with pytest.raises(DataLoss, match="Offsets 0 to 5 of aged-0 are gone"):
        strict.partitions(start, end)
    for policy in ("skip", "report"):
        tolerant = open_stream(broker, "aged", onDataLoss=policy)
        assert stream_rows(tolerant, start, end) == [b"6", b"7", b"8", b"9"]


def test_a_batch_that_ends_before_it_begins_is_refused(broker: Broker) -> None:
    broker.create_topic("backwards", 1)
    write(broker, "backwards", [b"%d" % n for n in range(10)])
    for first, last, found in ((1000, None, 10), (5, 2, 2)):
        options = {"startingOffsets": f'{{"backwards":{{"0":{first}}}}}'}
        if last is not None:
            options["endingOffsets"] = f'{{"backwards":{{"0":{last}}}}}'
        for policy in ("true", "false"):
            with pytest.raises(
                OptionError, match=f"start offset {first} is greater than the end offset {found}"
            ):
                batch_rows(broker, "backwards", failOnDataLoss=policy, **options)
    delete_before(broker, "backwards", 6)
    with pytest.raises(OptionError, match="start offset 6 is greater than the end offset 4"):
        batch_rows(broker, "backwards", endingOffsets='{"backwards":{"0":4}}')


def test_records_deleted_between_planning_and_reading_are_passed_over_or_fail_the_task(
    broker: Broker,
) -> None:
    broker.create_topic("late", 1)
    write(broker, "late", [b"%d" % n for n in range(10)])
    for options, expected in (({}, None), ({"onDataLoss": "report"}, [b"8", b"9"])):
        reader = source(broker, "late", **options).reader(schema_of("value binary"))
        parts = reader.partitions()
        if expected is None:
            delete_before(broker, "late", 8)
            with pytest.raises(DataLoss, match="Offsets 0 to 7 of late-0 are gone"):
                list(reader.read(parts[0]))
        else:
            parts[0].value = (OffsetRange("late", 0, 0, 10),)
            assert [r["value"] for b in reader.read(parts[0]) for r in b.to_pylist()] == expected


def test_a_topic_that_is_gone_fails_the_stream_and_names_where_it_was(
    broker: Broker, open_stream: OpenStream
) -> None:
    for name in ("stays", "leaves"):
        broker.create_topic(name, 1)
        write(broker, name, [b"1", b"2", b"3"])
    options = {"kafka.bootstrap.servers": broker.bootstrap, "subscribePattern": "stays|leaves"}
    reader = DefaultSource({**options, "startingOffsets": "earliest"}).streamReader(schema_of(SCHEMA))
    end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    delete_topic(broker, "leaves")
    with pytest.raises(DataLoss, match="leaves-0 is gone; the query was at offset 3"):
        reader.latestOffset(end, ReadAllAvailable())
    reader.stop()


def test_a_topic_that_is_not_there_is_said_to_be_missing(broker: Broker) -> None:
    with pytest.raises(KafkaError, match="nowhere"):
        batch_rows(broker, "nowhere", **{"kafka.default.api.timeout.ms": "1000"})


def test_a_broker_that_cannot_be_reached_is_named() -> None:
    (port,) = free_ports(1)
    options = {"subscribe": "t", "kafka.bootstrap.servers": f"127.0.0.1:{port}"}
    reader = DefaultSource({**options, "kafka.default.api.timeout.ms": "500"}).reader(schema_of(SCHEMA))
    with pytest.raises(KafkaError, match=str(port)):
        reader.partitions()


def test_a_stream_bears_a_broker_that_is_killed_between_its_questions(
    tmp_path: Path, open_stream: OpenStream
) -> None:
    with Broker(data_dir=tmp_path) as broker:
        broker.create_topic("borne", 1)
        write(broker, "borne", [b"1", b"2"])
        reader = open_stream(broker, "borne", startingOffsets="earliest")
        start = reader.initialOffset()
        broker.kill()
        back = threading.Timer(0.5, broker.start)
        back.start()
        try:
            reader.prepareForTriggerAvailableNow()
            end = reader.latestOffset(start, ReadAllAvailable())
        finally:
            back.join()
        assert stream_rows(reader, start, end) == [b"1", b"2"]
        reader.stop()


def test_a_task_bears_a_broker_that_is_away_for_longer_than_first_contact_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.client.cluster.FIRST_CONTACT_TIMEOUT_MS", 1)
    with Broker(data_dir=tmp_path) as broker:
        broker.create_topic("away", 1)
        write(broker, "away", [b"1", b"2"])
        reader = source(broker, "away").reader(schema_of("value binary"))
        (part,) = reader.partitions()
        broker.kill()
        back = threading.Timer(0.5, broker.start)
        back.start()
        try:
            assert [r["value"] for b in reader.read(part) for r in b.to_pylist()] == [b"1", b"2"]
        finally:
            back.join()


def test_a_client_setting_that_is_not_known_is_refused_before_anything_is_asked() -> None:
    options = {"subscribe": "t", "kafka.bootstrap.servers": "127.0.0.1:1", "kafka.fetch.max.bites": "1"}
    with pytest.raises(OptionError, match=r"fetch\.max\.bites.*did you mean fetch\.max\.bytes"):
        DefaultSource(options).reader(schema_of(SCHEMA))


def test_filters_are_read_and_left_to_spark(broker: Broker) -> None:
    broker.create_topic("filtered", 2)
    write(broker, "filtered", [b"%d" % n for n in range(4)])
    write(broker, "filtered", [b"%d" % n for n in range(4)])
    reader = source(broker, "filtered", filterPushdown="true").reader(schema_of(SCHEMA))
    filters = [EqualTo(("partition",), 1), GreaterThanOrEqual(("offset",), 3)]
    assert list(reader.pushFilters(filters)) == filters
    assert [p.value for p in reader.partitions()] == [(OffsetRange("filtered", 1, 3, 4),)]


def test_progress_is_seen_where_people_look_for_lag(broker: Broker, open_stream: OpenStream) -> None:
    broker.create_topic("watched", 1)
    write(broker, "watched", [b"%d" % n for n in range(10)])
    reader = open_stream(
        broker, "watched", startingOffsets="earliest", maxOffsetsPerTrigger="4", groupIdPrefix="mine"
    )
    end = reader.latestOffset(reader.initialOffset(), reader.getDefaultReadLimit())
    reader.commit(end)
    reader.stop()  # which waits for what was told

    async def lag() -> dict[TopicPartition, tuple[int, int]]:
        async with Admin({"bootstrap.servers": broker.bootstrap}) as admin:
            found = await admin.group_lag("mine-watched")
            return {where: (entry.committed, entry.lag) for where, entry in found.items()}

    assert asyncio.run(lag()) == {TopicPartition("watched", 0): (4, 6)}


def test_a_checkpoint_tells_topic_id_and_leader_epoch(broker: Broker, open_stream: OpenStream) -> None:
    broker.create_topic("kept", 1)
    write(broker, "kept", [b"1"])
    reader = open_stream(broker, "kept", startingOffsets="earliest")
    end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    topic = end["topics"]["kept"]
    assert topic["offsets"] == {"0": 1}
    assert len(topic["id"]) == 32
    assert topic["epochs"]["0"] >= 0


def test_offsets_of_another_version_are_refused(broker: Broker, open_stream: OpenStream) -> None:
    broker.create_topic("strange", 1)
    with pytest.raises(OptionError, match="did not write"):
        open_stream(broker, "strange").latestOffset({"version": 9, "topics": {}}, ReadAllAvailable())


def test_a_spark_that_is_too_old_is_told_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    import pyspark.sql.datasource as present

    old = ModuleType("pyspark.sql.datasource")
    old.DataSource = present.DataSource  # type: ignore[attr-defined]
    for name in [n for n in sys.modules if n.startswith(("headrace.pipeline", "pyspark_headrace"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyspark.sql.datasource", old)
    monkeypatch.setattr("pyspark.__version__", "4.0.1")
    with pytest.raises(ImportError, match=r"needs pyspark 4\.2 or newer.*4\.0\.1"):
        importlib.import_module("pyspark_headrace")
