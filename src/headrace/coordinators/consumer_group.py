"""One group of the consumer protocol (KIP-848): the broker assigns, members follow at their own pace.

Theory of operation. A member speaks only in heartbeats. The group's epoch is raised when a member comes or goes, when
a subscription changes, or when a topic that is subscribed to does; then the target assignment is computed anew, at
once, and carries that epoch. Each member is brought to its target one heartbeat at a time (`reconciliation`): it gives
up first, in its old epoch, and gets new partitions in the target's epoch when nobody else has them. Nobody waits for
anybody whose partitions he does not need. A member's epoch fences it: a heartbeat with another epoch than the known one
is refused, unless it is the one before and the member owns nothing that it should not (a reply got lost); a commit with
another epoch is refused always. Epoch 0 joins, also again: whoever says it has given up everything. -1 leaves; -2
leaves for a moment: a static member keeps its place until its session is over.

A step changes the tables at once and stores the records behind it; a reply leaves when everything that the group had
written by then is committed. If it cannot be, the shard is loaded anew, so nothing told has to be taken back.

Invariants: a partition is assigned to one member at a time; targets cover every partition of every topic subscribed to;
epochs only rise. Pure: steps take the time and write into an `Effects`. `GroupShard` calls them.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.settings import BrokerConfig
from headrace.cluster.image import ClusterImage, TopicImage
from headrace.coordinators.assignors import ASSIGNORS, Subscriber, Topic
from headrace.coordinators.committing import Committer
from headrace.coordinators.consumer_records import (
    NOTHING,
    Assignment,
    CurrentValue,
    MemberValue,
    RegexValue,
    TopicValue,
)
from headrace.coordinators.consumer_state import NEW_MEMBER, SILENT, ConsumerMember, ConsumerState
from headrace.coordinators.effects import Body, Effects, Record, Ticket, TimerKey
from headrace.coordinators.group_states import append_error
from headrace.coordinators.reconciliation import STABLE, UNRELEASED, UNREVOKED, is_within, next_step
from headrace.coordinators.topic_regex import InvalidPattern, compiled

JOIN, LEAVE, LEAVE_STATIC = 0, -1, -2
WRITE_BYTES_MAX: Final = 500_000
"""How much of a step is stored in one write; more is several, in an order in which each leaves a sound group."""
GROUP_RESOURCE: Final = 32
DEFAULT_ASSIGNOR: Final = "uniform"
WAITING_MS: Final = 500
"""How often a member reports that waits for partitions; it is given them in the reply to a heartbeat."""
EPOCHS_FROM_COMMIT_VERSION: Final = 9


class HeartbeatRequest(NamedTuple):
    """What a member says in a heartbeat; None is what it did not say, because it did not change."""

    member_id: str
    epoch: int
    instance_id: str | None
    rack_id: str | None
    rebalance_timeout_ms: int
    topics: tuple[str, ...] | None
    regex: str | None
    assignor: str | None
    owned: Assignment | None
    client_id: str
    client_host: str

    @property
    def is_full(self) -> bool:
        """Whether it says everything, as a member does that is not sure what the broker knows."""
        named = self.topics is not None or self.regex is not None
        return named and self.rebalance_timeout_ms != -1 and self.owned is not None


class ConsumerGroup(ConsumerState):
    """One group, as its members address it."""

    def __init__(
        self, group_id: str, config: Callable[[], BrokerConfig], image: Callable[[], ClusterImage]
    ) -> None:
        super().__init__(group_id, config, image)
        self._seen_topics: Mapping[str, TopicImage] | None = None
        self._written = 0
        self._settled = 0
        self._held: deque[tuple[int, Ticket, Body]] = deque()

    # -- heartbeats ----------------------------------------------------------------------------------------------------

    def heartbeat(self, request: HeartbeatRequest, ticket: Ticket, now_ms: int, out: Effects) -> None:
        records: list[Record] = []
        try:
            if request.epoch in (LEAVE, LEAVE_STATIC):
                body = self._leave(request, now_ms, records, out)
            else:
                body = self._beat(request, now_ms, records, out)
        except KafkaError as error:
            out.reply(ticket, {"error_code": error.code, "error_message": error.message})
            return
        self.answer(ticket, body, records, out)

    def _beat(
        self, request: HeartbeatRequest, now_ms: int, records: list[Record], out: Effects
    ) -> dict[str, Any]:
        member = self._find(request)
        if request.regex:
            self._check_regex(request.regex)
        said = SILENT if member is None else member.said
        current = NEW_MEMBER if member is None else member.current
        if member is None and request.instance_id in self.static:
            said, current = self._take_place(request, records, out)
        before = current.assigned
        said = _updated(said, request)
        member = self.write_changes(request.member_id, said, current, now_ms, records)
        self.reconcile(member, request.owned, records, out)
        self._expect(member, out)
        return self.told(
            member, request.epoch == JOIN or request.is_full or member.current.assigned != before
        )

    def told(self, member: ConsumerMember, with_assignment: bool) -> dict[str, Any]:
        """The reply to a heartbeat that was well received."""
        member.told_interval_ms = self._next_heartbeat_ms(member)
        body: dict[str, Any] = {
            "error_code": ErrorCode.NONE,
            "member_id": member.member_id,
            "member_epoch": member.epoch,
            "heartbeat_interval_ms": member.told_interval_ms,
        }
        if with_assignment:
            body["assignment"] = {
                "topic_partitions": [
                    {"topic_id": topic_id, "partitions": sorted(partitions)}
                    for topic_id, partitions in member.current.assigned.items()
                ]
            }
        return body

    def _find(self, request: HeartbeatRequest) -> ConsumerMember | None:
        """The member that speaks, or None when it comes new or for an older instance; KafkaError if it may not."""
        member = self.members.get(request.member_id)
        if request.epoch == JOIN:
            held_by = self.static.get(request.instance_id) if request.instance_id is not None else None
            if held_by is not None and held_by != request.member_id:
                holder = self.members[held_by]
                if holder.epoch != LEAVE_STATIC and not holder.is_classic:
                    raise KafkaError(
                        ErrorCode.UNRELEASED_INSTANCE_ID,
                        f"Static member {request.member_id} with instance id {request.instance_id} cannot join the "
                        f"group because the instance id is owned by {held_by} member.",
                    )
            elif member is None and len(self.members) >= self._config().group_consumer_max_size:
                raise KafkaError(
                    ErrorCode.GROUP_MAX_SIZE_REACHED,
                    f"The consumer group has reached its maximum capacity of {len(self.members)} members.",
                )
            return member
        member = self._known(request.member_id, request.instance_id)
        _check_epoch(member.current, request)
        return member

    def _known(self, member_id: str, instance_id: str | None) -> ConsumerMember:
        if instance_id is not None:
            held_by = self.static.get(instance_id)
            if held_by is None:
                raise KafkaError(ErrorCode.UNKNOWN_MEMBER_ID, f"Instance id {instance_id} is unknown.")
            if held_by != member_id:
                raise KafkaError(
                    ErrorCode.FENCED_INSTANCE_ID,
                    f"Static member {member_id} with instance id {instance_id} was fenced by member {held_by}.",
                )
        member = self.members.get(member_id)
        if member is None:
            raise KafkaError(
                ErrorCode.UNKNOWN_MEMBER_ID,
                f"Member {member_id} is not a member of group {self.group_id}.",
            )
        return member

    def _take_place(
        self, request: HeartbeatRequest, records: list[Record], out: Effects
    ) -> tuple[MemberValue, CurrentValue]:
        """A static member comes back under a new id: what its old one was and had is its own now."""
        assert request.instance_id is not None
        return self.replace_static(self.static[request.instance_id], request.member_id, records, out)

    def replace_static(
        self, old_id: str, new_id: str, records: list[Record], out: Effects
    ) -> tuple[MemberValue, CurrentValue]:
        old = self.members[old_id]
        target = self.targets.get(old_id, NOTHING)
        said, current = old.said, old.current._replace(epoch=0, previous_epoch=0)
        self.stop_timers(old_id, out)
        self.remove_member(old_id, records)
        self.write_member(new_id, said, records)
        self.write_target(new_id, target, records)
        self.write_current(new_id, current, records)
        return said, current

    def write_changes(
        self, member_id: str, said: MemberValue, current: CurrentValue, now_ms: int, records: list[Record]
    ) -> ConsumerMember:
        """Take what a member says of itself now, and what follows from that and from the topics there are."""
        known = self.members.get(member_id)
        changed = known is None or (known.said.topics, known.said.regex) != (said.topics, said.regex)
        if known is None or known.said != said:
            self.write_member(member_id, said, records)
        if self._refresh(changed, now_ms, records) or changed:
            self.write_epoch(self.epoch + 1, records)
        if self.epoch > self.target_epoch:
            self._assign(records)
        return self.members[member_id]

    def reconcile(
        self, member: ConsumerMember, owned: Assignment | None, records: list[Record], out: Effects
    ) -> None:
        """Bring a member a step nearer to its target."""
        before = member.current
        target = self.targets.get(member.member_id, NOTHING)
        after = next_step(before, self.target_epoch, target, owned, self.has_owner)
        if after != before:
            self.write_current(member.member_id, after, records)
        if after.state == UNREVOKED:
            if before.state != UNREVOKED or before.epoch != after.epoch:
                out.start(
                    self._timer("rebalance", member.member_id), max(member.said.rebalance_timeout_ms, 0)
                )
        elif before.state == UNREVOKED:
            out.stop(self._timer("rebalance", member.member_id))

    # -- leaving -------------------------------------------------------------------------------------------------------

    def _leave(
        self, request: HeartbeatRequest, now_ms: int, records: list[Record], out: Effects
    ) -> dict[str, Any]:
        member = self._known(request.member_id, request.instance_id)
        if request.epoch == LEAVE_STATIC:
            away = member.current._replace(epoch=LEAVE_STATIC, revoking=NOTHING)
            self.write_current(member.member_id, away, records)
        else:
            self.put_out(member.member_id, now_ms, records, out)
        return {
            "error_code": ErrorCode.NONE,
            "member_id": request.member_id,
            "member_epoch": request.epoch,
            "heartbeat_interval_ms": 0,
        }

    def put_out(self, member_id: str, now_ms: int, records: list[Record], out: Effects) -> None:
        """A member is gone: the others are to have what it had."""
        self.stop_timers(member_id, out)
        self.remove_member(member_id, records)
        self._refresh(True, now_ms, records)
        self.write_epoch(self.epoch + 1, records)

    # -- targets -------------------------------------------------------------------------------------------------------

    def _refresh(self, subscriptions_changed: bool, now_ms: int, records: list[Record]) -> bool:
        """See what is subscribed to now, and whether that is other than it was."""
        image = self._image()
        if not subscriptions_changed and image.topics is self._seen_topics:
            return False
        self._resolve(image, now_ms, records)
        self._seen_topics = image.topics
        topics = {
            name: TopicValue(image.topics[name].id, len(image.topics[name].partitions))
            for name in self.subscribed_names()
            if name in image.topics
        }
        if topics == self.topics:
            return False
        self.write_topics(topics, records)
        return True

    def _resolve(self, image: ClusterImage, now_ms: int, records: list[Record]) -> None:
        """Look up what regular expressions stand for: new ones, and all of them when there are other topics."""
        for pattern in [each for each in self.regexes if each not in self._patterns]:
            self.write_regex(pattern, None, records)
        for pattern in self._patterns:
            if pattern in self.regexes and image.topics is self._seen_topics:
                continue
            regex = compiled(pattern)
            found = tuple(sorted(name for name in image.topics if regex.matches(name)))
            known = self.regexes.get(pattern)
            if known is None or known.topics != found:
                version = 0 if known is None else known.version + 1
                self.write_regex(pattern, RegexValue(found, version, now_ms), records)

    def _check_regex(self, pattern: str) -> None:
        if pattern not in self._patterns:
            try:
                compiled(pattern)
            except InvalidPattern as error:
                raise KafkaError(
                    ErrorCode.INVALID_REGULAR_EXPRESSION,
                    f"SubscribedTopicRegex `{pattern}` is not a valid regular expression: {error}.",
                ) from None

    def _assign(self, records: list[Record]) -> None:
        """Compute the target assignment of this epoch; what did not change is not written again."""
        ids: dict[tuple[tuple[str, ...], str | None], frozenset[bytes]] = {}
        subscribers = {}
        for member_id, member in self.members.items():
            said = member.said
            key = (said.topics, said.regex)
            if key not in ids:
                names = self.names_of(member)
                ids[key] = frozenset(self.topics[name].topic_id for name in names if name in self.topics)
            subscribers[member_id] = Subscriber(member_id, said.instance_id, said.rack_id, ids[key])
        racked = any(each.rack_id is not None for each in subscribers.values())
        topics = {value.topic_id: self._topic(name, value, racked) for name, value in self.topics.items()}
        for member_id, target in ASSIGNORS[self.assignor()](subscribers, topics, self.targets).items():
            if self.targets.get(member_id) != target:
                self.write_target(member_id, target, records)
        self.write_target_epoch(self.epoch, records)

    def assignor(self) -> str:
        """The one that most members ask for, or else the first of the settings."""
        votes: dict[str, int] = {}
        for member in self.members.values():
            if member.said.assignor is not None:
                votes[member.said.assignor] = votes.get(member.said.assignor, 0) + 1
        default = next(iter(self._config().group_consumer_assignors), DEFAULT_ASSIGNOR)
        chosen = max(votes, key=lambda name: votes[name], default=default)
        return chosen if chosen in ASSIGNORS else default

    def _topic(self, name: str, value: TopicValue, racked: bool) -> Topic:
        if not racked:
            return Topic(value.partitions)
        image = self._image()
        racks = []
        for partition in image.topics[name].partitions:
            brokers = [image.brokers[each] for each in partition.replicas if each in image.brokers]
            racks.append(frozenset(broker.rack for broker in brokers if broker.rack is not None))
        return Topic(value.partitions, tuple(racks))

    # -- time ----------------------------------------------------------------------------------------------------------

    def session_timeout_ms(self) -> int:
        config = self._config()
        given = self._image().config(GROUP_RESOURCE, self.group_id).get("consumer.session.timeout.ms")
        if given is None:
            return config.group_consumer_session_timeout_ms
        low, high = config.group_consumer_min_session_timeout_ms, config.group_consumer_max_session_timeout_ms
        return max(min(int(given), high), low)

    def heartbeat_interval_ms(self) -> int:
        config = self._config()
        given = self._image().config(GROUP_RESOURCE, self.group_id).get("consumer.heartbeat.interval.ms")
        if given is None:
            return config.group_consumer_heartbeat_interval_ms
        low, high = (
            config.group_consumer_min_heartbeat_interval_ms,
            config.group_consumer_max_heartbeat_interval_ms,
        )
        return max(min(int(given), high), low)

    def _next_heartbeat_ms(self, member: ConsumerMember) -> int:
        """When a member is to report again: soon, if it waits for what others have to give up."""
        interval_ms = self.heartbeat_interval_ms()
        return min(interval_ms, WAITING_MS) if member.current.state == UNRELEASED else interval_ms

    def _timer(self, what: str, member_id: str) -> TimerKey:
        return self.group_id, what, member_id

    def _expect(self, member: ConsumerMember, out: Effects) -> None:
        classic = member.said.classic
        timeout_ms = self.session_timeout_ms() if classic is None else classic.session_timeout_ms
        out.start(self._timer("session", member.member_id), timeout_ms)

    def stop_timers(self, member_id: str, out: Effects) -> None:
        for what in ("session", "rebalance", "join", "sync"):
            out.stop(self._timer(what, member_id))

    def loaded(self, now_ms: int, out: Effects) -> None:
        """Everything is replayed: members have from now on to be heard of."""
        for member in self.members.values():
            self._expect(member, out)
            if member.current.state == UNREVOKED:
                out.start(
                    self._timer("rebalance", member.member_id), max(member.said.rebalance_timeout_ms, 0)
                )

    def is_overdue(self, key: TimerKey) -> bool:
        """Whether a timer that went off puts its member out."""
        member = self.members.get(key[2])
        return member is not None and (key[1] != "rebalance" or member.current.state == UNREVOKED)

    def is_waiting(self, member: ConsumerMember) -> bool:
        """Whether a member in the target's epoch waits for partitions that others have not given up."""
        if member.current.state != UNRELEASED:
            return False
        target = self.targets.get(member.member_id, NOTHING)
        return any(
            self.has_owner(topic_id, index)
            for topic_id, partitions in target.items()
            for index in partitions - member.current.assigned.get(topic_id, frozenset())
        )

    # -- commits -------------------------------------------------------------------------------------------------------

    def check_committer(self, who: Committer) -> ErrorCode:
        """Whether who commits may do so."""
        if who.generation < 0 and (not self.members or (who.producer is not None and not who.member_id)):
            return ErrorCode.NONE  # older transactional producers do not say which member they commit for
        member = self.members.get(who.member_id)
        if member is None:
            return ErrorCode.UNKNOWN_MEMBER_ID
        if member.is_classic:
            return ErrorCode.NONE if who.generation == member.epoch else ErrorCode.ILLEGAL_GENERATION
        if who.producer is not None:  # its request has versions of its own, and no word for a stale epoch
            return ErrorCode.NONE if who.generation == member.epoch else ErrorCode.ILLEGAL_GENERATION
        if who.version < EPOCHS_FROM_COMMIT_VERSION:
            return ErrorCode.UNSUPPORTED_VERSION
        return ErrorCode.NONE if who.generation == member.epoch else ErrorCode.STALE_MEMBER_EPOCH

    def touch(self, member_id: str, out: Effects) -> None:
        """A commit says nothing here: only heartbeats keep a member in."""

    def subscribes_to(self, topic: str) -> bool:
        return topic in self.subscribed_names()

    def check_reader(self, member_id: str | None, epoch: int) -> ErrorCode:
        """Whether a member that asks for offsets is the one it was."""
        if member_id is None and epoch < 0:
            return ErrorCode.NONE
        member = self.members.get(member_id or "")
        if member is None:
            return ErrorCode.UNKNOWN_MEMBER_ID
        return ErrorCode.NONE if epoch == member.epoch else ErrorCode.STALE_MEMBER_EPOCH

    # -- replies that wait for records ---------------------------------------------------------------------------------

    def answer(self, ticket: Ticket | None, body: Body, records: list[Record], out: Effects) -> None:
        """Reply when these records, and all that the group wrote before, are committed."""
        if not records:
            if ticket is not None and self._settled == self._written:
                out.reply(ticket, body)
            elif ticket is not None:
                self._held.append((self._written, ticket, body))
            return
        for part in parts_of(records):
            self._written += 1
            out.store(part, self._stored, ahead=True)
        if ticket is not None:
            self._held.append((self._written, ticket, body))

    def _stored(self, error: ErrorCode, now_ms: int, out: Effects) -> None:
        self._settled += 1
        if error is not ErrorCode.NONE:
            self.die(append_error(error), now_ms, out)
        while self._held and self._held[0][0] <= self._settled:
            _, ticket, body = self._held.popleft()
            out.reply(ticket, body)

    def die(self, error: ErrorCode, now_ms: int, out: Effects) -> None:
        """The group goes, or goes elsewhere: answer all who wait."""
        while self._held:
            _, ticket, _ = self._held.popleft()
            out.reply(ticket, {"error_code": error})


def _updated(said: MemberValue, request: HeartbeatRequest) -> MemberValue:
    """What a member says now, where it says something."""
    return MemberValue(
        said.instance_id if request.instance_id is None else request.instance_id,
        said.rack_id if request.rack_id is None else request.rack_id,
        request.client_id,
        request.client_host,
        said.topics if request.topics is None else tuple(sorted(set(request.topics))),
        said.regex if request.regex is None else (request.regex or None),
        said.rebalance_timeout_ms if request.rebalance_timeout_ms == -1 else request.rebalance_timeout_ms,
        said.assignor if request.assignor is None else request.assignor,
    )


def _check_epoch(current: CurrentValue, request: HeartbeatRequest) -> None:
    if request.epoch == current.epoch and current.state in (STABLE, UNREVOKED, UNRELEASED):
        return
    lost_reply = (
        request.epoch == current.previous_epoch
        and request.owned is not None
        and is_within(request.owned, current.assigned)
    )
    if request.epoch > current.epoch or not lost_reply:
        relation = "greater" if request.epoch > current.epoch else "smaller"
        raise KafkaError(
            ErrorCode.FENCED_MEMBER_EPOCH,
            f"The consumer group member has a {relation} member epoch ({request.epoch}) than the one known by the "
            f"group coordinator ({current.epoch}). The member must abandon all its partitions and rejoin.",
        )


def parts_of(records: list[Record]) -> Iterator[list[Record]]:
    part: list[Record] = []
    size = 0
    for key, value in records:
        more = len(key) + len(value or b"")
        if part and size + more > WRITE_BYTES_MAX:
            yield part
            part, size = [], 0
        part.append((key, value))
        size += more
    yield part
