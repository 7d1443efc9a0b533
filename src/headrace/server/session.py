"""One connection's protocol, without its socket: frames in, replies out in the order their requests came.

Theory of operation. The listener hands over received bytes; each whole frame becomes an `Exchange`, queued and given
to the router at once, so requests of one connection take effect in order. An exchange may be answered at once or
later (a fetch that waits for data, a produce that waits for a flush); its reply leaves when it and all before it are
answered. Replies that become ready while a chunk of input is being worked off leave together, in one send.

Back-pressure: the session stops reading while too many exchanges are open or too many bytes wait to leave, and goes
on when they are down to half. What is already received is still served: one chunk of input bounds the excess.
"""

from collections import deque
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Protocol, TypeAlias

from headrace.base.log import get_logger
from headrace.security.quotas import Flow, Quotas
from headrace.server.context import Peer, RequestContext
from headrace.storage.files import FileRange
from headrace.wire.frames import FrameCutter
from headrace.wire.headers import encode_response_header, frame_response, parse_request_header
from headrace.wire.primitives import Malformed

Part: TypeAlias = bytes | bytearray | memoryview | FileRange
Route: TypeAlias = Callable[["Exchange", memoryview, int], None]

EXCHANGES_MAX = 512
UNSENT_BYTES_MAX = 32 * 1024 * 1024
JOINED_BYTES_MAX = 16 * 1024
"""So little is copied together sooner than it is handed on in pieces."""

_SIZE = Struct(">i")
logger = get_logger(__name__)


class Transport(Protocol):
    """What a session needs of its connection."""

    def send(self, parts: Sequence[Part]) -> None:
        """Send, in order, without blocking."""
        ...

    def close(self) -> None:
        """Close once; nothing more is received or sent."""
        ...

    def set_reading(self, reading: bool) -> None:
        """Stop or go on receiving."""
        ...


class Exchange:
    """One request and the place of its reply in the order of the connection."""

    __slots__ = ("_session", "context", "done", "on_gone", "parts", "size")

    def __init__(self, session: "Session", context: RequestContext) -> None:
        self._session = session
        self.context = context
        self.parts: list[Part] | None = None
        self.size = 0
        self.done = False
        self.on_gone: Callable[[], None] | None = None  # called when the connection closes before the answer

    def reply(self, body: bytes) -> None:
        """Answer with a body."""
        self.reply_parts([body], len(body))

    def reply_parts(self, parts: Sequence[Part], size: int) -> None:
        """Answer with a body of several parts that are `size` bytes in all."""
        context = self.context
        head = encode_response_header(context.api, context.version, context.correlation_id)
        first = _SIZE.pack(size + len(head)) + head
        self.parts = [first, *parts]
        self.size = size + len(first)
        self._finish()

    def reply_unsent(self, body: bytes) -> "Session":
        """Answer without sending: whoever answers many at once has each session send once, with its `flush`."""
        assert not self.done, "a request is answered once"
        context = self.context
        whole = frame_response(context.api, context.version, context.correlation_id, body)
        self.parts = [whole]
        self.size = len(whole)
        self.done = True
        self.on_gone = None
        return self._session

    def wait_for_next(self, release: Callable[[], None]) -> None:
        """Have `release` called when the next request of the connection comes: it must not wait behind this one."""
        self._session.on_next = release

    def reply_nothing(self) -> None:
        """Be done without an answer, as a produce with acks=0 is."""
        self._finish()

    def drop(self, why: str) -> None:
        """Close the connection: there is no answer in the protocol for what happened."""
        self._session.abort(why, self.context)

    @property
    def reads_in_bulk(self) -> bool:
        """Whether the last fetch of this connection brought so much that its reader is catching up."""
        return self._session.reads_in_bulk

    @reads_in_bulk.setter
    def reads_in_bulk(self, bulk: bool) -> None:
        self._session.reads_in_bulk = bulk

    def _finish(self) -> None:
        assert not self.done, "a request is answered once"
        self.done = True
        self.on_gone = None
        self._session.flush()


class Session:
    """The state of one connection."""

    __slots__ = (
        "_closed",
        "_cutter",
        "_open",
        "_peer",
        "_quotas",
        "_reading",
        "_route",
        "_transport",
        "_unsent",
        "_working",
        "on_next",
        "reads_in_bulk",
    )

    def __init__(
        self, transport: Transport, peer: Peer, cutter: FrameCutter, route: Route, quotas: Quotas
    ) -> None:
        self._transport = transport
        self._peer = peer
        self._cutter = cutter
        self._route = route
        self._quotas = quotas
        self._open: deque[Exchange] = deque()
        self._unsent = 0
        self._reading = True
        self._working = False
        self._closed = False
        self.on_next: Callable[[], None] | None = None
        self.reads_in_bulk = False

    @property
    def idle(self) -> bool:
        """No request is being served; one that is never sent whole does not count."""
        return not self._open

    @property
    def receiving(self) -> bool:
        """A request has come in part."""
        return self._cutter.buffered > 0

    def target(self) -> memoryview:
        """Where the next bytes are to be received."""
        return self._cutter.target()

    def received(self, count: int) -> None:
        """Serve the requests that `count` more bytes made whole."""
        try:
            frames = self._cutter.received(count)
        except Malformed as error:
            self.abort(str(error), None)
            return
        self._working = True
        for frame in frames:
            if self._closed:
                break
            self._serve(frame)
        self._working = False
        self._cutter.release()
        self.flush()

    def _serve(self, frame: memoryview) -> None:
        if self.on_next is not None:
            release, self.on_next = self.on_next, None
            release()
        try:
            header = parse_request_header(frame)
        except Malformed as error:
            self.abort(str(error), None)
            return
        throttle_ms = self._quotas.charge(Flow.IN, self._peer.principal, header.client_id, len(frame) + 4)
        context = RequestContext(
            header.api, header.version, header.correlation_id, header.client_id, self._peer, throttle_ms
        )
        exchange = Exchange(self, context)
        self._open.append(exchange)
        try:
            self._route(exchange, frame, header.body)
        except Malformed as error:
            self.abort(str(error), context)

    def flush(self) -> None:
        """Send the replies whose turn has come."""
        if self._working or self._closed:
            return
        exchanges = self._open
        if not exchanges or not exchanges[0].done:
            self._pace()
            return
        parts: list[Part] = []
        size, client_id = 0, exchanges[0].context.client_id
        while exchanges and (exchange := exchanges[0]).done:
            exchanges.popleft()
            if exchange.parts is not None:
                parts += exchange.parts
                if exchange.context.client_id != client_id:
                    self._charge_out(client_id, size)
                    size, client_id = 0, exchange.context.client_id
                size += exchange.size
        if parts:
            self._charge_out(client_id, size)
            self._transport.send(parts if size > JOINED_BYTES_MAX else _joined(parts))
        self._pace()

    def _charge_out(self, client_id: str | None, size: int) -> None:
        self._unsent += size
        self._quotas.charge(Flow.OUT, self._peer.principal, client_id, size)

    def sent(self, count: int) -> None:
        """`count` bytes have left."""
        self._unsent -= count
        if not self._reading:
            self._pace()

    def _pace(self) -> None:
        """Read or do not read, by how much is under way."""
        if self._closed:
            return
        if self._reading:
            if len(self._open) >= EXCHANGES_MAX or self._unsent >= UNSENT_BYTES_MAX:
                self._reading = False
                self._transport.set_reading(False)
        elif len(self._open) <= EXCHANGES_MAX // 2 and self._unsent <= UNSENT_BYTES_MAX // 2:
            self._reading = True
            self._transport.set_reading(True)

    def abort(self, why: str, context: RequestContext | None) -> None:
        """Close the connection because of what the client sent."""
        if self._closed:
            return
        fields: dict[str, object] = {"host": self._peer.host, "connection": self._peer.connection, "why": why}
        if context is not None:
            fields |= {"api": context.api, "version": context.version, "client": context.client_id}
        logger.info("connection closed on a bad request", extra={"fields": fields})
        self.closed()
        self._transport.close()

    def closed(self) -> None:
        """The connection is gone: answers still to come are dropped."""
        if self._closed:
            return
        self._closed = True
        waiting = [exchange.on_gone for exchange in self._open if exchange.on_gone is not None]
        self._open.clear()
        self.on_next = None
        self._cutter.close()
        for gone in waiting:
            gone()


def _joined(parts: list[Part]) -> Sequence[Part]:
    """Many small replies as one, as far as they are in memory."""
    if len(parts) <= 2 or any(isinstance(part, FileRange) for part in parts):
        return parts
    return [b"".join(parts)]  # type: ignore[arg-type] # a file's range was looked for
