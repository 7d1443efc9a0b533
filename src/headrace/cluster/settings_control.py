"""The controller's decisions about settings: changes and an image in, records and an answer for each resource out.

Pure, like `controller`. Invariant: what a resource ends up with is checked as a whole before any record is made, so an
accepted value can always be read back into a configuration; defaults are also checked against what every broker and
every topic has of its own. What brokers have in their files is not known here: the controller's stands for all. Codes
and words are Kafka's: a wrong value of a topic or a group is INVALID_CONFIG, of a broker INVALID_REQUEST. Called by the
handlers of settings.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import NamedTuple

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.settings import (
    BROKER_SETTINGS,
    BrokerConfig,
    ConfigType,
    Reload,
    Setting,
    broker_config,
    check_topic_config,
    usable_broker_config,
)
from headrace.base.settings_group import CLIENT_METRICS_SETTINGS, GROUP_SETTINGS
from headrace.base.settings_topic import TOPIC_SETTINGS
from headrace.base.settings_types import java_list
from headrace.cluster.image import NO_CONFIG, ClusterImage, apply
from headrace.cluster.names import check_topic_name
from headrace.cluster.records import ConfigRecord, MetadataRecord

PER_LISTENER_PREFIX = "ssl."
CLIENT_METRICS_INTERVAL_MS_MIN = 100
CLIENT_METRICS_INTERVAL_MS_MAX = 3_600_000
CLIENT_METRICS_MATCH_KEYS = frozenset(
    {
        "client_instance_id",
        "client_id",
        "client_software_name",
        "client_software_version",
        "client_source_address",
        "client_source_port",
    }
)


class Resource(IntEnum):
    """What can be configured, with Kafka's numbers."""

    TOPIC = 2
    BROKER = 4
    BROKER_LOGGER = 8
    CLIENT_METRICS = 16
    GROUP = 32


class Operation(IntEnum):
    """What is done to one key of a resource, with Kafka's numbers."""

    SET = 0
    DELETE = 1
    APPEND = 2
    SUBTRACT = 3


class Change(NamedTuple):
    """One key's change."""

    name: str
    operation: int
    value: str | None


class ResourceChange(NamedTuple):
    """The changes to one resource. With `replace`, keys that are not named go back to their defaults."""

    type: int
    name: str
    changes: Sequence[Change]
    replace: bool = False


class Altered(NamedTuple):
    """What became of the changes to one resource."""

    type: int
    name: str
    error: KafkaError | None


_TABLES: Mapping[int, Mapping[str, Setting]] = {
    Resource.TOPIC: TOPIC_SETTINGS,
    Resource.BROKER: BROKER_SETTINGS,
    Resource.CLIENT_METRICS: CLIENT_METRICS_SETTINGS,
    Resource.GROUP: GROUP_SETTINGS,
}


def alter_settings(
    image: ClusterImage, requests: Sequence[ResourceChange], config: BrokerConfig
) -> tuple[list[MetadataRecord], list[Altered]]:
    """Decide on changes to settings, each resource by itself, brokers after all others: they set what those inherit."""
    records: list[MetadataRecord] = []
    errors: dict[int, KafkaError] = {}
    named = Counter((request.type, request.name) for request in requests)
    for index, request in sorted(enumerate(requests), key=lambda each: each[1].type == Resource.BROKER):
        try:
            if named[request.type, request.name] > 1:
                raise _bad_request("Each resource must appear at most once.")
            seen = apply(image, records) if request.type == Resource.BROKER else image
            records += _decide(seen, request, config)
        except KafkaError as error:
            errors[index] = error
    results = [Altered(*request[:2], errors.get(index)) for index, request in enumerate(requests)]
    return records, results


def _decide(image: ClusterImage, request: ResourceChange, config: BrokerConfig) -> list[MetadataRecord]:
    table = _TABLES.get(request.type)
    if table is None:
        raise _bad_request(f"Unknown resource type {request.type}")
    if any(count > 1 for count in Counter(change.name for change in request.changes).values()):
        raise _bad_request("Error due to duplicate config keys")
    _check_name(request)
    before = image.config(request.type, request.name)
    after: dict[str, str] = {} if request.replace else dict(before)
    for change in request.changes:
        value = _changed(table, before.get(change.name), change)
        if value is None:
            after.pop(change.name, None)
        else:
            after[change.name] = value
    _check_outcome(image, request, after, config)
    if request.type == Resource.TOPIC and request.name not in image.topics:
        # After the values, as Kafka does: what could be set nowhere is told of a topic that is not there, too.
        check_topic_name(request.name)
        raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"The topic '{request.name}' does not exist.")
    changed = [(name, after.get(name)) for name in {**before, **after} if before.get(name) != after.get(name)]
    return [ConfigRecord(request.type, request.name, name, value) for name, value in changed]


def _changed(table: Mapping[str, Setting], before: str | None, change: Change) -> str | None:
    """The key's new text, or None to remove it."""
    if change.operation == Operation.DELETE:
        return None
    if change.value is None:
        raise _bad_request(f"Null value not supported for : {change.name}")
    if change.operation == Operation.SET:
        return change.value
    if change.operation not in (Operation.APPEND, Operation.SUBTRACT):
        raise _bad_request(f"Unknown operation {change.operation} on key {change.name}")
    setting = table.get(change.name)
    if setting is None or setting.type is not ConfigType.LIST:
        operation = Operation(change.operation).name
        raise KafkaError(
            ErrorCode.INVALID_CONFIG,
            f"Can't {operation} to key {change.name} because its type is not LIST.",
        )
    old = (setting.default_text or "") if before is None else before
    items = dict.fromkeys(item.strip() for item in old.split(",") if item.strip())
    for item in (item.strip() for item in change.value.split(",")):
        if change.operation == Operation.APPEND:
            items[item] = None
        else:
            items.pop(item, None)
    return ",".join(items)


def _check_name(request: ResourceChange) -> None:
    if request.type == Resource.TOPIC and not request.name:
        raise _bad_request("Default topic resources are not allowed.")
    if request.type == Resource.GROUP and not request.name:
        raise _bad_request("Default group resources are not allowed.")
    if request.type == Resource.CLIENT_METRICS and not request.name:
        raise _bad_request("Subscription name can't be empty")


def _check_outcome(
    image: ClusterImage, request: ResourceChange, after: Mapping[str, str], config: BrokerConfig
) -> None:
    """Refuse what the resource would end up with, if it could not be kept."""
    match request.type:
        case Resource.TOPIC:
            check_topic_config(after, config)
        case Resource.BROKER:
            _check_broker(image, request, after, config)
        case Resource.GROUP:
            _check_group(after, config)
        case Resource.CLIENT_METRICS:
            _check_client_metrics(after)


def _check_broker(
    image: ClusterImage, request: ResourceChange, after: Mapping[str, str], config: BrokerConfig
) -> None:
    set_now = [change.name for change in request.changes if change.operation != Operation.DELETE]
    fixed = [name for name in set_now if name in BROKER_SETTINGS and not BROKER_SETTINGS[name].reload]
    if fixed:
        raise _bad_request(f"Cannot update these configs dynamically: {java_list(tuple(fixed))}")
    secured = [name for name in set_now if name.startswith(PER_LISTENER_PREFIX)]
    if secured:
        raise _bad_request(
            "These security configs can be dynamically updated only per-listener using the listener prefix: "
            f"{java_list(tuple(secured))}"
        )
    alone = [n for n in set_now if n in BROKER_SETTINGS and BROKER_SETTINGS[n].reload is Reload.PER_BROKER]
    if alone and not request.name:
        raise _bad_request(
            "Cannot update these configs at default cluster level, broker id must be specified: "
            f"{java_list(tuple(alone))}"
        )
    later = replace(image, configs={**image.configs, (Resource.BROKER, request.name): after})
    for name in [request.name] if request.name else ["", *_brokers_with_settings(image)]:
        is_now, left_out = usable_broker_config(config.static_values, **_set_on(image, name))
        try:
            becomes = broker_config(config.static_values, **_set_on(later, name))
        except KafkaError as error:
            if name == request.name:
                raise _bad_request(error.message) from None
            if not left_out:  # else it was so before
                raise _bad_request(f"Broker {name} has settings of its own: {error.message}") from None
        else:
            _check_topics(image, is_now, becomes)


def _brokers_with_settings(image: ClusterImage) -> list[str]:
    return [name for kind, name in image.configs if kind == Resource.BROKER and name]


def _set_on(image: ClusterImage, name: str) -> dict[str, Mapping[str, str]]:
    """What was set for a broker while running; with no name, for one that has nothing of its own."""
    own = image.config(Resource.BROKER, name) if name else NO_CONFIG
    return {"cluster": image.config(Resource.BROKER, ""), "broker": own}


def _check_topics(image: ClusterImage, is_now: BrokerConfig, becomes: BrokerConfig) -> None:
    """Refuse defaults that contradict what a topic has of its own. A contradiction of before is not theirs."""
    if becomes.topic_defaults == is_now.topic_defaults:
        return
    for (kind, name), own in image.configs.items():
        if kind != Resource.TOPIC:
            continue
        why = _contradiction(own, becomes)
        if why and not _contradiction(own, is_now):
            words = f"The settings of topic '{name}' do not go with this default: {why}"
            raise KafkaError(ErrorCode.INVALID_CONFIG, words)


def _contradiction(own: Mapping[str, str], config: BrokerConfig) -> str:
    try:
        check_topic_config(own, config)
    except KafkaError as error:
        return error.message
    return ""


def _check_group(after: Mapping[str, str], config: BrokerConfig) -> None:
    for name, text in after.items():
        setting = GROUP_SETTINGS.get(name)
        if setting is None:
            raise KafkaError(ErrorCode.INVALID_CONFIG, f"Unknown group config name: {name}")
        value = setting.parse(text)
        kind = name.removeprefix("consumer.")
        for limit, wrong, words in (
            (f"group.consumer.min.{kind}", int.__lt__, "greater"),
            (f"group.consumer.max.{kind}", int.__gt__, "less"),
        ):
            if wrong(value, getattr(config, BROKER_SETTINGS[limit].attribute)):
                raise KafkaError(ErrorCode.INVALID_CONFIG, f"{name} must be {words} than or equal to {limit}")


def _check_client_metrics(after: Mapping[str, str]) -> None:
    for name, text in after.items():
        setting = CLIENT_METRICS_SETTINGS.get(name)
        if setting is None:
            raise _bad_request(f"Unknown client metrics configuration: {name}")
        value = setting.parse(text)
        if name == "interval.ms":
            if not CLIENT_METRICS_INTERVAL_MS_MIN <= value <= CLIENT_METRICS_INTERVAL_MS_MAX:
                raise _bad_request(
                    f"Invalid value {value} for interval.ms, interval must be between "
                    f"{CLIENT_METRICS_INTERVAL_MS_MIN} and {CLIENT_METRICS_INTERVAL_MS_MAX} (1 hour)"
                )
        elif name == "match":
            for pair in value:
                key, equals, pattern = pair.partition("=")
                if not equals or key.strip() not in CLIENT_METRICS_MATCH_KEYS or not pattern:
                    raise KafkaError(ErrorCode.INVALID_CONFIG, f"Illegal client matching pattern: {pair}")


def _bad_request(words: str) -> KafkaError:
    return KafkaError(ErrorCode.INVALID_REQUEST, words)
