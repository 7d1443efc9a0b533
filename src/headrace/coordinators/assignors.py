"""The assignors of the consumer protocol: who of a group's members is to have which partitions.

Pure functions of the members, the topics, and the assignment so far. Invariants: every partition of a topic that
somebody subscribes to has exactly one owner, who subscribes to it. `uniform` spreads partitions evenly and lets those
that need not move stay; of what has to find a new owner it prefers members in a rack that has a replica. `range` gives
each member one run of each topic, the members in the same order for all topics, so that equal keys of topics of equal
size meet. `ConsumerGroup` calls them whenever its epoch is raised.
"""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, TypeAlias

from headrace.coordinators.consumer_records import NOTHING, Assignment

Assigned: TypeAlias = dict[str, Assignment]
Partition: TypeAlias = tuple[bytes, int]


class Subscriber(NamedTuple):
    """A member, as an assignor sees it."""

    member_id: str
    instance_id: str | None
    rack_id: str | None
    topics: frozenset[bytes]


class Topic(NamedTuple):
    """A topic: how many partitions, and the racks of each one's replicas where members have racks."""

    partitions: int
    racks: tuple[frozenset[str], ...] = ()


Assignor: TypeAlias = Callable[
    [Mapping[str, Subscriber], Mapping[bytes, Topic], Mapping[str, Assignment]], Assigned
]


def assign_range(
    members: Mapping[str, Subscriber], topics: Mapping[bytes, Topic], before: Mapping[str, Assignment]
) -> Assigned:
    """Each topic cut into runs, one for each member that subscribes to it; the first get one more if need be."""
    order = sorted(members.values(), key=lambda each: (each.instance_id or each.member_id, each.member_id))
    given: dict[str, dict[bytes, frozenset[int]]] = {member_id: {} for member_id in members}
    for topic_id, topic in topics.items():
        takers = [each.member_id for each in order if topic_id in each.topics]
        first = 0
        for number, member_id in enumerate(takers):
            size = topic.partitions // len(takers) + (number < topic.partitions % len(takers))
            if size:
                given[member_id][topic_id] = frozenset(range(first, first + size))
            first += size
    return dict(given)


def assign_uniform(
    members: Mapping[str, Subscriber], topics: Mapping[bytes, Topic], before: Mapping[str, Assignment]
) -> Assigned:
    """As even as subscriptions allow, with as little moved as that takes."""
    if not members:
        return {}
    kept, free = _keep(members, topics, before)
    subscriptions = {member.topics for member in members.values()}
    if len(subscriptions) == 1:
        _level(kept, free, members, topics)
    else:
        _level_by_subscription(kept, free, members, topics)
    return {member_id: _grouped(partitions) for member_id, partitions in kept.items()}


ASSIGNORS: Final[Mapping[str, Assignor]] = {"uniform": assign_uniform, "range": assign_range}


def _keep(
    members: Mapping[str, Subscriber], topics: Mapping[bytes, Topic], before: Mapping[str, Assignment]
) -> tuple[dict[str, list[Partition]], list[Partition]]:
    """What members had and may still have, and the partitions that nobody has."""
    kept: dict[str, list[Partition]] = {}
    taken: set[Partition] = set()
    for member_id, member in members.items():
        mine = kept[member_id] = []
        for topic_id, indexes in before.get(member_id, NOTHING).items():
            topic = topics.get(topic_id)
            if topic is None or topic_id not in member.topics:
                continue
            for index in sorted(indexes):
                if index < topic.partitions and (topic_id, index) not in taken:
                    taken.add((topic_id, index))
                    mine.append((topic_id, index))
    wanted = frozenset().union(*[member.topics for member in members.values()])
    free = [
        (topic_id, index)
        for topic_id in sorted(topics.keys() & wanted)
        for index in range(topics[topic_id].partitions)
        if (topic_id, index) not in taken
    ]
    return kept, free


def _level(
    kept: dict[str, list[Partition]],
    free: list[Partition],
    members: Mapping[str, Subscriber],
    topics: Mapping[bytes, Topic],
) -> None:
    """All subscribe to the same: everybody gets the average, and the remainder goes to those who have the most."""
    total = sum(map(len, kept.values())) + len(free)
    least, more = divmod(total, len(kept))
    room: dict[str, int] = {}
    for member_id in sorted(kept, key=lambda each: (-len(kept[each]), each)):
        mine = kept[member_id]
        quota = least + (more > 0 and len(mine) > least)
        more -= quota > least
        if len(mine) > quota:
            mine.sort(key=lambda each: not _is_near(members[member_id], topics, each))
            free += mine[quota:]
            del mine[quota:]
        room[member_id] = quota - len(mine)
    for member_id in sorted(
        kept
    ):  # what is left of the remainder, if nobody had more than the average before
        if more > 0 and len(kept[member_id]) + room[member_id] == least:
            room[member_id] += 1
            more -= 1
    open_ids = [member_id for member_id in sorted(room) if room[member_id]]
    for partition in _near_first(kept, free, open_ids, room, members, topics):
        while not room[open_ids[-1]]:
            open_ids.pop()
        kept[open_ids[-1]].append(partition)
        room[open_ids[-1]] -= 1


def _near_first(
    kept: dict[str, list[Partition]],
    free: list[Partition],
    open_ids: list[str],
    room: dict[str, int],
    members: Mapping[str, Subscriber],
    topics: Mapping[bytes, Topic],
) -> list[Partition]:
    """Give partitions to members in a rack of theirs as far as there is room; what is left over."""
    racked: dict[str, list[str]] = {}
    for member_id in open_ids:
        rack_id = members[member_id].rack_id
        if rack_id is not None:
            racked.setdefault(rack_id, []).append(member_id)
    if not racked:
        return free
    left = []
    for topic_id, index in free:
        racks = topics[topic_id].racks
        near = [each for rack in sorted(racks[index] if racks else ()) for each in racked.get(rack, ())]
        taker = max(near, key=lambda each: (room[each], each), default=None)
        if taker is None or not room[taker]:
            left.append((topic_id, index))
        else:
            kept[taker].append((topic_id, index))
            room[taker] -= 1
    return left


def _level_by_subscription(
    kept: dict[str, list[Partition]],
    free: list[Partition],
    members: Mapping[str, Subscriber],
    topics: Mapping[bytes, Topic],
) -> None:
    """Subscriptions differ: the scarcest partitions first, each to who has least; then from much to little."""
    takers: dict[bytes, list[str]] = {topic_id: [] for topic_id in topics}
    for member_id in sorted(members):
        for topic_id in members[member_id].topics:
            if topic_id in takers:
                takers[topic_id].append(member_id)
    loads = {member_id: len(partitions) for member_id, partitions in kept.items()}
    for partition in sorted(free, key=lambda each: (len(takers[each[0]]), each)):
        taker = min(
            takers[partition[0]],
            key=lambda each: (loads[each], not _is_near(members[each], topics, partition), each),
        )
        kept[taker].append(partition)
        loads[taker] += 1
    moved = True
    while moved:  # ends: each move makes the loads more even
        moved = False
        for giver in sorted(kept, key=lambda each: (-loads[each], each)):
            while (found := _best_move(giver, kept, loads, takers)) is not None:
                taker, partition = found
                kept[giver].remove(partition)
                kept[taker].append(partition)
                loads[giver] -= 1
                loads[taker] += 1
                moved = True


def _best_move(
    giver: str, kept: dict[str, list[Partition]], loads: dict[str, int], takers: dict[bytes, list[str]]
) -> tuple[str, Partition] | None:
    """A partition that somebody with two less could take, from whoever has too many; the least loaded takes first."""
    best: tuple[int, str, Partition] | None = None
    for partition in {topic_id: (topic_id, index) for topic_id, index in kept[giver]}.values():
        taker = min(takers[partition[0]], key=lambda each: (loads[each], each))
        if loads[taker] + 1 < loads[giver] and (best is None or loads[taker] < best[0]):
            best = loads[taker], taker, partition
    return None if best is None else best[1:]


def _is_near(member: Subscriber, topics: Mapping[bytes, Topic], partition: Partition) -> bool:
    racks = topics[partition[0]].racks
    return bool(racks) and member.rack_id in racks[partition[1]]


def _grouped(partitions: list[Partition]) -> Assignment:
    found: dict[bytes, list[int]] = {}
    for topic_id, index in partitions:
        found.setdefault(topic_id, []).append(index)
    return {topic_id: frozenset(indexes) for topic_id, indexes in found.items()}
