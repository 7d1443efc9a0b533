"""Consumer groups in a simulated cluster: members of either protocol, and what must hold of what they are told.

A group is in some seeds, of the classic or of the consumer protocol. Its members speak the real requests over the
simulated network: they look for the coordinator, join, heartbeat, read where the group is before they commit, commit
one higher each time, and start over when they are told to; now and then one leaves, or dies without a word and comes
back as another. `GroupOracle` holds, by what members are told alone:

- a partition has one owner in a generation or epoch;
- a partition is given to another only when its owner has given it up, or is out of the group;
- no commit is taken of a member whose partition another owned, in a later epoch, before that commit was sent;
- what a group has committed, by any acknowledgement, is never below that when somebody asks later.

Once faults stop, every member is at rest, and every partition is owned and its offset known. Made by the scenario.
"""

import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from headrace.base.errors import ErrorCode
from headrace.coordinators.consumer_records import decode_assignment, encode_assignment
from headrace.wire.apis import Api
from tests.sim.cluster_clients import SimClient
from tests.sim.kernel import MS
from tests.sim.raft_oracle import Violation

GROUP = "g"
SHARE = 0.15  # of the seeds have a group
FIND_VERSION, JOIN_VERSION, SYNC_VERSION, BEAT_VERSION, LEAVE_VERSION = 4, 5, 3, 3, 3
FETCH_VERSION, CLASSIC_COMMIT_VERSION, CONSUMER_COMMIT_VERSION, CONSUMER_BEAT_VERSION = 8, 8, 9, 1
REBALANCE_MS = 700
GAP = 40 * MS
GROUP_KEY = 0
MOVED = (ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE)
STRANGER = (
    ErrorCode.UNKNOWN_MEMBER_ID,
    ErrorCode.FENCED_MEMBER_EPOCH,
    ErrorCode.GROUP_ID_NOT_FOUND,
)


class GroupOracle:
    """What members were told, held against each other."""

    def __init__(self) -> None:
        self.owners: dict[tuple[int, int], str] = {}
        """Members by epoch and partition."""
        self.newest: dict[int, tuple[int, int, str]] = {}
        """Of each partition the latest epoch in which it is known to be owned, since when, and by whom."""
        self.committed: dict[int, int] = {}
        self.acknowledged = 0

    def owns(self, member: str, epoch: int, partitions: set[int], now: int) -> None:
        for partition in partitions:
            other = self.owners.setdefault((epoch, partition), member)
            if other != member:
                raise Violation(f"{other} and {member} both own partition {partition} in epoch {epoch}")
            if epoch > self.newest.get(partition, (-1, 0, ""))[0]:
                self.newest[partition] = (epoch, now, member)

    def heard(self, member: str, epoch: int, partitions: set[int], sent: int) -> None:
        """The coordinator took a member that believed to own these, and had not given them up, for one of an epoch."""
        for partition in partitions:
            later, since, owner = self.newest.get(partition, (-1, 0, ""))
            if later > epoch and since <= sent and owner != member:
                raise Violation(
                    f"{member} is in epoch {epoch} and was not asked for partition {partition} yet, and {owner} "
                    f"owned it in epoch {later} before"
                )

    def commit_taken(self, member: str, epoch: int, partition: int, offset: int, sent: int) -> None:
        later, since, owner = self.newest.get(partition, (-1, 0, ""))
        if later > epoch and since <= sent and owner != member:
            raise Violation(
                f"a commit of {member} in epoch {epoch} was taken, and {owner} owned partition {partition} in "
                f"epoch {later} before it was sent"
            )
        self.committed[partition] = max(offset, self.committed.get(partition, -1))
        self.acknowledged += 1

    def offset_told(self, partition: int, offset: int, least: int) -> None:
        if offset < least:
            raise Violation(f"the group is at {offset} of partition {partition}, and {least} was committed")


class SimMember(SimClient):
    """One consumer of the group; what it believes to own, and in which epoch."""

    def __init__(self, *args: Any, group: GroupOracle, topic: str, partitions: int) -> None:
        super().__init__(*args)
        self.group = group
        self.topic = topic
        self.partitions = partitions
        self.life = 0
        self.member_id, self.epoch = "", -1
        self.owned: set[int] = set()
        self.at: dict[int, int] = {}
        """The group's offset in what it owns, as far as it has asked."""
        self.in_group = False
        self._coordinator: int | None = None
        self._acted = 0
        self._stalled_until = 0
        self.begin()

    def begin(self) -> None:
        """A process that knows nothing."""
        self.life += 1
        self.member_id, self.epoch = "", -1
        self._lose()
        self._soon()

    def end(self, leaving: bool) -> None:
        """It is gone, and said so or not; another one comes in its place."""
        if leaving and self.in_group and self._coordinator is not None:
            self.leave(self._coordinator)
        self.begin()

    def stall(self, duration: int) -> None:
        """Do nothing for a while, and then go on with what was next: to commit, if it owns anything."""
        self._stalled_until = self.kernel.now + duration

    def leave(self, coordinator: int) -> None:
        raise NotImplementedError

    @property
    def at_rest(self) -> bool:
        return self.in_group and self.at.keys() == self.owned

    def _lose(self) -> None:
        self.owned, self.in_group = set(), False
        self.at.clear()

    def _own(self, partitions: set[int]) -> None:
        self.group.owns(self.member_id, self.epoch, partitions, self.kernel.now)
        if self.kernel.tracing and partitions != self.owned:
            self.kernel.trace(f"member {self.member_id}: owns {sorted(partitions)} in epoch {self.epoch}")
        self.owned = partitions
        self.at = {each: offset for each, offset in self.at.items() if each in partitions}

    def _soon(self) -> None:
        self.kernel.after(GAP // 2 + self.random.randrange(GAP), self._step, self.life)

    def _step(self, life: int) -> None:
        if life != self.life:
            return
        if self.kernel.now < self._stalled_until:
            self.kernel.after(self._stalled_until - self.kernel.now, self._step, life)
            self._acted = 1
            return
        if self._coordinator is None:
            self._find()
            return
        self._acted += 1
        unknown = sorted(self.owned - self.at.keys())
        if not self.in_group or self._acted % 2 or not self.owned:
            self.beat()
        elif unknown:
            self._ask_offset(unknown[0])
        elif self.random.random() < 0.2:
            self._ask_offset(self.random.choice(sorted(self.owned)))
        else:
            self._commit(self.random.choice(sorted(self.owned)))

    def ask(
        self, api: Api, version: int, body: Mapping[str, Any], done: Callable[[Any], None], node: int | None
    ) -> None:
        """Ask; without an answer the coordinator is looked for again."""
        life = self.life

        def answered(reply: Any) -> None:
            if life != self.life:
                return
            if reply is None:
                self._coordinator = None
                self.at.clear()
                self.unanswered()
                self._soon()
            else:
                done(reply)

        assert node is not None
        self.request(node, api, version, body, answered)

    def unanswered(self) -> None:
        """It is not known what the coordinator heard."""

    def beat(self) -> None:
        """Say that it is there, or join."""
        raise NotImplementedError

    def refused(self, error: int) -> None:
        """An error of the group's, by which a member may learn that it is none."""
        if error in MOVED:
            self._coordinator = None
        elif error in STRANGER:
            self.member_id, self.epoch = "", -1
            self._lose()
        self._soon()

    def _find(self) -> None:
        def done(reply: Any) -> None:
            found = reply.coordinators[0]
            if found.error_code == ErrorCode.NONE:
                self._coordinator = found.node_id
            self._soon()

        body = {"key_type": GROUP_KEY, "coordinator_keys": [GROUP]}
        self.ask(Api.FIND_COORDINATOR, FIND_VERSION, body, done, self.any_node())

    def _ask_offset(self, partition: int) -> None:
        least = self.group.committed.get(partition, -1)

        def done(reply: Any) -> None:
            group = reply.groups[0]
            error = group.error_code or group.topics[0].partitions[0].error_code
            if error:
                self.refused(error)
                return
            offset = group.topics[0].partitions[0].committed_offset
            self.group.offset_told(partition, offset, least)
            if partition in self.owned:
                self.at[partition] = offset
            self._soon()

        topics = [{"name": self.topic, "partition_indexes": [partition]}]
        body = {"groups": [{"group_id": GROUP, "topics": topics}], "require_stable": True}
        self.ask(Api.OFFSET_FETCH, FETCH_VERSION, body, done, self._coordinator)

    def _commit(self, partition: int) -> None:
        member, epoch, offset, sent = self.member_id, self.epoch, self.at[partition] + 1, self.kernel.now

        def done(reply: Any) -> None:
            error = reply.topics[0].partitions[0].error_code
            if self.kernel.tracing:
                self.kernel.trace(f"member {member}: {offset} of {partition}: {ErrorCode(error).name}")
            if error:
                self.at.pop(partition, None)
                self.refused(error)
                return
            self.group.commit_taken(member, epoch, partition, offset, sent)
            if partition in self.at:
                self.at[partition] = offset
            self._soon()

        committed = {"partition_index": partition, "committed_offset": offset, "committed_metadata": ""}
        body = {
            "group_id": GROUP,
            "generation_id_or_member_epoch": epoch,
            "member_id": member,
            "topics": [{"name": self.topic, "partitions": [committed]}],
        }
        self.ask(Api.OFFSET_COMMIT, self.commit_version, body, done, self._coordinator)

    commit_version = CLASSIC_COMMIT_VERSION


class ClassicMember(SimMember):
    """Joins, syncs, and assigns when it leads; gives up everything before it joins again."""

    session_ms = 600

    def beat(self) -> None:
        if not self.in_group:
            self._join()
            return

        def done(reply: Any) -> None:
            if reply.error_code:
                self.refused(reply.error_code)
            else:
                self._soon()

        body = {"group_id": GROUP, "generation_id": self.epoch, "member_id": self.member_id}
        self.ask(Api.HEARTBEAT, BEAT_VERSION, body, done, self._coordinator)

    def refused(self, error: int) -> None:
        if error in (ErrorCode.REBALANCE_IN_PROGRESS, ErrorCode.ILLEGAL_GENERATION):
            self._lose()
        super().refused(error)

    def _join(self) -> None:
        self._lose()

        def done(reply: Any) -> None:
            if reply.error_code == ErrorCode.MEMBER_ID_REQUIRED:
                self.member_id = reply.member_id
                self._join()
            elif reply.error_code:
                self.refused(reply.error_code)
            else:
                self.member_id, self.epoch = reply.member_id, reply.generation_id
                leads = reply.leader == self.member_id
                self._sync(sorted([each.member_id for each in reply.members]) if leads else [])

        body = {
            "group_id": GROUP,
            "session_timeout_ms": self.session_ms,
            "rebalance_timeout_ms": REBALANCE_MS,
            "member_id": self.member_id,
            "protocol_type": "consumer",
            "protocols": [{"name": "range", "metadata": _subscription(self.topic)}],
        }
        self.ask(Api.JOIN_GROUP, JOIN_VERSION, body, done, self._coordinator)

    def _sync(self, members: list[str]) -> None:
        def done(reply: Any) -> None:
            if reply.error_code:
                self._lose()
                self.refused(reply.error_code)
                return
            topics = decode_assignment(reply.assignment)
            assert topics is not None
            self.in_group = True
            self._own(set(topics.get(self.topic, ())))
            self._soon()

        shares = {each: range(at, self.partitions, len(members)) for at, each in enumerate(members)}
        body = {
            "group_id": GROUP,
            "generation_id": self.epoch,
            "member_id": self.member_id,
            "assignments": [
                {"member_id": each, "assignment": encode_assignment(0, {self.topic: frozenset(share)})}
                for each, share in shares.items()
            ],
        }
        self.ask(Api.SYNC_GROUP, SYNC_VERSION, body, done, self._coordinator)

    def leave(self, coordinator: int) -> None:
        body = {"group_id": GROUP, "members": [{"member_id": self.member_id}]}
        self.request(coordinator, Api.LEAVE_GROUP, LEAVE_VERSION, body, lambda reply: None)


class ConsumerMember(SimMember):
    """Heartbeats, takes what it is given and gives up what it is told to, and says so."""

    commit_version = CONSUMER_COMMIT_VERSION

    def begin(self) -> None:
        self._says_all = True
        super().begin()

    @property
    def at_rest(self) -> bool:
        return super().at_rest and not self._says_all

    def unanswered(self) -> None:
        self._says_all = True

    def refused(self, error: int) -> None:
        self._says_all = True
        super().refused(error)

    def beat(self) -> None:
        if self.epoch < 0:
            self._lose()
            self.epoch, self._says_all = 0, True
            self.member_id = f"member-{self.id}-{self.life}"
        topic_id = self.topic_ids.get(self.topic)
        if topic_id is None:
            self.refresh(self.topic)
            self._soon()
            return
        body: dict[str, Any] = {
            "group_id": GROUP,
            "member_id": self.member_id,
            "member_epoch": self.epoch,
            "topic_partitions": None,
        }
        if self._says_all:
            body |= {"rebalance_timeout_ms": REBALANCE_MS, "subscribed_topic_names": [self.topic]}
            body["topic_partitions"] = (
                [{"topic_id": topic_id, "partitions": sorted(self.owned)}] if self.owned else []
            )
        self.ask(
            Api.CONSUMER_GROUP_HEARTBEAT,
            CONSUMER_BEAT_VERSION,
            body,
            partial(self._heard, self.kernel.now),
            self._coordinator,
        )

    def _heard(self, sent: int, reply: Any) -> None:
        if reply.error_code:
            self.refused(reply.error_code)
            return
        self.group.heard(self.member_id, reply.member_epoch, self.owned, sent)
        self.epoch, self.in_group, self._says_all = reply.member_epoch, True, False
        owned = self.owned
        if reply.assignment is not None:
            owned = {each for topic in reply.assignment.topic_partitions for each in topic.partitions}
            self._says_all = owned != self.owned
        self._own(owned)
        self._soon()

    def leave(self, coordinator: int) -> None:
        body = {"group_id": GROUP, "member_id": self.member_id, "member_epoch": -1, "topic_partitions": None}
        self.request(
            coordinator, Api.CONSUMER_GROUP_HEARTBEAT, CONSUMER_BEAT_VERSION, body, lambda reply: None
        )


class Groups:
    """The group of a seed, if it has one."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(f"groups {seed}")  # its own, so that other seeds stay what they were
        self.present = chance.random() < SHARE
        self._kind: type[SimMember] = chance.choice((ClassicMember, ConsumerMember))
        self._count = chance.choice((2, 3))
        self.oracle = GroupOracle()
        self.members: list[SimMember] = []
        self._partitions = 0

    def settings(self) -> dict[str, str]:
        """What brokers are told, so that groups live as fast as the rest."""
        return {
            "offsets.topic.num.partitions": "1",
            "group.initial.rebalance.delay.ms": "0",
            "group.min.session.timeout.ms": "100",
            "group.consumer.min.session.timeout.ms": "100",
            "group.consumer.session.timeout.ms": "600",
            "group.consumer.min.heartbeat.interval.ms": "50",
            "group.consumer.heartbeat.interval.ms": "100",
        }

    def join(self, common: tuple[Any, ...], nodes: list[int], topic: str, partitions: int) -> None:
        self._partitions = partitions
        for number in range(self._count):
            member = self._kind(
                *common, 150 + number, nodes, group=self.oracle, topic=topic, partitions=partitions
            )
            self.members.append(member)

    def trouble_one(self) -> None:
        """A member goes, perhaps without a word, and another comes; or it hangs, for longer than a session or not."""
        chance = self.members[0].random
        member = chance.choice(self.members)
        if chance.random() < 0.5:
            member.stall(chance.choice((150, 500, 1_500)) * MS)
        else:
            member.end(leaving=chance.random() < 0.5)

    def heal(self) -> None:
        """From now on everything has to come to rest, and to be asked for once more."""
        for member in self.members:
            member.stall(0)
            member.at.clear()

    def unwell(self) -> str:
        """Why the group is not at rest yet."""
        for member in self.members:
            if not member.at_rest:
                return f"member {member.id} ({member.member_id}) is not at rest in epoch {member.epoch}"
        owned = sorted([each for member in self.members for each in member.owned])
        if self.members and owned != list(range(self._partitions)):
            return f"of the group's partitions {owned} are owned"
        return ""


def _subscription(topic: str) -> bytes:
    """A consumer's metadata: version, topics, no user data."""
    return (
        b"\0\0"
        + (1).to_bytes(4, "big")
        + len(topic).to_bytes(2, "big")
        + topic.encode()
        + b"\xff\xff\xff\xff"
    )
