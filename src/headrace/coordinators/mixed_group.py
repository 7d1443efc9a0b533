"""Members of the classic protocol in a group of the consumer protocol: a group that changes over while it is in use.

To a classic member the group looks classic: its epoch is its generation, a heartbeat tells it to join again when the
group has moved on or it has something to give up or to get, a join brings it a step nearer to its target, a sync tells
it what it has. Nobody leads: the broker assigns. It joins within its rebalance timeout after it was told to, and syncs
within it after it joined, or it is out. Invariant: the rules of `reconciliation` hold for it as for everybody, so that
members of both protocols never own the same partition. `GroupShard` calls it; `migration` makes one of a classic group
and a classic group of one.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.settings import BrokerConfig
from headrace.cluster.image import ClusterImage
from headrace.coordinators.consumer_news import WatchedGroup
from headrace.coordinators.consumer_records import (
    Assignment,
    ClassicValue,
    MemberValue,
    Subscription,
    decode_subscription,
    encode_assignment,
)
from headrace.coordinators.consumer_state import NEW_MEMBER, ConsumerMember
from headrace.coordinators.effects import Effects, Record, Ticket, TimerKey
from headrace.coordinators.group_states import join_error, sync_error
from headrace.coordinators.membership import JoinRequest
from headrace.coordinators.reconciliation import UNRELEASED, UNREVOKED

CONSUMER: Final = "consumer"


class MixedGroup(WatchedGroup):
    """A group of the consumer protocol, as members of the classic protocol address it."""

    def __init__(
        self, group_id: str, config: Callable[[], BrokerConfig], image: Callable[[], ClusterImage]
    ) -> None:
        super().__init__(group_id, config, image)
        self._to_join: set[str] = set()

    # -- joining -------------------------------------------------------------------------------------------------------

    def join(
        self, request: JoinRequest, new_id: Callable[[], str], ticket: Ticket, now_ms: int, out: Effects
    ) -> None:
        records: list[Record] = []
        try:
            body = self._joined(request, new_id, now_ms, records, out)
        except KafkaError as error:
            given = error.message if error.code is ErrorCode.MEMBER_ID_REQUIRED else request.member_id
            out.reply(ticket, join_error(error.code, given))
            return
        self.answer(ticket, body, records, out)

    def _joined(
        self,
        request: JoinRequest,
        new_id: Callable[[], str],
        now_ms: int,
        records: list[Record],
        out: Effects,
    ) -> dict[str, Any]:
        subscription = self._subscription(request)
        member_id = request.member_id or f"{request.instance_id or request.client_id}-{new_id()}"
        held_by = None if request.instance_id is None else self.static.get(request.instance_id)
        if held_by is not None and request.member_id and held_by != request.member_id:
            raise KafkaError(ErrorCode.FENCED_INSTANCE_ID)
        if request.instance_id is not None and request.member_id and held_by is None:
            raise KafkaError(ErrorCode.UNKNOWN_MEMBER_ID)
        full = len(self.members) >= self._config().group_consumer_max_size
        if full and member_id not in self.members and held_by is None:
            raise KafkaError(ErrorCode.GROUP_MAX_SIZE_REACHED)
        if not request.member_id and request.instance_id is None and request.requires_known_id:
            raise KafkaError(ErrorCode.MEMBER_ID_REQUIRED, member_id)
        if held_by is not None and held_by != member_id:
            self.replace_static(held_by, member_id, records, out)
        known = self.members.get(member_id)
        said = MemberValue(
            request.instance_id,
            subscription.rack_id,
            request.client_id,
            request.client_host,
            tuple(sorted(set(subscription.topics))),
            None,
            request.rebalance_timeout_ms,
            None,
            ClassicValue(request.session_timeout_ms, request.protocols),
        )
        current = NEW_MEMBER if known is None else known.current
        member = self.write_changes(member_id, said, current, now_ms, records)
        self.reconcile(member, self._owned(subscription), records, out)
        self._expect(member, out)
        self._to_join.discard(member_id)
        out.stop(self._timer("join", member_id))
        out.start(self._timer("sync", member_id), max(request.rebalance_timeout_ms, 0))
        return {
            "error_code": ErrorCode.NONE,
            "generation_id": member.epoch,
            "protocol_type": CONSUMER,
            "protocol_name": request.protocols[0][0],
            "leader": "",
            "skip_assignment": False,
            "member_id": member_id,
            "members": [],
        }

    def _subscription(self, request: JoinRequest) -> Subscription:
        """What a joining member subscribes to, if it speaks what the group's other classic members do."""
        shared: set[str] | None = None
        for member in self.members.values():
            if member.said.classic is not None and member.member_id != request.member_id:
                names = {name for name, _ in member.said.classic.protocols}
                shared = names if shared is None else shared & names
        offered = {name for name, _ in request.protocols}
        agrees = request.protocol_type == CONSUMER and (shared is None or bool(shared & offered))
        subscription = decode_subscription(request.protocols[0][1]) if agrees and request.protocols else None
        if subscription is None:
            raise KafkaError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
        return subscription

    def _owned(self, subscription: Subscription) -> Assignment:
        topics = self._image().topics
        return {
            topics[name].id: frozenset(partitions)
            for name, partitions in subscription.owned
            if name in topics and partitions
        }

    # -- the rest of the classic protocol ------------------------------------------------------------------------------

    def _classic(self, member_id: str, instance_id: str | None) -> tuple[ConsumerMember, ClassicValue]:
        member = self._known(member_id, instance_id)
        if member.said.classic is None:
            raise KafkaError(ErrorCode.UNKNOWN_MEMBER_ID)
        return member, member.said.classic

    def sync(
        self,
        member_id: str,
        instance_id: str | None,
        generation: int,
        protocol_type: str | None,
        protocol: str | None,
        ticket: Ticket,
        out: Effects,
    ) -> None:
        try:
            member, classic = self._classic(member_id, instance_id)
            if generation != member.epoch:
                raise KafkaError(ErrorCode.ILLEGAL_GENERATION)
            name, metadata = classic.protocols[0]
            if protocol_type not in (None, CONSUMER) or protocol not in (None, name):
                raise KafkaError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
            if self.epoch > member.epoch and member.current.state != UNREVOKED:
                self._call(member, out)
                raise KafkaError(ErrorCode.REBALANCE_IN_PROGRESS)
        except KafkaError as error:
            out.reply(ticket, sync_error(error.code))
            return
        out.stop(self._timer("sync", member_id))
        self._expect(member, out)
        body = {
            "error_code": ErrorCode.NONE,
            "protocol_type": CONSUMER,
            "protocol_name": name,
            "assignment": self.embedded(member, metadata),
        }
        self.answer(ticket, body, [], out)

    def embedded(self, member: ConsumerMember, metadata: bytes) -> bytes:
        """What a member has, in the form that its own protocol's metadata has."""
        names = self._image().names
        topics = {names[each]: found for each, found in member.current.assigned.items() if each in names}
        subscription = decode_subscription(metadata)
        return encode_assignment(0 if subscription is None else subscription.version, topics)

    def classic_heartbeat(
        self, member_id: str, instance_id: str | None, generation: int, out: Effects
    ) -> ErrorCode:
        try:
            member, _ = self._classic(member_id, instance_id)
        except KafkaError as error:
            return error.code
        if generation != member.epoch:
            return ErrorCode.ILLEGAL_GENERATION
        self._expect(member, out)
        has_more = member.current.state == UNRELEASED and not self.is_waiting(member)
        if member.epoch >= self.epoch and member.current.state != UNREVOKED and not has_more:
            return ErrorCode.NONE
        self._call(member, out)
        return ErrorCode.REBALANCE_IN_PROGRESS

    def _call(self, member: ConsumerMember, out: Effects) -> None:
        """A member is told to join again, and has its rebalance timeout for that."""
        if member.member_id not in self._to_join:
            self._to_join.add(member.member_id)
            out.start(self._timer("join", member.member_id), max(member.said.rebalance_timeout_ms, 0))

    def leave(
        self, leaving: Sequence[tuple[str, str | None]], now_ms: int, records: list[Record], out: Effects
    ) -> list[tuple[str, str | None, ErrorCode]]:
        """Take classic members out, by id or, for static ones, by instance id alone; how it went for each."""
        results = []
        for member_id, instance_id in leaving:
            found = member_id
            if not found and instance_id is not None:
                found = self.static.get(instance_id, "")
            error = ErrorCode.NONE
            try:
                self._classic(found, instance_id)
                self.put_out(found, now_ms, records, out)
            except KafkaError as refused:
                error = refused.code
            results.append((member_id, instance_id, error))
        return results

    def put_out(self, member_id: str, now_ms: int, records: list[Record], out: Effects) -> None:
        self._to_join.discard(member_id)
        super().put_out(member_id, now_ms, records, out)

    def is_overdue(self, key: TimerKey) -> bool:
        return super().is_overdue(key) and (key[1] != "join" or key[2] in self._to_join)

    @property
    def is_all_classic(self) -> bool:
        """Whether members are left, and none that needs the consumer protocol."""
        return bool(self.members) and all(member.is_classic for member in self.members.values())


def by_id(image: ClusterImage, topics: Mapping[str, frozenset[int]]) -> Assignment:
    """Partitions by the ids of their topics, of those that there are."""
    return {image.topics[name].id: found for name, found in topics.items() if found and name in image.topics}
