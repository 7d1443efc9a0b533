"""Moving replicas: what a reassignment asks for, how far it is, when it is done. Pure.

A partition that is being reassigned has the replicas it is to have first, then those that are to go, and says which it
gains (`adding`) and which it loses (`removing`). Invariants: nothing is taken away before every replica that was asked
for is in sync; the ISR is never emptied by a reassignment; a new one replaces the one under way, and a cancelled one
leaves what was there before. Called by the controller's parts and by the handlers of reassignments.
"""

from collections.abc import Sequence

from headrace.base.errors import ErrorCode, KafkaError
from headrace.cluster.elections import Unclean, elected, leadership_of, never, record_of
from headrace.cluster.image import ClusterImage, PartitionRegistration, TopicImage
from headrace.cluster.records import MetadataRecord


def target_of(registration: PartitionRegistration) -> tuple[int, ...]:
    """The replicas that a partition is to have when its reassignment is done."""
    return tuple([replica for replica in registration.replicas if replica not in registration.removing])


def origin_of(registration: PartitionRegistration) -> tuple[int, ...]:
    """The replicas that a partition has without what its reassignment adds."""
    return tuple([replica for replica in registration.replicas if replica not in registration.adding])


def is_moving(registration: PartitionRegistration) -> bool:
    """Whether a reassignment is under way."""
    return bool(registration.adding or registration.removing)


def completed(registration: PartitionRegistration) -> PartitionRegistration | None:
    """The partition after its reassignment, when all that it adds is in sync; else, or when none runs, None."""
    if not is_moving(registration):
        return None
    target = target_of(registration)
    isr = tuple([member for member in registration.isr if member in target])
    if not isr or not set(registration.adding) <= set(isr):
        return None
    return registration._replace(replicas=target, isr=isr, adding=(), removing=())


def reassign(
    image: ClusterImage,
    topic: TopicImage,
    index: int,
    target: Sequence[int] | None,
    *,
    may_change_factor: bool = True,
    unclean: Unclean = never,
) -> MetadataRecord | None:
    """The record that begins a reassignment, or, without a target, cancels the one under way. KafkaError if not."""
    if index < 0 or index >= len(topic.partitions):
        raise KafkaError(
            ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "This server does not host this topic-partition."
        )
    now = topic.partitions[index]
    if target is None:
        return _cancel(image, topic, index, unclean)
    _check(image, now, target, may_change_factor)
    origin = origin_of(now)
    if not set(now.isr) & {*origin, *target}:
        # Only what the one before was to add has all records: it stays until the new ones have them too.
        origin = (*origin, *now.isr)
    removing = tuple([replica for replica in origin if replica not in target])
    adding = tuple([replica for replica in target if replica not in origin])
    merged = (*target, *removing)
    isr = tuple([member for member in merged if member in now.isr])
    wanted = now._replace(replicas=merged, isr=isr, adding=adding, removing=removing)
    wanted = completed(wanted) or wanted
    wanted = elected(wanted, leadership_of(image), unclean=unclean(topic.name))
    gone = set(now.replicas) - set(wanted.replicas)
    return record_of(topic, index, wanted, new_epoch=bool(gone))


def _cancel(image: ClusterImage, topic: TopicImage, index: int, unclean: Unclean) -> MetadataRecord | None:
    now = topic.partitions[index]
    if not is_moving(now):
        raise KafkaError(ErrorCode.NO_REASSIGNMENT_IN_PROGRESS, "No partition reassignment is in progress.")
    origin = origin_of(now)
    isr = tuple([member for member in now.isr if member in origin])
    if not isr:
        raise KafkaError(
            ErrorCode.INVALID_REPLICA_ASSIGNMENT,
            "The reassignment cannot be cancelled: only replicas that it adds are in sync.",
        )
    wanted = now._replace(replicas=origin, isr=isr, adding=(), removing=())
    wanted = elected(wanted, leadership_of(image), unclean=unclean(topic.name))
    return record_of(topic, index, wanted, new_epoch=True)


def _check(
    image: ClusterImage, now: PartitionRegistration, target: Sequence[int], may_change_factor: bool
) -> None:
    code, words = ErrorCode.INVALID_REPLICA_ASSIGNMENT, "The manual partition assignment includes"
    if not target:
        raise KafkaError(code, f"{words} an empty replica list.")
    if len(set(target)) != len(target):
        twice = next(replica for replica in target if target.count(replica) > 1)
        raise KafkaError(code, f"{words} the broker {twice} more than once.")
    for replica in sorted(target):
        if replica not in image.brokers:
            raise KafkaError(code, f"{words} broker {replica}, but no such broker is registered.")
    if not may_change_factor and len(target) != len(origin_of(now)):
        raise KafkaError(
            ErrorCode.INVALID_REPLICATION_FACTOR,
            f"The replication factor is changed from {len(origin_of(now))} to {len(target)}.",
        )
