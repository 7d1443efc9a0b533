"""Where the replicas of new partitions go: a pure function of the brokers, what they hold, and the partition's name.

Followers by consistent hashing with bounded load: each broker has many points on a ring, a partition one; from there on
the ring says which brokers are asked first, and one that holds more than its share is passed over. So a cluster that
grows by a broker would place most partitions as before, and none fills up. Leaders (first replicas) go to whoever leads
least of the topic, then least of all, in the ring's order where that is equal too: the traffic of one topic is more
alike than that of several. Invariants: no broker holds two replicas of one partition; the leaders of a new topic are
spread evenly, give or take one, whatever else the brokers lead; a partition's replicas are on as many racks as there
are, or as it has replicas; brokers that are fenced are used only when there are too few others, and never lead while
there is one that is not. Called by the controller.
"""

from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b
from math import ceil
from typing import NamedTuple

POINTS_EACH = 64
RINGS_KEPT = 16
SHARE = 1.1
"""How much more than its part of all replicas a broker may hold."""


class PlaceableBroker(NamedTuple):
    """A broker that may take replicas."""

    id: int
    rack: str | None
    fenced: bool = False


class Holdings:
    """How many partitions each broker leads (is preferred to) and holds. Grows with what is placed."""

    __slots__ = ("leaders", "replicas", "total")

    def __init__(self, placed: Iterable[Sequence[int]] = ()) -> None:
        self.leaders: Counter[int] = Counter()
        self.replicas: Counter[int] = Counter()
        self.total = 0
        for replicas in placed:
            self.add(replicas)

    def add(self, replicas: Sequence[int]) -> None:
        self.leaders[replicas[0]] += 1
        self.replicas.update(replicas)
        self.total += len(replicas)


def place(
    brokers: Sequence[PlaceableBroker],
    replication_factor: int,
    partitions: int,
    name: str,
    first: int,
    holdings: Holdings,
    siblings: Iterable[Sequence[int]] = (),
) -> list[tuple[int, ...]]:
    """The replicas of partitions `first` and on of a topic, leader first. `holdings` has them too, afterwards.

    `siblings` are the replicas of the partitions that the topic has already, which `holdings` counts.
    """
    assert 1 <= replication_factor <= len(brokers)
    by_id = {broker.id: broker for broker in brokers}
    ring = _ring(tuple(sorted(by_id)))
    of_topic = Counter([replicas[0] for replicas in siblings])
    placed = []
    for index in range(first, first + partitions):
        order = [by_id[broker_id] for broker_id in _order(ring, f"{name}-{index}")]
        replicas = _replicas(order, replication_factor, holdings, of_topic)
        holdings.add(replicas)
        of_topic[replicas[0]] += 1
        placed.append(replicas)
    return placed


def _replicas(
    order: list[PlaceableBroker], replication_factor: int, holdings: Holdings, of_topic: Counter[int]
) -> tuple[int, ...]:
    share = ceil(SHARE * (holdings.total + replication_factor) / len(order))
    leaders, held = holdings.leaders, holdings.replicas
    chosen = [min(order, key=lambda broker: (broker.fenced, of_topic[broker.id], leaders[broker.id]))]
    left = [broker for broker in order if broker is not chosen[0]]
    racks = {chosen[0].rack}
    while len(chosen) < replication_factor:
        if all(broker.rack in racks for broker in left):
            racks.clear()  # every rack has its part: go round them again
        following = min(
            left, key=lambda broker: (broker.rack in racks, broker.fenced, held[broker.id] >= share)
        )
        left.remove(following)
        racks.add(following.rack)
        chosen.append(following)
    return tuple([broker.id for broker in chosen])


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


@lru_cache(maxsize=RINGS_KEPT)
def _ring(ids: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Points in order, and the broker at each."""
    points = sorted(
        (_hash(f"{broker_id}:{number}"), broker_id) for broker_id in ids for number in range(POINTS_EACH)
    )
    return [point for point, _ in points], [broker_id for _, broker_id in points]


def _order(ring: tuple[list[int], list[int]], name: str) -> list[int]:
    """The brokers as they come on the ring from a partition's point on."""
    points, owners = ring
    start = bisect(points, _hash(name))
    return list(dict.fromkeys(owners[start:] + owners[:start]))
