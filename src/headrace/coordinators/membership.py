"""The members of a classic group: who they are, which protocols they share, who leads, who is owed a reply.

Owns the bookkeeping that the steps of `classic_group` stand on. Invariants: a static member's instance id names exactly
one member; `votes[p]` is how many members support protocol `p`; the leader is a member, or there is none; a member id
is pending or a member, never both. No step of the protocol is decided here.
"""

from collections.abc import Iterator
from typing import NamedTuple

from headrace.base.errors import ErrorCode, KafkaError
from headrace.coordinators.effects import Body, Effects, Ticket
from headrace.coordinators.records import MemberValue


class JoinRequest(NamedTuple):
    """What a member says of itself when it joins."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocol_type: str
    protocols: tuple[tuple[str, bytes], ...]
    requires_known_id: bool
    """Whether this version has a member come again with the id it is given."""
    skips_assignment: bool
    """Whether this version can tell a leader to leave the assignment as it is."""


class Member:
    """One member."""

    __slots__ = (
        "assignment",
        "client_host",
        "client_id",
        "instance_id",
        "is_new",
        "joining",
        "member_id",
        "protocols",
        "rebalance_timeout_ms",
        "session_timeout_ms",
        "syncing",
        "watching",
    )

    def __init__(
        self, member_id: str, instance_id: str | None, client_id: str, client_host: str, assignment: bytes
    ) -> None:
        self.member_id = member_id
        self.instance_id = instance_id
        self.client_id = client_id
        self.client_host = client_host
        self.assignment = assignment
        self.session_timeout_ms = 0
        self.rebalance_timeout_ms = 0
        self.protocols: tuple[tuple[str, bytes], ...] = ()
        self.is_new = False
        self.joining: Ticket | None = None
        self.syncing: Ticket | None = None
        self.watching: Ticket | None = None
        """Whoever wants to hear at once that the member has to join again; it may have gone, and is then not there."""

    def metadata(self, protocol: str | None) -> bytes:
        """What it said for the chosen protocol."""
        return next((data for name, data in self.protocols if name == protocol), b"")

    def is_excused(self) -> bool:
        """Whether it need not heartbeat: it waits for us. A new one may have gone without a word, and is not."""
        return not self.is_new and (self.joining is not None or self.syncing is not None)


class Membership:
    """The members of one group."""

    def __init__(self) -> None:
        self.by_id: dict[str, Member] = {}
        self.static: dict[str, str] = {}
        self.pending: dict[str, None] = {}
        self.pending_sync: dict[str, None] = {}
        self.votes: dict[str, int] = {}
        self.leader: str | None = None
        self.joining_count = 0

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[Member]:
        return iter(self.by_id.values())

    def __contains__(self, member_id: str) -> bool:
        return member_id in self.by_id

    # -- coming and going ----------------------------------------------------------------------------------------------

    def add(self, member: Member) -> None:
        if member.instance_id is not None:
            assert member.instance_id not in self.static, "a static member is replaced, not added twice"
            self.static[member.instance_id] = member.member_id
        if self.leader is None:
            self.leader = member.member_id
        self.by_id[member.member_id] = member
        self._count(member, 1)
        if member.joining is not None:
            self.joining_count += 1
        self.pending.pop(member.member_id, None)

    def remove(self, member_id: str) -> None:
        """Forget a member or a pending one; who is owed a reply must have got it before."""
        member = self.by_id.pop(member_id, None)
        if member is not None:
            self._count(member, -1)
            if member.joining is not None:
                self.joining_count -= 1
            if member.instance_id is not None:
                self.static.pop(member.instance_id, None)
        if member_id == self.leader:
            self.leader = next(iter(self.by_id), None)
        self.pending.pop(member_id, None)
        self.pending_sync.pop(member_id, None)

    def replace(self, old_id: str, new_id: str) -> Member:
        """The same static member under a new id: it restarted, or took over from one that was."""
        member = self.by_id.pop(old_id)
        assert member.instance_id is not None, "only static members are replaced"
        member.member_id = new_id
        self.by_id[new_id] = member
        self.static[member.instance_id] = new_id
        if self.leader == old_id:
            self.leader = new_id
        if old_id in self.pending_sync:
            del self.pending_sync[old_id]
            self.pending_sync[new_id] = None
        return member

    def update(self, member: Member, request: JoinRequest, ticket: Ticket | None) -> None:
        """Take what a member says anew, and owe it a reply."""
        self._count(member, -1)
        member.protocols = request.protocols
        self._count(member, 1)
        member.rebalance_timeout_ms = request.rebalance_timeout_ms
        member.session_timeout_ms = request.session_timeout_ms
        self.joining_count += (ticket is not None) - (member.joining is not None)
        member.joining = ticket

    def _count(self, member: Member, step: int) -> None:
        for name in dict.fromkeys([name for name, _ in member.protocols]):
            count = self.votes.get(name, 0) + step
            if count:
                self.votes[name] = count
            else:
                self.votes.pop(name, None)

    # -- replies that are owed -----------------------------------------------------------------------------------------

    def answer_join(self, member: Member, body: Body, out: Effects) -> None:
        if member.joining is not None:
            out.reply(member.joining, body)
            member.joining = None
            self.joining_count -= 1

    def answer_sync(self, member: Member, body: Body, out: Effects) -> bool:
        if member.syncing is None:
            return False
        out.reply(member.syncing, body)
        member.syncing = None
        return True

    def answer_watch(self, member: Member, error: ErrorCode, out: Effects) -> None:
        if member.watching is not None:
            out.reply(member.watching, {"error_code": error})
            member.watching = None

    # -- questions -----------------------------------------------------------------------------------------------------

    def all_joined(self) -> bool:
        return len(self.by_id) == self.joining_count and not self.pending

    def rebalance_timeout_ms(self) -> int:
        return max((member.rebalance_timeout_ms for member in self), default=0)

    def elect_joined_leader(self) -> bool:
        """Make sure that the leader is one that came back; whether there is one."""
        if self.leader is None:
            return False
        if self.by_id[self.leader].joining is None:
            joined = next((member for member in self if member.joining is not None), None)
            if joined is None:
                return False
            self.leader = joined.member_id
        return True

    def shares_protocol(self, names: set[str]) -> bool:
        """Whether one of these protocols is supported by every member."""
        return any(self.votes.get(name, 0) == len(self.by_id) for name in names)

    def select_protocol(self) -> str:
        """The protocol that all support and most prefer."""
        everyone = len(self.by_id)
        tally: dict[str, int] = {}
        for member in self:
            preferred = next(name for name, _ in member.protocols if self.votes[name] == everyone)
            tally[preferred] = tally.get(preferred, 0) + 1
        return max(tally, key=lambda name: tally[name])

    def check(self, member_id: str, instance_id: str | None) -> Member:
        """The member, or UNKNOWN_MEMBER_ID, or FENCED_INSTANCE_ID when its instance id went to another."""
        if instance_id is not None:
            holder = self.static.get(instance_id)
            if holder is None:
                raise KafkaError(ErrorCode.UNKNOWN_MEMBER_ID)
            if holder != member_id:
                raise KafkaError(ErrorCode.FENCED_INSTANCE_ID)
        member = self.by_id.get(member_id)
        if member is None:
            raise KafkaError(ErrorCode.UNKNOWN_MEMBER_ID)
        return member


def member_of(value: MemberValue, protocol: str | None) -> Member:
    """A member as a record tells it."""
    member = Member(value.member_id, value.instance_id, value.client_id, value.client_host, value.assignment)
    member.session_timeout_ms = value.session_timeout_ms
    member.rebalance_timeout_ms = value.rebalance_timeout_ms
    member.protocols = () if protocol is None else ((protocol, value.subscription),)
    return member
