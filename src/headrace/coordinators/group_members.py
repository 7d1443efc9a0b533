"""Requests of members, by the group they are for: of the classic protocol, of the consumer protocol, or both.

Owns the table of groups and which kind each is; groups are made, replaced and changed over here. Invariant: a group id
names one group of one kind, in memory and in the records. Errors are Kafka's, group by group. Pure; `GroupShard` is one
of these, with offsets.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from headrace.base.errors import ErrorCode
from headrace.base.settings import BrokerConfig
from headrace.cluster.image import ClusterImage
from headrace.coordinators.classic_group import ClassicGroup
from headrace.coordinators.consumer_group import JOIN, HeartbeatRequest, parts_of
from headrace.coordinators.effects import Effects, Record, Ticket, Write
from headrace.coordinators.group_states import EMPTY, join_error, sync_error
from headrace.coordinators.membership import JoinRequest
from headrace.coordinators.migration import downgraded, upgraded
from headrace.coordinators.mixed_group import MixedGroup
from headrace.coordinators.records import group_key

Group: TypeAlias = ClassicGroup | MixedGroup
LeaveResult: TypeAlias = list[tuple[str, str | None, ErrorCode]]


class GroupMembers:
    """The groups of one partition, as their members address them."""

    def __init__(
        self,
        config: Callable[[], BrokerConfig],
        new_id: Callable[[], str],
        image: Callable[[], ClusterImage],
    ) -> None:
        self._config = config
        self._new_id = new_id
        self._image = image
        self.groups: dict[str, Group] = {}

    def _create(self, group_id: str) -> ClassicGroup:
        made = self.groups[group_id] = ClassicGroup(group_id, self._config, self._new_id)
        return made

    # -- the classic protocol ------------------------------------------------------------------------------------------

    def join(self, group_id: str, request: JoinRequest, ticket: Ticket, now_ms: int, out: Effects) -> None:
        config = self._config()
        least, most = config.group_min_session_timeout_ms, config.group_max_session_timeout_ms
        if not least <= request.session_timeout_ms <= most:
            out.reply(ticket, join_error(ErrorCode.INVALID_SESSION_TIMEOUT, request.member_id))
            return
        group = self.groups.get(group_id)
        if isinstance(group, MixedGroup) and group.members:
            group.join(request, self._new_id, ticket, now_ms, out)
            self._maybe_downgrade(group, now_ms, out)
            return
        if group is None or isinstance(group, MixedGroup):
            if request.member_id:
                out.reply(ticket, join_error(ErrorCode.UNKNOWN_MEMBER_ID, request.member_id))
                return
            if not request.protocol_type or not request.protocols:  # before there is a group to clean up
                out.reply(ticket, join_error(ErrorCode.INCONSISTENT_GROUP_PROTOCOL))
                return
            if group is not None:
                out.store(group.tombstones(), ahead=True)
            group = self._create(group_id)
            out.store([group.record({})])
        group.join(request, ticket, now_ms, out)

    def sync(
        self,
        group_id: str,
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
        group = self.groups.get(group_id)
        if group is None:
            out.reply(ticket, sync_error(ErrorCode.UNKNOWN_MEMBER_ID))
        elif isinstance(group, MixedGroup):
            group.sync(member_id, instance_id, generation, protocol_type, protocol, ticket, out)
        else:
            group.sync(
                member_id, instance_id, generation, protocol_type, protocol, assignments, ticket, now_ms, out
            )

    def heartbeat(
        self, group_id: str, member_id: str, instance_id: str | None, generation: int, out: Effects
    ) -> ErrorCode:
        group = self.groups.get(group_id)
        if group is None:
            return ErrorCode.UNKNOWN_MEMBER_ID
        if isinstance(group, MixedGroup):
            return group.classic_heartbeat(member_id, instance_id, generation, out)
        return group.heartbeat(member_id, instance_id, generation, out)

    def watch(self, group_id: str, member_id: str, ticket: Ticket) -> int:
        """Have a member of a stable group told when it has to join again; for how long at most, in milliseconds."""
        group = self.groups.get(group_id)
        return group.watch(member_id, ticket) if isinstance(group, ClassicGroup) else 0

    def leave(
        self,
        group_id: str,
        leaving: Sequence[tuple[str, str | None]],
        done: Callable[[LeaveResult], None],
        now_ms: int,
        out: Effects,
    ) -> None:
        """Take members out. Told at once, or when it is stored that they are gone."""
        group = self.groups.get(group_id)
        if group is None:
            done([(*each, ErrorCode.UNKNOWN_MEMBER_ID) for each in leaving])
            return
        if isinstance(group, MixedGroup):
            records: list[Record] = []
            told = group.leave(leaving, now_ms, records, out)
            group.answer(lambda body: done(told), {}, records, out)
            return
        results = group.leave(leaving, now_ms, out)
        if (
            out.writes
        ):  # told of success all the same if it cannot be stored: the members are gone, and time out again
            out.writes[-1] = out.writes[-1]._replace(then=lambda error, now_ms, out: done(results))
        else:
            done(results)

    # -- the consumer protocol -----------------------------------------------------------------------------------------

    def consumer_heartbeat(
        self, group_id: str, request: HeartbeatRequest, ticket: Ticket, now_ms: int, out: Effects
    ) -> None:
        group = self.groups.get(group_id)
        if isinstance(group, MixedGroup):
            group.heartbeat(request, ticket, now_ms, out)
            self._maybe_downgrade(group, now_ms, out)
            return
        made = self._made_of(group_id, group) if request.epoch == JOIN else None
        if made is None:
            why = "not found" if group is None else "is not a consumer group"
            body = {"error_code": ErrorCode.GROUP_ID_NOT_FOUND, "error_message": f"Group {group_id} {why}."}
            out.reply(ticket, body)
            return
        replaced: list[Record] = []
        if group is not None:
            replaced.append((group_key(group_id), None))
            if made.members:
                made.everything(replaced)
        before = made.epoch
        made.heartbeat(request, ticket, now_ms, out)
        if made.epoch == before:
            return  # it was refused, and never was
        self.groups[group_id] = made
        if group is not None:
            writes = [Write(part, None, replayed=False, ahead=True) for part in parts_of(replaced)]
            out.writes[:0] = writes
            group.die(ErrorCode.REBALANCE_IN_PROGRESS, now_ms, out)
            made.loaded(now_ms, out)

    def watch_consumer(self, group_id: str, member_id: str, ticket: Ticket) -> int:
        """Have a member told when its group has something for it; for how long at most, in milliseconds, 0 if not."""
        group = self.groups.get(group_id)
        return group.watch(member_id, ticket) if isinstance(group, MixedGroup) else 0

    def unwatch_consumer(self, group_id: str, member_id: str) -> None:
        group = self.groups.get(group_id)
        if isinstance(group, MixedGroup):
            group.unwatch(member_id)

    def _made_of(self, group_id: str, group: ClassicGroup | None) -> MixedGroup | None:
        """A group for the first member of the consumer protocol; None when there is a classic one that has to stay."""
        if group is not None and group.state is not EMPTY:
            return upgraded(group, self._config, self._image)
        return MixedGroup(group_id, self._config, self._image)

    def _maybe_downgrade(self, group: MixedGroup, now_ms: int, out: Effects) -> None:
        """Go back to the classic protocol when nobody is left who speaks the other."""
        if not group.is_all_classic:
            return
        made = downgraded(group, self._config, self._new_id, now_ms)
        if made is None:
            return
        records = group.tombstones()
        records.append(made.record({member.member_id: member.assignment for member in made.members}))
        for part in parts_of(records):
            out.store(part, ahead=True)
        for member_id in group.members:
            group.stop_timers(member_id, out)
        self.groups[group.group_id] = made
        made.begin_anew(now_ms, out)

    def put_out(self, group: MixedGroup, member_id: str, now_ms: int, out: Effects) -> None:
        """A member's time is over."""
        records: list[Record] = []
        group.put_out(member_id, now_ms, records, out)
        group.answer(None, {}, records, out)
        self._maybe_downgrade(group, now_ms, out)
