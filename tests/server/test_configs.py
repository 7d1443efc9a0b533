"""DescribeConfigs, AlterConfigs, IncrementalAlterConfigs and ListConfigResources, version by version."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.base.errors import ErrorCode, KafkaError
from headrace.cluster.settings_control import Operation as Change
from headrace.cluster.settings_control import Resource
from headrace.security.authorizer import Operation, ResourceType
from headrace.wire.apis import SUPPORTED, Api
from headrace.wire.messages import Message
from tests.server.desk import Denies, Desk


def versions(api: Api) -> range:
    first, last = SUPPORTED[api]
    return range(first, last + 1)


@pytest.fixture(autouse=True)
def keep_logger_levels() -> Iterator[None]:
    names = ["headrace", *[name for name in logging.root.manager.loggerDict if name.startswith("headrace.")]]
    levels = {name: logging.getLogger(name).level for name in names}
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def describe(desk: Desk, kind: int, name: str, keys: list[str] | None = None, version: int = 4) -> Message:
    resource = {"resource_type": kind, "resource_name": name, "configuration_keys": keys}
    body = {"resources": [resource], "include_synonyms": True, "include_documentation": True}
    [result] = desk.ask(Api.DESCRIBE_CONFIGS, version, body).results
    return result


def change(
    desk: Desk,
    kind: int,
    name: str,
    *changes: tuple[str, int, str | None],
    validate_only: bool = False,
    version: int = 1,
) -> tuple[int, str | None]:
    configs = [
        {"name": key, "config_operation": operation, "value": value} for key, operation, value in changes
    ]
    resource = {"resource_type": kind, "resource_name": name, "configs": configs}
    body = {"resources": [resource], "validate_only": validate_only}
    [answer] = desk.ask(Api.INCREMENTAL_ALTER_CONFIGS, version, body).responses
    assert (answer.resource_type, answer.resource_name) == (kind, name)
    return answer.error_code, answer.error_message


@pytest.mark.parametrize("version", versions(Api.DESCRIBE_CONFIGS))
def test_every_version_describes_a_topic(version: int) -> None:
    desk = Desk()
    desk.create("t", retention_ms="5")
    result = describe(desk, Resource.TOPIC, "t", None, version)
    assert (result.error_code, result.resource_type, result.resource_name) == (0, 2, "t")
    told = {config.name: config for config in result.configs}
    assert len(told) == 33
    retention = told["retention.ms"]
    assert (retention.value, retention.config_source, retention.read_only) == ("5", 1, False)
    assert [(each.name, each.value, each.source) for each in told["segment.bytes"].synonyms] == [
        ("log.segment.bytes", "1073741824", 5)
    ]
    if version >= 3:
        assert retention.config_type == 5
        assert retention.documentation.startswith("How long records are kept")


def test_only_the_keys_asked_for_are_told() -> None:
    desk = Desk()
    desk.create("t")
    result = describe(desk, Resource.TOPIC, "t", ["segment.ms", "retention.ms", "nope"])
    assert [config.name for config in result.configs] == ["retention.ms", "segment.ms"]
    assert len(describe(desk, Resource.TOPIC, "t", []).configs) == 33


def test_synonyms_and_documentation_are_told_on_request_only() -> None:
    desk = Desk()
    desk.create("t")
    resource = {"resource_type": 2, "resource_name": "t", "configuration_keys": ["segment.bytes"]}
    [result] = desk.ask(Api.DESCRIBE_CONFIGS, 4, {"resources": [resource]}).results
    [config] = result.configs
    assert (config.synonyms, config.documentation) == ([], None)


@pytest.mark.parametrize(
    ("kind", "name", "code", "words"),
    [
        (2, "none", 3, "This server does not host this topic-partition."),
        (2, "", 17, "Topic name is invalid: the empty string is not allowed"),
        (4, "9", 42, "Unexpected broker id, expected 1 or empty string, but received 9"),
        (4, "x", 42, "Broker id must be an integer, but it is: x"),
        (8, "", 42, "Broker id must not be empty"),
        (8, "9", 42, "Unexpected broker id, expected 1 but received 9"),
        (16, "", 42, "Client metrics subscription name must not be empty"),
        (32, "", 42, "Group name must not be empty"),
    ],
)
def test_resources_that_are_not_there(kind: int, name: str, code: int, words: str) -> None:
    result = describe(Desk(), kind, name)
    assert (result.error_code, result.error_message, result.configs) == (code, words, [])


@pytest.mark.parametrize("kind", [0, 1, 99])
def test_kinds_of_resource_that_do_not_exist(kind: int) -> None:
    assert describe(Desk(), kind, "x").error_code == ErrorCode.INVALID_REQUEST


def test_a_broker_describes_itself() -> None:
    desk = Desk({"num.partitions": "4"})
    told = {config.name: config for config in describe(desk, Resource.BROKER, "1").configs}
    assert (told["num.partitions"].value, told["num.partitions"].config_source) == ("4", 4)
    assert (told["advertised.listeners"].value, told["advertised.listeners"].config_source) == (
        "PLAINTEXT://host1:9001",
        4,
    )
    assert told["listeners"].read_only
    assert not told["log.retention.ms"].read_only


@pytest.mark.parametrize(
    ("kind", "name", "denied", "code"),
    [
        (2, "t", ResourceType.TOPIC, ErrorCode.TOPIC_AUTHORIZATION_FAILED),
        (4, "1", ResourceType.CLUSTER, ErrorCode.CLUSTER_AUTHORIZATION_FAILED),
        (8, "1", ResourceType.CLUSTER, ErrorCode.CLUSTER_AUTHORIZATION_FAILED),
        (16, "x", ResourceType.CLUSTER, ErrorCode.CLUSTER_AUTHORIZATION_FAILED),
        (32, "g", ResourceType.GROUP, ErrorCode.GROUP_AUTHORIZATION_FAILED),
    ],
)
def test_settings_are_for_those_who_may(kind: int, name: str, denied: ResourceType, code: ErrorCode) -> None:
    desk = Desk()
    desk.create("t")
    desk.authorizer = Denies(
        (Operation.DESCRIBE_CONFIGS, denied, None), (Operation.ALTER_CONFIGS, denied, None)
    )
    assert describe(desk, kind, name).error_code == code
    assert change(desk, kind, name, ("root", Change.SET, "INFO"))[0] == code


# -- changes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", versions(Api.INCREMENTAL_ALTER_CONFIGS))
def test_every_version_changes_single_keys(version: int) -> None:
    desk = Desk()
    desk.create("t", segment_ms="9")
    configs = [{"name": "retention.ms", "config_operation": Change.SET, "value": "5"}]
    resource = {"resource_type": 2, "resource_name": "t", "configs": configs}
    [answer] = desk.ask(Api.INCREMENTAL_ALTER_CONFIGS, version, {"resources": [resource]}).responses
    assert (answer.error_code, answer.error_message) == (0, None)
    assert desk.image.config(Resource.TOPIC, "t") == {"segment.ms": "9", "retention.ms": "5"}


@pytest.mark.parametrize("version", versions(Api.ALTER_CONFIGS))
def test_every_version_replaces_all_keys(version: int) -> None:
    desk = Desk()
    desk.create("t", segment_ms="9")
    configs = [{"name": "retention.ms", "value": "5"}]
    resource = {"resource_type": 2, "resource_name": "t", "configs": configs}
    [answer] = desk.ask(Api.ALTER_CONFIGS, version, {"resources": [resource]}).responses
    assert (answer.error_code, answer.error_message) == (0, None)
    assert desk.image.config(Resource.TOPIC, "t") == {"retention.ms": "5"}


def test_validating_changes_nothing() -> None:
    desk = Desk()
    desk.create("t")
    records = len(desk.committed)
    assert change(desk, Resource.TOPIC, "t", ("retention.ms", Change.SET, "5"), validate_only=True) == (
        0,
        None,
    )
    assert change(desk, Resource.TOPIC, "t", ("retention.ms", Change.SET, "x"), validate_only=True)[0] == 40
    assert len(desk.committed) == records


def test_a_change_to_the_broker_reaches_its_topics() -> None:
    desk = Desk()
    desk.create("t")
    assert change(desk, Resource.BROKER, "1", ("log.retention.ms", Change.SET, "300000")) == (0, None)
    [config] = describe(desk, Resource.TOPIC, "t", ["retention.ms"]).configs
    assert (config.value, config.config_source) == ("300000", 2)
    assert desk.config.topic_defaults.retention_ms == 300_000


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("9", "Unexpected broker id, expected 1, but received 9"),
        ("x", "Node id must be an integer, but it is: x"),
    ],
)
def test_another_brokers_settings_are_not_changed_here(name: str, words: str) -> None:
    answer = change(Desk(), Resource.BROKER, name, ("log.retention.ms", Change.SET, "3"))
    assert answer == (ErrorCode.INVALID_REQUEST, words)


@pytest.mark.parametrize(
    "name",
    ["9" * 5_000, "-" + "9" * 32_000, "2147483648", "1" + "0" * 10, "+", "1_0", "\u0661", "é" * 16_000],
    ids=lambda name: name[:12] if isinstance(name, str) else None,
)
@pytest.mark.parametrize("kind", [Resource.BROKER, Resource.BROKER_LOGGER])
def test_a_broker_id_that_is_none_is_refused_however_long_it_is(kind: Resource, name: str) -> None:
    words = f"must be an integer, but it is: {name}"
    code, message = change(Desk(), kind, name, ("root", Change.SET, "INFO"), version=0)
    assert (code, message) == (ErrorCode.INVALID_REQUEST, f"Node id {words}"[:8_000])
    told = describe(Desk(), kind, name, version=3)
    assert (told.error_code, told.error_message) == (ErrorCode.INVALID_REQUEST, f"Broker id {words}"[:8_000])


def test_a_broker_id_may_have_zeros_before_it() -> None:
    assert describe(Desk(), Resource.BROKER, "0" * 5_000 + "1").error_code == 0
    assert describe(Desk(), Resource.BROKER, "-0").error_message.startswith("Unexpected broker id")


def test_each_resource_gets_its_own_answer_in_the_order_asked() -> None:
    desk = Desk()
    desk.create("t")

    def resource(kind: int, name: str, key: str, value: str) -> dict[str, Any]:
        configs = [{"name": key, "config_operation": Change.SET, "value": value}]
        return {"resource_type": kind, "resource_name": name, "configs": configs}

    resources = [
        resource(Resource.BROKER, "9", "log.retention.ms", "1"),
        resource(Resource.TOPIC, "t", "retention.ms", "5"),
        resource(Resource.BROKER_LOGGER, "1", "root", "DEBUG"),
        resource(Resource.TOPIC, "none", "retention.ms", "5"),
        resource(Resource.BROKER, "", "log.retention.ms", "7"),
    ]
    reply = desk.ask(Api.INCREMENTAL_ALTER_CONFIGS, 1, {"resources": resources})
    assert [(each.resource_type, each.resource_name, each.error_code) for each in reply.responses] == [
        (4, "9", 42),
        (2, "t", 0),
        (8, "1", 0),
        (2, "none", 3),
        (4, "", 0),
    ]


def test_a_commit_that_fails_is_told_to_every_resource_it_was_for() -> None:
    desk = Desk()
    desk.create("t")
    desk.refuse_commits = KafkaError(ErrorCode.KAFKA_STORAGE_ERROR, "no space")
    assert change(desk, Resource.TOPIC, "t", ("retention.ms", Change.SET, "5")) == (56, "no space")


# -- loggers -----------------------------------------------------------------------------------------------------------


def level(desk: Desk, name: str) -> str | None:
    [config] = describe(desk, Resource.BROKER_LOGGER, "1", [name]).configs
    assert config.config_source == 6
    value: str | None = config.value
    return value


def test_the_level_of_a_logger_is_changed_and_given_back() -> None:
    desk = Desk()
    name = "headrace.server.router"
    logging.getLogger(name)
    logging.getLogger("headrace").setLevel(logging.WARNING)
    assert level(desk, "root") == level(desk, name) == "WARN"
    assert change(desk, Resource.BROKER_LOGGER, "1", (name, Change.SET, "DEBUG")) == (0, None)
    assert (level(desk, "root"), level(desk, name)) == ("WARN", "DEBUG")
    assert change(desk, Resource.BROKER_LOGGER, "1", (name, Change.DELETE, None)) == (0, None)
    assert level(desk, name) == "WARN"
    assert desk.committed == []


@pytest.mark.parametrize(
    ("name", "key", "operation", "value", "code", "words"),
    [
        ("1", "none", Change.SET, "INFO", 40, "Logger none does not exist!"),
        (
            "1",
            "root",
            Change.SET,
            "LOUD",
            40,
            (
                "Cannot set the log level of root to LOUD as it is not a supported log level. "
                "Valid log levels are DEBUG, ERROR, FATAL, INFO, TRACE, WARN"
            ),
        ),
        ("1", "root", Change.DELETE, None, 42, "Removing the log level of the root logger is not allowed"),
        (
            "1",
            "root",
            Change.APPEND,
            "INFO",
            42,
            "APPEND operation is not allowed for the BROKER_LOGGER resource",
        ),
        ("9", "root", Change.SET, "INFO", 42, "Unexpected node id. Expected 1, but received 9"),
        ("", "root", Change.SET, "INFO", 42, "Node id must be an integer, but it is: "),
    ],
)
def test_levels_that_cannot_be(
    name: str, key: str, operation: int, value: str | None, code: int, words: str
) -> None:
    assert change(Desk(), Resource.BROKER_LOGGER, name, (key, operation, value)) == (code, words)


def test_loggers_are_not_replaced_as_a_whole() -> None:
    resource = {"resource_type": 8, "resource_name": "1", "configs": [{"name": "root", "value": "INFO"}]}
    [answer] = Desk().ask(Api.ALTER_CONFIGS, 2, {"resources": [resource]}).responses
    assert (answer.error_code, answer.error_message) == (42, "Unknown resource type 8")


# -- what can be configured --------------------------------------------------------------------------------------------


def listed(desk: Desk, kinds: list[int], version: int = 1) -> list[tuple[int, str]]:
    reply = desk.ask(Api.LIST_CONFIG_RESOURCES, version, {"resource_types": kinds} if version else {})
    return [(each.resource_type, each.resource_name) for each in reply.config_resources]


def test_resources_are_listed_by_kind() -> None:
    desk = Desk()
    desk.create("t")
    change(desk, Resource.CLIENT_METRICS, "all", ("interval.ms", Change.SET, "1000"))
    change(desk, Resource.GROUP, "g", ("consumer.session.timeout.ms", Change.SET, "50000"))
    assert listed(desk, []) == [(2, "t"), (4, "1"), (8, "1"), (16, "all"), (32, "g")]
    assert listed(desk, [Resource.TOPIC]) == [(2, "t")]
    assert [name for _, name in listed(desk, [], version=0)] == ["all"]


def test_a_kind_that_does_not_exist_refuses_the_request() -> None:
    with pytest.raises(KafkaError) as raised:
        listed(Desk(), [Resource.TOPIC, 99])
    assert raised.value.code is ErrorCode.UNSUPPORTED_VERSION


@pytest.mark.parametrize("name", [".", "a b", "t" * 250])
def test_a_name_that_no_topic_can_have_is_told_from_one_that_none_has(name: str) -> None:
    desk = Desk()
    assert change(desk, Resource.TOPIC, name, ("retention.ms", Change.SET, "1"))[0] == (
        ErrorCode.INVALID_TOPIC_EXCEPTION
    )
    assert change(desk, Resource.TOPIC, "none", ("retention.ms", Change.SET, "1"))[0] == (
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    )


def test_a_word_given_twice_in_a_list_counts_once() -> None:
    desk = Desk()
    desk.create("t", cleanup_policy="delete,delete")
    assert change(desk, Resource.TOPIC, "t", ("cleanup.policy", Change.SET, "compact,compact"))[0] == 0
