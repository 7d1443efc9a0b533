"""The Raft state machine of one node: messages, ticks and proposals in, one bundle of effects at a time out.

Theory of operation
-------------------
A `RaftNode` touches no clock, socket, disk or chance of its own. `step` takes a message, `tick` a unit of time,
`propose` and its like a wish of the application; `ready` gives what is to be done about all that (see `ready.py`), and
`persisted` says that a bundle is on disk. Time is ticks, chance is an injected source, so that the same inputs always
give the same outputs: a simulator runs whole clusters of it from one seed.

*Indexes.* Entries are numbered from 0 and every end is exclusive, as offsets of a Kafka partition are: a log "ends at
7" when 6 is its last entry, "committed to 7" means entries 0 to 6 are. Terms are leader epochs. The entry "before index
0" exists in every log and has term 0.

*Roles.* A node is FOLLOWER, PRE_CANDIDATE, CANDIDATE or LEADER; a node that is not among the voters is an observer,
which is a follower that never stands for election. All of what only a leader knows is in `Leadership`, which is made
at election and thrown away at its end. The voters are told by the log itself (`membership.py`).

    FOLLOWER --timeout--> PRE_CANDIDATE --majority would vote--> CANDIDATE --majority votes--> LEADER
        ^                      |  ^  \\-- timeout: again              |                          |
        \\----------------------+--+----- a leader, a higher term, or too many refusals <--------+-- no majority heard

*Elections.* A follower that has heard no leader for a random time first asks, without entering a new term, whether it
would be elected (pre-vote): a node that was cut off cannot disturb the others with a term that it alone has reached.
Nobody grants a vote, or notices a higher term in a request for one, within an election timeout of having heard its
leader; only an election that the leader itself asked for (transfer) goes through. A leader that has not heard from a
majority for an election timeout steps down (check-quorum), so those rules cannot keep a dead leader alive.

*Durability.* What a node promises, it must know after a power cut. Three kinds of message carry a promise: a granted
vote, a candidate's request (it voted for itself), and "my log matches yours up to here". These are in
`Ready.messages`, released once the bundle is durable; everything else is in `Ready.early`. A candidate counts its
own vote, and a leader its own log, only when durable: a leader's disk works in parallel with its followers', and its
entry may be committed before it is on its own disk. Bundles are durable in order, so a reply that repeats an older
promise waits for the older write too.

*Replication.* A follower accepts an append only behind an entry it shares with the leader; otherwise it answers with
the end of the last term that could match, and the leader skips back a term a round trip. Entries that conflict are cut,
never below the commit point: that would be a broken promise, and asserts.

*Commitment.* A leader commits by counting only entries of its own term; the first, which every leader appends when
elected, commits all before it. Followers learn the commit point from appends and heartbeats, never past what is known
to match.

*Membership.* One voter is added or removed at a time, in force as soon as it is in the log. A leader may begin a
change only when the last one is committed, and an entry of its own term is: majorities of neighbouring memberships
overlap, those of two concurrent changes need not. A leader that removed itself leads, without counting itself, until
that is committed, then hands over; and as long as that is not committed it may be the only one who can be elected.
Nodes vote for whoever asks, member or not: a new voter may be asked before it knows that it is one. A node that no
leader sends to, be it an observer or a voter that missed its own removal, asks the voters it knows to be sent the log,
and who of them does not lead passes that on.

*Failure.* An expected refusal raises `Refused`, which carries a Kafka error code and the leader to ask instead. What
cannot happen asserts: the node is then not to be trusted and must be stopped.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Final, Protocol

from headrace.base.errors import ErrorCode
from headrace.consensus.raft.effects import Effects
from headrace.consensus.raft.leader import Leadership
from headrace.consensus.raft.log import RaftLog
from headrace.consensus.raft.membership import Membership
from headrace.consensus.raft.messages import (
    AnyMessage,
    Append,
    AppendReply,
    Entry,
    Follow,
    HardState,
    Heartbeat,
    HeartbeatReply,
    SnapshotChunk,
    SnapshotMeta,
    SnapshotReply,
    TransferNow,
    VoteReply,
    VoteRequest,
    Voters,
)
from headrace.consensus.raft.quorum import Outcome, outcome
from headrace.consensus.raft.ready import Ready
from headrace.consensus.raft.refusal import Refused
from headrace.consensus.raft.settings import RaftSettings
from headrace.consensus.raft.storage import RaftStorage

GONE_TICKS: Final = 3  # followers of a leader that is gone stand for election within so many ticks
SCAN_BYTES: Final = 1024 * 1024  # of the log, read at a time when a node is made


class Role(Enum):
    """What a node is at the moment."""

    FOLLOWER = "follower"
    PRE_CANDIDATE = "pre-candidate"
    CANDIDATE = "candidate"
    LEADER = "leader"


class Chance(Protocol):
    """Where election timeouts come from: `random.Random`, seeded or not."""

    def randrange(self, stop: int, /) -> int: ...


class RaftNode:
    """See the module."""

    def __init__(
        self,
        node_id: int,
        voters: Voters,
        storage: RaftStorage,
        chance: Chance,
        settings: RaftSettings | None = None,
    ) -> None:
        """`voters` are those the cluster was begun with, in force until the log tells others."""
        if not voters:
            raise ValueError("a cluster needs a voter")
        self.id: Final = node_id
        self._settings: Final = settings or RaftSettings()
        self._storage: Final = storage
        self._chance: Final = chance
        self._initial_voters: Final = voters
        self.log: Final = RaftLog(storage)
        # Entries of a term may have outlived a crash that the term itself did not.
        hard_state = storage.hard_state
        self.term = max(hard_state.term, self.log.last_term)
        self.vote = hard_state.vote if self.term == hard_state.term else None
        self.role = Role.FOLLOWER
        self.leader: int | None = None
        self.leadership: Leadership | None = None
        self.membership: Final = self._read_membership()
        self.ticks = 0
        self._elapsed = 0
        self._timeout = 0
        self._votes: dict[int, bool] = {}
        self._incoming: tuple[int, int, int, int] | None = None  # of whom: sender, its term, end, last term
        self._incoming_bytes = 0
        self._effects: Final = Effects(hard_state)
        self._handlers: Final[dict[type[Any], Callable[[Any], None]]] = {
            VoteRequest: self._on_vote_request,
            VoteReply: self._on_vote_reply,
            Append: self._on_append,
            AppendReply: self._on_append_reply,
            Heartbeat: self._on_heartbeat,
            HeartbeatReply: self._on_heartbeat_reply,
            SnapshotChunk: self._on_chunk,
            SnapshotReply: self._on_snapshot_reply,
            TransferNow: self._on_transfer_now,
            Follow: self._on_follow,
        }
        self._wait_anew()

    def _read_membership(self) -> Membership:
        log = self.log
        index = log.snapshot.end
        membership = Membership(log.snapshot.voters or self._initial_voters, index)
        while index < log.end:
            for entry in log.entries(index, log.end, SCAN_BYTES):
                membership.follow(index, entry)
                index += 1
        return membership

    @property
    def voters(self) -> Voters:
        """The voters in force."""
        return self.membership.voters

    @property
    def is_voter(self) -> bool:
        return self.id in self.membership.voters

    # -- effects ---------------------------------------------------------------------------------------------

    def ready(self) -> Ready | None:
        """What is to be done now, None when nothing is."""
        if self.leadership is not None:
            self._effects.reads += self.leadership.take_reads()
        return self._effects.bundle(self.term, self.vote, self.log, self._settings.apply_bytes_max)

    def persisted(self, number: int) -> None:
        """Everything up to bundle `number` is durable."""
        self.log.persisted(number)
        state = self._effects.persisted(number)
        if self.leadership is not None:
            if self.leadership.advance_commit():
                self.leadership.tell_commit()
                self._on_commit(self.leadership)
        elif self.role is Role.CANDIDATE and state == HardState(self.term, self.id):
            self._votes[self.id] = True
            self._count_votes()

    # -- time ------------------------------------------------------------------------------------------------

    def _wait_anew(self) -> None:
        """Wait for a leader, for a time of chance; a voter that is alone need not."""
        self._elapsed = 0
        ticks = self._settings.election_ticks
        alone = len(self.voters) == 1 and self.is_voter
        self._timeout = 0 if alone else ticks + self._chance.randrange(ticks)

    def tick(self) -> None:
        """A unit of time has passed."""
        self.ticks += 1
        self._elapsed += 1
        if self.leadership is not None:
            if not self.leadership.tick(self.ticks):
                self._become_follower(self.term, None)
        elif self._elapsed >= self._timeout:
            if self.membership.may_vote(self.id, self.log.commit):
                self._campaign(pre=True)
            else:
                self.leader = None
                self._wait_anew()
                self._ask_to_follow()

    def leader_gone(self, node: int) -> None:
        """A node is known to be gone: when it led, do not wait to hear from it again.

        Only a hint, about time: nothing that is promised depends on its being right.
        """
        if self.leader == node and self.leadership is None:
            self.leader = None
            self.hasten()

    def hasten(self) -> None:
        """Stand for election soon, if there is no leader: others can be reached again. Only a hint, as the above."""
        if self.leader is None and self.leadership is None:
            self._timeout = min(self._timeout, self._elapsed + 1 + self._chance.randrange(GONE_TICKS))

    def _ask_to_follow(self) -> None:
        others = [voter for voter in self.voters if voter != self.id]
        self._effects.early += [Follow(voter, self.id, self.term) for voter in others]

    @property
    def _hears_leader(self) -> bool:
        """Whether there is a leader as far as this node can tell: then it helps nobody to become another."""
        return self.leadership is not None or (
            self.leader is not None and self._elapsed < self._settings.election_ticks
        )

    # -- roles -----------------------------------------------------------------------------------------------

    def _become_follower(self, term: int, leader: int | None) -> None:
        if term != self.term:
            assert term > self.term
            self.term = term
            self.vote = None
        if self.leadership is not None:
            self._effects.reads += self.leadership.drop_reads()
            self.leadership = None
        self.role = Role.FOLLOWER
        self.leader = leader
        self._wait_anew()

    def campaign(self) -> None:
        """Stand for election now, if this node votes and does not lead."""
        if self.is_voter and self.leadership is None:
            self._campaign(pre=True)

    def _campaign(self, *, pre: bool, transfer: bool = False) -> None:
        self.leader = None
        self._wait_anew()
        self._votes = {}
        if pre:
            if self.role is Role.PRE_CANDIDATE:
                self._ask_to_follow()  # in vain before: it may be a voter no more, and not know it
            self.role = Role.PRE_CANDIDATE
            self._votes[self.id] = True
        else:
            self.role = Role.CANDIDATE
            self.term += 1
            self.vote = self.id
        log = self.log
        term = self.term + 1 if pre else self.term
        outbox = self._effects.early if pre else self._effects.messages
        for voter in self.voters:
            if voter != self.id:
                outbox.append(VoteRequest(voter, self.id, term, log.end, log.last_term, pre, transfer))
        self._count_votes()

    def _count_votes(self) -> None:
        result = outcome(self.voters, self._votes)
        if result is Outcome.LOST:
            self._become_follower(self.term, None)
        elif result is Outcome.WON:
            if self.role is Role.PRE_CANDIDATE:
                self._campaign(pre=False)
            else:
                self._become_leader()

    def _become_leader(self) -> None:
        assert self.role is Role.CANDIDATE and self.vote == self.id
        self.role = Role.LEADER
        self.leader = self.id
        self.leadership = Leadership(
            self.id, self.term, self.log, self.membership, self._settings, self._effects.early, self.ticks
        )
        self.leadership.begin()

    # -- wishes of the application ---------------------------------------------------------------------------

    def _leading(self) -> Leadership:
        leadership = self.leadership
        if leadership is None:
            raise Refused(
                ErrorCode.NOT_CONTROLLER, f"node {self.id} does not lead, {self.leader} may", self.leader
            )
        if leadership.transferee is not None:
            raise Refused(
                ErrorCode.NOT_CONTROLLER,
                f"node {self.id} is handing over to {leadership.transferee}",
                leadership.transferee,
            )
        return leadership

    def propose(self, entries: Sequence[bytes]) -> int:
        """Append entries to the log; the end that is to be committed for them, in this term."""
        return self._leading().propose(entries)

    def add_voter(self, voter: int, address: str) -> int:
        """Let an observer that has the log vote; the end that is to be committed for it."""
        return self._leading().add_voter(voter, address)

    def remove_voter(self, voter: int) -> int:
        """Let a voter vote no more; the end that is to be committed for it."""
        return self._leading().remove_voter(voter)

    def transfer(self, to: int) -> None:
        """Hand leadership over to a voter; given up when that has not happened within an election timeout."""
        self._leading().transfer(to)

    def read(self, token: object) -> None:
        """Ask for a linearizable read: `Ready.reads` has `token` with the end that must be applied first."""
        self._leading().read(token)

    def snapshot_meta(self, end: int) -> SnapshotMeta:
        """What a snapshot of everything applied below `end` stands for."""
        term = self.log.term_before(end)
        assert end <= self.log.applied and term is not None, f"no snapshot can reach {end}"
        return SnapshotMeta(end, term, self.membership.at(end))

    def compacted(self) -> None:
        """The application made a snapshot: the storage has it, and may have dropped entries below its end."""
        self.log.compacted()
        self.membership.forget_before(self.log.snapshot.end)

    # -- messages --------------------------------------------------------------------------------------------

    def step(self, message: AnyMessage) -> None:
        """Take a message."""
        if message.term > self.term:
            if not self._on_newer_term(message):
                return
        elif message.term < self.term:
            self._on_older_term(message)
            return
        self._handlers[type(message)](message)

    def _on_newer_term(self, message: AnyMessage) -> bool:
        """Whether the message is to be looked at further."""
        if isinstance(message, VoteRequest):
            if self._hears_leader and not message.transfer:
                return False
            if message.pre:
                return True
        elif isinstance(message, VoteReply) and message.pre and message.granted:
            return True  # it has the term that was asked about
        self._become_follower(message.term, None)
        return True

    def _on_older_term(self, message: AnyMessage) -> None:
        """Tell a leader or candidate of the past what term it is; anything else is merely late."""
        if isinstance(message, Append | Heartbeat | SnapshotChunk):
            self._effects.early.append(AppendReply(message.sender, self.id, self.term, False, self.log.end))
        elif isinstance(message, VoteRequest):
            self._effects.early.append(VoteReply(message.sender, self.id, self.term, False, message.pre))
        elif isinstance(message, Follow):
            self._on_follow(message)  # from before the election, of which it is told that way

    def _on_vote_request(self, message: VoteRequest) -> None:
        pre = message.pre
        free = self.vote == message.sender or (self.vote is None and self.leader is None)
        may = free or (pre and message.term > self.term)
        granted = may and self.log.is_covered_by(message.end, message.last_term)
        if pre:
            term = message.term if granted else self.term
            self._effects.early.append(VoteReply(message.sender, self.id, term, granted, pre))
        elif granted:
            self.vote = message.sender
            self._elapsed = 0
            self._effects.messages.append(VoteReply(message.sender, self.id, self.term, granted))
        else:
            self._effects.early.append(VoteReply(message.sender, self.id, self.term, granted))

    def _on_vote_reply(self, message: VoteReply) -> None:
        if message.pre:
            asked = self.term + 1 if message.granted else self.term
            counts = self.role is Role.PRE_CANDIDATE and message.term == asked
        else:
            counts = self.role is Role.CANDIDATE
        if counts:
            self._votes.setdefault(message.sender, message.granted)
            self._count_votes()

    def _on_leader(self, message: Append | Heartbeat | SnapshotChunk) -> None:
        """This term has a leader, and it is there."""
        assert self.leadership is None, f"two leaders in term {self.term}: {self.id} and {message.sender}"
        if self.role is not Role.FOLLOWER:
            self._become_follower(self.term, message.sender)
        self.leader = message.sender
        self._elapsed = 0

    def _on_append(self, message: Append) -> None:
        self._on_leader(message)
        log, start, entries = self.log, message.start, message.entries
        end = start + len(entries)
        attempt = message.attempt
        if start < log.commit:  # all below it is as the leader's, and may be gone from here
            entries = entries[log.commit - start :]
            start = log.commit
            end = max(end, start)
        elif log.term_before(start) != message.prev_term:
            last_term, known_end = log.divergence(start, message.prev_term)
            self._effects.early.append(
                AppendReply(message.sender, self.id, self.term, False, known_end, last_term, message.attempt)
            )
            return
        self._accept(start, entries)
        log.commit_to(min(message.commit, end))
        self._effects.messages.append(
            AppendReply(message.sender, self.id, self.term, True, end, attempt=attempt)
        )

    def _accept(self, start: int, entries: list[Entry]) -> None:
        """Make the log from `start` on the leader's, as far as these entries go."""
        known = self.log.new_entries(start, entries)
        if known == len(entries):
            return
        index = start + known
        if index < self.log.end:
            self.log.truncate(index)
            self.membership.truncate(index)
        fresh = entries[known:]
        self.log.append(fresh)
        for number, entry in enumerate(fresh, index):
            self.membership.follow(number, entry)

    def _on_append_reply(self, message: AppendReply) -> None:
        if self.leadership is not None and self.leadership.on_append_reply(message):
            self._on_commit(self.leadership)

    def _on_commit(self, leadership: Leadership) -> None:
        """More is committed: a leader that is no voter any more may have done its part."""
        if not self.is_voter and self.membership.changed_end <= self.log.commit:
            leadership.hand_over()
            self._become_follower(self.term, None)

    def _on_heartbeat(self, message: Heartbeat) -> None:
        self._on_leader(message)
        self.log.commit_to(min(message.commit, self.log.end))
        if message.round:
            self._effects.early.append(HeartbeatReply(message.sender, self.id, self.term, message.round))

    def _on_heartbeat_reply(self, message: HeartbeatReply) -> None:
        if self.leadership is not None:
            self.leadership.on_heartbeat_reply(message)

    def _on_chunk(self, message: SnapshotChunk) -> None:
        self._on_leader(message)
        if self._effects.installed is not None:
            return  # one at a time: the next is sent again
        log, end = self.log, message.end
        if end <= log.commit or log.term_before(end) == message.last_term:
            log.commit_to(end)
            self._effects.messages.append(AppendReply(message.sender, self.id, self.term, True, end))
            return
        incoming = (message.sender, message.term, end, message.last_term)
        if self._incoming != incoming:
            self._incoming, self._incoming_bytes = incoming, 0
        if message.position == self._incoming_bytes:
            self._effects.chunks.append(message)
            self._incoming_bytes += len(message.data)
            if message.last:
                self._install(message.meta)
                self._effects.messages.append(AppendReply(message.sender, self.id, self.term, True, end))
                return
        self._effects.early.append(
            SnapshotReply(message.sender, self.id, self.term, end, self._incoming_bytes)
        )

    def _install(self, meta: SnapshotMeta) -> None:
        self._incoming = None
        self._effects.installed = meta
        self.log.restore(meta)
        self.membership.restore(meta.voters or self._initial_voters, meta.end)

    def _on_snapshot_reply(self, message: SnapshotReply) -> None:
        if self.leadership is not None:
            self.leadership.on_snapshot_reply(message)

    def _on_transfer_now(self, message: TransferNow) -> None:
        if self.is_voter and self.leadership is None:
            self._campaign(pre=False, transfer=True)

    def _on_follow(self, message: Follow) -> None:
        if self.leadership is not None:
            self.leadership.follow(message.sender)
        elif not message.forwarded and self.leader is not None and self._hears_leader:
            self._effects.early.append(Follow(self.leader, message.sender, self.term, forwarded=True))
