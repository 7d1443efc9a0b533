"""The runtime over a real partition log: replies wait for the log, a reload replays it, loading takes turns."""

from collections.abc import Callable
from typing import cast

import pytest

from headrace.base.clock import ManualClock
from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.settings import broker_config, topic_config
from headrace.cluster.image import PartitionRegistration, TopicImage
from headrace.coordinators.effects import Effects
from headrace.coordinators.group_shard import Commit, CommitResult, Committer, GroupShard
from headrace.coordinators.records import OffsetValue, offset_key, offset_value
from headrace.coordinators.runtime import LOAD_BYTES_A_TURN, CoordinatorRuntime
from headrace.records.builder import iter_batches
from headrace.replication.partition import Partition
from headrace.storage.log import PartitionLog
from headrace.storage.memory import MemoryFileSystem

HERE, ELSEWHERE = 0, 1
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
        self.soon: list[Callable[[], None]] = []
        self.flushes = 0
        self.broken: KafkaError | None = None
        self.too_few_replicas = False

    def coordinator_partition(self, index: int) -> Partition:
        if self.broken is not None:
            raise self.broken
        return self.partition

    def is_cut_off(self, index: int) -> bool:
        return self.partition.cut_off

    def check_writable(self, partition: Partition) -> None:
        if self.too_few_replicas:
            raise KafkaError(ErrorCode.NOT_ENOUGH_REPLICAS)

    def flush(self, partition: Partition) -> None:
        self.flushes += 1

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.soon.append(callback)

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

    def turn(self) -> None:
        """What came in with this turn of the loop is worked off."""
        soon, self.soon = self.soon, []
        for callback in soon:
            callback()

    def advance(self, ms: int) -> None:
        """Move the clock, and set off what is due by then."""
        self.clock.advance(ms)
        now_ms = self.clock.monotonic_ms()
        due = [alarm for alarm in self.alarms if alarm.at_ms <= now_ms]
        self.alarms = [alarm for alarm in self.alarms if alarm.at_ms > now_ms]
        for alarm in due:
            if not alarm.cancelled:
                alarm.callback()
        self.turn()

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
    made.follow(led(0, 0), HERE)
    return made


def led(leader: int, epoch: int) -> TopicImage:
    """The internal topic with its one partition led so."""
    return TopicImage(
        "__consumer_offsets", bytes(16), (PartitionRegistration((0, 1), (0,), leader, epoch, 0),)
    )


def commit(
    groups: CoordinatorRuntime[GroupShard], offset: int, metadata: str = "", group: str = "g"
) -> list[CommitResult]:
    """Commit, and have the turn of the loop end."""
    told = ask_commit(groups, offset, metadata, group)
    cast("World", groups._world).turn()
    return told


def ask_commit(
    groups: CoordinatorRuntime[GroupShard], offset: int, metadata: str = "", group: str = "g"
) -> list[CommitResult]:
    told: list[CommitResult] = []

    def step(machine: GroupShard, now_ms: int, out: Effects) -> None:
        machine.commit(
            SIMPLE._replace(group_id=group), [Commit("t", 0, offset, -1, metadata)], told.append, now_ms, out
        )

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


# -- one append for many -----------------------------------------------------------------------------------------------


def test_the_writes_of_a_turn_are_one_batch_of_the_log() -> None:
    world = World()
    groups = runtime(world)
    groups.shard(0)
    told = [ask_commit(groups, number, group=f"g{number}") for number in range(20)]
    assert not any(told)
    world.turn()
    assert all(told)
    data = world.partition.log.read(0, 1 << 20, max_offset=20).read()
    assert [header.record_count for header, _ in iter_batches(data)] == [20]


def test_writes_that_do_not_fit_into_one_batch_are_several() -> None:
    world = World(max_message_bytes="1000")
    groups = runtime(world)
    groups.shard(0)
    told = [ask_commit(groups, number, "m" * 200) for number in range(10)]
    too_large = ask_commit(groups, 11, "m" * 2000)
    world.turn()
    assert all(each == [[("t", 0, ErrorCode.NONE)]] for each in told)
    assert too_large == [[("t", 0, ErrorCode.INVALID_COMMIT_OFFSET_SIZE)]]
    assert committed(groups) == 9


def test_too_few_replicas_refuse_a_commit() -> None:
    world = World()
    groups = runtime(world)
    world.too_few_replicas = True
    assert commit(groups, 5) == [[("t", 0, ErrorCode.COORDINATOR_NOT_AVAILABLE)]]
    assert world.partition.log.log_end_offset == 0


# -- following leadership ----------------------------------------------------------------------------------------------


def test_a_shard_is_closed_when_leadership_goes_and_loaded_anew_when_it_comes_back() -> None:
    world = World()
    groups = runtime(world)
    commit(groups, 5)
    unstored = ask_commit(groups, 6)
    groups.follow(led(ELSEWHERE, 1), HERE)
    assert unstored == [[("t", 0, ErrorCode.NOT_COORDINATOR)]]
    with pytest.raises(KafkaError) as refused:
        groups.shard(0)
    assert refused.value.code is ErrorCode.NOT_COORDINATOR
    world.turn()
    assert world.partition.log.log_end_offset == 1
    world.partition.leader_epoch = 2
    groups.follow(led(HERE, 2), HERE)
    assert committed(groups) == 5


def test_a_coordinator_that_is_cut_off_tells_nothing_that_may_be_old() -> None:
    world = World()
    groups = runtime(world)
    commit(groups, 5)
    world.partition.cut_off = True
    with pytest.raises(KafkaError) as refused:
        groups.shard(0)
    assert refused.value.code is ErrorCode.NOT_COORDINATOR
    assert groups.active() == []
    assert groups.held(0).machine.offsets.get("g", "t", 0) is not None, "what it has begun goes on"
    world.partition.cut_off = False
    assert committed(groups) == 5


def test_an_epoch_later_with_the_same_leader_keeps_the_shard() -> None:
    world = World()
    groups = runtime(world)
    commit(groups, 5)
    shard = groups.shard(0)
    world.partition.leader_epoch = 1
    groups.follow(led(HERE, 1), HERE)
    assert groups.shard(0) is shard
    assert commit(groups, 6) == [[("t", 0, ErrorCode.NONE)]]


def test_leadership_that_was_away_in_between_loads_anew() -> None:
    world = World()
    groups = runtime(world)
    commit(groups, 5)
    shard = groups.shard(0)
    world.partition.leader_epoch = 2
    groups.follow(led(HERE, 2), HERE)
    assert groups.shard(0) is not shard
    assert committed(groups) == 5


def test_nothing_is_stored_in_an_epoch_that_the_shard_was_not_loaded_in() -> None:
    world = World()
    groups = runtime(world)
    commit(groups, 5)
    world.partition.leader_epoch = 3
    assert commit(groups, 6) == [[("t", 0, ErrorCode.NOT_COORDINATOR)]]
    assert world.partition.log.log_end_offset == 1


def test_a_shard_answers_only_when_all_that_its_log_had_is_committed() -> None:
    world = World()
    groups = runtime(world)
    commit(groups, 5)
    groups.close()
    world.partition.high_watermark = 0  # as a new leader knows it, before its followers have reported
    again = runtime(world)
    for _ in range(3):
        world.advance(10)
        with pytest.raises(KafkaError) as refused:
            again.shard(0)
        assert refused.value.code is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    world.partition.high_watermark = 1
    world.advance(10)
    assert committed(again) == 5


def test_a_machine_ahead_of_a_log_that_refused_its_records_is_loaded_anew() -> None:
    world = World()
    groups = runtime(world)
    commit(groups, 5)
    shard = groups.shard(0)
    told: list[ErrorCode] = []

    def step(machine: GroupShard, now_ms: int, out: Effects) -> None:
        records = [(offset_key("g", "t", 0), offset_value(OffsetValue(9, -1, "", now_ms)))]
        for record in records:
            machine.replay(*record)
        out.store(records, lambda error, now_ms, out: told.append(error), ahead=True)

    shard.run(step)
    assert committed(groups) == 9
    world.too_few_replicas = True
    world.turn()
    assert told == [ErrorCode.NOT_ENOUGH_REPLICAS]
    assert groups.shard(0) is not shard
    assert committed(groups) == 5
