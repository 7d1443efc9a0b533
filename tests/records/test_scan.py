"""Walking the batches of a log: recovery's scan, and the searches by offset and time that reads use."""

import mmap
import struct
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import ErrorCode, KafkaError
from headrace.records.batch import BatchHeader, ScanStop, SegmentScan, assign, crc_ok, parse_header
from headrace.records.builder import build_batch

FIRST = 1_000  # the first offset of the logs below


def make_log(sizes: list[tuple[int, int]], *, first: int = FIRST, **batch: int) -> bytes:
    """Batches with (records, timestamp), one after another without gaps."""
    out = bytearray()
    for count, timestamp in sizes:
        raw = build_batch([(timestamp, None, b"v" * 10, ())] * count, base_offset=first, **batch)
        out += raw
        first += count
    return bytes(out)


def headers_of(log: bytes) -> list[tuple[int, BatchHeader]]:
    found = []
    pos = 0
    while pos < len(log):
        header = parse_header(log, pos)
        found.append((pos, header))
        pos += header.size
    return found


logs = st.lists(st.tuples(st.integers(1, 4), st.integers(-1, 50)), min_size=1, max_size=20)


@given(logs)
def test_scan_tells_of_every_batch_what_its_header_says(
    codec: ModuleType, sizes: list[tuple[int, int]]
) -> None:
    log = make_log(sizes, producer_id=9, producer_epoch=2, base_sequence=2**31 - 2, partition_leader_epoch=5)
    scan = codec.scan(log, 0, len(log), FIRST)
    assert scan.stop is ScanStop.END
    assert not scan.stop.corrupt
    assert scan.position == len(log)
    assert scan.next_offset == FIRST + sum(count for count, _ in sizes)
    assert scan.batches == [
        (
            position,
            header.size,
            header.base_offset,
            header.last_offset,
            header.max_timestamp,
            5,
            header.attributes,
            9,
            2,
            2**31 - 2,
            header.last_sequence,
        )
        for position, header in headers_of(log)
    ]
    assert scan.batches[0].last_sequence == parse_header(log).last_sequence


def test_a_log_cut_anywhere_is_whole_up_to_its_last_whole_batch(codec: ModuleType) -> None:
    log = make_log([(1, 5), (3, 7), (2, 6)])
    ends = [0, *(position + header.size for position, header in headers_of(log))]
    for cut in range(len(log) + 1):
        scan = codec.scan(log, 0, cut)
        assert scan.position == max(end for end in ends if end <= cut)
        if cut in ends:
            assert (scan.stop, scan.needed_bytes) == (ScanStop.END, 0)
            continue
        there = cut - scan.position
        whole = parse_header(log, scan.position).size
        assert (scan.stop, scan.needed_bytes) == (ScanStop.NEED_MORE, 61 if there < 61 else whole)
        state = SegmentScan(FIRST, 0)
        again = codec.scan_segment(state, log[:cut], 0, cut)
        assert (again.position, again.stop, again.needed_bytes) == scan[:3]


@given(logs, st.data())
def test_no_damaged_batch_is_taken_for_a_whole_one(
    codec: ModuleType, sizes: list[tuple[int, int]], data: st.DataObject
) -> None:
    log = bytearray(make_log(sizes))
    bit = data.draw(st.integers(0, len(log) * 8 - 1))
    log[bit // 8] ^= 1 << (bit % 8)
    damaged = max(position for position, _ in headers_of(make_log(sizes)) if position <= bit // 8)
    scan = codec.scan(bytes(log), 0, len(log), FIRST)
    if damaged + 12 <= bit // 8 < damaged + 16 or scan.position > damaged:
        # The leader epoch is outside the CRC, and so is a base offset that only grew.
        assert damaged <= bit // 8 < damaged + 16
    else:
        assert scan.position == damaged
        assert scan.stop is not ScanStop.END
    assert all(crc_ok(log, one.position, one.size) for one in scan.batches)


BROKEN = {
    "length of zero": (8, ">i", 0, ScanStop.BAD_LENGTH),
    "length below a header": (8, ">i", 48, ScanStop.BAD_LENGTH),
    "negative length": (8, ">i", -1, ScanStop.BAD_LENGTH),
    "absurd length": (8, ">i", 2**31 - 1, ScanStop.NEED_MORE),
    "magic 0": (16, ">b", 0, ScanStop.BAD_MAGIC),
    "magic 1": (16, ">b", 1, ScanStop.BAD_MAGIC),
    "magic 3": (16, ">b", 3, ScanStop.BAD_MAGIC),
    "magic -2": (16, ">b", -2, ScanStop.BAD_MAGIC),
    "offset gone back": (0, ">q", FIRST, ScanStop.BAD_OFFSET),
    "negative offset": (0, ">q", -1, ScanStop.BAD_OFFSET),
    "absurd offset": (0, ">q", 2**63 - 1, ScanStop.BAD_OFFSET),
    "negative offset delta": (23, ">i", -1, ScanStop.BAD_OFFSET),
    "wrong crc": (17, ">I", 0xDEADBEEF, ScanStop.BAD_CRC),
    "other attributes": (21, ">h", 0x10, ScanStop.BAD_CRC),
    "other record count": (57, ">i", 3, ScanStop.BAD_CRC),
}


@pytest.mark.parametrize("name", BROKEN)
def test_scan_stops_at_a_broken_batch_and_says_why(codec: ModuleType, name: str) -> None:
    at, form, value, stop = BROKEN[name]
    log = bytearray(make_log([(2, 5), (2, 6), (2, 7)]))
    second = parse_header(log).size
    struct.pack_into(form, log, second + at, value)
    scan = codec.scan(log, 0, len(log))
    assert (scan.position, scan.stop, len(scan.batches)) == (second, stop, 1)
    assert scan.stop.corrupt == (stop is not ScanStop.NEED_MORE)
    assert scan.next_offset == FIRST + 2
    state = SegmentScan(FIRST, 4096)
    scan = codec.scan_segment(state, log, 0, len(log))
    assert (scan.position, scan.stop) == (second, stop)
    assert state.next_offset == FIRST + 2
    if stop is ScanStop.NEED_MORE:
        assert scan.needed_bytes == 2**31 - 1 + 12


def test_zeros_of_a_preallocated_file_end_the_scan(codec: ModuleType) -> None:
    log = make_log([(1, 5)])
    scan = codec.scan(log + bytes(4096), 0, len(log) + 4096)
    assert (scan.position, scan.stop) == (len(log), ScanStop.BAD_LENGTH)


def test_gaps_between_batches_are_what_compaction_leaves(codec: ModuleType) -> None:
    log = make_log([(1, 5)]) + make_log([(1, 6)], first=FIRST + 50)
    scan = codec.scan(log, 0, len(log))
    assert scan.stop is ScanStop.END
    assert [one.base_offset for one in scan.batches] == [FIRST, FIRST + 50]


def test_a_batch_below_the_wanted_offset_is_refused(codec: ModuleType) -> None:
    log = make_log([(1, 5)])
    assert codec.scan(log, 0, len(log), FIRST + 1).stop is ScanStop.BAD_OFFSET
    assert codec.scan(log, 0, len(log), FIRST).stop is ScanStop.END


def test_scan_reads_whatever_is_a_buffer(codec: ModuleType) -> None:
    log = make_log([(3, 5), (1, 9)])
    with mmap.mmap(-1, len(log)) as area:
        area[:] = log
        forms = [log, bytearray(log), memoryview(log), memoryview(bytearray(log)), area]
        assert {codec.scan(form, 0, len(log)).position for form in forms} == {len(log)}
        assert {codec.find_offset(form, 0, len(log), FIRST + 3) for form in forms} == {
            (parse_header(log).size, True)
        }
        state = SegmentScan(FIRST, 0)
        assert codec.scan_segment(state, area, 0, len(log)).position == len(log)


@pytest.mark.parametrize("pos, end", [(-1, 10), (0, 10_000), (-100, -50)])
def test_a_range_outside_the_buffer_is_a_mistake(codec: ModuleType, pos: int, end: int) -> None:
    log = make_log([(3, 5)])
    for call in (
        lambda: codec.scan(log, pos, end),
        lambda: codec.scan_segment(SegmentScan(0, 0), log, pos, end),
        lambda: codec.find_offset(log, pos, end, 0),
        lambda: codec.find_timestamp(log, pos, end, 0),
    ):
        with pytest.raises(ValueError):
            call()


# -- the summary of a segment ------------------------------------------------------------------------------------


def summary(log: bytes, interval_bytes: int) -> tuple[object, ...]:
    """What scan_segment should leave, by Kafka's rules and the plainest code."""
    offset_entries, time_entries, epochs = b"", b"", []
    since, newest, newest_offset, indexed, epoch = 0, -1, FIRST, -1, -1
    for position, header in headers_of(log):
        if header.max_timestamp > newest:
            newest, newest_offset = header.max_timestamp, header.last_offset
        if since > interval_bytes:
            offset_entries += struct.pack(">ii", header.last_offset - FIRST, position)
            if newest > indexed:
                time_entries += struct.pack(">qi", newest, newest_offset - FIRST)
                indexed = newest
            since = 0
        since += header.size
        if header.partition_leader_epoch not in (epoch, -1):
            epoch = header.partition_leader_epoch
            epochs.append((epoch, header.base_offset))
    return offset_entries, time_entries, epochs, newest, newest_offset, since, indexed, epoch


@given(logs, st.integers(0, 400), st.lists(st.integers(1, 500), min_size=1), st.data())
def test_a_segment_read_in_any_chunks_adds_up_to_the_same(
    codec: ModuleType,
    sizes: list[tuple[int, int]],
    interval_bytes: int,
    chunks: list[int],
    data: st.DataObject,
) -> None:
    log = bytearray(make_log(sizes))
    for position, header in headers_of(bytes(log)):
        assign(log, position, header.base_offset, data.draw(st.integers(-1, 2)))
    state = SegmentScan(FIRST, interval_bytes)
    position = 0
    want = chunks[0]
    while position < len(log):
        chunk = bytes(log[position : position + want])
        scan = codec.scan_segment(state, chunk, 0, len(chunk), position)
        assert not scan.stop.corrupt
        assert scan.batches == []
        position += scan.position
        want = max(scan.needed_bytes, chunks[position % len(chunks)])
    assert (
        bytes(state.offset_entries),
        bytes(state.time_entries),
        state.epochs,
        state.max_timestamp,
        state.max_timestamp_offset,
        state.bytes_since_entry,
        state.indexed_timestamp,
        state.leader_epoch,
    ) == summary(bytes(log), interval_bytes)
    assert state.next_offset == FIRST + sum(count for count, _ in sizes)
    assert state.batch_count == len(sizes)


def test_a_gap_is_for_the_caller_to_judge_when_it_says_so(codec: ModuleType) -> None:
    before, after = make_log([(1, 5)]), make_log([(1, 6)], first=FIRST + 50)
    log = before + after
    state = SegmentScan(FIRST, 4096, stop_at_gaps=True)
    scan = codec.scan_segment(state, log, 0, len(log))
    assert (scan.position, scan.stop, state.next_offset) == (len(before), ScanStop.GAP, FIRST + 1)
    assert not scan.stop.corrupt
    state.next_offset = FIRST + 50
    scan = codec.scan_segment(state, log, scan.position, len(log))
    assert (scan.position, scan.stop, state.next_offset) == (len(log), ScanStop.END, FIRST + 51)
    assert state.batch_count == 2
    damaged = before + after[:-1] + b"?"
    scan = codec.scan_segment(SegmentScan(FIRST, 4096, stop_at_gaps=True), damaged, 0, len(damaged))
    assert (scan.position, scan.stop) == (len(before), ScanStop.BAD_CRC)


def test_only_batches_of_producers_are_told_one_by_one(codec: ModuleType) -> None:
    plain = make_log([(1, 5)])
    idempotent = make_log([(2, 6)], first=FIRST + 1, producer_id=0, producer_epoch=3, base_sequence=8)
    log = plain + idempotent + make_log([(1, 7)], first=FIRST + 3)
    scan = codec.scan_segment(SegmentScan(FIRST, 4096), log, 0, len(log))
    (only,) = scan.batches
    assert (only.position, only.base_offset, only.last_offset) == (len(plain), FIRST + 1, FIRST + 2)
    assert (only.producer_id, only.producer_epoch, only.base_sequence, only.last_sequence) == (0, 3, 8, 9)


def test_an_offset_beyond_what_the_index_can_hold_ends_the_segment(codec: ModuleType) -> None:
    last = make_log([(1, 5)], first=FIRST + 2**31 - 1)
    assert codec.scan_segment(SegmentScan(FIRST, 0), last, 0, len(last)).stop is ScanStop.END
    beyond = make_log([(2, 5)], first=FIRST + 2**31 - 1)
    assert codec.scan_segment(SegmentScan(FIRST, 0), beyond, 0, len(beyond)).stop is ScanStop.BAD_OFFSET
    assert codec.scan(beyond, 0, len(beyond)).stop is ScanStop.END


# -- finding -----------------------------------------------------------------------------------------------------


@given(logs, st.integers(FIRST - 5, FIRST + 90))
def test_an_offset_is_found_in_the_batch_that_holds_it(
    codec: ModuleType, sizes: list[tuple[int, int]], target: int
) -> None:
    log = make_log(sizes)
    expected = [position for position, header in headers_of(log) if header.last_offset >= target]
    assert codec.find_offset(log, 0, len(log), target) == (
        (expected[0], True) if expected else (len(log), False)
    )


@given(logs, st.integers(-5, 60))
def test_a_time_is_found_in_the_first_batch_that_reaches_it(
    codec: ModuleType, sizes: list[tuple[int, int]], target: int
) -> None:
    log = make_log(sizes)
    expected = [position for position, header in headers_of(log) if header.max_timestamp >= target]
    assert codec.find_timestamp(log, 0, len(log), target) == (
        (expected[0], True) if expected else (len(log), False)
    )


@given(logs, st.integers(61, 300), st.integers(FIRST, FIRST + 90))
def test_an_offset_is_found_through_windows_that_hold_headers_alone(
    codec: ModuleType, sizes: list[tuple[int, int]], window: int, target: int
) -> None:
    log = make_log(sizes)
    position, found = 0, False
    while not found and position < len(log):
        chunk = log[position : position + window]
        step, found = codec.find_offset(chunk, 0, len(chunk), target)
        position += step
    assert (position, found) == codec.find_offset(log, 0, len(log), target)


@pytest.mark.parametrize("at, form, value", [(8, ">i", 48), (8, ">i", -7), (16, ">b", 1), (23, ">i", -1)])
def test_a_search_among_bytes_that_are_no_batch_is_refused(
    codec: ModuleType, at: int, form: str, value: int
) -> None:
    log = bytearray(make_log([(1, 5), (1, 6)]))
    struct.pack_into(form, log, at, value)
    for find in (codec.find_offset, codec.find_timestamp):
        with pytest.raises(KafkaError) as caught:
            find(log, 0, len(log), 2**62)
        assert caught.value.code is ErrorCode.CORRUPT_MESSAGE


@given(st.binary(max_size=200), st.integers(0, 2**40))
def test_both_codecs_walk_any_bytes_alike(
    both_codecs: tuple[ModuleType, ModuleType], raw: bytes, offset: int
) -> None:
    def walk(codec: ModuleType) -> list[object]:
        found: list[object] = [codec.scan(raw, 0, len(raw), offset)]
        for find in (codec.find_offset, codec.find_timestamp):
            try:
                found.append(find(raw, 0, len(raw), offset))
            except KafkaError as error:
                found.append(error.code)
        return found

    interpreted, compiled = both_codecs
    assert walk(interpreted) == walk(compiled)
