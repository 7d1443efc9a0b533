"""DescribeConfigs, AlterConfigs, IncrementalAlterConfigs and ListConfigResources.

Behaviour. Settings of topics, of this broker, of all brokers (the broker without a name), of groups, of client-metrics
subscriptions, and the levels of this broker's loggers. Entries say where their value is from; secrets and settings
nobody declared have none. Changes are checked as a whole per resource, recorded in the metadata log and in force when
answered; logger levels change at once and last until the process ends, as in Kafka. AlterConfigs replaces all that is
set on a resource, IncrementalAlterConfigs changes single keys. Versions: DescribeConfigs documents from 3. Left out:
settings per listener, which come with security.
"""

from typing import Any

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.settings_types import INT_MAX
from headrace.cluster.names import check_topic_name
from headrace.cluster.settings_control import (
    Altered,
    Change,
    Resource,
    ResourceChange,
    alter_settings,
)
from headrace.cluster.settings_control import (
    Operation as ChangeOperation,
)
from headrace.cluster.settings_view import UNKNOWN_TYPE, Entry, SettingsView, Source
from headrace.security.authorizer import Operation, ResourceType
from headrace.server.broker import Broker
from headrace.server.context import RequestContext
from headrace.server.loggers import LEVELS, ROOT, logger_levels, set_logger_level
from headrace.server.router import Body, Handler
from headrace.wire.apis import Api
from headrace.wire.messages import Message

NOT_UNDERSTOOD = (
    "This most likely occurs because of a request being malformed by the client library or the message was sent to an "
    "incompatible broker. See the broker logs for more details."
)
INT_DIGITS_MAX = 10
MESSAGE_CHARACTERS_MAX = 8_000
CLUSTER_WIDE = (Resource.BROKER, Resource.BROKER_LOGGER, Resource.CLIENT_METRICS)


def handle_describe_configs(broker: Broker, context: RequestContext, request: Message) -> Body:
    """The settings of resources, each with its source."""
    view = SettingsView(broker.image, broker.config, broker.node_id)
    results = []
    for resource in request.resources:
        answer: dict[str, Any] = {
            "resource_type": resource.resource_type,
            "resource_name": resource.resource_name,
            "error_message": "",
        }
        try:
            _authorize(context, Operation.DESCRIBE_CONFIGS, resource.resource_type, resource.resource_name)
            entries = _entries(broker, view, resource)
        except KafkaError as error:
            answer |= {"error_code": error.code, "error_message": _words(error), "configs": []}
        else:
            answer["configs"] = [
                _entry(entry, request.include_synonyms, request.include_documentation) for entry in entries
            ]
        results.append(answer)
    return {"throttle_time_ms": context.throttle_ms, "results": results}


def _entries(broker: Broker, view: SettingsView, resource: Message) -> list[Entry]:
    name, keys = resource.resource_name, resource.configuration_keys
    match resource.resource_type:
        case Resource.TOPIC:
            check_topic_name(name)
            if name not in broker.image.topics:
                raise KafkaError(
                    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "This server does not host this topic-partition."
                )
            return view.topic(broker.image.config(Resource.TOPIC, name), keys)
        case Resource.BROKER:
            if not name:
                return view.all_brokers(keys)
            _check_node(name, broker.node_id, "expected {} or empty string, but")
            return view.broker(keys)
        case Resource.BROKER_LOGGER:
            if not name:
                raise KafkaError(ErrorCode.INVALID_REQUEST, "Broker id must not be empty")
            _check_node(name, broker.node_id, "expected {} but")
            return _loggers(keys)
        case Resource.CLIENT_METRICS:
            if not name:
                raise KafkaError(
                    ErrorCode.INVALID_REQUEST, "Client metrics subscription name must not be empty"
                )
            return view.client_metrics(name, keys)
        case Resource.GROUP:
            if not name:
                raise KafkaError(ErrorCode.INVALID_REQUEST, "Group name must not be empty")
            return view.group(name, keys)
        case _:
            raise KafkaError(ErrorCode.INVALID_REQUEST, NOT_UNDERSTOOD)


def _entry(entry: Entry, include_synonyms: bool, include_documentation: bool) -> dict[str, Any]:
    told: dict[str, Any] = {
        "name": entry.name,
        "value": entry.value,
        "read_only": entry.read_only,
        "config_source": entry.source,
        "is_sensitive": entry.sensitive,
        "config_type": entry.type,
        "documentation": entry.documentation if include_documentation else None,
        "synonyms": [],
    }
    if include_synonyms:
        told["synonyms"] = [
            {"name": each.name, "value": each.value, "source": each.source} for each in entry.synonyms
        ]
    return told


def _check_node(
    name: str, node_id: int, words: str, field: str = "Broker id", kind: str = "broker id,"
) -> None:
    """INVALID_REQUEST unless a resource's name is this broker's number."""
    number = _number(name)
    if number is None:
        raise KafkaError(ErrorCode.INVALID_REQUEST, f"{field} must be an integer, but it is: {name}")
    if number != node_id:
        expected = words.format(node_id)
        raise KafkaError(ErrorCode.INVALID_REQUEST, f"Unexpected {kind} {expected} received {name}")


def _number(text: str) -> int | None:
    """The number that Java reads from a text as an int; None where it reads none."""
    digits = text[1:] if text[:1] in ("+", "-") else text
    if not (digits.isascii() and digits.isdigit()) or len(digits.lstrip("0")) > INT_DIGITS_MAX:
        return None
    number = int(digits.lstrip("0") or "0") * (-1 if text[0] == "-" else 1)
    return number if -INT_MAX - 1 <= number <= INT_MAX else None


def _authorize(context: RequestContext, operation: Operation, kind: int, name: str) -> None:
    if kind in CLUSTER_WIDE:
        if not context.authorize(operation, ResourceType.CLUSTER):
            raise KafkaError(ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
    elif kind == Resource.TOPIC:
        if not context.authorize(operation, ResourceType.TOPIC, name):
            raise KafkaError(ErrorCode.TOPIC_AUTHORIZATION_FAILED)
    elif kind == Resource.GROUP and not context.authorize(operation, ResourceType.GROUP, name):
        raise KafkaError(ErrorCode.GROUP_AUTHORIZATION_FAILED)


# -- changes -----------------------------------------------------------------------------------------------------------


async def handle_alter_configs(broker: Broker, context: RequestContext, request: Message) -> Body:
    """All that is set on each resource, replaced."""
    wanted = [
        ResourceChange(
            resource.resource_type,
            resource.resource_name,
            [Change(config.name, ChangeOperation.SET, config.value) for config in resource.configs],
            replace=True,
        )
        for resource in request.resources
    ]
    return await _alter(broker, context, wanted, request.validate_only)


async def handle_incremental_alter_configs(broker: Broker, context: RequestContext, request: Message) -> Body:
    """Single keys of each resource, changed."""
    wanted = [
        ResourceChange(
            resource.resource_type,
            resource.resource_name,
            [Change(config.name, config.config_operation, config.value) for config in resource.configs],
        )
        for resource in request.resources
    ]
    return await _alter(broker, context, wanted, request.validate_only)


async def _alter(
    broker: Broker, context: RequestContext, wanted: list[ResourceChange], validate_only: bool
) -> Body:
    refused: dict[int, KafkaError] = {}
    for index, change in enumerate(wanted):
        try:
            _authorize(context, Operation.ALTER_CONFIGS, change.type, change.name)
            if change.type == Resource.BROKER and change.name and not _is_registered(broker, change.name):
                _check_node(change.name, broker.node_id, "expected {}, but", "Node id")
        except KafkaError as error:
            refused[index] = error
    allowed = [change for index, change in enumerate(wanted) if index not in refused]
    loggers = [_is_loggers(change) for change in allowed]
    recorded = [change for change, is_loggers in zip(allowed, loggers, strict=True) if not is_loggers]
    records, results = alter_settings(broker.metadata.pending, recorded, broker.config)
    if not validate_only:
        try:
            await broker.commit(records)
        except KafkaError as error:
            results = [each if each.error is not None else each._replace(error=error) for each in results]
    decided = iter(results)
    outcomes = iter(
        [
            _alter_loggers(broker.node_id, change, validate_only) if is_loggers else next(decided)
            for change, is_loggers in zip(allowed, loggers, strict=True)
        ]
    )
    answers = [
        Altered(change.type, change.name, refused[index]) if index in refused else next(outcomes)
        for index, change in enumerate(wanted)
    ]
    return {"throttle_time_ms": context.throttle_ms, "responses": [_altered(answer) for answer in answers]}


def _is_registered(broker: Broker, name: str) -> bool:
    """Settings of a broker are asked of that broker, and decided by the active controller for all of them."""
    return name.isdigit() and _number(name) in broker.image.brokers


def _altered(answer: Altered) -> dict[str, Any]:
    told: dict[str, Any] = {
        "resource_type": answer.type,
        "resource_name": answer.name,
        "error_message": None,
    }
    if answer.error is not None:
        told |= {"error_code": answer.error.code, "error_message": _words(answer.error)}
    return told


def _words(error: KafkaError) -> str:
    """Why something is refused, cut where older versions would have no room: it may quote what the client sent."""
    return error.message[:MESSAGE_CHARACTERS_MAX]


# -- loggers -----------------------------------------------------------------------------------------------------------


def _is_loggers(change: ResourceChange) -> bool:
    """Logger levels are changed on this broker alone, key by key; they cannot be replaced as a whole."""
    return change.type == Resource.BROKER_LOGGER and not change.replace


def _loggers(keys: list[str] | None) -> list[Entry]:
    """The levels in force. The logger above all of Headrace's is what Kafka calls the root."""
    return [
        Entry(name, level, Source.DYNAMIC_BROKER_LOGGER, False, False, UNKNOWN_TYPE, "", ())
        for name, level in sorted(logger_levels().items())
        if not keys or name in keys
    ]


def _alter_loggers(node_id: int, change: ResourceChange, validate_only: bool) -> Altered:
    try:
        _check_node(change.name, node_id, "Expected {}, but", "Node id", "node id.")
        levels = _checked_levels(change)
    except KafkaError as error:
        return Altered(change.type, change.name, error)
    if not validate_only:
        for name, level in levels.items():
            set_logger_level(name, level)
    return Altered(change.type, change.name, None)


def _checked_levels(change: ResourceChange) -> dict[str, str | None]:
    """The level each logger is to have, None for that of the logger above it."""
    known = logger_levels()
    levels: dict[str, str | None] = {}
    for name, operation, value in change.changes:
        if operation in (ChangeOperation.APPEND, ChangeOperation.SUBTRACT):
            raise KafkaError(
                ErrorCode.INVALID_REQUEST,
                f"{ChangeOperation(operation).name} operation is not allowed for the BROKER_LOGGER resource",
            )
        if name not in known:
            raise KafkaError(ErrorCode.INVALID_CONFIG, f"Logger {name} does not exist!")
        if operation == ChangeOperation.DELETE:
            if name == ROOT:
                raise KafkaError(
                    ErrorCode.INVALID_REQUEST, "Removing the log level of the root logger is not allowed"
                )
            levels[name] = None
        elif value in LEVELS:
            levels[name] = value
        else:
            raise KafkaError(
                ErrorCode.INVALID_CONFIG,
                f"Cannot set the log level of {name} to {value} as it is not a supported log level. "
                f"Valid log levels are {', '.join(sorted(LEVELS))}",
            )
    return levels


# -- what can be configured --------------------------------------------------------------------------------------------


def handle_list_config_resources(broker: Broker, context: RequestContext, request: Message) -> Body:
    """The resources that can be configured. Version 0 lists client-metrics subscriptions and nothing else."""
    if not context.authorize(Operation.DESCRIBE_CONFIGS, ResourceType.CLUSTER):
        raise KafkaError(ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
    kinds = [Resource.CLIENT_METRICS] if context.version == 0 else request.resource_types or list(Resource)
    if any(kind not in set(Resource) for kind in kinds):
        raise KafkaError(ErrorCode.UNSUPPORTED_VERSION)
    image = broker.image
    found: list[dict[str, Any]] = []
    for kind in dict.fromkeys(kinds):
        if kind == Resource.TOPIC:
            names = sorted(image.topics)
        elif kind in (Resource.BROKER, Resource.BROKER_LOGGER):
            names = [str(node_id) for node_id in sorted(image.brokers)]
        else:
            names = sorted(name for resource_type, name in image.configs if resource_type == kind)
        found += [{"resource_name": name, "resource_type": kind} for name in names]
    return {"throttle_time_ms": context.throttle_ms, "config_resources": found}


HANDLERS: dict[Api, Handler] = {
    Api.DESCRIBE_CONFIGS: handle_describe_configs,
    Api.ALTER_CONFIGS: handle_alter_configs,
    Api.INCREMENTAL_ALTER_CONFIGS: handle_incremental_alter_configs,
    Api.LIST_CONFIG_RESOURCES: handle_list_config_resources,
}
