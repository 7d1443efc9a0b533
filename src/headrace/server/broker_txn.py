"""The transaction coordinator of a broker: the runtime of `__transaction_state` among the broker's other parts.

Owns the runtime and the sender of markers. Invariant: producer ids, which may have to be fetched, are at hand before a
step begins, because a step does not wait. Handlers call it; the broker tells it of every new image.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from headrace.base.errors import ErrorCode, KafkaError
from headrace.cluster.image import ClusterImage
from headrace.cluster.names import TRANSACTION_STATE_TOPIC
from headrace.coordinators.effects import Effects
from headrace.coordinators.group_hash import partition_for
from headrace.coordinators.runtime import CoordinatorRuntime, Shard
from headrace.coordinators.txn_metadata import VERSION_2, Partition, TransactionMetadata
from headrace.coordinators.txn_records import NO_PRODUCER_ID
from headrace.coordinators.txn_shard import Ended, Markers, TransactionShard
from headrace.server.broker_coordinators import BrokerWorld, Later, ask
from headrace.server.broker_markers import MarkerSender, Results

if TYPE_CHECKING:
    from headrace.server.broker import Broker

WRITE_TIMEOUT_MS: Final = 30_000
"""How long a step waits for its record to be committed before the client is told to try again."""

Verified = dict[Partition, ErrorCode]


class TransactionCoordinator:
    """What handlers ask of transactions. Each call raises KafkaError while the id's shard cannot answer."""

    def __init__(self, broker: "Broker") -> None:
        self._broker = broker
        world = BrokerWorld(broker, TRANSACTION_STATE_TOPIC, lambda config: WRITE_TIMEOUT_MS)
        self._sender = MarkerSender(broker, self._marked)
        self._runtime: CoordinatorRuntime[TransactionShard] = CoordinatorRuntime(
            world, lambda: TransactionShard(lambda: broker.config, self._send)
        )

    def apply(self, image: ClusterImage) -> None:
        """Follow who leads the internal topic."""
        self._runtime.follow(image.topics.get(TRANSACTION_STATE_TOPIC), self._broker.node_id)

    def stop(self) -> None:
        self._runtime.close()

    def _shard(self, transactional_id: str) -> Shard[TransactionShard]:
        return self._runtime.shard(self._index(transactional_id))

    def _index(self, transactional_id: str) -> int:
        count = self._runtime.partition_count
        if not count:
            raise KafkaError(ErrorCode.COORDINATOR_NOT_AVAILABLE)
        return partition_for(transactional_id, count)

    # -- markers -------------------------------------------------------------------------------------------------------

    def _send(self, markers: Markers) -> None:
        try:
            epoch = self._runtime.held(self._index(markers.transactional_id)).epoch
        except KafkaError:
            return  # another coordinates it by now, and sends them
        self._sender.send(markers, epoch)

    def _marked(self, markers: Markers, results: Results) -> None:
        try:
            shard = self._runtime.held(self._index(markers.transactional_id))
        except KafkaError:
            return

        def step(machine: TransactionShard, now_ms: int, out: Effects) -> None:
            machine.marked(markers.transactional_id, markers.marking, results, now_ms, out)

        shard.run(step)

    # -- what producers ask --------------------------------------------------------------------------------------------

    async def _new_producer_id(self, transactional_id: str, may_be_new: bool) -> int:
        if not self._shard(transactional_id).machine.needs_producer_id(transactional_id, may_be_new):
            return NO_PRODUCER_ID
        return await self.new_producer_id()

    async def new_producer_id(self) -> int:
        """An id that nobody had before. While there is no controller to ask for more, clients are to come back."""
        try:
            return await self._broker.producer_ids.next()
        except KafkaError as error:
            raise KafkaError(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, error.message) from None

    async def initialize(
        self, transactional_id: str, timeout_ms: int, expected: tuple[int, int] | None
    ) -> Ended:
        new_id = await self._new_producer_id(transactional_id, may_be_new=True)

        def step(machine: TransactionShard, now_ms: int, out: Effects, done: Callable[[Ended], None]) -> None:
            machine.initialize(transactional_id, timeout_ms, expected, new_id, done, now_ms, out)

        answer = ask(self._shard(transactional_id), step)
        return answer if isinstance(answer, Ended) else await answer

    def when_added(
        self,
        transactional_id: str,
        producer: tuple[int, int],
        partitions: Iterable[Partition],
        client_version: int,
        done: Callable[[ErrorCode], None],
    ) -> None:
        """Make partitions part of a transaction, when the one before is over; told when that is stored."""

        def step(machine: TransactionShard, now_ms: int, out: Effects) -> None:
            machine.add_partitions(
                transactional_id, *producer, partitions, client_version, done, now_ms, out, waits=True
            )

        self._shard(transactional_id).run(step)

    def when_verified(
        self,
        transactional_id: str,
        producer: tuple[int, int],
        partitions: Iterable[Partition],
        done: Callable[[Verified], None],
    ) -> None:
        """Whether partitions are part of a transaction; told at once, as a rule."""

        def step(machine: TransactionShard, now_ms: int, out: Effects) -> None:
            machine.verify_partitions(transactional_id, *producer, partitions, done, out)

        self._shard(transactional_id).run(step)

    def add_partitions(
        self,
        transactional_id: str,
        producer: tuple[int, int],
        partitions: Iterable[Partition],
        client_version: int,
        waits: bool,
    ) -> Later[ErrorCode]:
        """As `when_added`; `waits` says whether for the transaction before to be over."""

        def step(
            machine: TransactionShard, now_ms: int, out: Effects, done: Callable[[ErrorCode], None]
        ) -> None:
            machine.add_partitions(
                transactional_id, *producer, partitions, client_version, done, now_ms, out, waits=waits
            )

        return ask(self._shard(transactional_id), step)

    def verify_partitions(
        self, transactional_id: str, producer: tuple[int, int], partitions: Iterable[Partition]
    ) -> Later[Verified]:
        def step(
            machine: TransactionShard, now_ms: int, out: Effects, done: Callable[[Verified], None]
        ) -> None:
            machine.verify_partitions(transactional_id, *producer, partitions, done, out)

        return ask(self._shard(transactional_id), step)

    async def end(
        self, transactional_id: str, producer: tuple[int, int], committed: bool, client_version: int
    ) -> Ended:
        new_id = NO_PRODUCER_ID
        if client_version >= VERSION_2:
            new_id = await self._new_producer_id(transactional_id, may_be_new=False)

        def step(machine: TransactionShard, now_ms: int, out: Effects, done: Callable[[Ended], None]) -> None:
            machine.end(transactional_id, *producer, committed, client_version, new_id, done, now_ms, out)

        answer = ask(self._shard(transactional_id), step)
        return answer if isinstance(answer, Ended) else await answer

    # -- admin ---------------------------------------------------------------------------------------------------------

    def describe(self, transactional_id: str) -> TransactionMetadata | None:
        return self._shard(transactional_id).machine.transactions.get(transactional_id)

    def listed(self) -> list[TransactionMetadata]:
        return [
            metadata for shard in self._runtime.active() for metadata in shard.machine.transactions.values()
        ]
