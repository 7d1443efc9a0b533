"""The group coordinator of a broker: the runtime of `__consumer_offsets` among the broker's other parts.

Owns the runtime and what it needs of the world. Invariant: a request gets its reply at once when the state machine
gives it in the same turn, as for heartbeats and, as a rule, commits; only what has to wait becomes a future.
Handlers call it; the broker tells it of every new image.
"""

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from headrace.base.errors import ErrorCode, KafkaError
from headrace.cluster.image import ClusterImage
from headrace.cluster.names import CONSUMER_OFFSETS_TOPIC
from headrace.coordinators.consumer_group import ConsumerGroup, HeartbeatRequest
from headrace.coordinators.effects import Body, Effects, Then, Ticket
from headrace.coordinators.group_hash import partition_for
from headrace.coordinators.group_shard import Commit, CommitResult, Committer, GroupShard, LeaveResult
from headrace.coordinators.membership import JoinRequest
from headrace.coordinators.records import OffsetValue
from headrace.coordinators.runtime import CoordinatorRuntime, Shard
from headrace.server.broker_coordinators import BrokerWorld, Later, ask
from headrace.storage.markers import EndTransactionMarker

if TYPE_CHECKING:
    from headrace.server.broker import Broker


class GroupCoordinator:
    """What handlers ask of groups. Each call raises KafkaError while the group's shard cannot answer."""

    def __init__(self, broker: "Broker") -> None:
        self._broker = broker
        world = BrokerWorld(
            broker,
            CONSUMER_OFFSETS_TOPIC,
            lambda config: config.offsets_commit_timeout_ms,
            lambda config: config.offsets_topic_compression_codec,
        )
        self._runtime: CoordinatorRuntime[GroupShard] = CoordinatorRuntime(
            world, lambda: GroupShard(lambda: broker.config, new_member_id, lambda: broker.image)
        )

    # -- following the image -------------------------------------------------------------------------------------------

    def apply(self, old: ClusterImage, new: ClusterImage) -> None:
        """Follow who leads the internal topic, and forget what was committed for topics that are gone."""
        self._runtime.follow(new.topics.get(CONSUMER_OFFSETS_TOPIC), self._broker.node_id)
        gone = {
            name
            for name, before in old.topics.items()
            if name not in new.topics or new.topics[name].id != before.id
        }
        if gone:
            for index in range(self._runtime.partition_count):
                self._forget(index, gone)

    def _forget(self, index: int, gone: set[str]) -> None:
        try:
            shard = self._runtime.held(index)
        except KafkaError:
            return  # led elsewhere; or its offsets stay until they expire, and who asks is told of no such topic
        shard.run(lambda machine, now_ms, out: machine.forget_topics(gone, out))

    def stop(self) -> None:
        self._runtime.close()

    def _shard(self, group_id: str) -> Shard[GroupShard]:
        return self._runtime.shard(self._index(group_id))

    def _index(self, group_id: str) -> int:
        count = self._runtime.partition_count
        if not count:
            raise KafkaError(ErrorCode.COORDINATOR_NOT_AVAILABLE)
        return partition_for(group_id, count)

    # -- members -------------------------------------------------------------------------------------------------------

    def join(self, group_id: str, request: JoinRequest) -> Later[Body]:
        def step(machine: GroupShard, now_ms: int, out: Effects, ticket: Ticket) -> None:
            machine.join(group_id, request, ticket, now_ms, out)

        return ask(self._shard(group_id), step)

    def sync(
        self,
        group_id: str,
        member_id: str,
        instance_id: str | None,
        generation: int,
        protocol_type: str | None,
        protocol: str | None,
        assignments: Sequence[tuple[str, bytes]],
    ) -> Later[Body]:
        def step(machine: GroupShard, now_ms: int, out: Effects, ticket: Ticket) -> None:
            machine.sync(
                group_id,
                member_id,
                instance_id,
                generation,
                protocol_type,
                protocol,
                assignments,
                ticket,
                now_ms,
                out,
            )

        return ask(self._shard(group_id), step)

    def heartbeat(self, group_id: str, member_id: str, instance_id: str | None, generation: int) -> ErrorCode:
        told = ErrorCode.NONE

        def step(machine: GroupShard, now_ms: int, out: Effects) -> None:
            nonlocal told
            told = machine.heartbeat(group_id, member_id, instance_id, generation, out)

        self._shard(group_id).run(step)
        return told

    def watch(self, group_id: str, member_id: str, ticket: Ticket) -> int:
        """Have a member told at once when it has to join again; for how long at most, in milliseconds; 0 if not."""
        return self._shard(group_id).machine.watch(group_id, member_id, ticket)

    def leave(self, group_id: str, leaving: Sequence[tuple[str, str | None]]) -> Later[LeaveResult]:
        def step(machine: GroupShard, now_ms: int, out: Effects, done: Callable[[LeaveResult], None]) -> None:
            machine.leave(group_id, leaving, done, now_ms, out)

        return ask(self._shard(group_id), step)

    def consumer_heartbeat(self, group_id: str, request: HeartbeatRequest) -> Later[Body]:
        def step(machine: GroupShard, now_ms: int, out: Effects, ticket: Ticket) -> None:
            machine.consumer_heartbeat(group_id, request, ticket, now_ms, out)

        return ask(self._shard(group_id), step)

    def watch_consumer(self, group_id: str, member_id: str, ticket: Ticket) -> int:
        """Have a member told at once when there is something for it; for how long at most, in ms; 0 if not."""
        return self._shard(group_id).machine.watch_consumer(group_id, member_id, ticket)

    def unwatch_consumer(self, group_id: str, member_id: str) -> None:
        with contextlib.suppress(KafkaError):  # whoever watched a shard that is gone was told
            self._runtime.held(self._index(group_id)).machine.unwatch_consumer(group_id, member_id)

    # -- offsets -------------------------------------------------------------------------------------------------------

    def commit_then(
        self,
        who: Committer,
        commits: Sequence[tuple[str, int, int, int, str]],
        done: Callable[[CommitResult], None],
    ) -> None:
        """Commit, and be told how it went; without a future, because commits are many."""
        shard = self._shard(who.group_id)
        out = Effects()
        shard.machine.commit(who, commits, done, self._broker.clock.now_ms(), out)
        shard.carry_out(out)

    def commit_one(
        self, who: Committer, topic: str, index: int, offset: int, leader_epoch: int, then: Then
    ) -> ErrorCode:
        """Commit an offset without metadata; `then` is told when it is stored. Why it is refused, if it is."""
        shard = self._shard(who.group_id)
        now_ms = self._broker.clock.now_ms()
        out = Effects()
        error = shard.machine.commit_one(who, topic, index, offset, leader_epoch, then, now_ms, out)
        shard.carry_out(out)
        return error

    def commit(self, who: Committer, commits: Sequence[Commit]) -> Later[CommitResult]:
        def step(
            machine: GroupShard, now_ms: int, out: Effects, done: Callable[[CommitResult], None]
        ) -> None:
            machine.commit(who, commits, done, now_ms, out)

        return ask(self._shard(who.group_id), step)

    def check_reader(self, group_id: str, member_id: str | None, epoch: int) -> ErrorCode:
        return self._shard(group_id).machine.check_reader(group_id, member_id, epoch)

    def offset(self, group_id: str, topic: str, partition: int) -> OffsetValue | None:
        return self._shard(group_id).machine.offsets.get(group_id, topic, partition)

    def offsets(self, group_id: str) -> dict[tuple[str, int], OffsetValue]:
        return self._shard(group_id).machine.offsets.of(group_id)

    def is_pending(self, group_id: str, topic: str, partition: int) -> bool:
        """Whether an open transaction may change an offset."""
        return self._shard(group_id).machine.pending.is_pending(group_id, topic, partition)

    def append_marker(
        self,
        index: int,
        batch: bytes,
        producer_id: int,
        marker: EndTransactionMarker,
        done: Callable[[ErrorCode], None],
    ) -> None:
        """End a producer's transaction in one partition of the internal topic."""
        self._runtime.held(index).append_marker(batch, producer_id, marker, done)

    def delete_offsets(
        self, group_id: str, partitions: Sequence[tuple[str, int]]
    ) -> Later[tuple[ErrorCode, CommitResult]]:
        def step(
            machine: GroupShard,
            now_ms: int,
            out: Effects,
            done: Callable[[tuple[ErrorCode, CommitResult]], None],
        ) -> None:
            machine.delete_offsets(group_id, partitions, lambda error, results: done((error, results)), out)

        return ask(self._shard(group_id), step)

    # -- admin ---------------------------------------------------------------------------------------------------------

    def delete_group(self, group_id: str) -> Later[ErrorCode]:
        def step(machine: GroupShard, now_ms: int, out: Effects, done: Callable[[ErrorCode], None]) -> None:
            machine.delete_group(group_id, done, out)

        return ask(self._shard(group_id), step)

    def describe(self, group_id: str) -> dict[str, Any] | None:
        return self._shard(group_id).machine.describe(group_id)

    def describe_consumers(self, group_id: str) -> ConsumerGroup | None:
        return self._shard(group_id).machine.describe_consumers(group_id)

    def listed(self) -> list[Any]:
        return [group for shard in self._runtime.active() for group in shard.machine.listed()]


def new_member_id() -> str:
    """A random UUID, as Kafka puts behind the client's name to make a member id."""
    digits = os.urandom(16).hex()
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{digits[16:20]}-{digits[20:]}"
