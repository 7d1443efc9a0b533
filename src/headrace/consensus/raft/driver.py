"""Joins a node, its storage and the world: takes bundles of effects and has them happen in the right order.

Owns the bundles that wait for the disk and the proposals that wait to be committed. Invariants: a bundle is written
before the next is taken; its `messages` leave, and the node hears of it, only after a sync that began after the write;
at most one sync runs at a time, and all bundles written before it began share it. Neither clock nor socket nor thread
is here: the host sends, and runs the sync where waiting does no harm. After any input, `pump` makes the effects happen;
several inputs of one turn may share one. An exception out of here means that this node is done for: the host drops it
and may make another from the same disk. Used by the server's host and by the simulator's.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeAlias

from headrace.base.errors import ErrorCode
from headrace.consensus.raft.messages import AnyMessage, Entry, SnapshotMeta
from headrace.consensus.raft.node import RaftNode
from headrace.consensus.raft.ready import Ready
from headrace.consensus.raft.refusal import Refused
from headrace.consensus.raft.storage import SyncTicket, WritableStorage

Done: TypeAlias = Callable[[Refused | None], None]


class RaftHost(Protocol):
    """The world, as the driver needs it."""

    def send(self, message: AnyMessage) -> None:
        """Try to get a message to its node; it may be lost, late, or doubled."""
        ...

    def sync(self, ticket: SyncTicket) -> None:
        """Have the ticket run, then call `RaftDriver.synced` with how it went. Never calls it right away."""
        ...

    def restore(self, meta: SnapshotMeta) -> None:
        """The storage has a snapshot that takes the place of everything applied."""
        ...

    def apply(self, first: int, entries: list[Entry]) -> None:
        """Entries from index `first` on are committed."""
        ...

    def read_done(self, token: object, end: int | None) -> None:
        """A read may go on once everything below `end` is applied; None when it must be asked elsewhere."""
        ...


class _Proposal:
    """Entries that wait: they are committed when the last of them is, in the term they were proposed in."""

    __slots__ = ("done", "end", "term")

    def __init__(self, end: int, term: int, done: Done) -> None:
        self.end = end
        self.term = term
        self.done = done


class RaftDriver:
    """See the module."""

    def __init__(self, node: RaftNode, storage: WritableStorage, host: RaftHost) -> None:
        self.node: Final = node
        self._storage: Final = storage
        self._host: Final = host
        self._unsynced: deque[Ready] = deque()
        self._ticket: SyncTicket | None = None
        self._synced_number = 0
        self._proposals: deque[_Proposal] = deque()
        self._pumping = False

    # -- inputs ----------------------------------------------------------------------------------------------

    def propose(self, entries: Sequence[bytes], done: Done) -> int:
        """Append entries; `done` is called with None when they are committed, or with why that is not known.

        A Refused given to `done` means that this node leads no more: the entries may be committed all the same. One
        that is raised means that nothing was appended.
        """
        return self.await_commit(self.node.propose(entries), done)

    def await_commit(self, end: int, done: Done) -> int:
        """As `propose`, of what the node was asked to append just now, up to `end`: a change of the voters."""
        self._proposals.append(_Proposal(end, self.node.term, done))
        return end

    def pump(self) -> None:
        """Have everything happen that the node wants done."""
        if self._pumping:
            return  # the host gave an input from within an effect: the loop below sees to it
        self._pumping = True
        try:
            while (ready := self.node.ready()) is not None:
                self._take(ready)
            self._drop_proposals()
        finally:
            self._pumping = False
        if self._unsynced and self._ticket is None:
            self._synced_number = self._unsynced[-1].number
            self._ticket = self._storage.begin_sync()
            self._host.sync(self._ticket)

    def synced(self, error: BaseException | None) -> None:
        """The ticket given to the host has run. Raises what went wrong: nothing more can be promised."""
        ticket, self._ticket = self._ticket, None
        assert ticket is not None, "no sync was under way"
        self._storage.finish_sync(ticket, error)
        if error is not None:
            raise error
        number, unsynced = self._synced_number, self._unsynced
        while unsynced and (unsynced[0].number <= number or not unsynced[0].must_sync):
            ready = unsynced.popleft()
            number = max(number, ready.number)
            self._release(ready)
        self.node.persisted(number)
        self.pump()

    def abandon(self) -> None:
        """This node is not used again: whoever waits for a proposal is told that its fate is not known."""
        proposals, self._proposals = self._proposals, deque()
        for proposal in proposals:
            proposal.done(self._lost())

    # -- effects ---------------------------------------------------------------------------------------------

    def _take(self, ready: Ready) -> None:
        host = self._host
        if ready.must_sync:
            self._storage.write(ready)
        for message in ready.early:
            host.send(message)
        if ready.installed is not None:
            host.restore(ready.installed)
        if ready.committed:
            host.apply(ready.applied, ready.committed)
            if self._proposals:
                self._complete_proposals(ready.applied, ready.committed)
        for read in ready.reads:
            host.read_done(read.token, read.end)
        if ready.must_sync or self._unsynced:
            self._unsynced.append(ready)
        else:
            self._release(ready)
            self.node.persisted(ready.number)

    def _release(self, ready: Ready) -> None:
        for message in ready.messages:
            self._host.send(message)

    # -- proposals -------------------------------------------------------------------------------------------

    def _complete_proposals(self, first: int, committed: list[Entry]) -> None:
        end = first + len(committed)
        proposals = self._proposals
        while proposals and proposals[0].end <= end:
            proposal = proposals.popleft()
            last = proposal.end - 1 - first
            if last >= 0 and committed[last].term == proposal.term:
                proposal.done(None)
            else:
                proposal.done(self._lost())

    def _drop_proposals(self) -> None:
        """Those that were made in a leadership that is over."""
        proposals, node = self._proposals, self.node
        while proposals and (node.leadership is None or proposals[0].term != node.term):
            proposals.popleft().done(self._lost())

    def _lost(self) -> Refused:
        node = self.node
        return Refused(
            ErrorCode.NOT_CONTROLLER,
            f"node {node.id} leads no more; whether it is committed is not known",
            node.leader,
        )
