"""Opening a log from its files: clean, torn, damaged, with leftovers and holes."""

import errno
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.base.settings import TopicConfig
from headrace.records.batch import assign, parse_header
from headrace.records.builder import build_batch
from headrace.storage.faulty import FaultyFileSystem
from headrace.storage.files import DiskFileSystem, FileSystem
from headrace.storage.log import PartitionLog
from headrace.storage.memory import MemoryFileSystem
from headrace.storage.origin import Origin
from headrace.storage.recovery import open_log
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

SMALL: dict[str, Any] = {"segment_bytes": 1000, "index_interval_bytes": 200, "max_message_bytes": 600}


def reopen(
    log: PartitionLog, *, clean: bool = False, recovery_point: int = 0, log_start_offset: int = 0
) -> PartitionLog:
    return open_log(
        log.fs,
        DIRECTORY,
        "topic",
        0,
        log.config,
        clean=clean,
        recovery_point=recovery_point,
        log_start_offset=log_start_offset,
        now_ms=NOW_MS,
    )


def filled(fs: FileSystem | None = None, count: int = 60, **settings: object) -> PartitionLog:
    log = make_log(fs, **{**SMALL, **settings})
    append_many(log, count)
    return log


def names(log: PartitionLog, suffix: str) -> list[str]:
    return [name for name in log.fs.listdir(DIRECTORY) if name.endswith(suffix)]


# -- after a clean close -------------------------------------------------------------------------------------


def test_a_clean_close_is_opened_without_reading_what_lies_before_the_last_index_entry() -> None:
    fs = FaultyFileSystem()
    log = filled(fs, 200, segment_bytes=1 << 20)
    before = read_all(log)
    log.close()
    steps = fs.steps
    again = reopen(log, clean=True)
    assert fs.steps - steps < 25, "it reads the log"
    assert (again.log_end_offset, again.flushed_offset) == (log.log_end_offset, log.log_end_offset)
    assert read_all(again) == before
    check_indexes(again)
    append_many(again, 30)
    check_indexes(again)


def test_producers_and_epochs_come_back_after_a_clean_close() -> None:
    log = make_log(**SMALL)
    for number in range(40):
        append(log, make_batch(producer_id=1, sequence=number), epoch=number // 9)
    log.close()
    again = reopen(log, clean=True)
    assert again.epochs.entries == log.epochs.entries
    entry = again.producer_state.get(1)
    assert entry is not None and (entry.last_sequence, entry.last_offset) == (39, 39)
    assert again.append(make_batch(producer_id=1, sequence=39), leader_epoch=5, now_ms=NOW_MS).duplicate


def test_a_producer_may_send_its_last_five_batches_again_after_a_clean_close() -> None:
    for value_bytes in (20, 200):
        log = make_log(index_interval_bytes=150)
        for number in range(40):
            append(log, make_batch(2, value_bytes, producer_id=1, sequence=number * 2))
        log.close()
        again = reopen(log, clean=True)
        for number in range(35, 40):
            batch = make_batch(2, value_bytes, producer_id=1, sequence=number * 2)
            appended = again.append(batch, leader_epoch=0, now_ms=NOW_MS)
            assert (appended.duplicate, appended.first_offset) == (True, number * 2)
        assert append(again, make_batch(producer_id=1, sequence=80)) == 80


def test_a_producer_is_known_by_its_snapshot_where_the_log_was_damaged_since() -> None:
    log = make_log()
    for number in range(3):
        append(log, make_batch(producer_id=1, sequence=number))
    log.close()
    path = log.active.log_path
    data = bytearray(log.fs.read(path))
    data[-(len(data) // 3) + 53 + 3] ^= 4  # the sequence of the last batch
    file = log.fs.open(path)
    file.pwrite(bytes(data), 0)
    again = reopen(log, clean=True)
    assert again.producer_state.get(1).last_sequence == 2
    assert append(again, make_batch(producer_id=1, sequence=3)) == 3


def test_an_empty_log_stays_empty_and_keeps_its_start() -> None:
    log = make_log()
    log.close()
    assert reopen(log, clean=True).log_end_offset == 0
    log.truncate_fully(500)
    log.close()
    for clean in (True, False):
        again = reopen(log, clean=clean)
        assert (again.log_start_offset, again.log_end_offset) == (500, 500)


def test_the_end_of_a_log_that_retention_emptied_is_not_forgotten() -> None:
    log = filled(retention_ms=1)
    end = log.log_end_offset
    log.apply_retention(NOW_MS + 10_000, end)
    assert log.log_start_offset == end
    for clean in (True, False):
        if clean:
            log.close()
        assert reopen(log, clean=clean).log_end_offset == end


def test_a_marker_of_a_clean_close_that_is_not_true_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    log = filled()
    log.close()
    append(log, make_batch())
    end = log.log_end_offset
    file = log.active.file()
    file.truncate(log.active.size - 1)
    again = reopen(log, clean=True)
    assert again.log_end_offset == end - 1
    assert "log truncated at recovery" in caplog.text
    check_indexes(again)


@pytest.mark.parametrize("suffix", [".index", ".timeindex"])
def test_an_index_that_is_gone_is_made_again(suffix: str) -> None:
    log = filled(count=120, segment_bytes=3000)
    before = read_all(log)
    log.close()
    for name in names(log, suffix):
        log.fs.remove(f"{DIRECTORY}/{name}")
    again = reopen(log, clean=True)
    assert read_all(again) == before
    check_indexes(again)


# -- after a crash -------------------------------------------------------------------------------------------


def tail_of(log: PartitionLog) -> bytes:
    return log.active.file().pread(log.active.size, 0)


def cut(data: bytes, dice: random.Random) -> bytes:
    return data[: -dice.randrange(1, 50)]


def zeroed(data: bytes, dice: random.Random) -> bytes:
    keep = dice.randrange(1, 50)
    return data[:-keep] + bytes(keep)


def zeros_behind(data: bytes, dice: random.Random) -> bytes:
    return data + bytes(dice.randrange(1, 5000))


def garbage_behind(data: bytes, dice: random.Random) -> bytes:
    return data + dice.randbytes(dice.randrange(1, 5000))


def half_a_batch_behind(data: bytes, dice: random.Random) -> bytes:
    batch = make_batch(2, 100)
    return data + batch[: dice.randrange(1, len(batch))]


@pytest.mark.parametrize("damage", [cut, zeroed, zeros_behind, garbage_behind, half_a_batch_behind])
@pytest.mark.parametrize("seed", range(5))
def test_a_torn_end_is_cut_after_the_last_whole_batch(
    damage: Callable[[bytes, random.Random], bytes], seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    log = filled()
    before, headers = read_all(log), headers_of(read_all(log))
    tail = damage(tail_of(log), random.Random(seed))
    file = log.active.file()
    file.truncate(0)
    file.pwrite(tail, 0)
    again = reopen(log)
    served = read_all(again)
    assert before.startswith(served)
    expected = headers[-2] if damage in (cut, zeroed) else headers[-1]
    assert again.log_end_offset == expected.next_offset
    assert log.fs.size(again.active.log_path) == again.active.size
    assert "log truncated at recovery" in caplog.text
    check_indexes(again)
    assert append(again, make_batch()) == expected.next_offset


def test_indexes_that_lie_are_made_again_where_the_log_is_scanned() -> None:
    log = filled(count=150)
    log.active.write_indexes()
    for suffix in (".index", ".timeindex"):
        for name in names(log, suffix):
            size = log.fs.size(f"{DIRECTORY}/{name}")
            log.fs.open(f"{DIRECTORY}/{name}").pwrite(random.Random(1).randbytes(size + 5), 0)
    again = reopen(log)
    check_indexes(again)
    assert read_all(again) == read_all(filled(count=150))


def test_segments_below_the_recovery_point_are_not_read_whole() -> None:
    fs = FaultyFileSystem()
    log = filled(fs, 400, segment_bytes=20_000)
    assert len(log.segments) > 1
    log.flush()
    flipped = log.segments[0].size // 2
    fs.flip(log.segments[0].log_path, flipped, 3)
    assert reopen(log, recovery_point=log.recovery_point).log_end_offset == log.log_end_offset
    assert reopen(log, recovery_point=0).log_end_offset < log.log_end_offset


@pytest.mark.parametrize("suffix", [".index", ".timeindex"])
@pytest.mark.parametrize("damage", ["gone", "empty", "zeroed", "short"])
def test_a_synced_segment_with_a_damaged_index_gets_a_new_one(suffix: str, damage: str) -> None:
    log = filled(count=150)
    before = read_all(log)
    log.flush()
    path = f"{DIRECTORY}/{names(log, suffix)[1]}"
    size = log.fs.size(path)
    if damage == "gone":
        log.fs.remove(path)
    elif damage == "empty":
        log.fs.open(path).truncate(0)
    elif damage == "short":
        log.fs.open(path).truncate(size - (8 if suffix == ".index" else 12))
    else:
        log.fs.open(path).pwrite(bytes(size), 0)
    again = reopen(log, recovery_point=log.recovery_point)
    assert read_all(again) == before
    check_indexes(again)


def test_what_was_recovered_counts_as_flushed_only_after_a_flush() -> None:
    log = filled()
    again = reopen(log)
    assert again.flushed_offset == 0 and again.recovery_point == 0
    again.flush()
    assert again.flushed_offset == again.log_end_offset
    assert again.recovery_point == again.active.base_offset > 0


def test_producers_and_epochs_are_rebuilt_from_the_batches() -> None:
    log = make_log(**SMALL)
    for number in range(60):
        append(log, make_batch(producer_id=number % 3, sequence=number // 3), epoch=number // 25)
    for name in names(log, ".snapshot"):
        log.fs.open(f"{DIRECTORY}/{name}").truncate(7)
    log.fs.write_atomic(f"{DIRECTORY}/leader-epoch-checkpoint", b"0\n5\ngarbage")
    again = reopen(log)
    assert again.epochs.entries == log.epochs.entries
    for producer_id in range(3):
        entry, expected = again.producer_state.get(producer_id), log.producer_state.get(producer_id)
        assert entry is not None and expected is not None
        assert entry.state() == expected.state()


def test_open_transactions_are_rebuilt_from_the_batches() -> None:
    log = make_log(**SMALL)
    append(log, make_batch(producer_id=1))
    append(log, make_batch(3, producer_id=2, transactional=True))
    append_many(log, 30)
    again = reopen(log)
    assert again.producer_state.first_undecided_offset() == 1


def test_a_log_start_past_the_recovered_end_starts_the_log_over_there() -> None:
    log = filled()
    again = reopen(log, log_start_offset=1000)
    assert (again.log_start_offset, again.log_end_offset) == (1000, 1000)


def test_offsets_that_compaction_left_out_are_no_damage() -> None:
    log = make_log(cleanup_policy=frozenset({"compact"}), **SMALL)
    for offset in (0, 3, 4, 9, 20, 21):
        batch = bytearray(build_batch([(NOW_MS, b"k", b"v" * 50, ())]))
        assign(batch, 0, offset, 0)
        log.append(batch, leader_epoch=0, now_ms=NOW_MS, origin=Origin.REPLICA)
    again = reopen(log)
    assert [header.base_offset for header in headers_of(read_all(again))] == [0, 3, 4, 9, 20, 21]
    assert again.read(5, 1, max_offset=22).read()[:8] == (9).to_bytes(8, "big")


def test_a_base_offset_with_a_flipped_bit_is_found_although_no_crc_covers_it() -> None:
    for place in (2, 40, 59):  # in the middle and at the very end
        log = filled(segment_bytes=1 << 20)
        starts = [start for start, _ in log.active.headers()]
        damaged = parse_header(log.active.file().pread(61, starts[place]))
        log.active.file().pwrite(b"\x10", starts[place] + 5)
        assert reopen(log).log_end_offset == damaged.base_offset


# -- holes and leftovers -------------------------------------------------------------------------------------


def test_segments_behind_a_hole_are_put_aside_and_not_deleted(caplog: pytest.LogCaptureFixture) -> None:
    log = filled(count=150)
    assert len(log.segments) > 4
    gone, later = log.segments[1], log.segments[2:]
    content = [segment.file().pread(segment.size, 0) for segment in later]
    log.fs.remove(gone.log_path)
    again = reopen(log)
    assert again.log_end_offset == gone.base_offset
    assert [log.fs.read(segment.log_path + ".corrupt") for segment in later] == content
    assert "behind a hole" in caplog.text
    check_indexes(again)
    append_many(again, 100)
    again.active.file().truncate(0)
    assert reopen(again).log_end_offset < again.log_end_offset


def test_damage_in_the_middle_keeps_a_copy_of_what_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    for number in (0, -1):
        log = filled(count=150)
        segment = log.segments[number]
        data = segment.file().pread(segment.size, 0)
        starts = [start for start, _ in segment.headers()]
        segment.file().pwrite(b"\xff", starts[2] + 70)
        again = reopen(log)
        assert again.log_end_offset == parse_header(data, starts[2]).base_offset
        spare = log.fs.read(segment.log_path + ".corrupt")
        assert len(spare) == segment.size - starts[2]
        assert spare[100:] == data[starts[2] :][100:]
        check_indexes(again)


def test_a_sector_that_cannot_be_read_ends_the_log_there(caplog: pytest.LogCaptureFixture) -> None:
    fs = FaultyFileSystem()
    log = filled(fs, count=150)
    fs.fail("pread", errno.EIO, path=log.segments[2].log_path)
    again = reopen(log)
    assert again.log_end_offset == log.segments[2].base_offset
    assert "cannot be read" in caplog.text


def test_leftovers_of_unfinished_work_are_cleared_away(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = filled()
    before = read_all(log)
    log.close()
    leftovers = [
        "00000000000000000000.log.deleted",
        "00000000000000000000.log.cleaned",
        "leader-epoch-checkpoint.tmp",
        "00000000000000007777.index",
        "00000000000000007777.timeindex",
    ]
    for name in leftovers:
        log.fs.open(f"{DIRECTORY}/{name}", create=True).pwrite(b"x", 0)
    log.fs.open(f"{DIRECTORY}/partition.metadata", create=True)
    again = reopen(log, clean=True)
    assert read_all(again) == before
    assert not set(leftovers) & set(log.fs.listdir(DIRECTORY))
    assert "partition.metadata" in log.fs.listdir(DIRECTORY)
    assert caplog.text.count("file removed") == len(leftovers)


def test_a_swap_that_was_begun_is_completed_if_the_new_segment_is_whole() -> None:
    for whole in (True, False):
        log = filled(count=150, cleanup_policy=frozenset({"compact"}))
        first, second, third = log.segments[:3]
        batch = bytearray(build_batch([(NOW_MS, b"k", b"cleaned", ())]))
        assign(batch, 0, third.base_offset - 1, 0)
        path = first.log_path + ".swap"
        log.fs.open(path, create=True).pwrite(batch if whole else batch[:-1], 0)
        log.fs.open(first.index.path + ".swap", create=True)
        again = reopen(log)
        bases = [segment.base_offset for segment in again.segments]
        if whole:
            assert bases == [0, *[s.base_offset for s in log.segments[2:]]]
            assert headers_of(read_all(again))[0].base_offset == third.base_offset - 1
        else:
            assert bases == [segment.base_offset for segment in log.segments]
            assert second.base_offset in bases
        assert not names(log, ".swap")
        assert again.log_end_offset == log.log_end_offset


def test_an_empty_active_segment_is_no_damage(caplog: pytest.LogCaptureFixture) -> None:
    log = filled()
    end = log.log_end_offset
    log.roll()
    log.active.create()
    for clean in (False, True):
        if clean:
            log.close()
        again = reopen(log, clean=clean)
        assert (again.log_end_offset, again.active.base_offset) == (end, end)
    assert "truncated" not in caplog.text


def test_a_log_on_disk_is_the_same_after_both_kinds_of_start(tmp_path: Path) -> None:
    log = filled(DiskFileSystem(str(tmp_path)), 300)
    before = read_all(log)
    log.close(clean=False)
    crashed = reopen(log)
    assert read_all(crashed) == before
    crashed.close()
    clean = reopen(log, clean=True)
    assert read_all(clean) == before
    check_indexes(clean)


def test_a_log_in_memory_can_be_opened_again() -> None:
    fs = MemoryFileSystem()
    log = filled(fs)
    before = read_all(log)
    assert read_all(open_log(fs, DIRECTORY, "topic", 0, TopicConfig(), clean=False)) == before
