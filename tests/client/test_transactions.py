"""Transactions over a real cluster that has them: what is committed is seen once, what is aborted never."""

import uuid
from collections.abc import Callable
from typing import Any

import pytest

from headrace import Admin, Consumer, KafkaError, Producer, TopicPartition
from headrace.client.errors import Fenced
from headrace.wire.apis import Api

Run = Callable[..., Any]


async def require_transactions(bootstrap: str) -> None:
    async with Admin({"bootstrap.servers": bootstrap}) as admin:
        connection = await admin.cluster.any_connection()
        if Api.END_TXN not in connection.versions:
            pytest.skip("this cluster has no transactions")


def transactional(bootstrap: str, name: str) -> Producer:
    return Producer(bootstrap_servers=bootstrap, transactional_id=name)


async def committed_values(bootstrap: str, topic: str, count: int) -> list[bytes]:
    config = {
        "bootstrap.servers": bootstrap,
        "auto.offset.reset": "earliest",
        "isolation.level": "read_committed",
    }
    async with Consumer(config) as consumer:
        consumer.assign(await consumer.partitions(topic))
        found: list[bytes] = []
        while len(found) < count:
            found += [record.value for record in await consumer.poll(1_000)]
        ends = await consumer.end_offsets(consumer.assignment)
        while any([await consumer.position(p) < end for p, end in ends.items()]):
            found += [record.value for record in await consumer.poll(100)]
        return found


def fresh_name() -> str:
    return f"txn-{uuid.uuid4().hex[:12]}"


def test_only_committed_transactions_are_seen(
    cluster_bootstrap: str, new_topic: Callable[..., str], run: Run
) -> None:
    topic = new_topic(partitions=2)

    async def body() -> None:
        await require_transactions(cluster_bootstrap)
        async with transactional(cluster_bootstrap, fresh_name()) as producer:
            with pytest.raises(KafkaError, match="sends in transactions only"):
                await producer.send(topic, b"outside")
            for number in range(6):
                failed = number % 2
                try:
                    async with producer.transaction() as tx:
                        for part in range(2):
                            await tx.send(topic, b"%d-%d" % (number, part), partition=part)
                        if failed:
                            await producer.flush()
                            raise RuntimeError("no good")
                except RuntimeError:
                    assert failed
        found = await committed_values(cluster_bootstrap, topic, 6)
        assert sorted(found) == sorted(b"%d-%d" % (n, part) for n in (0, 2, 4) for part in range(2))

    run(body())


def test_what_is_read_and_what_is_written_are_committed_together(
    cluster_bootstrap: str, new_topic: Callable[..., str], run: Run
) -> None:
    source, target, name = new_topic(), new_topic(), fresh_name()

    async def copy(limit: int, breaks: bool) -> None:
        reader = Consumer(
            bootstrap_servers=cluster_bootstrap,
            group_id=name,
            auto_offset_reset="earliest",
            max_poll_records=limit,
            delivery="exactly_once",
        )
        async with reader, transactional(cluster_bootstrap, name) as producer:
            reader.subscribe([source])
            records = []
            while not records:
                records = await reader.poll(1_000)
            async with producer.transaction() as tx:
                for record in records:
                    await tx.send(target, record.value)
                await tx.commit_offsets(reader)
                if breaks:
                    raise RuntimeError("the program dies before the end")

    async def body() -> None:
        await require_transactions(cluster_bootstrap)
        async with Producer(bootstrap_servers=cluster_bootstrap) as producer:
            for number in range(9):
                await producer.send(source, b"%d" % number)
        await copy(3, breaks=False)
        with pytest.raises(RuntimeError):
            await copy(3, breaks=True)
        await copy(6, breaks=False)
        found = await committed_values(cluster_bootstrap, target, 9)
        assert found == [b"%d" % number for number in range(9)]

    run(body())


def test_a_second_producer_of_the_same_id_fences_the_first(
    cluster_bootstrap: str, new_topic: Callable[..., str], run: Run
) -> None:
    topic, name = new_topic(), fresh_name()

    async def body() -> None:
        await require_transactions(cluster_bootstrap)
        first, second = (transactional(cluster_bootstrap, name) for _ in range(2))
        async with first, second:
            async with first.transaction() as tx:
                await tx.send(topic, b"first")
            async with second.transaction() as tx:
                await tx.send(topic, b"second")

            async def late() -> None:
                async with first.transaction() as tx:
                    await tx.send(topic, b"late")

            with pytest.raises(Fenced, match="took over") as caught:
                await late()
            assert caught.value.fatal
        assert await committed_values(cluster_bootstrap, topic, 2) == [b"first", b"second"]

    run(body())


def test_a_transaction_needs_an_id_and_a_group() -> None:
    async def body() -> None:
        async with Producer(bootstrap_servers="127.0.0.1:1") as producer:
            with pytest.raises(KafkaError, match=r"need a transactional\.id"):
                producer.transaction()
        async with Consumer(bootstrap_servers="127.0.0.1:1", group_id="g", delivery="exactly_once") as reader:
            with pytest.raises(KafkaError, match="in transactions only"):
                await reader.commit({TopicPartition("t", 0): 1})

    import asyncio

    asyncio.run(body())
