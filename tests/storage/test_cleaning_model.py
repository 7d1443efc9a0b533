"""Any history of puts, deletes, cleanings and power cuts: readers see what a dict would hold.

The disk is `FaultyFileSystem`, so the power may go in the middle of any operation of a cleaning, of the swap and of the
recovery after it, and what was not synced is dropped, torn or there.
"""

import random
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.settings import TopicConfig
from headrace.records.builder import iter_batches, iter_records
from headrace.storage.faulty import FaultyFileSystem, PowerCut
from headrace.storage.log import PartitionLog
from headrace.storage.recovery import open_log
from tests.storage.cleanbench import COMPACT, clean, contents, put, table
from tests.storage.workbench import DIRECTORY, NOW_MS, check_indexes

pytestmark = pytest.mark.timeout(600)

RETENTION_MS = 1000
CONFIG = TopicConfig(
    segment_bytes=700,
    index_interval_bytes=150,
    cleanup_policy=COMPACT,
    delete_retention_ms=RETENTION_MS,
    max_message_bytes=3000,
)


class Written(NamedTuple):
    """One record as it was appended."""

    offset: int
    key: bytes
    value: bytes | None
    producer: int
    sequence: int


class Machine:
    """A compacted partition on a disk that loses power, and what was put into it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.fs = FaultyFileSystem()
        self.fs.makedirs(DIRECTORY)
        self.fs.sync_dir("")
        self.now_ms = NOW_MS
        self.log = PartitionLog(self.fs, DIRECTORY, "topic", 0, CONFIG, now_ms=self.now_ms)
        self.history: list[Written] = []
        self.in_flight: list[Written] = []
        self.durable_offset = 0
        self.checkpoint = 0
        self.clean_offset = 0
        # When a cleaning first met an offset: before that time and delete.retention.ms no tombstone there may go.
        self.met_ms: dict[int, int] = {}
        self.sequences: dict[int, int] = {}
        self._restart_reader()

    def _restart_reader(self) -> None:
        self.reader_began_ms = self.now_ms
        self.reader_offset = 0
        self.reader_table: dict[bytes | None, bytes] = {}

    # -- steps -----------------------------------------------------------------------------------------------

    def put(self, puts: list[tuple[int, int]], producer: int, compression: int) -> None:
        batch = [
            (b"k%d" % key, b"%d" % self.random.randrange(10**6) * size if size else None)
            for key, size in puts
        ]
        first, sequence = self.log.log_end_offset, self.sequences.get(producer, 0)
        self.in_flight = [
            Written(first + number, key, value, producer, sequence + number)
            for number, (key, value) in enumerate(batch)
        ]
        offset = put(
            self.log,
            *batch,
            timestamp=self.now_ms,
            producer_id=producer,
            sequence=sequence,
            compression=compression,
        )
        assert offset == first
        self.history += self.in_flight
        self.in_flight = []
        self.sequences[producer] = sequence + len(batch)

    def flush(self) -> None:
        self.log.flush()
        self.durable_offset = self.log.flushed_offset

    def write_checkpoint(self) -> None:
        self.checkpoint = self.log.recovery_point

    def roll(self) -> None:
        self.log.roll(self.now_ms)

    def wait(self, ms: int) -> None:
        self.now_ms += ms

    def clean(self, keys_max: int) -> None:
        end = min(self.log.active.base_offset, self.log.recovery_point)
        first_dirty = min(self.clean_offset, end)
        for offset in range(end):
            self.met_ms.setdefault(offset, self.now_ms)
        held = self.log.read(0, 1 << 20, max_offset=self.log.log_end_offset)
        before = held.read()
        done = clean(
            self.log,
            first_dirty=first_dirty,
            now_ms=self.now_ms,
            log_cleaner_dedupe_buffer_size=str(24 * keys_max),
        )
        assert held.read() == before, "a reader lost the segment it held"
        self.clean_offset = done.clean_offset
        self.check()

    def read_on(self, max_bytes: int) -> None:
        """A reader that began a while ago gets the next of the log, from wherever it was."""
        if self.now_ms - self.reader_began_ms > RETENTION_MS:
            self._restart_reader()
        while self.reader_offset < self.log.log_end_offset:
            data = self.log.read(self.reader_offset, max_bytes, max_offset=self.log.log_end_offset).read()
            for header, batch in iter_batches(data):
                for record in iter_records(batch):
                    if record.offset < self.reader_offset:
                        continue
                    if record.value is None:
                        self.reader_table.pop(record.key, None)
                    else:
                        self.reader_table[record.key] = record.value
                self.reader_offset = header.next_offset
            if max_bytes < 2000:
                return
        assert self.reader_table == self._model()

    def restart(self) -> None:
        self.log.close()
        self.durable_offset = self.log.log_end_offset
        self._open(clean=True)
        self.check()

    def crash(self) -> None:
        recovered = False
        while not recovered:
            self.fs.crash(self.random, flips=self.random.randrange(2))
            if self.random.random() < 0.3:
                self.fs.cut_power_after(self.random.randrange(40))
            try:
                self._open(clean=False)
                recovered = True
            except PowerCut:
                pass
        self.fs.heal()
        self._check_recovered()

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
            now_ms=self.now_ms,
        )

    # -- what must hold --------------------------------------------------------------------------------------

    def _check_recovered(self) -> None:
        end = self.log.log_end_offset
        assert end >= self.durable_offset, "a synced record is gone"
        self.history = [w for w in self.history + self.in_flight if w.offset < end]
        self.in_flight = []
        assert not self.history or self.history[-1].offset == end - 1
        assert self.clean_offset <= end
        self.sequences.clear()
        for written in self.history:
            self.sequences[written.producer] = written.sequence + 1
        if self.reader_offset > end:
            self._restart_reader()
        self.met_ms = {offset: ms for offset, ms in self.met_ms.items() if offset < end}
        self._restart_reader()  # a consumer whose records were lost with the power may have seen what never was
        self.check()

    def _model(self) -> dict[bytes | None, bytes]:
        values: dict[bytes | None, bytes] = {}
        for written in self.history:
            if written.value is None:
                values.pop(written.key, None)
            else:
                values[written.key] = written.value
        return values

    def check(self) -> None:
        log = self.log
        found = contents(log)
        by_offset = {written.offset: written for written in self.history}
        for offset, key, value in found:
            written = by_offset[offset]
            assert (key, value) == (written.key, written.value)
        assert table(log) == self._model()
        latest = {written.key: written for written in self.history}
        present = {offset for offset, _, _ in found}
        for written in latest.values():
            if written.value is None and written.offset not in present:
                assert self.now_ms >= self.met_ms[written.offset] + RETENTION_MS, "a tombstone went too early"
        assert log.size_bytes == sum(segment.size for segment in log.segments)
        check_indexes(log)
        for producer, sequence in self.sequences.items():
            entry = log.producer_state.get(producer)
            if producer >= 0:
                assert entry is not None and entry.last_sequence == sequence - 1


class Step(NamedTuple):
    """One thing done to the machine."""

    name: str
    arguments: tuple[object, ...]

    def __call__(self, machine: Machine) -> None:
        getattr(machine, self.name)(*self.arguments)


def steps() -> st.SearchStrategy[Step]:
    def named(name: str, *arguments: st.SearchStrategy[object]) -> st.SearchStrategy[Step]:
        return st.builds(Step, st.just(name), st.tuples(*arguments))

    puts = named(
        "put",
        st.lists(st.tuples(st.integers(0, 8), st.sampled_from([0, 1, 1, 10])), min_size=1, max_size=5),
        st.integers(-1, 1),
        st.sampled_from([0, 0, 4]),
    )
    cleans = named("clean", st.sampled_from([2, 4, 1000]))
    return st.one_of(
        puts,
        puts,
        puts,
        puts,
        named("flush"),
        named("flush"),
        named("write_checkpoint"),
        named("roll"),
        named("wait", st.sampled_from([1, RETENTION_MS // 3, RETENTION_MS])),
        cleans,
        cleans,
        named("read_on", st.sampled_from([1, 300, 5000])),
        named("restart"),
        named("crash"),
    )


@given(st.lists(steps(), min_size=20, max_size=70), st.integers(0, 2**32))
def test_readers_see_what_a_dict_would_hold_after_any_history(history: list[Step], seed: int) -> None:
    machine = Machine(seed)
    for step in history:
        step(machine)
    machine.roll()
    machine.flush()
    machine.clean(1000)
    machine.read_on(5000)
    machine.crash()


@given(
    st.lists(
        st.tuples(st.lists(steps(), min_size=10, max_size=35), st.integers(0, 150), st.booleans()),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 2**32),
)
def test_a_power_cut_in_the_middle_of_a_cleaning_loses_and_revives_nothing(
    lives: list[tuple[list[Step], int, bool]], seed: int
) -> None:
    machine = Machine(seed)
    for history, power_lasts, cleaning in lives:
        if not cleaning:
            machine.fs.cut_power_after(power_lasts)
        try:
            for step in history:
                step(machine)
            if cleaning:
                machine.roll()
                machine.flush()
                machine.fs.cut_power_after(power_lasts % 60)
                machine.clean(1000)
        except PowerCut:
            pass
        machine.crash()
