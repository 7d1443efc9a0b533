"""Which replicas partitions get when people name brokers."""

import pytest

from headrace.cli.moves import NoRoom, after_moves, being_emptied, spread, without
from headrace.client.cluster_admin import Reassignment
from headrace.client.topics import TopicPartition

A_0, A_1, B_0 = TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0)


def test_a_topic_is_spread_in_turn_and_keeps_its_number_of_replicas() -> None:
    current = {0: (1, 2), 1: (1, 2), 2: (1, 2)}
    assert spread(current, (3, 4, 5)) == {0: (3, 4), 1: (4, 5), 2: (5, 3)}


def test_a_partition_that_is_where_it_should_be_is_not_moved() -> None:
    assert spread({0: (1, 2), 1: (5, 4)}, (1, 2)) == {1: (2, 1)}


def test_the_number_of_replicas_changes_only_when_asked() -> None:
    assert spread({0: (1, 2, 3)}, (1, 2, 3), factor=2) == {0: (1, 2)}
    assert spread({0: (1,)}, (1, 2, 3), factor=3) == {0: (1, 2, 3)}
    with pytest.raises(NoRoom, match="partition 1 has 3 replicas"):
        spread({0: (1, 2), 1: (1, 2, 3)}, (1, 2))


def test_a_drained_broker_gives_its_place_to_those_that_hold_fewest() -> None:
    current = {A_0: (1, 2, 3), A_1: (3, 2, 1), B_0: (1, 2, 5)}
    assert without(current, 3, [1, 2, 3, 4, 5]) == {A_0: (1, 2, 4), A_1: (4, 2, 1)}


def test_a_broker_that_nobody_can_replace_is_not_drained() -> None:
    with pytest.raises(NoRoom, match="a-0"):
        without({A_0: (1, 2)}, 2, [1, 2])


def test_only_partitions_of_the_drained_broker_move() -> None:
    assert without({A_0: (1, 2)}, 3, [1, 2, 3]) == {}


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
        assert without(after, 4, {1, 2, 3, 4, 5, 6} - {5}) == {A_0: (2, 3, 1)}


def test_a_broker_that_keeps_replicas_is_not_being_emptied() -> None:
    moving = {A_0: Reassignment((2, 4, 1, 5), adding=(2,), removing=(5,))}
    assert being_emptied({A_0: (2, 4, 1), B_0: (5,)}, moving) == set()
