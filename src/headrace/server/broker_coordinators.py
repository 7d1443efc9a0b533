"""What the coordinators of a broker share: the broker as their runtimes see it, and how a handler asks a machine.

Invariant: a request gets its reply at once when the state machine gives it in the same turn, as for heartbeats; only
what has to wait becomes a future. The group coordinator and the transaction coordinator call it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from headrace.base.clock import Timer
from headrace.base.settings import BrokerConfig
from headrace.cluster.image import BrokerRegistration
from headrace.coordinators.effects import Effects
from headrace.coordinators.group_hash import partition_for
from headrace.coordinators.shard import M, Shard
from headrace.replication.partition import Partition

if TYPE_CHECKING:
    from headrace.server.broker import Broker

T = TypeVar("T")
Later: TypeAlias = T | Awaitable[T]


class BrokerWorld:
    """The broker, as the runtime of one internal topic sees it."""

    def __init__(
        self,
        broker: "Broker",
        topic: str,
        write_timeout_ms: Callable[[BrokerConfig], int],
        compression: Callable[[BrokerConfig], int] = lambda config: 0,
    ) -> None:
        self._broker = broker
        self._topic = topic
        self._write_timeout_ms = write_timeout_ms
        self._compression = compression

    def coordinator_partition(self, index: int) -> Partition:
        return self._broker.partition(self._topic, index)

    def is_cut_off(self, index: int) -> bool:
        partition = self._broker.replicas.table.find(self._topic, index)
        return partition is not None and partition.cut_off

    def check_writable(self, partition: Partition) -> None:
        partition.check_min_insync()

    def flush(self, partition: Partition) -> None:
        self._broker.flush(partition)

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._broker.call_soon(callback)

    def call_later(self, delay_ms: float, callback: Callable[[], None]) -> Timer:
        return self._broker.call_later(delay_ms, callback)

    def now_ms(self) -> int:
        return self._broker.clock.now_ms()

    def monotonic_ms(self) -> float:
        return self._broker.clock.monotonic_ms()

    def write_timeout_ms(self) -> int:
        return self._write_timeout_ms(self._broker.config)

    def compression(self) -> int:
        return self._compression(self._broker.config)


def coordinator_of(broker: "Broker", topic: str, key: str) -> BrokerRegistration | None:
    """Who leads the partition of an internal topic that holds this key; None when nobody does, or not yet."""
    found = broker.image.topics.get(topic)
    if found is None or not found.partitions:
        return None
    partition = found.partitions[partition_for(key, len(found.partitions))]
    return broker.image.brokers.get(partition.leader)


def ask(shard: Shard[M], step: Callable[[M, int, Effects, Callable[[T], None]], None]) -> Later[T]:
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
