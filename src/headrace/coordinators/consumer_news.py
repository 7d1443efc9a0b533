"""Members of the consumer protocol that wait for news: the reply to a heartbeat is held until there is some.

A member whose heartbeat brought nothing new may watch. When a step of the group (somebody comes, goes, or gives up
partitions) changes what it has, it is brought a step nearer to its target and told at once; of a new epoch alone it
hears with its next heartbeat. Invariants: a watch is answered once, or given up by its owner
before anything else is told to that member; it is over well before the member was to report again, because librdkafka
waits no longer for a reply; a member that has to give up partitions does not watch, because it will have something to
say; a group that has told its members rests for a time that grows with their number, so that many who come and go are
dealt with together. Pure; `MixedGroup` is one of these.
"""

from collections.abc import Callable
from typing import Any, Final

from headrace.base.errors import ErrorCode
from headrace.base.settings import BrokerConfig
from headrace.cluster.image import ClusterImage
from headrace.coordinators.consumer_group import ConsumerGroup, HeartbeatRequest
from headrace.coordinators.consumer_records import NOTHING, CurrentValue, MemberValue
from headrace.coordinators.consumer_state import ConsumerMember
from headrace.coordinators.effects import Body, Effects, Record, Ticket
from headrace.coordinators.group_states import WATCH_MS_MAX, WATCHES_A_SESSION
from headrace.coordinators.reconciliation import STABLE, UNRELEASED, next_step

NEWS: Final = "news"
REPLY_SHARE: Final = 5
"""The part of the time until its next report that a member's reply has for its way back."""
REST_MS_A_MEMBER: Final = 1
"""To see what members are to have, and to tell them, takes some tens of microseconds each: a small part of a core."""


class WatchedGroup(ConsumerGroup):
    """A group of the consumer protocol whose members may wait for news."""

    def __init__(
        self, group_id: str, config: Callable[[], BrokerConfig], image: Callable[[], ClusterImage]
    ) -> None:
        super().__init__(group_id, config, image)
        self._watchers: dict[str, Ticket] = {}
        self._resting = False
        self._changed = False

    def watch(self, member_id: str, ticket: Ticket) -> int:
        """Have a member told at once when there is something for it; for how long at most, 0 if not at all."""
        member = self.members.get(member_id)
        unsettled = self._settled != self._written
        if member is None or unsettled or member.current.state not in (STABLE, UNRELEASED):
            return 0
        asked_ms = member.told_interval_ms
        hold_ms = min(
            asked_ms - asked_ms // REPLY_SHARE, self.session_timeout_ms() // WATCHES_A_SESSION, WATCH_MS_MAX
        )
        if hold_ms > 0:
            self._watchers[member_id] = ticket
        return hold_ms

    def unwatch(self, member_id: str) -> None:
        """Whoever watches is answered otherwise, or gone."""
        self._watchers.pop(member_id, None)

    def _has_news(self, member: ConsumerMember) -> bool:
        target = self.targets.get(member.member_id, NOTHING)
        step = next_step(member.current, self.target_epoch, target, None, self.has_owner)
        return step.assigned != member.current.assigned

    # -- telling -------------------------------------------------------------------------------------------------------

    def answer(self, ticket: Ticket | None, body: Body, records: list[Record], out: Effects) -> None:
        super().answer(ticket, body, records, out)
        if not records:
            return
        self._changed = True
        if self._watchers and not self._resting:
            self._tell(out)

    def rested(self, out: Effects) -> None:
        """The time after the last news is over."""
        self._resting = False
        if self._changed and self._watchers:
            self._tell(out)

    def _tell(self, out: Effects) -> None:
        self._changed = False
        records: list[Record] = []
        if self.epoch > self.target_epoch:
            self._assign(records)
        told: list[tuple[Ticket, dict[str, Any]]] = []
        for member_id in list(self._watchers):
            member = self.members[member_id]
            if self._has_news(member):
                self.reconcile(member, None, records, out)
                told.append((self._watchers.pop(member_id), self.told(member, True)))
        if records:
            super().answer(None, {}, records, out)
        for ticket, body in told:
            super().answer(ticket, body, [], out)
        self._resting = True
        out.start(self._timer(NEWS, ""), len(self.members) * REST_MS_A_MEMBER)

    # -- when a watch ends otherwise -----------------------------------------------------------------------------------

    def heartbeat(self, request: HeartbeatRequest, ticket: Ticket, now_ms: int, out: Effects) -> None:
        watching = self._watchers.pop(request.member_id, None)
        if watching is not None:  # it speaks again, by another connection
            out.reply(watching, self.told(self.members[request.member_id], False))
        super().heartbeat(request, ticket, now_ms, out)

    def put_out(self, member_id: str, now_ms: int, records: list[Record], out: Effects) -> None:
        self._turn_away(member_id, ErrorCode.UNKNOWN_MEMBER_ID, out)
        super().put_out(member_id, now_ms, records, out)

    def replace_static(
        self, old_id: str, new_id: str, records: list[Record], out: Effects
    ) -> tuple[MemberValue, CurrentValue]:
        self._turn_away(old_id, ErrorCode.FENCED_INSTANCE_ID, out)
        return super().replace_static(old_id, new_id, records, out)

    def die(self, error: ErrorCode, now_ms: int, out: Effects) -> None:
        for member_id in list(self._watchers):
            self._turn_away(member_id, error, out)
        super().die(error, now_ms, out)

    def _turn_away(self, member_id: str, error: ErrorCode, out: Effects) -> None:
        ticket = self._watchers.pop(member_id, None)
        if ticket is not None:
            out.reply(ticket, {"error_code": error})
