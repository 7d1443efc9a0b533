"""What a group of the consumer protocol is: its epochs, members, targets, and who has which partition.

The tables, and how records change them. A live step changes a table and writes the record in one go (`write_...`), a
restart changes it from the record (`replay`); both end in the same setters. Invariants: an instance id names one
member; `_owners` counts, for each partition, the members that have it or have not yet given it up; what is subscribed
to is counted, never searched for. Decides nothing; `ConsumerGroup` does.
"""

from collections.abc import Callable
from enum import Enum
from typing import Final, TypeVar

from headrace.base.settings import BrokerConfig
from headrace.cluster.image import ClusterImage
from headrace.coordinators.consumer_records import (
    NOTHING,
    Assignment,
    CurrentValue,
    Kind,
    MemberValue,
    RegexValue,
    TopicValue,
    consumer_key,
    current_value,
    decode_current,
    decode_epoch,
    decode_member,
    decode_regex,
    decode_target,
    decode_topics,
    epoch_value,
    member_value,
    regex_value,
    target_value,
    topics_value,
)
from headrace.coordinators.effects import Record
from headrace.coordinators.reconciliation import STABLE

K = TypeVar("K")
NEW_MEMBER: Final = CurrentValue(0, 0, STABLE, NOTHING, NOTHING)
SILENT: Final = MemberValue(None, None, "", "", (), None, -1, None)


class GroupState(Enum):
    """The states of a group of the consumer protocol, by Kafka's names."""

    EMPTY = "Empty"
    ASSIGNING = "Assigning"
    RECONCILING = "Reconciling"
    STABLE = "Stable"


class ConsumerMember:
    """One member: what it says of itself, and what it has."""

    __slots__ = ("current", "member_id", "said", "told_interval_ms")

    def __init__(self, member_id: str) -> None:
        self.member_id = member_id
        self.said = SILENT
        self.current = NEW_MEMBER
        self.told_interval_ms = 0  # in which it is to report, by the last reply; not stored

    @property
    def epoch(self) -> int:
        return self.current.epoch

    @property
    def is_classic(self) -> bool:
        """Whether it speaks the classic protocol, in a group that has moved on."""
        return self.said.classic is not None


class ConsumerState:
    """The tables of one group."""

    def __init__(
        self, group_id: str, config: Callable[[], BrokerConfig], image: Callable[[], ClusterImage]
    ) -> None:
        self.group_id = group_id
        self._config = config
        self._image = image
        self.epoch = 0
        self.target_epoch = 0
        self.topics: dict[str, TopicValue] = {}
        self.members: dict[str, ConsumerMember] = {}
        self.static: dict[str, str] = {}
        self.targets: dict[str, Assignment] = {}
        self.regexes: dict[str, RegexValue] = {}
        self._owners: dict[bytes, dict[int, int]] = {}
        self._named: dict[str, int] = {}
        self._patterns: dict[str, int] = {}

    # -- questions -----------------------------------------------------------------------------------------------------

    @property
    def state(self) -> GroupState:
        if not self.members:
            return GroupState.EMPTY
        if self.epoch > self.target_epoch:
            return GroupState.ASSIGNING
        if all(self.is_reconciled(member) for member in self.members.values()):
            return GroupState.STABLE
        return GroupState.RECONCILING

    def is_reconciled(self, member: ConsumerMember) -> bool:
        return member.current.state == STABLE and member.epoch == self.target_epoch

    def has_owner(self, topic_id: bytes, index: int) -> bool:
        return bool(self._owners.get(topic_id, {}).get(index))

    def subscribed_names(self) -> set[str]:
        """The topics that a member names or whose regular expression stands for them."""
        names = set(self._named)
        for pattern in self._patterns:
            if pattern in self.regexes:
                names.update(self.regexes[pattern].topics)
        return names

    def names_of(self, member: ConsumerMember) -> set[str]:
        """The topics that one member subscribes to."""
        resolved = self.regexes.get(member.said.regex) if member.said.regex else None
        return set(member.said.topics) | set(resolved.topics if resolved is not None else ())

    # -- changing and writing ------------------------------------------------------------------------------------------

    def write_epoch(self, epoch: int, records: list[Record]) -> None:
        self.epoch = epoch
        records.append((consumer_key(Kind.EPOCH, self.group_id), epoch_value(epoch)))

    def write_topics(self, topics: dict[str, TopicValue], records: list[Record]) -> None:
        self.topics = topics
        records.append((consumer_key(Kind.TOPICS, self.group_id), topics_value(topics)))

    def write_member(self, member_id: str, said: MemberValue, records: list[Record]) -> None:
        self._say(member_id, said)
        records.append((consumer_key(Kind.MEMBER, self.group_id, member_id), member_value(said)))

    def write_current(self, member_id: str, current: CurrentValue, records: list[Record]) -> None:
        self._have(member_id, current)
        records.append((consumer_key(Kind.CURRENT, self.group_id, member_id), current_value(current)))

    def write_target(self, member_id: str, target: Assignment, records: list[Record]) -> None:
        self.targets[member_id] = target
        records.append((consumer_key(Kind.TARGET, self.group_id, member_id), target_value(target)))

    def write_target_epoch(self, epoch: int, records: list[Record]) -> None:
        self.target_epoch = epoch
        records.append((consumer_key(Kind.TARGET_EPOCH, self.group_id), epoch_value(epoch)))

    def write_regex(self, pattern: str, value: RegexValue | None, records: list[Record]) -> None:
        key = consumer_key(Kind.REGEX, self.group_id, pattern)
        if value is None:
            self.regexes.pop(pattern, None)
        else:
            self.regexes[pattern] = value
        records.append((key, None if value is None else regex_value(value)))

    def remove_member(self, member_id: str, records: list[Record]) -> None:
        records += self._member_tombstones(member_id)
        self.targets.pop(member_id, None)
        self._forget(member_id)

    def _member_tombstones(self, member_id: str) -> list[Record]:
        kinds = (Kind.CURRENT, Kind.TARGET, Kind.MEMBER)
        return [(consumer_key(kind, self.group_id, member_id), None) for kind in kinds]

    def tombstones(self) -> list[Record]:
        """What removes the group, members first."""
        records: list[Record] = []
        for member_id in self.members:
            records += self._member_tombstones(member_id)
        records += [(consumer_key(Kind.REGEX, self.group_id, pattern), None) for pattern in self.regexes]
        kinds = (Kind.TARGET_EPOCH, Kind.TOPICS, Kind.EPOCH)
        return records + [(consumer_key(kind, self.group_id), None) for kind in kinds]

    def adopt(self, member_id: str, said: MemberValue, current: CurrentValue) -> None:
        """Take in a member of another group, with what it has, which is also what it is to have."""
        self._say(member_id, said)
        self._have(member_id, current)
        self.targets[member_id] = current.assigned

    def everything(self, records: list[Record]) -> None:
        """Write all that is there: the group was made out of another one."""
        for member in self.members.values():
            self.write_member(member.member_id, member.said, records)
        self.write_topics(self.topics, records)
        self.write_epoch(self.epoch, records)
        for member_id, target in self.targets.items():
            self.write_target(member_id, target, records)
        self.write_target_epoch(self.target_epoch, records)
        for member in self.members.values():
            self.write_current(member.member_id, member.current, records)

    # -- replaying -----------------------------------------------------------------------------------------------------

    def replay(self, kind: Kind, name: str, value: bytes | None) -> None:
        """Be what a record says. That the group is gone is not for the group to replay."""
        match kind:
            case Kind.EPOCH:
                self.epoch = 0 if value is None else decode_epoch(value)
            case Kind.TOPICS:
                self.topics = {} if value is None else decode_topics(value)
            case Kind.TARGET_EPOCH:
                self.target_epoch = 0 if value is None else decode_epoch(value)
            case Kind.MEMBER if value is not None:
                self._say(name, decode_member(value))
            case Kind.MEMBER:
                self._forget(name)
            case Kind.TARGET if value is not None:
                self.targets[name] = decode_target(value)
            case Kind.TARGET:
                self.targets.pop(name, None)
            case Kind.CURRENT if value is not None:
                self._have(name, decode_current(value))
            case Kind.CURRENT:
                if name in self.members:
                    self._have(name, NEW_MEMBER)
            case Kind.REGEX if value is not None:
                self.regexes[name] = decode_regex(value)
            case Kind.REGEX:
                self.regexes.pop(name, None)

    # -- setters -------------------------------------------------------------------------------------------------------

    def _member(self, member_id: str) -> ConsumerMember:
        member = self.members.get(member_id)
        if member is None:
            member = self.members[member_id] = ConsumerMember(member_id)
        return member

    def _say(self, member_id: str, said: MemberValue) -> None:
        member = self._member(member_id)
        self._subscribe(member.said, -1)
        member.said = said
        self._subscribe(said, 1)
        if said.instance_id is not None:
            self.static[said.instance_id] = member_id

    def _have(self, member_id: str, current: CurrentValue) -> None:
        member = self._member(member_id)
        self._own(member.current, -1)
        member.current = current
        self._own(current, 1)

    def _forget(self, member_id: str) -> None:
        member = self.members.pop(member_id, None)
        if member is not None:
            self._subscribe(member.said, -1)
            self._own(member.current, -1)
            instance_id = member.said.instance_id
            if instance_id is not None and self.static.get(instance_id) == member_id:
                del self.static[instance_id]

    def _subscribe(self, said: MemberValue, step: int) -> None:
        for topic in said.topics:
            _count(self._named, topic, step)
        if said.regex:
            _count(self._patterns, said.regex, step)

    def _own(self, current: CurrentValue, step: int) -> None:
        for assignment in (current.assigned, current.revoking):
            for topic_id, partitions in assignment.items():
                owners = self._owners.setdefault(topic_id, {})
                for index in partitions:
                    _count(owners, index, step)
                if not owners:
                    del self._owners[topic_id]


def _count(counts: dict[K, int], key: K, step: int) -> None:
    count = counts.get(key, 0) + step
    if count:
        counts[key] = count
    else:
        counts.pop(key, None)
