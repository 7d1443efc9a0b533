"""One cleaning: which records go, what of their batches stays, how segments are merged, and what bounds it."""

import pytest

from headrace.base.errors import ErrorCode, KafkaError
from headrace.records.batch import DELETE_HORIZON_BIT, parse_header
from headrace.records.builder import build_batch, iter_batches, iter_records
from headrace.storage.cleaning import CleanedSegment
from headrace.storage.log import PartitionLog
from headrace.storage.origin import Origin
from headrace.storage.swaps import can_swap, swap_in
from tests.storage.cleanbench import COMPACT, begin, clean, contents, put, seal, table
from tests.storage.workbench import NOW_MS, check_indexes, headers_of, make_log, read_all


def compacted(**settings: object) -> PartitionLog:
    return make_log(cleanup_policy=COMPACT, **settings)


def test_the_last_record_of_each_key_stays_at_its_offset() -> None:
    log = compacted()
    put(log, (b"a", b"1"), (b"b", b"1"), (b"a", b"2"))
    put(log, (b"b", b"2"))
    put(log, (b"c", b"1"), (b"a", b"3"))
    seal(log)
    clean(log)
    assert contents(log) == [(3, b"b", b"2"), (4, b"c", b"1"), (5, b"a", b"3")]
    assert log.log_end_offset == 6 and log.read(0, 1 << 20, max_offset=6).read()
    check_indexes(log)


def test_the_active_segment_is_never_touched() -> None:
    log = compacted()
    put(log, (b"a", b"1"))
    seal(log)
    put(log, (b"a", b"2"), (b"a", b"3"))
    before = log.active.file().pread(1 << 20, 0)
    clean(log)
    assert contents(log) == [(0, b"a", b"1"), (1, b"a", b"2"), (2, b"a", b"3")]
    assert log.active.file().pread(1 << 20, 0) == before


def test_a_batch_that_loses_nothing_is_copied_byte_for_byte() -> None:
    log = compacted()
    put(log, (b"a", b"1"))
    put(log, (b"b", b"1"), (b"c", b"1"), compression=4)
    put(log, (b"a", b"2"))
    kept = [bytes(batch) for _, batch in iter_batches(read_all(log))][1:]
    seal(log)
    clean(log)
    assert [bytes(batch) for _, batch in iter_batches(read_all(log))] == kept


def test_a_log_without_anything_to_drop_keeps_its_files() -> None:
    log = compacted()
    put(log, (b"a", b"1"), (b"b", b"2"))
    seal(log)
    before = log.segments[0]
    clean(log)
    assert log.segments[0] is before
    assert not [name for name in log.fs.listdir(log.directory) if name.endswith(".cleaned")]


@pytest.mark.parametrize("compression", range(5))
def test_headers_timestamps_and_compression_are_kept(compression: int) -> None:
    log = compacted()
    headers = (("trace", b"\x00\xff"), ("none", None))
    put(log, (b"a", b"x" * 300), (b"b", b"y" * 300), (b"c", b"z"), compression=compression, headers=headers)
    put(log, (b"b", b"new"))
    before = list(iter_records(next(iter_batches(read_all(log)))[1]))
    seal(log)
    clean(log)
    (header, batch), _ = iter_batches(read_all(log))
    assert header.compression == compression
    assert (header.base_offset, header.last_offset) == (0, 2)
    assert header.max_timestamp == NOW_MS + 2
    assert list(iter_records(batch)) == [before[0], before[2]]


def test_the_largest_timestamp_is_that_of_what_is_left() -> None:
    log = compacted()
    put(log, (b"a", b"1"), (b"b", b"1"))
    put(log, (b"b", b"2"), timestamp=NOW_MS - 500)
    seal(log)
    clean(log)
    assert [header.max_timestamp for header in headers_of(read_all(log))] == [NOW_MS, NOW_MS - 500]
    found = log.max_timestamp_offset()
    assert found is not None and (found.offset, found.timestamp) == (0, NOW_MS)


def test_a_time_lookup_passes_over_a_batch_that_was_emptied() -> None:
    log = compacted()
    put(log, (b"b", b"1"), timestamp=NOW_MS)
    put(log, (b"a", b"1"), timestamp=NOW_MS + 1000, producer_id=7)
    put(log, (b"a", b"2"), timestamp=NOW_MS + 500)
    seal(log)
    clean(log)
    assert 0 in [header.record_count for header in headers_of(read_all(log))]
    found = log.max_timestamp_offset()
    assert found is not None and (found.offset, found.timestamp) == (2, NOW_MS + 500)
    by_time = log.offset_for_timestamp(NOW_MS + 1, log.log_end_offset)
    assert by_time is not None and by_time.offset == 2


# -- tombstones ----------------------------------------------------------------------------------------------


def test_a_tombstone_goes_only_after_its_time_which_the_first_cleaning_sets() -> None:
    log = compacted(delete_retention_ms=1000)
    put(log, (b"a", b"1"), (b"b", b"1"))
    put(log, (b"a", None), (b"c", b"1"))
    put(log, (b"d", b"1"))
    seal(log)
    clean(log, now_ms=NOW_MS + 5000)
    assert (2, b"a", None) in contents(log) and (0, b"a", b"1") not in contents(log)
    marked = headers_of(read_all(log))[1]
    assert marked.attributes & DELETE_HORIZON_BIT and marked.base_timestamp == NOW_MS + 6000
    assert marked.max_timestamp == NOW_MS + 1
    stamps = [record.timestamp for record in iter_records(list(iter_batches(read_all(log)))[1][1])]
    assert stamps == [NOW_MS, NOW_MS + 1]
    before = read_all(log)
    clean(log, first_dirty=5, now_ms=NOW_MS + 5999)
    assert read_all(log) == before
    clean(log, first_dirty=5, now_ms=NOW_MS + 6000)
    assert contents(log) == [(1, b"b", b"1"), (3, b"c", b"1"), (4, b"d", b"1")]
    check_indexes(log)


def test_a_tombstone_that_is_kept_for_ever_has_a_horizon_that_fits() -> None:
    log = compacted(delete_retention_ms=2**63 - 1)
    put(log, (b"a", None))
    seal(log)
    clean(log)
    assert headers_of(read_all(log))[0].base_timestamp == 2**63 - 1
    assert [record.timestamp for record in iter_records(read_all(log))] == [NOW_MS]


# -- producers, control and transactional batches ------------------------------------------------------------


def test_the_last_batch_of_a_producer_stays_as_an_empty_one() -> None:
    log = compacted()
    put(log, (b"a", b"1"), producer_id=7, sequence=0)
    put(log, (b"a", b"2"), (b"b", b"1"), producer_id=7, sequence=1)
    put(log, (b"a", b"3"), (b"b", b"2"))
    seal(log)
    clean(log)
    empty, full = headers_of(read_all(log))
    assert (empty.base_offset, empty.last_offset, empty.record_count) == (1, 2, 0)
    assert (empty.producer_id, empty.base_sequence, empty.last_sequence) == (7, 1, 2)
    assert full.record_count == 2
    put(log, (b"c", b"1"), producer_id=7, sequence=3)
    seal(log)
    clean(log, first_dirty=5)
    assert [header.base_offset for header in headers_of(read_all(log))] == [3, 5]


def test_records_of_an_open_transaction_stay_and_replace_nothing() -> None:
    log = compacted()
    put(log, (b"a", b"1"))
    records = [(NOW_MS, b"a", b"2", ())]
    transactional = build_batch(records, producer_id=9, producer_epoch=0, base_sequence=0, transactional=True)
    log.append(bytearray(transactional), leader_epoch=0, now_ms=NOW_MS, origin=Origin.CLIENT)
    put(log, (b"b", b"1"))
    before = read_all(log)
    seal(log)
    clean(log)
    assert read_all(log) == before


def test_records_without_a_key_from_before_go() -> None:
    log = make_log()
    batch = build_batch([(NOW_MS, None, b"x", ()), (NOW_MS, b"a", b"1", ())])
    log.append(bytearray(batch), leader_epoch=0, now_ms=NOW_MS)
    seal(log)
    clean(log)
    assert contents(log) == [(1, b"a", b"1")]


# -- merging, bounds -----------------------------------------------------------------------------------------


def test_small_segments_are_merged_up_to_the_size_of_one() -> None:
    log = compacted(segment_bytes=1000, index_interval_bytes=100)
    for number in range(60):
        put(log, (b"k%d" % (number % 7), b"v" * 90))
        put(log, (b"u%d" % number, b""))
    seal(log)
    before = len(log.segments)
    model = table(log)
    clean(log)
    # Segments are grouped by the size they had: the second cleaning merges what the first made small.
    clean(log, first_dirty=log.active.base_offset)
    assert len(log.segments) < before
    assert all(segment.size <= 1000 for segment in log.segments)
    assert table(log) == model
    assert log.size_bytes == sum(segment.size for segment in log.segments)
    check_indexes(log)
    log.flush()
    snapshots = [name for name in log.fs.listdir(log.directory) if name.endswith(".snapshot")]
    assert len(snapshots) <= len(log.segments)
    assert not [name for name in log.fs.listdir(log.directory) if name.endswith(".deleted")]


def test_a_new_segment_tells_how_far_it_reaches_though_its_last_records_are_gone() -> None:
    log = compacted(segment_bytes=150)
    put(log, (b"a", b"1"))
    put(log, (b"b", b"1"))
    put(log, (b"b", b"2"))
    seal(log)
    assert [segment.base_offset for segment in log.segments] == [0, 2, 3]
    clean(log)
    check_indexes(log)
    assert [(h.base_offset, h.record_count) for h in headers_of(read_all(log))] == [(0, 1), (1, 0), (2, 1)]
    assert table(log) == {b"a": b"1", b"b": b"2"}


def test_the_time_of_a_tombstone_does_not_begin_before_what_it_deletes_is_gone() -> None:
    log = compacted(delete_retention_ms=1000)
    put(log, (b"a", b"1"), (b"b", b"1"))
    put(log, (b"c", b"1"), (b"d", b"1"), (b"a", None))
    seal(log)
    # Four slots, and a byte for what was replaced.
    cleaning = clean(log, log_cleaner_dedupe_buffer_size=str(24 * 4 + 1))
    assert cleaning.clean_offset == 3
    assert not any(header.has_delete_horizon for header in headers_of(read_all(log)))
    clean(log, first_dirty=3, now_ms=NOW_MS + 5000)
    assert contents(log) == [(1, b"b", b"1"), (2, b"c", b"1"), (3, b"d", b"1"), (4, b"a", None)]


def test_more_keys_than_the_map_holds_take_several_passes() -> None:
    log = compacted()
    for number in range(300):
        put(log, (b"k%d" % (number % 100), b"%d" % number), (b"x%d" % (number % 3), b"%d" % number))
    seal(log)
    model = table(log)
    passes = 0
    offset = 0
    while offset < log.active.base_offset:
        cleaning = clean(log, first_dirty=offset, log_cleaner_dedupe_buffer_size=str(24 * 20))
        assert offset < cleaning.clean_offset
        assert cleaning.totals.keys <= 20
        offset = cleaning.clean_offset
        assert table(log) == model
        passes += 1
    assert passes > 3
    assert len(contents(log)) == len(model) == 103


def test_a_reader_that_holds_a_range_reads_the_old_segment_to_its_end() -> None:
    log = compacted()
    for number in range(50):
        put(log, (b"k", b"%d" % number))
    seal(log)
    held = log.read(0, 1 << 20, max_offset=log.log_end_offset)
    before = read_all(log)
    clean(log)
    log.flush()  # which removes the files
    assert len(read_all(log)) < len(before)
    assert held.read() == before


def test_a_damaged_batch_stops_the_cleaning_and_changes_nothing() -> None:
    log = compacted()
    for number in range(5):
        put(log, (b"k", b"%d" % number))
    seal(log)
    segment = log.segments[0]
    third = [position for position, _ in segment.headers()][2]
    segment.file().pwrite(b"\xff", third + 65)
    before = segment.file().pread(segment.size, 0)
    with pytest.raises(KafkaError) as refused:
        clean(log)
    assert refused.value.code == ErrorCode.CORRUPT_MESSAGE
    assert log.segments[0] is segment and segment.file().pread(segment.size, 0) == before


def test_a_segment_deleted_meanwhile_makes_its_successor_void() -> None:
    log = make_log(cleanup_policy=frozenset({"compact", "delete"}), retention_ms=1000)
    put(log, (b"a", b"1"))
    put(log, (b"a", b"2"))
    seal(log)
    put(log, (b"a", b"3"))
    steps = begin(log).steps()
    ready = next(step for step in steps if isinstance(step, CleanedSegment))
    assert can_swap(log, ready.replaced)
    assert log.apply_retention(NOW_MS + 5000, log.log_end_offset) >= 1
    assert not can_swap(log, ready.replaced)
    with pytest.raises(AssertionError):
        swap_in(log, ready.segment, ready.replaced)


def test_a_batch_larger_than_a_window_is_cleaned_like_any_other() -> None:
    log = compacted(max_message_bytes=1 << 22)
    put(log, (b"big", b"x" * 700_000), (b"a", b"1"))
    put(log, (b"a", b"2"))
    put(log, (b"big", b"y" * 600_000))
    seal(log)
    clean(log)
    assert [(offset, key) for offset, key, _ in contents(log)] == [(2, b"a"), (3, b"big")]
    assert parse_header(read_all(log)).record_count == 1
