"""Which replicas partitions get when people name brokers."""

import pytest

from headrace.cli.moves import NoRoom, spread, without


def test_a_topic_is_spread_in_turn_and_keeps_its_number_of_replicas() -> None:
    current = {0: (1, 2), 1: (1, 2), 2: (1, 2)}
    assert spread(current, (3, 4, 5)) == {0: (3, 4), 1: (4, 5), 2: (5, 3)}


def test_a_partition_that_is_where_it_should_be_is_not_moved() -> None:
    assert spread({0: (1, 2), 1: (5, 4)}, (1, 2)) == {1: (2, 1)}


def test_the_number_of_replicas_changes_only_when_asked() -> None:
    assert spread({0: (1, 2, 3)}, (1, 2, 3), factor=2) == {0: (1, 2)}
    assert spread({0: (1,)}, (1, 2, 3), factor=3) == {0: (1, 2, 3)}


def test_a_drained_broker_gives_its_place_to_those_that_hold_fewest() -> None:
    current = {("a", 0): (1, 2, 3), ("a", 1): (3, 2, 1), ("b", 0): (1, 2, 5)}
    assert without(current, 3, [1, 2, 3, 4, 5]) == {("a", 0): (1, 2, 4), ("a", 1): (4, 2, 1)}


def test_a_broker_that_nobody_can_replace_is_not_drained() -> None:
    with pytest.raises(NoRoom, match="a-0"):
        without({("a", 0): (1, 2)}, 2, [1, 2])


def test_only_partitions_of_the_drained_broker_move() -> None:
    assert without({("a", 0): (1, 2)}, 3, [1, 2, 3]) == {}
