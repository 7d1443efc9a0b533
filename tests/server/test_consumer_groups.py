"""The consumer protocol over the wire: both versions, Kafka's errors for odd input, epochs in commits and fetches."""

from collections.abc import Iterator
from typing import Any

import pytest

from headrace.base.errors import ErrorCode
from headrace.testing import Broker
from headrace.wire.apis import Api
from headrace.wire.messages import Message
from tests.server.raw import RawClient

TOPIC = "readings"
JOIN = {"member_epoch": 0, "rebalance_timeout_ms": 10_000, "topic_partitions": []}


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with Broker() as running:
        with connect(running) as client:
            client.create(TOPIC, 4)
            client.call(Api.FIND_COORDINATOR, 3, {"key": "g", "key_type": 0})
        yield running


def connect(broker: Broker) -> RawClient:
    host, _, port = broker.bootstrap.rpartition(":")
    return RawClient(host, int(port))


@pytest.fixture
def client(broker: Broker) -> Iterator[RawClient]:
    with connect(broker) as made:
        yield made


def beat(client: RawClient, group: str, member: str, version: int = 1, **fields: Any) -> Message:
    body = {"group_id": group, "member_id": member, **fields}
    return client.call(Api.CONSUMER_GROUP_HEARTBEAT, version, body)


def join(client: RawClient, group: str, member: str, version: int = 1, **fields: Any) -> Message:
    given = {"subscribed_topic_names": [TOPIC], **JOIN, **fields}
    return beat(client, group, member, version, **given)


def test_a_member_of_version_0_is_given_an_id_and_one_of_version_1_brings_its_own(client: RawClient) -> None:
    old = join(client, "old", "", version=0)
    assert (old.error_code, old.member_epoch, len(old.member_id)) == (ErrorCode.NONE, 1, 36)
    assert [sorted(each.partitions) for each in old.assignment.topic_partitions] == [[0, 1, 2, 3]]
    new = join(client, "new", "mine")
    assert (new.error_code, new.member_id, new.heartbeat_interval_ms) == (ErrorCode.NONE, "mine", 5000)
    again = beat(client, "new", "mine", member_epoch=1)
    assert (again.error_code, again.member_epoch, again.assignment) == (ErrorCode.NONE, 1, None)
    left = beat(client, "new", "mine", member_epoch=-1)
    assert (left.error_code, left.member_epoch) == (ErrorCode.NONE, -1)


def test_a_heartbeat_that_brings_nothing_is_held_for_news_but_not_in_the_way_of_others(
    broker: Broker,
) -> None:
    with connect(broker) as patient, connect(broker) as other:
        software = {"client_software_name": "librdkafka", "client_software_version": "2.16.0"}
        assert patient.call(Api.API_VERSIONS, 3, software).error_code == 0
        assert join(patient, "held", "a").member_epoch == 1
        assert join(other, "held", "b").member_epoch == 2
        given_up = [{"topic_id": topic_id(patient), "partitions": [0, 1]}]
        assert len(beat(patient, "held", "a", member_epoch=1).assignment.topic_partitions[0].partitions) == 2
        kept = beat(patient, "held", "a", member_epoch=1, topic_partitions=given_up)
        assert (kept.error_code, kept.member_epoch) == (ErrorCode.NONE, 2)
        report = {"group_id": "held", "member_id": "a", "member_epoch": 2}
        patient.send(Api.CONSUMER_GROUP_HEARTBEAT, 1, report)
        patient.send(Api.CONSUMER_GROUP_HEARTBEAT, 1, report)
        assert patient.receive().assignment is None, "the next request lets the one before go"
        assert beat(other, "held", "b", member_epoch=-1).error_code == ErrorCode.NONE
        news = patient.receive()
        assert (news.member_epoch, sorted(news.assignment.topic_partitions[0].partitions)) == (
            3,
            [0, 1, 2, 3],
        )


def topic_id(client: RawClient) -> bytes:
    [topic] = client.call(Api.METADATA, 12, {"topics": [{"topic_id": bytes(16), "name": TOPIC}]}).topics
    return bytes(topic.topic_id)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"group_id": ""}, ErrorCode.INVALID_REQUEST),
        ({"group_id": " "}, ErrorCode.INVALID_REQUEST),
        ({"group_id": "g" * 40_000}, ErrorCode.INVALID_REQUEST),
        ({"member_id": ""}, ErrorCode.INVALID_REQUEST),
        ({"member_id": "m" * 40_000}, ErrorCode.INVALID_REQUEST),
        ({"instance_id": ""}, ErrorCode.INVALID_REQUEST),
        ({"rack_id": ""}, ErrorCode.INVALID_REQUEST),
        ({"member_epoch": -3}, ErrorCode.INVALID_REQUEST),
        ({"member_epoch": -2}, ErrorCode.INVALID_REQUEST),
        ({"member_epoch": 5}, ErrorCode.GROUP_ID_NOT_FOUND),
        ({"rebalance_timeout_ms": -1}, ErrorCode.INVALID_REQUEST),
        ({"topic_partitions": None}, ErrorCode.INVALID_REQUEST),
        ({"subscribed_topic_names": None}, ErrorCode.INVALID_REQUEST),
        ({"subscribed_topic_names": ["t" * 30_000] * 10}, ErrorCode.INVALID_REQUEST),
        ({"subscribed_topic_regex": "(["}, ErrorCode.INVALID_REGULAR_EXPRESSION),
        ({"subscribed_topic_regex": "(a{1000}){1000}"}, ErrorCode.INVALID_REGULAR_EXPRESSION),
        ({"server_assignor": "sticky"}, ErrorCode.UNSUPPORTED_ASSIGNOR),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_and_leaves_no_group(
    client: RawClient, fields: dict[str, Any], error: ErrorCode
) -> None:
    body = {
        "group_id": "odd",
        "member_id": "m",
        "subscribed_topic_names": [TOPIC],
        **JOIN,
        **fields,
    }
    assert client.call(Api.CONSUMER_GROUP_HEARTBEAT, 1, body).error_code == error
    listed = client.call(Api.LIST_GROUPS, 5, {"types_filter": ["consumer"]})
    assert body["group_id"] not in {group.group_id for group in listed.groups}


def test_epochs_guard_commits_and_fetches(client: RawClient) -> None:
    assert join(client, "guarded", "m").member_epoch == 1

    def commit(epoch: int, version: int = 9, member: str = "m") -> int:
        partition = {"partition_index": 0, "committed_offset": 3, "committed_metadata": ""}
        body = {
            "group_id": "guarded",
            "generation_id_or_member_epoch": epoch,
            "member_id": member,
            "topics": [{"name": TOPIC, "partitions": [partition]}],
        }
        reply = client.call(Api.OFFSET_COMMIT, version, body)
        return int(reply.topics[0].partitions[0].error_code)

    def fetch(epoch: int, member: str | None = "m") -> int:
        topics = [{"name": TOPIC, "partition_indexes": [0]}]
        group = {"group_id": "guarded", "member_id": member, "member_epoch": epoch, "topics": topics}
        return int(client.call(Api.OFFSET_FETCH, 9, {"groups": [group]}).groups[0].error_code)

    assert [commit(1), commit(0), commit(2)] == [
        0,
        ErrorCode.STALE_MEMBER_EPOCH,
        ErrorCode.STALE_MEMBER_EPOCH,
    ]
    assert commit(1, version=8) == ErrorCode.UNSUPPORTED_VERSION
    assert commit(1, member="x") == commit(-1, member="") == ErrorCode.UNKNOWN_MEMBER_ID
    assert [fetch(1), fetch(0), fetch(-1, None)] == [0, ErrorCode.STALE_MEMBER_EPOCH, 0]
    assert fetch(1, "x") == ErrorCode.UNKNOWN_MEMBER_ID


def test_a_group_is_told_by_the_api_of_its_kind(client: RawClient) -> None:
    join(client, "told", "m", rack_id="r", instance_id="i")
    [group] = client.call(Api.CONSUMER_GROUP_DESCRIBE, 1, {"group_ids": ["told"]}).groups
    assert (group.error_code, group.group_state, group.group_epoch) == (0, "Stable", 1)
    assert (group.assignment_epoch, group.assignor_name) == (1, "uniform")
    [member] = group.members
    assert (member.member_id, member.instance_id, member.rack_id, member.member_type) == ("m", "i", "r", 1)
    assert [topic.topic_name for topic in member.target_assignment.topic_partitions] == [TOPIC]
    [unknown] = client.call(Api.CONSUMER_GROUP_DESCRIBE, 0, {"group_ids": ["none-such"]}).groups
    assert unknown.error_code == ErrorCode.GROUP_ID_NOT_FOUND
    [classic] = client.call(Api.DESCRIBE_GROUPS, 6, {"groups": ["told"]}).groups
    assert classic.error_code == ErrorCode.GROUP_ID_NOT_FOUND
    [deleted] = client.call(Api.DELETE_GROUPS, 2, {"groups_names": ["told"]}).results
    assert deleted.error_code == ErrorCode.NON_EMPTY_GROUP
    beat(client, "told", "m", member_epoch=-1, instance_id="i")
    [deleted] = client.call(Api.DELETE_GROUPS, 2, {"groups_names": ["told"]}).results
    assert deleted.error_code == ErrorCode.NONE


def test_a_group_has_settings_of_its_own_within_the_brokers_bounds(client: RawClient) -> None:
    change = {"name": "consumer.heartbeat.interval.ms", "config_operation": 0, "value": "7000"}
    resource = {"resource_type": 32, "resource_name": "slow", "configs": [change]}
    body = {"resources": [resource], "validate_only": False}
    [told] = client.call(Api.INCREMENTAL_ALTER_CONFIGS, 1, body).responses
    assert told.error_code == ErrorCode.NONE
    assert join(client, "slow", "m").heartbeat_interval_ms == 7000
    assert join(client, "usual", "m").heartbeat_interval_ms == 5000


def test_many_joins_with_fresh_ids_do_not_keep_others_from_their_groups(broker: Broker) -> None:
    with connect(broker) as crowd, connect(broker) as other:
        for number in range(300):
            crowd.send(
                Api.CONSUMER_GROUP_HEARTBEAT,
                1,
                {"group_id": "crowd", "member_id": f"m{number}", "subscribed_topic_names": [TOPIC], **JOIN},
            )
        assert join(other, "quiet", "m").error_code == ErrorCode.NONE
        assert [crowd.receive().error_code for _ in range(300)] == [ErrorCode.NONE] * 300
        assert beat(other, "quiet", "m", member_epoch=1).error_code == ErrorCode.NONE
