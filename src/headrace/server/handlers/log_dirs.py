"""DescribeLogDirs and AlterReplicaLogDirs: where on this broker's disk its partitions are.

Behaviour. A broker has one directory, so a replica that is told to move into it is where it should be, and any other
directory is not found. Of a partition that is named twice the last word counts. Sizes are those of the segments' files.
"""

import os
from typing import Any

from headrace.base.errors import ErrorCode
from headrace.security.authorizer import Operation, ResourceType
from headrace.server.broker import Broker
from headrace.server.context import RequestContext
from headrace.server.router import Body, Handler
from headrace.wire.apis import Api
from headrace.wire.messages import Message


def handle_describe_log_dirs(broker: Broker, context: RequestContext, request: Message) -> Body:
    """What each partition takes up on disk."""
    if not context.authorize(Operation.DESCRIBE, ResourceType.CLUSTER):
        return {"throttle_time_ms": context.throttle_ms, "error_code": ErrorCode.CLUSTER_AUTHORIZATION_FAILED}
    wanted: set[tuple[str, int]] | None = None
    if request.topics is not None:
        wanted = {(topic.topic, index) for topic in request.topics for index in topic.partitions}
    topics: dict[str, list[dict[str, Any]]] = {}
    for log in broker.logs.sizes():
        known = log.topic in broker.image.topics
        if known and (wanted is None or (log.topic, log.partition) in wanted):
            topics.setdefault(log.topic, []).append(
                {
                    "partition_index": log.partition,
                    "partition_size": log.size_bytes,
                    "offset_lag": 0,
                    "is_future_key": False,
                }
            )
    directory = {
        "error_code": ErrorCode.NONE,
        "log_dir": broker.logs.data_dir,
        "topics": [{"name": name, "partitions": partitions} for name, partitions in topics.items()],
        "total_bytes": _volume_bytes(broker.logs.data_dir),
        "usable_bytes": broker.logs.fs.free_bytes(),
    }
    return {"throttle_time_ms": context.throttle_ms, "results": [directory]}


def _volume_bytes(directory: str) -> int:
    """The size of the volume a directory is on; -1 where there is none, as for logs in memory."""
    try:
        volume = os.statvfs(directory)
    except OSError:
        return -1
    return volume.f_blocks * volume.f_frsize


def handle_alter_replica_log_dirs(broker: Broker, context: RequestContext, request: Message) -> Body:
    """Replicas into other directories, of which there are none."""
    allowed = context.authorize(Operation.ALTER, ResourceType.CLUSTER)
    wanted = {
        (topic.name, index): directory.path
        for directory in request.dirs
        for topic in directory.topics
        for index in topic.partitions
    }
    topics: dict[str, list[dict[str, Any]]] = {}
    for (name, index), path in wanted.items():
        error = _move_error(broker, name, index, path)
        if not allowed:
            error = ErrorCode.CLUSTER_AUTHORIZATION_FAILED
        topics.setdefault(name, []).append({"partition_index": index, "error_code": error})
    results = [{"topic_name": name, "partitions": partitions} for name, partitions in topics.items()]
    return {"throttle_time_ms": context.throttle_ms, "results": results}


def _move_error(broker: Broker, name: str, index: int, path: str) -> ErrorCode:
    if path != broker.logs.data_dir:
        return ErrorCode.LOG_DIR_NOT_FOUND
    topic = broker.image.topics.get(name)
    if topic is None or not 0 <= index < len(topic.partitions):
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    here = broker.node_id in topic.partitions[index].replicas
    return ErrorCode.NONE if here else ErrorCode.REPLICA_NOT_AVAILABLE


HANDLERS: dict[Api, Handler] = {
    Api.DESCRIBE_LOG_DIRS: handle_describe_log_dirs,
    Api.ALTER_REPLICA_LOG_DIRS: handle_alter_replica_log_dirs,
}
