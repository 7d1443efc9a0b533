"""Effects on their way out: what the node has decided since the last bundle, put together in the right order.

Owns the numbering of bundles and the hard states that are on their way to the disk. Invariants: a message that carries
a promise is in the bundle that makes the promise durable, or in a later one, never in an earlier; bundles are numbered
without gaps. Owned by `RaftNode`, which fills it; its leadership writes to `early`.
"""

from collections import deque

from headrace.consensus.raft.log import RaftLog
from headrace.consensus.raft.messages import AnyMessage, HardState, SnapshotChunk, SnapshotMeta
from headrace.consensus.raft.ready import Read, Ready


class Effects:
    """See the module, and `Ready` for what each part means."""

    __slots__ = ("_number", "_states", "_written", "chunks", "early", "installed", "messages", "reads")

    def __init__(self, written: HardState) -> None:
        self.early: list[AnyMessage] = []
        self.messages: list[AnyMessage] = []
        self.chunks: list[SnapshotChunk] = []
        self.installed: SnapshotMeta | None = None
        self.reads: list[Read] = []
        self._number = 0
        self._written = written
        self._states: deque[tuple[int, HardState]] = deque()

    def bundle(self, term: int, vote: int | None, log: RaftLog, apply_bytes_max: int) -> Ready | None:
        """Everything since the last one; None when that is nothing."""
        changed = self._written.term != term or self._written.vote != vote
        if not (changed or self.early or self.messages or log.has_news or self.chunks or self.reads):
            return None
        self._number += 1
        if changed:
            self._written = HardState(term, vote)
            self._states.append((self._number, self._written))
        first, entries = log.take_pending(self._number)
        applied, committed = log.take_committed(apply_bytes_max)
        ready = Ready(
            self._number,
            self._written if changed else None,
            self.chunks,
            self.installed,
            first,
            entries,
            self.early[:],
            self.messages,
            applied,
            committed,
            self.reads,
        )
        self.early.clear()  # a leadership holds on to this very list
        self.messages, self.chunks, self.installed, self.reads = [], [], None, []
        return ready

    def persisted(self, number: int) -> HardState | None:
        """Everything up to bundle `number` is durable; the hard state that thereby is, if it is another."""
        state = None
        while self._states and self._states[0][0] <= number:
            state = self._states.popleft()[1]
        return state
