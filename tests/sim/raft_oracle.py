"""What must hold of a Raft cluster at every moment, checked by one who sees all nodes and disks at once.

Owns the one true history: which node led which term, what was committed at which index, what every entry's predecessor
is. Each node is held against it after each step; a contradiction raises `Violation`. The properties are those of the
Raft paper (figure 3), and what follows for those who use it: what was acknowledged is there, reads see it.
"""

import zlib
from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.consensus.raft.messages import Entry, SnapshotMeta, Voters, decode_voters
from headrace.consensus.raft.node import RaftNode
from headrace.consensus.raft.quorum import majority

if TYPE_CHECKING:
    from tests.sim.raft_disk import RaftDisk


class Violation(AssertionError):
    """A property of the cluster does not hold."""


def digest_after(digest: int, entry: Entry) -> int:
    """The state of an application that has applied one entry more."""
    return zlib.crc32(entry.data, digest * 31 + entry.term & 0xFFFFFFFF)


class RaftOracle:
    """The history of one cluster."""

    def __init__(self, voters: Voters) -> None:
        self.disks: dict[int, RaftDisk] = {}
        self.leaders: dict[int, int] = {}
        self.on_leader: Callable[[int], None] = lambda node_id: None
        self.committed: list[Entry] = []
        self.digests: list[int] = [0]
        """The application's state after each number of entries."""
        self._commit_terms: list[int] = []
        self.voters_at: list[tuple[int, Voters]] = [(0, voters)]
        self.votes: dict[tuple[int, int], int] = {}
        self._entries: dict[tuple[int, int], tuple[int, bytes]] = {}
        self._seen: dict[int, tuple[int, int]] = {}

    # -- after each step -------------------------------------------------------------------------------------

    def forget(self, node_id: int) -> None:
        """The node's memory is gone: its commit point may begin anew, though not its term and vote."""
        self._seen.pop(node_id, None)

    def check(self, node: RaftNode) -> None:
        """Hold a node against the history."""
        commit = node.log.commit
        now = (node.term, commit)
        before = self._seen.get(node.id)
        if before != now:
            self._seen[node.id] = now
            if before is not None and (node.term < before[0] or commit < before[1]):
                raise Violation(f"node {node.id} went back from term and commit {before} to {now}")
            if commit > (before[1] if before else 0):
                self._check_commit(node, commit)
        if node.leadership is not None and self.leaders.get(node.term) != node.id:
            self._check_leader(node)

    def _check_leader(self, node: RaftNode) -> None:
        other = self.leaders.setdefault(node.term, node.id)
        if other != node.id:
            raise Violation(f"election safety: {other} and {node.id} lead term {node.term}")
        self.on_leader(node.id)
        # Entries committed in an older term; a leader may come late, when a newer one has gone on already.
        end = bisect_left(self._commit_terms, node.term)
        log = node.log
        if log.snapshot.end < end and log.term_before(end) != self.committed[end - 1].term:
            raise Violation(
                f"leader completeness: {node.id} leads term {node.term} with a log that ends at {log.end}, "
                f"without entry {end - 1} of term {self.committed[end - 1].term}, committed before"
            )

    def _check_commit(self, node: RaftNode, commit: int) -> None:
        known = len(self.committed)
        log = node.log
        at = min(commit, known)
        if at > log.snapshot.end and log.term_before(at) != self.committed[at - 1].term:
            raise Violation(
                f"state-machine safety: entry {at - 1} is committed in term {self.committed[at - 1].term}, "
                f"and node {node.id} takes its own of term {log.term_before(at)} for committed"
            )
        if commit <= known:
            return
        for index, entry in enumerate(log.entries(known, commit, 1 << 40), known):
            self.committed.append(entry)
            self._commit_terms.append(node.term)
            self.digests.append(digest_after(self.digests[-1], entry))
            if entry.kind:
                self.voters_at.append((index + 1, decode_voters(entry.data)))
        if node.leadership is not None:
            self._check_on_disks(node, commit)

    def _check_on_disks(self, node: RaftNode, commit: int) -> None:
        """What a leader commits is on the disks of a majority, so that no set of crashes undoes it."""
        voters = node.voters
        index, term = commit - 1, self.committed[-1].term
        held = 0
        for voter in voters:
            holds = self.disks[voter].holds(index, term)
            if holds is None:
                return
            held += holds
        if held < majority(len(voters)):
            raise Violation(
                f"durability: {node.id} committed entry {index}, {held} of {sorted(voters)} have it"
            )

    # -- what nodes do ---------------------------------------------------------------------------------------

    def voted(self, node_id: int, term: int, vote: int) -> None:
        """A node told another of its vote."""
        before = self.votes.setdefault((node_id, term), vote)
        if before != vote:
            raise Violation(f"one vote a term: {node_id} voted for {before} and {vote} in term {term}")

    def wrote(self, node_id: int, first: int, prev_term: int, entries: list[Entry]) -> None:
        """A node wrote entries behind one of `prev_term`: the same index and term is the same log up to there."""
        for index, entry in enumerate(entries, first):
            told = (prev_term, entry.data)
            before = self._entries.setdefault((index, entry.term), told)
            if before != told:
                raise Violation(
                    f"log matching: node {node_id} has entry {index} of term {entry.term} as {told}, another {before}"
                )
            if entry.term < prev_term:
                raise Violation(f"log matching: terms fall at entry {index} of node {node_id}")
            prev_term = entry.term

    def applied(self, node_id: int, first: int, entries: list[Entry]) -> int:
        """A node applied entries; the state it must be in."""
        if (
            first + len(entries) > len(self.committed)
            or self.committed[first : first + len(entries)] != entries
        ):
            raise Violation(
                f"state-machine safety: node {node_id} applied others than committed from {first} on"
            )
        return self.digests[first + len(entries)]

    def restored(self, node_id: int, meta: SnapshotMeta, digest: int) -> None:
        """A node took a snapshot for its state."""
        if meta.end > len(self.committed) or self.digests[meta.end] != digest:
            raise Violation(f"snapshot safety: node {node_id} restored another state than that of {meta.end}")
        if meta.end and self.committed[meta.end - 1].term != meta.term:
            raise Violation(
                f"snapshot safety: the snapshot that reaches {meta.end} is not of term {meta.term}"
            )
        voters = [voters for end, voters in self.voters_at if end <= meta.end][-1]
        if meta.voters is not None and meta.voters != voters:
            raise Violation(f"snapshot safety: {node_id} took {meta.voters} for the voters at {meta.end}")

    def acknowledged(self, node_id: int, end: int, data: bytes) -> None:
        """A client was told that its entry, the last before `end`, is committed."""
        if end > len(self.committed) or self.committed[end - 1].data != data:
            raise Violation(
                f"node {node_id} acknowledged {data!r} at {end - 1}, which is not what is committed"
            )
