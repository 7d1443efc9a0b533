"""One file for every system: a broker, a cluster of five, and real Kafka, each with brokers killed under the client.

Real Kafka is started by the launcher in $HEADRACE_PEERS (see benchmarks/README.md); without it those tests are skipped.
All other tests of this folder run against any cluster with HEADRACE_TEST_BOOTSTRAP=host:port.
"""

import asyncio
import os
import uuid
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from headrace import Admin, Consumer, KafkaError, NewTopic, Producer, TopicPartition
from headrace.client.cluster import NO_NODE
from headrace.testing.topics import describe_topic
from tests.chaos.systems import HeadraceSystem, KafkaSystem, System
from tests.testing.waiting import wait_until

PARTITIONS = 3
RECORDS = 1_500
DEADLINE_S = 80.0

Run = Callable[..., Any]


@pytest.fixture(scope="module", params=["one broker", "five brokers", "Kafka"])
def system(request: pytest.FixtureRequest) -> Iterator[System]:
    running: System
    if request.param == "Kafka":
        if not os.environ.get("HEADRACE_PEERS"):
            pytest.skip("HEADRACE_PEERS does not name the directory of a Kafka launcher")
        running = KafkaSystem(3)
    else:
        running = HeadraceSystem(1 if request.param == "one broker" else 5, disks=False)
    try:
        running.start_all()
        yield running
    finally:
        running.close()


@pytest.fixture
def topics(system: System) -> Callable[..., Awaitable[list[str]]]:
    """Creates topics with fresh names, replicated as far as the system allows."""

    async def create(count: int = 1) -> list[str]:
        names = [f"systems-{uuid.uuid4().hex[:12]}" for _ in range(count)]
        replicas = min(3, len(system.ids))
        settings = {"min.insync.replicas": str(min(2, replicas)), "flush.messages": "1"}
        async with Admin(bootstrap_servers=system.bootstrap) as admin:
            for name in names:
                await admin.create_topic(NewTopic(name, PARTITIONS, replicas, config=settings))
        return names

    return create


async def kill_and_start_leader(system: System, topic: str) -> None:
    """Kill the leader of the first partition; start it again when another leads, where there is another."""

    def leader() -> int:
        return describe_topic(system.bootstrap, topic).partitions[0].leader

    def work() -> None:
        first = leader()
        system.kill(first)
        if len(system.ids) > 1:
            wait_until(lambda: leader() not in (first, NO_NODE), "another leader", DEADLINE_S)
        system.start(first)

    await asyncio.to_thread(work)


def consumer_of(system: System, group: str, **options: Any) -> Consumer:
    return Consumer(
        bootstrap_servers=system.bootstrap,
        group_id=group,
        auto_offset_reset="earliest",
        session_timeout_ms=10_000,
        **options,
    )


async def read(consumer: Consumer, count: int) -> list[Any]:
    found: list[Any] = []
    async with asyncio.timeout(DEADLINE_S):
        while len(found) < count:
            found += await consumer.poll(1_000)
    return found


def in_order(records: list[Any]) -> dict[int, list[bytes]]:
    """The values by partition, in the order of their offsets."""
    out: dict[int, list[bytes]] = {}
    for record in sorted(records, key=lambda r: (r.partition, r.offset)):
        out.setdefault(record.partition, []).append(record.value)
    return out


def test_records_sent_while_leaders_are_killed_arrive_once_and_in_order(
    system: System, topics: Callable[..., Awaitable[list[str]]], run: Run
) -> None:
    async def body() -> None:
        [topic] = await topics()
        sent: dict[int, list[bytes]] = {number: [] for number in range(PARTITIONS)}
        promises = []
        async with Producer(bootstrap_servers=system.bootstrap, linger_ms=1, batch_size=2_000) as producer:
            for number in range(RECORDS):
                value, partition = b"%d" % number, number % PARTITIONS
                sent[partition].append(value)
                promises.append(await producer.send(topic, value, partition=partition))
                if number == RECORDS // 2:
                    await promises[number // 2]
                    killing = asyncio.create_task(kill_and_start_leader(system, topic))
                elif number > RECORDS // 2 and not killing.done():
                    await asyncio.wait([killing], timeout=0.005)
            await killing
            for promise in promises:
                await promise
        async with consumer_of(system, f"g-{topic}") as consumer:
            consumer.subscribe([topic])
            assert in_order(await read(consumer, RECORDS)) == sent
            assert sum((await consumer.end_offsets(consumer.assignment)).values()) == RECORDS

    run(body())


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_group_reads_everything_and_goes_on_where_it_was_after_a_kill(
    protocol: str, system: System, topics: Callable[..., Awaitable[list[str]]], run: Run
) -> None:
    async def body() -> None:
        [topic] = await topics()
        options: dict[str, Any] = {"group_protocol": protocol}
        async with Producer(bootstrap_servers=system.bootstrap) as producer:
            for number in range(300):
                await producer.send(topic, b"%d" % number, partition=number % PARTITIONS)
        async with Consumer(
            bootstrap_servers=system.bootstrap,
            group_id=f"g-{topic}",
            auto_offset_reset="earliest",
            **options,
        ) as consumer:
            consumer.subscribe([topic])
            first = await read(consumer, 300)
            await consumer.commit()
            await kill_and_start_leader(system, topic)
            async with Producer(bootstrap_servers=system.bootstrap) as producer:
                for number in range(300, 400):
                    await (await producer.send(topic, b"%d" % number, partition=number % PARTITIONS))
            second = await read(consumer, 100)
        assert sorted(int(r.value) for r in first) == list(range(300))
        assert {int(r.value) for r in second} >= set(range(300, 400))

    run(body())


def test_a_copy_in_transactions_is_exact_over_a_kill(
    system: System, topics: Callable[..., Awaitable[list[str]]], run: Run
) -> None:
    async def body() -> None:
        source, target = await topics(2)
        async with Producer(bootstrap_servers=system.bootstrap) as producer:
            for number in range(300):
                await producer.send(source, b"%d" % number, key=b"%d" % number)
        copied = 0
        async with (
            consumer_of(system, f"g-{source}", delivery="exactly_once") as consumer,
            Producer(bootstrap_servers=system.bootstrap, transactional_id=f"t-{source}") as producer,
        ):
            consumer.subscribe([source])
            killing = None
            async with asyncio.timeout(DEADLINE_S):
                while copied < 300:
                    records = await consumer.poll(1_000, 40)
                    if not records:
                        continue
                    if killing is None and copied >= 80:
                        killing = asyncio.create_task(kill_and_start_leader(system, source))
                    try:
                        async with producer.transaction() as tx:
                            for record in records:
                                await tx.send(target, record.value, key=record.key)
                            await tx.commit_offsets(consumer)
                        copied += len(records)
                    except KafkaError as error:
                        if not error.abortable:
                            raise
                        for where, held in (await consumer.committed(consumer.assignment)).items():
                            consumer.seek(where, 0 if held is None else held.offset)
            assert killing is not None
            await killing
        async with consumer_of(system, f"check-{target}", isolation_level="read_committed") as consumer:
            consumer.subscribe([target])
            found = await read(consumer, 300)
            assert sorted(int(r.value) for r in found) == list(range(300))
            assert await consumer.poll(500) == []

    run(body())


def test_tables_go_around(system: System, topics: Callable[..., Awaitable[list[str]]], run: Run) -> None:
    async def body() -> None:
        [topic] = await topics()
        table = pa.table(
            {"key": [b"%d" % n for n in range(1_000)], "value": [b"v%d" % n for n in range(1_000)]}
        )
        async with Producer(bootstrap_servers=system.bootstrap) as producer:
            await producer.send_arrow(topic, table)
        async with consumer_of(system, f"g-{topic}") as consumer:
            found = [
                await consumer.read_range(topic, at.partition, 0, end)
                for at, end in (
                    await consumer.end_offsets([TopicPartition(topic, n) for n in range(PARTITIONS)])
                ).items()
            ]
        rows = pa.concat_tables(found).to_pylist()
        assert sorted((r["key"], r["value"]) for r in rows) == sorted(
            zip(table["key"].to_pylist(), table["value"].to_pylist())
        )

    run(body())
