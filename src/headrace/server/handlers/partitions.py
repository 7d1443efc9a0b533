"""ElectLeaders, AlterPartitionReassignments, ListPartitionReassignments and AllocateProducerIds.

Behaviour. Decided by the active controller on the newest image; each partition succeeds or fails by itself. An election
is of the preferred replica (type 0) or, among replicas that are not in sync, of any that lives (type 1); all partitions
are meant when none are named, and then those that need no election are left out of the reply. A reassignment is
answered when it has begun, and goes on by itself; null replicas cancel it. Versions: ElectLeaders has a type from 1,
reassignments may forbid another replication factor from 1. Producer ids are given to brokers in blocks.
"""

from collections.abc import Iterator
from typing import Any

from headrace.base.errors import ErrorCode, KafkaError
from headrace.cluster.elections import elected, leadership_of, preferred, record_of
from headrace.cluster.image import ClusterImage, TopicImage
from headrace.cluster.reassignment import is_moving, reassign
from headrace.cluster.records import MetadataRecord, PartitionRecord, ProducerIdsRecord
from headrace.security.authorizer import Operation, ResourceType
from headrace.server.broker import Broker
from headrace.server.context import RequestContext
from headrace.server.producer_ids import BLOCK
from headrace.server.router import Body, Handler
from headrace.wire.apis import Api
from headrace.wire.messages import Message

PREFERRED, UNCLEAN = 0, 1


# -- elections ---------------------------------------------------------------------------------------------------------


async def handle_elect_leaders(broker: Broker, context: RequestContext, request: Message) -> Body:
    """Other leaders for partitions."""
    if not context.authorize(Operation.ALTER, ResourceType.CLUSTER):
        return {"error_code": ErrorCode.CLUSTER_AUTHORIZATION_FAILED, "replica_election_results": []}
    image = broker.metadata.pending
    everything = request.topic_partitions is None
    records: list[MetadataRecord] = []
    results: dict[str, dict[int, KafkaError | None]] = {}
    for name, index in _all(image) if everything else _named(request.topic_partitions):
        try:
            records.append(_election(image, name, index, request.election_type))
        except KafkaError as error:
            if everything and error.code is ErrorCode.ELECTION_NOT_NEEDED:
                continue
            results.setdefault(name, {})[index] = error
        else:
            results.setdefault(name, {})[index] = None
    try:
        await broker.commit(records)
    except KafkaError as failure:
        for outcomes in results.values():
            outcomes |= {index: failure for index, error in outcomes.items() if error is None}
    told = [
        {
            "topic": name,
            "partition_result": [{"partition_id": i} | _told(each) for i, each in outcomes.items()],
        }
        for name, outcomes in results.items()
    ]
    unknown = told and request.election_type not in (PREFERRED, UNCLEAN)
    return {
        "throttle_time_ms": context.throttle_ms,
        "error_code": ErrorCode.INVALID_REQUEST if unknown else ErrorCode.NONE,
        "replica_election_results": told,
    }


def _all(image: ClusterImage) -> Iterator[tuple[str, int]]:
    for topic in image.topics.values():
        for index in range(len(topic.partitions)):
            yield topic.name, index


def _named(topics: list[Message]) -> Iterator[tuple[str, int]]:
    for topic in topics:
        for index in topic.partitions:
            yield topic.topic, index


def _election(image: ClusterImage, name: str, index: int, kind: int) -> PartitionRecord:
    if kind not in (PREFERRED, UNCLEAN):
        raise KafkaError(ErrorCode.INVALID_REQUEST, f"{kind} is not a type of election")
    topic = _topic(image, name, index)
    now = topic.partitions[index]
    may_lead = leadership_of(image)
    if kind == PREFERRED:
        if now.leader == now.replicas[0]:
            raise KafkaError(ErrorCode.ELECTION_NOT_NEEDED, "Leader election not needed for topic partition.")
        record = preferred(image, topic, index)
        if record is None:
            raise KafkaError(
                ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE, "The preferred leader was not available."
            )
        return record
    if now.leader in image.brokers and may_lead(now.leader):
        raise KafkaError(ErrorCode.ELECTION_NOT_NEEDED, "Leader election not needed for topic partition.")
    record = record_of(topic, index, elected(now, may_lead, unclean=True))
    if record is None or record.leader < 0:
        raise KafkaError(
            ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE,
            "Eligible topic partition leaders are not available.",
        )
    return record


def _topic(image: ClusterImage, name: str, index: int) -> TopicImage:
    topic = image.topics.get(name)
    if topic is None or not 0 <= index < len(topic.partitions):
        raise KafkaError(
            ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "This server does not host this topic-partition."
        )
    return topic


# -- reassignments -----------------------------------------------------------------------------------------------------


async def handle_alter_partition_reassignments(
    broker: Broker, context: RequestContext, request: Message
) -> Body:
    """Begin or cancel the moving of replicas."""
    if not context.authorize(Operation.ALTER, ResourceType.CLUSTER):
        return {"error_code": ErrorCode.CLUSTER_AUTHORIZATION_FAILED}
    image = broker.metadata.pending
    records: list[MetadataRecord] = []
    results: list[tuple[str, list[tuple[int, KafkaError | None]]]] = []
    for asked in request.topics:
        outcomes: list[tuple[int, KafkaError | None]] = []
        for partition in asked.partitions:
            index = partition.partition_index
            try:
                record = reassign(
                    image,
                    _topic(image, asked.name, index),
                    index,
                    partition.replicas,
                    may_change_factor=request.allow_replication_factor_change,
                )
            except KafkaError as error:
                outcomes.append((index, error))
            else:
                records += [] if record is None else [record]
                outcomes.append((index, None))
        results.append((asked.name, outcomes))
    failure: KafkaError | None = None
    try:
        await broker.commit(records)
    except KafkaError as error:
        failure = error
    return {
        "throttle_time_ms": context.throttle_ms,
        "error_message": None,
        "responses": [
            {
                "name": name,
                "partitions": [
                    {"partition_index": index} | _told(failure if error is None else error)
                    for index, error in outcomes
                ],
            }
            for name, outcomes in results
        ],
    }


def handle_list_partition_reassignments(broker: Broker, context: RequestContext, request: Message) -> Body:
    """The partitions whose replicas are being moved."""
    if not context.authorize(Operation.DESCRIBE, ResourceType.CLUSTER):
        return {"error_code": ErrorCode.CLUSTER_AUTHORIZATION_FAILED, "topics": []}
    image = broker.image
    wanted: dict[str, list[int]] | None = None
    if request.topics is not None:
        wanted = {topic.name: topic.partition_indexes for topic in request.topics}
    topics = []
    for topic in image.topics.values():
        indexes = range(len(topic.partitions)) if wanted is None else wanted.get(topic.name, ())
        partitions = [
            {
                "partition_index": index,
                "replicas": topic.partitions[index].replicas,
                "adding_replicas": topic.partitions[index].adding,
                "removing_replicas": topic.partitions[index].removing,
            }
            for index in indexes
            if 0 <= index < len(topic.partitions) and is_moving(topic.partitions[index])
        ]
        if partitions:
            topics.append({"name": topic.name, "partitions": partitions})
    return {"throttle_time_ms": context.throttle_ms, "error_message": None, "topics": topics}


# -- producer ids ------------------------------------------------------------------------------------------------------


async def handle_allocate_producer_ids(broker: Broker, context: RequestContext, request: Message) -> Body:
    """A block of producer ids for a broker."""
    if not context.authorize(Operation.CLUSTER_ACTION, ResourceType.CLUSTER):
        return {"error_code": ErrorCode.CLUSTER_AUTHORIZATION_FAILED}
    asker = broker.metadata.pending.brokers.get(request.broker_id)
    if asker is None or asker.epoch != request.broker_epoch:
        return {"error_code": ErrorCode.STALE_BROKER_EPOCH}
    first = broker.metadata.pending.next_producer_id
    await broker.commit([ProducerIdsRecord(first + BLOCK)])
    return {"producer_id_start": first, "producer_id_len": BLOCK}


def _told(error: KafkaError | None) -> dict[str, Any]:
    if error is None:
        return {"error_code": ErrorCode.NONE, "error_message": None}
    return {"error_code": error.code, "error_message": error.message}


HANDLERS: dict[Api, Handler] = {
    Api.ELECT_LEADERS: handle_elect_leaders,
    Api.ALTER_PARTITION_REASSIGNMENTS: handle_alter_partition_reassignments,
    Api.LIST_PARTITION_REASSIGNMENTS: handle_list_partition_reassignments,
    Api.ALLOCATE_PRODUCER_IDS: handle_allocate_producer_ids,
}
