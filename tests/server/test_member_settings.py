"""What a cluster does with settings: those that contradict each other, and those that are asked of the wrong broker."""

import logging
from typing import Any

import pytest

from headrace.base.errors import ErrorCode, KafkaError
from headrace.cluster.image import BROKER_RESOURCE, TOPIC_RESOURCE
from headrace.cluster.records import ConfigRecord
from headrace.server.forwarding import BROKER_LOGGER
from headrace.server.main import HANDLERS
from headrace.wire.apis import Api
from tests.server.members import Cluster, Node, until, with_cluster

MIN_LAG, MAX_LAG = "log.cleaner.min.compaction.lag.ms", "log.cleaner.max.compaction.lag.ms"
LOGGER = "headrace.server.router"


async def put(cluster: Cluster, kind: int, name: str, key: str, value: str) -> None:
    """Have a setting in the metadata log without asking whether it can be, and known to every broker."""
    active = await cluster.active()
    await active.broker.commit([ConfigRecord(kind, name, key, value)])
    await until(lambda: all(node.image.config(kind, name).get(key) == value for node in cluster.alive))


async def started_again(cluster: Cluster, node: Node) -> Node:
    again = cluster.nodes[node.id] = cluster.made(node.id)
    await again.start()
    return again


def coordinates(node: Node) -> bool:
    """Whether a broker answers for a group."""
    try:
        return node.broker.groups.heartbeat("g", "nobody", None, 1) is ErrorCode.UNKNOWN_MEMBER_ID
    except KafkaError:
        return False


def test_a_topic_whose_settings_contradict_the_defaults_fails_over_as_any_other() -> None:
    async def scenario(cluster: Cluster) -> None:
        leader = await cluster.other()
        follower = await cluster.other(leader)
        await cluster.create("t", [[leader.id, follower.id]], min_compaction_lag_ms="10000")
        await put(cluster, BROKER_RESOURCE, "", MAX_LAG, "5000")
        await leader.die()
        await until(lambda: cluster.partition("t").leader == follower.id, "for another leader")
        again = await started_again(cluster, leader)
        await until(lambda: leader.id in cluster.partition("t").isr, "for it to be in sync")
        config = again.broker.topic_config("t")
        assert (config.min_compaction_lag_ms, config.max_compaction_lag_ms) == (10_000, 5_000)

    with_cluster(scenario)


def test_a_setting_that_one_broker_cannot_have_keeps_it_neither_from_starting_nor_from_its_work() -> None:
    async def scenario(cluster: Cluster) -> None:
        odd = await cluster.other()
        await put(cluster, BROKER_RESOURCE, str(odd.id), MAX_LAG, "1000")
        await put(cluster, BROKER_RESOURCE, "", MIN_LAG, "5000")
        await put(cluster, BROKER_RESOURCE, "", "message.max.bytes", "2000000")
        assert odd.broker.config.message_max_bytes == 2_000_000
        assert odd.broker.config.log_cleaner_min_compaction_lag_ms == 0
        await cluster.create("__consumer_offsets", [[odd.id]], cleanup_policy="compact")
        await until(lambda: coordinates(odd), "for a coordinator")
        await odd.die()
        again = await started_again(cluster, odd)
        assert again.broker.config.message_max_bytes == 2_000_000
        await until(lambda: coordinates(again), "for a coordinator")

    with_cluster(scenario)


def test_a_change_that_the_controller_fails_on_is_answered_and_those_behind_it_are_decided(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> dict[str, Any]:
        raise ZeroDivisionError("what went wrong")

    async def scenario(cluster: Cluster) -> None:
        asked = await cluster.other()
        topics = {"topics": [{"name": "t", "num_partitions": 1, "replication_factor": 1}]}
        logging.getLogger("headrace").propagate = True
        with monkeypatch.context() as patched, caplog.at_level(logging.ERROR):
            patched.setitem(HANDLERS, Api.CREATE_TOPICS, broken)
            patched.setitem(HANDLERS, Api.ALLOCATE_PRODUCER_IDS, broken)
            with pytest.raises(KafkaError) as raised:
                await asked.ask(Api.CREATE_TOPICS, 7, topics)
            assert raised.value.code is ErrorCode.UNKNOWN_SERVER_ERROR
            reply = await asked.ask(Api.ALLOCATE_PRODUCER_IDS, 0, {})
            assert reply.error_code == ErrorCode.UNKNOWN_SERVER_ERROR
        assert "ZeroDivisionError: what went wrong" in caplog.text
        assert (await asked.ask(Api.CREATE_TOPICS, 7, topics)).topics[0].error_code == 0

    with_cluster(scenario)


def test_loggers_and_other_resources_are_changed_in_one_request_by_any_broker() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.create("t", [[1, 2, 3]])
        asked = await cluster.other()
        active = await cluster.active()

        def resource(kind: int, name: str, key: str, value: str) -> dict[str, Any]:
            configs = [{"name": key, "config_operation": 0, "value": value}]
            return {"resource_type": kind, "resource_name": name, "configs": configs}

        resources = [
            resource(BROKER_LOGGER, str(asked.id), LOGGER, "ERROR"),
            resource(TOPIC_RESOURCE, "t", "retention.ms", "100000"),
            resource(BROKER_LOGGER, str(active.id), LOGGER, "DEBUG"),
            resource(TOPIC_RESOURCE, "t", "retention.ms", "100000"),
            resource(BROKER_RESOURCE, "", "message.max.bytes", "2000000"),
        ]

        async def alter(*indexes: int) -> list[tuple[int, str, int]]:
            body = {"resources": [resources[index] for index in indexes]}
            link = active.broker.member.peers.link(asked.id)
            reply = await link.request(Api.INCREMENTAL_ALTER_CONFIGS, 1, body, 20_000)
            return [(each.resource_type, each.resource_name, each.error_code) for each in reply.responses]

        assert await alter(0, 1, 2, 4) == [
            (BROKER_LOGGER, str(asked.id), 0),
            (TOPIC_RESOURCE, "t", 0),
            (BROKER_LOGGER, str(active.id), ErrorCode.INVALID_REQUEST),
            (BROKER_RESOURCE, "", 0),
        ]
        assert logging.getLogger(LOGGER).level == logging.ERROR
        assert asked.image.config(TOPIC_RESOURCE, "t") == {"retention.ms": "100000"}
        assert [code for _, _, code in await alter(1, 0, 3)] == [42, 0, 42], "a topic twice is refused twice"
        assert await alter(0) == [(BROKER_LOGGER, str(asked.id), 0)]

    try:
        with_cluster(scenario)
    finally:
        logging.getLogger(LOGGER).setLevel(logging.NOTSET)
