"""DescribeQuorum, AddRaftVoter, RemoveRaftVoter and UnregisterBroker.

Behaviour. Answered by the active controller, to which other brokers send them on. DescribeQuorum tells what Raft's
leader knows: voters and observers, how far each has the metadata log, when it was last heard of and when it last had
all of it. A voter is added when it has followed as an observer and has the log, one at a time; RemoveRaftVoter takes
one away, the leader too. UnregisterBroker forgets a broker for good. Left out: directory ids of voters, all zero.
"""

from typing import Any

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.ids import ZERO_ID
from headrace.cluster.names import CLUSTER_METADATA_TOPIC
from headrace.consensus.raft.progress import Progress
from headrace.security.authorizer import Operation, ResourceType
from headrace.server.broker import Broker
from headrace.server.context import RequestContext
from headrace.server.metadata import no_controller
from headrace.server.quorum import TICK_MS
from headrace.server.router import Body, Handler
from headrace.wire.apis import Api
from headrace.wire.messages import Message


def handle_describe_quorum(broker: Broker, context: RequestContext, request: Message) -> Body:
    """The metadata log's leader, voters and observers."""
    if not context.authorize(Operation.DESCRIBE, ResourceType.CLUSTER):
        raise KafkaError(ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
    topics, found = [], False
    for topic in request.topics:
        partitions = []
        for partition in topic.partitions:
            if (topic.topic_name, partition.partition_index) == (CLUSTER_METADATA_TOPIC, 0):
                partitions.append(_quorum(broker))
                found = True
            else:
                partitions.append(
                    {
                        "partition_index": partition.partition_index,
                        "error_code": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                        "error_message": "This server does not host this topic-partition.",
                    }
                )
        topics.append({"topic_name": topic.topic_name, "partitions": partitions})
    return {"error_message": "", "topics": topics, "nodes": _nodes(broker) if found else []}


def _nodes(broker: Broker) -> list[dict[str, Any]]:
    """Where the voters are reached."""
    node = broker.metadata.quorum.node
    addresses = {} if node is None else node.voters
    nodes = []
    for voter, address in sorted(addresses.items()):
        host, _, port = address.rpartition(":")
        listener = {"name": "PLAINTEXT", "host": host, "port": int(port or 0)}
        nodes.append({"node_id": voter, "listeners": [listener]})
    return nodes


def _quorum(broker: Broker) -> dict[str, Any]:
    quorum = broker.metadata.quorum
    node = quorum.node
    leadership = None if node is None else node.leadership
    if node is None or leadership is None:
        raise KafkaError(ErrorCode.NOT_LEADER_OR_FOLLOWER, no_controller(quorum.leader).message)
    now_ms = broker.clock.now_ms()

    def replica(node_id: int) -> dict[str, Any]:
        told: dict[str, Any] = {"replica_id": node_id, "replica_directory_id": ZERO_ID}
        if node_id == node.id:
            times = {"last_fetch_timestamp": now_ms, "last_caught_up_timestamp": now_ms}
            return told | {"log_end_offset": node.log.end, **times}
        return told | _progress(leadership.progress[node_id], node.ticks, now_ms)

    voters = sorted(node.voters)
    observers = sorted(each for each in leadership.progress if each not in node.voters)
    return {
        "partition_index": 0,
        "error_message": "",
        "leader_id": node.id,
        "leader_epoch": node.term,
        "high_watermark": node.log.commit,
        "current_voters": [replica(voter) for voter in voters],
        "observers": [replica(observer) for observer in observers],
    }


def _progress(progress: Progress, tick: int, now_ms: int) -> dict[str, Any]:
    heard_ms = now_ms - (tick - progress.heard_tick) * TICK_MS
    caught_up = progress.caught_up_tick
    return {
        "log_end_offset": progress.match,
        "last_fetch_timestamp": heard_ms,
        "last_caught_up_timestamp": -1 if caught_up < 0 else now_ms - (tick - caught_up) * TICK_MS,
    }


async def handle_add_raft_voter(broker: Broker, context: RequestContext, request: Message) -> Body:
    """Let an observer vote."""
    _check(broker, context, request)
    if not request.listeners:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "An address of the new voter is needed.")
    listener = request.listeners[0]
    await broker.metadata.quorum.add_voter(request.voter_id, f"{listener.host}:{listener.port}")
    return {"throttle_time_ms": context.throttle_ms, "error_message": None}


async def handle_remove_raft_voter(broker: Broker, context: RequestContext, request: Message) -> Body:
    """Let a voter vote no more."""
    _check(broker, context, request)
    await broker.metadata.quorum.remove_voter(request.voter_id)
    return {"throttle_time_ms": context.throttle_ms, "error_message": None}


def _check(broker: Broker, context: RequestContext, request: Message) -> None:
    if not context.authorize(Operation.ALTER, ResourceType.CLUSTER):
        raise KafkaError(ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
    if request.cluster_id is not None and request.cluster_id != broker.image.cluster_id:
        raise KafkaError(ErrorCode.INCONSISTENT_CLUSTER_ID, f"This is the cluster {broker.image.cluster_id}.")


async def handle_unregister_broker(broker: Broker, context: RequestContext, request: Message) -> Body:
    """Forget a broker."""
    if not context.authorize(Operation.ALTER, ResourceType.CLUSTER):
        raise KafkaError(ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
    records, error = broker.member.controller.unregister(request.broker_id)
    if error is not ErrorCode.NONE:
        raise KafkaError(error, f"Broker ID {request.broker_id} is not currently registered")
    await broker.commit(records)
    return {"throttle_time_ms": context.throttle_ms, "error_message": None}


HANDLERS: dict[Api, Handler] = {
    Api.DESCRIBE_QUORUM: handle_describe_quorum,
    Api.ADD_RAFT_VOTER: handle_add_raft_voter,
    Api.REMOVE_RAFT_VOTER: handle_remove_raft_voter,
    Api.UNREGISTER_BROKER: handle_unregister_broker,
}
