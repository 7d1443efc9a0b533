"""Handlers get every record, in the order that was asked for, and commits never pass one that is not done."""

import asyncio
import random
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import Consumer, Producer, TopicPartition
from headrace.client.error_policy import error_handler
from headrace.client.errors import ConfigError
from headrace.client.fetched import ConsumerRecord
from headrace.client.processing import OffsetTracker, Processor
from tests.client.virtual_time import pass_time, run_virtual


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.randoms(use_true_random=False))
def test_what_may_be_committed_never_passes_an_unfinished_record(
    gaps: list[int], source: random.Random
) -> None:
    tracker, offset, taken = OffsetTracker(), 0, []
    for gap in gaps:
        offset += 1 + gap
        tracker.take(offset)
        taken.append(offset)
    unfinished = set(taken)
    for done in source.sample(taken, len(taken)):
        tracker.finish(done)
        unfinished.discard(done)
        committable = tracker.committable
        assert committable is not None
        assert all(one >= committable for one in unfinished)
        assert committable == min(unfinished, default=taken[-1] + 1) or not any(
            committable <= one < min(unfinished) for one in taken
        )
    assert tracker.committable == taken[-1] + 1
    assert tracker.pending == 0


class Source:
    """Hands out records as a consumer does, and checks at every poll that commits stay behind what is done."""

    def __init__(self, records: list[ConsumerRecord]) -> None:
        self.records = records
        self.taken: list[ConsumerRecord] = []
        self.processor: Processor | None = None
        self.done: set[tuple[int, int]] = set()
        self.in_hand = 0
        self.in_hand_max = 0

    async def poll(self, timeout_ms: float = 0, max_records: int | None = None) -> list[ConsumerRecord]:
        assert self.processor is not None and max_records is not None
        for partition, offset in self.processor.committable().items():
            undone = [
                r.offset
                for r in self.taken
                if r.partition == partition.partition and (r.partition, r.offset) not in self.done
            ]
            assert offset <= min(undone, default=offset)
        count = min(max_records, len(self.records))
        out, self.records = self.records[:count], self.records[count:]
        self.taken += out
        self.in_hand += len(out)
        self.in_hand_max = max(self.in_hand_max, self.in_hand)
        if not self.records and len(self.done) == len(self.taken):
            self.processor.stop()
        await asyncio.sleep(0)
        return out


def record(partition: int, offset: int, key: bytes | None) -> ConsumerRecord:
    return ConsumerRecord("t", partition, offset, 0, key, b"v", (), 0)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from([b"a", b"b", b"c", None])), max_size=60),
    st.sampled_from([("fifo", "partition"), ("fifo", "key"), ("parallel", "key"), ("parallel", "record")]),
    st.integers(1, 6),
    st.integers(1, 12),
    st.integers(0, 2**32),
)
def test_any_mode_handles_each_record_once_in_its_order_within_its_bounds(
    given_records: list[tuple[int, bytes | None]],
    mode: Any,
    workers: int,
    pending_max: int,
    seed: int,
) -> None:
    source_of_chance = random.Random(seed)
    offsets: dict[int, int] = {}
    records = []
    for partition, key in given_records:
        offsets[partition] = offsets.get(partition, -1) + 1
        records.append(record(partition, offsets[partition], key))
    handled: list[ConsumerRecord] = []
    running: list[ConsumerRecord] = []

    async def scenario() -> None:
        source = Source(list(records))

        async def handler(one: ConsumerRecord) -> None:
            for other in running:
                if mode[1] == "partition":
                    assert other.partition != one.partition
                elif mode[1] == "key" and one.key is not None:
                    assert (other.partition, other.key) != (one.partition, one.key)
            running.append(one)
            assert len(running) <= workers
            await pass_time(source_of_chance.choice([0.0, 0.01, 0.5]))
            running.remove(one)
            handled.append(one)
            source.done.add((one.partition, one.offset))
            source.in_hand -= 1

        processor = Processor(
            source,
            handler,
            mode=mode[0],
            order=mode[1],
            workers=workers,
            pending_max=pending_max,
            on_error=None,
        )
        source.processor = processor
        await processor.run()
        assert source.in_hand_max <= pending_max
        ends = {TopicPartition("t", partition): last + 1 for partition, last in offsets.items()}
        assert processor.committable() == ends

    run_virtual(scenario())
    assert sorted(handled) == sorted(records)
    for partition in range(3):
        mine = [one for one in handled if one.partition == partition]
        if mode[1] == "partition":
            assert mine == sorted(mine)
        elif mode[1] == "key":
            for key in (b"a", b"b", b"c"):
                same = [one.offset for one in mine if one.key == key]
                assert same == sorted(same)


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_record_that_fails_stops_or_is_passed_over(policy: str) -> None:
    async def scenario() -> None:
        source = Source([record(0, number, b"k") for number in range(5)])

        async def handler(one: ConsumerRecord) -> None:
            if one.offset == 2:
                source.done.add((0, 2))
                raise RuntimeError("cannot be processed")
            source.done.add((0, one.offset))

        processor = Processor(
            source,
            handler,
            mode="parallel",
            order="key",
            workers=4,
            pending_max=3,
            on_error=error_handler(policy),
        )
        source.processor = processor
        if policy == "stop":
            with pytest.raises(RuntimeError, match="cannot be processed"):
                await processor.run()
            assert processor.committable() == {TopicPartition("t", 0): 2}
        else:
            await processor.run()
            assert processor.committable() == {TopicPartition("t", 0): 5}

    run_virtual(scenario())


def test_a_group_that_processes_in_parallel_commits_what_is_done_and_no_more(
    cluster_bootstrap: str, new_topic: Callable[..., str], run: Callable[..., Any]
) -> None:
    topic, group = new_topic(), f"group-{uuid.uuid4().hex[:12]}"
    where = TopicPartition(topic, 0)
    config = {"bootstrap.servers": cluster_bootstrap, "group.id": group, "auto.offset.reset": "earliest"}

    async def body() -> None:
        async with Producer(config) as producer:
            for number in range(40):
                await producer.send(topic, b"%d" % number, key=b"%d" % (number % 8))
        seen: list[int] = []

        async def break_at_25(one: ConsumerRecord) -> None:
            await asyncio.sleep(0)
            if one.offset == 25:
                raise RuntimeError("no good")
            seen.append(one.offset)

        async with Consumer(config) as consumer:
            consumer.subscribe([topic])
            with pytest.raises(RuntimeError):
                await consumer.process(break_at_25, mode="parallel", workers=4)
            found = (await consumer.committed([where]))[where]
            assert found is not None and found.offset <= 25
            assert await consumer.position(where) == found.offset, (
                "reading goes on at the first that is not done"
            )

        async def finish(one: ConsumerRecord) -> None:
            seen.append(one.offset)
            if set(seen) == set(range(40)):
                consumer.stop_processing()

        async with Consumer(config) as consumer:
            consumer.subscribe([topic])
            await consumer.process(finish, mode="fifo")
            found = (await consumer.committed([where]))[where]
            assert found is not None and found.offset == 40

    run(body())


def test_modes_that_contradict_each_other_are_refused(run: Callable[..., Any]) -> None:
    async def handler(one: ConsumerRecord) -> None:
        raise AssertionError("never called")

    async def body() -> None:
        async with Consumer(
            bootstrap_servers="127.0.0.1:1", group_id="g", delivery="at_most_once"
        ) as consumer:
            with pytest.raises(ConfigError, match="not delivery=at_most_once"):
                await consumer.process(handler)
        async with Consumer(bootstrap_servers="127.0.0.1:1", group_id="g") as consumer:
            with pytest.raises(ConfigError, match="no order='record'"):
                await consumer.process(handler, mode="fifo", order="record")
            with pytest.raises(ConfigError, match="no mode 'lifo'"):
                await consumer.process(handler, mode="lifo")  # type: ignore[arg-type]

    run(body())
