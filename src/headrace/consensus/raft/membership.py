"""Who votes, as the log tells it: the voters in force now, and those of before, should the log be cut.

Every leader restates the voters in its first entry, and a change of one voter is an entry of its own. Invariants: the
voters in force are those of the last such entry *in* the log, committed or not; when entries are truncated their voters
go with them and the ones before are in force again. Used by the node, which follows its log with it.
"""

from headrace.consensus.raft.messages import Entry, EntryKind, Voters, decode_voters


class Membership:
    """The voters along one log. Single owner."""

    __slots__ = ("_ends", "_voters")

    def __init__(self, voters: Voters, end: int = 0) -> None:
        """`voters` are in force for a log that reaches `end`."""
        # The voters from each end on; both lists rise together and hold at least what was before the log.
        self._ends = [end]
        self._voters = [voters]

    @property
    def voters(self) -> Voters:
        """Those in force."""
        return self._voters[-1]

    @property
    def changed_end(self) -> int:
        """The end of the entry that put them in force: once committed, so are they."""
        return self._ends[-1]

    def follow(self, index: int, entry: Entry) -> None:
        """An entry was appended."""
        if entry.kind != EntryKind.DATA:
            assert index >= self._ends[-1], "entries are appended in order"
            self._ends.append(index + 1)
            self._voters.append(decode_voters(entry.data))

    def truncate(self, end: int) -> None:
        """The log was cut to end at `end`."""
        while self._ends[-1] > end:
            assert len(self._ends) > 1, "cut below what is known to be committed"
            self._ends.pop()
            self._voters.pop()

    def at(self, end: int) -> Voters:
        """The voters of the log below `end`, for a snapshot of it."""
        for known, voters in zip(reversed(self._ends), reversed(self._voters)):
            if known <= end:
                return voters
        return self._voters[0]

    def may_vote(self, node: int, commit: int) -> bool:
        """Whether a node is a voter by what is committed, or by anything that may yet be."""
        return any(
            node in voters
            for number, voters in enumerate(self._voters)
            if number + 1 == len(self._ends) or self._ends[number + 1] > commit
        )

    def forget_before(self, end: int) -> None:
        """Nothing below `end` will be asked for again, nor cut."""
        while len(self._ends) > 1 and self._ends[1] <= end:
            del self._ends[0], self._voters[0]

    def restore(self, voters: Voters, end: int) -> None:
        """A snapshot took the place of the log."""
        self._ends = [end]
        self._voters = [voters]
