"""One partition of an internal topic and its state machine: loading, storing, timers.

A machine is loaded by replaying its partition up to where the log ended when this broker came to lead it, and not
before all of that is committed: what an earlier leader acknowledged is there, what is shown cannot be undone. Records
that the steps of one turn of the loop ask for are appended together, as few batches as they fit in; when they are
committed (below the high watermark, and on disk where the topic asks for that), the machine replays those it has not
taken up yet, and whoever waits is told. Invariants: machines see time only as an argument; what waits for records is
told after they are committed, in the order of the log, once; a write that takes longer than the timeout is told as
failed, and still counts when it is committed after all; nothing is appended in another leader epoch than the one the
shard was loaded in. The runtime owns shards; the world around them is handed in.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Generic, Protocol, TypeVar

from headrace.base.clock import Timer
from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.log import get_logger
from headrace.coordinators.effects import Effects, TimerKey, Write
from headrace.records.batch import NO_PRODUCER_EPOCH, NO_PRODUCER_ID
from headrace.records.builder import build_batch, iter_batches, iter_records
from headrace.replication.partition import Partition
from headrace.storage.markers import EndTransactionMarker, parse_marker

LOAD_BYTES_A_TURN: Final = 1 << 18
RECORD_OVERHEAD_BYTES_MAX: Final = 32
"""What a record of a batch takes beside its key and value, at most."""

logger = get_logger(__name__)


class Machine(Protocol):
    """A coordinator's state machine."""

    def replay(self, key: bytes, value: bytes | None) -> None: ...

    def replay_open(self, producer_id: int, key: bytes, value: bytes | None) -> None:
        """Take up a committed record of a transaction that is open."""
        ...

    def end_transaction(self, producer_id: int, committed: bool) -> None:
        """A committed marker says how the producer's open transaction ended."""
        ...

    def loaded(self, now_ms: int, out: Effects) -> None: ...

    def unload(self, error: ErrorCode, now_ms: int, out: Effects) -> None: ...

    def on_timer(self, key: TimerKey, now_ms: int, out: Effects) -> None: ...


M = TypeVar("M", bound=Machine)


class World(Protocol):
    """What shards need of the broker around them."""

    def coordinator_partition(self, index: int) -> Partition:
        """The partition of the internal topic if this broker leads it, or KafkaError."""
        ...

    def is_cut_off(self, index: int) -> bool:
        """Whether another may lead the partition by now, and take what this broker never hears of."""
        ...

    def check_writable(self, partition: Partition) -> None:
        """Raise KafkaError when too few replicas would hold what is appended now."""
        ...

    def flush(self, partition: Partition) -> None: ...

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call back when all that came in with this turn of the loop is worked off."""
        ...

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
    """One partition, led in one epoch, and its machine."""

    def __init__(
        self, index: int, epoch: int, machine: M, world: World, lost: Callable[["Shard[M]"], None]
    ) -> None:
        self.index = index
        self.epoch = epoch
        self.machine = machine
        self.active = False
        self.closed = False
        self.failed_to_load = False
        self._world = world
        self._lost = lost
        self._queue: list[Write] = []
        self._alarms: dict[TimerKey, _Alarm] = {}
        self._loaded_to = 0
        self._load_end = -1

    @property
    def is_begun(self) -> bool:
        """Whether some of it is loaded, and not all."""
        return not self.active and self._loaded_to > 0

    # -- loading -------------------------------------------------------------------------------------------------------

    def load_some(self) -> bool:
        """Replay a slice; active once all is replayed. Whether there is more to read at once, or it has to wait.

        KafkaError when the partition cannot be read.
        """
        partition = self._partition()
        log = partition.log
        if self._load_end < 0:
            self._load_end = log.log_end_offset
        offset = max(log.log_start_offset, self._loaded_to)
        end = partition.high_watermark
        if offset < end:
            data = log.read(offset, LOAD_BYTES_A_TURN, max_offset=end).read()
            next_offset = end
            machine = self.machine
            for header, batch in iter_batches(data, check_crc=False):
                control, transactional = header.is_control, header.is_transactional
                for record in iter_records(batch):
                    if record.key is None or record.offset < offset:
                        continue
                    if control:
                        self._end_transaction(header.producer_id, parse_marker(record.key, record.value))
                    elif transactional:
                        machine.replay_open(header.producer_id, record.key, record.value)
                    else:
                        machine.replay(record.key, record.value)
                next_offset = header.next_offset
            offset = next_offset
        self._loaded_to = offset
        if offset < end:
            return True
        if offset >= self._load_end:
            self.active = True
            self.run(lambda machine, now_ms, out: machine.loaded(now_ms, out))
        return False

    def _end_transaction(self, producer_id: int, marker: EndTransactionMarker | None) -> None:
        if marker is not None and not self.closed:
            self.machine.end_transaction(producer_id, marker.committed)

    def close(self, error: ErrorCode) -> None:
        """Give the partition up."""
        if self.closed:
            return
        out = Effects()
        if self.active:
            self.machine.unload(error, self._world.now_ms(), out)
        self.closed, self.active = True, False
        for alarm in self._alarms.values():
            alarm.timer.cancel()
        self._alarms.clear()
        for ticket, body in out.replies:
            ticket(body)
        queue, self._queue = self._queue, []
        for write in queue:
            self._told(write, error)

    def _partition(self) -> Partition:
        """The partition, as long as it is led in the epoch of this shard."""
        if not self.closed:
            partition = self._world.coordinator_partition(self.index)
            if partition.leader_epoch == self.epoch:
                return partition
        raise KafkaError(ErrorCode.NOT_LEADER_OR_FOLLOWER, "the partition is led by another, or anew")

    # -- steps ---------------------------------------------------------------------------------------------------------

    def run(self, step: Callable[[M, int, Effects], None]) -> None:
        """One step of the machine, and what it asks for."""
        out = Effects()
        step(self.machine, self._world.now_ms(), out)
        self.carry_out(out)

    def carry_out(self, out: Effects) -> None:
        """What a step of the machine asked for."""
        if out.timers and not self.closed:
            for key, delay_ms in out.timers.items():
                self._set(key, delay_ms)
        for ticket, body in out.replies:
            ticket(body)
        if out.writes:
            if self.closed:
                for write in out.writes:
                    self._told(write, ErrorCode.NOT_LEADER_OR_FOLLOWER)
                return
            if not self._queue:
                self._world.call_soon(self._store_queued)
            self._queue += out.writes

    # -- storing -------------------------------------------------------------------------------------------------------

    def _store_queued(self) -> None:
        """Append what the steps of this turn asked for."""
        queue, self._queue = self._queue, []
        if not queue:
            return  # closed meanwhile
        try:
            partition = self._partition()
            self._world.check_writable(partition)
        except KafkaError as error:
            self._failed(queue, error.code)
            return
        for writes in _batches(queue, partition.log.config.max_message_bytes):
            self._store(partition, writes)

    def _store(self, partition: Partition, writes: Sequence[Write]) -> None:
        try:
            now_ms = self._world.now_ms()
            records = [(now_ms, key, value, ()) for write in writes for key, value in write.records]
            producer = writes[0].producer
            batch = build_batch(
                records,
                compression=self._world.compression(),
                producer_id=NO_PRODUCER_ID if producer is None else producer[0],
                producer_epoch=NO_PRODUCER_EPOCH if producer is None else producer[1],
                transactional=producer is not None,
            )
            if len(batch) > partition.log.config.max_message_bytes:
                raise KafkaError(ErrorCode.MESSAGE_TOO_LARGE, f"{len(batch)} bytes of records at once")
            if self.closed:  # a batch before this one could not be stored
                raise KafkaError(ErrorCode.NOT_LEADER_OR_FOLLOWER)
            appended = partition.append_from_coordinator(batch, now_ms)
        except KafkaError as error:
            self._failed(writes, error.code)
            return
        end = appended.last_offset + 1
        if appended.flush_due:
            self._world.flush(partition)
        if partition.is_safe(end, appended.flush_due, True):
            self._committed(writes, telling=True)
        else:
            self._wait(writes, partition, end, appended.flush_due)

    def _wait(self, writes: Sequence[Write], partition: Partition, end: int, flushed: bool) -> None:
        waiting = True

        def overdue() -> None:
            nonlocal waiting
            waiting = False
            for write in writes:
                self._told(write, ErrorCode.REQUEST_TIMED_OUT)

        def done(error: ErrorCode) -> None:
            nonlocal waiting
            telling, waiting = waiting, False
            timer.cancel()
            if error is ErrorCode.NONE:
                self._committed(writes, telling)
            else:
                self._failed(writes, error, telling)

        timer = self._world.call_later(self._world.write_timeout_ms(), overdue)
        partition.when_safe(end, flushed, True, done)

    def _committed(self, writes: Sequence[Write], telling: bool) -> None:
        machine, now_ms, out = self.machine, self._world.now_ms(), Effects()
        for records, then, replayed, _, producer in writes:
            if replayed and not self.closed:
                for key, value in records:
                    if producer is None:
                        machine.replay(key, value)
                    else:
                        machine.replay_open(producer[0], key, value)
            if telling and then is not None:
                then(ErrorCode.NONE, now_ms, out)
        self.carry_out(out)

    def _failed(self, writes: Sequence[Write], error: ErrorCode, telling: bool = True) -> None:
        """Records that are not stored. A machine that is ahead of its log by them has to be loaded anew."""
        logger.warning(
            "records of a coordinator are not stored",
            extra={"fields": {"partition": self.index, "error": error.name, "writes": len(writes)}},
        )
        if telling:
            for write in writes:
                self._told(write, error)
        if any(write.ahead for write in writes) and not self.closed:
            self._lost(self)

    def _told(self, write: Write, error: ErrorCode) -> None:
        if write.then is not None:
            out = Effects()
            write.then(error, self._world.now_ms(), out)
            self.carry_out(out)

    def append_marker(
        self, batch: bytes, producer_id: int, marker: EndTransactionMarker, done: Callable[[ErrorCode], None]
    ) -> None:
        """Append the control batch that ends a producer's transaction; told when it is committed and has its effect."""
        self._store_queued()  # what came before the marker must not come after it
        partition = self._partition()
        appended = partition.append_from_coordinator(batch, self._world.now_ms())
        end = appended.last_offset + 1

        def committed(error: ErrorCode) -> None:
            if error is ErrorCode.NONE:
                self._end_transaction(producer_id, marker)
            done(error)

        if appended.flush_due:
            self._world.flush(partition)
        if partition.is_safe(end, appended.flush_due, True):
            committed(ErrorCode.NONE)
        else:
            partition.when_safe(end, appended.flush_due, True, committed)

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


def _batches(writes: Sequence[Write], bytes_max: int) -> Iterator[list[Write]]:
    """The writes in order, as many together as surely fit into a batch. A write is never split.

    A transaction has its own batches: their headers say whose it is.
    """
    gathered: list[Write] = []
    size = 0
    for write in writes:
        more = 0
        for key, value in write.records:
            more += len(key) + (0 if value is None else len(value)) + RECORD_OVERHEAD_BYTES_MAX
        if gathered and (size + more > bytes_max or write.producer != gathered[0].producer):
            yield gathered
            gathered, size = [], 0
        gathered.append(write)
        size += more
    yield gathered
