"""Whatever happens on the way, a reader gets each record of a partition once and in order."""

import asyncio
import random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.base.errors import ErrorCode, KafkaError
from headrace.client.consumer import Consumer
from headrace.client.topics import TopicPartition
from headrace.records.builder import build_batch
from tests.client.scripted_cluster import TOPIC, FetchFate, ScriptedCluster
from tests.client.virtual_time import run_virtual

HARMLESS = [fate for fate in FetchFate if fate is not FetchFate.DAMAGED]


def consumer_of(cluster: ScriptedCluster, **config: Any) -> Consumer:
    keys = {name.replace("_", "."): value for name, value in config.items()}
    return Consumer(
        {"bootstrap.servers": cluster.bootstrap, "auto.offset.reset": "earliest", **keys},
        connector=cluster.connect,
        random_source=random.Random(7),
    )


def fill(cluster: ScriptedCluster, sizes: list[int]) -> None:
    """Batches of these sizes in every partition; each value is its offset."""
    for log in cluster.logs:
        for size in sizes:
            values = [b"%d" % (log.end_offset + at) for at in range(size)]
            log.append(build_batch([(at, None, value, ()) for at, value in enumerate(values)]))


@given(
    fates=st.lists(st.sampled_from(HARMLESS), max_size=25),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=20),
    poll_records=st.integers(1, 9),
    partition_bytes=st.sampled_from([1, 200, 1_048_576]),
    fetch_bytes=st.sampled_from([1, 300, 52_428_800]),
    brokers=st.integers(1, 3),
)
@example(  # a timer rang a tick before its time, and the poll that it was for asked for another one, for ever
    fates=[
        FetchFate.EMPTY,
        FetchFate.FINE,
        FetchFate.LOST,
        FetchFate.LEADER_MOVED,
        FetchFate.STUCK,
        FetchFate.LEADER_MOVED,
        FetchFate.SLOW,
        FetchFate.STUCK,
        FetchFate.SLOW,
        FetchFate.SLOW,
        FetchFate.SLOW,
        FetchFate.LEADER_MOVED,
        FetchFate.EMPTY,
        FetchFate.LOST,
        FetchFate.SLOW,
    ],
    sizes=[6, 3, 1, 3, 6, 4, 6, 4, 6, 2, 1, 5],
    poll_records=3,
    partition_bytes=1_048_576,
    fetch_bytes=1,
    brokers=3,
)
def test_every_record_is_read_once_and_in_order_whatever_fails_on_the_way(
    fates: list[FetchFate],
    sizes: list[int],
    poll_records: int,
    partition_bytes: int,
    fetch_bytes: int,
    brokers: int,
) -> None:
    cluster = ScriptedCluster(brokers=brokers, fetch_fates=fates)
    fill(cluster, sizes)
    total = sum(sizes)

    async def scenario() -> None:
        read: list[list[int]] = [[] for _ in cluster.logs]
        async with consumer_of(
            cluster,
            max_partition_fetch_bytes=partition_bytes,
            fetch_max_bytes=fetch_bytes,
            request_timeout_ms=1_000,
        ) as consumer:
            consumer.assign(await consumer.partitions(TOPIC))
            async with asyncio.timeout(600):
                while sum(map(len, read)) < total * len(cluster.logs):
                    for record in await consumer.poll(1_000, poll_records):
                        assert record.value == b"%d" % record.offset
                        read[record.partition].append(record.offset)
                assert await consumer.poll(3_000) == []
            for partition in range(len(cluster.logs)):
                assert await consumer.position(TopicPartition(TOPIC, partition)) == total
        assert read == [list(range(total))] * len(cluster.logs)

    run_virtual(scenario())


@given(
    fates=st.lists(st.sampled_from(HARMLESS), max_size=10),
    seeks=st.lists(st.integers(0, 59), min_size=1, max_size=8),
    data=st.data(),
)
def test_after_a_seek_nothing_of_the_old_place_is_handed_out(
    fates: list[FetchFate], seeks: list[int], data: st.DataObject
) -> None:
    cluster = ScriptedCluster(partitions=1, fetch_fates=fates)
    fill(cluster, [7] * 9)
    where = TopicPartition(TOPIC, 0)

    async def scenario() -> None:
        async with consumer_of(cluster, request_timeout_ms=1_000) as consumer:
            consumer.assign([where])
            for offset in seeks:
                consumer.seek(where, offset)
                if data.draw(st.booleans()):
                    continue  # seek again while the fetch is on its way
                async with asyncio.timeout(600):
                    records = []
                    while not records:
                        records = await consumer.poll(1_000, 3)
                assert [record.offset for record in records] == list(range(offset, offset + len(records)))

    run_virtual(scenario())


def test_a_damaged_answer_is_reported_and_read_again() -> None:
    cluster = ScriptedCluster(partitions=1, fetch_fates=[FetchFate.DAMAGED])
    fill(cluster, [3])

    async def scenario() -> None:
        async with consumer_of(cluster) as consumer:
            consumer.assign([TopicPartition(TOPIC, 0)])
            with pytest.raises(KafkaError) as caught:
                await consumer.poll(10_000)
            assert caught.value.code is ErrorCode.CORRUPT_MESSAGE
            assert [record.offset for record in await consumer.poll(10_000)] == [0, 1, 2]

    run_virtual(scenario())


def test_what_is_fetched_ahead_is_bounded() -> None:
    cluster = ScriptedCluster(brokers=1, partitions=4)
    fill(cluster, [5] * 200)

    async def scenario() -> None:
        async with consumer_of(cluster, fetch_max_bytes=2_000, max_partition_fetch_bytes=500) as consumer:
            consumer.assign(await consumer.partitions(TOPIC))
            held_max = 0
            for _ in range(100):
                await consumer.poll(1_000, 1)
                held_max = max(held_max, consumer._fetcher.held_bytes())
            # The bound, and one answer that was on its way when it was reached.
            assert held_max <= 2_000 + 4 * 600

    run_virtual(scenario())


def test_short_polls_that_find_nothing_say_after_a_while_what_is_missing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        async with consumer_of(ScriptedCluster()) as consumer:
            consumer.assign([TopicPartition("nothing-of-that-name", 0)])
            for _ in range(25):
                assert await consumer.poll(timeout_ms=1_000) == []

    run_virtual(scenario())
    said = [record.message for record in caplog.records if "waits for" in record.message]
    assert len(said) == 2
    assert said[0].startswith("the consumer waits for topic 'nothing-of-that-name' to be created")
