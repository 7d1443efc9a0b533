"""The group coordinator of a broker: the runtime of `__consumer_offsets` among the broker's other parts.

Owns the runtime and what it needs of the world. Invariant: a request gets its reply at once when the state machine
gives it in the same turn, as for heartbeats and, as a rule, commits; only what has to wait becomes a future.
Handlers call it; the broker tells it of every new image.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from headrace.base.clock import Timer
from headrace.base.errors import ErrorCode, KafkaError
from headrace.cluster.image import ClusterImage
from headrace.cluster.names import CONSUMER_OFFSETS_TOPIC
from headrace.coordinators.effects import Body, Effects, Ticket
from headrace.coordinators.group_hash import partition_for
from headrace.coordinators.group_shard import Commit, CommitResult, Committer, GroupShard, LeaveResult
from headrace.coordinators.membership import JoinRequest
from headrace.coordinators.records import OffsetValue
from headrace.coordinators.runtime import CoordinatorRuntime, Shard
from headrace.replication.partition import Partition

if TYPE_CHECKING:
    from headrace.server.broker import Broker

T = TypeVar("T")
Later: TypeAlias = T | Awaitable[T]


class _World:
    """The broker, as the runtime sees it."""

    def __init__(self, broker: "Broker") -> None:
        self._broker = broker

    def coordinator_partition(self, index: int) -> Partition:
        return self._broker.partition(CONSUMER_OFFSETS_TOPIC, index)

    def flush(self, partition: Partition) -> None:
        self._broker.flush(partition)

    def call_later(self, delay_ms: float, callback: Callable[[], None]) -> Timer:
        return self._broker.call_later(delay_ms, callback)

    def now_ms(self) -> int:
        return self._broker.clock.now_ms()

    def monotonic_ms(self) -> float:
        return self._broker.clock.monotonic_ms()

    def write_timeout_ms(self) -> int:
        return self._broker.config.offsets_commit_timeout_ms

    def compression(self) -> int:
        return self._broker.config.offsets_topic_compression_codec


class GroupCoordinator:
    """What handlers ask of groups. Each call raises KafkaError while the group's shard cannot answer."""

    def __init__(self, broker: "Broker") -> None:
        self._broker = broker
        self._topic_id: bytes | None = None
        self._runtime: CoordinatorRuntime[GroupShard] = CoordinatorRuntime(
            _World(broker), lambda: GroupShard(lambda: broker.config, _new_id)
        )

    # -- following the image -------------------------------------------------------------------------------------------

    def apply(self, old: ClusterImage, new: ClusterImage) -> None:
        """Take up the internal topic when it is there, and forget what was committed for topics that are gone."""
        topic = new.topics.get(CONSUMER_OFFSETS_TOPIC)
        if self._topic_id is not None and (topic is None or topic.id != self._topic_id):
            self._runtime.close()
            self._topic_id = None
        if topic is not None:
            self._topic_id = topic.id
            self._runtime.open(len(topic.partitions))
        gone = {
            name
            for name, before in old.topics.items()
            if name not in new.topics or new.topics[name].id != before.id
        }
        if gone and self._topic_id is not None:
            for index in range(self._runtime.partition_count):
                self._forget(index, gone)

    def _forget(self, index: int, gone: set[str]) -> None:
        try:
            shard = self._runtime.shard(index)
        except KafkaError:
            return  # its offsets stay until they expire; a client that asks for them is told of no such topic
        shard.run(lambda machine, now_ms, out: machine.forget_topics(gone, out))

    def stop(self) -> None:
        self._runtime.close()

    def _shard(self, group_id: str) -> Shard[GroupShard]:
        count = self._runtime.partition_count
        if not count:
            raise KafkaError(ErrorCode.COORDINATOR_NOT_AVAILABLE)
        return self._runtime.shard(partition_for(group_id, count))

    # -- members -------------------------------------------------------------------------------------------------------

    def join(self, group_id: str, request: JoinRequest) -> Later[Body]:
        def step(machine: GroupShard, now_ms: int, out: Effects, ticket: Ticket) -> None:
            machine.join(group_id, request, ticket, now_ms, out)

        return _ask(self._shard(group_id), step)

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

        return _ask(self._shard(group_id), step)

    def heartbeat(self, group_id: str, member_id: str, instance_id: str | None, generation: int) -> ErrorCode:
        told = ErrorCode.NONE

        def step(machine: GroupShard, now_ms: int, out: Effects) -> None:
            nonlocal told
            told = machine.heartbeat(group_id, member_id, instance_id, generation, out)

        self._shard(group_id).run(step)
        return told

    def leave(self, group_id: str, leaving: Sequence[tuple[str, str | None]]) -> Later[LeaveResult]:
        def step(machine: GroupShard, now_ms: int, out: Effects, done: Callable[[LeaveResult], None]) -> None:
            machine.leave(group_id, leaving, done, now_ms, out)

        return _ask(self._shard(group_id), step)

    # -- offsets -------------------------------------------------------------------------------------------------------

    def commit(self, who: Committer, commits: Sequence[Commit]) -> Later[CommitResult]:
        def step(
            machine: GroupShard, now_ms: int, out: Effects, done: Callable[[CommitResult], None]
        ) -> None:
            machine.commit(who, commits, done, now_ms, out)

        return _ask(self._shard(who.group_id), step)

    def offset(self, group_id: str, topic: str, partition: int) -> OffsetValue | None:
        return self._shard(group_id).machine.offsets.get(group_id, topic, partition)

    def offsets(self, group_id: str) -> dict[tuple[str, int], OffsetValue]:
        return self._shard(group_id).machine.offsets.of(group_id)

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

        return _ask(self._shard(group_id), step)

    # -- admin ---------------------------------------------------------------------------------------------------------

    def delete_group(self, group_id: str) -> Later[ErrorCode]:
        def step(machine: GroupShard, now_ms: int, out: Effects, done: Callable[[ErrorCode], None]) -> None:
            machine.delete_group(group_id, done, out)

        return _ask(self._shard(group_id), step)

    def describe(self, group_id: str) -> dict[str, Any] | None:
        return self._shard(group_id).machine.describe(group_id)

    def listed(self) -> list[Any]:
        return [group for shard in self._runtime.active() for group in shard.machine.listed()]


def _new_id() -> str:
    """A random UUID, as Kafka puts behind the client's name to make a member id."""
    digits = os.urandom(16).hex()
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{digits[16:20]}-{digits[20:]}"


def _ask(
    shard: Shard[GroupShard], step: Callable[[GroupShard, int, Effects, Callable[[T], None]], None]
) -> Later[T]:
    """Run a step; its answer if it gave one in this turn, or a future of it."""
    answers: list[T] = []
    future: asyncio.Future[T] | None = None

    def answer(body: T) -> None:
        if future is None:
            answers.append(body)
        elif not future.done():
            future.set_result(body)

    shard.run(lambda machine, now_ms, out: step(machine, now_ms, out, answer))
    if answers:
        return answers[0]
    future = asyncio.get_running_loop().create_future()
    return future
