"""Administration of a live cluster."""

from collections.abc import Callable
from typing import Any

import pytest

from headrace.base.errors import ErrorCode, KafkaError
from headrace.client.admin import Admin, ConfigOp, ConfigResource, ConfigSource, NewTopic, ResourceType

Run = Callable[..., Any]


def test_topics_are_created_described_grown_and_deleted(cluster_bootstrap: str, run: Run) -> None:
    async def body() -> None:
        async with Admin({"bootstrap.servers": cluster_bootstrap}) as admin:
            topics = [NewTopic("admin-a", 2, 1, {"retention.ms": "5000"}), NewTopic("admin bad", 1, 1)]
            good, bad = await admin.create_topics(topics)
            assert good == ("admin-a", None)
            assert bad.error is not None and bad.error.code is ErrorCode.INVALID_TOPIC_EXCEPTION
            with pytest.raises(KafkaError) as caught:
                await admin.create_topic(NewTopic("admin-a", 1, 1))
            assert caught.value.code is ErrorCode.TOPIC_ALREADY_EXISTS
            (topic,) = await admin.describe_topics(["admin-a"])
            assert sorted(topic.partitions) == [0, 1]
            await admin.create_partitions("admin-a", 3)
            while [len(t.partitions) for t in await admin.list_topics() if t.name == "admin-a"] != [3]:
                pass  # a cluster may take a moment to tell; `run` bounds the wait
            with pytest.raises(KafkaError) as caught:
                await admin.create_partitions("admin-a", 2)
            assert caught.value.code is ErrorCode.INVALID_PARTITIONS
            deleted, missing = await admin.delete_topics(["admin-a", "admin-nowhere"])
            assert deleted.error is None
            assert missing.error is not None and missing.error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            while (await admin.describe_topics(["admin-a"]))[
                0
            ].error is not ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                pass

    run(body())


def test_a_dry_run_creates_nothing(cluster_bootstrap: str, run: Run) -> None:
    async def body() -> None:
        async with Admin({"bootstrap.servers": cluster_bootstrap}) as admin:
            await admin.create_topic(NewTopic("admin-dry", 1, 1), validate_only=True)
            assert "admin-dry" not in [topic.name for topic in await admin.list_topics()]

    run(body())


def test_settings_are_described_and_altered(
    cluster_bootstrap: str, new_topic: Callable[..., str], run: Run
) -> None:
    resource = ConfigResource(ResourceType.TOPIC, new_topic())

    async def body() -> None:
        async with Admin({"bootstrap.servers": cluster_bootstrap}) as admin:
            await admin.alter_configs(resource, [(ConfigOp.SET, "retention.ms", "777")])
            (entry,) = await admin.describe_configs(resource, ["retention.ms"])
            assert (entry.value, entry.source) == ("777", ConfigSource.DYNAMIC_TOPIC_CONFIG)
            await admin.alter_configs(resource, [(ConfigOp.DELETE, "retention.ms", None)])
            (entry,) = await admin.describe_configs(resource, ["retention.ms"])
            assert (entry.value, entry.source) == ("604800000", ConfigSource.DEFAULT_CONFIG)
            with pytest.raises(KafkaError) as caught:
                await admin.alter_configs(resource, [(ConfigOp.SET, "no.such.key", "1")])
            assert caught.value.code is ErrorCode.INVALID_CONFIG

    run(body())


def test_a_broker_is_asked_about_its_own_settings(cluster_bootstrap: str, run: Run) -> None:
    async def body() -> None:
        async with Admin({"bootstrap.servers": cluster_bootstrap}) as admin:
            cluster_id, _, nodes = await admin.describe_cluster()
            assert cluster_id
            entries = await admin.describe_configs(ConfigResource(ResourceType.BROKER, str(nodes[0].node_id)))
            assert "num.partitions" in [entry.name for entry in entries]
            with pytest.raises(KafkaError, match="there is no broker 4242"):
                await admin.describe_configs(ConfigResource(ResourceType.BROKER, "4242"))
            with pytest.raises(KafkaError, match="'x' is not a broker id"):
                await admin.describe_configs(ConfigResource(ResourceType.BROKER, "x"))

    run(body())
