"""Tables go through the ordinary clients: what is sent as a table is read as records, and the reverse."""

import asyncio
import uuid
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from headrace import Consumer, KafkaError, Producer, TopicPartition
from headrace.client.partitioner import key_partition


def test_tables_and_records_are_the_same_thing(
    cluster_bootstrap: str, new_topic: Callable[..., str], run: Callable[..., Any]
) -> None:
    topic = new_topic(partitions=3)
    keys = [b"%d" % (number % 50) for number in range(5_000)]
    values = [None if number % 7 == 0 else b"v%d" % number for number in range(5_000)]
    table = pa.table({"key": keys, "value": pa.array(values, pa.binary())})
    group = f"group-{uuid.uuid4().hex[:12]}"
    config = {
        "bootstrap.servers": cluster_bootstrap,
        "group.id": group,
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
    }

    async def body() -> None:
        async with Producer(bootstrap_servers=cluster_bootstrap) as producer:
            deliveries = await producer.send_arrow(topic, table)
            for delivery in deliveries:
                assert (await delivery).offset >= 0
            await (await producer.send(topic, b"last", key=b"0"))
        async with Consumer(config) as consumer:
            consumer.subscribe([topic])
            found: list[Any] = []
            while len(found) < 5_001:
                found += await consumer.poll(1_000)
        by_partition: dict[int, list[tuple[Any, Any]]] = {0: [], 1: [], 2: []}
        for key, value in [*zip(keys, values), (b"0", b"last")]:
            by_partition[key_partition(key, 3)].append((key, value))
        for number, expected in by_partition.items():
            assert [(r.key, r.value) for r in found if r.partition == number] == expected
        async with Consumer(config) as consumer:
            consumer.subscribe([topic])
            tables: list[Any] = []
            while sum(one.num_rows for one in tables) < 5_001:
                tables.append(await consumer.poll_arrow(1_000))
            rows = pa.concat_tables(tables).to_pylist()
            read = {(r["partition"], r["offset"]): (r["key"], r["value"]) for r in rows}
            assert read == {(r.partition, r.offset): (r.key, r.value) for r in found}
            end = await consumer.position(TopicPartition(topic, 0))
            assert end == len(by_partition[0])
            some = await consumer.read_range(topic, 0, 2, 5, ["offset", "value"])
            assert some["offset"].to_pylist() == [2, 3, 4]
            assert (await consumer.poll_arrow(0)).num_rows == 0
        async with Consumer(config) as consumer:
            consumer.subscribe([topic])
            await anext(consumer)
            with pytest.raises(KafkaError, match="still waiting"):
                await consumer.poll_arrow(0)

    run(body())


def test_a_range_is_read_while_the_consumer_waits_for_records_at_the_end(
    cluster_bootstrap: str, new_topic: Callable[..., str], run: Callable[..., Any]
) -> None:
    topic = new_topic()
    wait_ms = 60_000  # as long as its fetch waits, whatever is asked on the same connection waits too

    async def body() -> None:
        async with Producer(bootstrap_servers=cluster_bootstrap) as producer:
            await producer.send_arrow(topic, pa.table({"value": [b"a", b"b", b"c"]}))
        async with Consumer(
            bootstrap_servers=cluster_bootstrap, fetch_max_wait_ms=wait_ms, auto_offset_reset="earliest"
        ) as consumer:
            consumer.assign([TopicPartition(topic, 0)])
            while len(await consumer.poll(100)) > 0 or await consumer.position(TopicPartition(topic, 0)) < 3:
                pass
            async with asyncio.timeout(wait_ms / 2000):
                found = await consumer.read_range(topic, 0, 1, 3)
            assert found["value"].to_pylist() == [b"b", b"c"]

    run(body())


@pytest.mark.parametrize("compression", ["none", "lz4"])
@pytest.mark.parametrize("acks", ["0", "1", "all"])
def test_memory_that_is_used_again_keeps_tables_apart(
    cluster_bootstrap: str,
    new_topic: Callable[..., str],
    run: Callable[..., Any],
    compression: str,
    acks: str,
) -> None:
    topic = new_topic()
    tables = [
        pa.table({"value": [b"%d-" % number * 50 + b"%d" % row for row in range(4_000)]})
        for number in range(12)
    ]
    sent = [value for table in tables for value in table["value"].to_pylist()]

    async def body() -> None:
        idempotence = acks == "all"
        async with Producer(
            bootstrap_servers=cluster_bootstrap,
            acks=acks,
            enable_idempotence=idempotence,
            compression_type=compression,
            max_in_flight_requests_per_connection=5 if idempotence else 1,
            max_request_size=60_000,
        ) as producer:
            for table in tables:
                await producer.send_arrow(topic, table)
        async with Consumer(bootstrap_servers=cluster_bootstrap, auto_offset_reset="earliest") as consumer:
            consumer.assign([TopicPartition(topic, 0)])
            found: list[bytes] = []
            kept = []
            while len(found) < len(sent):
                kept.append(await consumer.poll_arrow(1_000))
                found += kept[-1]["value"].to_pylist()
            assert found == sent
            assert [value for table in kept for value in table["value"].to_pylist()] == sent

    run(body())


def test_a_row_larger_than_a_batch_goes_alone(
    cluster_bootstrap: str, new_topic: Callable[..., str], run: Callable[..., Any]
) -> None:
    topic = new_topic()
    values = [b"a", b"b" * 900_000, b"c", b"d"]

    async def body() -> None:
        async with Producer(bootstrap_servers=cluster_bootstrap) as producer:
            assert len(await producer.send_arrow(topic, pa.table({"value": values}))) == 3
            await producer.flush()
            with pytest.raises(KafkaError, match=r"larger than max\.request\.size"):
                await producer.send_arrow(topic, pa.table({"value": [b"e" * 1_100_000]}))
        async with Consumer(bootstrap_servers=cluster_bootstrap) as consumer:
            found = await consumer.read_range(topic, 0, 0, len(values))
            assert found["value"].to_pylist() == values

    run(body())


def test_batches_that_a_topic_finds_too_large_are_not_made_again(
    cluster_bootstrap: str, new_topic: Callable[..., str], run: Callable[..., Any]
) -> None:
    topic = new_topic(max_message_bytes="100000")
    tables = [pa.table({"value": [b"%d" % number * 100 for _ in range(5_000)]}) for number in range(4)]

    async def body() -> None:
        async with Producer(bootstrap_servers=cluster_bootstrap) as producer:
            await producer.send_arrow(topic, tables[0])
            await producer.flush()
            splits = producer.statistics()["batch_splits"]
            assert isinstance(splits, int) and splits > 0
            for table in tables[1:]:
                await producer.send_arrow(topic, table)
            await producer.flush()
            assert producer.statistics()["batch_splits"] == splits
        async with Consumer(bootstrap_servers=cluster_bootstrap) as consumer:
            found = await consumer.read_range(topic, 0, 0, 20_000)
            assert found["value"].to_pylist() == [v for table in tables for v in table["value"].to_pylist()]

    run(body())
