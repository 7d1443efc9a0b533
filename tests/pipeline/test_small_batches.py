"""Micro-batches that are read on the driver, as Spark's runner of streaming sources asks for them."""

import asyncio
import pickle
from typing import Any

import pyarrow as pa
import pytest

from headrace.client.admin import Admin
from headrace.client.topics import TopicPartition
from headrace.testing import Broker

pytest.importorskip("pyspark")

from pyspark.sql.streaming.datasource import ReadAllAvailable

from headrace.pipeline.ahead import BYTES_MAX, Ahead, HandsOverRows
from headrace.pipeline.options import OptionError
from headrace.pipeline.source import StreamReader
from tests.pipeline.readers import OpenStream, source, write


def next_batch(reader: Any, start: dict[str, Any] | None = None) -> tuple[Any, Any]:
    start = start or reader.initialOffset()
    return start, reader.latestOffset(start, ReadAllAvailable())


def handed_over(reader: Any, start: Any, end: Any) -> list[bytes] | None:
    """What Spark's runner does after it has sent the tasks: the rows, or None where tasks read them."""
    if not isinstance(reader, HandsOverRows):
        return None
    return [row["value"] for batch in reader.getCache(start, end) for row in batch.to_pylist()]


def test_a_small_batch_is_one_task_with_its_rows(broker: Broker, open_stream: OpenStream) -> None:
    broker.create_topic("small", 3)
    write(broker, "small", [b"%d" % n for n in range(90)])
    reader = open_stream(broker, "small", startingOffsets="earliest")
    start, end = next_batch(reader)
    (task,) = reader.partitions(start, end)
    assert sum(part.size for part in task.value) == 90
    rows = handed_over(reader, start, end)
    assert rows is not None
    assert sorted(map(int, rows)) == list(range(90))
    assert type(reader) is StreamReader, "Spark asks such a reader for its latest offset, and no other"
    assert reader.reportLatestOffset() == end


def test_a_replay_of_a_small_batch_is_cut_the_same(broker: Broker, open_stream: OpenStream) -> None:
    broker.create_topic("again", 2)
    write(broker, "again", [b"%d" % n for n in range(20)])
    reader = open_stream(broker, "again", startingOffsets="earliest")
    start, end = next_batch(reader)
    (task,) = reader.partitions(start, end)
    rows = handed_over(reader, start, end)
    write(broker, "again", [b"later"] * 20)
    restarted = open_stream(broker, "again")
    (replayed,) = restarted.partitions(start, end)
    assert replayed.value == task.value
    assert handed_over(restarted, start, end) == rows


@pytest.mark.parametrize(
    ("options", "tasks"),
    [({"smallBatchRows": "19"}, 2), ({"smallBatchRows": "0"}, 2), ({"minPartitions": "4"}, 4)],
)
def test_larger_batches_and_those_that_should_be_cut_are_read_by_tasks(
    broker: Broker, open_stream: OpenStream, options: dict[str, str], tasks: int
) -> None:
    topic = f"large-{next(iter(options.values()))}"
    broker.create_topic(topic, 2)
    write(broker, topic, [b"%d" % n for n in range(20)])
    reader = open_stream(broker, topic, startingOffsets="earliest", **options)
    start, end = next_batch(reader)
    assert len(reader.partitions(start, end)) == tasks
    assert handed_over(reader, start, end) is None


def test_few_rows_with_many_bytes_are_read_by_tasks(broker: Broker, open_stream: OpenStream) -> None:
    broker.create_topic("heavy", 1)
    size = 500_000
    for _ in range(BYTES_MAX // size + 1):
        write(broker, "heavy", [b"x" * size])
    reader = open_stream(broker, "heavy", startingOffsets="earliest")
    start, end = next_batch(reader)
    (task,) = reader.partitions(start, end)
    assert handed_over(reader, start, end) is None
    read = list(pickle.loads(pickle.dumps(reader)).read(task))
    assert pa.Table.from_batches(read).num_rows == BYTES_MAX // size + 1


def test_a_small_batch_whose_records_are_gone_has_no_task(broker: Broker, open_stream: OpenStream) -> None:
    broker.create_topic("emptied", 1)
    write(broker, "emptied", [b"1", b"2"])
    first = open_stream(broker, "emptied", startingOffsets="earliest")
    start, end = next_batch(first)
    first.stop()

    async def delete() -> None:
        async with Admin({"bootstrap.servers": broker.bootstrap}) as admin:
            await admin.delete_records({TopicPartition("emptied", 0): 2})

    asyncio.run(delete())
    tolerant = open_stream(broker, "emptied", onDataLoss="skip")
    assert list(tolerant.partitions(start, end)) == []
    assert handed_over(tolerant, start, end) is None


def test_rows_of_offsets_that_spark_does_not_ask_for_are_forgotten(
    broker: Broker, open_stream: OpenStream
) -> None:
    broker.create_topic("twice", 1)
    write(broker, "twice", [b"1"])
    reader = open_stream(broker, "twice", startingOffsets="earliest")
    start, end = next_batch(reader)
    write(broker, "twice", [b"2"])
    _, later = next_batch(reader, start)
    reader.partitions(start, end)
    assert handed_over(reader, start, end) == [b"1"]
    reader.partitions(start, later)
    assert handed_over(reader, start, later) == [b"1", b"2"]


def test_a_batch_reader_has_no_small_batches(broker: Broker) -> None:
    with pytest.raises(OptionError, match="smallBatchRows"):
        source(broker, "any", smallBatchRows="5").reader(None)  # type: ignore[arg-type]


def test_a_number_of_small_rows_that_is_none_is_refused(broker: Broker) -> None:
    with pytest.raises(OptionError, match="smallBatchRows"):
        source(broker, "any", smallBatchRows="few").streamReader(None)  # type: ignore[arg-type]


def test_work_that_fails_ahead_is_told_to_whoever_takes_it() -> None:
    ahead: Ahead[int] = Ahead()

    def fail() -> int:
        raise LookupError("gone")

    ahead.begin("a", fail)
    ahead.settle()
    with pytest.raises(LookupError):
        ahead.take("a")
    ahead.begin("b", lambda: 7)
    assert ahead.take("a") is None
    ahead.begin("b", lambda: 8)
    assert ahead.take("b") == 8
    assert ahead.take("b") is None
    ahead.close()
