"""From what a member has to what it is to have, one step a heartbeat.

The rule that keeps a partition from having two owners: a member first gives up what is not in its target and stays in
its epoch until it says that it did; only then it moves on to the target's epoch and is given what nobody else has;
what somebody still has it gets later. Pure. `ConsumerGroup` calls it at each heartbeat.
"""

from collections.abc import Callable
from enum import IntEnum

from headrace.base.errors import ErrorCode, KafkaError
from headrace.coordinators.consumer_records import NOTHING, Assignment, CurrentValue


class MemberState(IntEnum):
    """Where a member is on its way to its target, by Kafka's numbers."""

    STABLE = 0
    UNREVOKED = 1
    """It has to give up partitions, and has not yet said that it did."""
    UNRELEASED = 2
    """It is in the target's epoch, and others still have some of what it is to have."""
    UNKNOWN = 127


STABLE, UNREVOKED, UNRELEASED, UNKNOWN = MemberState


def next_step(
    current: CurrentValue,
    target_epoch: int,
    target: Assignment,
    owned: Assignment | None,
    has_owner: Callable[[bytes, int], bool],
) -> CurrentValue:
    """What a member has after a heartbeat in which it said to own `owned`, or with None nothing of that."""
    if current.state == STABLE and current.epoch == target_epoch:
        return current
    if current.state == UNREVOKED and (owned is None or _overlap(owned, current.revoking)):
        return current
    if current.state not in (STABLE, UNREVOKED, UNRELEASED) and (owned is None or owned):
        raise KafkaError(
            ErrorCode.FENCED_MEMBER_EPOCH,
            "The consumer group member is in a unknown state. The member must abandon all its partitions and rejoin.",
        )
    stays, goes, comes, unreleased = _compare(current.assigned, target, has_owner)
    if goes and (owned is None or _overlap(owned, goes)):
        return CurrentValue(current.epoch, current.epoch, UNREVOKED, stays, goes)
    state = UNRELEASED if unreleased else STABLE
    return CurrentValue(target_epoch, current.epoch, state, _union(stays, comes), NOTHING)


def _compare(
    assigned: Assignment, target: Assignment, has_owner: Callable[[bytes, int], bool]
) -> tuple[Assignment, Assignment, Assignment, bool]:
    """What stays, what goes, what comes, and whether somebody still has some of what is to come."""
    stays: dict[bytes, frozenset[int]] = {}
    goes: dict[bytes, frozenset[int]] = {}
    comes: dict[bytes, frozenset[int]] = {}
    unreleased = False
    for topic_id in {**assigned, **target}:
        has, wants = assigned.get(topic_id, frozenset()), target.get(topic_id, frozenset())
        new = wants - has
        free = frozenset([index for index in new if not has_owner(topic_id, index)])
        unreleased = unreleased or len(free) < len(new)
        for into, partitions in ((stays, has & wants), (goes, has - wants), (comes, free)):
            if partitions:
                into[topic_id] = partitions
    return stays, goes, comes, unreleased


def _overlap(one: Assignment, other: Assignment) -> bool:
    return any(not partitions.isdisjoint(other.get(topic_id, ())) for topic_id, partitions in one.items())


def _union(one: Assignment, other: Assignment) -> Assignment:
    joined = dict(one)
    for topic_id, partitions in other.items():
        joined[topic_id] = joined.get(topic_id, frozenset()) | partitions
    return joined


def is_within(one: Assignment, other: Assignment) -> bool:
    """Whether all of one is in the other."""
    return all(partitions <= other.get(topic_id, frozenset()) for topic_id, partitions in one.items())
