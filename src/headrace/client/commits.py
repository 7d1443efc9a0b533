"""Committed offsets of a group: written and read at its coordinator.

Owns OffsetCommit and OffsetFetch with their retries. Invariant: a commit that returns is stored; one that the group
refuses, because this member is no longer its own, raises NotInGroup and was not stored. Called by `group` and `admin`.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from headrace.base.errors import ErrorCode, KafkaError
from headrace.client.coordinator import Coordinator
from headrace.client.errors import NotInGroup, error_code
from headrace.client.group_protocol import by_topic
from headrace.client.topics import OffsetAndMetadata, TopicPartition
from headrace.wire.apis import Api
from headrace.wire.messages import Message

BY_NAME_HIGHEST = 9
GROUPS_FROM = 8
NOT_COMMITTED = -1

_REMOVED = frozenset(
    {
        ErrorCode.ILLEGAL_GENERATION,
        ErrorCode.UNKNOWN_MEMBER_ID,
        ErrorCode.FENCED_INSTANCE_ID,
        ErrorCode.FENCED_MEMBER_EPOCH,
        ErrorCode.REBALANCE_IN_PROGRESS,
    }
)


class MemberIdentity(NamedTuple):
    """Who commits: a member of a generation (or member epoch), or nobody in particular."""

    generation: int = -1
    member_id: str = ""
    instance_id: str | None = None


NOBODY = MemberIdentity()


def offset_topics(offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> list[dict[str, Any]]:
    """Offsets as the requests that commit them carry them."""
    return [
        {
            "name": topic,
            "partitions": [
                {
                    "partition_index": number,
                    "committed_offset": offsets[TopicPartition(topic, number)].offset,
                    "committed_leader_epoch": offsets[TopicPartition(topic, number)].leader_epoch,
                    "committed_metadata": offsets[TopicPartition(topic, number)].metadata,
                }
                for number in numbers
            ],
        }
        for topic, numbers in by_topic(offsets).items()
    ]


async def commit_once(
    coordinator: Coordinator, identity: MemberIdentity, offsets: Mapping[TopicPartition, OffsetAndMetadata]
) -> None:
    """Commit, or raise KafkaError."""
    body = {
        "group_id": coordinator.key,
        "generation_id_or_member_epoch": identity.generation,
        "member_id": identity.member_id,
        "group_instance_id": identity.instance_id,
        "topics": offset_topics(offsets),
    }
    reply = await coordinator.request(Api.OFFSET_COMMIT, body, highest=BY_NAME_HIGHEST)
    for topic in reply.topics:
        for result in topic.partitions:
            code = error_code(result.error_code)
            if code in _REMOVED:
                raise NotInGroup(
                    f"cannot commit {topic.name}-{result.partition_index}: {code.name}",
                    "the group gave the partition to another member, or is about to: poll, and process again",
                    code,
                )
            if code is not ErrorCode.NONE:
                coordinator.note(code)
                raise KafkaError(code, f"cannot commit {topic.name}-{result.partition_index}: {code.name}")


async def commit_offsets(
    coordinator: Coordinator,
    identity: MemberIdentity,
    offsets: Mapping[TopicPartition, OffsetAndMetadata],
    timeout_ms: int,
) -> None:
    """Commit, trying again while that may help. Raises KafkaError."""
    if offsets:
        await coordinator.retried(timeout_ms, lambda: commit_once(coordinator, identity, offsets))


async def fetch_committed(
    coordinator: Coordinator,
    partitions: Iterable[TopicPartition] | None,
    timeout_ms: int,
    *,
    identity: MemberIdentity = NOBODY,
    stable: bool = True,
) -> dict[TopicPartition, OffsetAndMetadata]:
    """What the group committed, of these partitions or (None) of all; partitions without a commit are left out.

    `stable` waits for transactions that are about to commit offsets. Raises KafkaError.
    """
    wanted = None if partitions is None else by_topic(partitions)
    topics = (
        None
        if wanted is None
        else [{"name": t, "partition_indexes": numbers} for t, numbers in wanted.items()]
    )

    async def attempt() -> dict[TopicPartition, OffsetAndMetadata]:
        connection = await coordinator.connection()
        body: dict[str, Any] = {"require_stable": stable}
        if connection.version(Api.OFFSET_FETCH, BY_NAME_HIGHEST) >= GROUPS_FROM:
            group: dict[str, Any] = {"group_id": coordinator.key, "topics": topics}
            if identity.member_id:
                group |= {"member_id": identity.member_id, "member_epoch": identity.generation}
            body["groups"] = [group]
        else:
            body |= {"group_id": coordinator.key, "topics": topics}
        reply = await coordinator.request(Api.OFFSET_FETCH, body, highest=BY_NAME_HIGHEST)
        return _committed(coordinator, reply.groups[0] if reply.groups else reply)

    return await coordinator.retried(timeout_ms, attempt)


def _committed(coordinator: Coordinator, group: Message) -> dict[TopicPartition, OffsetAndMetadata]:
    _check(coordinator, group.error_code)
    found = {}
    for topic in group.topics:
        for result in topic.partitions:
            _check(coordinator, result.error_code)
            if result.committed_offset != NOT_COMMITTED:
                found[TopicPartition(topic.name, result.partition_index)] = OffsetAndMetadata(
                    result.committed_offset, result.metadata or "", result.committed_leader_epoch
                )
    return found


def _check(coordinator: Coordinator, number: int) -> None:
    if number:
        code = error_code(number)
        coordinator.note(code)
        raise KafkaError(code, f"committed offsets of group {coordinator.key!r}: {code.name}")
