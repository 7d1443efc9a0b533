"""Reading a log: by offset, within bytes and bounds, and by timestamp."""

import errno

import pytest

from headrace.base.errors import ErrorCode, KafkaError
from headrace.storage.faulty import FaultyFileSystem
from headrace.storage.memory import MemoryFileSystem
from tests.storage.workbench import (
    NOW_MS,
    append,
    append_many,
    check_indexes,
    headers_of,
    make_batch,
    make_log,
    read_all,
)


@pytest.mark.parametrize("segment_bytes", [1 << 30, 1000])
def test_every_offset_is_read_from_the_batch_that_holds_it(segment_bytes: int) -> None:
    log = make_log(segment_bytes=segment_bytes, index_interval_bytes=200)
    append_many(log)
    for offset in range(log.log_end_offset):
        got = headers_of(log.read(offset, 1, max_offset=log.log_end_offset).read())
        assert len(got) == 1 and got[0].base_offset <= offset <= got[0].last_offset
    check_indexes(log)


@pytest.mark.parametrize("max_bytes", [100, 777, 5000, 1 << 20])
def test_a_read_is_whole_batches_within_its_bytes(max_bytes: int) -> None:
    log = make_log(segment_bytes=1500, index_interval_bytes=200)
    append_many(log)
    everything = read_all(log)
    for offset in range(0, log.log_end_offset, 3):
        part = log.read(offset, max_bytes, max_offset=log.log_end_offset)
        data = part.read()
        headers = headers_of(data)
        assert part.size == len(data) == sum(header.size for header in headers)
        assert len(data) <= max_bytes or len(headers) == 1
        assert data in everything
    assert read_all(log, max_bytes) == everything


def test_a_read_goes_on_into_the_next_segments() -> None:
    log = make_log(segment_bytes=1000, index_interval_bytes=200)
    append_many(log)
    part = log.read(0, 1 << 20, max_offset=log.log_end_offset)
    assert len(part.ranges) == len(log.segments) > 5
    assert part.read() == read_all(log, 1)


def test_a_read_stops_at_the_exact_batch_that_its_bound_is_in() -> None:
    log = make_log(segment_bytes=1500, index_interval_bytes=200)
    append_many(log)
    headers = headers_of(read_all(log))
    for bound in range(1, log.log_end_offset + 1):
        got = headers_of(log.read(0, 1 << 20, max_offset=bound).read())
        assert got == [header for header in headers if header.last_offset < bound]


def test_a_batch_that_does_not_fit_comes_only_when_one_must() -> None:
    log = make_log()
    append(log, make_batch(value_bytes=1000))
    assert log.read(0, 10, max_offset=1).size > 1000
    assert log.read(0, 10, max_offset=1, min_one_batch=False) == ([], 0)
    assert log.read(0, 5000, max_offset=1, min_one_batch=False).size > 1000


def test_nothing_is_read_at_the_end_and_beyond_it_is_an_error() -> None:
    log = make_log()
    append_many(log, 5)
    log.delete_records(2)
    end = log.log_end_offset
    assert log.read(end, 1000, max_offset=end).ranges == []
    assert log.read(3, 1000, max_offset=3).ranges == []
    for offset in (1, end + 1):
        with pytest.raises(KafkaError) as caught:
            log.read(offset, 1000, max_offset=end)
        assert caught.value.code == ErrorCode.OFFSET_OUT_OF_RANGE


def test_a_reader_at_the_tail_asks_no_file() -> None:
    fs = FaultyFileSystem()
    log = make_log(fs)
    append_many(log, 300)
    fs.fail("pread", errno.EIO, times=1000)
    end = log.log_end_offset
    assert log.read(end - 3, 1 << 20, max_offset=end).size > 0
    assert log.read(end - 20, 1 << 20, max_offset=end - 5).size > 0


def test_a_read_that_fails_is_told_as_a_storage_error() -> None:
    fs = FaultyFileSystem()
    log = make_log(fs)
    append_many(log, 300)
    fs.fail("pread", errno.EIO)
    with pytest.raises(KafkaError) as caught:
        log.read(0, 1000, max_offset=10)
    assert caught.value.code == ErrorCode.KAFKA_STORAGE_ERROR
    assert log.read(0, 1000, max_offset=10).size > 0


def test_a_damaged_index_does_not_keep_a_reader_from_a_sound_log() -> None:
    fs = MemoryFileSystem()
    log = make_log(fs, index_interval_bytes=100)
    append_many(log, 300)
    log.roll()
    fs.open(log.segments[0].index.path).pwrite(bytes([0, 0, 0, 0, 0, 0, 0, 7] * 20), 0)
    got = headers_of(log.read(120, 1, max_offset=log.log_end_offset).read())
    assert got[0].base_offset <= 120 <= got[0].last_offset


@pytest.mark.parametrize("segment_bytes", [1 << 30, 600])
@pytest.mark.parametrize("compression", [0, 4])
def test_the_first_record_of_a_time_or_later_is_found(segment_bytes: int, compression: int) -> None:
    log = make_log(segment_bytes=segment_bytes, index_interval_bytes=150)
    stamps = [5, 9, 3, 20, 20, 15, 40, 2, 60, 61, 1, 80]
    for number, stamp in enumerate(stamps):
        append(log, make_batch(3, timestamp=NOW_MS + stamp * 10, compression=compression), epoch=number // 4)
    records = [(3 * n + r, NOW_MS + stamp * 10 + r) for n, stamp in enumerate(stamps) for r in range(3)]
    for target in range(NOW_MS, NOW_MS + 850, 7):
        found = log.offset_for_timestamp(target, log.log_end_offset)
        expected = next(((o, t, o // 12) for o, t in records if t >= target), None)
        assert found == expected, target - NOW_MS


def test_a_time_lookup_heeds_the_start_of_the_log_and_the_bound() -> None:
    log = make_log(segment_bytes=300)
    for number in range(10):
        append(log, make_batch(2, timestamp=NOW_MS + number * 10))
    log.delete_records(7)
    found = log.offset_for_timestamp(NOW_MS, log.log_end_offset)
    assert found is not None and found.offset == 7
    assert log.offset_for_timestamp(NOW_MS + 50, 10) is None
    assert log.offset_for_timestamp(NOW_MS + 50, 11) == (10, NOW_MS + 50, 0)
    assert log.offset_for_timestamp(NOW_MS + 1000, 20) is None


def test_the_record_with_the_latest_time_is_found() -> None:
    log = make_log(segment_bytes=300)
    assert log.max_timestamp_offset() is None
    append(log, make_batch(timestamp=-1))
    assert log.max_timestamp_offset() is None
    for stamp in (10, 90, 30, 90, 20):
        append(log, make_batch(3, timestamp=NOW_MS + stamp))
    assert log.max_timestamp_offset() == (6, NOW_MS + 92, 0)
