"""Taking records away from a log: DeleteRecords, retention, truncation."""

from pathlib import Path

import pytest

from headrace.base.errors import ErrorCode, KafkaError
from headrace.storage.files import DiskFileSystem
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
    append_many(log, 50)
    assert log.apply_retention(NOW_MS, log.log_end_offset) > 0
    assert 1000 <= log.size_bytes < 1300


def test_retention_spares_what_is_not_replicated_and_what_is_only_compacted() -> None:
    log = make_log(segment_bytes=300, retention_bytes=0)
    append_many(log, 50)
    limit = log.segments[3].base_offset
    assert log.apply_retention(NOW_MS, limit) == 3
    assert log.log_start_offset == limit
    compacted = make_log(segment_bytes=300, retention_bytes=0, cleanup_policy=frozenset({"compact"}))
    append_many(compacted, 50)
    assert compacted.apply_retention(NOW_MS * 2, compacted.log_end_offset) == 0


def test_files_of_deleted_segments_are_removed_by_the_next_flush() -> None:
    log = make_log(segment_bytes=300, retention_bytes=0)
    append_many(log, 50)
    log.flush()
    log.apply_retention(NOW_MS, log.log_end_offset)
    doomed = [name for name in log.fs.listdir(DIRECTORY) if name.endswith(".deleted")]
    assert doomed and log.flush_wanted
    log.flush()
    assert [name for name in log.fs.listdir(DIRECTORY) if name.endswith((".log", ".deleted"))] == [
        f"{log.log_end_offset:020d}.log"
    ]
    assert not log.flush_wanted and log.begin_flush() is None


def test_a_reader_keeps_what_it_holds_when_retention_deletes_it(tmp_path: Path) -> None:
    log = make_log(DiskFileSystem(str(tmp_path)), segment_bytes=300, retention_bytes=0)
    append_many(log, 20)
    part = log.read(0, 1 << 20, max_offset=log.log_end_offset)
    before = part.read()
    log.apply_retention(NOW_MS, log.log_end_offset)
    assert part.read() == before


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
    append_many(log, 20)
    log.truncate_fully(1000)
    assert (log.log_start_offset, log.log_end_offset, log.flushed_offset) == (1000, 1000, 1000)
    assert append(log, make_batch()) == 1000
    assert [name for name in log.fs.listdir(DIRECTORY) if name.endswith(".log")] == [f"{1000:020d}.log"]
