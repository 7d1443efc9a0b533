"""CreateTopics, DeleteTopics and CreatePartitions, version by version."""

from typing import Any

import pytest

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.ids import ZERO_ID
from headrace.security.authorizer import Operation, ResourceType
from headrace.wire.apis import SUPPORTED, Api
from tests.server.desk import Denies, Desk


def new(name: str, partitions: int = 1, factor: int = 1, **more: Any) -> dict[str, Any]:
    return {"name": name, "num_partitions": partitions, "replication_factor": factor, **more}


def versions(api: Api) -> range:
    first, last = SUPPORTED[api]
    return range(first, last + 1)


@pytest.mark.parametrize("version", versions(Api.CREATE_TOPICS))
def test_every_version_creates_a_topic(version: int) -> None:
    desk = Desk()
    reply = desk.ask(Api.CREATE_TOPICS, version, {"topics": [new("t", 2)], "timeout_ms": 1000})
    [result] = reply.topics
    assert (result.name, result.error_code, result.error_message) == ("t", 0, None)
    assert len(desk.image.topics["t"].partitions) == 2
    if version >= 5:
        assert (result.num_partitions, result.replication_factor) == (2, 1)
        assert len(result.configs) == 33
    if version >= 7:
        assert result.topic_id == desk.image.topics["t"].id


def test_the_reply_tells_where_settings_come_from() -> None:
    desk = Desk({"log.segment.bytes": "2097152"})
    topic = new("t", configs=[{"name": "retention.ms", "value": " 5 "}])
    [result] = desk.ask(Api.CREATE_TOPICS, 7, {"topics": [topic], "timeout_ms": 1}).topics
    told = {config.name: (config.value, config.config_source) for config in result.configs}
    assert told["retention.ms"] == ("5", 1)
    assert told["segment.bytes"] == ("2097152", 4)
    assert told["flush.ms"] == ("9223372036854775807", 5)


def test_validating_creates_nothing_but_says_what_would_be() -> None:
    desk = Desk()
    body = {"topics": [new("t", -1, -1), new("bad name")], "timeout_ms": 1, "validate_only": True}
    good, bad = desk.ask(Api.CREATE_TOPICS, 7, body).topics
    assert (good.error_code, good.num_partitions) == (0, 1)
    assert bad.error_code == ErrorCode.INVALID_TOPIC_EXCEPTION
    assert bad.error_message.startswith("Topic name is invalid: 'bad name'")
    assert desk.committed == []


def test_a_commit_that_fails_fails_every_topic_it_was_to_make() -> None:
    desk = Desk()
    desk.refuse_commits = KafkaError(ErrorCode.KAFKA_STORAGE_ERROR, "no space")
    results = desk.ask(Api.CREATE_TOPICS, 7, {"topics": [new("t"), new("..")], "timeout_ms": 1}).topics
    assert [(result.error_code, result.error_message) for result in results] == [
        (ErrorCode.KAFKA_STORAGE_ERROR, "no space"),
        (ErrorCode.INVALID_TOPIC_EXCEPTION, "Topic name is invalid: '..' is not allowed"),
    ]
    assert results[0].topic_id == ZERO_ID


def test_creating_takes_the_right_on_the_cluster_or_on_the_topic() -> None:
    desk = Desk()
    desk.authorizer = Denies(
        (Operation.CREATE, ResourceType.CLUSTER, None), (Operation.CREATE, ResourceType.TOPIC, "closed")
    )
    results = desk.ask(Api.CREATE_TOPICS, 7, {"topics": [new("open"), new("closed")], "timeout_ms": 1}).topics
    assert {result.name: result.error_code for result in results} == {
        "open": 0,
        "closed": ErrorCode.TOPIC_AUTHORIZATION_FAILED,
    }
    assert list(desk.image.topics) == ["open"]


def test_settings_are_kept_from_who_may_not_see_them() -> None:
    desk = Desk()
    desk.authorizer = Denies((Operation.DESCRIBE_CONFIGS, ResourceType.TOPIC, None))
    [result] = desk.ask(Api.CREATE_TOPICS, 7, {"topics": [new("t")], "timeout_ms": 1}).topics
    assert result.error_code == 0
    assert result.topic_config_error_code == ErrorCode.TOPIC_AUTHORIZATION_FAILED
    assert not result.configs
    assert result.num_partitions == -1


# -- deletion ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", versions(Api.DELETE_TOPICS))
def test_every_version_deletes_by_name(version: int) -> None:
    desk = Desk()
    desk.create("t")
    topic_id = desk.image.topics["t"].id
    named = {"topics": [{"name": "t"}, {"name": "none"}]} if version >= 6 else {"topic_names": ["t", "none"]}
    gone, missing = desk.ask(Api.DELETE_TOPICS, version, {**named, "timeout_ms": 1}).responses
    assert (gone.name, gone.error_code) == ("t", 0)
    assert (missing.name, missing.error_code) == ("none", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    assert desk.image.topics == {}
    if version >= 5:
        assert missing.error_message == "This server does not host this topic-partition."
    if version >= 6:
        assert gone.topic_id == topic_id


def delete(desk: Desk, *topics: dict[str, Any]) -> list[tuple[str | None, int, str | None]]:
    reply = desk.ask(Api.DELETE_TOPICS, 6, {"topics": list(topics), "timeout_ms": 1})
    return [(each.name, each.error_code, each.error_message) for each in reply.responses]


def test_a_topic_is_deleted_by_its_id() -> None:
    desk = Desk()
    desk.create("t")
    assert delete(desk, {"name": None, "topic_id": desk.image.topics["t"].id}) == [("t", 0, None)]
    assert delete(desk, {"name": None, "topic_id": b"no such id 56789"}) == [
        (None, ErrorCode.UNKNOWN_TOPIC_ID, "This server does not host this topic ID.")
    ]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ([{"name": None}], "Neither topic name nor id were specified."),
        (
            [{"name": "t", "topic_id": b"0123456789abcdef"}],
            "You may not specify both topic name and topic id.",
        ),
        ([{"name": "t"}, {"name": "t"}], "Duplicate topic name."),
        ([{"name": None, "topic_id": b"0123456789abcdef"}] * 2, "Duplicate topic id."),
    ],
)
def test_deletions_that_are_not_clear(asked: list[dict[str, Any]], words: str) -> None:
    desk = Desk()
    desk.create("t")
    assert [answer[1:] for answer in delete(desk, *asked)] == [(ErrorCode.INVALID_REQUEST, words)]
    assert "t" in desk.image.topics


def test_a_topic_named_by_name_and_by_id_stays() -> None:
    desk = Desk()
    desk.create("t")
    answers = delete(desk, {"name": "t"}, {"name": None, "topic_id": desk.image.topics["t"].id})
    assert [(name, code) for name, code, _ in answers] == [("t", ErrorCode.INVALID_REQUEST)]
    assert list(desk.image.topics) == ["t"]


@pytest.mark.parametrize(("version", "code"), [(2, 42), (3, 73), (6, 73)])
def test_deletion_can_be_turned_off(version: int, code: int) -> None:
    desk = Desk({"delete.topic.enable": "false"})
    desk.create("t")
    named = {"topics": [{"name": "t"}]} if version >= 6 else {"topic_names": ["t"]}
    [answer] = desk.ask(Api.DELETE_TOPICS, version, {**named, "timeout_ms": 1}).responses
    assert answer.error_code == code
    assert "t" in desk.image.topics


def test_deleting_takes_the_right_to_and_hides_what_may_not_be_seen() -> None:
    desk = Desk()
    desk.create("t")
    desk.authorizer = Denies(
        (Operation.DELETE, ResourceType.TOPIC, "t"), (Operation.DESCRIBE, ResourceType.TOPIC, "hidden")
    )
    codes = [code for _, code, _ in delete(desk, {"name": "t"}, {"name": "hidden"})]
    assert codes == [ErrorCode.TOPIC_AUTHORIZATION_FAILED] * 2
    assert "t" in desk.image.topics


# -- more partitions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", versions(Api.CREATE_PARTITIONS))
def test_every_version_adds_partitions(version: int) -> None:
    desk = Desk()
    desk.create("t")
    topics = [
        {"name": "t", "count": 3, "assignments": None},
        {"name": "none", "count": 3, "assignments": None},
    ]
    reply = desk.ask(Api.CREATE_PARTITIONS, version, {"topics": topics, "timeout_ms": 1})
    assert [(each.name, each.error_code) for each in reply.results] == [("t", 0), ("none", 3)]
    assert len(desk.image.topics["t"].partitions) == 3


def test_validated_partitions_are_not_made() -> None:
    desk = Desk()
    desk.create("t")
    topics = [{"name": "t", "count": 3, "assignments": [{"broker_ids": [1]}, {"broker_ids": [1]}]}]
    body = {"topics": topics, "timeout_ms": 1, "validate_only": True}
    [answer] = desk.ask(Api.CREATE_PARTITIONS, 3, body).results
    assert (answer.error_code, answer.error_message) == (0, None)
    assert len(desk.image.topics["t"].partitions) == 1


def test_adding_partitions_takes_the_right_to_alter() -> None:
    desk = Desk()
    desk.create("t")
    desk.authorizer = Denies((Operation.ALTER, ResourceType.TOPIC, "t"))
    topics = [{"name": "t", "count": 3, "assignments": None}]
    [answer] = desk.ask(Api.CREATE_PARTITIONS, 3, {"topics": topics, "timeout_ms": 1}).results
    assert answer.error_code == ErrorCode.TOPIC_AUTHORIZATION_FAILED
    assert len(desk.image.topics["t"].partitions) == 1
