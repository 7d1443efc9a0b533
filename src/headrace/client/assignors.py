"""Who reads what in a classic group: range, roundrobin, sticky and cooperative-sticky.

Owns the assignments that the leader of a group computes for all. Invariants: every partition of a topic that someone
subscribed to goes to exactly one member that subscribed to it (cooperative-sticky leaves out, for one round, those
that another member must give up first); the sticky ones are as balanced as subscriptions allow, and move no partition
without need. Pure: the same input gives the same output whatever the order of its mappings. Called by
`classic_member`.
"""

from collections.abc import Callable, Mapping
from typing import TypeAlias

from headrace.client.group_protocol import Subscription, decode_sticky_data
from headrace.client.topics import TopicPartition

# Static members are ordered by their instance id, so that a restart does not move anything; the others by member id.
Members: TypeAlias = Mapping[str, Subscription]
Assignment: TypeAlias = dict[str, set[TopicPartition]]
Assignor: TypeAlias = Callable[[Members, Mapping[str, int], list[str]], Assignment]

EAGER, COOPERATIVE = "eager", "cooperative"
PROTOCOLS = {
    "range": EAGER,
    "roundrobin": EAGER,
    "sticky": EAGER,
    "cooperative-sticky": COOPERATIVE,
}


def assign(
    name: str, members: Members, partition_counts: Mapping[str, int], instances: Mapping[str, str | None]
) -> Assignment:
    """The assignment of every member by the assignor of this name."""
    order = sorted(members, key=lambda m: (instances.get(m) is None, instances.get(m) or m))
    return _BY_NAME[name](members, partition_counts, order)


def range_assign(members: Members, partition_counts: Mapping[str, int], order: list[str]) -> Assignment:
    """Topic by topic, a run of neighbouring partitions for each member; the first members get one more."""
    out: Assignment = {member: set() for member in members}
    for topic in _topics(members):
        takers = [member for member in order if topic in members[member].topics]
        share, more = divmod(partition_counts.get(topic, 0), len(takers))
        start = 0
        for place, member in enumerate(takers):
            end = start + share + (place < more)
            out[member].update(TopicPartition(topic, number) for number in range(start, end))
            start = end
    return out


def roundrobin_assign(members: Members, partition_counts: Mapping[str, int], order: list[str]) -> Assignment:
    """All partitions dealt out one by one, past members that did not subscribe to the topic."""
    out: Assignment = {member: set() for member in members}
    at = 0
    for partition in _partitions(_topics(members), partition_counts):
        while partition.topic not in members[order[at % len(order)]].topics:
            at += 1
        out[order[at % len(order)]].add(partition)
        at += 1
    return out


def sticky_assign(members: Members, partition_counts: Mapping[str, int], order: list[str]) -> Assignment:
    """Balanced, with as little movement as that allows."""
    out: Assignment = {member: set() for member in members}
    everything = set(_partitions(_topics(members), partition_counts))
    for partition, member in sorted(_owners(members).items()):
        if partition in everything and partition.topic in members[member].topics:
            out[member].add(partition)
            everything.discard(partition)
    takers = {
        topic: [member for member in order if topic in members[member].topics] for topic in _topics(members)
    }
    place = {member: at for at, member in enumerate(order)}
    # Those that few may take come first, while there is still a choice.
    for partition in sorted(everything, key=lambda p: (len(takers[p.topic]), p)):
        member = min(takers[partition.topic], key=lambda m: (len(out[m]), place[m]))
        out[member].add(partition)
    _balance(out, takers, place)
    return out


def cooperative_sticky_assign(
    members: Members, partition_counts: Mapping[str, int], order: list[str]
) -> Assignment:
    """As sticky, without what another member still has: it is given up first, and assigned in the next round."""
    out = sticky_assign(members, partition_counts, order)
    owners = _owners(members)
    for member, partitions in out.items():
        partitions -= {p for p in partitions if owners.get(p, member) != member}
    return out


def _balance(out: Assignment, takers: Mapping[str, list[str]], place: Mapping[str, int]) -> None:
    """Move partitions, one at a time, from who has most to who has least, while that is two fewer or more."""
    while (
        move := _next_move(out, takers, place)
    ) is not None:  # each lowers the sum of squares, so this ends
        giver, taker, topic = move
        partition = max(partition for partition in out[giver] if partition.topic == topic)
        out[giver].discard(partition)
        out[taker].add(partition)


def _next_move(
    out: Assignment, takers: Mapping[str, list[str]], place: Mapping[str, int]
) -> tuple[str, str, str] | None:
    for giver in sorted(out, key=lambda m: (-len(out[m]), place[m])):
        offers = [
            (len(out[taker]), place[taker], taker, topic)
            for topic in sorted({partition.topic for partition in out[giver]})
            for taker in [min(takers[topic], key=lambda m: (len(out[m]), place[m]))]
        ]
        if offers:
            size, _, taker, topic = min(offers)
            if size + 1 < len(out[giver]):
                return giver, taker, topic
    return None


def _owners(members: Members) -> dict[TopicPartition, str]:
    """Who has what, as the members say; where two claim one partition, the later generation is right."""
    best: dict[TopicPartition, tuple[int, str]] = {}
    for member in sorted(members):
        subscription = members[member]
        owned, generation = subscription.owned, subscription.generation
        if not owned and subscription.user_data:
            owned, generation = decode_sticky_data(subscription.user_data)
        for partition in owned:
            held = best.get(partition)
            if held is None or generation > held[0]:
                best[partition] = (generation, member)
    return {partition: member for partition, (_, member) in best.items()}


def _topics(members: Members) -> list[str]:
    return sorted({topic for subscription in members.values() for topic in subscription.topics})


def _partitions(topics: list[str], partition_counts: Mapping[str, int]) -> list[TopicPartition]:
    return [TopicPartition(topic, n) for topic in topics for n in range(partition_counts.get(topic, 0))]


_BY_NAME: dict[str, Assignor] = {
    "range": range_assign,
    "roundrobin": roundrobin_assign,
    "sticky": sticky_assign,
    "cooperative-sticky": cooperative_sticky_assign,
}
