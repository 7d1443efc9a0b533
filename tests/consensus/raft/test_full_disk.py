"""A cut of Raft's log on a disk that fills up at any moment of it: nothing promised is lost, nothing is read twice."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from headrace.base.clock import ManualClock
from headrace.base.errors import KafkaError
from headrace.base.settings import TopicConfig
from headrace.consensus.raft.durable import DurableStorage
from headrace.consensus.raft.messages import Entry
from headrace.consensus.raft.ready import Ready
from headrace.storage.log import PartitionLog
from headrace.storage.memory import MemoryFile, MemoryFileSystem
from headrace.storage.recovery import open_log

DIRECTORY = "m-0"
OPERATIONS_MAX = 60


class Filling(MemoryFileSystem):
    """A disk that is full after some more operations that would take room."""

    def __init__(self) -> None:
        super().__init__()
        self.left: int | None = None
        self.refused = 0

    def spend(self) -> None:
        if self.left is not None:
            if self.left == 0:
                self.refused += 1
                raise OSError(errno.ENOSPC, "No space left on device")
            self.left -= 1

    def write_atomic(self, path: str, data: bytes, *, durable: bool = True) -> None:
        self.spend()
        super().write_atomic(path, data, durable=durable)

    def open(self, path: str, create: bool = False) -> MemoryFile:
        if create and not self.exists(path):
            self.spend()
        return super().open(path, create)


@contextmanager
def filling(fs: Filling, operations: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    write, sync = MemoryFile.pwrite, MemoryFile.sync

    def pwrite(file: MemoryFile, data: bytes, offset: int) -> None:
        fs.spend()
        write(file, data, offset)

    def synced(file: MemoryFile) -> None:
        fs.spend()  # room that was promised to written pages may turn out not to be there
        sync(file)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFile, "pwrite", pwrite)
        patch.setattr(MemoryFile, "sync", synced)
        fs.left = operations
        try:
            yield
        finally:
            fs.left = None


def entries(term: int, *numbers: int) -> list[Entry]:
    return [Entry(term, b"%d.%d" % (term, number)) for number in numbers]


def written(number: int, first: int, new: list[Entry]) -> Ready:
    return Ready(number, None, [], None, first, new, [], [], 0, [], [])


def flush(storage: DurableStorage) -> None:
    ticket = storage.begin_sync()
    try:
        ticket.run()
    except OSError as error:
        storage.finish_sync(ticket, error)
        raise
    storage.finish_sync(ticket, None)


def all_of(storage: DurableStorage) -> list[Entry]:
    found: list[Entry] = []
    while storage.start + len(found) < storage.end:
        found += storage.entries(storage.start + len(found), storage.end, 1 << 20)
    return found


@pytest.mark.parametrize("cut", [3, 5, 8])
def test_a_cut_on_a_disk_that_fills_up_keeps_what_was_promised(
    cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = entries(1, *range(10))
    after = entries(2, *range(4))
    finished = False
    for operations in range(OPERATIONS_MAX):
        fs = Filling()
        fs.makedirs(DIRECTORY)
        log = PartitionLog(fs, DIRECTORY, "m", 0, TopicConfig())
        storage = DurableStorage(log, ManualClock())
        storage.write(written(1, 0, before[:5]))
        storage.write(written(2, 5, before[5:]))
        flush(storage)
        with filling(fs, operations, monkeypatch):
            try:
                storage.write(written(3, cut, after))
                flush(storage)
                finished = fs.refused == 0
            except (KafkaError, OSError):
                pass
        if log.failed:  # then the process stops, and the next one recovers the log
            log = open_log(
                fs,
                DIRECTORY,
                "m",
                0,
                TopicConfig(),
                clean=False,
                recovery_point=0,
                log_start_offset=0,
                now_ms=0,
            )
        again = DurableStorage(log, ManualClock())
        found = all_of(again)
        assert found[:cut] == before[:cut], f"after {operations} operations"
        assert found[cut:] in ([], before[cut:], *[after[:count] for count in range(1, 5)])
        again.write(written(4, cut, after))
        flush(again)
        assert all_of(again) == before[:cut] + after
        if finished:
            break
    assert finished, "the disk was full in every case"
