"""Group requests over the wire: every version is answered, odd input gets Kafka's error, others are not harmed."""

from collections.abc import Iterator
from typing import Any

import pytest

from headrace.base.errors import ErrorCode
from headrace.base.ids import ZERO_ID
from headrace.testing import Broker
from headrace.wire.apis import SUPPORTED, Api
from headrace.wire.messages import Message
from tests.server.raw import RawClient

TOPIC = "groups"
SESSION = {"session_timeout_ms": 10_000, "rebalance_timeout_ms": 10_000}
RANGE = {"protocol_type": "consumer", "protocols": [{"name": "range", "metadata": b"\0\0\0\0\0\0"}]}


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with Broker(settings={"group.initial.rebalance.delay.ms": 0}) as running:
        with connect(running) as client:
            client.create(TOPIC, 2)
            client.call(Api.FIND_COORDINATOR, 3, {"key": "g", "key_type": 0})
        yield running


def connect(broker: Broker) -> RawClient:
    host, _, port = broker.bootstrap.rpartition(":")
    return RawClient(host, int(port))


@pytest.fixture
def client(broker: Broker) -> Iterator[RawClient]:
    with connect(broker) as made:
        yield made


def topic_id(client: RawClient) -> bytes:
    [topic] = client.call(Api.METADATA, 12, {"topics": [{"name": TOPIC}]}).topics
    return bytes(topic.topic_id)


def commit(client: RawClient, group: str, version: int, offset: int = 7, **fields: Any) -> list[int]:
    metadata = fields.pop("metadata", "note")
    topic = {
        "name": fields.pop("topic", TOPIC),
        "topic_id": fields.pop("topic_id", topic_id(client)),
        "partitions": [
            {"partition_index": index, "committed_offset": offset, "committed_metadata": metadata}
            for index in fields.pop("partitions", (1,))
        ],
    }
    reply = client.call(Api.OFFSET_COMMIT, version, {"group_id": group, "topics": [topic], **fields})
    return [each.error_code for each in reply.topics[0].partitions]


def fetch(client: RawClient, group: str, version: int, everything: bool = False) -> Message:
    """The one partition's answer."""
    asked: dict[str, Any] = {"name": TOPIC, "partition_indexes": [1]}
    if version < 8:
        reply = client.call(
            Api.OFFSET_FETCH, version, {"group_id": group, "topics": None if everything else [asked]}
        )
    else:
        asked["topic_id"] = topic_id(client) if version >= 10 else ZERO_ID
        body = {"groups": [{"group_id": group, "topics": None if everything else [asked]}]}
        [reply] = client.call(Api.OFFSET_FETCH, version, body).groups
    [topic] = reply.topics
    [partition] = topic.partitions
    return partition


def joined(client: RawClient, group: str, version: int = 9) -> Message:
    """A member whose join is answered; it leads."""
    body = {"group_id": group, "member_id": "", **SESSION, **RANGE}
    reply = client.call(Api.JOIN_GROUP, version, body)
    if reply.error_code == ErrorCode.MEMBER_ID_REQUIRED:
        reply = client.call(Api.JOIN_GROUP, version, {**body, "member_id": reply.member_id})
    assert reply.error_code == 0
    return reply


@pytest.mark.parametrize(
    "version", range(SUPPORTED[Api.OFFSET_COMMIT][0], SUPPORTED[Api.OFFSET_COMMIT][1] + 1)
)
def test_every_version_of_a_commit_is_read_by_every_version_of_a_fetch(
    version: int, client: RawClient
) -> None:
    group = f"versions-{version}"
    assert commit(client, group, version) == [0]
    for fetching in range(1, 11):
        found = fetch(client, group, fetching)
        assert (found.committed_offset, found.metadata, found.error_code) == (7, "note", 0)
        if fetching >= 2:
            assert fetch(client, group, fetching, everything=True).committed_offset == 7
    assert fetch(client, "nobody", 7).committed_offset == -1


@pytest.mark.parametrize("version", range(10))
def test_every_version_of_the_member_requests_makes_a_round(version: int, client: RawClient) -> None:
    group = f"round-{version}"
    member = joined(client, group, version)
    assert (member.generation_id, member.protocol_name, member.leader) == (1, "range", member.member_id)
    assert [each.member_id for each in member.members] == [member.member_id]
    who = {"group_id": group, "member_id": member.member_id, "generation_id": 1}
    named = {"protocol_type": "consumer", "protocol_name": "range"}
    given = {"assignments": [{"member_id": member.member_id, "assignment": b"mine"}]}
    assert (
        bytes(client.call(Api.SYNC_GROUP, min(version, 5), {**who, **named, **given}).assignment) == b"mine"
    )
    assert client.call(Api.HEARTBEAT, min(version, 4), who).error_code == 0
    [described] = client.call(Api.DESCRIBE_GROUPS, min(version, 6), {"groups": [group]}).groups
    assert (described.group_state, described.protocol_data) == ("Stable", "range")
    assert [bytes(each.member_assignment) for each in described.members] == [b"mine"]
    listed = client.call(Api.LIST_GROUPS, min(version, 5), {}).groups
    assert group in [each.group_id for each in listed]
    leaving = {"group_id": group, "member_id": member.member_id, "members": [{"member_id": member.member_id}]}
    if version < 3:
        del leaving["members"]
    else:
        del leaving["member_id"]
    assert client.call(Api.LEAVE_GROUP, min(version, 5), leaving).error_code == 0
    [deleted] = client.call(Api.DELETE_GROUPS, min(version, 2), {"groups_names": [group]}).results
    assert deleted.error_code == 0


def test_lists_are_filtered_by_state_and_type(client: RawClient) -> None:
    commit(client, "listed", 8)

    def listed(**filters: list[str]) -> bool:
        reply = client.call(Api.LIST_GROUPS, 5, filters)
        return "listed" in [each.group_id for each in reply.groups]

    assert listed(states_filter=["Empty"])
    assert listed(states_filter=["empty"], types_filter=["Classic"])
    assert not listed(states_filter=["Stable"])
    assert not listed(types_filter=["consumer"])


def test_commits_are_refused_for_what_is_not_there(client: RawClient) -> None:
    unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert commit(client, "g", 8, partitions=(0, 2, -1)) == [0, unknown, unknown]
    assert commit(client, "g", 8, topic="no-such") == [unknown]
    assert commit(client, "g", 10, topic_id=b"x" * 16) == [ErrorCode.UNKNOWN_TOPIC_ID]
    asked = [{"topic_id": b"x" * 16, "partition_indexes": [0]}]
    [group] = client.call(Api.OFFSET_FETCH, 10, {"groups": [{"group_id": "g", "topics": asked}]}).groups
    assert group.topics[0].partitions[0].error_code == ErrorCode.UNKNOWN_TOPIC_ID
    assert commit(client, "g", 8, metadata="m" * 4097) == [ErrorCode.OFFSET_METADATA_TOO_LARGE]
    assert commit(client, "g", 8, metadata="m" * 4096) == [0]


def test_odd_group_ids_get_their_error(client: RawClient) -> None:
    join = {"member_id": "", **SESSION, **RANGE}
    invalid = ErrorCode.INVALID_GROUP_ID
    assert client.call(Api.JOIN_GROUP, 9, {"group_id": "", **join}).error_code == invalid
    assert client.call(Api.JOIN_GROUP, 9, {"group_id": "x" * 40_000, **join}).error_code == invalid
    who = {"group_id": "", "member_id": "m", "generation_id": 1}
    assert client.call(Api.HEARTBEAT, 4, who).error_code == invalid
    named = {"protocol_type": "consumer", "protocol_name": "range"}
    assert client.call(Api.SYNC_GROUP, 5, {**who, **named}).error_code == invalid
    assert client.call(Api.SYNC_GROUP, 5, {**who, "group_id": "g"}).error_code == (
        ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    )
    assert commit(client, "x" * 40_000, 9) == [invalid]
    assert commit(client, "ünï/ cödé\n", 9) == [0]
    assert fetch(client, "ünï/ cödé\n", 9).committed_offset == 7


def test_offsets_of_topics_that_are_read_are_not_deleted(client: RawClient) -> None:
    group = "reading"
    metadata = b"\0\0\0\0\0\1" + len(TOPIC).to_bytes(2, "big") + TOPIC.encode() + b"\xff\xff\xff\xff"
    commit(client, group, 8)
    protocols = {"protocol_type": "consumer", "protocols": [{"name": "range", "metadata": metadata}]}
    client.call(Api.JOIN_GROUP, 3, {"group_id": group, "member_id": "", **SESSION, **protocols})

    def delete(name: str, of: str = group) -> Message:
        topics = [{"name": name, "partitions": [{"partition_index": 1}]}]
        return client.call(Api.OFFSET_DELETE, 0, {"group_id": of, "topics": topics})

    assert delete(TOPIC).topics[0].partitions[0].error_code == ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC
    assert delete(TOPIC, "nobody").error_code == ErrorCode.GROUP_ID_NOT_FOUND
    assert delete("no-such").topics[0].partitions[0].error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    commit(client, "done", 8)
    assert delete(TOPIC, "done").topics[0].partitions[0].error_code == 0
    assert fetch(client, "done", 8).committed_offset == -1


def test_a_topic_that_is_deleted_takes_its_offsets_along(client: RawClient) -> None:
    client.create("short-lived", 2)
    assert commit(client, "follower", 8, topic="short-lived") == [0]
    client.call(Api.DELETE_TOPICS, 5, {"topic_names": ["short-lived"], "timeout_ms": 10_000})
    client.create("short-lived", 2)
    body = {"group_id": "follower", "topics": [{"name": "short-lived", "partition_indexes": [1]}]}
    [topic] = client.call(Api.OFFSET_FETCH, 7, body).topics
    assert topic.partitions[0].committed_offset == -1


def test_many_joins_with_fresh_ids_leave_other_groups_alone(broker: Broker) -> None:
    with connect(broker) as crowd, connect(broker) as other:
        member = joined(other, "bystander")
        body = {"group_id": "crowded", "member_id": "", **SESSION, **RANGE}
        for _ in range(2000):
            crowd.send(Api.JOIN_GROUP, 9, body)
            assert crowd.receive().error_code == ErrorCode.MEMBER_ID_REQUIRED
        who = {"group_id": "bystander", "member_id": member.member_id, "generation_id": 1}
        assert other.call(Api.HEARTBEAT, 4, who).error_code == 0
        [described] = crowd.call(Api.DESCRIBE_GROUPS, 5, {"groups": ["crowded"]}).groups
        assert (described.group_state, list(described.members)) == ("Empty", [])
