"""The compactor at work: which log it takes, how far, at what pace, what it writes down, and what stops it."""

import errno
from collections.abc import Callable

import pytest

from headrace.base.ids import ID_SIZE
from headrace.base.settings import TopicConfig
from headrace.records.builder import build_batch
from headrace.storage import cleaner as cleaner_module
from headrace.storage.checkpoints import CLEANER_OFFSETS_NAME, decode_offsets
from headrace.storage.cleanable import examine, filthiest
from headrace.storage.faulty import FaultyFileSystem, PowerCut
from headrace.storage.log import PartitionLog
from headrace.storage.manager import LogManager
from headrace.storage.memory import MemoryFileSystem
from headrace.storage.recovery import open_log
from headrace.storage.trims import quarantine
from tests.storage.cleanbench import COMPACT, clean, contents, put, seal, table
from tests.storage.inline_worker import Worker, open_manager
from tests.storage.workbench import DIRECTORY, NOW_MS, check_indexes, make_log, read_all

TOPIC_ID = b"\x01" * ID_SIZE


def compacted(**settings: object) -> PartitionLog:
    return make_log(cleanup_policy=COMPACT, **settings)


def filled(log: PartitionLog, rounds: int = 10) -> PartitionLog:
    """Each round a segment of its own with the same three keys."""
    for number in range(rounds):
        put(log, (b"a", b"%d" % number), (b"b", b"%d" % number), (b"c", b"%d" % number))
        seal(log)
    return log


# -- the choice ----------------------------------------------------------------------------------------------


def test_the_log_with_the_largest_dirty_share_is_taken() -> None:
    half, most = (
        filled(compacted(min_cleanable_dirty_ratio=0.1)),
        filled(compacted(min_cleanable_dirty_ratio=0.1)),
    )
    offsets = {id(half): 15, id(most): 6}
    found = filthiest([half, most], lambda log: offsets[id(log)], lambda log: log.log_end_offset, NOW_MS)
    assert found is not None and found.log is most
    assert (found.first_dirty_offset, found.end_offset) == (6, 30)
    assert found.dirty_ratio == pytest.approx(0.8, abs=0.01)


def test_a_log_is_left_alone_below_its_dirty_ratio() -> None:
    log = filled(compacted(min_cleanable_dirty_ratio=0.5))
    assert examine(log, 15, log.log_end_offset, NOW_MS) is None
    assert examine(log, 12, log.log_end_offset, NOW_MS) is not None


def test_logs_that_are_not_compacted_or_have_no_sealed_segment_are_passed_over() -> None:
    only_active = compacted()
    put(only_active, (b"a", b"1"))
    deleted = filled(make_log())
    assert filthiest([only_active, deleted], lambda log: None, lambda log: 100, NOW_MS) is None


def test_nothing_past_the_high_watermark_or_an_open_transaction_is_cleaned() -> None:
    log = filled(compacted())
    found = examine(log, None, 9, NOW_MS)
    assert found is not None and found.end_offset == 9
    batch = build_batch(
        [(NOW_MS, b"a", b"t", ())], producer_id=3, producer_epoch=0, base_sequence=0, transactional=True
    )
    log.append(bytearray(batch), leader_epoch=0, now_ms=NOW_MS)
    seal(log)
    filled(log, 2)
    found = examine(log, None, log.log_end_offset, NOW_MS)
    assert found is not None and found.end_offset == 30


def test_only_what_is_durable_is_cleaned() -> None:
    log = filled(compacted(), 3)
    put(log, (b"a", b"x"))
    log.roll(NOW_MS)
    found = examine(log, None, log.log_end_offset, NOW_MS)
    assert found is not None and found.end_offset == 9


def test_records_younger_than_the_least_lag_are_left_as_they_are() -> None:
    log = compacted(min_compaction_lag_ms=1000)
    for number in range(5):
        put(log, (b"a", b"%d" % number), timestamp=NOW_MS + number * 1000)
        seal(log)
    found = examine(log, None, log.log_end_offset, NOW_MS + 3500)
    assert found is not None and found.end_offset == 3
    assert examine(log, None, log.log_end_offset, NOW_MS) is None


def test_a_record_that_waited_for_the_greatest_lag_makes_its_log_due() -> None:
    log = filled(compacted(min_cleanable_dirty_ratio=1.0, max_compaction_lag_ms=5000))
    assert examine(log, None, log.log_end_offset, NOW_MS + 5002) is None
    assert examine(log, None, log.log_end_offset, NOW_MS + 5003) is not None


def test_the_greatest_lag_also_closes_the_active_segment() -> None:
    log = compacted(max_compaction_lag_ms=5000)
    put(log, (b"a", b"1"))
    assert not log.roll_if_due(NOW_MS + 5000)
    assert log.roll_if_due(NOW_MS + 5001)


def test_a_clean_offset_past_the_log_is_not_believed() -> None:
    log = filled(compacted())
    found = examine(log, 1000, log.log_end_offset, NOW_MS)
    assert found is not None and found.first_dirty_offset == 0


# -- at work -------------------------------------------------------------------------------------------------


def managed(
    worker: Worker | None = None, settings: dict[str, str] | None = None, **topic: object
) -> tuple[LogManager, PartitionLog]:
    fs = MemoryFileSystem()
    manager = open_manager(fs, worker, {"log.cleaner.backoff.ms": "0", **(settings or {})})
    config = TopicConfig(**{"cleanup_policy": COMPACT, **topic})  # type: ignore[arg-type]
    return manager, filled(manager.create("topic", 0, TOPIC_ID, config))


def test_a_tick_cleans_what_is_due_and_writes_down_how_far() -> None:
    manager, log = managed()
    manager.tick(NOW_MS + 500)
    assert contents(log) == [(27, b"a", b"9"), (28, b"b", b"9"), (29, b"c", b"9")]
    assert decode_offsets(manager.fs.read(CLEANER_OFFSETS_NAME)) == {("topic", 0): 30}
    check_indexes(log)
    segments = list(log.segments)
    manager.tick(NOW_MS + 1000)
    assert log.segments == segments
    manager.close()
    again = open_manager(manager.fs)
    assert again.cleaner.clean_offset(log) == 30


def test_a_deleted_topic_leaves_no_offset_to_the_next_of_its_name() -> None:
    manager, log = managed()
    manager.tick(NOW_MS + 500)
    manager.delete("topic", 0)
    assert manager.cleaner.clean_offset(log) is None
    manager.tick(NOW_MS + 1000)
    assert decode_offsets(manager.fs.read(CLEANER_OFFSETS_NAME)) == {}


def test_nothing_is_cleaned_when_the_cleaner_is_off() -> None:
    manager, log = managed(settings={"log.cleaner.enable": "false"})
    manager.tick(NOW_MS + 500)
    assert len(contents(log)) == 30


def test_the_pace_is_held_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleaner_module, "PORTION_BYTES", 100)
    manager, log = managed(settings={"log.cleaner.io.max.bytes.per.second": "400"}, segment_bytes=100)
    size = log.size_bytes
    now_ms, ticks = NOW_MS, 0
    while manager.cleaner.clean_offset(log) is None:
        now_ms += 500
        manager.tick(now_ms)
        ticks += 1
        assert ticks < 200
    assert ticks * 0.5 * 400 >= 2 * size - 400  # read twice, and something written


def test_the_loop_waits_for_no_disk_and_a_stopped_cleaner_asks_for_nothing() -> None:
    worker = Worker(at_once=False)
    manager, log = managed(worker)
    manager.tick(NOW_MS + 500)
    assert manager.cleaner.working and len(contents(log)) == 30
    manager.cleaner.stop()
    worker.run()
    assert len(contents(log)) == 30 and not manager.cleaner.working
    manager.tick(NOW_MS + 1000)
    assert not manager.cleaner.working


@pytest.mark.parametrize("happens", ["deleted", "retention", "truncated"])
def test_what_happens_to_a_log_while_it_is_cleaned_counts(happens: str) -> None:
    worker = Worker(at_once=False)
    policy = frozenset({"compact", "delete"}) if happens == "retention" else COMPACT
    manager, log = managed(worker, cleanup_policy=policy, retention_ms=1000)
    put(log, (b"z", b"1"), timestamp=NOW_MS + 10_000)
    manager.tick(NOW_MS + 500)
    if happens == "deleted":
        manager.delete("topic", 0)
        worker.run()
        assert not manager.cleaner.working and manager.cleaner.clean_offset(log) is None
        return
    if happens == "retention":
        assert log.apply_retention(NOW_MS + 5000, log.log_end_offset) == 10
        expected = [(30, b"z", b"1")]
    else:
        log.truncate_to(2)
        expected = []
    worker.run()
    assert contents(log) == expected
    check_indexes(log)


def test_what_is_fetched_in_place_of_what_was_clean_is_cleaned_again() -> None:
    """Else a tombstone expires, and the value that it deleted stays."""

    def history(log: PartitionLog) -> None:
        for number in range(10):
            value = {0: b"deleted", 5: None}.get(number, b"later")
            put(log, (b"x" if number in (0, 5) else b"f%d" % number, value), (b"b", b"%d" % number))
            seal(log)

    manager, log = managed(delete_retention_ms=1000, min_cleanable_dirty_ratio=0.01)
    log.truncate_to(0)
    history(log)
    manager.tick(NOW_MS + 500)
    assert manager.cleaner.clean_offset(log) == 20
    quarantine(log, 0)
    manager.truncated(log)
    history(log)  # from a leader that has cleaned nothing yet
    for number in range(3):
        put(log, (b"y", b"%d" % number))
        seal(log)
        manager.tick(NOW_MS + 6_000 * (number + 1))
    assert b"x" not in table(log)


def test_a_log_that_ends_early_after_a_crash_is_not_clean_past_its_end() -> None:
    manager, log = managed()
    manager.tick(NOW_MS + 500)
    assert manager.cleaner.clean_offset(log) == 30
    manager.close(clean=False)
    for name in manager.fs.listdir(log.directory):
        if name.endswith(".log"):
            manager.fs.remove(f"{log.directory}/{name}")
    again = open_manager(manager.fs)
    opened = again.create("topic", 0, TOPIC_ID, log.config)
    assert (opened.log_end_offset, again.cleaner.clean_offset(opened)) == (0, 0)


def test_a_cleaning_of_a_log_that_was_cut_meanwhile_makes_nothing_clean() -> None:
    worker = Worker(at_once=False)
    manager, log = managed(worker)
    segments = len(log.segments)
    manager.tick(NOW_MS + 500)
    # Until what was cleaned is in place, and only the end is to be noted.
    while len(log.segments) == segments:
        work, done = worker.waiting.pop(0)
        work()
        if done is not None:
            done(None)
    assert manager.cleaner.working
    log.truncate_to(0)
    manager.truncated(log)
    worker.run()
    assert manager.cleaner.clean_offset(log) is None


def test_a_full_disk_only_puts_the_cleaning_off() -> None:
    fs = FaultyFileSystem()
    manager = open_manager(fs, settings={"log.cleaner.backoff.ms": "0"})
    log = filled(manager.create("topic", 0, TOPIC_ID, TopicConfig(cleanup_policy=COMPACT)))
    fs.fail("pwrite", errno.ENOSPC, path=".cleaned")
    manager.tick(NOW_MS + 500)
    assert len(contents(log)) == 30 and not log.failed
    manager.tick(NOW_MS + 1000)
    assert len(contents(log)) == 30
    manager.tick(NOW_MS + 500 + cleaner_module.RETRY_MS)
    assert len(contents(log)) == 3


def test_a_damaged_log_is_left_alone_and_others_are_cleaned(caplog: pytest.LogCaptureFixture) -> None:
    manager, log = managed()
    other = filled(manager.create("other", 0, TOPIC_ID, TopicConfig(cleanup_policy=COMPACT)))
    log.segments[3].file().pwrite(b"\xff\xff", 70)
    manager.tick(NOW_MS + 500)
    manager.tick(NOW_MS + 10**9)
    assert len(log.segments) == 11
    assert len(contents(other)) == 3
    assert caplog.text.count("not tried again") == 1


# -- the swap ------------------------------------------------------------------------------------------------


def every_step(prepare: Callable[[FaultyFileSystem], PartitionLog]) -> int:
    """How many disk operations a cleaning takes."""
    fs = FaultyFileSystem()
    log = prepare(fs)
    before = fs.steps
    clean(log)
    return fs.steps - before


def test_a_kill_at_any_step_of_a_cleaning_leaves_the_old_log_or_the_new_one() -> None:
    def prepare(fs: FaultyFileSystem) -> PartitionLog:
        log = make_log(fs, cleanup_policy=COMPACT, segment_bytes=400, index_interval_bytes=100)
        return filled(log, 6)

    count = every_step(prepare)
    assert count > 30
    seen = set()
    for step in range(count):
        fs = FaultyFileSystem()
        log = prepare(fs)
        model, end_offset, config = table(log), log.log_end_offset, log.config
        fs.cut_power_after(step)
        with pytest.raises(PowerCut):
            clean(log)
        fs.heal()  # killed, not without power: all that was written is there
        seen.add(tuple({name.rpartition(".")[2] for name in fs.listdir(DIRECTORY)} & {"cleaned", "swap"}))
        again = open_log(fs, DIRECTORY, "topic", 0, config, clean=False, recovery_point=log.recovery_point)
        assert table(again) == model and again.log_end_offset == end_offset
        check_indexes(again)
        names = fs.listdir(DIRECTORY)
        assert not [name for name in names if name.endswith((".cleaned", ".swap", ".deleted"))]
        put(again, (b"a", b"new"))
        assert read_all(again)
    assert ("swap",) in seen and ("cleaned",) in seen


def test_a_swap_takes_the_place_of_all_it_was_made_from() -> None:
    log = filled(compacted(), 4)
    before = table(log)
    path = log.segments[0].log_path
    originals = {segment.log_path: segment.file().pread(segment.size, 0) for segment in log.segments[:-1]}
    clean(log)
    cleaned = log.segments[0].file().pread(log.segments[0].size, 0)
    log.flush()
    for name, data in originals.items():
        log.fs.remove(name) if log.fs.exists(name) else None
        log.fs.open(name, create=True).pwrite(data, 0)
    log.fs.open(path + ".swap", create=True).pwrite(cleaned, 0)
    again = open_log(log.fs, DIRECTORY, "topic", 0, log.config, clean=False)
    assert len(again.segments) == 2 and len(contents(again)) == 3
    assert table(again) == before and again.log_end_offset == 12
