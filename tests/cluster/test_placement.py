"""Replicas are spread over brokers and racks, leaders evenly."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from headrace.cluster.placement import PlaceableBroker, place

clusters = st.lists(st.sampled_from(["a", "b", "c", None]), min_size=1, max_size=9).map(
    lambda racks: [PlaceableBroker(number, rack) for number, rack in enumerate(racks, 1)]
)


@given(clusters, st.integers(1, 9), st.integers(1, 40), st.integers(0, 100))
def test_placement_keeps_its_promises(
    brokers: list[PlaceableBroker], factor: int, partitions: int, start: int
) -> None:
    factor = min(factor, len(brokers))
    placed = place(brokers, factor, partitions, start)
    assert len(placed) == partitions
    rack_of = {broker.id: broker.rack for broker in brokers}
    racks = set(rack_of.values())
    for replicas in placed:
        assert len(set(replicas)) == factor
        assert len({rack_of[replica] for replica in replicas}) == min(factor, len(racks))
    leaders = Counter(replicas[0] for replicas in placed)
    counts = [leaders[broker.id] for broker in brokers]
    assert max(counts) - min(counts) <= 1


def test_the_followers_of_one_leader_are_spread_over_the_others() -> None:
    brokers = [PlaceableBroker(number, None) for number in range(5)]
    placed = place(brokers, 2, 20, 0)
    followers = Counter(replicas[1] for replicas in placed if replicas[0] == 0)
    assert followers == {1: 1, 2: 1, 3: 1, 4: 1}


def test_placement_goes_on_where_it_stopped() -> None:
    brokers = [PlaceableBroker(number, None) for number in range(3)]
    assert place(brokers, 2, 6, 0) == place(brokers, 2, 3, 0) + place(brokers, 2, 3, 3)
