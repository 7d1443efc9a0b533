"""A broker's part of registration: a pure state machine, replies and time in, the next request out.

    REGISTERING --registered--> CATCHING_UP --has its own registration--> FENCED --ready, unfenced--> ACTIVE
         ^                                                                  ^  \\--------------/
         \\-- the controller does not know this broker (any more) --+        \\-- fenced ------/
                                                 ACTIVE or FENCED --stop--> LEAVING --may stop--> LEFT

Owns the broker's epoch and what it believes of itself. Invariants: at most one request is under way; the incarnation is
that of the process, so a registration that was sent twice is one; a broker whose epoch is stale has been replaced by
another process and must stop. Called by the server's registration and by the simulator's.
"""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from headrace.base.errors import ErrorCode
from headrace.cluster.control_messages import (
    BrokerLoad,
    HeartbeatReply,
    HeartbeatRequest,
    RegisterReply,
    RegisterRequest,
)

RETRY_MS = 50.0
RETRY_MAX_MS = 300.0


class State(Enum):
    """How far a broker is."""

    REGISTERING = "registering"
    CATCHING_UP = "catching up"
    FENCED = "fenced"
    ACTIVE = "active"
    LEAVING = "leaving"
    LEFT = "left"


class Ask(NamedTuple):
    """A request, and the node to send it to."""

    to: int
    request: RegisterRequest | HeartbeatRequest


class Registrant:
    """See the module. Times are monotonic."""

    def __init__(self, identity: RegisterRequest, voters: Sequence[int], heartbeat_ms: float) -> None:
        self._identity = identity
        self._voters = sorted(voters)
        self._heartbeat_ms = heartbeat_ms
        self.state = State.REGISTERING
        self.epoch = -1
        self.cluster_id = identity.cluster_id
        self.fatal: str | None = None
        """Why this process must stop."""
        self._ready = False
        self._asked_ready = False
        self._controller: int | None = None
        self._tried = 0
        self._asking = False
        self._asked_ms = 0.0
        self._next_ms = 0.0
        self._failures = 0
        self._wanted_offset = 0
        self._offset = 0
        self._acknowledged_ms: float | None = None

    def acknowledged_ms(self) -> float | None:
        """When the last request was sent that the controller has answered well: until then it heard of this broker.

        A controller that itself hears of no majority speaks for the time only until that began.
        """
        return self._acknowledged_ms

    def applied(self, offset: int, now_ms: float) -> None:
        """The image here has everything below `offset`."""
        self._offset = offset
        if self.state is State.CATCHING_UP and offset >= self._wanted_offset:
            self.state = State.FENCED
            self._next_ms = now_ms

    def ready(self, now_ms: float) -> None:
        """The logs are open: this broker can lead."""
        if not self._ready:
            self._ready = True
            self._next_ms = now_ms

    def stop(self, now_ms: float) -> None:
        """Leave: hand over what is led here first."""
        if self.state in (State.FENCED, State.ACTIVE):
            self.state = State.LEAVING
            self._next_ms = now_ms
        elif self.state is not State.LEAVING:
            self.state = State.LEFT

    # -- asking --------------------------------------------------------------------------------------------------------

    def due_ms(self) -> float | None:
        """When to ask `next` again; None while a reply is awaited, or nothing is to be said any more."""
        if self._asking or self.state in (State.LEFT, State.CATCHING_UP) or self.fatal is not None:
            return None
        return self._next_ms

    def next(self, now_ms: float, leader: int | None, load: BrokerLoad | None = None) -> Ask | None:
        """What to send now, to the leader as this node knows it, or as a voter told it."""
        due_ms = self.due_ms()
        if due_ms is None or now_ms < due_ms:
            return None
        to = self._controller if self._controller is not None else leader
        if to is None:
            to = self._voters[self._tried % len(self._voters)]
            self._tried += 1
        self._asking = True
        self._asked_ms = now_ms
        if self.state is State.REGISTERING:
            return Ask(to, self._identity)
        leaving = self.state is State.LEAVING
        self._asked_ready = self._ready
        request = HeartbeatRequest(
            self._identity.node_id,
            self.epoch,
            self._offset,
            want_shutdown=leaving,
            load=load,
            want_fence=not self._ready,
        )
        return Ask(to, request)

    def failed(self, now_ms: float) -> None:
        """No reply will come."""
        self._controller = None
        self._again(now_ms)

    def _again(self, now_ms: float) -> None:
        self._asking = False
        self._failures += 1
        self._next_ms = now_ms + min(RETRY_MS * self._failures, RETRY_MAX_MS)

    def _elsewhere(self, leader: int, now_ms: float) -> None:
        """That was not the active controller; it may know who is."""
        self._asking = False
        self._controller = leader if leader >= 0 else None
        self._failures += 1
        self._next_ms = now_ms + min(RETRY_MS * self._failures, RETRY_MAX_MS) / 2

    # -- replies -------------------------------------------------------------------------------------------------------

    def registered(self, reply: RegisterReply, now_ms: float) -> None:
        """The reply to a RegisterRequest."""
        if reply.error == ErrorCode.NOT_CONTROLLER:
            self._elsewhere(reply.leader, now_ms)
        elif reply.error == ErrorCode.INCONSISTENT_CLUSTER_ID:
            self._asking = False
            self.fatal = reply.message
        elif reply.error != ErrorCode.NONE:
            self._again(now_ms)  # another process of this number, that may be gone soon
        else:
            self._asking = False
            self._failures = 0
            self._acknowledged_ms = self._asked_ms
            self.epoch = reply.epoch
            self.cluster_id = reply.cluster_id
            self._wanted_offset = reply.offset
            if self.state is State.REGISTERING:
                self.state = State.CATCHING_UP
                self.applied(self._offset, now_ms)

    def heard(self, reply: HeartbeatReply, now_ms: float) -> None:
        """The reply to a HeartbeatRequest."""
        if reply.error == ErrorCode.NOT_CONTROLLER:
            self._elsewhere(reply.leader, now_ms)
            return
        if reply.error == ErrorCode.STALE_BROKER_EPOCH:
            self._asking = False
            self.fatal = f"another process has registered as broker {self._identity.node_id}: {reply.message}"
            return
        if reply.error == ErrorCode.BROKER_ID_NOT_REGISTERED:
            self._again(now_ms)
            if self.state is State.LEAVING:
                self.state = State.LEFT
            else:
                self.state = State.REGISTERING
            return
        if reply.error != ErrorCode.NONE:
            self._again(now_ms)
            return
        self._asking = False
        self._failures = 0
        since_ms = self._asked_ms - reply.silence_ms
        self._acknowledged_ms = max(self._acknowledged_ms or since_ms, since_ms)
        self._next_ms = now_ms + self._heartbeat_ms
        if self.state is State.LEAVING:
            if reply.may_stop:
                self.state = State.LEFT
                self._wanted_offset = reply.offset
            else:
                self._next_ms = now_ms + RETRY_MS
        else:
            self.state = State.FENCED if reply.fenced else State.ACTIVE
            self._wanted_offset = max(self._wanted_offset, reply.offset)
            if self._ready and not self._asked_ready:
                self._next_ms = now_ms
            elif reply.fenced:
                self._next_ms = now_ms + (RETRY_MS if self._ready else RETRY_MAX_MS)

    @property
    def wanted_offset(self) -> int:
        """Where the image has what the last reply told."""
        return self._wanted_offset
