"""The generations of a classic group: how a rebalance begins, goes on and ends, and what its timers do.

The half of `classic_group` that does not answer a request by itself: records, states, joins that are awaited, members
that fall silent. The theory of operation is told there.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from headrace.base.errors import ErrorCode
from headrace.base.settings import BrokerConfig
from headrace.coordinators.effects import Effects, TimerKey
from headrace.coordinators.group_states import (
    COMPLETING,
    DEAD,
    EMPTY,
    PREPARING,
    STABLE,
    TRANSITIONS,
    State,
    join_error,
    sync_error,
)
from headrace.coordinators.membership import Member, Membership, member_of
from headrace.coordinators.records import (
    GroupValue,
    MemberValue,
    group_key,
    group_value,
    subscribed_topics,
)

CONSUMER: Final = "consumer"


class Rebalancing:
    """The state of one group and the course of its rebalances."""

    def __init__(self, group_id: str, config: Callable[[], BrokerConfig], new_id: Callable[[], str]) -> None:
        self.group_id = group_id
        self._config = config
        self._new_id = new_id
        self.state = EMPTY
        self.state_timestamp_ms = -1
        self.generation = 0
        self.protocol_type: str | None = None
        self.protocol: str | None = None
        self.members = Membership()
        self.topics: set[str] | None = None
        """What the members of a consumers' group subscribe to; None when that is not known."""
        self._initial_delay: tuple[int, int] | None = None
        self._member_added = False

    def load(self, value: GroupValue) -> None:
        """Be what a record says."""
        self.state = STABLE if value.members else EMPTY
        self.state_timestamp_ms = value.state_timestamp_ms
        self.generation = value.generation
        self.protocol_type = value.protocol_type or None
        self.protocol = value.protocol
        self.members = Membership()
        for each in value.members:
            self.members.add(member_of(each, value.protocol))
        if value.leader is not None and value.leader in self.members:
            self.members.leader = value.leader
        self.topics = self._subscribed()

    def take_over(self, now_ms: int) -> None:
        """Be stable, with members and assignments that another group had."""
        self.protocol = self.members.select_protocol()
        self.topics = self._subscribed()
        self.state = STABLE
        self.state_timestamp_ms = now_ms

    def begin_anew(self, now_ms: int, out: Effects) -> None:
        """Have everybody join again."""
        for member in self.members:
            self._expect(member, out)
        self._prepare(now_ms, out)

    def loaded(self, now_ms: int, out: Effects) -> None:
        """Everything is replayed: members have from now on to be heard of."""
        for member in self.members:
            self._expect(member, out)
        if len(self.members) > self._config().group_max_size:
            self._prepare(now_ms, out)

    def record(self, assignment: Mapping[str, bytes]) -> tuple[bytes, bytes]:
        members = tuple(
            [
                MemberValue(
                    member.member_id,
                    member.instance_id,
                    member.client_id,
                    member.client_host,
                    member.rebalance_timeout_ms,
                    member.session_timeout_ms,
                    member.metadata(self.protocol),
                    assignment.get(member.member_id, b""),
                )
                for member in self.members
            ]
        )
        value = GroupValue(
            self.protocol_type or "",
            self.generation,
            self.protocol,
            self.members.leader,
            self.state_timestamp_ms,
            members,
        )
        return group_key(self.group_id), group_value(value)

    def _subscribed(self) -> set[str] | None:
        if self.protocol_type != CONSUMER:
            return None
        topics: set[str] = set()
        for member in self.members:
            named = subscribed_topics(member.metadata(self.protocol))
            if named is None:
                return None
            topics |= named
        return topics

    def _move(self, state: State, now_ms: int) -> None:
        assert state in TRANSITIONS[self.state], f"{self.group_id}: {self.state.value} to {state.value}"
        self.state = state
        self.state_timestamp_ms = now_ms

    def _prepare_or_complete(self, now_ms: int, out: Effects) -> None:
        if PREPARING in TRANSITIONS[self.state]:
            self._prepare(now_ms, out)
        else:
            self._complete_if_all_joined(now_ms, out)

    def _prepare(self, now_ms: int, out: Effects) -> None:
        """Open a rebalance."""
        if self.state is COMPLETING:
            self._answer_syncs(ErrorCode.REBALANCE_IN_PROGRESS, out)
        self.members.pending_sync.clear()
        out.stop(self._timer("sync"))
        initial = self.state is EMPTY
        self._move(PREPARING, now_ms)
        for member in self.members:
            self.members.answer_watch(member, ErrorCode.REBALANCE_IN_PROGRESS, out)
        if initial:
            delay_ms = self._config().group_initial_rebalance_delay_ms
            self._initial_delay = delay_ms, max(self.members.rebalance_timeout_ms() - delay_ms, 0)
            self._member_added = False
            out.start(self._timer("join"), delay_ms)
        elif self.members.all_joined():
            self._complete_join(now_ms, out)
        else:
            out.start(self._timer("join"), self.members.rebalance_timeout_ms())

    def _complete_if_all_joined(self, now_ms: int, out: Effects) -> None:
        if self.state is PREPARING and self._initial_delay is None and self.members.all_joined():
            self._complete_join(now_ms, out)

    def _complete_join(self, now_ms: int, out: Effects) -> None:
        """Close the joining: out with who did not come, on to the next generation."""
        members = self.members
        out.stop(self._timer("join"))
        for member in [each for each in members if each.joining is None and each.instance_id is None]:
            members.remove(member.member_id)
            out.stop(self._member_timer(member.member_id))
        if self.state is not PREPARING:
            return
        if not members.elect_joined_leader() and len(members):
            # Only static members are left, and none came back: wait on, their sessions decide.
            self._initial_delay = None
            out.start(self._timer("join"), members.rebalance_timeout_ms())
            return
        self._initial_delay = None
        self.generation += 1
        members.pending_sync.clear()
        if not len(members):
            self.protocol = None
            self.topics = self._subscribed()
            self._move(EMPTY, now_ms)
            out.store([self.record({})])
            return
        self.protocol = members.select_protocol()
        self.topics = self._subscribed()
        self._move(COMPLETING, now_ms)
        for member in members:
            members.answer_join(member, self._joined(member, member.member_id == members.leader), out)
            self._expect(member, out)
            member.is_new = False
            members.pending_sync[member.member_id] = None
        out.start(self._timer("sync"), members.rebalance_timeout_ms())

    def _joined(self, member: Member, with_members: bool) -> dict[str, Any]:
        listed = [
            {
                "member_id": each.member_id,
                "group_instance_id": each.instance_id,
                "metadata": each.metadata(self.protocol),
            }
            for each in (self.members if with_members else ())
        ]
        return {
            "error_code": ErrorCode.NONE,
            "generation_id": self.generation,
            "protocol_type": self.protocol_type,
            "protocol_name": self.protocol,
            "leader": self.members.leader,
            "skip_assignment": False,
            "member_id": member.member_id,
            "members": listed,
        }

    def _answer_syncs(self, error: ErrorCode, out: Effects) -> None:
        for member in self.members:
            member.assignment = b""
            if self.members.answer_sync(member, sync_error(error), out):
                self._expect(member, out)

    def _put_out(self, member: Member, out: Effects) -> None:
        self.members.answer_join(member, join_error(ErrorCode.UNKNOWN_MEMBER_ID), out)
        self.members.answer_sync(member, sync_error(ErrorCode.UNKNOWN_MEMBER_ID), out)
        self.members.answer_watch(member, ErrorCode.UNKNOWN_MEMBER_ID, out)
        self.members.remove(member.member_id)
        out.stop(self._member_timer(member.member_id))

    def _timer(self, what: str) -> TimerKey:
        return self.group_id, what

    def _member_timer(self, member_id: str) -> TimerKey:
        return self.group_id, "member", member_id

    def _expect(self, member: Member, out: Effects) -> None:
        out.start(self._member_timer(member.member_id), member.session_timeout_ms)

    def on_timer(self, key: TimerKey, now_ms: int, out: Effects) -> None:
        if key[1] == "member":
            self._silent(key[2], now_ms, out)
        elif key[1] == "sync":
            self._sync_overdue(now_ms, out)
        elif self.state is PREPARING:
            self._join_overdue(now_ms, out)

    def _silent(self, member_id: str, now_ms: int, out: Effects) -> None:
        if member_id in self.members.pending:
            self.members.remove(member_id)
            self._complete_if_nobody_is_awaited(now_ms, out)
            return
        member = self.members.by_id.get(member_id)
        if member is None or member.is_excused():
            return
        self._put_out(member, out)
        if self.state in (STABLE, COMPLETING):
            self._prepare(now_ms, out)
        else:
            self._complete_if_nobody_is_awaited(now_ms, out)

    def _complete_if_nobody_is_awaited(self, now_ms: int, out: Effects) -> None:
        if self.state is PREPARING and self.members.all_joined():
            self._complete_join(now_ms, out)

    def _sync_overdue(self, now_ms: int, out: Effects) -> None:
        if self.state not in (COMPLETING, STABLE) or not self.members.pending_sync:
            return
        for member_id in list(self.members.pending_sync):
            self._put_out(self.members.by_id[member_id], out)
        self._prepare(now_ms, out)

    def _join_overdue(self, now_ms: int, out: Effects) -> None:
        if self._initial_delay is not None:
            delay_ms, left_ms = self._initial_delay
            if self._member_added and left_ms:
                self._member_added = False
                next_ms = min(self._config().group_initial_rebalance_delay_ms, left_ms)
                self._initial_delay = next_ms, max(left_ms - delay_ms, 0)
                out.start(self._timer("join"), next_ms)
                return
        self._complete_join(now_ms, out)

    def die(self, error: ErrorCode, now_ms: int, out: Effects) -> None:
        """The group goes, or goes elsewhere: answer all who wait."""
        for member in self.members:
            self.members.answer_join(member, join_error(error, member.member_id), out)
            self.members.answer_sync(member, sync_error(error), out)
            self.members.answer_watch(member, error, out)
            out.stop(self._member_timer(member.member_id))
        for member_id in self.members.pending:
            out.stop(self._member_timer(member_id))
        out.stop(self._timer("join"))
        out.stop(self._timer("sync"))
        self._move(DEAD, now_ms)
