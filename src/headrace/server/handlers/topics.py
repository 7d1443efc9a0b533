"""CreateTopics, DeleteTopics and CreatePartitions.

Behaviour. Decided by the controller on the newest image, appended to the metadata log, answered when the records are
committed and this broker has taken up the partitions; `validate_only` stops after the decision. Each topic succeeds or
fails by itself. Versions: CreateTopics tells partition counts and settings from 5, ids from 7; DeleteTopics takes ids
from 6 and explains errors from 5. The client's timeout is not read: a change is committed in less time than any client
waits, or fails. Left out: controller mutation quotas.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.ids import ZERO_ID
from headrace.cluster import controller
from headrace.cluster.controller import Created, NewPartitions, NewTopic, Outcome
from headrace.cluster.image import TopicImage
from headrace.cluster.records import MetadataRecord
from headrace.cluster.settings_view import SettingsView
from headrace.security.authorizer import Operation, ResourceType
from headrace.server.broker import Broker
from headrace.server.context import RequestContext
from headrace.server.router import Body, Handler
from headrace.wire.apis import Api
from headrace.wire.messages import Message

CREATE_SETTINGS_FROM = 5


async def handle_create_topics(broker: Broker, context: RequestContext, request: Message) -> Body:
    """New topics."""
    create_any = context.authorize(Operation.CREATE, ResourceType.CLUSTER)
    allowed, refused = _split(
        request.topics, lambda name: create_any or _may(context, Operation.CREATE, name)
    )
    records, results = controller.create_topics(
        broker.metadata.pending, [_new_topic(topic) for topic in allowed], broker.config, broker.new_topic_id
    )
    results += [Created(name, _denied()) for name in refused]
    results = await _carry_out(broker, records, results, request.validate_only)
    tell = _SettingsTold(broker, context) if context.version >= CREATE_SETTINGS_FROM else None
    return {
        "throttle_time_ms": context.throttle_ms,
        "topics": [_created(result, tell) for result in results],
    }


def _new_topic(topic: Message) -> NewTopic:
    return NewTopic(
        topic.name,
        topic.num_partitions,
        topic.replication_factor,
        [(assignment.partition_index, assignment.broker_ids) for assignment in topic.assignments],
        [(config.name, config.value) for config in topic.configs],
    )


class _SettingsTold:
    """The settings in the reply to CreateTopics; topics with the same overrides share one list."""

    def __init__(self, broker: Broker, context: RequestContext) -> None:
        self._view = SettingsView(broker.image, broker.config, broker.node_id)
        self._context = context
        self._shared: dict[tuple[tuple[str, str], ...], list[dict[str, Any]]] = {}

    def of(self, result: Created) -> dict[str, Any]:
        if not self._context.authorize(Operation.DESCRIBE_CONFIGS, ResourceType.TOPIC, result.name):
            return {"topic_config_error_code": ErrorCode.TOPIC_AUTHORIZATION_FAILED}
        overrides = result.configs or {}
        key = tuple(sorted(overrides.items()))
        configs = self._shared.get(key)
        if configs is None:
            configs = self._shared[key] = [
                {
                    "name": entry.name,
                    "value": entry.value,
                    "read_only": entry.read_only,
                    "config_source": entry.source,
                    "is_sensitive": entry.sensitive,
                }
                for entry in self._view.topic(overrides)
            ]
        return {
            "num_partitions": result.num_partitions,
            "replication_factor": result.replication_factor,
            "configs": configs,
        }


def _created(result: Created, tell: _SettingsTold | None) -> dict[str, Any]:
    answer: dict[str, Any] = {"name": result.name, "topic_id": result.topic_id, "error_message": None}
    if result.error is not None:
        return answer | _failure(result.error) | {"configs": []}
    return answer | ({} if tell is None else tell.of(result))


async def _carry_out(
    broker: Broker, records: list[MetadataRecord], results: list[Created], validate_only: bool
) -> list[Created]:
    """Commit what was decided. If that fails, everything that was decided fails with it."""
    if validate_only:
        return results
    try:
        await broker.commit(records)
    except KafkaError as error:
        return [result if result.error is not None else Created(result.name, error) for result in results]
    return results


# -- deletion ----------------------------------------------------------------------------------------------------------


async def handle_delete_topics(broker: Broker, context: RequestContext, request: Message) -> Body:
    """Topics gone, by name or by id."""
    asked = [(topic.name, topic.topic_id) for topic in request.topics]
    asked += [(name, ZERO_ID) for name in request.topic_names]
    if not broker.config.delete_topic_enable:
        code = ErrorCode.INVALID_REQUEST if context.version < 3 else ErrorCode.TOPIC_DELETION_DISABLED
        off = KafkaError(code, "Topic deletion is disabled.")
        outcomes = [Outcome(name, topic_id, off) for name, topic_id in asked]
    else:
        outcomes = await _delete(broker, context, asked)
    responses = [{"name": each.name, "topic_id": each.topic_id} | _failure(each.error) for each in outcomes]
    return {"throttle_time_ms": context.throttle_ms, "responses": responses}


async def _delete(
    broker: Broker, context: RequestContext, asked: list[tuple[str | None, bytes]]
) -> list[Outcome]:
    named = Counter(asked)
    gone: dict[bytes, TopicImage] = {}
    outcomes: dict[tuple[str | None, bytes], Outcome] = {}
    for name, topic_id in dict.fromkeys(asked):
        try:
            _check_asked(name, topic_id, named[name, topic_id])
            topic = _deletable(broker, context, name, topic_id)
        except KafkaError as error:
            outcomes[name, topic_id] = Outcome(name, topic_id, error)
            continue
        key = (topic.name, topic.id)
        if key in outcomes:  # by its name and by its id: which of them was meant is not guessed
            gone.pop(topic.id, None)
            twice = KafkaError(
                ErrorCode.INVALID_REQUEST, "The provided topic name maps to an ID that was already supplied."
            )
            outcomes[key] = Outcome(*key, twice)
        else:
            gone[topic.id] = topic
            outcomes[key] = Outcome(*key, None)
    try:
        await broker.commit(controller.delete_topics(gone.values()))
    except KafkaError as error:
        return [
            each if each.error is not None else Outcome(each.name, each.topic_id, error)
            for each in outcomes.values()
        ]
    return list(outcomes.values())


def _check_asked(name: str | None, topic_id: bytes, times: int) -> None:
    if name is None and topic_id == ZERO_ID:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "Neither topic name nor id were specified.")
    if name is not None and topic_id != ZERO_ID:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "You may not specify both topic name and topic id.")
    if times > 1:
        raise KafkaError(
            ErrorCode.INVALID_REQUEST, f"Duplicate topic {'name' if name is not None else 'id'}."
        )


def _deletable(broker: Broker, context: RequestContext, name: str | None, topic_id: bytes) -> TopicImage:
    """The topic meant. A name that may not be described is refused before it is looked up, so as not to tell of it."""
    if name is not None and not _may(context, Operation.DESCRIBE, name):
        raise _denied()
    topic = controller.find_topic(broker.metadata.pending, name, topic_id)
    if not _may(context, Operation.DESCRIBE, topic.name) or not _may(context, Operation.DELETE, topic.name):
        raise _denied()
    return topic


# -- more partitions ---------------------------------------------------------------------------------------------------


async def handle_create_partitions(broker: Broker, context: RequestContext, request: Message) -> Body:
    """More partitions for topics that exist."""
    allowed, refused = _split(request.topics, lambda name: _may(context, Operation.ALTER, name))
    records, outcomes = controller.create_partitions(
        broker.metadata.pending, [_new_partitions(topic) for topic in allowed]
    )
    if not request.validate_only:
        try:
            await broker.commit(records)
        except KafkaError as error:
            outcomes = [
                each if each.error is not None else Outcome(each.name, each.topic_id, error)
                for each in outcomes
            ]
    outcomes += [Outcome(name, ZERO_ID, _denied()) for name in refused]
    results = [{"name": each.name} | _failure(each.error) for each in outcomes]
    return {"throttle_time_ms": context.throttle_ms, "results": results}


def _new_partitions(topic: Message) -> NewPartitions:
    chosen = topic.assignments
    return NewPartitions(
        topic.name, topic.count, None if chosen is None else [each.broker_ids for each in chosen]
    )


def _split(topics: list[Message], may: Callable[[str], bool]) -> tuple[list[Message], list[str]]:
    """The topics that whoever asks may change, and the names of the others."""
    allowed: list[Message] = []
    refused: list[str] = []
    for topic in topics:
        if may(topic.name):
            allowed.append(topic)
        elif topic.name not in refused:
            refused.append(topic.name)
    return allowed, refused


def _may(context: RequestContext, operation: Operation, name: str) -> bool:
    return context.authorize(operation, ResourceType.TOPIC, name)


def _denied() -> KafkaError:
    return KafkaError(ErrorCode.TOPIC_AUTHORIZATION_FAILED, "Authorization failed.")


def _failure(error: KafkaError | None) -> dict[str, Any]:
    return {} if error is None else {"error_code": error.code, "error_message": error.message}


HANDLERS: dict[Api, Handler] = {
    Api.CREATE_TOPICS: handle_create_topics,
    Api.DELETE_TOPICS: handle_delete_topics,
    Api.CREATE_PARTITIONS: handle_create_partitions,
}
