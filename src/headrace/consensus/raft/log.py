"""The log as the node sees it: storage, the entries not handed to it yet, and how far each step has come.

Owns the tail that waits for the next bundle, the runs of terms, and the cursors. Invariants, ends being exclusive:
`applied <= commit <= end` and `applied <= durable_end <= end`; entries below `commit` are never cut or replaced; terms
never fall along the log, so where they change tells where two logs can diverge. An entry is durable only when the
bundle that carried it is, and was not cut since. Owned by the node; its leadership reads it too.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

from headrace.consensus.raft.messages import Entry, SnapshotMeta
from headrace.consensus.raft.storage import RaftStorage, take
from headrace.storage.epochs import EpochCache

NO_TERM: Final = 0  # the term before the first entry


class RaftLog:
    """See the module."""

    __slots__ = (
        "_pending",
        "_pending_first",
        "_storage",
        "_taken",
        "_terms",
        "applied",
        "commit",
        "durable_end",
        "end",
        "snapshot",
    )

    def __init__(self, storage: RaftStorage) -> None:
        self._storage = storage
        self.snapshot: SnapshotMeta = storage.snapshot
        self.end = storage.end
        self.durable_end = storage.end
        self.commit = self.applied = self.snapshot.end
        self._pending: list[Entry] = []
        self._pending_first = self.end
        # Bundles on their way to the disk: number, and how far the log is durable when they are.
        self._taken: deque[tuple[int, int]] = deque()
        self._terms = EpochCache()
        for term, first in storage.terms():
            self._terms.assign(term, first)
        assert storage.start <= self.snapshot.end <= self.end, "the log does not join its snapshot"

    # -- terms -----------------------------------------------------------------------------------------------

    @property
    def start(self) -> int:
        """The index of the first entry that can still be read."""
        return self._storage.start

    @property
    def last_term(self) -> int:
        """The term of the last entry."""
        term = self.term_before(self.end)
        assert term is not None
        return term

    def term_before(self, index: int) -> int | None:
        """The term of the entry before `index`; None when this log does not know it (any more)."""
        if index == self.snapshot.end:
            return self.snapshot.term
        if index > self.end or index <= self._storage.start:
            return NO_TERM if index == 0 else None
        return self._terms.epoch_for_offset(index - 1)

    def end_of_term(self, term: int, limit: int) -> int:
        """The largest end, at most `limit`, before which the last entry is of `term` or an older one.

        Below `start` when that lies among entries that are gone.
        """
        known = self._terms.end_offset_for(term, self.end).start_offset
        end = min(limit, self.end if known < 0 else known)
        if end and end == self.snapshot.end and self.snapshot.term > term:
            end = self.start - 1
        return end

    def divergence(self, start: int, prev_term: int) -> tuple[int, int]:
        """Where a log that has `prev_term` before `start` may still agree with this one: a term and its end."""
        end = max(self.end_of_term(prev_term, min(start, self.end)), self.commit)
        term = self.term_before(end)
        assert term is not None
        return term, end

    def is_covered_by(self, end: int, last_term: int) -> bool:
        """Whether a log that reaches `end` with `last_term` has all that this one may have committed."""
        return (last_term, end) >= (self.last_term, self.end)

    # -- entries ---------------------------------------------------------------------------------------------

    def entries(self, start: int, end: int, max_bytes: int) -> list[Entry]:
        """Entries from `start` on: as many below `end` as `max_bytes` allows, at least one if there is any."""
        if start >= end:
            return []
        first = self._pending_first
        if start >= first:
            return take(self._pending, start - first, end - first, max_bytes)
        found = self._storage.entries(start, min(end, first), max_bytes)
        if start + len(found) == first < end:
            room = max_bytes - sum([entry.size for entry in found])
            if room > 0:
                more = take(self._pending, 0, end - first, room)
                if more[0].size <= room:
                    found += more
        return found

    def read_chunk(self, position: int, max_bytes: int) -> tuple[bytes, bool]:
        """Bytes of the newest snapshot, and whether they are its last."""
        return self._storage.read_chunk(position, max_bytes)

    def append(self, entries: Sequence[Entry]) -> None:
        """Put entries at the end."""
        latest = self._terms.latest_epoch
        for index, entry in enumerate(entries, self.end):
            assert entry.term >= latest, "terms never fall"
            if entry.term != latest:
                self._terms.assign(entry.term, index)
                latest = entry.term
        self._pending += entries
        self.end += len(entries)

    def new_entries(self, start: int, entries: Sequence[Entry]) -> int:
        """How many of these entries, which begin at `start`, the log has; the next one it lacks, or has another."""
        for number, entry in enumerate(entries):
            index = start + number
            if index >= self.end or self.term_before(index + 1) != entry.term:
                return number
        return len(entries)

    def truncate(self, end: int) -> None:
        """Cut the log: entries from `end` on were never committed, and others take their place."""
        assert self.commit <= end < self.end, (
            f"cut at {end}, committed is {self.commit}, the log ends at {self.end}"
        )
        if end >= self._pending_first:
            del self._pending[end - self._pending_first :]
        else:
            self._pending.clear()
            self._pending_first = end
        self.end = end
        self.durable_end = min(self.durable_end, end)
        self._taken = deque([(number, min(until, end)) for number, until in self._taken])
        self._terms.truncate_from_end(end)

    def restore(self, meta: SnapshotMeta) -> None:
        """A snapshot takes the place of the log."""
        assert meta.end > self.commit, "a snapshot of what is here already"
        self.snapshot = meta
        self.end = self.commit = self.applied = self._pending_first = meta.end
        self.durable_end = meta.end
        self._pending.clear()
        self._taken.clear()
        self._terms.clear()

    def compacted(self) -> None:
        """The storage has a newer snapshot, and perhaps fewer entries."""
        self.snapshot = self._storage.snapshot
        self._terms.truncate_from_start(self._storage.start)

    # -- cursors ---------------------------------------------------------------------------------------------

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    @property
    def has_news(self) -> bool:
        """Whether there are entries to be written, or to be applied."""
        return bool(self._pending) or (self.applied < self.commit and self.applied < self.durable_end)

    def take_pending(self, number: int) -> tuple[int, list[Entry]]:
        """The entries for bundle `number`, and the index of their first."""
        first, entries = self._pending_first, self._pending
        if not entries:
            return first, []  # never the list itself, which goes on growing
        self._pending = []
        self._pending_first = self.end
        self._taken.append((number, self.end))
        return first, entries

    def persisted(self, number: int) -> None:
        """All bundles up to `number` are durable."""
        while self._taken and self._taken[0][0] <= number:
            self.durable_end = self._taken.popleft()[1]

    def commit_to(self, end: int) -> bool:
        """Everything below `end` is committed; whether that is news."""
        if end <= self.commit:
            return False
        assert end <= self.end, f"committed to {end}, the log ends at {self.end}"
        self.commit = end
        return True

    def take_committed(self, max_bytes: int) -> tuple[int, list[Entry]]:
        """Entries that may be applied now, and the index of their first."""
        applied = self.applied
        entries = self.entries(applied, min(self.commit, self.durable_end), max_bytes)
        self.applied += len(entries)
        return applied, entries
