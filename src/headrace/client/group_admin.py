"""Administration of groups: list, describe, their offsets, their members.

Owns the admin requests about groups, of both protocols, and their typed results. They take an `Admin`, whose
connections and retries they use. Invariants: each group is asked of its own coordinator; a call about one group
raises, a call about several answers for each of them. Called through `Admin` and by the command line.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from headrace.base.errors import ErrorCode, KafkaError
from headrace.client.admin import Admin, Outcome
from headrace.client.commits import NOBODY, commit_offsets, fetch_committed
from headrace.client.coordinator import Coordinator, CoordinatorKind
from headrace.client.errors import error_code
from headrace.client.group_protocol import by_topic, decode_assignment, decode_subscription
from headrace.client.offsets import LATEST, list_offsets
from headrace.client.topics import OffsetAndMetadata, TopicPartition
from headrace.wire.apis import Api
from headrace.wire.messages import Message

CONSUMER_PROTOCOL = "consumer"


class GroupListing(NamedTuple):
    """A group in a list."""

    group_id: str
    protocol_type: str
    state: str
    type: str
    coordinator: int


class MemberInfo(NamedTuple):
    """One member of a group."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    topics: tuple[str, ...]
    assignment: tuple[TopicPartition, ...]


class GroupInfo(NamedTuple):
    """One group with its members."""

    group_id: str
    type: str
    state: str
    assignor: str
    members: tuple[MemberInfo, ...]


class GroupLag(NamedTuple):
    """How far a group is behind in one partition; `end` is the end of the log."""

    committed: int
    end: int
    lag: int


def coordinator_of(admin: Admin, group_id: str) -> Coordinator:
    """The coordinator of a group."""
    return Coordinator(admin.cluster, CoordinatorKind.GROUP, group_id)


async def list_groups(
    admin: Admin, *, states: Sequence[str] = (), types: Sequence[str] = ()
) -> list[GroupListing]:
    """All groups of the cluster, by name, or those in these states and of these types."""

    async def attempt() -> list[GroupListing]:
        await admin.cluster.describe([])
        asked = [_list_of(admin, node_id, states, types) for node_id in admin.cluster.nodes]
        return sorted(group for found in await asyncio.gather(*asked) for group in found)

    return await admin.retried(attempt)


async def _list_of(
    admin: Admin, node_id: int, states: Sequence[str], types: Sequence[str]
) -> list[GroupListing]:
    connection = await admin.cluster.connection(node_id)
    reply = await connection.request(
        Api.LIST_GROUPS, {"states_filter": list(states), "types_filter": list(types)}
    )
    _check(reply.error_code, None, "list groups")
    return [
        GroupListing(g.group_id, g.protocol_type, g.group_state or "", g.group_type or "classic", node_id)
        for g in reply.groups
    ]


async def describe_group(admin: Admin, group_id: str) -> GroupInfo:
    """One group with its members. Raises KafkaError (GROUP_ID_NOT_FOUND when there is none)."""
    coordinator = coordinator_of(admin, group_id)

    async def attempt() -> GroupInfo:
        connection = await coordinator.connection()
        if Api.CONSUMER_GROUP_DESCRIBE in connection.versions:
            reply = await coordinator.request(Api.CONSUMER_GROUP_DESCRIBE, {"group_ids": [group_id]})
            (group,) = reply.groups
            if group.error_code not in (ErrorCode.GROUP_ID_NOT_FOUND, ErrorCode.UNSUPPORTED_VERSION):
                _check(group.error_code, group.error_message, f"describe group {group_id!r}")
                return _broker_assigned(group)
        reply = await coordinator.request(Api.DESCRIBE_GROUPS, {"groups": [group_id]})
        (group,) = reply.groups
        _check(group.error_code, group.error_message, f"describe group {group_id!r}")
        if group.group_state == "Dead" and not group.members:
            raise KafkaError(ErrorCode.GROUP_ID_NOT_FOUND, f"there is no group {group_id!r}")
        return _classic(group)

    return await coordinator.retried(admin.config.default_api_timeout_ms, attempt)


def _broker_assigned(group: Message) -> GroupInfo:
    members = [
        MemberInfo(
            m.member_id,
            m.instance_id,
            m.client_id,
            m.client_host,
            tuple(m.subscribed_topic_names),
            tuple(
                TopicPartition(topic.topic_name, number)
                for topic in m.assignment.topic_partitions
                for number in topic.partitions
            ),
        )
        for m in group.members
    ]
    return GroupInfo(group.group_id, "consumer", group.group_state, group.assignor_name, tuple(members))


def _classic(group: Message) -> GroupInfo:
    members = []
    for m in group.members:
        topics: tuple[str, ...] = ()
        assignment: tuple[TopicPartition, ...] = ()
        if group.protocol_type == CONSUMER_PROTOCOL and m.member_metadata:
            topics = decode_subscription(bytes(m.member_metadata)).topics
            assignment = tuple(sorted(decode_assignment(bytes(m.member_assignment))))
        members.append(
            MemberInfo(m.member_id, m.group_instance_id, m.client_id, m.client_host, topics, assignment)
        )
    return GroupInfo(group.group_id, "classic", group.group_state, group.protocol_data, tuple(members))


async def delete_groups(admin: Admin, group_ids: Sequence[str]) -> list[Outcome]:
    """Delete groups that have no members, with their offsets."""
    return [await _delete(admin, group_id) for group_id in group_ids]


async def _delete(admin: Admin, group_id: str) -> Outcome:
    coordinator = coordinator_of(admin, group_id)

    async def attempt() -> None:
        reply = await coordinator.request(Api.DELETE_GROUPS, {"groups_names": [group_id]})
        for result in reply.results:
            _check(result.error_code, None, f"delete group {group_id!r}")

    try:
        await coordinator.retried(admin.config.default_api_timeout_ms, attempt)
    except KafkaError as error:
        return Outcome(group_id, error)
    return Outcome(group_id, None)


async def group_offsets(
    admin: Admin, group_id: str, partitions: Iterable[TopicPartition] | None = None
) -> dict[TopicPartition, OffsetAndMetadata]:
    """What a group has committed, of these partitions or of all."""
    timeout_ms = admin.config.default_api_timeout_ms
    return await fetch_committed(coordinator_of(admin, group_id), partitions, timeout_ms, stable=False)


async def group_lag(admin: Admin, group_id: str) -> dict[TopicPartition, GroupLag]:
    """How far a group is behind, in every partition that it has committed."""
    committed = await group_offsets(admin, group_id)
    ends = await list_offsets(
        admin.cluster,
        dict.fromkeys(committed, LATEST),
        read_committed=False,
        timeout_ms=admin.config.default_api_timeout_ms,
    )
    return {
        partition: GroupLag(
            entry.offset, ends[partition].offset, max(0, ends[partition].offset - entry.offset)
        )
        for partition, entry in committed.items()
    }


async def alter_group_offsets(
    admin: Admin, group_id: str, offsets: Mapping[TopicPartition, "OffsetAndMetadata | int"]
) -> None:
    """Set the committed offsets of a group that has no members. Raises KafkaError."""
    entries = {
        partition: entry if isinstance(entry, OffsetAndMetadata) else OffsetAndMetadata(entry)
        for partition, entry in offsets.items()
    }
    timeout_ms = admin.config.default_api_timeout_ms
    await commit_offsets(coordinator_of(admin, group_id), NOBODY, entries, timeout_ms)


async def delete_group_offsets(
    admin: Admin, group_id: str, partitions: Iterable[TopicPartition]
) -> dict[TopicPartition, KafkaError | None]:
    """Forget the committed offsets of partitions that no member is subscribed to; None is done."""
    coordinator = coordinator_of(admin, group_id)
    topics = [
        {"name": topic, "partitions": [{"partition_index": number} for number in numbers]}
        for topic, numbers in by_topic(partitions).items()
    ]

    async def attempt() -> dict[TopicPartition, KafkaError | None]:
        reply = await coordinator.request(Api.OFFSET_DELETE, {"group_id": group_id, "topics": topics})
        _check(reply.error_code, None, f"delete offsets of group {group_id!r}")
        return {
            TopicPartition(topic.name, result.partition_index): _failure(
                result.error_code, None, f"offsets of {topic.name}-{result.partition_index}"
            )
            for topic in reply.topics
            for result in topic.partitions
        }

    return await coordinator.retried(admin.config.default_api_timeout_ms, attempt)


async def remove_members(admin: Admin, group_id: str, instance_ids: Sequence[str]) -> list[Outcome]:
    """Remove static members from a classic group, by their group.instance.id."""
    coordinator = coordinator_of(admin, group_id)
    members: list[dict[str, Any]] = [
        {"member_id": "", "group_instance_id": instance_id, "reason": "removed by an administrator"}
        for instance_id in instance_ids
    ]

    async def attempt() -> list[Outcome]:
        reply = await coordinator.request(Api.LEAVE_GROUP, {"group_id": group_id, "members": members})
        _check(reply.error_code, None, f"remove members of group {group_id!r}")
        return [
            Outcome(
                member.group_instance_id or "",
                _failure(member.error_code, None, f"member {member.group_instance_id!r}"),
            )
            for member in reply.members
        ]

    return await coordinator.retried(admin.config.default_api_timeout_ms, attempt)


def _failure(number: int, message: str | None, what: str) -> KafkaError | None:
    code = error_code(number)
    return None if code is ErrorCode.NONE else KafkaError(code, f"{what}: {message or code.name}")


def _check(number: int, message: str | None, what: str) -> None:
    failure = _failure(number, message, f"cannot {what}")
    if failure is not None:
        raise failure
