"""The disk of a simulated Raft node: what was synced survives; of the rest, a power cut leaves what it likes.

`LightDisk` keeps entries as they are, for speed: its log survives as some prefix of the unsynced writes, the last of
them torn, and its hard state apart from that. `FileDisk` is the production storage on the faulty file system, for the
bytes. Both hand out a storage for each life of a node. Invariant: what a finished sync covers is in every later life.
"""

import random
from typing import Any, Protocol

from headrace.base.clock import ManualClock
from headrace.base.settings import TopicConfig
from headrace.consensus.raft.durable import DurableStorage
from headrace.consensus.raft.messages import SnapshotMeta
from headrace.consensus.raft.ready import Ready
from headrace.consensus.raft.storage import MemoryStorage, SyncTicket
from headrace.storage.faulty import FaultyFileSystem
from headrace.storage.recovery import open_log

DIRECTORY = "__cluster_metadata-0"
CONFIG = TopicConfig(segment_bytes=2_000, index_interval_bytes=200)


class RaftDisk(Protocol):
    """What outlives a node."""

    def open(self) -> Any:
        """The storage for the next life."""
        ...

    def crash(self, power_lost: bool) -> None:
        """The node is gone."""
        ...

    def holds(self, index: int, term: int) -> bool | None:
        """Whether the entry would survive a power cut now; None when this disk cannot tell."""
        ...


class _LightTicket:
    def __init__(self, covered: int) -> None:
        self.covered = covered

    def run(self) -> None:
        """The simulator says when it has run."""


class _LightSnapshot:
    def __init__(self, meta: SnapshotMeta, data: bytes) -> None:
        self.meta = meta
        self.data = data

    def run(self) -> None:
        """Likewise."""


class LightStorage(MemoryStorage):
    """Storage in memory that notes which writes are not synced yet."""

    def __init__(self, durable: MemoryStorage) -> None:
        super().__init__()
        self._durable = durable
        self.hard_state = durable.hard_state
        self.snapshot, self.snapshot_data = durable.snapshot, durable.snapshot_data
        self.start, self.log = durable.start, durable.log[:]
        self.unsynced: list[Ready] = []

    def write(self, ready: Ready) -> None:
        super().write(ready)
        self.unsynced.append(ready)

    def begin_sync(self) -> SyncTicket:
        return _LightTicket(len(self.unsynced))

    def finish_sync(self, ticket: SyncTicket, error: BaseException | None) -> None:
        assert isinstance(ticket, _LightTicket)
        if error is None:
            for ready in self.unsynced[: ticket.covered]:
                self._durable.write(ready)
            del self.unsynced[: ticket.covered]

    def read_snapshot(self) -> bytes:
        return self.snapshot_data

    def begin_snapshot(self, meta: SnapshotMeta, body: bytes) -> _LightSnapshot:
        return _LightSnapshot(meta, body)

    def finish_snapshot(self, ticket: _LightSnapshot, keep_entries: int = 0) -> bool:
        meta = ticket.meta
        if meta.end <= self.snapshot.end:
            return False
        # Nothing unsynced lies below it: only what is durable is applied.
        for storage in (self, self._durable):
            storage.save_snapshot(meta, ticket.data, max(storage.start, meta.end - keep_entries))
        return True


class LightDisk:
    """Entries as they are."""

    def __init__(self, chance: random.Random) -> None:
        self._random = chance
        self._durable = MemoryStorage()
        self._storage: LightStorage | None = None

    def open(self) -> LightStorage:
        self._storage = LightStorage(self._durable)
        return self._storage

    def crash(self, power_lost: bool) -> None:
        assert self._storage is not None
        unsynced, durable = self._storage.unsynced, self._durable
        self._storage = None
        states = [ready.hard_state for ready in unsynced if ready.hard_state is not None]
        if not power_lost:
            for ready in unsynced:
                durable.write(ready)
            return
        survivors = self._random.randrange(len(unsynced) + 1)
        state = durable.hard_state
        for number, ready in enumerate(unsynced[: survivors + 1]):
            if number < survivors:
                durable.write(ready)
            elif ready.installed is None and ready.entries:
                kept = self._random.randrange(len(ready.entries) + 1)
                durable.write_entries(ready.first, ready.entries[:kept])
        kept_states = [state, *states][: self._random.randrange(len(states) + 1) + 1]
        durable.hard_state = kept_states[-1]

    def holds(self, index: int, term: int) -> bool:
        durable = self._durable
        if index < durable.snapshot.end:
            return True
        return index < durable.end and durable.log[index - durable.start].term == term


class FileDisk:
    """The storage of production, on files that lose what was not synced."""

    def __init__(self, chance: random.Random) -> None:
        self._random = chance
        self._fs = FaultyFileSystem()
        self._fs.makedirs(DIRECTORY)
        self._fs.sync_dir("")
        self._clock = ManualClock(1_700_000_000_000)
        self._storage: DurableStorage | None = None

    def open(self) -> DurableStorage:
        log = open_log(self._fs, DIRECTORY, "__cluster_metadata", 0, CONFIG, clean=False)
        self._storage = DurableStorage(log, self._clock)
        return self._storage

    def crash(self, power_lost: bool) -> None:
        self._storage = None
        if power_lost:
            self._fs.crash(self._random)

    def holds(self, index: int, term: int) -> bool | None:
        return None
