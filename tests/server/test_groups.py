"""Group requests over the wire: every version is answered, odd input gets Kafka's error, others are not harmed."""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import ErrorCode
from headrace.base.ids import ZERO_ID
from headrace.coordinators.classic_group import PENDING_MEMBERS_MAX
from headrace.testing import Broker
from headrace.wire.apis import SUPPORTED, Api
from headrace.wire.messages import Message
from tests.server.raw import RawClient

TOPIC = "groups"
JOINS_AT_ONCE = 200
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
    assert delete(TOPIC, "").error_code == ErrorCode.INVALID_GROUP_ID
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


def flood(client: RawClient, bodies: Iterable[dict[str, Any]]) -> Counter[int]:
    """Joins of a member without an id, many at once; how they were answered."""
    told: Counter[int] = Counter()
    left = iter(bodies)
    while bunch := list(islice(left, JOINS_AT_ONCE)):
        for body in bunch:
            client.send(Api.JOIN_GROUP, 9, body)
        told.update(client.receive().error_code for _ in bunch)
    return told


def resident_mb(broker: Broker) -> float:
    [line] = [each for each in Path(f"/proc/{broker.pid}/status").read_text().splitlines() if "VmRSS" in each]
    return int(line.split()[1]) / 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_ten_thousand_joins_with_fresh_ids_are_bounded_and_leave_other_groups_alone(broker: Broker) -> None:
    with connect(broker) as crowd, connect(broker) as other:
        long = {"session_timeout_ms": 300_000, "rebalance_timeout_ms": 300_000}
        member = other.call(Api.JOIN_GROUP, 3, {"group_id": "bystander", "member_id": "", **long, **RANGE})
        who = {"group_id": "bystander", "member_id": member.member_id, "generation_id": 1}
        assert other.call(Api.SYNC_GROUP, 3, who).error_code == 0
        before_mb = resident_mb(broker)
        body = {"group_id": "crowded", "member_id": "", **long, **RANGE}
        told = flood(crowd, repeat(body, PENDING_MEMBERS_MAX + 500))
        assert told == {
            ErrorCode.MEMBER_ID_REQUIRED: PENDING_MEMBERS_MAX,
            ErrorCode.GROUP_MAX_SIZE_REACHED: 500,
        }
        fresh = flood(crowd, ({**body, "group_id": f"crowd-{number}"} for number in range(2000)))
        assert fresh == {ErrorCode.MEMBER_ID_REQUIRED: 2000}
        assert resident_mb(broker) < before_mb + 64
        assert other.call(Api.HEARTBEAT, 4, who).error_code == 0
        [described] = crowd.call(Api.DESCRIBE_GROUPS, 5, {"groups": ["crowded"]}).groups
        assert (described.group_state, list(described.members)) == ("Empty", [])


def test_what_is_too_large_to_be_stored_is_refused_and_harms_nobody(client: RawClient) -> None:
    large = {"protocol_type": "consumer", "protocols": [{"name": "range", "metadata": bytes(2_000_000)}]}
    body = {"group_id": "large", "member_id": "", **SESSION, **large}
    member = client.call(Api.JOIN_GROUP, 3, body)
    who = {"group_id": "large", "member_id": member.member_id, "generation_id": member.generation_id}
    assert client.call(Api.SYNC_GROUP, 3, who).error_code == ErrorCode.UNKNOWN_SERVER_ERROR
    small = joined(client, "small")
    given = {"assignments": [{"member_id": small.member_id, "assignment": bytes(2_000_000)}]}
    who = {"group_id": "small", "member_id": small.member_id, "generation_id": 1}
    assert client.call(Api.SYNC_GROUP, 3, {**who, **given}).error_code == ErrorCode.UNKNOWN_SERVER_ERROR
    assert client.call(Api.HEARTBEAT, 3, who).error_code == ErrorCode.REBALANCE_IN_PROGRESS
    assert commit(client, "bystander-of-large", 8) == [0]


def test_a_heartbeat_is_held_for_news_of_a_rebalance_but_not_in_the_way_of_others(broker: Broker) -> None:
    with connect(broker) as patient, connect(broker) as plain, connect(broker) as newcomer:
        software = {"client_software_name": "librdkafka", "client_software_version": "2.16.0"}
        assert patient.call(Api.API_VERSIONS, 3, software).error_code == 0
        who = {}
        for client in (patient, plain):
            group = f"held-{len(who)}"
            member = joined(client, group)
            who[client] = {"group_id": group, "member_id": member.member_id, "generation_id": 1}
            named = {"protocol_type": "consumer", "protocol_name": "range"}
            assert client.call(Api.SYNC_GROUP, 5, {**who[client], **named}).error_code == 0
        assert plain.call(Api.HEARTBEAT, 4, who[plain]).error_code == 0
        patient.send(Api.HEARTBEAT, 4, who[patient])
        patient.send(Api.HEARTBEAT, 4, who[patient])
        assert patient.receive().error_code == 0, "the next request lets the one before go"
        join = {"group_id": "held-0", "member_id": "", **SESSION, **RANGE}
        newcomer.send(Api.JOIN_GROUP, 3, join)
        assert patient.receive().error_code == ErrorCode.REBALANCE_IN_PROGRESS
