"""Metadata and its relatives, version by version."""

from typing import Any

import pytest

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.ids import ZERO_ID
from headrace.cluster.image import apply
from headrace.cluster.records import PartitionRecord, TopicRecord
from headrace.security.authorizer import Operation, ResourceType
from headrace.wire.apis import SUPPORTED, Api
from headrace.wire.messages import Message
from tests.server.desk import Denies, Desk, LogSize

EVERY_TOPIC_OPERATION = 3576
EVERY_CLUSTER_OPERATION = 8096
NOT_TOLD = -(2**31)


def versions(api: Api) -> range:
    first, last = SUPPORTED[api]
    return range(first, last + 1)


def metadata(desk: Desk, names: list[str] | None, version: int = 13, **more: Any) -> Message:
    topics = None if names is None else [{"name": name} for name in names]
    return desk.ask(Api.METADATA, version, {"topics": topics, **more})


@pytest.mark.parametrize("version", versions(Api.METADATA))
def test_every_version_tells_brokers_and_topics(version: int) -> None:
    desk = Desk()
    desk.create("t", 2)
    reply = metadata(desk, ["t"], version)
    assert [(broker.node_id, broker.host, broker.port) for broker in reply.brokers] == [(1, "host1", 9001)]
    [topic] = reply.topics
    assert (topic.name, topic.error_code) == ("t", 0)
    assert [(p.partition_index, p.leader_id, list(p.replica_nodes)) for p in topic.partitions] == [
        (0, 1, [1]),
        (1, 1, [1]),
    ]
    if version >= 1:
        assert reply.controller_id == 1
    if version >= 2:
        assert reply.cluster_id == desk.cluster_id
    if version >= 10:
        assert topic.topic_id == desk.image.topics["t"].id


@pytest.mark.parametrize(
    ("version", "names", "told"), [(0, [], 2), (1, [], 0), (1, None, 2), (13, [], 0), (13, None, 2)]
)
def test_no_topics_means_all_or_none_by_version(version: int, names: list[str] | None, told: int) -> None:
    desk = Desk()
    desk.create("t")
    desk.create("u")
    assert len(metadata(desk, names, version).topics) == told


@pytest.mark.parametrize("version", [0, 3, 4, 13])
def test_asking_for_a_topic_creates_it(version: int) -> None:
    desk = Desk({"num.partitions": "3"})
    [topic] = metadata(desk, ["t"], version, allow_auto_topic_creation=True).topics
    assert (topic.error_code, len(topic.partitions)) == (0, 3)
    assert "t" in desk.image.topics


def test_a_topic_is_not_created_for_who_does_not_want_it() -> None:
    desk = Desk()
    [topic] = metadata(desk, ["t"], 4, allow_auto_topic_creation=False).topics
    assert topic.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    off = Desk({"auto.create.topics.enable": "false"})
    [topic] = metadata(off, ["t"], 4, allow_auto_topic_creation=True).topics
    assert topic.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert desk.committed == off.committed == []


def test_topics_that_cannot_be_created_say_why() -> None:
    desk = Desk({"default.replication.factor": "3"})
    desk.image = apply(desk.image, [TopicRecord("a.b", b"0123456789abcdef")])
    reply = metadata(desk, ["bad name", "", "a_b", "t", "__cluster_metadata"], 13)
    assert [(topic.name, topic.error_code) for topic in reply.topics] == [
        ("bad name", ErrorCode.INVALID_TOPIC_EXCEPTION),
        ("", ErrorCode.INVALID_TOPIC_EXCEPTION),
        ("a_b", ErrorCode.INVALID_REPLICATION_FACTOR),
        ("t", ErrorCode.INVALID_REPLICATION_FACTOR),
        ("__cluster_metadata", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
    ]


def test_a_colliding_name_is_not_created_by_asking() -> None:
    desk = Desk()
    desk.create("a.b")
    [topic] = metadata(desk, ["a_b"]).topics
    assert topic.error_code == ErrorCode.INVALID_TOPIC_EXCEPTION


def test_the_clusters_own_topics_are_made_for_their_purpose() -> None:
    desk = Desk({"offsets.topic.num.partitions": "7"})
    [topic] = metadata(desk, ["__consumer_offsets"]).topics
    assert topic.is_internal
    assert len(topic.partitions) == 7
    assert desk.image.config(2, "__consumer_offsets")["cleanup.policy"] == "compact"


def test_a_topic_named_twice_is_told_once() -> None:
    desk = Desk()
    desk.create("t")
    assert [topic.name for topic in metadata(desk, ["t", "t"]).topics] == ["t"]


def test_creation_that_cannot_be_recorded_is_told() -> None:
    desk = Desk()
    desk.refuse_commits = KafkaError(ErrorCode.KAFKA_STORAGE_ERROR, "no space")
    [topic] = metadata(desk, ["t"]).topics
    assert topic.error_code == ErrorCode.KAFKA_STORAGE_ERROR


def test_topics_are_found_by_id() -> None:
    desk = Desk()
    desk.create("t")
    unknown = b"no such id 56789"
    topics = [{"name": None, "topic_id": desk.image.topics["t"].id}, {"name": None, "topic_id": unknown}]
    found, missing = desk.ask(Api.METADATA, 13, {"topics": topics}).topics
    assert (found.name, found.error_code, len(found.partitions)) == ("t", 0, 1)
    assert (missing.name, missing.error_code, missing.topic_id) == (None, ErrorCode.UNKNOWN_TOPIC_ID, unknown)


@pytest.mark.parametrize(
    ("version", "topic"), [(13, {"name": None}), (11, {"name": "t", "topic_id": b"0123456789abcdef"})]
)
def test_topics_that_are_not_named_clearly(version: int, topic: dict[str, Any]) -> None:
    [answer] = Desk().ask(Api.METADATA, version, {"topics": [topic]}).topics
    assert answer.error_code == ErrorCode.INVALID_REQUEST


def test_a_partition_whose_leader_is_gone_says_so() -> None:
    desk = Desk()
    topic_id = b"0123456789abcdef"
    desk.image = apply(
        desk.image, [TopicRecord("t", topic_id), PartitionRecord(topic_id, 0, (1, 7), (7,), 7, 3, 4)]
    )
    [topic] = metadata(desk, ["t"]).topics
    [partition] = topic.partitions
    assert partition.error_code == ErrorCode.LEADER_NOT_AVAILABLE
    assert (partition.leader_epoch, list(partition.offline_replicas)) == (3, [7])


@pytest.mark.parametrize("version", [8, 10, 13])
def test_allowed_operations_are_told_on_request(version: int) -> None:
    desk = Desk()
    desk.create("t")
    asked = {"include_topic_authorized_operations": True}
    if version <= 10:
        asked["include_cluster_authorized_operations"] = True
    reply = metadata(desk, ["t"], version, **asked)
    assert reply.topics[0].topic_authorized_operations == EVERY_TOPIC_OPERATION
    if version <= 10:
        assert reply.cluster_authorized_operations == EVERY_CLUSTER_OPERATION
    assert metadata(desk, ["t"], version).topics[0].topic_authorized_operations == NOT_TOLD


def test_topics_that_may_not_be_described_are_hidden() -> None:
    desk = Desk()
    desk.create("t")
    desk.create("hidden")
    topic_id = desk.image.topics["hidden"].id
    desk.authorizer = Denies((Operation.DESCRIBE, ResourceType.TOPIC, "hidden"))
    assert [topic.name for topic in metadata(desk, None).topics] == ["t"]
    [topic] = metadata(desk, ["hidden"]).topics
    assert (topic.error_code, topic.topic_id, topic.partitions) == (29, ZERO_ID, [])
    [topic] = desk.ask(Api.METADATA, 13, {"topics": [{"name": None, "topic_id": topic_id}]}).topics
    assert (topic.error_code, topic.name) == (29, None)


def test_creation_by_asking_takes_the_right_to_create() -> None:
    desk = Desk()
    desk.authorizer = Denies(
        (Operation.CREATE, ResourceType.CLUSTER, None), (Operation.CREATE, ResourceType.TOPIC, "t")
    )
    refused, made = metadata(desk, ["t", "u"]).topics
    assert (refused.error_code, made.error_code) == (ErrorCode.TOPIC_AUTHORIZATION_FAILED, 0)
    assert list(desk.image.topics) == ["u"]


# -- the cluster -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", versions(Api.DESCRIBE_CLUSTER))
def test_every_version_describes_the_cluster(version: int) -> None:
    desk = Desk(brokers=2)
    reply = desk.ask(Api.DESCRIBE_CLUSTER, version, {"include_cluster_authorized_operations": True})
    assert (reply.error_code, reply.cluster_id, reply.controller_id) == (0, desk.cluster_id, 1)
    assert [(broker.broker_id, broker.port) for broker in reply.brokers] == [(1, 9001), (2, 9002)]
    assert reply.cluster_authorized_operations == EVERY_CLUSTER_OPERATION


@pytest.mark.parametrize(("endpoint", "code"), [(2, 114), (5, 115)])
def test_a_broker_is_no_other_kind_of_endpoint(endpoint: int, code: int) -> None:
    with pytest.raises(KafkaError) as raised:
        Desk().ask(Api.DESCRIBE_CLUSTER, 1, {"endpoint_type": endpoint})
    assert raised.value.code == code


def pages(desk: Desk, names: list[str], limit: int) -> list[list[tuple[str, list[int]]]]:
    """Follow the cursor from the first page to the last."""
    seen: list[list[tuple[str, list[int]]]] = []
    cursor: dict[str, Any] | None = None
    while True:
        body = {
            "topics": [{"name": name} for name in names],
            "response_partition_limit": limit,
            "cursor": cursor,
        }
        reply = desk.ask(Api.DESCRIBE_TOPIC_PARTITIONS, 0, body)
        seen.append([(topic.name, [p.partition_index for p in topic.partitions]) for topic in reply.topics])
        if reply.next_cursor is None:
            return seen
        assert len(seen) < 20
        cursor = {
            "topic_name": reply.next_cursor.topic_name,
            "partition_index": reply.next_cursor.partition_index,
        }


def test_topics_are_paged_by_partitions() -> None:
    desk = Desk()
    desk.create("b", 3)
    desk.create("a", 2)
    assert pages(desk, [], 2) == [[("a", [0, 1])], [("b", [0, 1])], [("b", [2])]]
    assert pages(desk, ["b", "a"], 4) == [[("a", [0, 1]), ("b", [0, 1])], [("b", [2])]]
    assert pages(desk, ["b", "a"], 100) == [[("a", [0, 1]), ("b", [0, 1, 2])]]


def test_a_page_is_no_larger_than_the_broker_allows() -> None:
    desk = Desk({"max.request.partition.size.limit": "1"})
    desk.create("a", 3)
    assert pages(desk, ["a"], 100) == [[("a", [0])], [("a", [1])], [("a", [2])]]


def test_topics_that_are_not_there_are_told_when_asked_for() -> None:
    desk = Desk()
    desk.create("a")
    body = {"topics": [{"name": "none"}, {"name": "a"}, {"name": "bad name"}], "response_partition_limit": 9}
    reply = desk.ask(Api.DESCRIBE_TOPIC_PARTITIONS, 0, body)
    assert [(topic.name, topic.error_code) for topic in reply.topics] == [
        ("a", 0),
        ("bad name", ErrorCode.INVALID_TOPIC_EXCEPTION),
        ("none", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
    ]
    assert reply.topics[0].topic_id == desk.image.topics["a"].id
    assert reply.topics[0].topic_authorized_operations == EVERY_TOPIC_OPERATION


@pytest.mark.parametrize(("topic", "partition"), [("other", 0), ("a", -1)])
def test_a_cursor_that_makes_no_sense_is_refused(topic: str, partition: int) -> None:
    desk = Desk()
    desk.create("a")
    cursor = {"topic_name": topic, "partition_index": partition}
    body = {"topics": [{"name": "a"}], "response_partition_limit": 9, "cursor": cursor}
    reply = desk.ask(Api.DESCRIBE_TOPIC_PARTITIONS, 0, body)
    assert [each.error_code for each in reply.topics] == [ErrorCode.INVALID_REQUEST]


def test_hidden_topics_are_left_out_of_pages_unless_named() -> None:
    desk = Desk()
    desk.create("a")
    desk.create("hidden")
    desk.authorizer = Denies((Operation.DESCRIBE, ResourceType.TOPIC, "hidden"))
    assert pages(desk, [], 9) == [[("a", [0])]]
    body = {"topics": [{"name": "hidden"}], "response_partition_limit": 9}
    [topic] = desk.ask(Api.DESCRIBE_TOPIC_PARTITIONS, 0, body).topics
    assert (topic.error_code, topic.topic_id) == (ErrorCode.TOPIC_AUTHORIZATION_FAILED, ZERO_ID)


# -- storage and roles -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", versions(Api.DESCRIBE_LOG_DIRS))
def test_every_version_tells_what_logs_take_up(version: int) -> None:
    desk = Desk()
    desk.create("t", 2)
    desk.log_sizes = [LogSize("t", 0, 100), LogSize("t", 1, 200), LogSize("__cluster_metadata", 0, 50)]
    [every] = desk.ask(Api.DESCRIBE_LOG_DIRS, version, {"topics": None}).results
    [topic] = every.topics
    assert (every.log_dir, topic.name) == ("memory", "t")
    assert [(p.partition_index, p.partition_size) for p in topic.partitions] == [(0, 100), (1, 200)]
    asked = [{"topic": "t", "partitions": [1, 9]}, {"topic": "none", "partitions": [0]}]
    [some] = desk.ask(Api.DESCRIBE_LOG_DIRS, version, {"topics": asked}).results
    assert [(p.partition_index, p.partition_size) for topic in some.topics for p in topic.partitions] == [
        (1, 200)
    ]
    if version >= 4:
        assert every.usable_bytes > 0


def test_log_sizes_are_for_those_who_may() -> None:
    desk = Desk()
    desk.authorizer = Denies((Operation.DESCRIBE, ResourceType.CLUSTER, None))
    reply = desk.ask(Api.DESCRIBE_LOG_DIRS, 4, {"topics": None})
    assert (reply.error_code, reply.results) == (ErrorCode.CLUSTER_AUTHORIZATION_FAILED, [])


@pytest.mark.parametrize(
    ("version", "kind"), [(0, 0), *[(v, kind) for v in versions(Api.FIND_COORDINATOR)[1:] for kind in (0, 1)]]
)
def test_this_broker_coordinates_everything(version: int, kind: int) -> None:
    named = {"coordinator_keys": ["g", "h"]} if version >= 4 else {"key": "g"}
    reply = Desk().ask(Api.FIND_COORDINATOR, version, {**named, "key_type": kind} if version else named)
    found = reply.coordinators if version >= 4 else [reply]
    assert len(found) == (2 if version >= 4 else 1)
    for each in found:
        assert (each.error_code, each.node_id, each.host, each.port) == (0, 1, "host1", 9001)


@pytest.mark.parametrize("kind", [2, 3, -1])
def test_kinds_of_coordinator_that_are_not_here(kind: int) -> None:
    [found] = Desk().ask(Api.FIND_COORDINATOR, 6, {"coordinator_keys": ["g"], "key_type": kind}).coordinators
    assert (found.error_code, found.node_id) == (ErrorCode.INVALID_REQUEST, -1)


@pytest.mark.parametrize(
    ("kind", "resource", "code"),
    [
        (0, ResourceType.GROUP, ErrorCode.GROUP_AUTHORIZATION_FAILED),
        (1, ResourceType.TRANSACTIONAL_ID, ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED),
    ],
)
def test_a_coordinator_is_told_to_those_who_may(kind: int, resource: ResourceType, code: ErrorCode) -> None:
    desk = Desk()
    desk.authorizer = Denies((Operation.DESCRIBE, resource, "g"))
    refused, found = desk.ask(
        Api.FIND_COORDINATOR, 4, {"coordinator_keys": ["g", "h"], "key_type": kind}
    ).coordinators
    assert (refused.error_code, found.error_code) == (code, 0)


@pytest.mark.parametrize("version", versions(Api.DESCRIBE_QUORUM))
def test_every_version_tells_of_the_metadata_log(version: int) -> None:
    topics = [
        {"topic_name": "__cluster_metadata", "partitions": [{"partition_index": 0}, {"partition_index": 1}]},
        {"topic_name": "t", "partitions": [{"partition_index": 0}]},
    ]
    reply = Desk().ask(Api.DESCRIBE_QUORUM, version, {"topics": topics})
    here, not_there = reply.topics[0].partitions
    assert (here.error_code, here.leader_id, here.high_watermark) == (0, 1, 1)
    assert [(voter.replica_id, voter.log_end_offset) for voter in here.current_voters] == [(1, 1)]
    assert not_there.error_code == reply.topics[1].partitions[0].error_code == 3
    if version >= 2:
        assert [node.node_id for node in reply.nodes] == [1]


def test_an_election_of_no_known_type_is_refused_for_each_partition() -> None:
    desk = Desk()
    desk.create("t", 2)
    body = {"election_type": 7, "topic_partitions": [{"topic": "t", "partitions": [0, 1]}]}
    reply = desk.ask(Api.ELECT_LEADERS, 2, body)
    assert reply.error_code == ErrorCode.INVALID_REQUEST
    [topic] = reply.replica_election_results
    assert [each.error_code for each in topic.partition_result] == [ErrorCode.INVALID_REQUEST] * 2
    assert desk.ask(Api.ELECT_LEADERS, 2, {**body, "topic_partitions": []}).error_code == 0
