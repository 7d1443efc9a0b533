"""Replicas are spread over brokers and racks, leaders evenly."""

from collections import Counter
from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from headrace.cluster.placement import SHARE, Holdings, PlaceableBroker, place

clusters = st.lists(st.sampled_from(["a", "b", "c", None]), min_size=1, max_size=9).map(
    lambda racks: [PlaceableBroker(number, rack) for number, rack in enumerate(racks, 1)]
)


def spread(
    brokers: list[PlaceableBroker], factor: int, partitions: int, name: str = "t"
) -> list[tuple[int, ...]]:
    return place(brokers, factor, partitions, name, 0, Holdings())


@given(clusters, st.integers(1, 9), st.integers(1, 40), st.text(max_size=5))
def test_placement_keeps_its_promises(
    brokers: list[PlaceableBroker], factor: int, partitions: int, name: str
) -> None:
    factor = min(factor, len(brokers))
    placed = spread(brokers, factor, partitions, name)
    assert len(placed) == partitions
    rack_of = {broker.id: broker.rack for broker in brokers}
    racks = set(rack_of.values())
    for replicas in placed:
        assert len(set(replicas)) == factor
        assert len({rack_of[replica] for replica in replicas}) == min(factor, len(racks))
    leaders = Counter(replicas[0] for replicas in placed)
    counts = [leaders[broker.id] for broker in brokers]
    assert max(counts) - min(counts) <= 1


@given(st.lists(st.integers(0, 20), min_size=2, max_size=6), st.integers(1, 20), st.integers(0, 20))
def test_the_leaders_of_a_topic_are_spread_whatever_brokers_lead_already(
    led: list[int], partitions: int, more: int
) -> None:
    brokers = [PlaceableBroker(number, None) for number in range(len(led))]
    holdings = Holdings([(number,) for number, count in enumerate(led) for _ in range(count)])
    placed = place(brokers, 1, partitions, "t", 0, holdings)
    placed += place(brokers, 1, more, "t", partitions, holdings, placed)
    counts = [sum(replicas[0] == broker.id for replicas in placed) for broker in brokers]
    assert max(counts) - min(counts) <= 1


@given(st.integers(2, 9), st.integers(1, 3), st.integers(1, 200))
def test_no_broker_holds_much_more_than_its_share(brokers: int, factor: int, partitions: int) -> None:
    factor = min(factor, brokers)
    placed = spread([PlaceableBroker(number, None) for number in range(brokers)], factor, partitions)
    held = Counter(replica for replicas in placed for replica in replicas)
    assert max(held.values()) <= ceil(SHARE * factor * partitions / brokers) + 1


def test_the_followers_of_one_leader_are_spread_over_the_others() -> None:
    placed = spread([PlaceableBroker(number, None) for number in range(5)], 2, 100)
    followers = Counter(replicas[1] for replicas in placed if replicas[0] == 0)
    assert set(followers) == {1, 2, 3, 4}


def test_placement_goes_on_where_it_stopped() -> None:
    brokers = [PlaceableBroker(number, None) for number in range(3)]
    holdings = Holdings()
    first = place(brokers, 2, 3, "t", 0, holdings)
    assert spread(brokers, 2, 6) == first + place(brokers, 2, 3, "t", 3, holdings, first)


def test_most_followers_would_stay_when_a_broker_is_added() -> None:
    """What consistent hashing is for: with a ring, few change their place; with turns, nearly all would."""
    before = spread([PlaceableBroker(number, None) for number in range(10)], 3, 300)
    after = spread([PlaceableBroker(number, None) for number in range(11)], 3, 300)
    stayed = sum(len(set(old) & set(new)) for old, new in zip(before, after, strict=True))
    assert stayed > 300 * 3 / 2


def test_fenced_brokers_are_the_last_resort_and_never_first() -> None:
    brokers = [PlaceableBroker(1, None), PlaceableBroker(2, None), PlaceableBroker(3, None, fenced=True)]
    assert all(set(replicas) == {1, 2} for replicas in spread(brokers, 2, 20))
    assert all(replicas[0] != 3 for replicas in spread(brokers, 3, 20))
