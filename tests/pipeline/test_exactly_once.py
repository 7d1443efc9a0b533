"""The sink's exactly-once, killed at each of its steps and at random moments between them, against a real broker."""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from headrace.client.arrow_txn import Coordination
from headrace.client.cluster import Cluster
from headrace.client.config import producer_config
from headrace.pipeline.committer import HalfWritten
from headrace.pipeline.ledger import Decision, Entry, Fenced, LedgerError, decode, encode
from headrace.testing import Broker
from tests.pipeline.spark_like import Killed, Query, committed_values, shuffled, until_killed

pytest.importorskip("pyarrow")

PARTITIONS = 2
RANDOM_KILLS = 100
BATCHES_MAX = 400


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with Broker() as running:
        yield running


def rows_of(batch: int, count: int = 5) -> list[bytes]:
    return [b"%d:%d" % (batch, row) for row in range(count)]


def slots_of(batch: int) -> list[list[bytes]]:
    rows = rows_of(batch)
    return [rows[:3], rows[3:], []]


class KillAt:
    """Kills at the n-th step."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.passed: list[str] = []

    def __call__(self, name: str) -> None:
        self.passed.append(name)
        self.left -= 1
        if self.left == 0:
            raise Killed(name)


async def end_open_transactions(query: Query, slot: int) -> None:
    """What time would do: abort what a task has left open."""
    cluster = Cluster(producer_config(query.config))
    try:
        calls = Coordination(cluster, 30_000)
        for name in await calls.open_transactions(f"headrace-sink-{query.sink}"):
            if name.endswith(f"-{slot}-0.0"):
                await calls.init(name, 60_000)
    finally:
        await cluster.close()


async def killed_batch(query: Query, batch: int, kill: KillAt) -> bool:
    query.step = kill
    try:
        await query.run_batch(batch, slots_of(batch))
    except Killed:
        return True
    finally:
        query.step = lambda name: None
    return False


STEPS_OF_A_BATCH = 23  # of the first batch of a run, with two tasks that have rows and one that has none


@pytest.mark.parametrize("number", range(1, STEPS_OF_A_BATCH + 1))
def test_a_driver_killed_at_any_step_loses_and_doubles_nothing(broker: Broker, number: int) -> None:
    topic = f"steps-{number}"
    broker.create_topic(topic, PARTITIONS)

    async def story() -> None:
        query = Query(broker.bootstrap, topic)
        await query.run_batch(0, slots_of(0))
        query = query.restarted()
        kill = KillAt(number)
        assert await killed_batch(query, 1, kill), f"only {kill.passed}"
        query = query.restarted()
        await query.run_batch(1, slots_of(1))
        await query.run_batch(2, slots_of(2))
        assert await committed_values(broker.bootstrap, topic, PARTITIONS) == sorted(
            rows_of(0) + rows_of(1) + rows_of(2)
        )

    asyncio.run(story())


def test_all_steps_of_a_batch_are_killed_at(broker: Broker) -> None:
    broker.create_topic("all-steps", PARTITIONS)

    async def story() -> list[str]:
        query = Query(broker.bootstrap, "all-steps")
        await query.run_batch(0, slots_of(0))
        query = query.restarted()
        kill = KillAt(0)
        assert not await killed_batch(query, 1, kill)
        return kill.passed

    passed = asyncio.run(story())
    assert len(passed) == STEPS_OF_A_BATCH
    assert set(passed) == {
        "task: registered",
        "task: recovered",
        "task: rows",
        "task: rows sent",
        "task: prepared",
        "taken",
        "ledger read",
        "deciding",
        "decision written",
        "decided",
        "committing",
        "committed",
    }


def test_a_hundred_random_kills_lose_and_double_nothing_though_replays_are_cut_otherwise(
    broker: Broker,
) -> None:
    broker.create_topic("random", PARTITIONS)
    source = random.Random(7)

    async def story() -> tuple[int, int]:
        query, kills, batch = Query(broker.bootstrap, "random"), 0, 0
        while kills < RANDOM_KILLS and batch < BATCHES_MAX:
            for _ in range(4):
                work = asyncio.create_task(query.run_batch(batch, shuffled(rows_of(batch), 3, source)))
                if not await until_killed(work, source.randrange(400)):
                    break
                kills += 1
                query = query.restarted()
            else:
                await query.run_batch(batch, shuffled(rows_of(batch), 3, source))
            batch += 1
        # The replay of a batch that was written but for Spark's own note of it.
        query = query.restarted()
        await query.run_batch(batch - 1, shuffled(rows_of(batch - 1), 2, source))
        return kills, batch

    kills, batches = asyncio.run(story())
    assert kills >= RANDOM_KILLS
    expected = sorted(row for batch in range(batches) for row in rows_of(batch))
    assert asyncio.run(committed_values(broker.bootstrap, "random", PARTITIONS)) == expected


def test_tasks_that_are_retried_or_speculated_count_once(broker: Broker) -> None:
    broker.create_topic("attempts", PARTITIONS)

    async def story() -> None:
        query = Query(broker.bootstrap, "attempts")
        lost = await query.prepare(0, 0, [b"a"], "0.0")  # its answer never reached the driver
        won = await query.prepare(0, 0, [b"a"], "0.1")
        other = await query.prepare(0, 1, [b"b"], "1.0")
        await query.commit(0, [won, other])
        assert lost is not None
        assert await committed_values(broker.bootstrap, "attempts", PARTITIONS) != [b"a", b"a", b"b"]
        query = query.restarted()
        await query.run_batch(1, [[b"c"]])  # a new run aborts what the loser left open
        assert await committed_values(broker.bootstrap, "attempts", PARTITIONS) == [b"a", b"b", b"c"]

    asyncio.run(story())


def test_of_two_drivers_the_older_is_fenced(broker: Broker) -> None:
    broker.create_topic("drivers", PARTITIONS)

    async def story() -> None:
        older = Query(broker.bootstrap, "drivers")
        await older.run_batch(0, slots_of(0))
        prepared = [await older.prepare(1, slot, rows) for slot, rows in enumerate(slots_of(1))]
        newer = older.restarted()
        await newer.run_batch(1, slots_of(1))
        with pytest.raises(Fenced):
            await older.commit(1, prepared)
        with pytest.raises(Fenced):
            await older.run_batch(2, slots_of(2))
        await newer.run_batch(2, slots_of(2))
        assert await committed_values(broker.bootstrap, "drivers", PARTITIONS) == sorted(
            rows_of(0) + rows_of(1) + rows_of(2)
        )

    asyncio.run(story())


@pytest.mark.parametrize("same", [True, False])
def test_transactions_lost_after_the_decision_are_written_again_or_refused(
    broker: Broker, same: bool
) -> None:
    topic = f"lost-{same}"
    broker.create_topic(topic, PARTITIONS)

    async def story() -> None:
        query = Query(broker.bootstrap, topic)

        def kill_when_decided(name: str) -> None:
            if name == "decided":
                decisions.append(name)
                if len(decisions) == 2:  # the first is the run's own registration
                    raise Killed(name)

        decisions: list[str] = []
        query.step = kill_when_decided
        with pytest.raises(Killed):
            await query.run_batch(0, [[b"a"], [b"b"]])
        await end_open_transactions(query, slot=1)
        query = query.restarted()
        if same:
            await query.run_batch(0, [[b"a"], [b"b"]])
            assert await committed_values(broker.bootstrap, topic, PARTITIONS) == [b"a", b"b"]
        else:
            with pytest.raises(HalfWritten, match="other rows"):
                await query.run_batch(0, [[b"x"], [b"y"]])

    asyncio.run(story())


@pytest.mark.parametrize("at", ["task: rows sent", "task: prepared"])
def test_an_attempt_that_fails_leaves_nothing_open_that_readers_would_wait_for(
    broker: Broker, at: str
) -> None:
    topic = f"fails-{at[6:].replace(' ', '-')}"
    broker.create_topic(topic, 1)

    def fail(name: str) -> None:
        if name == at:
            raise RuntimeError(at)

    async def story() -> None:
        query = Query(broker.bootstrap, topic)
        failing = replace(query, step=fail)
        with pytest.raises(RuntimeError):
            await failing.prepare(0, 0, [b"a"], "0.0")
        await query.commit(0, [await query.prepare(0, 0, [b"a"], "1.1")])
        assert await committed_values(broker.bootstrap, topic, 1) == [b"a"]

    asyncio.run(story())


def test_the_simpler_design_doubles_rows_when_a_replay_is_cut_otherwise() -> None:
    """Why tasks do not commit for themselves: a task that finds its number done skips rows that moved to it."""
    done: set[tuple[int, int]] = set()
    written: list[bytes] = []

    def each_for_itself(batch: int, slots: list[list[bytes]], killed_after: int) -> None:
        for slot, rows in enumerate(slots[:killed_after]):
            if (batch, slot) not in done:  # the marker is in the task's own transaction, so this is atomic
                done.add((batch, slot))
                written.extend(rows)

    each_for_itself(0, [[b"a"], [b"b"]], killed_after=1)
    each_for_itself(0, [[b"b"], [b"a"]], killed_after=2)
    assert sorted(written) == [b"a", b"a"], "a doubled, b lost"


def test_a_decision_of_many_tasks_survives_its_own_form() -> None:
    from headrace.client.arrow_txn import TransactionalProducer

    who = TransactionalProducer("driver", 9, 1)
    entries = tuple(
        Entry(
            n,
            TransactionalProducer(f"headrace-sink-{'q' * 32}-12345678-{n}-0.0", 10**12 + n, 3),
            10**6,
            2**64 - n - 1,
        )
        for n in range(500)
    )
    decision = Decision(41, "run", ("older",), entries)
    chunks = encode(decision, who)
    assert len(chunks) > 1 and all(len(chunk.metadata) < 4096 for chunk in chunks)
    assert decode(chunks) == decision
    assert decode([*chunks[:-1], encode(decision, TransactionalProducer("driver", 9, 2))[-1]]) is None
    with pytest.raises(LedgerError, match="coalesce"):
        encode(Decision(0, "run", (), entries * 10), who)
