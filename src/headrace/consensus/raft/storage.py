"""What Raft needs of storage, and storage in memory.

`RaftStorage` is what the core reads: its own last writes, as soon as they are written. `WritableStorage` adds what the
driver does: write a bundle at once, and make everything written durable by a sync that may run in a thread. Invariants:
what a storage holds when it is opened is durable; a write is readable when `write` returns; a node whose storage
raised is not used again, but made anew from what the disk has. `durable.py` has the one on disk.
"""

from collections.abc import Sequence
from typing import Protocol

from headrace.consensus.raft.messages import Entry, HardState, SnapshotChunk, SnapshotMeta
from headrace.consensus.raft.ready import Ready


class RaftStorage(Protocol):
    """The log, the hard state and the snapshot, for reading."""

    @property
    def hard_state(self) -> HardState: ...

    @property
    def snapshot(self) -> SnapshotMeta:
        """What the newest snapshot stands for; of an empty one that reaches 0 when there is none."""
        ...

    @property
    def start(self) -> int:
        """The index of the first entry that is still there."""
        ...

    @property
    def end(self) -> int:
        """The index after the last entry."""
        ...

    def terms(self) -> Sequence[tuple[int, int]]:
        """Each term of the log with the index of its first entry, rising."""
        ...

    def entries(self, start: int, end: int, max_bytes: int) -> list[Entry]:
        """Entries from `start` on: as many below `end` as `max_bytes` allows, at least one."""
        ...

    def read_chunk(self, position: int, max_bytes: int) -> tuple[bytes, bool]:
        """Bytes of the newest snapshot, and whether they are its last."""
        ...


class SyncTicket(Protocol):
    """A sync under way."""

    def run(self) -> None:
        """Write and wait for the disk; the one part that may leave the loop. OSError says why not."""
        ...


class WritableStorage(RaftStorage, Protocol):
    """Storage as the driver sees it."""

    def write(self, ready: Ready) -> None:
        """Write a bundle: readable on return, durable after the next sync. KafkaError ends the node."""
        ...

    def begin_sync(self) -> SyncTicket:
        """A ticket that makes all that was written durable. One at a time."""
        ...

    def finish_sync(self, ticket: SyncTicket, error: BaseException | None) -> None:
        """Take the outcome of a ticket that has run."""
        ...


def take(entries: Sequence[Entry], start: int, end: int, max_bytes: int) -> list[Entry]:
    """Entries of a list from position `start` on: those below `end` that fit, at least one."""
    taken: list[Entry] = []
    size = 0
    for position in range(start, end):
        entry = entries[position]
        size += entry.size
        if taken and size > max_bytes:
            break
        taken.append(entry)
    return taken


class _NothingToSync:
    def run(self) -> None:
        """Memory is as stable as it gets."""


class MemoryStorage:
    """Storage that lasts as long as the process: for tests, and for a broker that keeps nothing."""

    def __init__(self) -> None:
        self.hard_state = HardState()
        self.snapshot = SnapshotMeta()
        self.snapshot_data = b""
        self.start = 0
        self.log: list[Entry] = []
        self._incoming = bytearray()

    @property
    def end(self) -> int:
        return self.start + len(self.log)

    def terms(self) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for index, entry in enumerate(self.log, self.start):
            if not found or entry.term != found[-1][0]:
                found.append((entry.term, index))
        return found

    def entries(self, start: int, end: int, max_bytes: int) -> list[Entry]:
        assert self.start <= start <= end <= self.end, (self.start, start, end, self.end)
        return take(self.log, start - self.start, end - self.start, max_bytes)

    def read_chunk(self, position: int, max_bytes: int) -> tuple[bytes, bool]:
        data = self.snapshot_data[position : position + max_bytes]
        return data, position + len(data) >= len(self.snapshot_data)

    def write(self, ready: Ready) -> None:
        if ready.hard_state is not None:
            self.hard_state = ready.hard_state
        for chunk in ready.chunks:
            self.write_chunk(chunk)
        if ready.installed is not None:
            self.install(ready.installed, bytes(self._incoming))
        if ready.entries:
            self.write_entries(ready.first, ready.entries)

    def write_chunk(self, chunk: SnapshotChunk) -> None:
        if chunk.position == 0:
            self._incoming.clear()
        assert chunk.position == len(self._incoming), "chunks come in order"
        self._incoming += chunk.data

    def install(self, meta: SnapshotMeta, data: bytes) -> None:
        """The snapshot takes the place of the log."""
        self.snapshot, self.snapshot_data = meta, data
        self.start = meta.end
        self.log.clear()

    def write_entries(self, first: int, entries: list[Entry]) -> None:
        assert self.start <= first <= self.end, (self.start, first, self.end)
        del self.log[first - self.start :]
        self.log += entries

    def begin_sync(self) -> SyncTicket:
        return _NothingToSync()

    def finish_sync(self, ticket: SyncTicket, error: BaseException | None) -> None:
        """Nothing to note."""

    def save_snapshot(self, meta: SnapshotMeta, data: bytes, keep_from: int | None = None) -> None:
        """The application made a snapshot: entries below `keep_from`, or all that it stands for, are dropped."""
        self.snapshot, self.snapshot_data = meta, data
        keep_from = meta.end if keep_from is None else min(keep_from, meta.end)
        if keep_from > self.start:
            del self.log[: keep_from - self.start]
            self.start = keep_from
