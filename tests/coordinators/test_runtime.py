"""The runtime over a real partition log: replies wait for the log, a reload replays it, loading takes turns."""

from collections.abc import Callable

import pytest

from headrace.base.clock import ManualClock
from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.settings import broker_config, topic_config
from headrace.coordinators.effects import Effects
from headrace.coordinators.group_shard import Commit, CommitResult, Committer, GroupShard
from headrace.coordinators.runtime import LOAD_BYTES_A_TURN, CoordinatorRuntime
from headrace.replication.partition import Partition
from headrace.storage.log import PartitionLog
from headrace.storage.memory import MemoryFileSystem

SIMPLE = Committer("g", "", None, -1, -1, 8)


class Alarm:
    def __init__(self, at_ms: float, callback: Callable[[], None]) -> None:
        self.at_ms, self.callback, self.cancelled = at_ms, callback, False

    def cancel(self) -> None:
        self.cancelled = True


class World:
    """One partition in memory, timers that go off when told to."""

    def __init__(self, **overrides: str) -> None:
        self.clock = ManualClock(1_700_000_000_000)
        fs = MemoryFileSystem()
        fs.makedirs("offsets-0")
        config = topic_config({name.replace("_", "."): value for name, value in overrides.items()})
        log = PartitionLog(fs, "offsets-0", "__consumer_offsets", 0, config)
        self.partition = Partition("__consumer_offsets", bytes(16), 0, 0, log)
        self.alarms: list[Alarm] = []
        self.flushes = 0
        self.broken: KafkaError | None = None

    def coordinator_partition(self, index: int) -> Partition:
        if self.broken is not None:
            raise self.broken
        return self.partition

    def flush(self, partition: Partition) -> None:
        self.flushes += 1

    def call_later(self, delay_ms: float, callback: Callable[[], None]) -> Alarm:
        self.alarms.append(Alarm(self.clock.monotonic_ms() + delay_ms, callback))
        return self.alarms[-1]

    def now_ms(self) -> int:
        return self.clock.now_ms()

    def monotonic_ms(self) -> float:
        return self.clock.monotonic_ms()

    def write_timeout_ms(self) -> int:
        return 5000

    def compression(self) -> int:
        return 0

    def advance(self, ms: int) -> None:
        """Move the clock, and set off what is due by then."""
        self.clock.advance(ms)
        now_ms = self.clock.monotonic_ms()
        due = [alarm for alarm in self.alarms if alarm.at_ms <= now_ms]
        self.alarms = [alarm for alarm in self.alarms if alarm.at_ms > now_ms]
        for alarm in due:
            if not alarm.cancelled:
                alarm.callback()

    def flushed(self) -> None:
        """The disk has everything that was appended so far."""
        ticket = self.partition.log.begin_flush()
        assert ticket is not None
        ticket.run()
        self.partition.log.finish_flush(ticket, None)
        self.partition.on_flushed()


def runtime(world: World) -> CoordinatorRuntime[GroupShard]:
    config = broker_config({})
    made: CoordinatorRuntime[GroupShard] = CoordinatorRuntime(
        world, lambda: GroupShard(lambda: config, lambda: "id")
    )
    made.open(1)
    return made


def commit(groups: CoordinatorRuntime[GroupShard], offset: int, metadata: str = "") -> list[CommitResult]:
    told: list[CommitResult] = []

    def step(machine: GroupShard, now_ms: int, out: Effects) -> None:
        machine.commit(SIMPLE, [Commit("t", 0, offset, -1, metadata)], told.append, now_ms, out)

    groups.shard(0).run(step)
    return told


def committed(groups: CoordinatorRuntime[GroupShard]) -> int:
    value = groups.shard(0).machine.offsets.get("g", "t", 0)
    return -1 if value is None else value.offset


def test_a_commit_is_told_and_shown_when_the_log_has_it() -> None:
    groups = runtime(World())
    assert commit(groups, 5) == [[("t", 0, ErrorCode.NONE)]]
    assert committed(groups) == 5


def test_a_commit_waits_for_the_disk_where_the_topic_asks_for_that() -> None:
    world = World(flush_messages="1")
    groups = runtime(world)
    told = commit(groups, 5)
    assert (told, committed(groups), world.flushes) == ([], -1, 1)
    world.flushed()
    assert (told, committed(groups)) == ([[("t", 0, ErrorCode.NONE)]], 5)


def test_a_commit_that_takes_too_long_is_told_as_failed_once_and_may_still_count() -> None:
    world = World(flush_messages="1")
    groups = runtime(world)
    told = commit(groups, 5)
    world.advance(5000)
    assert told == [[("t", 0, ErrorCode.COORDINATOR_NOT_AVAILABLE)]]
    world.flushed()
    assert len(told) == 1
    assert committed(groups) == 5


def test_a_failing_disk_fails_the_commit() -> None:
    world = World()
    groups = runtime(world)
    assert commit(groups, 5)
    world.broken = KafkaError(ErrorCode.KAFKA_STORAGE_ERROR)
    assert commit(groups, 6) == [[("t", 0, ErrorCode.NOT_COORDINATOR)]]
    assert committed(groups) == 5


def test_records_larger_than_the_topic_takes_are_refused() -> None:
    world = World(max_message_bytes="200")
    groups = runtime(world)
    assert commit(groups, 5, "m" * 300) == [[("t", 0, ErrorCode.INVALID_COMMIT_OFFSET_SIZE)]]
    assert world.partition.log.log_end_offset == 0


def test_a_new_runtime_replays_the_log_in_turns_and_refuses_meanwhile() -> None:
    world = World()
    groups = runtime(world)
    count = 0
    while world.partition.log.size_bytes < 2.5 * LOAD_BYTES_A_TURN:
        count += 1
        commit(groups, count, "m" * 4000)
    groups.close()
    again = runtime(world)
    with pytest.raises(KafkaError) as refused:
        again.shard(0)
    assert refused.value.code is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    for _ in range(5):
        world.advance(1)
    assert committed(again) == count


def test_a_partition_that_cannot_be_read_is_tried_again() -> None:
    world = World()
    world.broken = KafkaError(ErrorCode.KAFKA_STORAGE_ERROR)
    groups = runtime(world)
    world.advance(1)
    with pytest.raises(KafkaError):
        groups.shard(0)
    world.broken = None
    world.advance(1000)
    assert commit(groups, 5) == [[("t", 0, ErrorCode.NONE)]]


def test_a_runtime_without_its_topic_is_not_available() -> None:
    groups = runtime(World())
    groups.close()
    with pytest.raises(KafkaError) as refused:
        groups.shard(0)
    assert refused.value.code is ErrorCode.COORDINATOR_NOT_AVAILABLE
