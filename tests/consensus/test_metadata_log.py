"""The metadata log commits what is durable, one batch an append, and bounds itself by snapshots."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.settings import TopicConfig
from headrace.consensus.metadata_log import MetadataLog
from headrace.consensus.snapshots import (
    SnapshotDamaged,
    encode_snapshot,
    find_snapshots,
    read_snapshot,
    snapshot_name,
)
from headrace.records.builder import iter_batches
from headrace.storage.flusher import Flusher
from headrace.storage.log import PartitionLog
from headrace.storage.memory import MemoryFileSystem

NOW_MS = 1_700_000_000_000
DIRECTORY = "__cluster_metadata-0"


class Turns:
    """An event loop that runs what is due when told to."""

    def __init__(self) -> None:
        self._due: list[Callable[[], None]] = []

    def call_soon(self, callback: Callable[[], None], /) -> None:
        self._due.append(callback)

    call_soon_threadsafe = call_soon

    def run(self) -> None:
        due, self._due = self._due, []
        for callback in due:
            callback()


class Store:
    """A metadata log on a memory disk that can be reopened, and what its callers were told."""

    def __init__(self, fs: MemoryFileSystem | None = None, snapshot_bytes: int = 1 << 20) -> None:
        self.fs = fs or MemoryFileSystem()
        if not self.fs.exists(DIRECTORY):
            self.fs.makedirs(DIRECTORY)
        self.turns = Turns()
        self.flusher: Flusher[PartitionLog] = Flusher(self.turns)
        self.snapshot_bytes = snapshot_bytes
        self.told: list[KafkaError | None] = []
        self.log = PartitionLog(self.fs, DIRECTORY, "__cluster_metadata", 0, TopicConfig(), now_ms=NOW_MS)
        self.metadata = MetadataLog(self.log, self.flusher, snapshot_bytes)

    def append(
        self, entries: Sequence[bytes], done: Callable[[KafkaError | None], None] | None = None
    ) -> None:
        self.metadata.append(entries, NOW_MS, done or self.told.append)

    def settle(self) -> None:
        """Let everything that was asked for happen."""
        self.flusher.close()
        self.flusher = Flusher(self.turns)
        self.metadata._flusher = self.flusher

    def reopened(self) -> MetadataLog:
        """Another metadata log over the same files."""
        return MetadataLog(self.log, self.flusher, self.snapshot_bytes)


def test_entries_come_back_in_the_order_they_were_appended() -> None:
    store = Store()
    store.append([b"one", b"two"])
    store.append([b"three"])
    store.settle()
    assert store.told == [None, None]
    assert list(store.reopened().replay()) == [b"one", b"two", b"three"]


def test_nothing_is_committed_before_it_is_durable() -> None:
    store = Store()
    store.append([b"one"])
    assert store.told == []
    assert (store.metadata.end_offset, store.metadata.committed_offset) == (1, 0)
    store.settle()
    assert store.told == [None]
    assert (store.metadata.end_offset, store.metadata.committed_offset) == (1, 1)


def test_appends_that_wait_together_share_one_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    begun = []
    begin_flush = PartitionLog.begin_flush
    monkeypatch.setattr(PartitionLog, "begin_flush", lambda log: begun.append(log) or begin_flush(log))
    for number in range(50):
        store.append([b"%d" % number])
    store.settle()
    assert len(store.told) == 50
    assert len(begun) == 1


def test_one_append_is_one_batch_however_large() -> None:
    store = Store()
    store.append([b"entry %d" % number for number in range(20_000)])
    data = store.log.read(0, 1 << 30, max_offset=20_000).read()
    assert [header.record_count for header, _ in iter_batches(data)] == [20_000]


def test_each_append_sees_its_own_offset_when_it_is_committed() -> None:
    store = Store()
    seen: list[int] = []
    for entries in ([b"a"], [b"b", b"c"], [b"d"]):
        store.append(entries, lambda error: seen.append(store.metadata.committed_offset))
    store.settle()
    assert seen == [1, 3, 4]


def test_a_failed_sync_is_told_to_all_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    store.append([b"one"])

    def fail(ticket: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("headrace.storage.flush.FlushTicket.run", fail)
    store.settle()
    assert [error is not None and error.code for error in store.told] == [ErrorCode.KAFKA_STORAGE_ERROR]
    assert store.metadata.committed_offset == 0


def fill(store: Store, state: list[bytes], count: int) -> None:
    """Append entries, as the store's owner does: a snapshot whenever one is due."""
    for number in range(count):
        entry = b"entry %06d" % (len(state) + number)

        def done(error: KafkaError | None, entry: bytes = entry) -> None:
            assert error is None
            state.append(entry)
            if store.metadata.snapshot_due:
                store.metadata.write_snapshot(list(state), NOW_MS)

        store.append([entry], done)


def test_a_snapshot_cuts_the_log_and_stands_for_what_it_cut() -> None:
    store = Store(snapshot_bytes=4_000)
    state: list[bytes] = []
    fill(store, state, 100)
    store.settle()
    assert store.log.log_start_offset > 0
    assert len(find_snapshots(store.fs, DIRECTORY)) == 1
    fill(store, state, 3)
    store.settle()
    assert list(store.reopened().replay()) == state


def test_a_log_that_is_written_to_for_ever_stays_small() -> None:
    store = Store(snapshot_bytes=4_000)
    for _ in range(40):
        store.append([b"x" * 1000], lambda error: None)
        store.settle()
        if store.metadata.snapshot_due:
            store.metadata.write_snapshot([b"the state"], NOW_MS)
            store.settle()
    assert store.log.size_bytes < 8_000
    assert len(find_snapshots(store.fs, DIRECTORY)) == 1
    assert next(iter(store.reopened().replay())) == b"the state"


def test_a_state_larger_than_the_bound_is_not_written_at_every_commit() -> None:
    store = Store(snapshot_bytes=100)
    store.append([b"x" * 200])
    store.settle()
    assert store.metadata.snapshot_due
    store.metadata.write_snapshot([b"y" * 5_000], NOW_MS)
    store.settle()
    store.append([b"x" * 200])
    store.settle()
    assert not store.metadata.snapshot_due


def test_a_snapshot_that_cannot_be_written_leaves_the_log_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(snapshot_bytes=1)
    store.append([b"one"])
    store.settle()

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store.fs, "write_atomic", full)
        store.metadata.write_snapshot([b"one"], NOW_MS)
        store.settle()
    assert store.log.log_start_offset == 0
    assert store.metadata.snapshot_due, "it is tried again"
    assert list(store.reopened().replay()) == [b"one"]


def test_a_crash_between_snapshot_and_cut_replays_nothing_twice() -> None:
    store = Store()
    store.append([b"one"])
    store.append([b"two"])
    store.settle()
    store.fs.write_atomic(f"{DIRECTORY}/{snapshot_name(1, 0)}", encode_snapshot([b"ONE"], NOW_MS))
    assert list(store.reopened().replay()) == [b"ONE", b"two"]


@pytest.mark.parametrize("entries", [0, 1, 4_999, 5_000, 12_345])
def test_a_snapshot_holds_every_entry(entries: int) -> None:
    fs = MemoryFileSystem()
    fs.makedirs(DIRECTORY)
    written = [b"entry %d" % number for number in range(entries)]
    path = f"{DIRECTORY}/{snapshot_name(7, 0)}"
    fs.write_atomic(path, encode_snapshot(written, NOW_MS))
    assert find_snapshots(fs, DIRECTORY) == [(7, path)]
    assert list(read_snapshot(fs, path)) == written


@settings(max_examples=60)
@given(st.data())
def test_a_damaged_snapshot_is_refused_not_half_read(data: st.DataObject) -> None:
    whole = bytearray(encode_snapshot([b"entry %d" % number for number in range(6_000)], NOW_MS))
    position = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        del whole[position:]
    else:
        whole[position] ^= 1 << data.draw(st.integers(0, 7))
    fs = MemoryFileSystem()
    fs.makedirs(DIRECTORY)
    fs.write_atomic(f"{DIRECTORY}/{snapshot_name(1, 0)}", bytes(whole))
    try:
        kept = list(read_snapshot(fs, f"{DIRECTORY}/{snapshot_name(1, 0)}"))
    except SnapshotDamaged:
        return
    # The base offset and the epoch of a batch lie outside its CRC, and mean nothing here.
    assert kept == [b"entry %d" % number for number in range(6_000)]


def test_a_log_whose_beginning_is_lost_is_refused() -> None:
    store = Store(snapshot_bytes=1_000)
    state: list[bytes] = []
    fill(store, state, 40)
    store.settle()
    [(_, path)] = find_snapshots(store.fs, DIRECTORY)
    store.fs.remove(path)
    with pytest.raises(KafkaError, match="missing"):
        list(store.reopened().replay())
