"""The checkpoint files never tell of a deleted log what a new one of its name would be taken for."""

import pytest

from headrace.base.settings import TopicConfig
from headrace.records.builder import build_batch
from headrace.storage.log import PartitionLog
from headrace.storage.log_checkpoints import LogCheckpoints
from headrace.storage.memory import MemoryFileSystem

KEY = ("t", 0)


@pytest.fixture
def fs() -> MemoryFileSystem:
    made = MemoryFileSystem()
    made.makedirs("t-0")
    return made


def log_that_starts_at(fs: MemoryFileSystem, offset: int) -> PartitionLog:
    log = PartitionLog(fs, "t-0", "t", 0, TopicConfig())
    for _ in range(offset + 1):
        log.append(bytearray(build_batch([(0, b"k", b"v", ())])), leader_epoch=0, now_ms=0)
    log.delete_records(offset)
    return log


def starts_in_file(fs: MemoryFileSystem) -> dict[tuple[str, int], int]:
    again = LogCheckpoints(fs, 0)
    again.read()
    return {KEY: again.log_start(KEY)}


def written(checkpoints: LogCheckpoints, logs: dict[tuple[str, int], PartitionLog]):
    pending = checkpoints.due(logs, [], 1, 1000, False)
    assert pending is not None
    return pending


def test_a_log_made_anew_after_a_write_does_not_inherit_the_start_of_the_old(fs):
    checkpoints = LogCheckpoints(fs, 0)
    pending = written(checkpoints, {KEY: log_that_starts_at(fs, 5)})
    pending.run()
    checkpoints.written(pending, None)
    assert starts_in_file(fs) == {KEY: 5}
    checkpoints.forget(KEY)
    checkpoints.make_room(KEY)
    assert starts_in_file(fs) == {KEY: 0}


@pytest.mark.parametrize("ran_before", [True, False], ids=["written before", "written after"])
def test_a_log_made_anew_during_a_write_does_not_inherit_the_start_of_the_old(fs, ran_before):
    checkpoints = LogCheckpoints(fs, 0)
    pending = written(checkpoints, {KEY: log_that_starts_at(fs, 5)})
    if ran_before:
        pending.run()
    checkpoints.forget(KEY)
    checkpoints.make_room(KEY)
    if not ran_before:
        pending.run()
    assert starts_in_file(fs) == {KEY: 0}
    checkpoints.written(pending, None)
    assert starts_in_file(fs) == {KEY: 0}
    assert checkpoints.due({}, [], 2, 1000, False) is None, "nothing is left to be mended"
