"""Any history of appends, flushes, rolls and deletions, cut by power losses at any moment: what is promised holds.

The disk is `FaultyFileSystem`: what was not synced is dropped, torn, reordered by pages or has flipped bits after a
crash, and the power may go in the middle of any single operation of a step, also of recovery itself.
"""

import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from headrace.base.errors import KafkaError
from headrace.base.settings import TopicConfig
from headrace.records.batch import parse_header
from headrace.storage import scan
from headrace.storage.epochs import EpochCache
from headrace.storage.faulty import FaultyFileSystem, PowerCut
from headrace.storage.log import PartitionLog
from headrace.storage.producer_state import ProducerState
from headrace.storage.recovery import open_log
from tests.storage.workbench import DIRECTORY, NOW_MS, check_indexes, headers_of, make_batch, read_all

# A failing history takes long to shrink, and is worth it.
pytestmark = pytest.mark.timeout(600)

CONFIG = TopicConfig(
    segment_bytes=3000,
    index_interval_bytes=300,
    retention_bytes=9000,
    retention_ms=10_000,
    max_message_bytes=3000,
    segment_ms=5_000,
)


class Written(NamedTuple):
    """One batch as it was appended: with its offsets, so bit for bit as it must be read."""

    first_offset: int
    end_offset: int
    data: bytes


class Machine:
    """A partition on a disk that loses power, and what a careful observer knows of it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.fs = FaultyFileSystem()
        self.fs.makedirs(DIRECTORY)
        self.fs.sync_dir("")
        self.now_ms = NOW_MS
        self.epoch = 0
        self.log = self._new_log()
        # All batches of the log's history, in order; the last may be one whose append the power cut interrupted.
        self.history: list[Written] = []
        self.in_flight: bytes | None = None
        self.durable_offset = 0
        self.checkpoint = 0
        self.log_start = 0
        self.sequences: dict[int, int] = {}

    def _new_log(self) -> PartitionLog:
        return PartitionLog(self.fs, DIRECTORY, "topic", 0, CONFIG, now_ms=self.now_ms)

    # -- steps -----------------------------------------------------------------------------------------------

    def append(self, count: int, value_bytes: int, producer: int) -> None:
        self.now_ms += self.random.randrange(500)
        data = make_batch(
            count,
            value_bytes,
            timestamp=self.now_ms - self.random.randrange(2000),
            producer_id=producer,
            sequence=self.sequences.get(producer, 0),
            fill=bytes([self.random.randrange(256)]),
        )
        self.in_flight = bytes(data)
        appended = self.log.append(memoryview(data), leader_epoch=self.epoch, now_ms=self.now_ms)
        self.in_flight = None
        assert not appended.duplicate
        self.history.append(Written(appended.first_offset, appended.last_offset + 1, bytes(data)))
        if producer >= 0:
            self.sequences[producer] = self.sequences.get(producer, 0) + count

    def flush(self) -> None:
        self.log.flush()
        self.durable_offset = self.log.flushed_offset
        assert self.durable_offset == self.log.log_end_offset

    def write_checkpoint(self) -> None:
        """The log manager writes the recovery point down, durably."""
        self.checkpoint = self.log.recovery_point

    def roll(self) -> None:
        self.log.roll(self.now_ms)

    def retain(self) -> None:
        self.now_ms += self.random.randrange(3000)
        self.log.apply_retention(self.now_ms, self.log.log_end_offset)

    def delete_records(self, share: float) -> None:
        length = self.log.log_end_offset - self.log.log_start_offset
        self.log.delete_records(self.log.log_start_offset + int(length * share))

    def new_epoch(self) -> None:
        self.epoch += 1

    def truncate(self, share: float) -> None:
        length = self.log.log_end_offset - self.log.log_start_offset
        target = self.log.log_start_offset + int(length * share)
        whole = [written.end_offset for written in self.history if written.end_offset <= target]
        self.durable_offset = min(self.durable_offset, max(whole, default=0))
        end_offset = self.log.truncate_to(target)
        self.checkpoint = min(self.checkpoint, end_offset)
        self._keep_history(end_offset)

    def restart(self) -> None:
        """Stop and start in order."""
        self.log.close()
        self.durable_offset = self.log.log_end_offset
        before = self._state()
        self._open(clean=True)
        assert self._state() == before

    def crash(self) -> None:
        """Lose power now, or in the middle of the recovery that follows, any number of times."""
        ended = self.log.log_end_offset
        recovered = False
        while not recovered:
            self.fs.crash(self.random, flips=self.random.randrange(3))
            if self.random.random() < 0.3:
                self.fs.cut_power_after(self.random.randrange(40))
            try:
                self._open(clean=False)
                recovered = True
            except PowerCut:
                pass
        self.fs.heal()
        self._check_recovered(ended)

    def _open(self, clean: bool) -> None:
        if not self.fs.exists(DIRECTORY):
            self.fs.makedirs(DIRECTORY)
        self.log = open_log(
            self.fs,
            DIRECTORY,
            "topic",
            0,
            CONFIG,
            clean=clean,
            recovery_point=self.checkpoint,
            log_start_offset=self.log.log_start_offset if clean else 0,
            now_ms=self.now_ms,
        )

    # -- what must hold --------------------------------------------------------------------------------------

    def _keep_history(self, end_offset: int) -> None:
        self.history = [written for written in self.history if written.end_offset <= end_offset]
        self._count_sequences()

    def _count_sequences(self) -> None:
        self.sequences.clear()
        for written in self.history:
            header = parse_header(written.data)
            if header.producer_id >= 0:
                self.sequences[header.producer_id] = header.last_sequence + 1

    def _check_recovered(self, ended: int) -> None:
        log = self.log
        assert log.log_end_offset >= self.durable_offset, "a synced batch is gone"
        if self.in_flight is not None and log.log_end_offset > ended:
            header = parse_header(self.in_flight)
            data = bytearray(self.in_flight)
            data[:8] = ended.to_bytes(8, "big")
            data[12:16] = self.epoch.to_bytes(4, "big")
            self.history.append(Written(ended, ended + header.record_count, bytes(data)))
        self.in_flight = None
        self._keep_history(log.log_end_offset)
        self._pass_over_flipped_epochs()
        self.durable_offset = min(self.durable_offset, log.log_end_offset)
        self.check()

    def _pass_over_flipped_epochs(self) -> None:
        """Kafka's CRC leaves the leader epoch out, so a flipped bit in there is nothing that anyone could see."""
        written = {w.first_offset: parse_header(w.data).partition_leader_epoch for w in self.history}
        for header in headers_of(read_all(self.log)):
            if header.partition_leader_epoch != written[header.base_offset]:
                reject()

    def check(self) -> None:
        """The log holds exactly what was written between its start and its end, and all else agrees with that."""
        log = self.log
        inside = [w for w in self.history if w.end_offset > log.log_start_offset]
        assert read_all(log, 1 + self.random.randrange(6000)) == b"".join([w.data for w in inside])
        assert log.size_bytes == sum([segment.size for segment in log.segments])
        check_indexes(log)
        self._check_producers()
        self._check_epochs()

    def _check_producers(self) -> None:
        log = self.log
        expected = ProducerState("expected")
        for written in self.history:
            expected.update(parse_header(written.data), written.first_offset)
        in_log = {
            parse_header(w.data).producer_id for w in self.history if w.first_offset >= log.log_start_offset
        }
        for entry in expected:
            found = log.producer_state.get(entry.producer_id)
            if found is None:
                # Its batches are deleted, and the snapshot that knew it was not synced.
                assert entry.producer_id not in in_log
                continue
            assert (found.epoch, found.last_sequence, found.last_offset) == (
                entry.epoch,
                entry.last_sequence,
                entry.last_offset,
            )
            # Of the batches before a snapshot only the last is known; those known are right.
            assert list(entry.batches)[-len(found.batches) :] == list(found.batches)
        assert {entry.producer_id for entry in log.producer_state} <= {
            entry.producer_id for entry in expected
        }

    def _check_epochs(self) -> None:
        log = self.log
        expected = EpochCache()
        for written in self.history:
            header = parse_header(written.data)
            if header.partition_leader_epoch > expected.latest_epoch:
                expected.assign(header.partition_leader_epoch, written.first_offset)
        expected.truncate_from_start(log.log_start_offset)
        if log.log_start_offset < log.log_end_offset:
            assert log.epochs.entries == expected.entries
        else:  # no batch is left to tell, only what was written down, maybe before the last change
            assert all(entry.start_offset <= log.log_end_offset for entry in log.epochs.entries)

    def _state(self) -> tuple[object, ...]:
        log = self.log
        producers = sorted(
            [(e.producer_id, e.epoch, e.last_sequence, e.last_offset) for e in log.producer_state]
        )
        return (log.log_start_offset, log.log_end_offset, log.size_bytes, producers, log.epochs.entries)


class Step(NamedTuple):
    """One thing done to the machine."""

    name: str
    arguments: tuple[object, ...]

    def __call__(self, machine: Machine) -> None:
        getattr(machine, self.name)(*self.arguments)


def steps() -> st.SearchStrategy[Step]:
    def named(name: str, *arguments: st.SearchStrategy[object]) -> st.SearchStrategy[Step]:
        return st.builds(Step, st.just(name), st.tuples(*arguments))

    appends = named("append", st.integers(1, 6), st.integers(0, 250), st.integers(-1, 2))
    shares = st.sampled_from([0.0, 0.3, 0.5, 0.9, 1.0])
    return st.one_of(
        appends,
        appends,
        appends,
        named("flush"),
        named("write_checkpoint"),
        named("roll"),
        named("retain"),
        named("new_epoch"),
        named("delete_records", shares),
        named("truncate", shares),
        named("restart"),
        named("crash"),
    )


@pytest.fixture(scope="module", autouse=True)
def small_windows() -> Iterator[None]:
    """Segments of these tests are smaller than a recovery window: make the windows smaller still."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "WINDOW_BYTES", 700)
        yield


@settings(max_examples=300)
@given(st.lists(steps(), min_size=15, max_size=60), st.integers(0, 2**32))
def test_every_synced_batch_survives_any_crash_between_steps(history: list[Step], seed: int) -> None:
    machine = Machine(seed)
    for step in history:
        step(machine)
    machine.crash()
    machine.append(1, 10, 1)
    machine.check()


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(st.lists(steps(), min_size=10, max_size=30), st.integers(0, 120)), min_size=1, max_size=4
    ),
    st.integers(0, 2**32),
)
def test_every_synced_batch_survives_a_power_cut_in_the_middle_of_a_step(
    lives: list[tuple[list[Step], int]], seed: int
) -> None:
    machine = Machine(seed)
    for history, power_lasts in lives:
        machine.fs.cut_power_after(power_lasts)
        try:
            for step in history:
                step(machine)
        except PowerCut:
            pass
        machine.crash()


@settings(max_examples=200)
@given(
    st.lists(steps(), min_size=5, max_size=40),
    st.integers(0, 2**32),
    st.integers(0, 10**6),
    st.integers(0, 7),
)
def test_a_flipped_bit_in_a_scanned_segment_is_never_served(
    history: list[Step], seed: int, place: int, bit: int
) -> None:
    machine = Machine(seed)
    for step in history:
        step(machine)
    for _ in range(5):
        machine.append(3, 50, 1)
    machine.flush()
    log = machine.log
    log.close(clean=False)
    path = log.active.log_path
    position = place % machine.fs.size(path)
    header_at = _start_of_batch(log, position)
    if 12 <= position - header_at < 16:
        return  # the leader epoch: outside the CRC in Kafka's format, so nothing can tell
    machine.fs.flip(path, position, bit)
    recovered = open_log(machine.fs, DIRECTORY, "topic", 0, CONFIG, clean=False, recovery_point=2**60)
    first, end = recovered.log_start_offset, recovered.log_end_offset
    inside = [w.data for w in machine.history if first < w.end_offset <= end]
    assert read_all(recovered) == b"".join(inside)
    assert recovered.log_end_offset < log.log_end_offset
    check_indexes(recovered)


def _start_of_batch(log: PartitionLog, position: int) -> int:
    return max(start for start, _ in log.active.headers() if start <= position)


def test_appends_go_on_after_the_disk_was_full() -> None:
    machine = Machine(1)
    for _ in range(3):
        machine.append(1, 200, 1)
    machine.fs.capacity_bytes = machine.fs.size(machine.log.active.log_path) + 100
    with pytest.raises(KafkaError):
        machine.append(1, 200, 1)
    machine.in_flight = None
    machine.check()
    machine.fs.heal()
    machine.append(1, 200, 1)
    machine.check()
    machine.crash()
