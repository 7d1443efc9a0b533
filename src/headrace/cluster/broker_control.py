"""The controller's rule over brokers: who is registered, alive, fenced. Pure: events and time in, records out.

Owns what only the active controller knows of brokers: when each was last heard of, and what it reported. It begins anew
with each controller, who gives everyone a whole session's time, the controller before it from its last word on.
Invariants: a request counts only under the epoch of the newest registration, so that a process that was replaced
changes nothing; a broker is unfenced only by its own heartbeat, when it has the metadata of its own registration and
has opened its logs; fencing takes leadership and ISR membership in one step.

Two speeds. A broker whose process is gone (its address refuses connections) is fenced at once. One that is only silent
is fenced when its session is over. And one that was said to be gone and then speaks under the same epoch was not gone:
from then on only silence counts for it. Called by the server's controller and by the simulator's.
"""

from collections.abc import Callable
from typing import TypeAlias

from headrace.base.errors import ErrorCode
from headrace.cluster.control_messages import (
    BrokerLoad,
    HeartbeatReply,
    HeartbeatRequest,
    RegisterReply,
    RegisterRequest,
)
from headrace.cluster.elections import Unclean, begin_anew, come_back, leave, never
from headrace.cluster.image import BrokerRegistration, ClusterImage
from headrace.cluster.records import (
    BrokerRecord,
    BrokerStateRecord,
    MetadataRecord,
    UnregisterBrokerRecord,
)

STALL_MS = 1_000.0
"""Ticks further apart than this tell that the controller itself was held up."""

Records: TypeAlias = list[MetadataRecord]


class _Session:
    """A broker, as this controller hears it."""

    __slots__ = ("epoch", "heard_ms", "load", "spoke_after_gone", "was_gone")

    def __init__(self, epoch: int, now_ms: float) -> None:
        self.epoch = epoch
        self.heard_ms = now_ms
        self.load: BrokerLoad | None = None
        self.was_gone = False
        self.spoke_after_gone = False


class BrokerControl:
    """See the module. Times are monotonic."""

    def __init__(self, session_timeout_ms: Callable[[], int], unclean: Unclean = never) -> None:
        self._session_timeout_ms = session_timeout_ms
        self._unclean = unclean
        self._sessions: dict[int, _Session] = {}
        self._ticked_ms = 0.0

    def begin(self, image: ClusterImage, now_ms: float, heard: tuple[int, float] | None = None) -> None:
        """This controller is active from now on: nobody has been heard of, and everybody has a session's time.

        `heard` is the controller before this one, and when it was last heard of: it has been silent already.
        """
        self._ticked_ms = now_ms
        self._sessions = {
            broker.id: _Session(broker.epoch, now_ms)
            for broker in image.brokers.values()
            if not broker.fenced
        }
        if heard is not None and (before := self._sessions.get(heard[0])) is not None:
            before.heard_ms = min(heard[1], now_ms)

    # -- what brokers ask ----------------------------------------------------------------------------------------------

    def register(
        self, image: ClusterImage, request: RegisterRequest, offset: int, now_ms: float
    ) -> tuple[Records, RegisterReply]:
        """A process wants to be a broker. `offset` is where the records will be in the log: its epoch, if they are."""
        refused = self.refusal(image, request, now_ms)
        if refused is not None:
            return [], refused
        before = image.brokers.get(request.node_id)
        if before is not None and before.incarnation == request.incarnation:
            self._sessions.setdefault(request.node_id, _Session(before.epoch, now_ms)).heard_ms = now_ms
            return [], RegisterReply(
                ErrorCode.NONE, epoch=before.epoch, offset=offset, cluster_id=image.cluster_id
            )
        records = begin_anew(image, request.node_id, self._unclean) if before is not None else []
        records.append(
            BrokerRecord(
                request.node_id,
                request.host,
                request.port,
                request.rack,
                offset,
                request.incarnation,
                fenced=True,
            )
        )
        self._sessions[request.node_id] = _Session(offset, now_ms)
        return records, RegisterReply(
            ErrorCode.NONE, epoch=offset, offset=offset + 1, cluster_id=image.cluster_id
        )

    def refusal(
        self, image: ClusterImage, request: RegisterRequest, now_ms: float, *, also_in_place: bool = False
    ) -> RegisterReply | None:
        """Why a process may not be a broker: it is of another cluster, or the registered process is still there.

        It is not when the new one has its address; with `also_in_place` it is all the same, while it is heard of.
        """
        if request.cluster_id and image.cluster_id and request.cluster_id != image.cluster_id:
            words = f"its data directory belongs to cluster {request.cluster_id}, this is {image.cluster_id}"
            return RegisterReply(ErrorCode.INCONSISTENT_CLUSTER_ID, words)
        before = image.brokers.get(request.node_id)
        if before is None or before.incarnation == request.incarnation or before.fenced:
            return None
        in_place = (before.host, before.port) == (request.host, request.port)
        session = self._sessions.get(before.id)
        if (in_place and not also_in_place) or session is None:
            return None
        if session.heard_ms + self._session_timeout_ms() <= now_ms:
            return None
        words = f"a broker {before.id} is registered from {before.host}:{before.port}, and it is alive"
        return RegisterReply(ErrorCode.DUPLICATE_BROKER_REGISTRATION, words)

    def heartbeat(
        self, image: ClusterImage, request: HeartbeatRequest, offset: int, now_ms: float
    ) -> tuple[Records, HeartbeatReply]:
        """A broker is there. The reply holds once the records are committed."""
        broker = image.brokers.get(request.node_id)
        if broker is None:
            return [], HeartbeatReply(ErrorCode.BROKER_ID_NOT_REGISTERED, "this broker is not registered")
        if broker.epoch != request.epoch:
            words = f"its epoch is {broker.epoch}, not {request.epoch}"
            return [], HeartbeatReply(ErrorCode.STALE_BROKER_EPOCH, words)
        session = self._sessions.get(broker.id)
        if session is None or session.epoch != broker.epoch:
            session = self._sessions[broker.id] = _Session(broker.epoch, now_ms)
        session.heard_ms = now_ms
        session.load = request.load
        session.spoke_after_gone = session.was_gone
        records: Records = []
        fenced = broker.fenced
        if request.want_shutdown:
            if not broker.controlled_shutdown:
                records = leave(image, broker.id, self._unclean, lead_on=True)
                records.append(BrokerStateRecord(broker.id, broker.epoch, fenced, controlled_shutdown=True))
        elif fenced and request.offset > broker.epoch and not request.want_fence:
            records = come_back(image, broker.id, self._unclean)
            records.append(BrokerStateRecord(broker.id, broker.epoch, fenced=False))
            fenced = False
        return records, HeartbeatReply(
            ErrorCode.NONE,
            fenced=fenced,
            may_stop=request.want_shutdown,
            offset=offset + 1 if records else offset,
        )

    # -- what the controller sees --------------------------------------------------------------------------------------

    def gone(self, image: ClusterImage, node_id: int) -> Records:
        """No process listens at a broker's address."""
        broker = image.brokers.get(node_id)
        if broker is None or broker.fenced:
            return []
        session = self._sessions.get(node_id)
        if session is not None:
            if session.spoke_after_gone:
                return []
            session.was_gone = True
        return self._fence(image, broker)

    def tick(self, image: ClusterImage, now_ms: float) -> Records:
        """Fence one broker whose session is over, if there is one: the next follows on the image after that.

        A controller that was held up itself, stopped or on a busy machine, has heard nobody meanwhile: that time is
        nobody's silence.
        """
        stalled_ms = now_ms - self._ticked_ms
        self._ticked_ms = now_ms
        if stalled_ms > STALL_MS:
            for each in self._sessions.values():
                each.heard_ms += stalled_ms
        limit = now_ms - self._session_timeout_ms()
        for broker in image.brokers.values():
            if broker.fenced:
                continue
            session = self._sessions.get(broker.id)
            if session is None:
                self._sessions[broker.id] = _Session(broker.epoch, now_ms)
            elif session.heard_ms <= limit:
                return self._fence(image, broker)
        return []

    def unregister(self, image: ClusterImage, node_id: int) -> tuple[Records, ErrorCode]:
        """Forget a broker for good."""
        broker = image.brokers.get(node_id)
        if broker is None:
            return [], ErrorCode.BROKER_ID_NOT_REGISTERED
        self._sessions.pop(node_id, None)
        records = leave(image, node_id, self._unclean)
        records.append(UnregisterBrokerRecord(node_id, broker.epoch))
        return records, ErrorCode.NONE

    def _fence(self, image: ClusterImage, broker: BrokerRegistration) -> Records:
        records = leave(image, broker.id, self._unclean)
        records.append(BrokerStateRecord(broker.id, broker.epoch, fenced=True))
        return records

    def loads(self, image: ClusterImage) -> dict[int, BrokerLoad | None]:
        """What each broker in service last reported; None of one that has not yet."""
        return {
            broker.id: None if (session := self._sessions.get(broker.id)) is None else session.load
            for broker in image.brokers.values()
            if not broker.fenced
        }
