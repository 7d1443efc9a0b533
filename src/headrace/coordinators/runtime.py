"""Runs the state machines of an internal topic: one for each partition that this broker leads.

Owns loading, storing and timers. A machine is loaded by replaying its partition, a slice a turn of the loop, with
COORDINATOR_LOAD_IN_PROGRESS meanwhile. A step's records are appended as one batch; when they are committed (below the
high watermark, and on disk where the topic asks for that), the machine replays them if it has to and whoever waits is
told. Invariants: machines see time and chance only as arguments; what waits for records is told after they are
committed, in the order of the log; a write that takes longer than the timeout is told as failed, and still counts when
it is committed after all. The world is handed in: partitions, a scheduler, a clock, the flusher. The broker calls it.
"""

from collections import deque
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

from headrace.base.clock import Timer
from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.log import get_logger
from headrace.coordinators.effects import Effects, TimerKey, Write
from headrace.coordinators.group_states import append_error
from headrace.records.builder import build_batch, iter_batches, iter_records
from headrace.replication.partition import Partition

LOAD_BYTES_A_TURN: Final = 1 << 18
LOAD_RETRY_MS: Final = 1000

logger = get_logger(__name__)


class Machine(Protocol):
    """A coordinator's state machine."""

    def replay(self, key: bytes, value: bytes | None) -> None: ...

    def loaded(self, now_ms: int, out: Effects) -> None: ...

    def unload(self, error: ErrorCode, now_ms: int, out: Effects) -> None: ...

    def on_timer(self, key: TimerKey, now_ms: int, out: Effects) -> None: ...


M = TypeVar("M", bound=Machine)


class World(Protocol):
    """What the runtime needs of the broker around it."""

    def coordinator_partition(self, index: int) -> Partition:
        """The partition of the internal topic, or KafkaError."""
        ...

    def flush(self, partition: Partition) -> None: ...

    def call_later(self, delay_ms: float, callback: Callable[[], None]) -> Timer: ...

    def now_ms(self) -> int: ...

    def monotonic_ms(self) -> float: ...

    def write_timeout_ms(self) -> int: ...

    def compression(self) -> int:
        """The codec that records are stored with."""
        ...


class _Alarm:
    """A timer that is moved by writing a number: a heartbeat must not cost a new timer."""

    __slots__ = ("due_ms", "timer")

    def __init__(self, due_ms: float, timer: Timer) -> None:
        self.due_ms = due_ms
        self.timer = timer


class Shard(Generic[M]):
    """One partition and its machine."""

    def __init__(self, index: int, machine: M, world: World) -> None:
        self.index = index
        self.machine = machine
        self.active = False
        self.closed = False
        self._world = world
        self._alarms: dict[TimerKey, _Alarm] = {}
        self._loaded_to = 0

    @property
    def is_begun(self) -> bool:
        """Whether some of it is loaded, and not all."""
        return not self.active and self._loaded_to > 0

    # -- loading -------------------------------------------------------------------------------------------------------

    def load_some(self) -> None:
        """Replay a slice; active once all is replayed. KafkaError when the partition cannot be read."""
        partition = self._world.coordinator_partition(self.index)
        log = partition.log
        offset = max(log.log_start_offset, self._loaded_to)
        end = partition.high_watermark
        if offset < end:
            data = log.read(offset, LOAD_BYTES_A_TURN, max_offset=end).read()
            next_offset = end
            for header, batch in iter_batches(data, check_crc=False):
                if not header.is_control:
                    for record in iter_records(batch):
                        if record.key is not None and record.offset >= offset:
                            self.machine.replay(record.key, record.value)
                next_offset = header.next_offset
            offset = next_offset
        self._loaded_to = offset
        if offset >= end:
            self.active = True
            self.run(lambda machine, now_ms, out: machine.loaded(now_ms, out))

    def close(self, error: ErrorCode) -> None:
        """Give the partition up."""
        out = Effects()
        if self.active:
            self.machine.unload(error, self._world.now_ms(), out)
        self.closed, self.active = True, False
        for alarm in self._alarms.values():
            alarm.timer.cancel()
        self._alarms.clear()
        for ticket, body in out.replies:
            ticket(body)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def run(self, step: Callable[[M, int, Effects], None]) -> None:
        """One step of the machine, and what it asks for."""
        out = Effects()
        step(self.machine, self._world.now_ms(), out)
        self._carry_out(out)

    def _carry_out(self, out: Effects) -> None:
        if not self.closed:
            for key, delay_ms in out.timers.items():
                self._set(key, delay_ms)
        for ticket, body in out.replies:
            ticket(body)
        for write in out.writes:
            self._store(write)

    def _store(self, write: Write) -> None:
        try:
            if self.closed:
                raise KafkaError(ErrorCode.NOT_LEADER_OR_FOLLOWER)
            partition = self._world.coordinator_partition(self.index)
            now_ms = self._world.now_ms()
            records = [(now_ms, key, value, ()) for key, value in write.records]
            batch = build_batch(records, compression=self._world.compression())
            if len(batch) > partition.log.config.max_message_bytes:
                raise KafkaError(ErrorCode.MESSAGE_TOO_LARGE, f"{len(batch)} bytes of records at once")
            appended = partition.append_from_coordinator(batch, now_ms)
        except KafkaError as error:
            self._told(write, error.code)
            return
        end = appended.last_offset + 1
        if appended.flush_due:
            self._world.flush(partition)
        if partition.is_safe(end, appended.flush_due, True):
            self._committed(write)
            self._told(write, ErrorCode.NONE)
        else:
            self._wait(write, partition, end, appended.flush_due)

    def _wait(self, write: Write, partition: Partition, end: int, flushed: bool) -> None:
        waiting = True

        def once(error: ErrorCode) -> None:
            nonlocal waiting
            if waiting:
                waiting = False
                timer.cancel()
                self._told(write, error)

        def done(error: ErrorCode) -> None:
            if error is ErrorCode.NONE:
                self._committed(write)
            once(error)

        timer = self._world.call_later(
            self._world.write_timeout_ms(), lambda: once(ErrorCode.REQUEST_TIMED_OUT)
        )
        partition.when_safe(end, flushed, True, done)

    def _committed(self, write: Write) -> None:
        if write.replayed and not self.closed:
            for key, value in write.records:
                self.machine.replay(key, value)

    def _told(self, write: Write, error: ErrorCode) -> None:
        if error is not ErrorCode.NONE:
            logger.warning(
                "records of a coordinator are not stored",
                extra={"fields": {"partition": self.index, "error": error.name}},
            )
        if write.then is not None:
            then = write.then
            out = Effects()
            then(error, self._world.now_ms(), out)
            self._carry_out(out)

    # -- timers --------------------------------------------------------------------------------------------------------

    def _set(self, key: TimerKey, delay_ms: int | None) -> None:
        alarm = self._alarms.get(key)
        if delay_ms is None:
            if alarm is not None:
                alarm.timer.cancel()
                del self._alarms[key]
            return
        due_ms = self._world.monotonic_ms() + delay_ms
        if alarm is not None:
            if due_ms >= alarm.due_ms:
                alarm.due_ms = due_ms  # the timer finds out when it goes off
                return
            alarm.timer.cancel()
        self._alarms[key] = _Alarm(due_ms, self._world.call_later(delay_ms, lambda: self._ring(key)))

    def _ring(self, key: TimerKey) -> None:
        alarm = self._alarms[key]
        left_ms = alarm.due_ms - self._world.monotonic_ms()
        if left_ms > 0:
            alarm.timer = self._world.call_later(left_ms, lambda: self._ring(key))
            return
        del self._alarms[key]
        self.run(lambda machine, now_ms, out: machine.on_timer(key, now_ms, out))


class CoordinatorRuntime(Generic[M]):
    """The shards of one internal topic."""

    def __init__(self, world: World, new_machine: Callable[[], M]) -> None:
        self._world = world
        self._new_machine = new_machine
        self._shards: list[Shard[M]] = []
        self._loading: deque[Shard[M]] = deque()
        self._loader: Timer | None = None

    @property
    def partition_count(self) -> int:
        """How many partitions the internal topic has; 0 as long as it does not exist."""
        return len(self._shards)

    def open(self, count: int) -> None:
        """The internal topic is there, with this many partitions."""
        while len(self._shards) < count:
            shard = Shard(len(self._shards), self._new_machine(), self._world)
            self._shards.append(shard)
            self._loading.append(shard)
        self._load_later(0)

    def close(self, error: ErrorCode = ErrorCode.NOT_COORDINATOR) -> None:
        """Give up all partitions: the topic is gone, or the broker stops."""
        if self._loader is not None:
            self._loader.cancel()
            self._loader = None
        self._loading.clear()
        shards, self._shards = self._shards, []
        for shard in shards:
            shard.close(error)

    def shard(self, index: int) -> Shard[M]:
        """The shard, or the error that a client is to get until it can answer.

        One that is asked for need not wait for its turn: a slice of it is loaded at once, and most are no more.
        """
        if not self._shards:
            raise KafkaError(ErrorCode.COORDINATOR_NOT_AVAILABLE)
        shard = self._shards[index]
        if not shard.active:
            try:
                shard.load_some()
            except KafkaError as error:
                raise KafkaError(append_error(error.code), error.message) from None
            if not shard.active:
                raise KafkaError(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
        return shard

    def active(self) -> list[Shard[M]]:
        """All shards; COORDINATOR_LOAD_IN_PROGRESS while one is still loading."""
        if any(shard.is_begun for shard in self._shards):
            raise KafkaError(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
        return [self.shard(index) for index in range(len(self._shards))]

    def _load_later(self, delay_ms: int) -> None:
        if self._loading and self._loader is None:
            self._loader = self._world.call_later(delay_ms, self._load_turn)

    def _load_turn(self) -> None:
        """A slice of one shard; the others wait their turn, and so does nobody else for long."""
        self._loader = None
        shard = self._loading.popleft()
        delay_ms = 0
        if not shard.active:
            try:
                shard.load_some()
            except KafkaError as error:
                fields = {"partition": shard.index, "why": str(error)}
                logger.error("a coordinator cannot load", extra={"fields": fields})
                delay_ms = LOAD_RETRY_MS
            if not shard.active:
                self._loading.append(shard)
        self._load_later(delay_ms)
