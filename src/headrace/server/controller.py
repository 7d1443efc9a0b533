"""The active controller of the cluster, while this node is it: what brokers ask, what it sees, what follows.

Owns the pure `BrokerControl` and the timer. Invariants: a decision is made on the newest image and its records are
proposed in the same turn of the loop; a broker is answered when they are committed; a node that is not the active
controller decides nothing and says who may be. Owned by the process; its handlers are in the router's tables.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from headrace.base.clock import Clock, Timer
from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.log import get_logger
from headrace.base.settings import BrokerConfig, topic_config
from headrace.cluster.balance import Balancer
from headrace.cluster.broker_control import BrokerControl
from headrace.cluster.control_messages import (
    HeartbeatReply,
    HeartbeatRequest,
    LoadsReply,
    Malformed,
    RegisterReply,
    RegisterRequest,
    decode,
    encode,
)
from headrace.cluster.elections import elect_unclean, rebalance_leaders
from headrace.cluster.image import TOPIC_RESOURCE, ClusterImage
from headrace.cluster.partition_control import IsrAnswer, IsrProposal, alter_partitions
from headrace.cluster.records import ClusterRecord, MetadataRecord
from headrace.server.metadata import MetadataStore, no_controller
from headrace.server.peers import Lane, Peers
from headrace.server.session import Exchange
from headrace.wire import primitives

if TYPE_CHECKING:
    from headrace.server.broker import Broker

TICK_MS: Final = 100
REBALANCED_AT_ONCE_MAX: Final = 1_000
REPORTS_BETWEEN_MOVES: Final = 3
"""Of these heartbeats the last measures only what was after the move."""

T = TypeVar("T")
Answered: TypeAlias = Callable[[Sequence[ErrorCode] | None], None]
logger = get_logger(__name__)


class Controller:
    """See the module."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        metadata: MetadataStore,
        peers: Peers,
        config: Callable[[], BrokerConfig],
        cluster_id: Callable[[], str],
    ) -> None:
        """`cluster_id` is what the cluster is called if it has no id yet."""
        self._loop = loop
        self._clock = clock
        self._metadata = metadata
        self._peers = peers
        self._config = config
        self._cluster_id = cluster_id
        self.brokers = BrokerControl(lambda: config().broker_session_timeout_ms, self._is_unclean)
        self._to_vote_again: set[int] = set()
        """Voters that came with a new directory, and are to vote again when they have the log."""
        self._timer: Timer | None = None
        self._balancer = Balancer()
        self._balance_ms = 0.0
        self._moved_ms = 0.0

    def _is_unclean(self, topic: str) -> bool:
        overrides = self._metadata.pending.config(TOPIC_RESOURCE, topic)
        return topic_config(overrides, self._config()).unclean_leader_election_enable

    # -- being active --------------------------------------------------------------------------------------------------

    def active(self, active: bool) -> None:
        """This node begins or ceases to be the active controller."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        logger.info(
            "active controller" if active else "controller no more",
            extra={"fields": {"term": self._metadata.quorum.term}},
        )
        if not active:
            return
        now_ms = self._clock.monotonic_ms()
        self._balance_ms = self._moved_ms = now_ms
        self._balancer = Balancer()
        self._to_vote_again.clear()
        self.brokers.begin(self._metadata.pending, now_ms, self._metadata.quorum.leader_before())
        if not self._metadata.pending.cluster_id:
            self._propose([ClusterRecord(self._cluster_id())])
        self._reach_brokers()
        self._tick()

    def changed(self, old: ClusterImage, new: ClusterImage) -> None:
        """The image moved on."""
        if old.brokers is not new.brokers and self._metadata.quorum.votes:
            self._reach_brokers()  # by every node that may come to lead: links that are up save time when it does
        if not self._metadata.is_active:
            return
        if old.configs is not new.configs:
            pending = self._metadata.pending
            self._propose(elect_unclean(pending, pending.topics.values(), self._is_unclean))

    def _reach_brokers(self) -> None:
        """Send every broker the log, and hold a link to it: its end tells more, and sooner, than silence."""
        others = [each for each in self._metadata.pending.brokers if each != self._peers.node_id]
        self._metadata.quorum.follow(others)
        for node_id in others:
            self._peers.link(node_id, Lane.RAFT)

    def gone(self, node_id: int) -> None:
        """No process listens at a node's address."""
        if self._metadata.is_active:
            records = self.brokers.gone(self._metadata.pending, node_id)
            if records:
                logger.warning("a broker is gone", extra={"fields": {"broker": node_id}})
                self._propose(records)

    def _tick(self) -> None:
        now_ms = self._clock.monotonic_ms()
        self._timer = self._loop.call_later(TICK_MS / 1000, self._tick)
        if records := self.brokers.tick(self._metadata.pending, now_ms):
            logger.warning("a broker's session is over")
            self._propose(records)
        self._balance_load(now_ms)
        self._give_votes_back()
        config = self._config()
        interval_ms = config.leader_imbalance_check_interval_seconds * 1000
        if config.auto_leader_rebalance_enable and now_ms - self._balance_ms >= interval_ms:
            self._balance_ms = now_ms
            self._propose(
                rebalance_leaders(
                    self._metadata.pending,
                    config.leader_imbalance_per_broker_percentage,
                    REBALANCED_AT_ONCE_MAX,
                )[0]
            )

    def _balance_load(self, now_ms: float) -> None:
        config, pending = self._config(), self._metadata.pending
        wait_ms = max(
            config.balancer_interval_ms, REPORTS_BETWEEN_MOVES * config.broker_heartbeat_interval_ms
        )
        if not config.balancer_enable or now_ms - self._moved_ms < wait_ms:
            return
        self._moved_ms = now_ms
        move = self._balancer.look(
            pending,
            self.brokers.loads(pending),
            config.balancer_tolerance_percentage / 100,
            [int(each) for each in config.balancer_excluded_brokers],
        )
        if move is not None:
            logger.warning("balancer moves", extra={"fields": {"why": move.why}})
            self._propose(move.records)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _propose(self, records: Sequence[MetadataRecord]) -> None:
        """Commit what nobody waits for."""
        self._metadata.commit(records).add_done_callback(_note)

    # -- what brokers ask ----------------------------------------------------------------------------------------------

    def handle_register(self, broker: "Broker", exchange: Exchange, frame: memoryview, body: int) -> None:
        """A process wants to be a broker."""
        self.register(_decoded(RegisterRequest, frame, body), lambda reply: exchange.reply(encode(reply)))

    def handle_heartbeat(self, broker: "Broker", exchange: Exchange, frame: memoryview, body: int) -> None:
        """A broker is there."""
        self.heartbeat(_decoded(HeartbeatRequest, frame, body), lambda reply: exchange.reply(encode(reply)))

    def handle_loads(self, broker: "Broker", exchange: Exchange, frame: memoryview, body: int) -> None:
        """Somebody wants to see what brokers have to do."""
        if not self._metadata.is_active:
            exchange.reply(encode(LoadsReply(ErrorCode.NOT_CONTROLLER, self._leader())))
            return
        told = self.brokers.loads(self._metadata.pending)
        loads = {node_id: load for node_id, load in told.items() if load is not None}
        exchange.reply(encode(LoadsReply(ErrorCode.NONE, self._peers.node_id, loads)))

    def register(self, request: RegisterRequest, answer: Callable[[RegisterReply], None]) -> None:
        """Register a broker; `answer` is called when that is committed, or with why it is not done here."""
        metadata = self._metadata
        mine = metadata.image.cluster_id
        if mine and request.cluster_id and mine != request.cluster_id:
            # Told by any node, so that a directory of another cluster is refused also while there is no controller.
            words = f"its data directory belongs to cluster {request.cluster_id}, this is {mine}"
            answer(RegisterReply(ErrorCode.INCONSISTENT_CLUSTER_ID, words))
            return
        if not metadata.is_active:
            answer(RegisterReply(ErrorCode.NOT_CONTROLLER, leader=self._leader()))
            return
        now_ms = self._clock.monotonic_ms()
        if self._lost_its_disk(request):
            refused = self.brokers.refusal(metadata.pending, request, now_ms, also_in_place=True)
            if refused is None:
                self._take_vote(request.node_id)
                refused = RegisterReply(
                    ErrorCode.NOT_CONTROLLER, leader=self._leader()
                )  # until that is committed
            answer(refused)
            return
        records, reply = self.brokers.register(metadata.pending, request, metadata.end_offset, now_ms)

        def done(error: KafkaError | None) -> None:
            told = reply
            if error is not None:
                told = RegisterReply(ErrorCode.NOT_CONTROLLER, error.message, self._leader())
            elif reply.error == ErrorCode.NONE:
                cluster_id = metadata.image.cluster_id
                told = RegisterReply(0, "", -1, reply.epoch, metadata.applied_offset, cluster_id)
            answer(told)

        self._commit(records, done)

    def _lost_its_disk(self, request: RegisterRequest) -> bool:
        """Whether a voter lost its disk and votes still.

        A node that was here before and has a new directory does not know what it voted and acknowledged. It is to be a
        voter no more, to follow the log as any other broker does, and to vote again when it has all of it.
        """
        node_id, before = request.node_id, self._metadata.pending.brokers.get(request.node_id)
        if request.cluster_id or before is None or before.incarnation == request.incarnation:
            return False
        return node_id in self._metadata.quorum.voters and node_id != self._peers.node_id

    def _take_vote(self, node_id: int) -> None:
        """Begin to take a vote, unless the cluster could not go on without it: then it is asked for again."""
        quorum = self._metadata.quorum
        try:
            if not quorum.can_spare(node_id):
                raise KafkaError(ErrorCode.NOT_ENOUGH_REPLICAS, "no majority of the other voters is there")
            quorum.remove_voter(node_id).add_done_callback(_note)
        except KafkaError as error:
            logger.info("a vote cannot be taken yet", extra={"fields": {"node": node_id, "why": str(error)}})
            return
        self._to_vote_again.add(node_id)
        logger.warning(
            "a voter has lost its data directory: it votes again when it has the metadata log",
            extra={"fields": {"node": node_id}},
        )

    def _give_votes_back(self) -> None:
        quorum, image = self._metadata.quorum, self._metadata.image
        for node_id in list(self._to_vote_again):
            broker = image.brokers.get(node_id)
            if node_id in quorum.voters or broker is None or broker.fenced:
                continue
            try:
                quorum.add_voter(node_id, f"{broker.host}:{broker.port}").add_done_callback(_note)
            except KafkaError:
                continue  # it has not all of the log yet, or another change is under way
            self._to_vote_again.discard(node_id)

    def heartbeat(self, request: HeartbeatRequest, answer: Callable[[HeartbeatReply], None]) -> None:
        """Hear a broker; `answer` is called when what follows from that is committed."""
        metadata = self._metadata
        if not metadata.is_active:
            answer(HeartbeatReply(ErrorCode.NOT_CONTROLLER, leader=self._leader()))
            return
        records, reply = self.brokers.heartbeat(
            metadata.pending, request, metadata.end_offset, self._clock.monotonic_ms()
        )

        def done(error: KafkaError | None) -> None:
            told = reply
            if error is not None:
                told = HeartbeatReply(ErrorCode.NOT_CONTROLLER, error.message, self._leader())
            elif reply.error == ErrorCode.NONE:
                offset = metadata.applied_offset if records else reply.offset
                silence_ms = metadata.quorum.silence_ms
                told = HeartbeatReply(0, "", -1, reply.fenced, reply.may_stop, offset, silence_ms)
            answer(told)

        self._commit(records, done)

    def _commit(self, records: Sequence[MetadataRecord], done: Callable[[KafkaError | None], None]) -> None:
        if not records:
            done(None)
            return

        def committed(future: "asyncio.Future[None]") -> None:
            error = future.exception()
            assert error is None or isinstance(error, KafkaError)
            done(error)

        self._metadata.commit(records).add_done_callback(committed)

    def _leader(self) -> int:
        leader = self._metadata.quorum.leader
        return -1 if leader is None else leader

    async def alter_partitions(
        self, broker_id: int, broker_epoch: int, proposals: Sequence[IsrProposal]
    ) -> tuple[ErrorCode, list[IsrAnswer]]:
        """Decide on the ISRs that a leader proposes; the answers hold, and are in this node's image."""
        if not self._metadata.is_active:
            return ErrorCode.NOT_CONTROLLER, []
        records, error, answers = alter_partitions(
            self._metadata.pending, broker_id, broker_epoch, proposals, self._is_unclean
        )
        try:
            await self._metadata.commit(records)
        except KafkaError as failure:
            return failure.code, []
        return error, answers

    def propose_isrs(
        self, broker_id: int, broker_epoch: int, proposals: Sequence[IsrProposal], answered: Answered
    ) -> None:
        """As `alter_partitions`, for the leader that is this very node; `answered` is called later, never at once."""

        def done(task: "asyncio.Task[tuple[ErrorCode, list[IsrAnswer]]]") -> None:
            error, answers = task.result() if not task.cancelled() else (ErrorCode.NOT_CONTROLLER, [])
            answered([answer.error for answer in answers] if error is ErrorCode.NONE else None)

        work = self.alter_partitions(broker_id, broker_epoch, proposals)
        self._loop.create_task(work).add_done_callback(done)

    def unregister(self, node_id: int) -> tuple[list[MetadataRecord], ErrorCode]:
        """The records that forget a broker for good. KafkaError when this node may not decide it."""
        if not self._metadata.is_active:
            raise no_controller(self._metadata.quorum.leader)
        return self.brokers.unregister(self._metadata.pending, node_id)


def _note(future: "asyncio.Future[None]") -> None:
    error = future.exception()
    if error is not None:
        logger.info("a change was not committed", extra={"fields": {"why": str(error)}})


def _decoded(kind: "type[T]", frame: memoryview, body: int) -> "T":
    try:
        return decode(kind, frame[body:])
    except Malformed as error:
        raise primitives.Malformed(str(error)) from None
