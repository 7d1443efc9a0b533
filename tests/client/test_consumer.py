"""Reading assigned partitions of a live cluster: positions, times, ends, deletions, and what goes wrong."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from headrace.base.errors import ErrorCode, KafkaError
from headrace.client.admin import Admin
from headrace.client.consumer import Consumer
from headrace.client.producer import Producer
from headrace.client.topics import TopicPartition

Run = Callable[..., Any]
NewTopic = Callable[..., str]


async def fill(bootstrap: str, topic: str, count: int, partitions: int = 1, **config: Any) -> None:
    """Records numbered 0…count-1 round the partitions; timestamps 1000, 2000, …"""
    keys = {name.replace("_", "."): value for name, value in config.items()}
    async with Producer({"bootstrap.servers": bootstrap, **keys}) as producer:
        for number in range(count):
            await producer.send(
                topic,
                b"%d" % number,
                partition=number % partitions,
                timestamp_ms=1_700_000_000_000 + number * 1_000,
            )


async def read(consumer: Consumer, count: int) -> list[tuple[int, int, bytes | None]]:
    found: list[tuple[int, int, bytes | None]] = []
    while len(found) < count:
        found += [(r.partition, r.offset, r.value) for r in await consumer.poll(5_000, count - len(found))]
    return found


def consumer_of(bootstrap: str, **config: Any) -> Consumer:
    keys = {name.replace("_", "."): value for name, value in config.items()}
    return Consumer({"bootstrap.servers": bootstrap, "auto.offset.reset": "earliest", **keys})


def test_partitions_are_each_read_in_order(cluster_bootstrap: str, new_topic: NewTopic, run: Run) -> None:
    topic = new_topic(partitions=3)

    async def body() -> None:
        await fill(cluster_bootstrap, topic, 3_000, 3, linger_ms=1)
        async with consumer_of(cluster_bootstrap) as consumer:
            consumer.assign(await consumer.partitions(topic))
            found = await read(consumer, 3_000)
        for partition in range(3):
            mine = [(offset, value) for at, offset, value in found if at == partition]
            assert mine == [(offset, b"%d" % (offset * 3 + partition)) for offset in range(1_000)]

    run(body())


def test_small_fetches_bring_everything_all_the_same(
    cluster_bootstrap: str, new_topic: NewTopic, run: Run
) -> None:
    topic = new_topic()

    async def body() -> None:
        await fill(cluster_bootstrap, topic, 500, batch_size=400)
        limits = {"max_partition_fetch_bytes": 500, "fetch_max_bytes": 700, "max_poll_records": 7}
        async with consumer_of(cluster_bootstrap, **limits) as consumer:
            consumer.assign([TopicPartition(topic, 0)])
            assert [offset for _, offset, _ in await read(consumer, 500)] == list(range(500))

    run(body())


def test_seek_goes_to_the_middle_of_a_batch_and_back(
    cluster_bootstrap: str, new_topic: NewTopic, run: Run
) -> None:
    topic = new_topic()
    where = TopicPartition(topic, 0)

    async def body() -> None:
        await fill(cluster_bootstrap, topic, 100, linger_ms=200)
        async with consumer_of(cluster_bootstrap) as consumer:
            consumer.assign([where])
            for offset in (57, 3, 99, 0):
                consumer.seek(where, offset)
                assert (await read(consumer, 1))[0][1] == offset
                assert await consumer.position(where) == offset + 1
            consumer.seek_to_end([where])
            assert await consumer.position(where) == 100
            consumer.seek_to_beginning([where])
            assert await consumer.position(where) == 0
            consumer.seek_to_time([where], 1_700_000_000_000 + 41_500)
            assert (await read(consumer, 1))[0][1] == 42
            consumer.seek_to_time([where], 1_900_000_000_000)
            assert await consumer.position(where) == 100

    run(body())


def test_offsets_by_time_and_at_the_ends(cluster_bootstrap: str, new_topic: NewTopic, run: Run) -> None:
    topic = new_topic(partitions=2)
    full, empty = TopicPartition(topic, 0), TopicPartition(topic, 1)

    async def body() -> None:
        await fill(cluster_bootstrap, topic, 10)
        async with consumer_of(cluster_bootstrap) as consumer:
            assert await consumer.beginning_offsets([full, empty]) == {full: 0, empty: 0}
            assert await consumer.end_offsets([full, empty]) == {full: 10, empty: 0}
            found = await consumer.offsets_for_times({full: 1_700_000_005_000, empty: 1_700_000_005_000})
            there = found[full]
            assert there is not None and (there.offset, there.timestamp_ms) == (5, 1_700_000_005_000)
            assert found[empty] is None

    run(body())


def test_records_that_come_later_are_handed_out_as_they_come(
    cluster_bootstrap: str, new_topic: NewTopic, run: Run
) -> None:
    topic = new_topic()

    async def body() -> None:
        async with consumer_of(cluster_bootstrap) as consumer:
            consumer.assign([TopicPartition(topic, 0)])
            assert await consumer.poll(0) == []
            reading = asyncio.create_task(anext(consumer))
            await fill(cluster_bootstrap, topic, 1)
            assert (await reading).value == b"0"

    run(body())


def test_iteration_and_position_agree(cluster_bootstrap: str, new_topic: NewTopic, run: Run) -> None:
    topic = new_topic()
    where = TopicPartition(topic, 0)

    async def body() -> None:
        await fill(cluster_bootstrap, topic, 20)
        async with consumer_of(cluster_bootstrap) as consumer:
            consumer.assign([where])
            async for record in consumer:
                assert await consumer.position(where) == record.offset + 1
                if record.offset == 19:
                    break

    run(body())


def test_a_paused_partition_waits_while_others_go_on(
    cluster_bootstrap: str, new_topic: NewTopic, run: Run
) -> None:
    topic = new_topic(partitions=2)
    one, two = TopicPartition(topic, 0), TopicPartition(topic, 1)

    async def body() -> None:
        await fill(cluster_bootstrap, topic, 20, 2)
        async with consumer_of(cluster_bootstrap) as consumer:
            consumer.assign([one, two])
            consumer.pause([one])
            assert {partition for partition, _, _ in await read(consumer, 10)} == {1}
            consumer.resume([one])
            assert {partition for partition, _, _ in await read(consumer, 10)} == {0}

    run(body())


def test_an_offset_that_is_gone_is_reset_or_reported(
    cluster_bootstrap: str, new_topic: NewTopic, run: Run
) -> None:
    topic = new_topic()
    where = TopicPartition(topic, 0)

    async def body() -> None:
        await fill(cluster_bootstrap, topic, 10)
        async with consumer_of(cluster_bootstrap) as consumer:
            consumer.assign([where])
            consumer.seek(where, 1_000)
            assert (await read(consumer, 1))[0][1] == 0
        async with consumer_of(cluster_bootstrap, auto_offset_reset="none") as consumer:
            consumer.assign([where])
            consumer.seek(where, 1_000)
            with pytest.raises(KafkaError) as caught:
                await consumer.poll(30_000)
            assert caught.value.code is ErrorCode.OFFSET_OUT_OF_RANGE

    run(body())


def test_a_topic_that_does_not_exist_is_named(cluster_bootstrap: str, run: Run) -> None:
    async def body() -> None:
        async with consumer_of(cluster_bootstrap) as consumer:
            with pytest.raises(KafkaError, match="'no-such-topic' does not exist"):
                await consumer.partitions("no-such-topic")

    run(body())


def test_a_partition_that_does_not_exist_is_reported(
    cluster_bootstrap: str, new_topic: NewTopic, run: Run
) -> None:
    topic = new_topic()

    async def body() -> None:
        async with consumer_of(cluster_bootstrap) as consumer:
            consumer.assign([TopicPartition(topic, 9)])
            with pytest.raises(KafkaError, match="so there is no partition 9"):
                await consumer.poll(30_000)

    run(body())


def test_partitions_added_while_reading_can_be_assigned(
    cluster_bootstrap: str, new_topic: NewTopic, run: Run
) -> None:
    topic = new_topic()

    async def body() -> None:
        async with (
            consumer_of(cluster_bootstrap) as consumer,
            Admin({"bootstrap.servers": cluster_bootstrap}) as admin,
        ):
            consumer.assign(await consumer.partitions(topic))
            await admin.create_partitions(topic, 2)
            await fill(cluster_bootstrap, topic, 4, 2)
            partitions = await consumer.partitions(topic)
            assert len(partitions) == 2
            consumer.assign(partitions)
            assert len(await read(consumer, 4)) == 4

    run(body())


def test_seeking_what_is_not_assigned_is_an_error(cluster_bootstrap: str, run: Run) -> None:
    async def body() -> None:
        async with consumer_of(cluster_bootstrap) as consumer:
            with pytest.raises(KafkaError, match="not assigned"):
                consumer.seek(TopicPartition("t", 0), 1)

    run(body())


def test_offsets_do_not_wait_behind_a_fetch_that_waits_for_records(
    cluster_bootstrap: str, new_topic: NewTopic, run: Run
) -> None:
    topic = new_topic()
    place = TopicPartition(topic, 0)

    async def body() -> None:
        await fill(cluster_bootstrap, topic, 3)
        waits = {"fetch_max_wait_ms": 80_000, "default_api_timeout_ms": 20_000}
        async with consumer_of(cluster_bootstrap, **waits) as consumer:
            consumer.assign([place])
            await read(consumer, 3)
            while consumer.high_watermark(place) != 3 or await consumer.poll(50):
                pass  # until the next fetch is out there, waiting for a record that never comes
            assert await consumer.end_offsets([place]) == {place: 3}

    run(body())
