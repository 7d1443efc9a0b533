"""A classic group becomes one of the consumer protocol, or the other way round, with its members at work.

Upward when the first member of the consumer protocol joins a classic group of consumers: members keep what they have,
their generation becomes their epoch. Downward when the last member of the consumer protocol is gone: members keep
what they have, the epoch of the last target becomes the generation, and a rebalance begins. Invariants: nobody loses
or gains a partition by the change itself; both ways the group's number rises on, so that it fences as before. Whether
a group may change is a setting. Pure; `GroupMembers` calls it.
"""

from collections.abc import Callable

from headrace.base.settings import BrokerConfig
from headrace.cluster.image import ClusterImage
from headrace.coordinators.classic_group import ClassicGroup
from headrace.coordinators.consumer_records import (
    ClassicValue,
    CurrentValue,
    MemberValue,
    TopicValue,
    decode_assignment,
    decode_subscription,
)
from headrace.coordinators.membership import Member
from headrace.coordinators.mixed_group import CONSUMER, MixedGroup, by_id
from headrace.coordinators.reconciliation import STABLE

UPGRADES = ("bidirectional", "upgrade")
DOWNGRADES = ("bidirectional", "downgrade")


def upgraded(
    group: ClassicGroup, config: Callable[[], BrokerConfig], image: Callable[[], ClusterImage]
) -> MixedGroup | None:
    """The group as one of the consumer protocol, its records still to be written; None when it may not be one."""
    settings = config()
    if settings.group_consumer_migration_policy not in UPGRADES or group.protocol_type != CONSUMER:
        return None
    if len(group.members) >= settings.group_consumer_max_size:
        return None
    made = MixedGroup(group.group_id, config, image)
    made.epoch = made.target_epoch = group.generation
    for member in group.members:
        subscription = decode_subscription(member.protocols[0][1]) if member.protocols else None
        topics = decode_assignment(member.assignment)
        if subscription is None or topics is None:
            return None
        said = MemberValue(
            member.instance_id,
            subscription.rack_id,
            member.client_id,
            member.client_host,
            tuple(sorted(set(subscription.topics))),
            None,
            member.rebalance_timeout_ms,
            None,
            ClassicValue(member.session_timeout_ms, member.protocols),
        )
        assigned = by_id(image(), topics)
        current = CurrentValue(group.generation, group.generation, STABLE, assigned, {})
        made.adopt(member.member_id, said, current)
    found = image().topics
    made.topics = {
        name: TopicValue(found[name].id, len(found[name].partitions))
        for name in made.subscribed_names()
        if name in found
    }
    return made


def downgraded(
    group: MixedGroup, config: Callable[[], BrokerConfig], new_id: Callable[[], str], now_ms: int
) -> ClassicGroup | None:
    """The group as a classic one, stable, its record still to be written; None when it may not be one."""
    settings = config()
    if settings.group_consumer_migration_policy not in DOWNGRADES or not group.is_all_classic:
        return None
    if len(group.members) > settings.group_max_size:
        return None
    made = ClassicGroup(group.group_id, config, new_id)
    made.generation = group.target_epoch  # no member has a later one, and those at rest have this
    made.protocol_type = CONSUMER
    for each in group.members.values():
        classic = each.said.classic
        assert classic is not None
        member = Member(
            each.member_id,
            each.said.instance_id,
            each.said.client_id,
            each.said.client_host,
            group.embedded(each, classic.protocols[0][1]),
        )
        member.session_timeout_ms = classic.session_timeout_ms
        member.rebalance_timeout_ms = each.said.rebalance_timeout_ms
        member.protocols = classic.protocols
        made.members.add(member)
    if not made.members.shares_protocol(set(made.members.votes)):
        return None
    made.take_over(now_ms)
    return made
