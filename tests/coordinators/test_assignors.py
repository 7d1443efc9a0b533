"""The assignors: every partition one owner that subscribes to it, evenly, with no more moved than must move."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.coordinators.assignors import ASSIGNORS, Subscriber, Topic, assign_range, assign_uniform
from headrace.coordinators.consumer_records import Assignment


def topic_id(number: int) -> bytes:
    return number.to_bytes(16, "big")


def members(*subscriptions: set[int], racks: str = "") -> dict[str, Subscriber]:
    return {
        f"m{number:03}": Subscriber(
            f"m{number:03}", None, racks[number] if racks else None, frozenset(map(topic_id, wanted))
        )
        for number, wanted in enumerate(subscriptions)
    }


def pairs(assignment: Assignment) -> set[tuple[bytes, int]]:
    return {(topic, index) for topic, indexes in assignment.items() for index in indexes}


def moved(before: Mapping[str, Assignment], after: Mapping[str, Assignment]) -> int:
    """How many partitions an owner has that it did not have before, though somebody had them."""
    owners = {pair: member for member, assignment in before.items() for pair in pairs(assignment)}
    return sum(
        owners.get(pair, member) != member
        for member, assignment in after.items()
        for pair in pairs(assignment)
    )


subscriptions = st.lists(st.sets(st.integers(0, 4), min_size=1), min_size=1, max_size=8)
sizes = st.lists(st.integers(1, 7), min_size=5, max_size=5)


@pytest.mark.parametrize("name", ASSIGNORS)
@given(wanted=subscriptions, later=subscriptions, counts=sizes)
def test_every_partition_has_one_owner_that_subscribes_to_it(
    name: str, wanted: list[set[int]], later: list[set[int]], counts: list[int]
) -> None:
    topics = {topic_id(number): Topic(count) for number, count in enumerate(counts)}
    before = ASSIGNORS[name](members(*wanted), topics, {})
    group = members(*later)
    after = ASSIGNORS[name](group, topics, before)
    owned = [pair for assignment in after.values() for pair in pairs(assignment)]
    read = set().union(*later)
    assert sorted(owned) == [
        (topic_id(number), index) for number in sorted(read) for index in range(counts[number])
    ]
    assert all(set(after[each]) <= member.topics for each, member in group.items())


@given(wanted=subscriptions, counts=sizes)
def test_nobody_could_take_one_from_who_has_two_more(wanted: list[set[int]], counts: list[int]) -> None:
    topics = {topic_id(number): Topic(count) for number, count in enumerate(counts)}
    group = members(*wanted)
    given = assign_uniform(group, topics, {})
    loads = {member: len(pairs(assignment)) for member, assignment in given.items()}
    for giver, assignment in given.items():
        for topic, _ in pairs(assignment):
            for taker, member in group.items():
                assert topic not in member.topics or loads[taker] + 1 >= loads[giver]


@given(st.integers(1, 12), st.integers(1, 40))
def test_an_assignment_that_is_good_stays_as_it_is(count: int, partitions: int) -> None:
    topics = {topic_id(1): Topic(partitions)}
    group = members(*[{1}] * count)
    first = assign_uniform(group, topics, {})
    assert assign_uniform(group, topics, first) == first


def test_a_member_more_in_a_group_of_a_hundred_moves_only_what_it_gets() -> None:
    topics = {topic_id(number): Topic(500) for number in (1, 2)}
    before = assign_uniform(members(*[{1, 2}] * 100), topics, {})
    after = assign_uniform(members(*[{1, 2}] * 101), topics, before)
    assert len(pairs(after["m100"])) == 9
    assert moved(before, after) == 9


def test_a_member_less_moves_only_what_it_had() -> None:
    topics = {topic_id(1): Topic(1000)}
    before = assign_uniform(members(*[{1}] * 100), topics, {})
    after = assign_uniform(members(*[{1}] * 99), topics, before)
    left = {member: before[member] for member in after}
    assert moved(left, after) == 0


def test_partitions_go_to_members_in_the_rack_of_a_replica() -> None:
    racks = tuple(frozenset({"abc"[index % 3]}) for index in range(9))
    given = assign_uniform(members({1}, {1}, {1}, racks="abc"), {topic_id(1): Topic(9, racks)}, {})
    assert [sorted(given[f"m00{n}"][topic_id(1)]) for n in range(3)] == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


def test_racks_do_not_unbalance_a_group() -> None:
    racks = (frozenset({"a"}),) * 9
    given = assign_uniform(members({1}, {1}, {1}, racks="abc"), {topic_id(1): Topic(9, racks)}, {})
    assert [len(pairs(each)) for each in given.values()] == [3, 3, 3]


def test_range_gives_runs_in_the_same_order_for_every_topic() -> None:
    topics = {topic_id(1): Topic(5), topic_id(2): Topic(5)}
    given = assign_range(members({1, 2}, {1, 2}), topics, {})
    assert given == {
        "m000": {topic_id(1): frozenset({0, 1, 2}), topic_id(2): frozenset({0, 1, 2})},
        "m001": {topic_id(1): frozenset({3, 4}), topic_id(2): frozenset({3, 4})},
    }
