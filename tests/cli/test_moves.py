"""Which replicas partitions get when people name brokers."""

import pytest

from headrace.cli.moves import NoRoom, after_moves, being_emptied, spread, without
from headrace.client.cluster_admin import Reassignment
from headrace.client.topics import TopicPartition

A_0, A_1, B_0 = TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0)
NO_RACKS: dict[int, str | None] = dict.fromkeys(range(1, 7))


def test_a_topic_is_spread_in_turn_and_keeps_its_number_of_replicas() -> None:
    current = {0: (1, 2), 1: (1, 2), 2: (1, 2)}
    assert spread(current, (3, 4, 5), NO_RACKS) == {0: (3, 4), 1: (4, 5), 2: (5, 3)}


def test_a_partition_that_is_where_it_should_be_is_not_moved() -> None:
    assert spread({0: (1, 2), 1: (5, 4)}, (1, 2), NO_RACKS) == {1: (2, 1)}


def test_the_number_of_replicas_changes_only_when_asked() -> None:
    assert spread({0: (1, 2, 3)}, (1, 2, 3), NO_RACKS, factor=2) == {0: (1, 2)}
    assert spread({0: (1,)}, (1, 2, 3), NO_RACKS, factor=3) == {0: (1, 2, 3)}
    with pytest.raises(NoRoom, match="partition 1 has 3 replicas"):
        spread({0: (1, 2), 1: (1, 2, 3)}, (1, 2), NO_RACKS)


def test_a_drained_broker_gives_its_place_to_those_that_hold_fewest() -> None:
    current = {A_0: (1, 2, 3), A_1: (3, 2, 1), B_0: (1, 2, 5)}
    assert without(current, 3, [1, 2, 3, 4, 5], NO_RACKS) == {A_0: (1, 2, 4), A_1: (4, 2, 1)}


def test_a_broker_that_nobody_can_replace_is_not_drained() -> None:
    with pytest.raises(NoRoom, match="a-0"):
        without({A_0: (1, 2)}, 2, [1, 2], NO_RACKS)


def test_only_partitions_of_the_drained_broker_move() -> None:
    assert without({A_0: (1, 2)}, 3, [1, 2, 3], NO_RACKS) == {}


def test_a_second_broker_is_drained_while_the_first_is_still_being_drained() -> None:
    """The first stayed, as a fourth replica: while it leaves it is still listed among the replicas."""
    moving = {A_0: Reassignment((2, 4, 1, 5), adding=(2,), removing=(5,))}
    for listed in (
        (2, 4, 1, 5),
        (5, 4, 1),
        (2, 4, 1),
    ):  # brokers learn of a move a little later than it is decided
        after = after_moves({A_0: listed, B_0: (3, 6, 1)}, moving)
        assert after == {A_0: (2, 4, 1), B_0: (3, 6, 1)}
        assert being_emptied(after, moving) == {5}
        assert without(after, 4, {1, 2, 3, 4, 5, 6} - {5}, NO_RACKS) == {A_0: (2, 3, 1)}


def test_a_broker_that_keeps_replicas_is_not_being_emptied() -> None:
    moving = {A_0: Reassignment((2, 4, 1, 5), adding=(2,), removing=(5,))}
    assert being_emptied({A_0: (2, 4, 1), B_0: (5,)}, moving) == set()


def test_a_drained_partition_stays_spread_over_racks() -> None:
    """It went to whoever held fewest, were that in the rack of its other replica."""
    racks = {1: "a", 2: "a", 3: "b", 4: "b"}
    current = {A_0: (1, 3), A_1: (4, 1), B_0: (4, 1)}
    assert without(current, 3, racks, racks) == {A_0: (1, 4)}
    assert without(current, 4, racks, racks) == {A_1: (3, 1), B_0: (3, 1)}


def test_a_partition_goes_where_its_rack_has_fewest_when_every_rack_has_some() -> None:
    racks = {1: "a", 2: "a", 3: "b", 4: "a", 5: "b", 6: "c"}
    assert without({A_0: (1, 2, 3, 6), A_1: (5,)}, 6, [1, 2, 3, 4, 5], racks) == {A_0: (1, 2, 3, 5)}


def test_a_topic_is_spread_over_the_racks_of_the_brokers_that_are_named() -> None:
    racks: dict[int, str | None] = {1: "a", 2: "a", 3: "b", 4: "b", 5: None}
    current = dict.fromkeys(range(4), (6, 5))
    assert spread(current, (1, 2, 3, 4), racks) == {0: (1, 3), 1: (3, 2), 2: (2, 4), 3: (4, 1)}
    assert spread(current, (1, 2, 3), racks) == {0: (1, 3), 1: (3, 2), 2: (2, 3), 3: (1, 3)}
    assert spread({0: (6, 5)}, (1, 2, 5), racks, factor=3) == {0: (1, 5, 2)}
