"""Leader epochs of a partition: who wrote which offsets, as Kafka's cache answers it."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.storage.epochs import CorruptEpochs, EpochCache, EpochEntry


def cache_of(*entries: tuple[int, int]) -> EpochCache:
    cache = EpochCache()
    for epoch, start in entries:
        cache.assign(epoch, start)
    cache.dirty = False
    return cache


def test_nothing_assigned_is_undefined() -> None:
    cache = EpochCache()
    assert cache.latest_epoch == -1
    assert cache.end_offset_for(0, 100) == (-1, -1)
    assert cache.end_offset_for(-1, 100) == (-1, -1)
    assert cache.epoch_for_offset(0) == -1


def test_first_assignment_of_an_epoch_counts() -> None:
    cache = EpochCache()
    assert cache.assign(2, 10)
    assert cache.dirty
    assert not cache.assign(2, 11)
    assert cache.entries == [EpochEntry(2, 10)]


def test_later_epoch_at_the_same_offset_replaces_the_empty_one() -> None:
    cache = cache_of((2, 10))
    assert cache.assign(3, 10)
    assert cache.entries == [EpochEntry(3, 10)]


def test_contradicted_entries_are_dropped() -> None:
    cache = cache_of((1, 0), (2, 10), (3, 20))
    assert cache.assign(2, 5)
    assert cache.entries == [EpochEntry(1, 0), EpochEntry(2, 5)]
    assert cache.assign(2, 3), "an earlier start of the same epoch is an update"
    assert cache.entries == [EpochEntry(1, 0), EpochEntry(2, 3)]


def test_epoch_ends_where_the_next_one_starts() -> None:
    cache = cache_of((2, 10), (4, 20), (7, 30))
    assert cache.end_offset_for(7, 99) == (7, 99), "the latest epoch ends at the end of the log"
    assert cache.end_offset_for(4, 99) == (4, 30)
    assert cache.end_offset_for(5, 99) == (4, 30), "an unknown epoch between answers with the one before"
    assert cache.end_offset_for(2, 99) == (2, 20)
    assert cache.end_offset_for(1, 99) == (1, 10), "older than all: where the first one starts"
    assert cache.end_offset_for(8, 99) == (-1, -1), "newer than all: undefined"


def test_epoch_of_an_offset() -> None:
    cache = cache_of((2, 10), (4, 20))
    assert [cache.epoch_for_offset(o) for o in (9, 10, 19, 20, 1000)] == [-1, 2, 2, 4, 4]
    assert [cache.previous_epoch(e) for e in (2, 3, 4, 5)] == [-1, 2, 2, 4]


def test_truncation_from_the_end_drops_epochs_that_start_at_the_cut_or_later() -> None:
    cache = cache_of((2, 10), (4, 20), (7, 30))
    cache.truncate_from_end(31)
    assert not cache.dirty
    cache.truncate_from_end(20)
    assert cache.dirty
    assert cache.entries == [EpochEntry(2, 10)]


def test_truncation_from_the_start_moves_the_epoch_that_holds_the_new_start() -> None:
    cache = cache_of((2, 10), (4, 20), (7, 30))
    cache.truncate_from_start(10)
    assert not cache.dirty
    cache.truncate_from_start(25)
    assert cache.dirty
    assert cache.entries == [EpochEntry(4, 25), EpochEntry(7, 30)]
    cache.truncate_from_start(30)
    assert cache.entries == [EpochEntry(7, 30)]
    cache.truncate_from_start(5)
    assert cache.entries == [EpochEntry(7, 30)]


def test_file_is_kafkas() -> None:
    cache = cache_of((0, 0), (3, 120))
    assert cache.encode() == b"0\n2\n0 0\n3 120\n"
    loaded = EpochCache()
    loaded.load(cache.encode())
    assert loaded.entries == cache.entries
    assert not loaded.dirty
    loaded.load(b"")
    assert loaded.entries == []


@pytest.mark.parametrize(
    "data",
    [
        b"1\n0\n",
        b"0\n2\n0 0\n",
        b"0\n1\n0 0\n1 5\n",
        b"0\nx\n",
        b"0",
        b"0\n1\n0\n",
        b"0\n1\n0 0 0\n",
        b"0\n1\n-1 5\n",
        b"\xff\xfe",
    ],
)
def test_damaged_file_is_refused_and_changes_nothing(data: bytes) -> None:
    cache = cache_of((5, 5))
    with pytest.raises(CorruptEpochs):
        cache.load(data)
    assert cache.entries == [EpochEntry(5, 5)]


Operation = tuple[str, int, int]
operations = st.lists(
    st.tuples(st.sampled_from(["assign", "assign", "end", "start"]), st.integers(0, 12), st.integers(0, 60)),
    max_size=30,
)


@given(operations)
def test_entries_always_rise_and_survive_the_file(script: list[Operation]) -> None:
    cache = EpochCache()
    for name, epoch, offset in script:
        if name == "assign":
            cache.assign(epoch, offset)
            assert cache.latest_epoch == epoch
        elif name == "end":
            cache.truncate_from_end(offset)
            assert all(entry.start_offset < offset for entry in cache.entries)
        else:
            epoch_there = cache.epoch_for_offset(offset)
            cache.truncate_from_start(offset)
            assert cache.epoch_for_offset(offset) == epoch_there
        entries = cache.entries
        assert all(
            a.epoch < b.epoch and a.start_offset < b.start_offset for a, b in itertools.pairwise(entries)
        )
        loaded = EpochCache()
        loaded.load(cache.encode())
        assert loaded.entries == entries


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=30))
def test_rebuild_from_batch_headers_equals_the_running_cache(log: list[tuple[int, int]]) -> None:
    running, epoch, offset = EpochCache(), 0, 0
    headers: list[tuple[int, int]] = []
    for step, count in log:
        epoch += step
        running.assign(epoch, offset)
        headers.append((epoch, offset))
        offset += count
    rebuilt = EpochCache()
    for header_epoch, base_offset in headers:
        rebuilt.assign(header_epoch, base_offset)
    assert rebuilt.entries == running.entries
    for header_epoch, base_offset in headers:
        assert running.epoch_for_offset(base_offset) == header_epoch
