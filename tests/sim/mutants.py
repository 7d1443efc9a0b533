"""Bugs planted in Raft, one at a time, to see that the simulator finds them.

Each is a mistake that an implementation has made or could make; `planted` puts it into the production code for as long
as it lasts. A mutant that no seed catches says that the simulator, not the code, is wrong. Used by `test_raft.py`
and by `python -m tests.sim raft --mutant NAME`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from headrace.consensus.raft.effects import Effects
from headrace.consensus.raft.leader import Leadership, _WaitingRead
from headrace.consensus.raft.log import RaftLog
from headrace.consensus.raft.messages import AppendReply, Entry, HardState
from headrace.consensus.raft.node import RaftNode
from headrace.consensus.raft.progress import Progress

Patch = tuple[type, str, Any]
MUTANTS: dict[str, Callable[[], list[Patch]]] = {}


def mutant(make: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
    """Register what replaces what."""
    MUTANTS[make.__name__.replace("_", "-")] = make
    return make


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The production code with one bug in it."""
    patches = [
        (owner, attribute, value, owner.__dict__[attribute]) for owner, attribute, value in MUTANTS[name]()
    ]
    for owner, attribute, value, _ in patches:
        setattr(owner, attribute, value)
    try:
        yield
    finally:
        for owner, attribute, _, original in patches:
            setattr(owner, attribute, original)


@mutant
def commit_an_older_term_by_counting() -> list[Patch]:
    return [(Leadership, "_counts", lambda self, end: True)]


@mutant
def forget_the_vote_on_restart() -> list[Patch]:
    original = RaftNode.__init__

    def init(self: RaftNode, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.vote = None

    return [(RaftNode, "__init__", init)]


@mutant
def forget_the_term_on_restart() -> list[Patch]:
    original = RaftNode.__init__

    def init(self: RaftNode, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.term, self.vote = self.log.last_term, None
        self._effects._written = HardState(self.term)

    return [(RaftNode, "__init__", init)]


@mutant
def vote_twice_in_a_term() -> list[Patch]:
    original = RaftNode._on_vote_request

    def on_vote_request(self: RaftNode, message: Any) -> None:
        if not message.pre and self.leadership is None:
            self.vote = None
        original(self, message)

    return [(RaftNode, "_on_vote_request", on_vote_request)]


@mutant
def vote_for_a_shorter_log() -> list[Patch]:
    def is_covered_by(self: RaftLog, end: int, last_term: int) -> bool:
        return last_term >= self.last_term

    return [(RaftLog, "is_covered_by", is_covered_by)]


@mutant
def vote_for_the_longer_log_of_an_older_term() -> list[Patch]:
    def is_covered_by(self: RaftLog, end: int, last_term: int) -> bool:
        return end >= self.end

    return [(RaftLog, "is_covered_by", is_covered_by)]


@mutant
def skip_truncation_on_conflict() -> list[Patch]:
    def accept(self: RaftNode, start: int, entries: list[Entry]) -> None:
        fresh = entries[max(0, self.log.end - start) :]
        self.log.append(fresh)
        for number, entry in enumerate(fresh, self.log.end - len(fresh)):
            self.membership.follow(number, entry)

    return [(RaftNode, "_accept", accept)]


@mutant
def truncate_without_a_conflict() -> list[Patch]:
    def accept(self: RaftNode, start: int, entries: list[Entry]) -> None:
        if entries and start < self.log.end:
            self.log.truncate(start)
            self.membership.truncate(start)
        self.log.append(entries)
        for number, entry in enumerate(entries, start):
            self.membership.follow(number, entry)

    return [(RaftNode, "_accept", accept)]


@mutant
def accept_without_looking_at_the_entry_before() -> list[Patch]:
    original = RaftNode._on_append

    def on_append(self: RaftNode, message: Any) -> None:
        known = self.log.term_before(message.start)
        if known is not None and message.start <= self.log.end:
            message = type(message)(
                message.to,
                message.sender,
                message.term,
                message.start,
                known,
                message.commit,
                message.entries,
            )
        original(self, message)

    return [(RaftNode, "_on_append", on_append)]


@mutant
def reply_before_it_is_durable() -> list[Patch]:
    original = Effects.bundle

    def bundle(self: Effects, *args: Any) -> Any:
        replies = [message for message in self.messages if type(message) is AppendReply]
        self.messages = [message for message in self.messages if type(message) is not AppendReply]
        self.early += replies
        return original(self, *args)

    return [(Effects, "bundle", bundle)]


@mutant
def vote_before_it_is_durable() -> list[Patch]:
    original = Effects.bundle

    def bundle(self: Effects, *args: Any) -> Any:
        votes = [message for message in self.messages if type(message) is not AppendReply]
        self.messages = [message for message in self.messages if type(message) is AppendReply]
        self.early += votes
        return original(self, *args)

    return [(Effects, "bundle", bundle)]


@mutant
def count_its_own_log_before_it_is_durable() -> list[Patch]:
    def stored_end(self: Leadership, voter: int) -> int:
        return self._log.end if voter == self.id else self.progress[voter].match

    return [(Leadership, "_stored_end", stored_end)]


@mutant
def count_a_removed_voter() -> list[Patch]:
    original = Leadership.advance_commit

    def advance_commit(self: Leadership) -> bool:
        voters = self._membership._voters
        voters.append(dict.fromkeys([self.id, *self.progress], ""))
        try:
            return original(self)
        finally:
            voters.pop()

    return [(Leadership, "advance_commit", advance_commit)]


@mutant
def change_voters_while_a_change_is_open() -> list[Patch]:
    return [(Leadership, "_check_change", lambda self: None)]


@mutant
def acknowledge_more_than_was_compared() -> list[Patch]:
    original = RaftNode._on_append

    def on_append(self: RaftNode, message: Any) -> None:
        original(self, message)
        replies = self._effects.messages
        if replies and type(replies[-1]) is AppendReply and replies[-1].accepted:
            reply = replies.pop()
            replies.append(AppendReply(reply.to, reply.sender, reply.term, True, self.log.end))

    return [(RaftNode, "_on_append", on_append)]


@mutant
def commit_more_than_was_compared() -> list[Patch]:
    original = RaftNode._on_append

    def on_append(self: RaftNode, message: Any) -> None:
        original(self, message)
        self.log.commit_to(min(message.commit, self.log.end))

    return [(RaftNode, "_on_append", on_append)]


@mutant
def read_by_an_answer_from_before() -> list[Patch]:
    def enqueue_read(self: Leadership, token: object) -> None:
        self._waiting_reads.append(_WaitingRead(token, self._log.commit, self._round))
        self._release_reads()

    return [(Leadership, "_enqueue_read", enqueue_read)]


@mutant
def restore_the_first_voters_with_a_snapshot() -> list[Patch]:
    original = RaftNode._install

    def install(self: RaftNode, meta: Any) -> None:
        original(self, meta)
        self.membership.restore(self._initial_voters, meta.end)

    return [(RaftNode, "_install", install)]


@mutant
def never_send_again_what_was_lost() -> list[Patch]:
    original = Progress.probe

    def probe(self: Progress, next_index: int) -> None:
        original(self, max(next_index, self.next))

    return [(Progress, "probe", probe)]
