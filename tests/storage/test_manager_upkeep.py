"""What logs get while time passes: flushes, rolls, retention, expiry, checkpoints, each when it is due."""

import errno
from collections.abc import Callable

import pytest

from headrace.base.errors import KafkaError
from headrace.base.settings import TopicConfig, broker_config
from headrace.storage import manager as manager_module
from headrace.storage import upkeep
from headrace.storage.checkpoints import decode_offsets
from headrace.storage.faulty import FaultyFileSystem
from headrace.storage.files import FileSystem
from headrace.storage.log import PartitionLog
from headrace.storage.manager import Wanted
from headrace.storage.memory import MemoryFileSystem
from tests.storage.inline_worker import Worker, open_manager
from tests.storage.workbench import NOW_MS, append, make_batch, read_all

TOPIC_ID = bytes(15) + b"\x0a"
RETENTION_CHECK_MS = 300_000
RECOVERY_POINTS = "recovery-point-offset-checkpoint"
LOG_STARTS = "log-start-offset-checkpoint"


class CountingWorker(Worker):
    """Counts the flushes asked for."""

    def __init__(self, at_once: bool = True) -> None:
        super().__init__(at_once)
        self.flushes: list[PartitionLog] = []
        self.busy: set[PartitionLog] = set()

    def is_flushing(self, log: PartitionLog, /) -> bool:
        return log in self.busy

    def request(self, log: PartitionLog, waiter: Callable[[Exception | None], None] | None = None, /) -> None:
        self.flushes.append(log)
        super().request(log, waiter)


def small_segments(**settings: object) -> TopicConfig:
    return TopicConfig(segment_bytes=1000, **settings)  # type: ignore[arg-type]


def fill(log: PartitionLog, batches: int, timestamp: int = NOW_MS) -> None:
    for _ in range(batches):
        append(log, make_batch(5, 100, timestamp=timestamp), now_ms=timestamp)


def offsets(fs: FileSystem, name: str) -> dict[tuple[str, int], int]:
    return decode_offsets(fs.read(name)) if fs.exists(name) else {}


def test_unflushed_records_wait_no_longer_than_flush_ms() -> None:
    worker = CountingWorker()
    manager = open_manager(MemoryFileSystem(), worker)
    log = manager.create("a", 0, TOPIC_ID, TopicConfig(flush_ms=1000))
    other = manager.create("b", 0, TOPIC_ID, TopicConfig())
    fill(log, 1)
    fill(other, 1)
    manager.tick(NOW_MS)
    manager.tick(NOW_MS + 999)
    assert worker.flushes == []
    manager.tick(NOW_MS + 1000)
    assert worker.flushes == [log], "b has no time limit"
    assert log.flushed_offset == log.log_end_offset
    manager.tick(NOW_MS + 5000)
    assert worker.flushes == [log], "nothing new, nothing to do"
    fill(log, 1)
    manager.tick(NOW_MS + 5500)
    manager.tick(NOW_MS + 6400)
    assert worker.flushes == [log], "the time counts from the first unflushed record"
    manager.tick(NOW_MS + 6500)
    assert worker.flushes == [log, log]


def test_log_that_is_being_flushed_is_left_alone() -> None:
    worker = CountingWorker()
    manager = open_manager(MemoryFileSystem(), worker)
    log = manager.create("a", 0, TOPIC_ID, TopicConfig(flush_ms=0))
    fill(log, 1)
    worker.busy.add(log)
    manager.tick(NOW_MS)
    assert worker.flushes == []
    worker.busy.clear()
    manager.tick(NOW_MS + 1)
    assert worker.flushes == [log]


def test_sealed_segments_are_flushed_and_the_recovery_point_written_so_that_a_restart_scans_little() -> None:
    fs = FaultyFileSystem()
    worker = CountingWorker()
    manager = open_manager(fs, worker)
    log = manager.create("a", 0, TOPIC_ID, small_segments())
    fill(log, 1)
    manager.tick(NOW_MS)
    assert worker.flushes == []
    fill(log, 10)
    assert len(log.segments) > 5
    manager.tick(NOW_MS + 500)
    assert worker.flushes == [log]
    manager.tick(NOW_MS + 1000)
    assert worker.flushes == [log]
    assert offsets(fs, RECOVERY_POINTS) == {("a", 0): log.active.base_offset}
    before = read_all(log)
    sealed = [segment.log_path for segment in log.segments[:-1]]
    manager.close(clean=False)

    read: list[str] = []
    scanning = fs.step

    def watch(operation: str, path: str) -> None:
        if operation == "pread" and path.endswith(".log"):
            read.append(path)
        scanning(operation, path)

    fs.step = watch  # type: ignore[method-assign]
    manager = open_manager(fs)
    manager.load([Wanted("a", 0, TOPIC_ID, small_segments())])
    again = manager.get("a", 0)
    assert again is not None
    scans_of_sealed = sum(path in sealed for path in read)
    assert scans_of_sealed <= len(sealed), "at most a look at the end of each sealed segment"
    assert read_all(again) == before


def test_failed_background_flush_is_tried_again_after_a_while() -> None:
    fs = FaultyFileSystem()
    worker = CountingWorker()
    manager = open_manager(fs, worker)
    log = manager.create("a", 0, TOPIC_ID, TopicConfig(flush_ms=0))
    fill(log, 1)
    fs.fail("open", errno.ENOSPC, path="leader-epoch", times=1)
    fs.fail("pwrite", errno.ENOSPC, path="leader-epoch", times=1)
    fs.fail("rename", errno.ENOSPC, path="leader-epoch", times=1)
    manager.tick(NOW_MS)
    assert worker.flushes == [log] and log.flushed_offset == 0 and not log.failed
    fs.heal()
    manager.tick(NOW_MS + 100)
    assert worker.flushes == [log], "not at once"
    manager.tick(NOW_MS + upkeep.FLUSH_RETRY_MS + 100)
    assert log.flushed_offset == log.log_end_offset


def test_records_that_a_flush_before_the_acknowledgement_left_behind_are_flushed_after_a_while() -> None:
    """Nobody but the next producer would have: until then they were neither shown nor acknowledged."""
    fs = FaultyFileSystem()
    worker = CountingWorker()
    manager = open_manager(fs, worker)
    log = manager.create("a", 0, TOPIC_ID, TopicConfig(flush_messages=1))
    fill(log, 1)
    fs.fail("pwrite", errno.ENOSPC, path="leader-epoch", times=1)
    with pytest.raises(KafkaError):
        log.flush()
    fs.heal()
    manager.tick(NOW_MS)
    assert worker.flushes == [log] and log.flushed_offset == log.log_end_offset


def test_removal_of_many_deleted_logs_does_not_fill_the_queue_that_flushes_wait_in() -> None:
    fs = FaultyFileSystem()
    worker = CountingWorker(at_once=False)
    manager = open_manager(fs, worker)
    for partition in range(20):
        manager.create("a", partition, TOPIC_ID, TopicConfig())
        manager.delete("a", partition)
    assert len(worker.waiting) == manager_module.REMOVALS_MAX
    manager.leave_the_rest()
    worker.run()
    assert len(fs.listdir("")) == 18, "a broker that stops does not wait for them"
    manager = open_manager(fs, worker)
    manager.tick(NOW_MS)
    worker.run()
    assert [name for name in fs.listdir("") if name.startswith("a-")] == []


def test_retention_runs_at_its_interval_and_up_to_the_limit_only() -> None:
    manager = open_manager(MemoryFileSystem())
    log = manager.create("a", 0, TOPIC_ID, small_segments(retention_ms=1000))
    fill(log, 6)
    later = NOW_MS + RETENTION_CHECK_MS - 1
    manager.tick(later)
    assert log.log_start_offset == 0
    limit = log.segments[2].base_offset
    manager.limit_offset = lambda log: limit
    manager.tick(later + 1)
    assert log.log_start_offset == limit
    manager.limit_offset = lambda log: log.log_end_offset
    manager.tick(later + 2 + RETENTION_CHECK_MS)
    assert log.log_start_offset == log.log_end_offset == 30


def test_many_expired_segments_go_a_few_a_tick_until_all_are_gone() -> None:
    manager = open_manager(MemoryFileSystem())
    log = manager.create("a", 0, TOPIC_ID, small_segments(retention_ms=1000))
    fill(log, 120)
    many = len(log.segments)
    at_once = upkeep.DELETED_AT_ONCE_MAX
    assert many > 2 * at_once
    now_ms = NOW_MS + RETENTION_CHECK_MS
    manager.tick(now_ms)
    assert len(log.segments) == many - at_once
    manager.tick(now_ms + 500)
    assert len(log.segments) == many - 2 * at_once
    manager.tick(now_ms + 1000)
    assert (len(log.segments), log.log_start_offset) == (1, log.log_end_offset)


def test_metadata_log_is_never_subject_to_retention() -> None:
    manager = open_manager(MemoryFileSystem())
    log = manager.create("__cluster_metadata", 0, bytes(16), small_segments(retention_ms=1))
    fill(log, 3)
    manager.tick(NOW_MS + 10 * RETENTION_CHECK_MS)
    assert log.log_start_offset == 0


def test_round_over_many_logs_is_cut_into_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "LOGS_PER_TICK", 2)
    manager = open_manager(MemoryFileSystem())
    logs = [manager.create(f"t{n}", 0, TOPIC_ID, TopicConfig(retention_ms=1)) for n in range(5)]
    for log in logs:
        fill(log, 1)
    later = NOW_MS + RETENTION_CHECK_MS
    done = []
    for tick in range(3):
        manager.tick(later + tick)
        if tick == 0:
            manager.delete("t4", 0)
        done.append(sum(log.log_start_offset > 0 for log in logs[:4]))
    assert done == [2, 4, 4]
    assert logs[4].log_start_offset == 0, "a deleted log is left alone"


def test_failing_retention_of_one_log_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    fs = FaultyFileSystem()
    manager = open_manager(fs)
    bad = manager.create("bad", 0, TOPIC_ID, small_segments(retention_ms=1))
    good = manager.create("good", 0, TOPIC_ID, small_segments(retention_ms=1))
    fill(bad, 3)
    fill(good, 3)
    fs.fail("remove", errno.EIO, path="bad-0/", times=100)
    manager.tick(NOW_MS + RETENTION_CHECK_MS)
    assert good.log_start_offset == 15
    assert "retention failed" in caplog.text


def test_idle_segment_is_rolled_by_age() -> None:
    manager = open_manager(MemoryFileSystem())
    log = manager.create("a", 0, TOPIC_ID, TopicConfig(segment_ms=60_000))
    fill(log, 1)
    manager.tick(NOW_MS + RETENTION_CHECK_MS)
    assert log.active.base_offset == 5


def test_silent_producers_expire() -> None:
    manager = open_manager(MemoryFileSystem(), settings={"producer.id.expiration.ms": "600000"})
    log = manager.create("a", 0, TOPIC_ID, TopicConfig())
    append(log, make_batch(producer_id=1))
    manager.tick(NOW_MS + 599_000)
    assert len(log.producer_state) == 1
    manager.tick(NOW_MS + 599_000 + RETENTION_CHECK_MS)
    assert len(log.producer_state) == 0


def test_log_start_is_written_at_the_next_tick_and_dropped_when_segments_tell_it() -> None:
    fs = MemoryFileSystem()
    manager = open_manager(fs)
    log = manager.create("a", 0, TOPIC_ID, small_segments())
    fill(log, 3)
    manager.tick(NOW_MS)
    assert offsets(fs, LOG_STARTS) == {}
    log.delete_records(7)
    manager.tick(NOW_MS + 1)
    assert offsets(fs, LOG_STARTS) == {("a", 0): 7}
    log.delete_records(10)
    manager.tick(NOW_MS + 2)
    assert offsets(fs, LOG_STARTS) == {}, "a segment starts there"


def test_truncation_below_the_recovery_point_lowers_it_at_the_next_tick() -> None:
    fs = MemoryFileSystem()
    manager = open_manager(fs)
    log = manager.create("a", 0, TOPIC_ID, small_segments())
    fill(log, 6)
    manager.tick(NOW_MS)
    manager.tick(NOW_MS + 1)
    point = offsets(fs, RECOVERY_POINTS)["a", 0]
    assert point > 0
    log.truncate_to(6)
    manager.tick(NOW_MS + 2)
    assert offsets(fs, RECOVERY_POINTS).get(("a", 0), 0) == log.recovery_point < point


def test_checkpoint_that_cannot_be_written_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    fs = FaultyFileSystem()
    manager = open_manager(fs)
    log = manager.create("a", 0, TOPIC_ID, TopicConfig())
    fill(log, 3)
    log.delete_records(7)
    fs.fail("rename", errno.EIO, path=LOG_STARTS)
    manager.tick(NOW_MS)
    assert "checkpoints cannot be written" in caplog.text
    manager.tick(NOW_MS + 1)
    assert offsets(fs, LOG_STARTS) == {("a", 0): 7}


def test_only_one_checkpoint_is_written_at_a_time() -> None:
    fs = FaultyFileSystem()
    worker = CountingWorker(at_once=False)
    manager = open_manager(fs, worker)
    log = manager.create("a", 0, TOPIC_ID, TopicConfig())
    fill(log, 3)
    log.delete_records(7)
    manager.tick(NOW_MS)
    log.delete_records(8)
    manager.tick(NOW_MS + 1)
    assert len(worker.waiting) == 1
    worker.run()
    assert offsets(fs, LOG_STARTS) == {("a", 0): 7}
    manager.tick(NOW_MS + 2)
    worker.run()
    assert offsets(fs, LOG_STARTS) == {("a", 0): 8}


def test_checkpoints_keep_what_is_known_of_logs_that_could_not_be_opened() -> None:
    fs = FaultyFileSystem()
    manager = open_manager(fs)
    for topic in ("bad", "good"):
        log = manager.create(topic, 0, TOPIC_ID, small_segments())
        fill(log, 3)
        log.delete_records(7)
    manager.close()
    before = offsets(fs, LOG_STARTS)
    assert before == {("bad", 0): 7, ("good", 0): 7}

    manager = open_manager(fs)
    fs.fail("open", errno.EIO, path="bad-0/", times=1000)
    manager.load([Wanted(topic, 0, TOPIC_ID, small_segments()) for topic in ("bad", "good")])
    with pytest.raises(KafkaError):
        manager.get("bad", 0)
    good = manager.get("good", 0)
    assert good is not None
    good.delete_records(8)
    manager.tick(NOW_MS)
    assert offsets(fs, LOG_STARTS) == {("bad", 0): 7, ("good", 0): 8}
    manager.close()
    assert offsets(fs, LOG_STARTS) == {("bad", 0): 7, ("good", 0): 8}


def test_failed_log_is_left_alone() -> None:
    fs = FaultyFileSystem()
    worker = CountingWorker()
    manager = open_manager(fs, worker)
    log = manager.create("a", 0, TOPIC_ID, TopicConfig(flush_ms=0, retention_ms=1))
    fill(log, 1)
    fs.fail("sync", errno.EIO, path=".log")
    manager.tick(NOW_MS)
    assert log.failed
    asked = len(worker.flushes)
    manager.tick(NOW_MS + RETENTION_CHECK_MS)
    assert len(worker.flushes) == asked
    assert log.log_start_offset == 0


def test_settings_of_the_broker_are_heeded_as_they_change() -> None:
    manager = open_manager(MemoryFileSystem())
    log = manager.create("a", 0, TOPIC_ID, TopicConfig(retention_ms=1))
    fill(log, 1)
    manager.reconfigure(broker_config({"log.retention.check.interval.ms": "1000"}))
    manager.tick(NOW_MS + 1000)
    assert log.log_start_offset == 5
