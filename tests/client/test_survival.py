"""The client over a broker that is killed, paused and restarted."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import KafkaError
from headrace.client.admin import Admin
from headrace.client.consumer import Consumer
from headrace.client.producer import Producer
from headrace.client.topics import TopicPartition
from headrace.testing import Broker
from tests.testing.waiting import wait_until

Run = Callable[..., Any]


def test_records_sent_across_kills_arrive_once_and_in_order(tmp_path: Path, run: Run) -> None:
    with Broker(data_dir=tmp_path / "data") as broker:
        broker.create_topic("t", config={"flush.messages": "1"})

        async def body() -> None:
            where = TopicPartition("t", 0)
            config = {"bootstrap.servers": broker.bootstrap, "auto.offset.reset": "earliest"}
            async with Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 0}) as producer:
                sent = []
                for number in range(300):
                    sent.append(await producer.send("t", b"%d" % number))
                    if number in (100, 200):
                        await sent[-50]  # some are acknowledged, some are on their way
                        await asyncio.to_thread(broker.restart, clean=number == 200)
                offsets = [(await delivery).offset for delivery in sent]
            assert offsets == list(range(300))
            async with Consumer(config) as consumer:
                consumer.assign([where])
                found: list[bytes | None] = []
                while len(found) < 300:
                    found += [record.value for record in await consumer.poll(5_000)]
                assert found == [b"%d" % number for number in range(300)]
                assert await consumer.end_offsets([where]) == {where: 300}

        run(body())


def test_a_reader_goes_on_after_a_restart(tmp_path: Path, run: Run) -> None:
    with Broker(data_dir=tmp_path / "data") as broker:
        broker.create_topic("t", config={"flush.messages": "1"})

        async def body() -> None:
            config = {"bootstrap.servers": broker.bootstrap, "auto.offset.reset": "earliest"}
            async with (
                Consumer(config) as consumer,
                Producer({"bootstrap.servers": broker.bootstrap}) as producer,
            ):
                consumer.assign([TopicPartition("t", 0)])
                await (await producer.send("t", b"before"))
                assert (await anext(consumer)).value == b"before"
                await asyncio.to_thread(broker.restart, clean=False)
                await (await producer.send("t", b"after"))
                assert (await anext(consumer)).value == b"after"

        run(body())


def test_a_paused_broker_delays_records_and_loses_none(run: Run) -> None:
    with Broker() as broker:
        broker.create_topic("t")

        async def body() -> None:
            quick = {"request.timeout.ms": 500, "bootstrap.servers": broker.bootstrap, "linger.ms": 0}
            async with Producer(quick) as producer:
                await (await producer.send("t", b"0"))
                broker.pause()
                sent = [await producer.send("t", b"%d" % number) for number in range(1, 20)]
                await asyncio.to_thread(
                    wait_until, lambda: producer.cluster.last_error is not None, "a request timed out"
                )
                broker.resume()
                assert [(await delivery).offset for delivery in sent] == list(range(1, 20))

        run(body())


def test_an_address_where_nothing_listens_is_reported_soon(run: Run) -> None:
    async def body() -> None:
        async with Admin({"bootstrap.servers": "127.0.0.1:1"}) as admin:
            with pytest.raises(KafkaError, match=r"cannot connect to 127\.0\.0\.1:1: connection refused"):
                await admin.list_topics()
        async with Producer({"bootstrap.servers": "127.0.0.1:1"}) as producer:
            with pytest.raises(KafkaError, match="connection refused"):
                await producer.send("t", b"x")

    run(body())


def test_any_bootstrap_address_that_answers_will_do(run: Run) -> None:
    with Broker() as broker:

        async def body() -> None:
            async with Admin({"bootstrap.servers": f"127.0.0.1:1,{broker.bootstrap}"}) as admin:
                assert await admin.list_topics() == []

        run(body())


def test_when_all_known_brokers_are_gone_the_bootstrap_addresses_are_asked_again(run: Run) -> None:
    with Broker() as old, Broker() as new:
        for broker in (old, new):
            broker.create_topic("t")

        async def body() -> None:
            addresses = f"{old.bootstrap},{new.bootstrap}"
            async with Producer({"bootstrap.servers": addresses, "linger.ms": 0}) as producer:
                await producer.partitions("t")
                known = producer.cluster.nodes[1]
                first = old if old.bootstrap.endswith(f":{known.port}") else new
                await (await producer.send("t", b"to the first"))
                await asyncio.to_thread(first.kill)
                assert (await (await producer.send("t", b"to the other"))).offset == 0
                assert producer.cluster.nodes[1].port != known.port

        run(body())
