"""One group of the classic protocol: JoinGroup, SyncGroup, Heartbeat, LeaveGroup.

Theory of operation. A group moves through generations. In Empty nobody is there. A join opens PreparingRebalance, in
which every member must join (again); the first rebalance of an empty group waits a little for more members. When all
have joined or the rebalance timeout is over, those who did not come are out, the generation is raised, a protocol that
all support is chosen, and every join is answered: the leader's with the members' metadata, the others' without. That is
CompletingRebalance: members ask with SyncGroup what is theirs and wait for the leader's, which carries the assignment.
The assignment is stored; when it is committed, everyone is answered and the group is Stable. Whoever joins anew, leaves
or falls silent opens the next rebalance. Members that waited for nothing that a generation owes them are told
REBALANCE_IN_PROGRESS, those of an older one ILLEGAL_GENERATION, those the group does not know UNKNOWN_MEMBER_ID.

Invariants: states change only as `TRANSITIONS` says; a reply that is owed (a parked join or sync) is given once;
in Stable every member's assignment is that of the stored generation. Pure: steps take the time and write into an
`Effects`; `GroupShard` calls them.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from headrace.base.errors import ErrorCode, KafkaError
from headrace.coordinators.committing import Committer
from headrace.coordinators.effects import Effects, Ticket
from headrace.coordinators.group_states import (
    COMPLETING,
    DEAD,
    EMPTY,
    PREPARING,
    STABLE,
    WATCH_MS_MAX,
    WATCHES_A_SESSION,
    append_error,
    join_error,
    sync_error,
)
from headrace.coordinators.membership import JoinRequest, Member
from headrace.coordinators.rebalance import CONSUMER, Rebalancing

NEW_MEMBER_JOIN_TIMEOUT_MS: Final = 300_000
"""How long a join of a new member may wait: it cannot heartbeat, and nobody would notice that it is gone."""
PENDING_MEMBERS_MAX: Final = 10_000
"""How many ids a group hands out that have not come back; as many joins with fresh ids must not fill the memory."""


class ClassicGroup(Rebalancing):
    """One group, as its members address it."""

    def join(self, request: JoinRequest, ticket: Ticket, now_ms: int, out: Effects) -> None:
        member_id = request.member_id
        if not self._has_room(member_id):
            self.members.remove(member_id)
            out.reply(ticket, join_error(ErrorCode.GROUP_MAX_SIZE_REACHED))
        elif self.state is DEAD:
            out.reply(ticket, join_error(ErrorCode.COORDINATOR_NOT_AVAILABLE, member_id))
        elif not self._supports(request):
            out.reply(ticket, join_error(ErrorCode.INCONSISTENT_GROUP_PROTOCOL, member_id))
        elif not member_id:
            self._join_new(request, ticket, now_ms, out)
        elif member_id in self.members.pending:
            if request.instance_id is not None:  # ids are never pending for static members
                out.reply(ticket, join_error(ErrorCode.UNKNOWN_MEMBER_ID, member_id))
            else:
                self._add(member_id, request, ticket, now_ms, out)
        else:
            self._join_again(request, ticket, now_ms, out)

    def _has_room(self, member_id: str) -> bool:
        limit = self._config().group_max_size
        member = self.members.by_id.get(member_id)
        if self.state is PREPARING:  # those who wait count, so that the last to come back are the ones to go
            return (member is not None and member.joining is not None) or self.members.joining_count < limit
        if self.state in (COMPLETING, STABLE):
            return member is not None or len(self.members) < limit
        return True

    def _supports(self, request: JoinRequest) -> bool:
        if self.state is EMPTY:
            return bool(request.protocol_type and request.protocols)
        names = {name for name, _ in request.protocols}
        return self.protocol_type == request.protocol_type and self.members.shares_protocol(names)

    def _join_new(self, request: JoinRequest, ticket: Ticket, now_ms: int, out: Effects) -> None:
        instance_id = request.instance_id
        new_id = f"{request.client_id if instance_id is None else instance_id}-{self._new_id()}"
        if instance_id is not None:
            old_id = self.members.static.get(instance_id)
            if old_id is not None:
                self._replace(old_id, new_id, request, ticket, now_ms, out)
                return
        elif request.requires_known_id:
            if len(self.members.pending) >= PENDING_MEMBERS_MAX:
                out.reply(ticket, join_error(ErrorCode.GROUP_MAX_SIZE_REACHED))
                return
            self.members.pending[new_id] = None
            out.start(self._member_timer(new_id), request.session_timeout_ms)
            out.reply(ticket, join_error(ErrorCode.MEMBER_ID_REQUIRED, new_id))
            return
        self._add(new_id, request, ticket, now_ms, out)

    def _join_again(self, request: JoinRequest, ticket: Ticket, now_ms: int, out: Effects) -> None:
        try:
            member = self.members.check(request.member_id, request.instance_id)
        except KafkaError as error:
            out.reply(ticket, join_error(error.code, request.member_id))
            return
        leads = member.member_id == self.members.leader
        same = member.protocols == request.protocols
        if self.state is COMPLETING and same:
            out.reply(ticket, self._joined(member, with_members=leads))  # its reply got lost
        elif self.state is STABLE and same and not leads:
            out.reply(ticket, self._joined(member, with_members=False))
        elif self.state is EMPTY:
            out.reply(ticket, join_error(ErrorCode.UNKNOWN_MEMBER_ID, request.member_id))
        else:
            if member.joining is not None:  # it asks twice: the first asker is not there any more
                self.members.answer_join(
                    member, join_error(ErrorCode.REBALANCE_IN_PROGRESS, member.member_id), out
                )
            self.members.update(member, request, ticket)
            self._prepare_or_complete(now_ms, out)

    def _add(self, member_id: str, request: JoinRequest, ticket: Ticket, now_ms: int, out: Effects) -> None:
        member = Member(member_id, request.instance_id, request.client_id, request.client_host, b"")
        member.session_timeout_ms = request.session_timeout_ms
        member.rebalance_timeout_ms = request.rebalance_timeout_ms
        member.protocols = request.protocols
        member.is_new = True
        member.joining = ticket
        if not len(self.members):
            self.protocol_type = request.protocol_type
        if self.state is PREPARING and self._initial_delay is not None:
            self._member_added = True
        self.members.add(member)
        out.start(self._member_timer(member_id), NEW_MEMBER_JOIN_TIMEOUT_MS)
        self._prepare_or_complete(now_ms, out)

    def _replace(
        self, old_id: str, new_id: str, request: JoinRequest, ticket: Ticket, now_ms: int, out: Effects
    ) -> None:
        """A static member comes back without its id: whoever had the id before is fenced."""
        members = self.members
        member = members.by_id[old_id]
        leader_before = members.leader
        members.answer_join(member, join_error(ErrorCode.FENCED_INSTANCE_ID, old_id), out)
        members.answer_sync(member, sync_error(ErrorCode.FENCED_INSTANCE_ID), out)
        members.answer_watch(member, ErrorCode.FENCED_INSTANCE_ID, out)
        members.replace(old_id, new_id)
        out.stop(self._member_timer(old_id))
        before = request._replace(
            protocols=member.protocols,
            rebalance_timeout_ms=member.rebalance_timeout_ms,
            session_timeout_ms=member.session_timeout_ms,
        )
        members.update(member, request, ticket)
        self._expect(member, out)
        if self.state is STABLE and self.protocol == members.select_protocol():
            stored = partial(self._replacement_stored, member, old_id, before, leader_before, request)
            out.store([self.record({each.member_id: each.assignment for each in members})], stored)
        elif self.state is COMPLETING:
            self._prepare(now_ms, out)  # the leader may have assigned to the old id by now
        elif self.state is STABLE:
            self._prepare_or_complete(now_ms, out)
        else:
            self._complete_if_all_joined(now_ms, out)

    def _replacement_stored(
        self,
        member: Member,
        old_id: str,
        before: JoinRequest,
        leader_before: str | None,
        request: JoinRequest,
        error: ErrorCode,
        now_ms: int,
        out: Effects,
    ) -> None:
        if self.members.by_id.get(member.member_id) is not member or self.state is not STABLE:
            return  # a later step owes the reply
        if error is not ErrorCode.NONE:
            new_id = member.member_id
            self.members.answer_join(member, join_error(append_error(error)), out)
            self.members.update(member, before, None)
            self.members.replace(new_id, old_id)
            out.stop(self._member_timer(new_id))
            self._expect(member, out)
            return
        leads = member.member_id == self.members.leader
        body = self._joined(member, with_members=leads and request.skips_assignment)
        if request.skips_assignment:
            body["skip_assignment"] = leads
        else:  # with its old id as leader it takes itself for a follower, and leaves the assignment as it is
            body["leader"] = leader_before
        self.members.answer_join(member, body, out)

    def sync(
        self,
        member_id: str,
        instance_id: str | None,
        generation: int,
        protocol_type: str | None,
        protocol: str | None,
        assignments: Sequence[tuple[str, bytes]],
        ticket: Ticket,
        now_ms: int,
        out: Effects,
    ) -> None:
        try:
            if self.state is DEAD:
                raise KafkaError(ErrorCode.COORDINATOR_NOT_AVAILABLE)
            member = self.members.check(member_id, instance_id)
            if generation != self.generation:
                raise KafkaError(ErrorCode.ILLEGAL_GENERATION)
            if (protocol_type is not None and protocol_type != self.protocol_type) or (
                protocol is not None and protocol != self.protocol
            ):
                raise KafkaError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
            if self.state is PREPARING:
                raise KafkaError(ErrorCode.REBALANCE_IN_PROGRESS)
        except KafkaError as error:
            out.reply(ticket, sync_error(error.code))
            return
        self._synced(member, out)
        if self.state is STABLE:
            out.reply(ticket, self._assigned(member))
            return
        if member.syncing is not None:
            out.reply(member.syncing, sync_error(ErrorCode.REBALANCE_IN_PROGRESS))
        member.syncing = ticket
        if member_id == self.members.leader:
            given = dict(assignments)
            assignment = {each: given.get(each, b"") for each in self.members.by_id}
            stored = partial(self._assignment_stored, generation, assignment)
            out.store([self.record(assignment)], stored)

    def _synced(self, member: Member, out: Effects) -> None:
        self.members.pending_sync.pop(member.member_id, None)
        if not self.members.pending_sync:
            out.stop(self._timer("sync"))

    def _assignment_stored(
        self, generation: int, assignment: Mapping[str, bytes], error: ErrorCode, now_ms: int, out: Effects
    ) -> None:
        if self.state is not COMPLETING or generation != self.generation:
            return  # a rebalance came between, and answered
        if error is not ErrorCode.NONE:
            self._answer_syncs(append_error(error), out)
            self._prepare(now_ms, out)
            return
        for member in self.members:
            member.assignment = assignment.get(member.member_id, b"")
            if self.members.answer_sync(member, self._assigned(member), out):
                self._expect(member, out)
        self._move(STABLE, now_ms)

    def _assigned(self, member: Member) -> dict[str, Any]:
        return {
            "error_code": ErrorCode.NONE,
            "protocol_type": self.protocol_type,
            "protocol_name": self.protocol,
            "assignment": member.assignment,
        }

    def heartbeat(self, member_id: str, instance_id: str | None, generation: int, out: Effects) -> ErrorCode:
        if self.state is DEAD:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        try:
            member = self.members.check(member_id, instance_id)
        except KafkaError as error:
            return error.code
        if generation != self.generation:
            return ErrorCode.ILLEGAL_GENERATION
        self._expect(member, out)
        return ErrorCode.REBALANCE_IN_PROGRESS if self.state is PREPARING else ErrorCode.NONE

    def watch(self, member_id: str, ticket: Ticket) -> int:
        """Have a member told at once when it has to join again; for how long it may wait, 0 if not at all."""
        member = self.members.by_id.get(member_id)
        if member is None or self.state is not STABLE:
            return 0
        member.watching = ticket
        return min(member.session_timeout_ms // WATCHES_A_SESSION, WATCH_MS_MAX)

    def leave(
        self, leaving: Sequence[tuple[str, str | None]], now_ms: int, out: Effects
    ) -> list[tuple[str, str | None, ErrorCode]]:
        """Take members out, by id or, for static ones, by instance id alone; how it went for each."""
        results = []
        for member_id, instance_id in leaving:
            error = self._leave(member_id, instance_id, out)
            results.append((member_id, instance_id, error))
        if any(error is ErrorCode.NONE for _, _, error in results):
            if self.state in (STABLE, COMPLETING):
                self._prepare(now_ms, out)
            else:
                self._complete_if_all_joined(now_ms, out)
        return results

    def _leave(self, member_id: str, instance_id: str | None, out: Effects) -> ErrorCode:
        if not member_id and instance_id is not None:
            member_id = self.members.static.get(instance_id, "")
        if member_id in self.members.pending:
            self.members.remove(member_id)
            out.stop(self._member_timer(member_id))
            return ErrorCode.NONE
        try:
            member = self.members.check(member_id, instance_id)
        except KafkaError as error:
            return ErrorCode.UNKNOWN_MEMBER_ID if not member_id else error.code
        self._put_out(member, out)
        return ErrorCode.NONE

    # -- offsets -------------------------------------------------------------------------------------------------------

    def check_committer(self, who: Committer) -> ErrorCode:
        """Whether who commits may do so."""
        if self.state is DEAD:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        if who.generation < 0 and self.state is EMPTY:
            return ErrorCode.NONE
        if who.generation < 0 and not who.member_id and who.instance_id is None:
            # Older transactional producers do not say which member they commit for.
            return ErrorCode.UNKNOWN_MEMBER_ID if who.producer is None else ErrorCode.NONE
        try:
            self.members.check(who.member_id, who.instance_id)
        except KafkaError as error:
            return error.code
        if who.generation != self.generation:
            return ErrorCode.ILLEGAL_GENERATION
        rebalances = self.state is COMPLETING and who.producer is None
        return ErrorCode.REBALANCE_IN_PROGRESS if rebalances else ErrorCode.NONE

    def subscribes_to(self, topic: str) -> bool:
        """Whether members read a topic, or it cannot be known that they do not."""
        if self.topics is None:
            return self.protocol_type == CONSUMER and len(self.members) > 0
        return topic in self.topics

    def touch(self, member_id: str, out: Effects) -> None:
        """A commit shows that its member lives."""
        member = self.members.by_id.get(member_id)
        if member is not None and self.state in (STABLE, PREPARING):
            self._expect(member, out)
