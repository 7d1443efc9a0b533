"""A group shard on a stage: the runtime's part played by a test, with a clock that moves when told to.

Stores records in a list (at once, or when the test says so, or not at all), keeps timers, collects replies by the
name of who asked. A restart throws the shard away and replays the list into a new one. Nothing waits: `advance`
runs every timer that is due on the way.
"""

from collections.abc import Callable
from itertools import count
from typing import Any

from headrace.base.errors import ErrorCode
from headrace.base.settings import broker_config
from headrace.cluster.image import EMPTY, apply
from headrace.cluster.records import (
    BrokerRecord,
    MetadataRecord,
    PartitionRecord,
    RemoveTopicRecord,
    TopicRecord,
)
from headrace.coordinators.consumer_group import HeartbeatRequest
from headrace.coordinators.effects import Body, Effects, Record, TimerKey, Write
from headrace.coordinators.group_shard import Commit, CommitResult, Committer, GroupShard
from headrace.coordinators.membership import JoinRequest

START_MS = 1_700_000_000_000


class Stage:
    """One shard and its world."""

    def __init__(self, **settings: object) -> None:
        self.settings = {"group.initial.rebalance.delay.ms": "0"}
        self.configure(**settings)
        self.now_ms = START_MS
        self.image = EMPTY
        self.log: list[Record] = []
        self.waiting: list[Write] = []
        self.holds_back = False
        self.fails: ErrorCode | None = None
        self.timers: dict[TimerKey, int] = {}
        self.replies: list[tuple[str, Body]] = []
        self._ids = count(1)
        self.shard = self._new_shard()
        self.run(self.shard.loaded)

    def configure(self, **settings: object) -> None:
        self.settings.update({name.replace("_", "."): str(value) for name, value in settings.items()})
        self._config = broker_config(self.settings)

    def _new_shard(self) -> GroupShard:
        return GroupShard(lambda: self._config, lambda: str(next(self._ids)), lambda: self.image)

    def topic(self, name: str, partitions: int, racks: str = "") -> None:
        """Make a topic, or give it more partitions; with racks, the rack of each partition's only replica."""
        records: list[MetadataRecord] = []
        before = self.image.topics.get(name)
        if before is None:
            records.append(TopicRecord(name, topic_id(name)))
        for index in range(0 if before is None else len(before.partitions), partitions):
            node = ord(racks[index % len(racks)]) if racks else 1
            records.append(BrokerRecord(node, "host", 9092, chr(node) if racks else None, 1))
            records.append(PartitionRecord(topic_id(name), index, (node,), (node,), node, 0, 0))
        self.image = apply(self.image, records)

    def delete_topic(self, name: str) -> None:
        self.image = apply(self.image, [RemoveTopicRecord(topic_id(name))])

    # -- the runtime's part --------------------------------------------------------------------------------------------

    def run(self, step: Callable[[int, Effects], None]) -> None:
        out = Effects()
        step(self.now_ms, out)
        for key, delay_ms in out.timers.items():
            self.timers.pop(key, None)
            if delay_ms is not None:
                self.timers[key] = self.now_ms + delay_ms
        for ticket, body in out.replies:
            ticket(body)
        for write in out.writes:
            if self.holds_back:
                self.waiting.append(write)
            else:
                self._store(write)

    def _store(self, write: Write) -> None:
        error = self.fails or ErrorCode.NONE
        if error is ErrorCode.NONE:
            self.log += write.records
            if write.replayed:
                for record in write.records:
                    self.shard.replay(*record)
        if write.then is not None:
            then = write.then
            self.run(lambda now_ms, out: then(error, now_ms, out))
        if error is not ErrorCode.NONE and write.ahead:
            self.run(lambda now_ms, out: self.shard.unload(ErrorCode.COORDINATOR_NOT_AVAILABLE, now_ms, out))
            self.restart()

    def release(self) -> None:
        """Commit what was held back, in order."""
        self.holds_back = False
        waiting, self.waiting = self.waiting, []
        for write in waiting:
            self._store(write)

    def advance(self, ms: int) -> None:
        end_ms = self.now_ms + ms
        while True:
            due = [(at, key) for key, at in self.timers.items() if at <= end_ms]
            if not due:
                break
            at, key = min(due)
            self.now_ms = max(at, self.now_ms)
            del self.timers[key]
            self.run(lambda now_ms, out, key=key: self.shard.on_timer(key, now_ms, out))
        self.now_ms = end_ms

    def restart(self) -> None:
        """A new coordinator reads what is stored; who waited for the old one hears nothing any more."""
        self.timers.clear()
        self.waiting.clear()
        self.shard = self._new_shard()
        for record in self.log:
            self.shard.replay(*record)
        self.run(self.shard.loaded)

    # -- what clients ask ----------------------------------------------------------------------------------------------

    def ticket(self, who: str) -> Callable[[Body], None]:
        return lambda body: self.replies.append((who, body))

    def join(self, who: str, group: str = "g", member: str = "", **given: Any) -> None:
        session_ms = given.get("session", 10_000)
        names = given.get("protocols", "range").split(",")
        request = JoinRequest(
            member,
            given.get("instance"),
            given.get("client", who),
            "/host",
            session_ms,
            given.get("rebalance", 20_000),
            given.get("type", "consumer"),
            tuple((name, given.get("metadata", subscription("t"))) for name in names if name),
            given.get("version", 4) >= 4,
            given.get("version", 4) >= 9,
        )
        self.run(lambda now_ms, out: self.shard.join(group, request, self.ticket(who), now_ms, out))

    def sync(
        self, who: str, member: str, generation: int, given: dict[str, bytes] | None = None, **more: Any
    ) -> None:
        self.run(
            lambda now_ms, out: self.shard.sync(
                more.get("group", "g"),
                member,
                more.get("instance"),
                generation,
                more.get("type"),
                more.get("protocol"),
                list((given or {}).items()),
                self.ticket(who),
                now_ms,
                out,
            )
        )

    def beat(self, who: str, member: str, epoch: int, group: str = "g", **given: Any) -> None:
        """A heartbeat of the consumer protocol. `topics` and `owns` are said where they are given."""
        owned = given.get("owns")
        request = HeartbeatRequest(
            member,
            epoch,
            given.get("instance"),
            given.get("rack"),
            given.get("rebalance", 20_000 if epoch == 0 else -1),
            given.get("topics"),
            given.get("regex"),
            given.get("assignor"),
            {topic_id(name): frozenset(found) for name, found in owned.items() if found}
            if owned is not None
            else ({} if epoch == 0 else None),
            given.get("client", who),
            "/host",
        )
        ticket = self.ticket(who)
        self.run(lambda now_ms, out: self.shard.consumer_heartbeat(group, request, ticket, now_ms, out))

    def heartbeat(
        self, member: str, generation: int, group: str = "g", instance: str | None = None
    ) -> ErrorCode:
        told: list[ErrorCode] = []
        self.run(
            lambda now_ms, out: told.append(self.shard.heartbeat(group, member, instance, generation, out))
        )
        return told[0]

    def watch(self, who: str, member: str, group: str = "g") -> int:
        """Be told when the member has to join again; for how long it may wait."""
        return self.shard.watch(group, member, self.ticket(who))

    def watch_consumer(self, who: str, member: str, group: str = "g") -> int:
        """Be told when the group has something for a member of the consumer protocol; for how long it may wait."""
        return self.shard.watch_consumer(group, member, self.ticket(who))

    def leave(self, *leaving: tuple[str, str | None], group: str = "g") -> list[ErrorCode]:
        told: list[ErrorCode] = []
        self.run(
            lambda now_ms, out: self.shard.leave(
                group, leaving, lambda results: told.extend(each[2] for each in results), now_ms, out
            )
        )
        return told

    def commit(self, offset: int, group: str = "g", **given: Any) -> list[CommitResult]:
        """The list fills when the commit is answered."""
        told: list[CommitResult] = []
        who = Committer(
            group,
            given.get("member", ""),
            given.get("instance"),
            given.get("generation", -1),
            given.get("retention", -1),
            given.get("version", 8),
            (given["producer"], 0) if "producer" in given else None,
        )
        commit = Commit(
            given.get("topic", "t"), given.get("partition", 0), offset, 0, given.get("metadata", "")
        )
        self.run(lambda now_ms, out: self.shard.commit(who, [commit], told.append, now_ms, out))
        return told

    def committed(self, topic: str = "t", partition: int = 0, group: str = "g") -> int:
        value = self.shard.offsets.get(group, topic, partition)
        return -1 if value is None else value.offset

    def delete(self, group: str = "g") -> list[ErrorCode]:
        told: list[ErrorCode] = []
        self.run(lambda now_ms, out: self.shard.delete_group(group, told.append, out))
        return told


def topic_id(name: str) -> bytes:
    return name.encode().ljust(16, b"\0")


def subscription(*topics: str) -> bytes:
    """A consumer's metadata: version, topics, no user data."""
    data = b"\0\0" + len(topics).to_bytes(4, "big")
    for topic in topics:
        data += len(topic).to_bytes(2, "big") + topic.encode()
    return data + b"\xff\xff\xff\xff"
