"""A broker as a member of its cluster: the parts by which it reaches the others, for handlers and for replication.

Owns nothing of its own; it puts together the links, the controller of this node, the way to the active one, and the
registration. Invariant: whatever is proposed carries the epoch that this very process is registered under. Made by the
process, given to the broker.
"""

from collections.abc import Sequence
from typing import Any

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.log import get_logger
from headrace.cluster.controller import NewTopic
from headrace.cluster.image import BrokerRegistration, ClusterImage
from headrace.cluster.partition_control import IsrProposal
from headrace.server.controller import Answered, Controller
from headrace.server.forwarding import Forwarding
from headrace.server.metadata import MetadataStore
from headrace.server.peers import Lane, Peers
from headrace.server.registration import Registration
from headrace.wire.apis import Api
from headrace.wire.messages import Message, decode_response, encode_request
from headrace.wire.primitives import Malformed

ALTER_PARTITION_VERSION = 3
ALTER_PARTITION_TIMEOUT_MS = 5_000
CREATE_TOPICS_VERSION = 7
LISTED_AFTER_FENCING_MS = 60_000.0
"""Longer than a broker needs to come back, with its logs recovered on a busy machine."""
VOTERS_AWAITED_MS = 60_000.0
"""Longer than the machines of a cluster are started apart, and as long as clients wait for what they ask for."""

logger = get_logger(__name__)


class Member:
    """See the module."""

    def __init__(
        self,
        metadata: MetadataStore,
        peers: Peers,
        controller: Controller,
        forwarding: Forwarding,
        registration: Registration,
    ) -> None:
        self.metadata = metadata
        self.peers = peers
        self.controller = controller
        self.forwarding = forwarding
        self.registration = registration
        self._fenced_ms: dict[int, float] = {}
        self._since_ms: float | None = None  # when brokers were first told of
        self._awaited_ms: float | None = None  # since when voters are waited for that were never brokers

    @property
    def leader(self) -> int | None:
        """The active controller, as far as this node knows."""
        return self.metadata.quorum.leader

    async def reserve_producer_ids(self) -> tuple[int, int]:
        """A block of producer ids for this broker: its first, and how many. KafkaError when none can be had now."""
        body = {"broker_id": self.peers.node_id, "broker_epoch": self.registration.epoch}
        reply = await self.forwarding.ask(Api.ALLOCATE_PRODUCER_IDS, 0, body)
        if reply.error_code != ErrorCode.NONE:
            raise KafkaError(ErrorCode(reply.error_code), "no producer ids could be reserved")
        return reply.producer_id_start, reply.producer_id_len

    async def create_topics(self, topics: Sequence[NewTopic]) -> dict[str, ErrorCode]:
        """Have topics made that this broker needs; what became of each. KafkaError when nobody could be asked."""
        wanted = [
            {
                "name": topic.name,
                "num_partitions": topic.num_partitions,
                "replication_factor": topic.replication_factor,
                "configs": [{"name": name, "value": value} for name, value in topic.configs],
            }
            for topic in topics
        ]
        reply = await self.forwarding.ask(Api.CREATE_TOPICS, CREATE_TOPICS_VERSION, {"topics": wanted})
        return {topic.name: ErrorCode(topic.error_code) for topic in reply.topics}

    # -- who is there --------------------------------------------------------------------------------------------------

    def changed(self, old: ClusterImage, new: ClusterImage, now_ms: float) -> None:
        """Note which brokers were fenced just now."""
        for broker in new.brokers.values():
            before = old.brokers.get(broker.id)
            if not broker.fenced:
                self._fenced_ms.pop(broker.id, None)
            elif before is not None and not before.fenced:
                self._fenced_ms[broker.id] = now_ms

    def listed(self, image: ClusterImage, now_ms: float) -> list[BrokerRegistration]:
        """The brokers that clients are told of: also those fenced a short while ago.

        librdkafka waits for ever for a coordinator that vanished from the list while it was connecting to it.
        """
        if self._since_ms is None:
            self._since_ms = now_ms
        fenced_ms, since_ms = (
            self._fenced_ms,
            self._since_ms,
        )  # since then, when it was so before this process began
        return [
            broker
            for broker in image.brokers.values()
            if not broker.fenced or now_ms - fenced_ms.get(broker.id, since_ms) < LISTED_AFTER_FENCING_MS
        ]

    def internal_replicas(self, image: ClusterImage, factor: int, now_ms: float) -> int | None:
        """How many replicas a topic of the cluster's own gets; None while brokers are waited for that should hold some.

        These topics are made once, for whoever comes first, and a cluster that is still starting must not be taken for
        a small one. To the cluster belong all brokers that have registered, fenced ones too, and all voters. Of a voter
        that does not register in time nobody knows whether it ever will; then the topic is made with those there are.
        """
        voters = self.metadata.quorum.voters
        wanted = min(factor, len({*image.brokers, *voters}))
        registered = len(image.brokers)
        if registered >= wanted:
            return wanted
        fields = {"brokers": registered, "wanted": wanted, "missing": sorted(voters.keys() - image.brokers)}
        if self._awaited_ms is None:
            self._awaited_ms = now_ms
            logger.warning("the cluster's own topics wait for brokers", extra={"fields": fields})
        if now_ms - self._awaited_ms < VOTERS_AWAITED_MS:
            return None
        logger.warning("the cluster's own topics wait no longer for brokers", extra={"fields": fields})
        return registered

    # -- in-sync replicas ----------------------------------------------------------------------------------------------

    def alter_partitions(self, proposals: Sequence[IsrProposal], answered: Answered) -> None:
        """Propose ISRs to the active controller; `answered` gets an error for each, or None when there is no answer.

        The answer says only whether to ask again: what the ISR is, the image tells.
        """
        leader = self.leader
        if leader is None:
            answered(None)
            return
        if leader == self.peers.node_id:
            self.controller.propose_isrs(leader, self.registration.epoch, proposals, answered)
            return
        body = encode_request(
            Api.ALTER_PARTITION,
            ALTER_PARTITION_VERSION,
            _request(self.peers.node_id, self.registration.epoch, proposals),
        )

        def done(view: memoryview | None, error: KafkaError | None) -> None:
            if view is None:
                answered(None)
                return
            try:
                reply = decode_response(Api.ALTER_PARTITION, ALTER_PARTITION_VERSION, bytes(view))
            except Malformed:
                answered(None)
                return
            answered(_errors(reply, proposals))

        link = self.peers.link(leader, Lane.CONTROL)
        link.call(Api.ALTER_PARTITION, ALTER_PARTITION_VERSION, [body], done, ALTER_PARTITION_TIMEOUT_MS)


def _request(node_id: int, epoch: int, proposals: Sequence[IsrProposal]) -> dict[str, Any]:
    topics: dict[bytes, list[dict[str, Any]]] = {}
    for proposal in proposals:
        topics.setdefault(proposal.topic_id, []).append(
            {
                "partition_index": proposal.index,
                "leader_epoch": proposal.leader_epoch,
                "new_isr_with_epochs": [{"broker_id": m, "broker_epoch": e} for m, e in proposal.isr],
                "partition_epoch": proposal.partition_epoch,
            }
        )
    named = [{"topic_id": topic_id, "partitions": partitions} for topic_id, partitions in topics.items()]
    return {"broker_id": node_id, "broker_epoch": epoch, "topics": named}


def _errors(reply: Message, proposals: Sequence[IsrProposal]) -> list[ErrorCode] | None:
    if reply.error_code != ErrorCode.NONE:
        return None
    codes = {
        (topic.topic_id, partition.partition_index): ErrorCode(partition.error_code)
        for topic in reply.topics
        for partition in topic.partitions
    }
    return [codes.get((each.topic_id, each.index), ErrorCode.UNKNOWN_SERVER_ERROR) for each in proposals]
