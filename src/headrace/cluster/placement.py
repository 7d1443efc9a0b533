"""Where the replicas of new partitions go: a pure function of the brokers, their racks and a starting point.

Invariants: no broker holds two replicas of one partition; leaders (first replicas) of consecutive partitions are on
consecutive brokers, so that all lead equally many, give or take one; a partition's replicas are on as many racks as
there are, or as it has replicas; followers shift from round to round, so the load of a lost leader spreads over all.
The order interleaves racks, which gives both at once. Called by the controller, which chooses the starting point.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple


class PlaceableBroker(NamedTuple):
    """A broker that may take replicas."""

    id: int
    rack: str | None


def place(
    brokers: Sequence[PlaceableBroker], replication_factor: int, partitions: int, start: int
) -> list[tuple[int, ...]]:
    """The replicas of each of `partitions` new partitions, leader first; `start` is where the first leader goes."""
    assert 1 <= replication_factor <= len(brokers)
    ring = _interleaved(brokers)
    if replication_factor == 1:
        ids = [(broker.id,) for broker in ring]
        return [ids[(start + index) % len(ids)] for index in range(partitions)]
    return [_replicas(ring, replication_factor, start + index) for index in range(partitions)]


def _interleaved(brokers: Sequence[PlaceableBroker]) -> list[PlaceableBroker]:
    """Brokers by id, taken from one rack after the other. Brokers without a rack share one."""
    racks: dict[str, list[PlaceableBroker]] = {}
    for broker in sorted(brokers):
        racks.setdefault(broker.rack or "", []).append(broker)
    rows = zip_longest(*(racks[rack] for rack in sorted(racks)))
    return [broker for row in rows for broker in row if broker is not None]


def _replicas(ring: Sequence[PlaceableBroker], replication_factor: int, turn: int) -> tuple[int, ...]:
    """The leader at `turn`; then followers from a place that moves with each round, a rack not yet used first."""
    count = len(ring)
    leader = ring[turn % count]
    shift = (turn // count) % (count - 1)
    others = [ring[(turn + 1 + (shift + step) % (count - 1)) % count] for step in range(count - 1)]
    chosen = [leader]
    racks = {leader.rack}
    while len(chosen) < replication_factor:
        if all(broker.rack in racks for broker in others):
            racks.clear()  # every rack has its share: go round them again
        following = next(broker for broker in others if broker.rack not in racks)
        others.remove(following)
        racks.add(following.rack)
        chosen.append(following)
    return tuple(broker.id for broker in chosen)
