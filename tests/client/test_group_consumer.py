"""Consumers in groups, both protocols, over a real broker: Headrace, or the cluster that is named."""

import asyncio
import re
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from headrace import Admin, Consumer, KafkaError, NewTopic, Producer, TopicPartition
from headrace.client.connection import Connection
from headrace.wire.apis import Api

Run = Callable[..., Any]
PROTOCOLS = ["classic", "consumer"]


def group_config(bootstrap: str, group: str, protocol: str = "classic", **more: object) -> dict[str, object]:
    values: dict[str, object] = {
        "bootstrap.servers": bootstrap,
        "group.id": group,
        "group.protocol": protocol,
        "auto.offset.reset": "earliest",
    }
    if protocol == "classic":
        values |= {"heartbeat.interval.ms": 100, "session.timeout.ms": 30_000}
    return values | {name.replace("_", "."): value for name, value in more.items()}


async def require(bootstrap: str, protocol: str) -> None:
    """Skip where the cluster does not have the newer protocol."""
    if protocol == "consumer":
        async with Admin({"bootstrap.servers": bootstrap}) as admin:
            connection: Connection = await admin.cluster.any_connection()
            if Api.CONSUMER_GROUP_HEARTBEAT not in connection.versions:
                pytest.skip("this cluster has no ConsumerGroupHeartbeat")


async def fill(bootstrap: str, topic: str, count: int, partitions: int = 1) -> None:
    async with Producer({"bootstrap.servers": bootstrap}) as producer:
        for number in range(count):
            await producer.send(topic, b"%d" % number, partition=number % partitions)
        await producer.flush()


async def poll_until(consumers: list[Consumer], done: Callable[[], bool], found: list[Any]) -> None:
    while not done():
        for consumer in consumers:
            found += await consumer.poll(50)


def fresh_group() -> str:
    return f"group-{uuid.uuid4().hex[:12]}"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_members_share_partitions_and_pass_them_on(
    protocol: str, cluster_bootstrap: str, new_topic: Callable[..., str], run: Run
) -> None:
    topic, group = new_topic(partitions=4), fresh_group()
    everything = {TopicPartition(topic, number) for number in range(4)}

    async def body() -> None:
        await require(cluster_bootstrap, protocol)
        await fill(cluster_bootstrap, topic, 40, partitions=4)
        found: list[Any] = []
        config = group_config(cluster_bootstrap, group, protocol)
        async with Consumer(config) as first:
            first.subscribe([topic])
            await poll_until([first], lambda: len(found) == 40, found)
            assert set(first.assignment) == everything
            async with Consumer(config) as second:
                second.subscribe(topic)
                both = [first, second]
                await poll_until(both, lambda: len(first.assignment) == len(second.assignment) == 2, found)
                assert set(first.assignment) | set(second.assignment) == everything
                assert len(found) == 40, "what was committed before partitions moved is not read again"
            await poll_until([first], lambda: len(first.assignment) == 4, found)
            assert len(found) == 40
            await fill(cluster_bootstrap, topic, 4, partitions=4)
            await poll_until([first], lambda: len(found) == 44, found)

    run(body())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_group_goes_on_where_its_commits_ended(
    protocol: str, cluster_bootstrap: str, new_topic: Callable[..., str], run: Run
) -> None:
    topic, group = new_topic(), fresh_group()
    where = TopicPartition(topic, 0)

    async def body() -> None:
        await require(cluster_bootstrap, protocol)
        await fill(cluster_bootstrap, topic, 10)
        config = group_config(cluster_bootstrap, group, protocol, enable_auto_commit=False)
        async with Consumer(config) as consumer:
            consumer.subscribe([topic])
            async for record in consumer:
                if record.offset == 6:
                    break
            await consumer.commit()
            assert (await consumer.committed([where]))[where] == (7, "", -1)
            assert await consumer.position(where) == 7
            assert await consumer.lag(where) == 3
        async with Consumer(config) as consumer:
            consumer.subscribe([topic])
            assert (await anext(consumer)).offset == 7
            done = asyncio.get_running_loop().create_future()
            consumer.commit_soon({where: 9}, lambda offsets, error: done.set_result((dict(offsets), error)))
            assert await done == ({where: (9, "", -1)}, None)
        async with Consumer(config) as consumer:
            consumer.subscribe([topic])
            assert [record.offset for record in await consumer.poll(30_000)] == [9]

    run(body())


@pytest.mark.parametrize(
    "strategies", ["range", "roundrobin", "sticky", "cooperative-sticky", "range,cooperative-sticky"]
)
def test_every_assignor_gives_each_partition_to_one_member(
    strategies: str, cluster_bootstrap: str, new_topic: Callable[..., str], run: Run
) -> None:
    topics, group = [new_topic(partitions=3), new_topic(partitions=2)], fresh_group()
    everything = {TopicPartition(topics[0], n) for n in range(3)} | {
        TopicPartition(topics[1], n) for n in range(2)
    }

    async def body() -> None:
        config = group_config(cluster_bootstrap, group, partition_assignment_strategy=strategies)
        async with Consumer(config) as first, Consumer(config) as second:
            for consumer in (first, second):
                consumer.subscribe(topics)

            def settled() -> bool:
                mine, yours = set(first.assignment), set(second.assignment)
                return bool(mine and yours) and mine | yours == everything and not mine & yours

            await poll_until([first, second], settled, [])

    run(body())


class Listener:
    def __init__(self) -> None:
        self.heard: list[tuple[str, int]] = []

    async def on_assigned(self, partitions: list[TopicPartition]) -> None:
        self.heard.append(("assigned", len(partitions)))

    def on_revoked(self, partitions: list[TopicPartition]) -> None:
        self.heard.append(("revoked", len(partitions)))

    async def on_lost(self, partitions: list[TopicPartition]) -> None:
        self.heard.append(("lost", len(partitions)))


def test_listeners_hear_of_partitions_that_come_and_go(
    cluster_bootstrap: str, new_topic: Callable[..., str], run: Run
) -> None:
    topic, group = new_topic(partitions=2), fresh_group()

    async def body() -> None:
        eager, careful = Listener(), Listener()
        config = group_config(cluster_bootstrap, group, partition_assignment_strategy="cooperative-sticky")
        async with Consumer(config) as first:
            first.subscribe([topic], careful)
            await poll_until([first], lambda: len(first.assignment) == 2, [])
            async with Consumer(config) as second:
                second.subscribe([topic], eager)
                await poll_until([first, second], lambda: len(second.assignment) == 1, [])
        assert careful.heard[0] == ("assigned", 2)
        assert ("revoked", 1) in careful.heard, "cooperative members give up only what moves"
        assert ("revoked", 2) not in careful.heard[:-1]
        assert ("lost", 1) not in careful.heard
        assert eager.heard[-1] == ("revoked", 1)

    run(body())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_topic_that_is_created_after_subscribing_is_read(
    protocol: str, cluster_bootstrap: str, run: Run
) -> None:
    topic, group = f"later-{uuid.uuid4().hex[:12]}", fresh_group()

    async def body() -> None:
        await require(cluster_bootstrap, protocol)
        async with Consumer(group_config(cluster_bootstrap, group, protocol)) as consumer:
            consumer.subscribe([topic])
            while "to be created" not in consumer.waits_for:
                await consumer.poll(50)
            async with Admin(bootstrap_servers=cluster_bootstrap) as admin:
                await admin.create_topic(NewTopic(topic, 1, 1))
            await fill(cluster_bootstrap, topic, 1)
            assert (await anext(consumer)).value == b"0"

    run(body())


def test_a_pattern_subscribes_to_the_topics_it_matches(
    cluster_bootstrap: str, new_topic: Callable[..., str], run: Run
) -> None:
    topic, group = new_topic(), fresh_group()
    new_topic()

    async def body() -> None:
        await fill(cluster_bootstrap, topic, 3)
        async with Consumer(group_config(cluster_bootstrap, group)) as consumer:
            consumer.subscribe(re.compile(re.escape(topic)))
            assert (await anext(consumer)).topic == topic
            assert consumer.subscription == [topic]

    run(body())


def test_a_static_member_comes_back_to_its_partitions_and_a_double_is_fenced(
    cluster_bootstrap: str, new_topic: Callable[..., str], run: Run
) -> None:
    topic, group = new_topic(partitions=2), fresh_group()

    async def body() -> None:
        config = group_config(cluster_bootstrap, group, group_instance_id="one")
        async with Consumer(config) as member:
            member.subscribe([topic])
            await poll_until([member], lambda: len(member.assignment) == 2, [])
        again = Consumer(config)
        again.subscribe([topic])
        await poll_until([again], lambda: len(again.assignment) == 2, [])
        async with Consumer(config) as double:
            double.subscribe([topic])
            await poll_until([double], lambda: len(double.assignment) == 2, [])
            with pytest.raises(KafkaError, match="took over") as caught:
                await poll_until([again], lambda: False, [])
            assert caught.value.fatal
            await again.close()

    run(body())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_each_delivery_mode_commits_when_it_says(
    protocol: str, cluster_bootstrap: str, new_topic: Callable[..., str], run: Run
) -> None:
    topic = new_topic()
    where = TopicPartition(topic, 0)

    async def first_five(group: str, delivery: Any) -> list[int]:
        config = group_config(cluster_bootstrap, group, protocol, max_poll_records=5)
        seen: list[int] = []

        async def die() -> None:
            async with Consumer(config, delivery=delivery) as consumer:
                consumer.subscribe([topic])
                while not seen:
                    seen.extend([record.offset for record in await consumer.poll(1_000)])
                raise RuntimeError("the program dies with records in hand")

        with pytest.raises(RuntimeError):
            await die()
        return seen

    async def committed(group: str) -> Any:
        async with Consumer(group_config(cluster_bootstrap, group, protocol)) as consumer:
            found = (await consumer.committed([where]))[where]
            return None if found is None else found.offset

    async def body() -> None:
        await require(cluster_bootstrap, protocol)
        await fill(cluster_bootstrap, topic, 10)
        for delivery, expected in (("at_most_once", 5), ("at_least_once", None), ("exactly_once", None)):
            group = fresh_group()
            assert await first_five(group, delivery) == [0, 1, 2, 3, 4]
            assert await committed(group) == expected, delivery

    run(body())


def test_what_a_consumer_waits_for_is_said(cluster_bootstrap: str, run: Run) -> None:
    async def body() -> None:
        async with Consumer(group_config(cluster_bootstrap, fresh_group())) as consumer:
            with pytest.raises(KafkaError, match="nothing to read"):
                await consumer.poll(10)
            consumer.subscribe(["there-is-no-such-topic"])
            while "to be created" not in consumer.waits_for:
                await consumer.poll(10)
            assert "there-is-no-such-topic" in consumer.waits_for
        async with Consumer({"bootstrap.servers": cluster_bootstrap}) as consumer:
            with pytest.raises(KafkaError, match=r"subscribe needs a group") as caught:
                consumer.subscribe(["t"])
            assert "group.id" in caught.value.hint

    run(body())
