"""Administration of what brokers hold: records, directories, features, settings there are.

Owns the admin requests about logs and features and their typed results. They take an `Admin`, whose connections and
retries they use. Invariant: a call about several partitions or brokers answers for each of them. Called through
`Admin`.
"""

import asyncio
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import NamedTuple

from headrace.base.errors import ErrorCode, KafkaError
from headrace.client.admin import Admin, ConfigResource, ResourceType
from headrace.client.errors import error_code, raise_for
from headrace.client.group_protocol import by_topic
from headrace.client.offsets import missing_partition
from headrace.client.topics import TopicPartition
from headrace.wire.apis import Api


class ReplicaSize(NamedTuple):
    """One replica in a directory."""

    size_bytes: int
    offset_lag: int
    future: bool


class LogDirectory(NamedTuple):
    """One data directory of a broker; sizes are -1 where the broker does not tell."""

    path: str
    error: KafkaError | None
    total_bytes: int
    usable_bytes: int
    replicas: Mapping[TopicPartition, ReplicaSize]


class Upgrade(IntEnum):
    """How the level of a feature may change."""

    UPGRADE = 1
    SAFE_DOWNGRADE = 2
    UNSAFE_DOWNGRADE = 3


async def delete_records(
    admin: Admin, before: Mapping[TopicPartition, int]
) -> dict[TopicPartition, "int | KafkaError"]:
    """Drop records before an offset (-1: all there are); the new first offset of each partition, or why not."""
    for partition in before:
        admin.cluster.track(partition.topic)
    out: dict[TopicPartition, int | KafkaError] = {}

    async def attempt() -> dict[TopicPartition, "int | KafkaError"]:
        await admin.cluster.refresh()
        by_leader: dict[int, list[TopicPartition]] = {}
        for partition in before:
            if isinstance(out.get(partition), int):
                continue
            leader = admin.cluster.leader(partition)
            if leader is None:
                missing = missing_partition(admin.cluster, partition)
                out[partition] = missing
                if missing.code is ErrorCode.LEADER_NOT_AVAILABLE:
                    raise missing
                continue
            by_leader.setdefault(leader[0], []).append(partition)
        for node_id, partitions in by_leader.items():
            out.update(await _delete_at(admin, node_id, {p: before[p] for p in partitions}))
        moved = [e for e in out.values() if isinstance(e, KafkaError) and e.retriable]
        if moved and moved[0].code is not ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
            raise moved[0]
        return out

    return await admin.retried(attempt)


async def _delete_at(
    admin: Admin, node_id: int, before: Mapping[TopicPartition, int]
) -> dict[TopicPartition, "int | KafkaError"]:
    topics = [
        {
            "name": topic,
            "partitions": [
                {"partition_index": number, "offset": before[TopicPartition(topic, number)]}
                for number in numbers
            ],
        }
        for topic, numbers in by_topic(before).items()
    ]
    connection = await admin.cluster.connection(node_id)
    body = {"topics": topics, "timeout_ms": admin.config.request_timeout_ms}
    reply = await connection.request(Api.DELETE_RECORDS, body)
    found: dict[TopicPartition, int | KafkaError] = {}
    for topic in reply.topics:
        for result in topic.partitions:
            partition = TopicPartition(topic.name, result.partition_index)
            code = error_code(result.error_code)
            found[partition] = (
                result.low_watermark
                if code is ErrorCode.NONE
                else KafkaError(code, f"records of {partition}: {code.name}")
            )
    return found


async def describe_log_dirs(
    admin: Admin, brokers: Iterable[int] | None = None
) -> dict[int, list[LogDirectory]]:
    """The data directories of these brokers (None: of all), with the replicas in them."""

    async def attempt() -> dict[int, list[LogDirectory]]:
        await admin.cluster.describe([])
        wanted = sorted(admin.cluster.nodes if brokers is None else brokers)
        return dict(zip(wanted, await asyncio.gather(*(_directories(admin, node) for node in wanted))))

    return await admin.retried(attempt)


async def _directories(admin: Admin, node_id: int) -> list[LogDirectory]:
    connection = await admin.cluster.connection(node_id)
    reply = await connection.request(Api.DESCRIBE_LOG_DIRS, {"topics": None})
    raise_for(reply.error_code, None, f"log directories of broker {node_id}")
    out = []
    for result in reply.results:
        code = error_code(result.error_code)
        replicas = {
            TopicPartition(topic.name, p.partition_index): ReplicaSize(
                p.partition_size, p.offset_lag, p.is_future_key
            )
            for topic in result.topics
            for p in topic.partitions
        }
        error = None if code is ErrorCode.NONE else KafkaError(code, f"{result.log_dir}: {code.name}")
        out.append(LogDirectory(result.log_dir, error, result.total_bytes, result.usable_bytes, replicas))
    return out


async def list_config_resources(admin: Admin, kinds: Iterable[ResourceType] = ()) -> list[ConfigResource]:
    """The resources that have settings of their own, of these kinds or of all."""

    async def attempt() -> list[ConfigResource]:
        connection = await admin.cluster.any_connection()
        reply = await connection.request(
            Api.LIST_CONFIG_RESOURCES, {"resource_types": [int(kind) for kind in kinds]}
        )
        raise_for(reply.error_code, None, "list config resources")
        known = {int(kind): kind for kind in ResourceType}
        return [
            ConfigResource(known[r.resource_type], r.resource_name)
            for r in reply.config_resources
            if r.resource_type in known
        ]

    return await admin.retried(attempt)


async def describe_features(admin: Admin) -> dict[str, int]:
    """The finalized features of the cluster and their levels."""

    async def attempt() -> dict[str, int]:
        connection = await admin.cluster.any_connection()
        return dict(connection.finalized_features)

    return await admin.retried(attempt)


async def update_features(
    admin: Admin,
    levels: Mapping[str, int],
    *,
    kind: Upgrade = Upgrade.UPGRADE,
    validate_only: bool = False,
) -> None:
    """Set the levels of features (0 removes one), or only check that they could be set. Raises KafkaError."""
    updates = [
        {"feature": name, "max_version_level": level, "upgrade_type": int(kind)}
        for name, level in levels.items()
    ]

    async def attempt() -> None:
        connection = await admin.cluster.controller()
        body = {
            "timeout_ms": admin.config.request_timeout_ms,
            "feature_updates": updates,
            "validate_only": validate_only,
        }
        reply = await connection.request(Api.UPDATE_FEATURES, body)
        raise_for(reply.error_code, reply.error_message, "update features")
        for result in reply.results or ():
            raise_for(result.error_code, result.error_message, f"feature {result.feature}")

    await admin.retried(attempt)
