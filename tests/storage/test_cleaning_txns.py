"""Compaction with transactions: aborted records go, committed ones replace, markers stay as long as they must.

The property at the end plays any history of puts, transactions, cleanings, kills and power cuts against a dict.
"""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.settings import TopicConfig
from headrace.records.batch import BatchHeader
from headrace.records.builder import build_batch, iter_batches, iter_records
from headrace.storage.faulty import FaultyFileSystem, PowerCut
from headrace.storage.log import PartitionLog
from headrace.storage.markers import EndTransactionMarker, marker_batch, parse_marker
from headrace.storage.memory import MemoryFileSystem
from headrace.storage.origin import Origin
from headrace.storage.recovery import open_log
from tests.storage.cleanbench import COMPACT, clean, put, seal
from tests.storage.workbench import DIRECTORY, NOW_MS, read_all

pytestmark = pytest.mark.timeout(600)

RETENTION_MS = 1000
CONFIG = TopicConfig(
    segment_bytes=700,
    index_interval_bytes=150,
    cleanup_policy=COMPACT,
    delete_retention_ms=RETENTION_MS,
    max_message_bytes=3000,
)


def new_log(**settings: object) -> PartitionLog:
    fs = MemoryFileSystem()
    fs.makedirs(DIRECTORY)
    config = TopicConfig(cleanup_policy=COMPACT, delete_retention_ms=RETENTION_MS, **settings)  # type: ignore[arg-type]
    return PartitionLog(fs, DIRECTORY, "topic", 0, config, now_ms=NOW_MS)


def write(log: PartitionLog, producer_id: int, sequence: int, *puts: tuple[bytes, bytes | None]) -> None:
    batch = build_batch(
        [(NOW_MS, key, value, ()) for key, value in puts],
        producer_id=producer_id,
        producer_epoch=0,
        base_sequence=sequence,
        transactional=True,
    )
    log.append(bytearray(batch), leader_epoch=0, now_ms=NOW_MS)


def end(log: PartitionLog, producer_id: int, committed: bool, now_ms: int = NOW_MS) -> None:
    batch = marker_batch((producer_id, 0), EndTransactionMarker(committed, 0), now_ms)
    log.append(bytearray(batch), leader_epoch=0, now_ms=now_ms, origin=Origin.COORDINATOR)


def batches(log: PartitionLog) -> list[BatchHeader]:
    return [header for header, _ in iter_batches(read_all(log))]


def committed_table(log: PartitionLog, max_bytes: int = 1 << 20) -> dict[bytes | None, bytes]:
    """What a read_committed reader makes of the log, as clients leave out what is aborted."""
    values: dict[bytes | None, bytes] = {}
    unstable = log.producer_state.first_unstable_offset(log.log_end_offset)
    stable = log.log_end_offset if unstable is None else unstable
    position = log.log_start_offset
    while position < stable:
        found = log.read(position, max_bytes, max_offset=stable)
        if not found.size:
            break
        aborted = sorted(log.aborted_transactions(position, found, stable), key=lambda each: each[1])
        aborting: set[int] = set()
        for header, batch in iter_batches(found.read()):
            while aborted and aborted[0][1] <= header.last_offset:
                aborting.add(aborted.pop(0)[0])
            records = [record for record in iter_records(batch) if record.offset >= position]
            if header.is_control:
                marker = parse_marker(records[0].key, records[0].value) if records else None
                if marker is not None and not marker.committed:
                    aborting.discard(header.producer_id)
            elif not (header.is_transactional and header.producer_id in aborting):
                for record in records:
                    if record.value is None:
                        values.pop(record.key, None)
                    else:
                        values[record.key] = record.value
            position = header.next_offset
    return values


def test_aborted_records_go_and_take_no_others_place() -> None:
    log = new_log()
    put(log, (b"a", b"1"))
    write(log, 7, 0, (b"a", b"2"))
    end(log, 7, False)
    write(log, 8, 0, (b"b", b"3"))
    end(log, 8, True)
    put(log, (b"z", b"9"))
    seal(log)
    clean(log)
    assert committed_table(log) == {b"a": b"1", b"b": b"3", b"z": b"9"}
    values = [record.value for _, batch in iter_batches(read_all(log)) for record in iter_records(batch)]
    assert b"1" in values and b"2" not in values


def test_a_committed_record_replaces_what_was_there() -> None:
    log = new_log()
    put(log, (b"a", b"1"))
    write(log, 7, 0, (b"a", b"2"))
    end(log, 7, True)
    put(log, (b"z", b"9"))
    seal(log)
    clean(log)
    assert committed_table(log) == {b"a": b"2", b"z": b"9"}
    assert batches(log)[0].base_offset == 1


def test_a_marker_stays_with_its_records_and_for_its_time_after_them() -> None:
    log = new_log()
    write(log, 7, 0, (b"a", b"1"))
    end(log, 7, True)
    write(log, 7, 1, (b"a", b"2"))
    end(log, 7, True)
    put(log, (b"a", b"3"))
    put(log, (b"z", b"9"))
    seal(log)

    def markers() -> list[tuple[int, bool]]:
        return [(h.base_offset, h.has_delete_horizon) for h in batches(log) if h.is_control]

    clean(log)
    assert markers() == [(1, False), (3, False)], "their records were there when they were met"
    clean(log)
    # The last batch of a producer stays as an empty one, and with it the marker that ends its transaction.
    assert markers() == [(1, True), (3, False)]
    clean(log, now_ms=NOW_MS + RETENTION_MS - 1)
    assert markers() == [(1, True), (3, False)]
    clean(log, now_ms=NOW_MS + RETENTION_MS)
    assert markers() == [(3, False)]
    assert committed_table(log) == {b"a": b"3", b"z": b"9"}


def test_the_index_keeps_the_lines_of_aborted_transactions_whose_markers_stay() -> None:
    log = new_log()
    write(log, 7, 0, (b"a", b"1"))
    end(log, 7, False)
    write(log, 7, 1, (b"b", b"2"))
    end(log, 7, True)
    put(log, (b"z", b"9"))
    seal(log)
    clean(log)
    assert [entry.first_offset for entry in log.segments[0].txn_index.entries()] == [0]
    clean(log)
    clean(log, now_ms=NOW_MS + RETENTION_MS)
    assert log.segments[0].txn_index.entries() == []
    assert committed_table(log) == {b"b": b"2", b"z": b"9"}


def test_nothing_from_the_first_open_transaction_on_is_cleaned() -> None:
    log = new_log()
    write(log, 7, 0, (b"a", b"1"))
    put(log, (b"a", b"2"))
    put(log, (b"z", b"9"))
    before = read_all(log)
    seal(log)
    clean(log)
    assert read_all(log) == before


class Machine:
    """A compacted partition with transactional producers on a disk that loses power, and what a dict would hold."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.fs = FaultyFileSystem()
        self.fs.makedirs(DIRECTORY)
        self.fs.sync_dir("")
        self.now_ms = NOW_MS
        self.log = PartitionLog(self.fs, DIRECTORY, "topic", 0, CONFIG, now_ms=self.now_ms)
        self.writes: list[tuple[int, bytes, bytes | None, int]] = []
        """Offset, key, value and producer (-1: none) of every record in the log."""
        self.ends: dict[int, tuple[int, bool]] = {}
        """Marker offset -> producer and outcome."""
        self.clean_offset = 0
        self.checkpoint = 0

    def put(self, producer: int, puts: list[tuple[int, int]]) -> None:
        batch = build_batch(
            [
                (self.now_ms, b"k%d" % k, None if v == 0 else b"v%d" % self.random.randrange(10**6), ())
                for k, v in puts
            ],
            producer_id=producer,
            producer_epoch=-1 if producer < 0 else 0,
            base_sequence=-1 if producer < 0 else self._sequence(producer),
            transactional=producer >= 0,
        )
        first = self.log.append(bytearray(batch), leader_epoch=0, now_ms=self.now_ms).first_offset
        for record in iter_records(batch):
            self.writes.append((first + record.offset, record.key or b"", record.value, producer))

    def _sequence(self, producer: int) -> int:
        entry = self.log.producer_state.get(producer)
        return 0 if entry is None or not entry.batches else entry.last_sequence + 1

    def end(self, producer: int, committed: bool) -> None:
        offset = self.log.log_end_offset
        end(self.log, producer, committed, self.now_ms)
        self.ends[offset] = (producer, committed)

    def wait(self, ms: int) -> None:
        self.now_ms += ms

    def roll(self) -> None:
        self.log.roll(self.now_ms)
        self.log.flush()

    def clean(self, keys_max: int) -> None:
        buffer = str(24 * (keys_max * 2 + 2))
        size = {"log_cleaner_dedupe_buffer_size": buffer, "log_cleaner_io_buffer_load_factor": "0.5"}
        self.clean_offset = clean(
            self.log, first_dirty=self.clean_offset, now_ms=self.now_ms, **size
        ).clean_offset

    def restart(self) -> None:
        self.log.close()
        self._open(clean=True)

    def crash(self, power_lasts: int) -> None:
        """The power goes, perhaps in the middle of a cleaning; all that was written is synced."""
        self.log.flush()
        self.checkpoint = self.log.recovery_point
        self.fs.cut_power_after(power_lasts)
        try:
            self.clean(3)
        except PowerCut:
            self.clean_offset = 0
        self.fs.crash(self.random)
        self.fs.heal()
        self._open(clean=False)

    def _open(self, clean: bool) -> None:
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

    def check(self) -> None:
        unstable = self.log.producer_state.first_unstable_offset(self.log.log_end_offset)
        opened: dict[int, int] = {}
        for offset, _, _, producer in self.writes:
            if producer >= 0 and self._outcome(producer, offset) is None:
                opened.setdefault(producer, offset)
        assert unstable == min(opened.values(), default=None)
        stable = self.log.log_end_offset if unstable is None else unstable
        values: dict[bytes | None, bytes] = {}
        for offset, key, value, producer in self.writes:
            if offset < stable and (producer < 0 or self._outcome(producer, offset)):
                if value is None:
                    values.pop(key, None)
                else:
                    values[key] = value
        assert committed_table(self.log, self.random.choice((1, 300, 1 << 20))) == values

    def _outcome(self, producer: int, offset: int) -> bool | None:
        found = [(at, how) for at, (who, how) in self.ends.items() if who == producer and at > offset]
        return min(found)[1] if found else None


producers = st.integers(0, 2)
puts = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=3)
step = st.one_of(
    st.tuples(st.just("put"), st.integers(-1, 2), puts),
    st.tuples(st.just("put"), producers, puts),
    st.tuples(st.just("end"), producers, st.booleans()),
    st.tuples(st.just("end"), producers, st.booleans()),
    st.tuples(st.just("roll")),
    st.tuples(st.just("clean"), st.integers(1, 8)),
    st.tuples(st.just("wait"), st.integers(0, 2 * RETENTION_MS)),
    st.tuples(st.just("restart")),
    st.tuples(st.just("crash"), st.integers(0, 60)),
)


@given(history=st.lists(step, min_size=5, max_size=60), seed=st.integers(0, 1 << 16))
def test_readers_see_the_last_committed_values_after_any_history(history: list[tuple], seed: int) -> None:  # type: ignore[type-arg]
    machine = Machine(seed)
    for name, *arguments in history:
        getattr(machine, name)(*arguments)
    machine.roll()
    machine.check()
    for _ in range(3):
        machine.clean(20)
        machine.wait(RETENTION_MS)
        machine.check()
    machine.crash(1000)
    machine.check()
