"""Arrow tables to topics and back, through real brokers."""

import asyncio
import threading
from collections.abc import Iterator

import pyarrow as pa
import pytest

from headrace.base.errors import ErrorCode, KafkaError
from headrace.client.arrow import COLUMN_TYPES, HEADER_TYPE
from headrace.client.arrow_read import READING_THREAD, ArrowReader, OffsetsGone, read_range
from headrace.client.arrow_write import ArrowWriter
from headrace.client.errors import ClientError
from headrace.testing import Broker

ROWS = 5_000


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with Broker() as running:
        yield running


def table(rows: int = ROWS) -> pa.Table:
    return pa.table(
        {
            "key": pa.array([None if i % 7 == 0 else b"k%d" % (i % 50) for i in range(rows)], pa.binary()),
            "value": pa.array([None if i % 11 == 0 else b"value %d" % i for i in range(rows)], pa.binary()),
            "headers": pa.array(
                [[("a", b"1"), ("ü", None)] if i % 3 == 0 else None for i in range(rows)], HEADER_TYPE
            ),
            "timestamp": pa.array([1_700_000_000_000_000 + i * 1000 for i in range(rows)]).cast(
                COLUMN_TYPES["timestamp"]
            ),
        }
    )


def write(broker: Broker, topic: str, data: object, **config: object) -> ArrowWriter:
    async def run() -> ArrowWriter:
        async with ArrowWriter({"bootstrap.servers": broker.bootstrap, **config}) as writer:
            await writer.send_arrow(topic, data)
        return writer

    return asyncio.run(run())


def read(broker: Broker, topic: str, partitions: int, columns: list[str]) -> list[dict[str, object]]:
    async def run() -> list[dict[str, object]]:
        found: list[dict[str, object]] = []
        async with ArrowReader({"bootstrap.servers": broker.bootstrap}) as reader:
            for partition in range(partitions):
                found += (await reader.table(topic, partition, columns=columns)).to_pylist()
        return found

    return asyncio.run(run())


@pytest.mark.parametrize("compression", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_a_table_comes_back_as_it_was_sent(broker: Broker, compression: str) -> None:
    topic = f"round-{compression}"
    broker.create_topic(topic, 3)
    sent = table()
    assert write(broker, topic, sent, **{"compression.type": compression}).rows_written == ROWS
    found = read(broker, topic, 3, ["key", "value", "headers", "timestamp"])
    assert (
        sorted(found, key=lambda row: str(row["timestamp"]))
        == sent.select(["key", "value", "headers", "timestamp"]).to_pylist()
    )


def test_rows_go_to_the_partition_they_name(broker: Broker) -> None:
    broker.create_topic("named", 3)
    write(broker, "named", pa.table({"value": [b"a", b"b"], "partition": pa.array([2, None], pa.int32())}))
    found = {row["value"]: row["partition"] for row in read(broker, "named", 3, ["value", "partition"])}
    assert found[b"a"] == 2 and len(found) == 2


def test_a_partition_that_is_not_there_is_refused(broker: Broker) -> None:
    broker.create_topic("narrow", 1)
    for number in (1, -1):
        with pytest.raises(KafkaError) as refused:
            write(broker, "narrow", pa.table({"value": [b"a"], "partition": pa.array([number], pa.int32())}))
        assert refused.value.code is ErrorCode.INVALID_PARTITIONS


def test_a_range_is_read_without_what_lies_around_it(broker: Broker) -> None:
    broker.create_topic("range", 1)
    write(broker, "range", pa.table({"value": [b"%d" % i for i in range(100)]}))
    config = {"bootstrap.servers": broker.bootstrap}
    found = [row for batch in read_range(config, "range", 0, 17, 42, ["offset"]) for row in batch.to_pylist()]
    assert [row["offset"] for row in found] == list(range(17, 42))


@pytest.mark.parametrize("end", [20_000, 30_000])  # all there, and more than there is: it waits for the rest
def test_a_range_that_is_given_up_leaves_no_thread_behind(broker: Broker, end: int) -> None:
    topic = f"given-up-{end}"
    broker.create_topic(topic, 1)
    write(broker, topic, pa.table({"value": [b"%d" % i for i in range(20_000)]}))
    batches = read_range({"bootstrap.servers": broker.bootstrap}, topic, 0, 0, end, ["offset"])
    assert next(batches).column("offset")[0].as_py() == 0
    batches.close()
    assert not [thread for thread in threading.enumerate() if thread.name == READING_THREAD]


def test_offsets_that_retention_took_are_named(broker: Broker) -> None:
    broker.create_topic("short", 1)
    write(broker, "short", pa.table({"value": [b"x"]}))
    with pytest.raises(OffsetsGone) as gone:
        list(read_range({"bootstrap.servers": broker.bootstrap}, "short", 0, 5, 9))
    assert (gone.value.first, gone.value.end) == (5, 9)


def test_a_column_that_is_no_bytes_is_refused(broker: Broker) -> None:
    broker.create_topic("typed", 1)
    with pytest.raises(ClientError, match=r"column .value. is struct"):
        write(broker, "typed", pa.table({"value": [{"a": 1}]}))


def test_a_topic_that_cannot_be_written_is_named(broker: Broker) -> None:
    with pytest.raises(KafkaError):
        write(broker, "no such topic!", pa.table({"value": [b"x"]}), **{"max.block.ms": 2000})
