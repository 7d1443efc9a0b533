"""Where a client that asked the wrong broker should go instead (KIP-951), and where one that says its rack may read.

Pure functions over the image. Called by the Produce and Fetch handlers.
"""

from collections.abc import Iterable
from typing import TypeAlias

from headrace.base.errors import ErrorCode
from headrace.cluster.image import ClusterImage
from headrace.replication.partition import Partition

Leader: TypeAlias = tuple[int, int]
Endpoint: TypeAlias = tuple[str, int, str | None]

TOLD_WITH = (ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.FENCED_LEADER_EPOCH)
NO_REPLICA = -1


def leader_of(image: ClusterImage, topic: str, index: int, error: int) -> Leader | None:
    """Leader and epoch of a partition, where the error is one that a client gets for not knowing them."""
    if error not in TOLD_WITH:
        return None
    found = image.topics.get(topic)
    if found is None or not 0 <= index < len(found.partitions):
        return None
    registration = found.partitions[index]
    return registration.leader, registration.leader_epoch


def endpoints_of(image: ClusterImage, leaders: Iterable[Leader]) -> dict[int, Endpoint]:
    """Where these leaders are reached."""
    found: dict[int, Endpoint] = {}
    for node_id, _ in leaders:
        broker = image.brokers.get(node_id)
        if broker is not None:
            found[node_id] = (broker.host, broker.port, broker.rack)
    return found


def preferred_replica(image: ClusterImage, partition: Partition, rack: str, offset: int) -> int:
    """The replica in a consumer's rack that has what it asks for; -1 when that is this one, or there is none.

    Of those in sync, because others may be any distance behind; the one that is furthest, for the same reason.
    """
    here = image.brokers.get(partition.node_id)
    if here is None or here.rack == rack:
        return NO_REPLICA
    best, best_end = NO_REPLICA, -1
    for node_id in partition.isr:
        broker = image.brokers.get(node_id)
        follower = partition.followers.get(node_id)
        if broker is None or follower is None or broker.rack != rack or not broker.may_lead:
            continue
        if follower.log_start_offset <= offset <= follower.end_offset and follower.end_offset > best_end:
            best, best_end = node_id, follower.end_offset
    return best
