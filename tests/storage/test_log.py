"""A partition's log: what is appended, when it rolls and flushes, a disk that refuses, what it all costs."""

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
    append_many,
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
    assert log.producer_state.first_unstable_offset(0) == 0
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


# -- rolling -------------------------------------------------------------------------------------------------


def test_a_segment_rolls_before_it_would_grow_past_its_size() -> None:
    log = make_log(segment_bytes=1000)
    append_many(log, 60)
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
    append_many(log, 30)
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


def test_a_flush_of_many_segments_keeps_few_files_open(tmp_path: Path) -> None:
    log = make_log(DiskFileSystem(str(tmp_path), max_open=16), segment_bytes=100)
    for _ in range(100):
        append(log, make_batch())
    before = len(os.listdir("/proc/self/fd"))
    ticket = log.begin_flush()
    assert ticket is not None
    assert len(os.listdir("/proc/self/fd")) <= before
    ticket.run()
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    log.finish_flush(ticket)
    assert log.recovery_point == log.active.base_offset == 99


def test_a_flush_passes_over_segments_that_retention_deleted_meanwhile() -> None:
    log = make_log(segment_bytes=300, retention_bytes=0)
    append_many(log, 30)
    ticket = log.begin_flush()
    assert ticket is not None
    log.apply_retention(NOW_MS, log.log_end_offset)
    ticket.run()
    log.finish_flush(ticket)
    assert not log.failed and log.flushed_offset == log.log_end_offset


def test_a_segment_that_vanished_is_no_successful_flush() -> None:
    log = make_log()
    append(log, make_batch())
    log.fs.remove(log.active.log_path)
    with pytest.raises(KafkaError):
        log.flush()
    assert log.failed and log.flushed_offset == 0


# -- a disk that refuses -------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("segment_bytes", [1 << 20, 300])
def test_a_failed_write_is_refused_whole_and_the_next_may_succeed(error: int, segment_bytes: int) -> None:
    fs = FaultyFileSystem()
    log = make_log(fs, segment_bytes=segment_bytes, index_interval_bytes=100)
    append_many(log, 7)
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
    append_many(log, 50)
    before = read_all(log)
    fs.capacity_bytes = 1
    for _ in range(100):
        assert refusal(log, make_batch(value_bytes=100)) == ErrorCode.KAFKA_STORAGE_ERROR
    assert read_all(log) == before
    fs.capacity_bytes = None
    append_many(log, 50)
    check_indexes(log)
    assert read_all(log).startswith(before)


def test_retention_frees_a_full_disk() -> None:
    fs = FaultyFileSystem()
    log = make_log(fs, segment_bytes=1000, retention_bytes=2000)
    append_many(log, 60)
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
