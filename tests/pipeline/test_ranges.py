"""Offset ranges: fair limits, even cuts, and filters that cut away only what cannot match."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.client.topics import TopicPartition
from headrace.pipeline.ranges import OffsetRange, limit_rows, split

ranges = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 5000)), max_size=6).map(
    lambda found: [OffsetRange("t", n, start, start + size) for n, (start, size) in enumerate(found)]
)


@given(ranges, st.none() | st.integers(1, 40), st.none() | st.integers(1, 500))
def test_tasks_cover_their_ranges_without_gap_or_overlap(
    whole: list[OffsetRange], least: int | None, most: int | None
) -> None:
    tasks = split(whole, least, most)
    for one in whole:
        pieces = [task for task in tasks if task.partition == one.partition]
        assert sum(piece.size for piece in pieces) == one.size
        assert [piece.end for piece in pieces[:-1]] == [piece.start for piece in pieces[1:]]
        assert all(piece.size > 0 for piece in pieces)
        assert most is None or all(piece.size <= most for piece in pieces)


@given(ranges, st.integers(1, 3000))
def test_a_limited_batch_takes_something_of_every_partition_and_not_much_more(
    whole: list[OffsetRange], rows: int
) -> None:
    start = {TopicPartition("t", r.partition): r.start for r in whole}
    end = {TopicPartition("t", r.partition): r.end for r in whole}
    limited = limit_rows(start, end, rows)
    taken = {p: limited[p] - start[p] for p in start}
    assert all(0 <= taken[p] <= end[p] - start[p] for p in start)
    assert all(taken[p] > 0 for p in start if end[p] > start[p])
    assert sum(taken.values()) <= rows + len(whole)


def test_a_batch_is_shared_in_proportion() -> None:
    a, b = TopicPartition("t", 0), TopicPartition("t", 1)
    assert limit_rows({a: 0, b: 10}, {a: 300, b: 110}, 100) == {a: 75, b: 35}


def test_filters_narrow_the_ranges() -> None:
    pytest.importorskip("pyspark")
    from pyspark.sql.datasource import EqualTo, GreaterThan, In, LessThanOrEqual, StringStartsWith

    from headrace.pipeline.filters import narrow

    whole = [OffsetRange("t", 0, 0, 100), OffsetRange("t", 1, 0, 100), OffsetRange("u", 0, 50, 60)]

    def at_times(asked: object) -> dict[TopicPartition, int | None]:
        return {TopicPartition("t", 0): 30, TopicPartition("t", 1): None, TopicPartition("u", 0): 10}

    assert narrow(whole, [GreaterThan(("offset",), 10), LessThanOrEqual(("offset",), 20)], at_times) == [
        OffsetRange("t", 0, 11, 21),
        OffsetRange("t", 1, 11, 21),
    ]
    assert narrow(whole, [EqualTo(("topic",), "u")], at_times) == whole[2:]
    assert narrow(whole, [In(("partition",), (1, 7))], at_times) == whole[1:2]
    assert narrow(whole, [StringStartsWith(("topic",), "x")], at_times) == whole
    assert [r.start for r in narrow(whole, [GreaterThan(("timestamp",), 5)], at_times)] == [30, 100, 50]
