"""A data directory over its life: opened, closed, killed, given away, damaged; and what it refuses."""

import errno
import logging
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.base.clock import ManualClock
from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.settings import TopicConfig, broker_config
from headrace.storage.checkpoints import CorruptIdentity, MetaProperties
from headrace.storage.directories import (
    DirectoryInUse,
    DirectoryLock,
    aside_name,
    directory_name,
    is_deleted,
    parse_directory_name,
)
from headrace.storage.faulty import FaultyFileSystem
from headrace.storage.files import DiskFileSystem, FileSystem
from headrace.storage.log import PartitionLog
from headrace.storage.manager import CLEAN_SHUTDOWN_NAME, LogManager, Wanted
from headrace.storage.memory import MemoryFileSystem
from tests.storage.inline_worker import Worker, open_manager
from tests.storage.workbench import NOW_MS, append, make_batch, read_all

A_ID = bytes(15) + b"\x0a"
B_ID = bytes(15) + b"\x0b"
CONFIG = TopicConfig()


def wanted(*names: str) -> list[Wanted]:
    return [Wanted(name, 0, A_ID, CONFIG) for name in names]


def filled(manager: LogManager, topic: str, batches: int = 3, topic_id: bytes = A_ID) -> PartitionLog:
    log = manager.create(topic, 0, topic_id, CONFIG)
    for _ in range(batches):
        append(log, make_batch(5))
    return log


@pytest.fixture(params=["memory", "faulty", "disk"])
def fs(request: pytest.FixtureRequest, tmp_path: Path) -> FileSystem:
    match request.param:
        case "memory":
            return MemoryFileSystem()
        case "faulty":
            return FaultyFileSystem()
        case _:
            return DiskFileSystem(str(tmp_path / "data"))


def test_clean_restart_brings_back_every_log(fs: FileSystem) -> None:
    manager = open_manager(fs)
    before = {topic: read_all(filled(manager, topic, n)) for n, topic in enumerate(["a", "b-1", "c.d_e"])}
    manager.close()
    assert fs.exists(CLEAN_SHUTDOWN_NAME)

    again = open_manager(fs)
    assert again.was_clean
    assert not fs.exists(CLEAN_SHUTDOWN_NAME), "from now on a kill must be seen"
    again.load(wanted(*before))
    assert again.put_aside_strays() == []
    assert {log.topic: read_all(log) for log in again} == before
    again.close()


def test_kill_is_seen_as_an_unclean_stop_and_loses_nothing_that_was_written(fs: FileSystem) -> None:
    manager = open_manager(fs)
    before = read_all(filled(manager, "a"))
    manager.close(clean=False)

    again = open_manager(fs)
    assert not again.was_clean
    again.load(wanted("a"))
    log = again.get("a", 0)
    assert log is not None and read_all(log) == before
    again.close()
    assert open_manager_was_clean(fs)


def open_manager_was_clean(fs: FileSystem) -> bool:
    manager = open_manager(fs)
    try:
        return manager.was_clean
    finally:
        manager.close(clean=False)


def test_kill_during_a_start_is_an_unclean_stop(fs: FileSystem) -> None:
    manager = open_manager(fs)
    filled(manager, "a")
    manager.close()
    starting = open_manager(fs)
    starting.close(clean=False)  # killed before anything was opened
    assert not open_manager_was_clean(fs)


def test_power_cut_after_a_clean_start_cannot_bring_the_marker_back() -> None:
    for seed in range(20):
        fs = FaultyFileSystem()
        manager = open_manager(fs)
        filled(manager, "a")
        manager.close()
        running = open_manager(fs)
        running.load(wanted("a"))
        log = running.get("a", 0)
        assert log is not None
        append(log, make_batch())
        fs.crash(random.Random(seed))
        assert not fs.exists(CLEAN_SHUTDOWN_NAME)


def test_clean_close_survives_a_power_cut_bit_for_bit() -> None:
    for seed in range(20):
        fs = FaultyFileSystem()
        manager = open_manager(fs)
        logs = [filled(manager, topic) for topic in ("a", "b")]
        logs[0].delete_records(7)
        before = {log.topic: (log.log_start_offset, read_all(log)) for log in logs}
        manager.close()
        fs.crash(random.Random(seed))
        again = open_manager(fs)
        assert again.was_clean
        again.load(wanted("a", "b"))
        assert {log.topic: (log.log_start_offset, read_all(log)) for log in again} == before


def test_log_that_nobody_touched_is_closed_without_a_write(fs: FileSystem) -> None:
    manager = open_manager(fs)
    before = read_all(filled(manager, "a"))
    manager.close()
    for _ in range(2):
        manager = open_manager(fs)
        manager.load(wanted("a"))
        assert manager.was_clean
        if isinstance(fs, FaultyFileSystem):
            fs.fail("pwrite", errno.EIO, path="a-0/", times=1000)
        manager.close()
        if isinstance(fs, FaultyFileSystem):
            fs.heal()
    manager = open_manager(fs)
    assert manager.was_clean
    manager.load(wanted("a"))
    log = manager.get("a", 0)
    assert log is not None and read_all(log) == before


def test_failed_close_leaves_no_marker(caplog: pytest.LogCaptureFixture) -> None:
    fs = FaultyFileSystem()
    manager = open_manager(fs)
    filled(manager, "a")
    before = read_all(filled(manager, "b"))
    fs.fail("sync", errno.EIO, path="a-0/", times=100)
    manager.close()
    fs.heal()
    assert "could not be closed in order" in caplog.text
    again = open_manager(fs)
    assert not again.was_clean
    again.load(wanted("a", "b"))
    log = again.get("b", 0)
    assert log is not None and read_all(log) == before


def test_log_that_was_never_recovered_is_not_declared_clean() -> None:
    fs = FaultyFileSystem()
    manager = open_manager(fs)
    filled(manager, "a")
    filled(manager, "b")
    manager.close(clean=False)

    manager = open_manager(fs)
    fs.fail("open", errno.EIO, path="a-0/", times=100)
    manager.load(wanted("a", "b"))
    assert list(manager.offline) == [("a", 0)]
    manager.close()
    fs.heal()
    assert not open_manager_was_clean(fs), "a-0 still has to be scanned"


def test_producers_epochs_and_log_start_survive_restarts(fs: FileSystem) -> None:
    for clean in (True, False):
        manager = open_manager(fs)
        log = manager.create(f"t{clean}", 0, A_ID, CONFIG)
        append(log, make_batch(5, producer_id=7, sequence=0), epoch=0)
        append(log, make_batch(5, producer_id=7, sequence=5), epoch=2)
        log.delete_records(3)
        manager.tick(NOW_MS + 1000)
        manager.close(clean=clean)
        manager = open_manager(fs)
        manager.load(wanted(f"t{clean}"))
        again = manager.get(f"t{clean}", 0)
        assert again is not None
        assert again.log_start_offset == 3
        assert [(entry.epoch, entry.start_offset) for entry in again.epochs.entries] == [(0, 3), (2, 5)]
        repeated = again.append(make_batch(5, producer_id=7, sequence=5), leader_epoch=2, now_ms=NOW_MS)
        assert repeated.duplicate and repeated.first_offset == 5
        manager.close()


def test_partition_that_cannot_be_opened_is_offline_and_stops_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fs = FaultyFileSystem()
    manager = open_manager(fs)
    filled(manager, "bad")
    good = read_all(filled(manager, "good"))
    manager.close()

    manager = open_manager(fs)
    fs.fail("open", errno.EACCES, path="bad-0/", times=100)
    manager.load(wanted("bad", "good"))
    with pytest.raises(KafkaError) as caught:
        manager.get("bad", 0)
    assert caught.value.code is ErrorCode.KAFKA_STORAGE_ERROR
    with pytest.raises(KafkaError):
        manager.create("bad", 0, A_ID, CONFIG)
    assert "partition is offline" in caplog.text
    log = manager.get("good", 0)
    assert log is not None and read_all(log) == good
    append(log, make_batch())
    assert manager.put_aside_strays() == [], "an offline partition is no stray"
    manager.close()

    fs.heal()
    manager = open_manager(fs)
    manager.load(wanted("bad", "good"))
    assert manager.offline == {}


def test_unknown_partition_is_not_there(fs: FileSystem) -> None:
    manager = open_manager(fs)
    assert manager.get("a", 0) is None
    manager.delete("a", 0)
    assert len(manager) == 0


def test_create_again_gives_the_same_log(fs: FileSystem) -> None:
    manager = open_manager(fs)
    log = filled(manager, "a")
    assert manager.create("a", 0, A_ID, CONFIG) is log
    assert [(size.topic, size.partition, size.size_bytes) for size in manager.sizes()] == [
        ("a", 0, log.size_bytes)
    ]
    manager.close()


def test_directory_that_cannot_be_made_can_be_tried_again() -> None:
    fs = FaultyFileSystem()
    manager = open_manager(fs)
    fs.fail("makedirs", errno.ENOSPC)
    with pytest.raises(KafkaError) as caught:
        manager.create("a", 0, A_ID, CONFIG)
    assert caught.value.code is ErrorCode.KAFKA_STORAGE_ERROR
    assert manager.offline == {}
    filled(manager, "a")


# -- whose directory -----------------------------------------------------------------------------------------


def test_directory_remembers_whose_it_is(fs: FileSystem) -> None:
    manager = open_manager(fs)
    assert manager.identity() is None
    meta = MetaProperties("cluster", 1, "directory")
    manager.claim(meta)
    manager.close()
    again = open_manager(fs)
    assert again.identity() == meta
    again.close()
    fs.write_atomic("meta.properties", b"junk")
    again = open_manager(fs)
    with pytest.raises(CorruptIdentity):
        again.identity()
    again.close()


def test_second_process_is_refused_with_the_lock_file_and_the_holder_named(tmp_path: Path) -> None:
    manager = open_manager(DiskFileSystem(str(tmp_path)))
    script = (
        "import sys\n"
        "from headrace.storage.directories import DirectoryInUse, DirectoryLock\n"
        "try:\n"
        "    DirectoryLock(sys.argv[1])\n"
        "except DirectoryInUse as error:\n"
        "    print(error)\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert str(tmp_path / ".lock") in out.stdout
    assert f"pid {os.getpid()}" in out.stdout
    assert "--data" in out.stdout
    with pytest.raises(DirectoryInUse):
        open_manager(DiskFileSystem(str(tmp_path)))
    manager.close()
    open_manager(DiskFileSystem(str(tmp_path))).close()


def test_failed_start_gives_the_directory_back(tmp_path: Path) -> None:
    class Broken(DiskFileSystem):
        def listdir(self, path: str) -> list[str]:
            raise OSError(errno.EIO, "Input/output error", path)

    with pytest.raises(OSError):
        open_manager(Broken(str(tmp_path)))
    DirectoryLock(str(tmp_path)).release()


# -- names, strays, deletion ---------------------------------------------------------------------------------


def test_names_of_partitions_are_told_from_all_others() -> None:
    for topic, partition in (
        ("a", 0),
        ("a-b", 10),
        ("a-0", 1),
        ("x" * 249, 99999),
        ("t.delete", 3),
        ("a-delete", 0),
    ):
        name = directory_name(topic, partition)
        assert parse_directory_name(name) == (topic, partition)
        assert not is_deleted(name)
        for suffix in ("-delete", "-stray"):
            aside = aside_name(name, "0f" * 16, suffix)
            assert len(aside.encode()) <= 255
            assert parse_directory_name(aside) is None
            assert is_deleted(aside) == (suffix == "-delete")
            assert f"-{partition}." in aside
    for other in ("meta.properties", "a", "-0", "a-", "a-x", "a-01", "a-4294967296", "a-٣", ".lock"):
        assert parse_directory_name(other) is None, other


def test_directory_of_an_older_topic_of_the_same_name_is_put_aside(
    fs: FileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    manager = open_manager(fs)
    log = filled(manager, "a", topic_id=A_ID)
    log.delete_records(7)
    manager.close()
    manager = open_manager(fs)
    manager.load([Wanted("a", 0, B_ID, CONFIG)])
    fresh = manager.get("a", 0)
    assert fresh is not None and fresh.log_end_offset == 0
    (stray,) = [name for name in fs.listdir("") if name.endswith("-stray")]
    assert fs.exists(f"{stray}/00000000000000000000.log"), "nothing is deleted"
    assert "directory is not of this topic" in caplog.text
    append(fresh, make_batch(2))
    manager.close(clean=False)

    manager = open_manager(fs)
    manager.load([Wanted("a", 0, B_ID, CONFIG)])
    again = manager.get("a", 0)
    assert again is not None
    assert (again.log_start_offset, again.log_end_offset) == (0, 2), (
        "the old topic's log start was not taken over"
    )
    manager.close()


def test_directories_that_no_topic_claims_are_put_aside(fs: FileSystem) -> None:
    manager = open_manager(fs)
    filled(manager, "known")
    filled(manager, "unknown")
    manager.close()
    manager = open_manager(fs)
    manager.load(wanted("known"))
    (stray,) = manager.put_aside_strays()
    assert stray.startswith("unknown-0.") and stray.endswith("-stray")
    assert not fs.exists("unknown-0") and fs.exists("known-0")
    manager.close()


def test_empty_directory_without_a_topic_id_is_taken_over(fs: FileSystem) -> None:
    manager = open_manager(fs)
    manager.create("a", 0, A_ID, CONFIG)
    manager.close()
    fs.write_atomic("a-0/partition.metadata", b"")
    manager = open_manager(fs)
    manager.load(wanted("a"))
    log = manager.get("a", 0)
    assert log is not None and log.log_end_offset == 0
    assert b"topic_id" in fs.read("a-0/partition.metadata")
    assert not any(name.endswith("-stray") for name in fs.listdir(""))
    manager.close()


def test_records_without_a_topic_id_are_put_aside(fs: FileSystem) -> None:
    manager = open_manager(fs)
    filled(manager, "a")
    manager.close()
    fs.write_atomic("a-0/partition.metadata", b"")
    manager = open_manager(fs)
    manager.load(wanted("a"))
    log = manager.get("a", 0)
    assert log is not None and log.log_end_offset == 0, "they may be of another topic"
    (stray,) = [name for name in fs.listdir("") if name.endswith("-stray")]
    assert fs.size(f"{stray}/00000000000000000000.log") > 0
    manager.close()


def test_directory_with_an_unreadable_topic_id_is_offline(fs: FileSystem) -> None:
    manager = open_manager(fs)
    filled(manager, "a")
    manager.close()
    fs.write_atomic("a-0/partition.metadata", b"version: 9\n")
    manager = open_manager(fs)
    manager.load(wanted("a"))
    assert list(manager.offline) == [("a", 0)]
    manager.close()


def test_deleted_partition_frees_its_name_at_once_and_its_files_later(tmp_path: Path) -> None:
    fs = DiskFileSystem(str(tmp_path))
    worker = Worker(at_once=False)
    manager = open_manager(fs, worker)
    old = filled(manager, "a")
    reader = old.read(0, 1 << 20, max_offset=old.log_end_offset)
    expected = reader.read()
    manager.delete("a", 0)
    assert manager.get("a", 0) is None
    (aside,) = [name for name in fs.listdir("") if is_deleted(name)]
    assert aside.startswith("a-0.")

    fresh = filled(manager, "a", 1, topic_id=B_ID)
    assert fresh.log_end_offset == 5
    worker.run()
    assert not fs.exists(aside)
    assert reader.read() == expected, "who reads it reads on"
    assert read_all(fresh)
    manager.close()


def test_what_is_left_of_a_deletion_is_removed_by_the_next_start(tmp_path: Path) -> None:
    fs = DiskFileSystem(str(tmp_path))
    manager = open_manager(fs, Worker(at_once=False))
    filled(manager, "a")
    manager.delete("a", 0)
    manager.close(clean=False)
    assert any(is_deleted(name) for name in fs.listdir(""))

    worker = Worker()
    worker.full = True
    manager = open_manager(fs, worker)
    manager.tick(NOW_MS)
    assert any(is_deleted(name) for name in fs.listdir("")), "the worker had no room"
    worker.full = False
    manager.tick(NOW_MS + 1)
    assert not any(is_deleted(name) for name in fs.listdir(""))
    manager.close()


def test_deleted_log_start_does_not_outlive_its_log_over_a_kill(fs: FileSystem) -> None:
    manager = open_manager(fs)
    filled(manager, "a").delete_records(12)
    manager.tick(NOW_MS)
    manager.delete("a", 0)
    before = read_all(filled(manager, "a", 1, topic_id=B_ID))
    manager.close(clean=False)  # killed before another tick
    manager = open_manager(fs)
    manager.load([Wanted("a", 0, B_ID, CONFIG)])
    log = manager.get("a", 0)
    assert log is not None and read_all(log) == before
    manager.close()


def test_offline_partition_can_be_deleted() -> None:
    fs = FaultyFileSystem()
    manager = open_manager(fs)
    filled(manager, "a")
    manager.close()
    manager = open_manager(fs)
    fs.fail("open", errno.EIO, path="a-0/", times=100)
    manager.load(wanted("a"))
    fs.heal()
    manager.delete("a", 0)
    assert not fs.exists("a-0")
    assert filled(manager, "a", 1).log_end_offset == 5


def test_directory_that_cannot_be_renamed_is_put_aside_by_the_next_topic_of_its_name() -> None:
    fs = FaultyFileSystem()
    manager = open_manager(fs)
    filled(manager, "a")
    fs.fail("rename", errno.EIO, path="a-0")
    manager.delete("a", 0)
    fs.heal()
    fresh = manager.create("a", 0, B_ID, CONFIG)
    assert fresh.log_end_offset == 0


def test_long_start_says_how_far_it_is(caplog: pytest.LogCaptureFixture) -> None:
    class SlowClock(ManualClock):
        def monotonic_ms(self) -> float:
            self.advance(700)
            return super().monotonic_ms()

    fs = MemoryFileSystem()
    manager = open_manager(fs)
    names = [f"t{number}" for number in range(10)]
    for name in names:
        filled(manager, name, 1)
    manager.close()
    slow = LogManager(fs, "data", broker_config({}), SlowClock(NOW_MS), Worker())
    slow.start()
    with caplog.at_level(logging.WARNING, "headrace"):
        slow.load(wanted(*names))
    assert caplog.text.count("opening logs") >= 2
