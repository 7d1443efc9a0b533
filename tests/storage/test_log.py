"""A partition's log: offsets, reads, rolls, flushes, deletions and a disk that refuses."""

import errno
import gc
import os
import tracemalloc
from pathlib import Path

import pytest

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.settings import TopicConfig
from headrace.records.builder import build_batch
from headrace.storage.faulty import FaultyFileSystem
from headrace.storage.files import DiskFileSystem
from headrace.storage.log import PartitionLog
from headrace.storage.markers import EndTransactionMarker, encode_marker
from headrace.storage.memory import MemoryFileSystem
from headrace.storage.origin import Origin
from tests.storage.workbench import (
    DIRECTORY,
    NOW_MS,
    append,
    check_indexes,
    headers_of,
    make_batch,
    make_log,
    read_all,
)


def refusal(log: PartitionLog, data: bytearray) -> ErrorCode:
    with pytest.raises(KafkaError) as caught:
        append(log, data)
    return caught.value.code


# -- appending -----------------------------------------------------------------------------------------------


def test_offsets_follow_one_another_and_are_written_into_the_batches() -> None:
    log = make_log()
    assert [append(log, make_batch(count), epoch=4) for count in (1, 3, 2)] == [0, 1, 4]
    assert (log.log_start_offset, log.log_end_offset) == (0, 6)
    headers = headers_of(read_all(log))
    assert [(h.base_offset, h.last_offset, h.partition_leader_epoch) for h in headers] == [
        (0, 0, 4),
        (1, 3, 4),
        (4, 5, 4),
    ]


def test_an_append_tells_what_the_produce_reply_needs() -> None:
    log = make_log()
    append(log, make_batch(2))
    log.delete_records(1)
    appended = log.append(make_batch(3, timestamp=NOW_MS - 10), leader_epoch=0, now_ms=NOW_MS)
    assert appended == (2, 4, -1, 1, False, False, NOW_MS - 8)
    stamped = make_log(message_timestamp_type="LogAppendTime")
    assert stamped.append(make_batch(), leader_epoch=0, now_ms=NOW_MS + 5).log_append_time_ms == NOW_MS + 5
    assert headers_of(read_all(stamped))[0].max_timestamp == NOW_MS + 5


def test_read_only_memory_can_be_appended() -> None:
    log = make_log()
    data = bytes(make_batch())
    append(log, make_batch())
    log.append(data, leader_epoch=0, now_ms=NOW_MS)
    assert [header.base_offset for header in headers_of(read_all(log))] == [0, 1]


def test_a_refused_batch_changes_nothing() -> None:
    log = make_log(max_message_bytes=500)
    append(log, make_batch(producer_id=1))
    before = read_all(log)
    damaged = make_batch(producer_id=1, sequence=1)
    damaged[-1] ^= 1
    assert refusal(log, damaged) == ErrorCode.CORRUPT_MESSAGE
    assert refusal(log, make_batch(value_bytes=600)) == ErrorCode.MESSAGE_TOO_LARGE
    assert refusal(log, make_batch(producer_id=1, sequence=7)) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert (read_all(log), log.log_end_offset) == (before, 1)
    assert append(log, make_batch(producer_id=1, sequence=1)) == 1


def test_a_duplicate_is_answered_with_its_first_offsets_and_not_written() -> None:
    log = make_log(flush_messages=1)
    append(log, make_batch())
    append(log, make_batch(3, producer_id=1))
    append(log, make_batch(2, producer_id=1, sequence=3))
    again = log.append(make_batch(3, producer_id=1), leader_epoch=0, now_ms=NOW_MS)
    assert (again.first_offset, again.last_offset, again.duplicate) == (1, 3, True)
    assert again.flush_due, "its first copy is not durable yet"
    log.flush()
    assert not log.append(make_batch(3, producer_id=1), leader_epoch=0, now_ms=NOW_MS).flush_due
    assert log.log_end_offset == 6


def test_leader_epochs_are_remembered_from_the_offset_they_start_at() -> None:
    log = make_log()
    for epoch in (0, 0, 3, 3, 5):
        append(log, make_batch(2), epoch=epoch)
    assert log.epochs.entries == [(0, 0), (3, 4), (5, 8)]
    assert log.epoch_end_offset(0) == (0, 4)
    assert log.epoch_end_offset(4) == (3, 8)
    assert log.epoch_end_offset(5) == (5, 10)
    assert log.epoch_end_offset(6) == (-1, -1)


def test_a_coordinator_appends_several_batches_and_markers() -> None:
    log = make_log()
    append(log, make_batch(producer_id=9, transactional=True))
    assert log.producer_state.first_unstable_offset() == 0
    key, value = encode_marker(EndTransactionMarker(committed=True, coordinator_epoch=2))
    marker = build_batch(
        [(NOW_MS, key, value, ())], producer_id=9, producer_epoch=0, control=True, transactional=True
    )
    appended = log.append(
        bytes(make_batch(2)) + marker, leader_epoch=1, now_ms=NOW_MS, origin=Origin.COORDINATOR
    )
    assert (appended.first_offset, appended.last_offset) == (1, 3)
    assert [header.base_offset for header in headers_of(read_all(log))] == [0, 1, 3]
    assert log.producer_state.first_undecided_offset() is None
    check_indexes(log)


def test_a_replica_keeps_the_offsets_and_epochs_of_its_leader() -> None:
    leader, follower = make_log(), make_log(index_interval_bytes=100)
    for number in range(20):
        append(leader, make_batch(3, producer_id=1, sequence=number * 3), epoch=number // 8)
    leader.delete_records(30)
    copied = leader.read(30, 1 << 20, max_offset=60).read()
    follower.truncate_fully(30)
    follower.append(bytearray(copied), leader_epoch=9, now_ms=NOW_MS, origin=Origin.REPLICA)
    assert read_all(follower) == copied
    assert (follower.log_start_offset, follower.log_end_offset) == (30, 60)
    assert follower.epochs.entries == [(1, 30), (2, 48)]
    entry = follower.producer_state.get(1)
    assert entry is not None and entry.last_sequence == 59
    check_indexes(follower)


def test_a_replica_refuses_what_does_not_follow_its_end() -> None:
    leader, follower = make_log(), make_log()
    for _ in range(3):
        append(leader, make_batch())
    data = read_all(leader)
    follower.append(data, leader_epoch=0, now_ms=NOW_MS, origin=Origin.REPLICA)
    with pytest.raises(KafkaError, match="Out of order offset"):
        follower.append(data, leader_epoch=0, now_ms=NOW_MS, origin=Origin.REPLICA)
    assert follower.log_end_offset == 3


# -- reading -------------------------------------------------------------------------------------------------


def many(log: PartitionLog, count: int = 100) -> None:
    for number in range(count):
        append(log, make_batch(1 + number % 4, number % 37, timestamp=NOW_MS + number))


@pytest.mark.parametrize("segment_bytes", [1 << 30, 1000])
def test_every_offset_is_read_from_the_batch_that_holds_it(segment_bytes: int) -> None:
    log = make_log(segment_bytes=segment_bytes, index_interval_bytes=200)
    many(log)
    for offset in range(log.log_end_offset):
        got = headers_of(log.read(offset, 1, max_offset=log.log_end_offset).read())
        assert len(got) == 1 and got[0].base_offset <= offset <= got[0].last_offset
    check_indexes(log)


@pytest.mark.parametrize("max_bytes", [100, 777, 5000, 1 << 20])
def test_a_read_is_whole_batches_within_its_bytes(max_bytes: int) -> None:
    log = make_log(segment_bytes=1500, index_interval_bytes=200)
    many(log)
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
    many(log)
    part = log.read(0, 1 << 20, max_offset=log.log_end_offset)
    assert len(part.ranges) == len(log.segments) > 5
    assert part.read() == read_all(log, 1)


def test_a_read_stops_at_the_exact_batch_that_its_bound_is_in() -> None:
    log = make_log(segment_bytes=1500, index_interval_bytes=200)
    many(log)
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
    many(log, 5)
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
    many(log, 300)
    fs.fail("pread", errno.EIO, times=1000)
    end = log.log_end_offset
    assert log.read(end - 3, 1 << 20, max_offset=end).size > 0
    assert log.read(end - 20, 1 << 20, max_offset=end - 5).size > 0


def test_a_read_that_fails_is_told_as_a_storage_error() -> None:
    fs = FaultyFileSystem()
    log = make_log(fs)
    many(log, 300)
    fs.fail("pread", errno.EIO)
    with pytest.raises(KafkaError) as caught:
        log.read(0, 1000, max_offset=10)
    assert caught.value.code == ErrorCode.KAFKA_STORAGE_ERROR
    assert log.read(0, 1000, max_offset=10).size > 0


def test_a_damaged_index_does_not_keep_a_reader_from_a_sound_log() -> None:
    fs = MemoryFileSystem()
    log = make_log(fs, index_interval_bytes=100)
    many(log, 300)
    log.roll()
    fs.open(log.segments[0].index.path).pwrite(bytes([0, 0, 0, 0, 0, 0, 0, 7] * 20), 0)
    got = headers_of(log.read(120, 1, max_offset=log.log_end_offset).read())
    assert got[0].base_offset <= 120 <= got[0].last_offset


# -- by timestamp --------------------------------------------------------------------------------------------


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


# -- rolling -------------------------------------------------------------------------------------------------


def test_a_segment_rolls_before_it_would_grow_past_its_size() -> None:
    log = make_log(segment_bytes=1000)
    many(log, 60)
    assert len(log.segments) > 3
    assert all(0 < segment.size <= 1000 for segment in log.segments)
    names = log.fs.listdir(DIRECTORY)
    for segment in log.segments[:-1]:
        assert f"{segment.base_offset:020d}.timeindex" in names
        assert f"{log.end_of(segment):020d}.snapshot" in names


def test_a_segment_rolls_when_a_batch_is_that_much_later_than_its_first() -> None:
    log = make_log(segment_ms=1000)
    for offset, stamp in enumerate((0, 1000, 500, 1001, 1500)):
        assert append(log, make_batch(timestamp=NOW_MS + stamp)) == offset
    assert [segment.base_offset for segment in log.segments] == [0, 3]


def test_a_segment_without_timestamps_rolls_by_the_clock() -> None:
    log = make_log(segment_ms=1000)
    append(log, make_batch(timestamp=-1), now_ms=NOW_MS + 500)
    append(log, make_batch(timestamp=-1), now_ms=NOW_MS + 1000)
    append(log, make_batch(timestamp=-1), now_ms=NOW_MS + 1001)
    assert [segment.base_offset for segment in log.segments] == [0, 2]


def test_a_segment_rolls_when_its_index_is_full() -> None:
    log = make_log(segment_index_bytes=60, index_interval_bytes=50)
    many(log, 30)
    assert len(log.segments) > 3
    assert all(len(segment.time_index) <= 5 for segment in log.segments)
    check_indexes(log)


def test_a_segment_rolls_before_offsets_grow_too_far_from_its_base() -> None:
    log = make_log()
    append(log, make_batch())
    far = bytearray(build_batch([(NOW_MS, None, b"x", ())], base_offset=2**31, partition_leader_epoch=0))
    log.append(far, leader_epoch=0, now_ms=NOW_MS, origin=Origin.REPLICA)
    assert [segment.base_offset for segment in log.segments] == [0, 1]


def test_an_idle_segment_rolls_when_it_is_told_the_time() -> None:
    log = make_log(segment_ms=1000)
    assert not log.roll_if_due(NOW_MS + 5000), "an empty one has nothing to roll"
    append(log, make_batch())
    assert not log.roll_if_due(NOW_MS + 1000)
    assert log.roll_if_due(NOW_MS + 1001)
    assert len(log.segments) == 2


def test_the_jitter_of_a_roll_is_within_its_bound_and_always_the_same() -> None:
    log = make_log(segment_ms=1000, segment_jitter_ms=400)
    append(log, make_batch())
    due = next(ms for ms in range(2000) if log._roll_age_ms(log.active) < ms)
    assert 600 <= due <= 1001
    assert log._roll_age_ms(log.active) == due - 1


# -- flushing ------------------------------------------------------------------------------------------------


def test_a_flush_is_due_after_as_many_messages_as_the_topic_says() -> None:
    log = make_log(flush_messages=3)
    dues = []
    for _ in range(5):
        dues.append(log.append(make_batch(), leader_epoch=0, now_ms=NOW_MS).flush_due)
        if dues[-1]:
            log.flush()
    assert dues == [False, False, True, False, False]


def test_appends_while_a_flush_runs_wait_for_the_next() -> None:
    log = make_log(FaultyFileSystem())
    append(log, make_batch())
    ticket = log.begin_flush()
    assert ticket is not None
    append(log, make_batch())
    ticket.run()
    log.finish_flush(ticket)
    assert (log.flushed_offset, log.log_end_offset) == (1, 2)
    log.flush()
    assert log.flushed_offset == 2
    assert log.begin_flush() is None


def test_a_truncation_while_a_flush_runs_is_not_taken_for_flushed() -> None:
    log = make_log()
    for _ in range(4):
        append(log, make_batch())
    ticket = log.begin_flush()
    assert ticket is not None
    ticket.run()
    log.truncate_to(2)
    append(log, make_batch(3))
    log.finish_flush(ticket)
    assert log.flushed_offset <= 2
    log.flush()
    assert log.flushed_offset == 5


def test_the_recovery_point_is_the_base_of_the_first_segment_not_wholly_durable() -> None:
    log = make_log()
    append(log, make_batch())
    log.flush()
    assert (log.flushed_offset, log.recovery_point) == (1, 0)
    log.roll()
    assert log.recovery_point == 0 and log.flush_wanted
    ticket = log.begin_flush()
    assert ticket is not None and log.recovery_point == 0 and not log.flush_wanted
    ticket.run()
    log.finish_flush(ticket)
    assert log.recovery_point == 1


# -- a disk that refuses -------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("segment_bytes", [1 << 20, 300])
def test_a_failed_write_is_refused_whole_and_the_next_may_succeed(error: int, segment_bytes: int) -> None:
    fs = FaultyFileSystem()
    log = make_log(fs, segment_bytes=segment_bytes, index_interval_bytes=100)
    many(log, 7)
    before = read_all(log)
    sequence = make_batch(producer_id=3)
    fs.fail("pwrite", error)
    assert refusal(log, sequence) == ErrorCode.KAFKA_STORAGE_ERROR
    assert read_all(log) == before
    assert fs.size(log.active.log_path) == log.active.size, "nothing torn is left"
    assert log.producer_state.get(3) is None
    append(log, make_batch(producer_id=3))
    assert len(read_all(log)) > len(before)
    check_indexes(log)


def test_a_full_disk_refuses_appends_until_there_is_room_and_serves_reads() -> None:
    fs = FaultyFileSystem()
    log = make_log(fs, segment_bytes=2000, index_interval_bytes=100)
    many(log, 50)
    before = read_all(log)
    fs.capacity_bytes = 1
    for _ in range(100):
        assert refusal(log, make_batch(value_bytes=100)) == ErrorCode.KAFKA_STORAGE_ERROR
    assert read_all(log) == before
    fs.capacity_bytes = None
    many(log, 50)
    check_indexes(log)
    assert read_all(log).startswith(before)


def test_retention_frees_a_full_disk() -> None:
    fs = FaultyFileSystem()
    log = make_log(fs, segment_bytes=1000, retention_bytes=2000)
    many(log, 60)
    fs.capacity_bytes = 1
    assert log.apply_retention(NOW_MS, log.log_end_offset) > 0
    assert log.size_bytes < 3000


def test_a_failed_sync_stops_writes_for_good_but_not_reads() -> None:
    fs = FaultyFileSystem()
    log = make_log(fs)
    append(log, make_batch())
    log.flush()
    append(log, make_batch())
    fs.fail("sync", errno.EIO)
    with pytest.raises(KafkaError) as caught:
        log.flush()
    assert caught.value.code == ErrorCode.KAFKA_STORAGE_ERROR
    assert log.failed and log.flushed_offset == 1
    assert refusal(log, make_batch()) == ErrorCode.KAFKA_STORAGE_ERROR
    with pytest.raises(KafkaError):
        log.begin_flush()
    assert len(headers_of(read_all(log))) == 2


def test_a_flush_that_found_the_disk_full_is_tried_again() -> None:
    fs = FaultyFileSystem()
    log = make_log(fs)
    append(log, make_batch(), epoch=7)
    log.roll()
    append(log, make_batch(), epoch=7)
    fs.fail("pwrite", errno.ENOSPC, path="leader-epoch")
    with pytest.raises(KafkaError):
        log.flush()
    assert not log.failed and log.flushed_offset == 0 and log.recovery_point == 0
    append(log, make_batch(), epoch=7)
    log.flush()
    assert log.flushed_offset == 3
    assert fs.read(f"{DIRECTORY}/leader-epoch-checkpoint") == b"0\n1\n7 0\n"


# -- deleting ------------------------------------------------------------------------------------------------


def test_delete_records_moves_the_start_and_drops_whole_segments_below_it() -> None:
    log = make_log(segment_bytes=300)
    for _ in range(20):
        append(log, make_batch(2))
    assert log.delete_records(13) == 13
    assert log.segments[0].base_offset <= 13 < log.segments[1].base_offset
    assert log.log_start_offset == 13
    assert log.delete_records(5) == 13, "it never goes back"
    assert headers_of(read_all(log))[0].base_offset == 12, "the batch that holds it is whole"
    with pytest.raises(KafkaError) as caught:
        log.delete_records(41)
    assert caught.value.code == ErrorCode.OFFSET_OUT_OF_RANGE
    assert log.delete_records(40) == 40
    assert append(log, make_batch()) == 40


def test_retention_by_time_goes_by_the_latest_record_of_a_segment() -> None:
    log = make_log(segment_bytes=300, retention_ms=1000)
    for number in range(20):
        append(log, make_batch(2, timestamp=NOW_MS + number * 100), now_ms=NOW_MS + number * 100)
    before = [(segment.base_offset, segment.max_timestamp) for segment in log.segments]
    deleted = log.apply_retention(NOW_MS + 2000, log.log_end_offset)
    kept = [base for base, newest in before if newest >= NOW_MS + 1000]
    assert deleted == len(before) - len(kept) > 0
    assert [segment.base_offset for segment in log.segments] == kept
    assert log.log_start_offset == kept[0]
    names = log.fs.listdir(DIRECTORY)
    assert not [name for name in names if name.endswith(".log") and int(name[:20]) < kept[0]]


def test_retention_by_time_rolls_an_active_segment_that_is_too_old() -> None:
    log = make_log(retention_ms=1000)
    append(log, make_batch(5))
    assert log.apply_retention(NOW_MS + 5000, 5) == 1
    assert (log.log_start_offset, log.log_end_offset, log.size_bytes) == (5, 5, 0)
    assert append(log, make_batch(timestamp=NOW_MS + 5000), now_ms=NOW_MS + 5000) == 5


def test_retention_by_size_keeps_at_least_that_much() -> None:
    log = make_log(segment_bytes=300, retention_bytes=1000)
    many(log, 50)
    assert log.apply_retention(NOW_MS, log.log_end_offset) > 0
    assert 1000 <= log.size_bytes < 1300


def test_retention_spares_what_is_not_replicated_and_what_is_only_compacted() -> None:
    log = make_log(segment_bytes=300, retention_bytes=0)
    many(log, 50)
    limit = log.segments[3].base_offset
    assert log.apply_retention(NOW_MS, limit) == 3
    assert log.log_start_offset == limit
    compacted = make_log(segment_bytes=300, retention_bytes=0, cleanup_policy=frozenset({"compact"}))
    many(compacted, 50)
    assert compacted.apply_retention(NOW_MS * 2, compacted.log_end_offset) == 0


def test_a_reader_keeps_what_it_holds_when_retention_deletes_it(tmp_path: Path) -> None:
    log = make_log(DiskFileSystem(str(tmp_path)), segment_bytes=300, retention_bytes=0)
    many(log, 20)
    part = log.read(0, 1 << 20, max_offset=log.log_end_offset)
    before = part.read()
    log.apply_retention(NOW_MS, log.log_end_offset)
    assert part.read() == before


# -- truncating ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", range(0, 41, 3))
def test_truncation_leaves_the_log_as_if_the_rest_had_never_been(target: int) -> None:
    log = make_log(segment_bytes=500, index_interval_bytes=150)
    reference = make_log(segment_bytes=500, index_interval_bytes=150)
    for number in range(20):
        batch = make_batch(2, timestamp=NOW_MS + number * 17 % 70, producer_id=1, sequence=number * 2)
        append(log, bytearray(batch), epoch=number // 7)
        if number * 2 + 2 <= target:
            append(reference, batch, epoch=number // 7)
    log.truncate_to(target)
    assert log.log_end_offset == reference.log_end_offset
    assert read_all(log) == read_all(reference)
    assert log.epochs.entries == reference.epochs.entries
    entry, expected = log.producer_state.get(1), reference.producer_state.get(1)
    assert (entry and entry.last_sequence) == (expected and expected.last_sequence)
    check_indexes(log)
    sequence = log.log_end_offset
    append(log, make_batch(2, producer_id=1, sequence=sequence), epoch=9)
    check_indexes(log)


def test_a_log_starts_over_at_any_offset() -> None:
    log = make_log(segment_bytes=300)
    many(log, 20)
    log.truncate_fully(1000)
    assert (log.log_start_offset, log.log_end_offset, log.flushed_offset) == (1000, 1000, 1000)
    assert append(log, make_batch()) == 1000
    assert [name for name in log.fs.listdir(DIRECTORY) if name.endswith(".log")] == [f"{1000:020d}.log"]


# -- costs ---------------------------------------------------------------------------------------------------


def test_a_partition_nobody_wrote_to_has_a_directory_and_nothing_else(tmp_path: Path) -> None:
    fs = DiskFileSystem(str(tmp_path))
    log = make_log(fs)
    log.close()
    assert fs.listdir(DIRECTORY) == []
    log.delete()
    assert fs.listdir("") == []


def test_an_idle_partition_costs_little_memory() -> None:
    fs = MemoryFileSystem()
    config = TopicConfig()
    gc.collect()
    tracemalloc.start()
    try:
        logs = []
        for number in range(1000):
            directory = f"topic-{number}"
            fs.makedirs(directory)
            logs.append(PartitionLog(fs, directory, "topic", number, config, now_ms=NOW_MS))
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used / len(logs) < 4000


def test_ten_thousand_segments_keep_few_files_open(tmp_path: Path) -> None:
    fs = DiskFileSystem(str(tmp_path), max_open=32, max_maps=8)
    log = make_log(fs, segment_bytes=100, index_interval_bytes=10)
    batch = make_batch()
    template = bytes(batch)
    for _ in range(10_000):
        batch[:] = template
        append(log, batch)
    assert len(log.segments) == 10_000
    before = len(os.listdir("/proc/self/fd"))
    for offset in range(0, 10_000, 97):
        assert log.read(offset, 1, max_offset=10_000).size > 0
        assert log.offset_for_timestamp(NOW_MS, 10_000) is not None
    assert fs.open_count() <= 32 and fs.map_count() <= 8
    assert len(os.listdir("/proc/self/fd")) <= before + 32
