"""The groups and offsets of one partition of `__consumer_offsets`: every group request, as a step of a state machine.

Takes a request, a time and a ticket; writes replies, timers and records into an `Effects`. Invariants: offsets and the
existence of groups that hold nothing but offsets come only from committed records, live and at a restart by the same
`replay`; who is a member is known at once and stored when a generation's assignment is. Errors are Kafka's, group by
group. Pure; the runtime calls it and holds one for each partition that this broker leads.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.log import get_logger
from headrace.base.settings import BrokerConfig
from headrace.cluster.image import EMPTY as NO_TOPICS
from headrace.cluster.image import ClusterImage
from headrace.coordinators.classic_group import ClassicGroup
from headrace.coordinators.committing import Commit, CommitResult, Committer
from headrace.coordinators.consumer_news import NEWS
from headrace.coordinators.consumer_records import ConsumerKey, Kind, decode_consumer_key
from headrace.coordinators.effects import Effects, Record, Then, TimerKey
from headrace.coordinators.group_members import Group, GroupMembers, LeaveResult
from headrace.coordinators.group_states import (
    DEAD,
    EMPTY,
    STABLE,
    append_error,
)
from headrace.coordinators.mixed_group import MixedGroup
from headrace.coordinators.offsets import CommittedOffsets, expired
from headrace.coordinators.rebalance import CONSUMER
from headrace.coordinators.records import (
    NEVER,
    GroupKey,
    OffsetKey,
    bare_offset_value,
    decode_group,
    decode_key,
    decode_offset,
    group_key,
    offset_key,
    offset_value,
)
from headrace.coordinators.txn_offsets import PendingOffsets

TOMBSTONES_A_BATCH: Final = 1000
MINUTE_MS: Final = 60_000
CLEANUP: Final[TimerKey] = ("", "cleanup")
GROUP_NOT_FOUND_FROM_COMMIT_VERSION: Final = 9

logger = get_logger(__name__)


class GroupShard(GroupMembers):
    """The state machine of one partition."""

    def __init__(
        self,
        config: Callable[[], BrokerConfig],
        new_id: Callable[[], str],
        image: Callable[[], ClusterImage] = lambda: NO_TOPICS,
    ) -> None:
        super().__init__(config, new_id, image)
        self.offsets = CommittedOffsets()
        self.pending = PendingOffsets()

    # -- what the runtime calls ----------------------------------------------------------------------------------------

    def replay(self, key: bytes, value: bytes | None) -> None:
        """Take up a committed record. One that cannot be read is passed over, or the whole shard would be lost."""
        try:
            subject = decode_key(key)
            if isinstance(subject, OffsetKey):
                if value is not None and subject.group not in self.groups:
                    self._create(subject.group)
                self.offsets.put(subject, None if value is None else decode_offset(value))
                self.pending.overtake(subject)
            elif isinstance(subject, GroupKey):
                self._replay_group(subject.group, value)
            elif (consumers := decode_consumer_key(key)) is not None:
                self._replay_consumers(consumers, value)
        except KafkaError as error:
            logger.error("a record of a group cannot be read", extra={"fields": {"why": error.message}})

    def replay_open(self, producer_id: int, key: bytes, value: bytes | None) -> None:
        """Take up a committed record of an open transaction: an offset that waits for its end."""
        try:
            subject = decode_key(key)
            if isinstance(subject, OffsetKey) and value is not None:
                if subject.group not in self.groups:
                    self._create(subject.group)
                self.pending.put(producer_id, subject, decode_offset(value))
        except KafkaError as error:
            logger.error("a record of a group cannot be read", extra={"fields": {"why": error.message}})

    def end_transaction(self, producer_id: int, committed: bool) -> None:
        """A producer's transaction ended here: its offsets count from now on, or never did."""
        for key, value in list(self.pending.end(producer_id)):
            if committed:
                if key.group not in self.groups:
                    self._create(key.group)
                self.offsets.put(key, value)

    def _replay_group(self, group_id: str, value: bytes | None) -> None:
        if value is not None:
            self._create(group_id).load(decode_group(value))
            return
        group = self.groups.get(group_id)
        # Somebody may have joined while the tombstone was on its way: then the next generation is stored over it.
        if isinstance(group, ClassicGroup) and group.state is EMPTY and not group.members.pending:
            del self.groups[group_id]

    def _replay_consumers(self, key: ConsumerKey, value: bytes | None) -> None:
        group = self.groups.get(key.group)
        if key.kind is Kind.EPOCH and value is None:
            if isinstance(group, MixedGroup) and not group.members:
                del self.groups[key.group]
                if self.offsets.of(key.group):
                    self._create(key.group)
            return
        if not isinstance(group, MixedGroup):
            if value is None:
                return
            group = self.groups[key.group] = MixedGroup(key.group, self._config, self._image)
        group.replay(key.kind, key.name, value)

    def loaded(self, now_ms: int, out: Effects) -> None:
        for group in self.groups.values():
            group.loaded(now_ms, out)
        out.start(CLEANUP, self._config().offsets_retention_check_interval_ms)

    def unload(self, error: ErrorCode, now_ms: int, out: Effects) -> None:
        """This broker no longer coordinates these groups."""
        for group in self.groups.values():
            group.die(error, now_ms, out)
        self.groups.clear()

    def on_timer(self, key: TimerKey, now_ms: int, out: Effects) -> None:
        if key == CLEANUP:
            self._clean_up(now_ms, out)
            out.start(CLEANUP, self._config().offsets_retention_check_interval_ms)
            return
        group = self.groups.get(key[0])
        if isinstance(group, ClassicGroup):
            group.on_timer(key, now_ms, out)
        elif group is not None and key[1] == NEWS:
            group.rested(out)
        elif group is not None and group.is_overdue(key):
            self.put_out(group, key[2], now_ms, out)

    # -- offsets -------------------------------------------------------------------------------------------------------

    def commit(
        self,
        who: Committer,
        commits: Sequence[tuple[str, int, int, int, str]],
        done: Callable[[CommitResult], None],
        now_ms: int,
        out: Effects,
    ) -> None:
        """Store offsets. `done` is told how it went when they are committed, or at once when they will not be."""
        group = self.groups.get(who.group_id)
        error = self._check_committer(who, group)
        if error is not ErrorCode.NONE:
            done([(topic, index, error) for topic, index, *_ in commits])
            return
        if group is not None and who.member_id:
            group.touch(who.member_id, out)
        expires_ms = NEVER if who.retention_ms == -1 else now_ms + who.retention_ms
        longest = self._config().offset_metadata_max_bytes
        results: CommitResult = []
        records: list[Record] = []
        for topic, index, offset, leader_epoch, metadata in commits:
            if len(metadata) > longest:
                results.append((topic, index, ErrorCode.OFFSET_METADATA_TOO_LARGE))
                continue
            value = offset_value((offset, leader_epoch, metadata, now_ms, expires_ms))
            records.append((offset_key(who.group_id, topic, index), value))
            results.append((topic, index, ErrorCode.NONE))

        def stored(error: ErrorCode, now_ms: int, out: Effects) -> None:
            if error is ErrorCode.NONE:
                done(results)
                return
            told = append_error(error, ErrorCode.INVALID_COMMIT_OFFSET_SIZE)
            done([(topic, index, code or told) for topic, index, code in results])

        if records:
            out.store(records, stored, replayed=True, producer=who.producer)
        else:
            done(results)

    def commit_one(
        self,
        who: Committer,
        topic: str,
        index: int,
        offset: int,
        leader_epoch: int,
        then: Then,
        now_ms: int,
        out: Effects,
    ) -> ErrorCode:
        """As `commit`, of one offset without metadata or an end of its own: most commits are such.

        Why it is refused; or NONE, and `then` is told how storing it went.
        """
        group = self.groups.get(who.group_id)
        error = self._check_committer(who, group)
        if error is not ErrorCode.NONE:
            return error
        if group is not None and who.member_id:
            group.touch(who.member_id, out)
        record = offset_key(who.group_id, topic, index), bare_offset_value(offset, leader_epoch, now_ms)
        out.store((record,), then, replayed=True, producer=who.producer)
        return error

    def _check_committer(self, who: Committer, group: Group | None) -> ErrorCode:
        if group is not None:
            return group.check_committer(who)
        if who.generation < 0:
            return ErrorCode.NONE
        if who.version >= GROUP_NOT_FOUND_FROM_COMMIT_VERSION:
            return ErrorCode.GROUP_ID_NOT_FOUND
        return ErrorCode.ILLEGAL_GENERATION

    def check_reader(self, group_id: str, member_id: str | None, epoch: int) -> ErrorCode:
        """Whether a member that asks for offsets is the one it was. Only the consumer protocol's say who they are."""
        group = self.groups.get(group_id)
        return group.check_reader(member_id, epoch) if isinstance(group, MixedGroup) else ErrorCode.NONE

    def delete_offsets(
        self,
        group_id: str,
        partitions: Sequence[tuple[str, int]],
        done: Callable[[ErrorCode, CommitResult], None],
        out: Effects,
    ) -> None:
        """Forget offsets of partitions that no member reads."""
        group = self.groups.get(group_id)
        if group is None or group.state is DEAD:
            done(ErrorCode.GROUP_ID_NOT_FOUND, [])
            return
        if isinstance(group, ClassicGroup) and group.state is not EMPTY and group.protocol_type != CONSUMER:
            done(ErrorCode.NON_EMPTY_GROUP, [])
            return
        results: CommitResult = []
        records: list[Record] = []
        for topic, index in partitions:
            subscribed = group.subscribes_to(topic)
            results.append(
                (topic, index, ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC if subscribed else ErrorCode.NONE)
            )
            stored = self.offsets.get(group_id, topic, index) is not None
            if not subscribed and (stored or self.pending.is_pending(group_id, topic, index)):
                records.append((offset_key(group_id, topic, index), None))

        def buried(error: ErrorCode) -> None:
            done(ErrorCode.NONE, [(topic, index, code or error) for topic, index, code in results])

        self._bury(records, buried, out)

    def delete_group(self, group_id: str, done: Callable[[ErrorCode], None], out: Effects) -> None:
        group = self.groups.get(group_id)
        if group is None or group.state is DEAD:
            done(ErrorCode.GROUP_ID_NOT_FOUND)
        elif group.members if isinstance(group, MixedGroup) else group.state is not EMPTY:
            done(ErrorCode.NON_EMPTY_GROUP)
        else:
            self._bury(self._group_tombstones(group_id), done, out)

    def forget_topics(self, topics: set[str], out: Effects) -> None:
        """Topics are deleted: what was committed for them is of no use to a later topic of the same name."""
        keys = {*self.offsets.keys_of_topics(topics), *self.pending.keys_of_topics(topics)}
        records: list[Record] = [(offset_key(*key), None) for key in sorted(keys)]
        self._bury(records, lambda error: None, out)

    def _group_tombstones(self, group_id: str) -> list[Record]:
        partitions = {*self.offsets.of(group_id), *self.pending.of(group_id)}
        records: list[Record] = [
            (offset_key(group_id, topic, index), None) for topic, index in sorted(partitions)
        ]
        group = self.groups.get(group_id)
        if isinstance(group, MixedGroup):
            return records + group.tombstones()
        records.append((group_key(group_id), None))
        return records

    def _bury(self, records: Sequence[Record], done: Callable[[ErrorCode], None], out: Effects) -> None:
        """Store tombstones, as many batches as it takes; told when the last of them is committed."""
        if not records:
            done(ErrorCode.NONE)
            return
        for first in range(0, len(records), TOMBSTONES_A_BATCH):
            last = first + TOMBSTONES_A_BATCH >= len(records)
            then = (lambda error, now_ms, out: done(append_error(error))) if last else None
            out.store(records[first : first + TOMBSTONES_A_BATCH], then, replayed=True)

    def _clean_up(self, now_ms: int, out: Effects) -> None:
        """Let offsets go whose time is over, and groups that have nothing left."""
        retention_ms = self._config().offsets_retention_minutes * MINUTE_MS
        records: list[Record] = []
        for group in list(self.groups.values()):
            gone, none_left = expired(group, self.offsets.of(group.group_id).items(), now_ms, retention_ms)
            records += [(offset_key(group.group_id, topic, index), None) for topic, index in gone]
            if not none_left or self.pending.has_group(group.group_id):
                continue
            if isinstance(group, MixedGroup):
                records += [] if group.members else group.tombstones()
            elif group.state is EMPTY and not group.members.pending:
                records.append((group_key(group.group_id), None))
        if records:
            logger.info("offsets expired", extra={"fields": {"tombstones": len(records)}})
        self._bury(records, lambda error: None, out)

    # -- telling -------------------------------------------------------------------------------------------------------

    def describe(self, group_id: str) -> dict[str, Any] | None:
        """A group as DescribeGroups tells it; None when there is no classic one."""
        group = self.groups.get(group_id)
        if not isinstance(group, ClassicGroup):
            return None
        stable = group.state is STABLE
        return {
            "error_code": ErrorCode.NONE,
            "group_id": group_id,
            "group_state": group.state.value,
            "protocol_type": group.protocol_type or "",
            "protocol_data": (group.protocol or "") if stable else "",
            "members": [
                {
                    "member_id": member.member_id,
                    "group_instance_id": member.instance_id,
                    "client_id": member.client_id,
                    "client_host": member.client_host,
                    "member_metadata": member.metadata(group.protocol) if stable else b"",
                    "member_assignment": member.assignment,
                }
                for member in group.members
            ],
        }

    def describe_consumers(self, group_id: str) -> MixedGroup | None:
        """A group of the consumer protocol, to be read only."""
        group = self.groups.get(group_id)
        return group if isinstance(group, MixedGroup) else None

    def listed(self) -> list[Mapping[str, Any]]:
        return [
            {
                "group_id": group.group_id,
                "protocol_type": (group.protocol_type or "") if isinstance(group, ClassicGroup) else CONSUMER,
                "group_state": group.state.value,
                "group_type": "classic" if isinstance(group, ClassicGroup) else "consumer",
            }
            for group in self.groups.values()
        ]


__all__ = ["Commit", "CommitResult", "Committer", "Group", "GroupShard", "LeaveResult"]
