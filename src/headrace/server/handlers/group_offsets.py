"""OffsetCommit, OffsetFetch, OffsetDelete: where the consumers of a group are.

Behaviour. A commit is checked against the topics that exist and then given to the group's coordinator, which
answers when it is stored; what is refused for one partition does not keep the others from being committed. A fetch
answers at once, with what is committed: offset -1 without an error where nothing is, which sends a consumer to its
`auto.offset.reset`. Consumers that assign partitions to themselves commit without a generation and need no group.
Versions: OffsetFetch asks for one group before 8, for many from then on, and for all partitions with null; topics
by id from 10 on, in both. From 9 on a member of the consumer protocol says who it is and in which epoch, and is
refused when that is not so any more. TxnOffsetCommit stores offsets that count when their transaction is committed;
until then a fetch that requires stable offsets gets UNSTABLE_OFFSET_COMMIT for them.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.ids import ZERO_ID
from headrace.cluster.image import TopicImage
from headrace.coordinators.effects import Effects
from headrace.coordinators.group_shard import CommitResult, Committer
from headrace.coordinators.group_states import append_error
from headrace.coordinators.records import OffsetValue
from headrace.security.authorizer import Operation, ResourceType
from headrace.server.broker import Broker
from headrace.server.context import RequestContext
from headrace.server.router import Body, DirectHandler, Handler
from headrace.server.session import Exchange
from headrace.wire.apis import Api
from headrace.wire.messages import Message
from headrace.wire.offset_commit import (
    TopicKey,
    read_commit_head,
    read_offset_commit,
    split_commit,
    write_offset_commit_reply,
    write_one_commit_reply,
)

GROUPS_FROM = 8
TOPIC_IDS_FROM = 10
GROUP_ERROR_FROM = 2
NOTHING_COMMITTED = -1
NO_RETENTION = -1
STRING_BYTES_MAX = 32_767
UTF8_BYTES_MAX = 4
HEADS_REMEMBERED_MAX = 4096


# -- commit ------------------------------------------------------------------------------------------------------------


def handle_offset_commit(broker: Broker, exchange: Exchange, frame: memoryview, body: int) -> None:
    """Store how far a group has read. By hand from frame to reply: consumers send little else so often."""
    version = exchange.context.version
    data = bytes(frame[body:])
    if (split := split_commit(version, data)) is not None:
        head, offset, leader_epoch = split
        if (known := _known_head(version, head)) is not None:
            _commit_one(broker, exchange, known, offset, leader_epoch)
            return
    _commit_many(broker, exchange, data)


@lru_cache(maxsize=HEADS_REMEMBERED_MAX)
def _known_head(version: int, data: bytes) -> tuple[Committer, TopicKey, int] | None:
    head = read_commit_head(version, data)
    if head is None:
        return None
    group_id, generation, member_id, instance_id, key, index = head
    return Committer(group_id, member_id, instance_id, generation, NO_RETENTION, version), key, index


def _commit_one(
    broker: Broker, exchange: Exchange, known: tuple[Committer, TopicKey, int], offset: int, leader_epoch: int
) -> None:
    """One partition without metadata, as most commits are."""
    who, key, index = known
    context, image = exchange.context, broker.image
    found = image.topics.get(key) if isinstance(key, str) else image.topic_by_id(key)
    reply = OneReply(broker, exchange, key, index)
    if not context.authorize(Operation.READ, ResourceType.GROUP, who.group_id):
        reply.tell(ErrorCode.GROUP_AUTHORIZATION_FAILED)
    elif (error := topic_error(context, found, key)) is not ErrorCode.NONE:
        reply.tell(error)
    elif found is None or not 0 <= index < len(found.partitions):
        reply.tell(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    else:
        try:
            error = broker.groups.commit_one(who, found.name, index, offset, leader_epoch, reply.stored)
        except KafkaError as refused:
            error = refused.code
        if error is not ErrorCode.NONE:
            reply.tell(error)


class OneReply:
    """Who waits for a commit of one partition."""

    __slots__ = ("_broker", "_exchange", "_index", "_key")

    def __init__(self, broker: Broker, exchange: Exchange, key: TopicKey, index: int) -> None:
        self._broker = broker
        self._exchange = exchange
        self._key = key
        self._index = index

    def stored(self, error: ErrorCode, now_ms: int, out: Effects) -> None:
        """The coordinator has stored it, or could not."""
        self.tell(error and append_error(error, ErrorCode.INVALID_COMMIT_OFFSET_SIZE))

    def tell(self, code: ErrorCode) -> None:
        exchange = self._exchange
        context = exchange.context
        body = write_one_commit_reply(context.version, context.throttle_ms, self._key, self._index, code)
        self._broker.flush_later(exchange.reply_unsent(body))


def _commit_many(broker: Broker, exchange: Exchange, data: bytes) -> None:
    context = exchange.context
    version = context.version
    request = read_offset_commit(version, data)
    refusal = group_refusal(context, request.group_id)
    image = broker.image
    answers: list[tuple[TopicKey, list[tuple[int, int]]]] = []
    commits: list[tuple[str, int, int, int, str]] = []
    places: list[tuple[list[tuple[int, int]], int]] = []
    for key, wanted in request.topics:
        found = image.topics.get(key) if isinstance(key, str) else image.topic_by_id(key)
        error = refusal or topic_error(context, found, key)
        name, count = ("", 0) if found is None or error else (found.name, len(found.partitions))
        results: list[tuple[int, int]] = []
        if wanted:  # a topic without partitions is not told of
            answers.append((key, results))
        for index, offset, leader_epoch, metadata in wanted:
            if 0 <= index < count:
                commits.append((name, index, offset, leader_epoch, metadata))
                places.append((results, len(results)))
                results.append((index, 0))
            else:
                results.append((index, error or ErrorCode.UNKNOWN_TOPIC_OR_PARTITION))

    def answer(told: CommitResult) -> None:
        for (results, at), (_, index, code) in zip(places, told, strict=True):
            if code is not ErrorCode.NONE:
                results[at] = index, code
        reply = write_offset_commit_reply(version, context.throttle_ms, answers)
        broker.flush_later(exchange.reply_unsent(reply))

    if not commits:
        answer([])
        return
    group_id, generation, member_id, instance_id, retention_ms, _ = request
    who = Committer(group_id, member_id, instance_id, generation, retention_ms, version)
    try:
        broker.groups.commit_then(who, commits, answer)
    except KafkaError as refused:
        answer([(name, index, refused.code) for name, index, *_ in commits])


def topic_error(context: RequestContext, found: TopicImage | None, key: TopicKey) -> ErrorCode:
    """Why nothing of a topic is committed."""
    if isinstance(key, bytes) and found is None:
        return ErrorCode.UNKNOWN_TOPIC_ID
    name = found.name if found is not None else str(key)
    if not context.authorize(Operation.READ, ResourceType.TOPIC, name):
        return ErrorCode.TOPIC_AUTHORIZATION_FAILED
    return ErrorCode.NONE if found is not None else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def group_refusal(context: RequestContext, group_id: str) -> ErrorCode:
    """Why nothing is committed for a group, whatever of it is asked."""
    if not context.authorize(Operation.READ, ResourceType.GROUP, group_id):
        return ErrorCode.GROUP_AUTHORIZATION_FAILED
    too_long = len(group_id) * UTF8_BYTES_MAX > STRING_BYTES_MAX and len(group_id.encode()) > STRING_BYTES_MAX
    return ErrorCode.INVALID_GROUP_ID if too_long else ErrorCode.NONE


# -- fetch -------------------------------------------------------------------------------------------------------------


def handle_offset_fetch(broker: Broker, context: RequestContext, request: Message) -> Body:
    """The committed offsets of groups."""
    if context.version >= GROUPS_FROM:
        groups = [
            _group(
                broker,
                context,
                group.group_id,
                group.topics,
                request.require_stable,
                (group.member_id, group.member_epoch),
            )
            for group in request.groups
        ]
        return {"throttle_time_ms": context.throttle_ms, "groups": groups}
    answer = _group(broker, context, request.group_id, request.topics, request.require_stable)
    del answer["group_id"]
    for topic in answer["topics"]:
        del topic["topic_id"]
    return {"throttle_time_ms": context.throttle_ms, **answer}


def _group(
    broker: Broker,
    context: RequestContext,
    group_id: str,
    topics: list[Message] | None,
    require_stable: bool,
    reader: tuple[str | None, int] = (None, -1),
) -> dict[str, Any]:
    error = ErrorCode.NONE
    offsets: Mapping[tuple[str, int], OffsetValue] = {}
    if not context.authorize(Operation.DESCRIBE, ResourceType.GROUP, group_id):
        error = ErrorCode.GROUP_AUTHORIZATION_FAILED
    else:
        try:
            error = broker.groups.check_reader(group_id, *reader)
            offsets = broker.groups.offsets(group_id)
        except KafkaError as refused:
            error = refused.code
    if error is not ErrorCode.NONE and context.version >= GROUP_ERROR_FROM:
        return {"group_id": group_id, "topics": [], "error_code": error}
    if topics is None:
        answers = _all_topics(broker, context, offsets)
    else:
        answers = [_topic(broker, context, topic, offsets, error) for topic in topics]
    if require_stable and error is ErrorCode.NONE:
        _hide_unstable(broker, group_id, answers)
    return {"group_id": group_id, "topics": answers, "error_code": ErrorCode.NONE}


def _hide_unstable(broker: Broker, group_id: str, answers: list[dict[str, Any]]) -> None:
    """An offset that an open transaction may change is not told: the consumer asks again until that has ended."""
    for topic in answers:
        for number, each in enumerate(topic["partitions"]):
            index = each["partition_index"]
            if each["error_code"] is ErrorCode.NONE and broker.groups.is_pending(
                group_id, topic["name"], index
            ):
                topic["partitions"][number] = _offset(index, None, ErrorCode.UNSTABLE_OFFSET_COMMIT)


def _all_topics(
    broker: Broker, context: RequestContext, offsets: Mapping[tuple[str, int], OffsetValue]
) -> list[dict[str, Any]]:
    partitions: dict[str, list[int]] = {}
    for name, index in offsets:
        partitions.setdefault(name, []).append(index)
    answers = []
    for name, indexes in partitions.items():
        topic = broker.image.topics.get(name)
        if not context.authorize(Operation.DESCRIBE, ResourceType.TOPIC, name):
            continue
        if topic is None and context.version >= TOPIC_IDS_FROM:
            continue
        answers.append(
            {
                "name": name,
                "topic_id": ZERO_ID if topic is None else topic.id,
                "partitions": [_offset(index, offsets[name, index], ErrorCode.NONE) for index in indexes],
            }
        )
    return answers


def _topic(
    broker: Broker,
    context: RequestContext,
    topic: Message,
    offsets: Mapping[tuple[str, int], OffsetValue],
    error: ErrorCode,
) -> dict[str, Any]:
    name, topic_id = topic.name, ZERO_ID
    if context.version >= TOPIC_IDS_FROM:
        topic_id = topic.topic_id
        known = broker.image.topic_by_id(topic_id)
        if known is None:
            name, error = "", ErrorCode.UNKNOWN_TOPIC_ID
        else:
            name = known.name
    if error is ErrorCode.NONE and not context.authorize(Operation.DESCRIBE, ResourceType.TOPIC, name):
        error = ErrorCode.TOPIC_AUTHORIZATION_FAILED
    return {
        "name": name,
        "topic_id": topic_id,
        "partitions": [
            _offset(index, None if error else offsets.get((name, index)), error)
            for index in topic.partition_indexes
        ],
    }


def _offset(index: int, value: OffsetValue | None, error: ErrorCode) -> dict[str, Any]:
    if value is None:
        return {
            "partition_index": index,
            "committed_offset": NOTHING_COMMITTED,
            "committed_leader_epoch": -1,
            "metadata": "",
            "error_code": error,
        }
    return {
        "partition_index": index,
        "committed_offset": value.offset,
        "committed_leader_epoch": value.leader_epoch,
        "metadata": value.metadata,
        "error_code": ErrorCode.NONE,
    }


# -- delete ------------------------------------------------------------------------------------------------------------


async def handle_offset_delete(broker: Broker, context: RequestContext, request: Message) -> Body:
    """Forget committed offsets of topics that no member of the group reads."""
    if not context.authorize(Operation.DELETE, ResourceType.GROUP, request.group_id):
        raise KafkaError(ErrorCode.GROUP_AUTHORIZATION_FAILED)
    if not request.group_id:
        raise KafkaError(ErrorCode.INVALID_GROUP_ID)
    results: dict[tuple[str, int], ErrorCode] = {}
    wanted: list[tuple[str, int]] = []
    topics = [topic for topic in request.topics if topic.partitions]
    for topic in topics:
        found = broker.image.topics.get(topic.name)
        error = topic_error(context, found, topic.name)
        for each in topic.partitions:
            index = each.partition_index
            if error is not ErrorCode.NONE:
                results[topic.name, index] = error
            elif found is None or not 0 <= index < len(found.partitions):
                results[topic.name, index] = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            else:
                wanted.append((topic.name, index))
    answer = broker.groups.delete_offsets(request.group_id, wanted)
    error, told = answer if isinstance(answer, tuple) else await answer
    if error is not ErrorCode.NONE:
        return {"throttle_time_ms": context.throttle_ms, "error_code": error, "topics": []}
    results.update({(name, index): code for name, index, code in told})
    return {
        "throttle_time_ms": context.throttle_ms,
        "error_code": ErrorCode.NONE,
        "topics": [{"name": topic.name, "partitions": _deleted(topic, results)} for topic in topics],
    }


def _deleted(topic: Message, results: Mapping[tuple[str, int], ErrorCode]) -> Iterable[dict[str, Any]]:
    return [
        {"partition_index": each.partition_index, "error_code": results[topic.name, each.partition_index]}
        for each in topic.partitions
    ]


HANDLERS: dict[Api, Handler] = {
    Api.OFFSET_FETCH: handle_offset_fetch,
    Api.OFFSET_DELETE: handle_offset_delete,
}
DIRECT: dict[Api, DirectHandler] = {Api.OFFSET_COMMIT: handle_offset_commit}
