"""This broker's registration on the wire and in time: sends what `Registrant` wants said, and gives it the replies.

Owns the timer and the requests to the active controller. Invariant: nothing is decided here. `registered`, `active` and
`left` are what the process waits for while it starts and stops. Owned by the process.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from headrace.base.clock import Clock, Timer
from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.log import get_logger
from headrace.cluster.control_messages import (
    BrokerLoad,
    HeartbeatReply,
    Malformed,
    RegisterReply,
    RegisterRequest,
    decode,
    encode,
)
from headrace.cluster.registrant import Ask, Registrant, State
from headrace.server.controller import Controller
from headrace.server.metadata import MetadataStore
from headrace.server.peers import Lane, Peers
from headrace.wire.apis import PRIVATE_HEARTBEAT, PRIVATE_REGISTER

REQUEST_TIMEOUT_MS = 3_000

T = TypeVar("T")
logger = get_logger(__name__)


class Registration:
    """See the module."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        peers: Peers,
        metadata: MetadataStore,
        registrant: Registrant,
        controller: Controller,
    ) -> None:
        """`controller` is this node's own, asked without a connection when it is the active one."""
        self._controller = controller
        self._loop = loop
        self._clock = clock
        self._peers = peers
        self._metadata = metadata
        self._registrant = registrant
        self._timer: Timer | None = None
        self._timer_ms = 0.0
        self._waiting: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._closed = False
        self.measure: Callable[[], BrokerLoad | None] = lambda: None
        self.on_fatal: Callable[[str], None] = lambda why: None

    @property
    def epoch(self) -> int:
        """The epoch this broker is registered under; -1 before it is."""
        return self._registrant.epoch

    @property
    def cluster_id(self) -> str:
        return self._registrant.cluster_id

    @property
    def is_active(self) -> bool:
        """Whether the controller counts this broker among those that may lead, by its last word."""
        return self._registrant.state is State.ACTIVE

    @property
    def heard_ms(self) -> float | None:
        """The last moment at which the controller is known to have counted on this broker, or None."""
        return self._registrant.acknowledged_ms()

    # -- what the process waits for ------------------------------------------------------------------------------------

    async def register(self) -> None:
        """Be registered, and know one's own registration."""
        self._pump()
        await self._until(lambda: self._registrant.state in (State.FENCED, State.ACTIVE, State.LEFT))

    async def be_active(self) -> None:
        """Have opened the logs; be unfenced, and know it."""
        self._registrant.ready(self._clock.monotonic_ms())
        self._pump()
        await self._until(lambda: self._registrant.state in (State.ACTIVE, State.LEFT))
        await self._metadata.until(self._registrant.wanted_offset)

    async def leave(self) -> None:
        """Have everything led here moved to others, as far as there are others."""
        self._registrant.stop(self._clock.monotonic_ms())
        self._pump()
        await self._until(lambda: self._registrant.state is State.LEFT)
        await self._metadata.until(self._registrant.wanted_offset)

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for _, future in self._waiting:
            future.cancel()

    def _until(self, condition: Callable[[], bool]) -> "asyncio.Future[None]":
        future: asyncio.Future[None] = self._loop.create_future()
        if condition():
            future.set_result(None)
        else:
            self._waiting.append((condition, future))
        return future

    # -- events --------------------------------------------------------------------------------------------------------

    def applied(self) -> None:
        """The image moved on."""
        self._registrant.applied(self._metadata.applied_offset, self._clock.monotonic_ms())
        self._pump()

    def _pump(self) -> None:
        """Send what is due, and come back when the next is."""
        if self._closed:
            return
        registrant = self._registrant
        if registrant.fatal is not None:
            self.on_fatal(registrant.fatal)
            return
        waiting, self._waiting = self._waiting, []
        for condition, future in waiting:
            if future.done():
                continue
            if condition():
                future.set_result(None)
            else:
                self._waiting.append((condition, future))
        now_ms = self._clock.monotonic_ms()
        due_ms = registrant.due_ms()
        load = self.measure() if due_ms is not None and due_ms <= now_ms else None
        ask = registrant.next(now_ms, self._metadata.quorum.leader, load)
        if ask is not None:
            self._send(ask)
        self._come_back(registrant.due_ms(), now_ms)

    def _come_back(self, due_ms: float | None, now_ms: float) -> None:
        if self._timer is not None:
            if due_ms == self._timer_ms:
                return  # every change of the image comes by here, and most change nothing about that
            self._timer.cancel()
            self._timer = None
        if due_ms is not None:
            self._timer_ms = due_ms
            self._timer = self._loop.call_later(max(0.0, due_ms - now_ms) / 1000, self._due)

    def _due(self) -> None:
        self._timer = None
        self._pump()

    def _take(self, step: Callable[[T, float], None], reply: T) -> None:
        """Give a reply to the state machine, and see what follows, in a turn of its own."""

        def take() -> None:
            step(reply, self._clock.monotonic_ms())
            self._pump()

        self._loop.call_soon(take)

    def _send(self, ask: Ask) -> None:
        registrant = self._registrant
        if ask.to == self._peers.node_id:
            if isinstance(ask.request, RegisterRequest):
                self._controller.register(ask.request, lambda reply: self._take(registrant.registered, reply))
            else:
                self._controller.heartbeat(ask.request, lambda reply: self._take(registrant.heard, reply))
            return
        registering = isinstance(ask.request, RegisterRequest)
        api = PRIVATE_REGISTER if registering else PRIVATE_HEARTBEAT

        def done(view: memoryview | None, error: KafkaError | None) -> None:
            why = error
            try:
                if view is not None:
                    if registering:
                        self._take(registrant.registered, decode(RegisterReply, view))
                    else:
                        self._take(registrant.heard, decode(HeartbeatReply, view))
                    return
            except Malformed as malformed:
                why = KafkaError(ErrorCode.CORRUPT_MESSAGE, str(malformed))
            logger.info("the controller was not reached", extra={"fields": {"why": str(why)}})
            registrant.failed(self._clock.monotonic_ms())
            self._pump()

        link = self._peers.link(ask.to, Lane.CONTROL)
        link.call(api, 0, [encode(ask.request)], done, REQUEST_TIMEOUT_MS)
