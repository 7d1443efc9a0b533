"""The offset and time index of a segment: lookups over file and memory alike, and Kafka's file formats."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.storage.faulty import FaultyFileSystem
from headrace.storage.files import FileSystem
from headrace.storage.indexes import PENDING_ENTRIES_MAX, OffsetIndex, TimeIndex
from headrace.storage.memory import MemoryFileSystem

BASE = 1000


def offset_index(fs: FileSystem | None = None) -> OffsetIndex:
    return OffsetIndex(fs or MemoryFileSystem(), "00000000000000001000.index", BASE)


def time_index(fs: FileSystem | None = None) -> TimeIndex:
    return TimeIndex(fs or MemoryFileSystem(), "00000000000000001000.timeindex", BASE)


ascending = st.lists(st.integers(1, 50), max_size=200).map(
    lambda steps: [sum(steps[: number + 1]) for number in range(len(steps))]
)


@given(ascending, st.integers(0, 200), st.integers(-10, 11_000))
def test_a_lookup_finds_the_last_entry_at_or_below_wherever_entries_are(
    offsets: list[int], written: int, target: int
) -> None:
    index = offset_index()
    for number, offset in enumerate(offsets):
        if number == written:
            index.write()
        index.append(BASE + offset, offset * 10)
    below = [offset for offset in offsets if offset <= target]
    assert index.lookup(BASE + target) == (below[-1] * 10 if below else 0)
    assert index.lookup_position(target) == max([0, *[o * 10 for o in offsets if o * 10 <= target]])
    assert len(index) == len(offsets)
    assert index.last() == ((BASE + offsets[-1], offsets[-1] * 10) if offsets else None)


@given(ascending, st.integers(0, 200), st.integers(0, 11_000))
def test_truncation_keeps_the_entries_below_wherever_they_are(
    offsets: list[int], written: int, target: int
) -> None:
    index = offset_index()
    for number, offset in enumerate(offsets):
        if number == written:
            index.write()
        index.append(BASE + offset, offset * 10)
    index.truncate_to(BASE + target)
    kept = [offset for offset in offsets if offset < target]
    assert index.encoded() == b"".join([struct.pack(">ii", offset, offset * 10) for offset in kept])
    index.append(BASE + 20_000, 7)
    index.write()
    assert index.last() == (BASE + 20_000, 7)


def test_the_file_holds_relative_offsets_and_positions_in_network_order() -> None:
    fs = MemoryFileSystem()
    index = offset_index(fs)
    index.append(BASE + 5, 4200)
    assert not fs.exists(index.path), "no file before there is something to write"
    index.write()
    assert fs.read(index.path) == struct.pack(">ii", 5, 4200)


def test_the_time_index_takes_only_what_adds_to_it() -> None:
    fs = MemoryFileSystem()
    index = time_index(fs)
    assert not index.append(-1, BASE)
    assert index.append(50, BASE + 3)
    assert not index.append(50, BASE + 9)
    assert not index.append(49, BASE + 9)
    assert index.append(60, BASE + 9)
    index.write()
    assert fs.read(index.path) == struct.pack(">qiqi", 50, 3, 60, 9)


def test_a_time_lookup_gives_a_place_at_or_before_the_time() -> None:
    index = time_index()
    for timestamp, offset in ((100, 1), (200, 5), (300, 9)):
        index.append(timestamp, BASE + offset)
    assert index.lookup(99) == (-1, BASE)
    assert index.lookup(100) == (100, BASE + 1)
    assert index.lookup(299) == (200, BASE + 5)
    assert index.lookup(10_000) == (300, BASE + 9)


def test_entries_of_an_earlier_process_are_found_in_the_file() -> None:
    fs = MemoryFileSystem()
    first = offset_index(fs)
    for offset in range(1, 4):
        first.append(BASE + offset, offset * 100)
    first.write()
    again = offset_index(fs)
    again.append(BASE + 9, 900)
    assert [again.lookup(BASE + offset) for offset in (0, 2, 8, 9)] == [0, 200, 300, 900]


def test_a_torn_last_entry_does_not_count() -> None:
    fs = MemoryFileSystem()
    index = offset_index(fs)
    index.append(BASE + 1, 100)
    index.write()
    fs.open(index.path).pwrite(b"\0\0\0", 8)
    assert len(offset_index(fs)) == 1


def test_waiting_entries_stay_when_they_cannot_be_written() -> None:
    fs = FaultyFileSystem()
    index = offset_index(fs)
    for offset in range(PENDING_ENTRIES_MAX):
        assert not index.write_due
        index.append(BASE + offset, offset * 10)
    assert index.write_due
    fs.capacity_bytes = 100
    with pytest.raises(OSError, match="No space"):
        index.write()
    assert index.lookup(BASE + 63) == 630
    fs.heal()
    index.write()
    assert (len(index), index.lookup(BASE + 63)) == (PENDING_ENTRIES_MAX, 630)


def test_an_index_is_full_when_another_entry_would_not_fit() -> None:
    index = offset_index()
    for offset in range(3):
        assert not index.is_full(31)
        index.append(BASE + offset, offset)
    assert index.is_full(31)
    assert not index.is_full(32)
    assert index.is_full(32, reserve=1)
