"""Offsets by time and at the ends of partitions, asked of each partition's leader.

Owns ListOffsets with its retries: partitions whose leader moved are asked again, the others are not. Called
by `consumer` and, through it, by the command line.
"""

import asyncio
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from headrace.base.errors import ErrorCode, KafkaError
from headrace.client.cluster import Cluster
from headrace.client.errors import ClientError, error_code
from headrace.client.retry import with_retries
from headrace.client.topics import TopicPartition
from headrace.wire.apis import Api

LATEST = -1
EARLIEST = -2
MAX_TIMESTAMP = -3
UNKNOWN_OFFSET = -1


class OffsetAndTimestamp(NamedTuple):
    """An offset, and the timestamp of the record there when one was asked for by time (else -1)."""

    offset: int
    timestamp_ms: int
    leader_epoch: int


async def list_offsets(
    cluster: Cluster, wanted: Mapping[TopicPartition, int], *, read_committed: bool, timeout_ms: int
) -> dict[TopicPartition, OffsetAndTimestamp]:
    """For each partition the first offset at or after a time, or one of EARLIEST, LATEST, MAX_TIMESTAMP.

    A time after all records gives the offset UNKNOWN_OFFSET. Raises KafkaError.
    """
    found: dict[TopicPartition, OffsetAndTimestamp] = {}
    for partition in wanted:
        cluster.track(partition.topic)

    async def attempt() -> None:
        missing = [p for p in wanted if p not in found]
        if any(cluster.leader(p) is None for p in missing):
            await cluster.refresh()
        requests = [
            _ask(cluster, node_id, {p: wanted[p] for p in asked}, read_committed, found)
            for node_id, asked in _by_leader(cluster, missing).items()
        ]
        results = await asyncio.gather(*requests, return_exceptions=True)
        failures = [result for result in results if result is not None]
        if failures:
            await cluster.refresh()
            raise failures[0]

    await with_retries(cluster, timeout_ms, attempt)
    return found


def _by_leader(cluster: Cluster, partitions: Iterable[TopicPartition]) -> dict[int, list[TopicPartition]]:
    grouped: dict[int, list[TopicPartition]] = {}
    for partition in partitions:
        leader = cluster.leader(partition)
        if leader is None:
            raise missing_partition(cluster, partition)
        grouped.setdefault(leader[0], []).append(partition)
    return grouped


def missing_partition(cluster: Cluster, partition: TopicPartition) -> KafkaError:
    """Why a partition has no known leader."""
    topic = cluster.topics.get(partition.topic)
    if topic is None or topic.error is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
        return KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"topic {partition.topic!r} does not exist")
    if topic.error is not ErrorCode.NONE:
        return KafkaError(topic.error, f"topic {partition.topic!r}: {topic.error.name}")
    if partition.partition not in topic.partitions:
        return ClientError(
            f"topic {partition.topic!r} has {len(topic.partitions)} partitions, so there is no partition "
            f"{partition.partition}",
            f"use 0 to {len(topic.partitions) - 1}",
            ErrorCode.INVALID_PARTITIONS,
        )
    return KafkaError(ErrorCode.LEADER_NOT_AVAILABLE, f"{partition} has no leader")


async def _ask(
    cluster: Cluster,
    node_id: int,
    wanted: Mapping[TopicPartition, int],
    read_committed: bool,
    found: dict[TopicPartition, OffsetAndTimestamp],
) -> None:
    topics: dict[str, list[dict[str, int]]] = {}
    for partition, timestamp_ms in wanted.items():
        leader = cluster.leader(partition)
        entry = {
            "partition_index": partition.partition,
            "current_leader_epoch": leader[1] if leader is not None else -1,
            "timestamp": timestamp_ms,
        }
        topics.setdefault(partition.topic, []).append(entry)
    body = {
        "replica_id": -1,
        "isolation_level": int(read_committed),
        "topics": [{"name": name, "partitions": entries} for name, entries in topics.items()],
        "timeout_ms": cluster.config.request_timeout_ms,
    }
    connection = await cluster.connection(node_id)
    reply = await connection.request(Api.LIST_OFFSETS, body)
    failure: KafkaError | None = None
    for topic in reply.topics:
        for result in topic.partitions:
            partition = TopicPartition(topic.name, result.partition_index)
            code = error_code(result.error_code)
            if code is ErrorCode.NONE:
                found[partition] = OffsetAndTimestamp(result.offset, result.timestamp, result.leader_epoch)
            else:
                failure = KafkaError(code, f"offsets of {partition}: {code.name}")
    if failure is not None:
        raise failure
