"""Which replicas a partition should have after a move: pure, given what the cluster says of itself.

Owns the choice that `headrace partition reassign` makes when people name brokers instead of a list for each partition.
Invariants: a drained partition keeps its other replicas where they are; the number of replicas changes only when that
is asked for; of the brokers that could take a replica, one in a rack that has fewest of the partition's does, and among
those the one that holds fewest. A partition that is being moved already counts as being where it is to go. Called by
`cli.partition`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest

from headrace.client.cluster_admin import Reassignment
from headrace.client.topics import TopicPartition

Replicas = tuple[int, ...]
Placed = Mapping[TopicPartition, Replicas]
Moving = Mapping[TopicPartition, Reassignment]
Racks = Mapping[int, str | None]


def after_moves(current: Placed, moving: Moving) -> dict[TopicPartition, Replicas]:
    """Where replicas are when the moves under way are done: until then those that come and those that go are listed."""
    wanted = dict(current)
    for at in current.keys() & moving.keys():
        move = moving[at]
        wanted[at] = tuple(number for number in move.replicas if number not in move.removing)
    return wanted


def being_emptied(after: Placed, moving: Moving) -> set[int]:
    """Brokers that replicas are being taken off, and that none is to stay on: whoever drains them wants them to go."""
    left = {number for move in moving.values() for number in move.removing}
    return left.difference(*after.values())


def spread(
    current: Mapping[int, Replicas], brokers: Sequence[int], racks: Racks, factor: int | None = None
) -> dict[int, Replicas]:
    """Put the partitions of one topic on these brokers, in turn, each broker in turn the preferred leader."""
    wanted: dict[int, Replicas] = {}
    order = _by_turns(brokers, racks)
    for turn, (partition, before) in enumerate(sorted(current.items())):
        count = factor or len(before)
        if count > len(brokers):
            raise NoRoom(f"partition {partition} has {count} replicas")
        first = turn % len(order)
        left = [*order[first:], *order[:first]]
        chosen: list[int] = []
        while len(chosen) < count:
            beside = _beside(chosen, racks)
            chosen.append(min(left, key=beside))  # the first in turn, where racks leave the choice
            left.remove(chosen[-1])
        wanted[partition] = tuple(chosen)
    return {partition: to for partition, to in wanted.items() if to != current[partition]}


def without(
    current: Placed, leaving: int, others: Iterable[int], racks: Racks
) -> dict[TopicPartition, Replicas]:
    """Every partition of a broker given to another, which takes the same place in the list of replicas."""
    held = Counter({number: 0 for number in others if number != leaving})
    for replicas in current.values():
        held.update(number for number in replicas if number in held)
    wanted: dict[TopicPartition, Replicas] = {}
    for at, replicas in sorted(current.items()):
        if leaving not in replicas:
            continue
        free = [number for number in held if number not in replicas]
        if not free:
            raise NoRoom(f"{at} has a replica on every other broker already, but for those being drained")
        beside = _beside([number for number in replicas if number != leaving], racks)
        chosen = min(free, key=lambda number: (beside(number), held[number], number))
        held[chosen] += 1
        wanted[at] = tuple(chosen if number == leaving else number for number in replicas)
    return wanted


def _rack(number: int, racks: Racks) -> str | int:
    """A broker of which no rack is known shares its fate with no other."""
    return racks.get(number) or number


def _beside(replicas: Iterable[int], racks: Racks) -> Callable[[int], int]:
    """How many of these replicas are in the rack of a broker."""
    counts = Counter(_rack(number, racks) for number in replicas)
    return lambda number: counts[_rack(number, racks)]


def _by_turns(brokers: Sequence[int], racks: Racks) -> list[int]:
    """The brokers in an order in which neighbours are in different racks, as far as that goes."""
    groups: dict[str | int, list[int]] = {}
    for number in brokers:
        groups.setdefault(_rack(number, racks), []).append(number)
    return [number for row in zip_longest(*groups.values()) for number in row if number is not None]


class NoRoom(Exception):
    """There are not enough other brokers for the replicas of a partition."""
