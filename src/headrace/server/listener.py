"""The edge to the network: sockets on the event loop. Nothing above this module sees a socket, nothing in it a
message.

Sockets are read with `recv_into` straight into the session's memory and written with `sendmsg` and `sendfile`,
without a transport object in between: a transport cannot send file ranges under uvloop and copies what it receives.

A file range goes out by `sendfile` when it is large; a small one is read and joined to its neighbours, because one
`sendmsg` of everything costs less than two system calls. SENDFILE_MIN_BYTES is where the two cross on Linux loopback.
"""

import asyncio
import os
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.base.clock import Clock
from headrace.base.log import get_logger
from headrace.security.authorizer import ANONYMOUS, Authorizer
from headrace.security.quotas import Quotas
from headrace.server.context import Peer
from headrace.server.session import Part, Route, Session
from headrace.storage.files import FileRange
from headrace.wire.frames import SCRATCH_BYTES, BufferPool, FrameCutter

SENDFILE_MIN_BYTES = 64 * 1024
GATHER_BYTES_MAX = 256 * 1024
GATHER_PARTS_MAX = 64
ACCEPTS_A_TURN_MAX = 64
ACCEPT_PAUSE_S = 0.1  # after an accept that failed
BACKLOG = 512
IDLE_SWEEPS = 10  # an idle connection is closed at most a tenth late

logger = get_logger(__name__)


@dataclass(slots=True, frozen=True)
class Limits:
    """What one listener grants."""

    frame_bytes_max: int
    connections_max: int
    connections_per_ip_max: int
    queued_bytes_max: int  # of requests under way, over all connections; -1 for no limit
    idle_ms_max: int


class Connection:
    """One accepted socket and its session."""

    __slots__ = ("_listener", "_loop", "_out", "_sock", "_writing", "active_ms", "fd", "host", "session")

    def __init__(
        self, listener: "Listener", loop: asyncio.AbstractEventLoop, sock: socket.socket, host: str
    ) -> None:
        self._listener = listener
        self._loop = loop
        self._sock: socket.socket | None = sock
        self.fd = sock.fileno()
        self.host = host
        self._out: deque[Part] = deque()
        self._writing = False
        self.active_ms = listener.clock.monotonic_ms()
        self.session = listener.open_session(self)

    def on_readable(self) -> None:
        """Receive once and serve what came."""
        sock = self._sock
        if sock is None:
            return
        if self._listener.must_wait(self):
            return
        try:
            count = sock.recv_into(self.session.target())
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            count = 0
        if count == 0:
            self.close()
            return
        self.active_ms = self._listener.clock.monotonic_ms()
        self.session.received(count)

    def set_reading(self, reading: bool) -> None:
        if self._sock is None:
            return
        if reading:
            self._loop.add_reader(self.fd, self.on_readable)
        else:
            self._loop.remove_reader(self.fd)

    def send(self, parts: Sequence[Part]) -> None:
        self._out.extend(parts)
        if not self._writing:
            self._write()

    def _write(self) -> None:
        sock = self._sock
        if sock is None:
            return
        sent = 0
        try:
            while self._out:
                first = self._out[0]
                if isinstance(first, FileRange) and first.length >= SENDFILE_MIN_BYTES:
                    sent += self._send_range(first)
                else:
                    sent += self._send_gathered(sock)
        except (BlockingIOError, InterruptedError):
            if not self._writing:
                self._writing = True
                self._loop.add_writer(self.fd, self._write)
        except OSError as error:
            logger.debug("connection lost", extra={"fields": {"host": self.host, "why": error.strerror}})
            self.close()
            return
        else:
            if self._writing:
                self._writing = False
                self._loop.remove_writer(self.fd)
        if sent:
            self.active_ms = self._listener.clock.monotonic_ms()
            self.session.sent(sent)

    def _send_range(self, part: FileRange) -> int:
        count = os.sendfile(self.fd, part.file.fileno(), part.offset, part.length)
        if count == 0:
            raise OSError(0, "a segment ended before the range that was promised of it")
        if count == part.length:
            self._out.popleft()
        else:
            self._out[0] = FileRange(part.file, part.offset + count, part.length - count)
        return count

    def _send_gathered(self, sock: socket.socket) -> int:
        """Send the small parts at the head of the queue with one system call."""
        out, size = self._out, 0
        buffers: list[bytes | bytearray | memoryview] = []
        flags = 0
        for part in out:
            if isinstance(part, FileRange):
                if part.length >= SENDFILE_MIN_BYTES:
                    flags = socket.MSG_MORE
                    break
                data = part.file.pread(part.length, part.offset)
                if len(data) != part.length:
                    raise OSError(0, "a segment ended before the range that was promised of it")
                buffers.append(data)
                size += part.length
            else:
                buffers.append(part)
                size += len(part)
            if size >= GATHER_BYTES_MAX or len(buffers) == GATHER_PARTS_MAX:
                break
        count = rest = sock.sendmsg(buffers, (), flags)
        for buffer in buffers:
            length = len(buffer)
            if rest < length:
                out[0] = memoryview(buffer)[rest:]
                break
            rest -= length
            out.popleft()
        return count

    def close(self) -> None:
        """Close once; the session is told."""
        sock, self._sock = self._sock, None
        if sock is None:
            return
        self._loop.remove_reader(self.fd)
        if self._writing:
            self._loop.remove_writer(self.fd)
        self._out.clear()
        self.session.closed()
        self._listener.forget(self)
        sock.close()


class Listener:
    """A listening socket and the connections it accepted. `limits` may be replaced while it runs."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        limits: Limits,
        authorizer: Authorizer,
        quotas: Quotas,
    ) -> None:
        self.clock = clock
        self._loop = loop
        self.limits = limits
        self._route: Route | None = None
        self._authorizer = authorizer
        self._quotas = quotas
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._pool = BufferPool(self._admit_waiting)
        self._sock: socket.socket | None = None
        self._connections: set[Connection] = set()
        self._waiting: deque[Connection] = deque()
        self._by_host: dict[str, int] = {}
        self._opened = 0
        self._sweep: asyncio.TimerHandle | None = None

    @property
    def connections(self) -> int:
        return len(self._connections)

    def bind(self, host: str, port: int) -> int:
        """Take the address, without listening yet; returns the port, chosen by the system when `port` is 0."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError:
            sock.close()
            raise
        sock.setblocking(False)
        self._sock = sock
        return int(sock.getsockname()[1])

    def start(self, route: Route) -> None:
        """Listen and accept; `route` gets every request."""
        assert self._sock is not None, "bind first"
        self._route = route
        self._sock.listen(BACKLOG)
        self._loop.add_reader(self._sock.fileno(), self._accept)
        self._schedule_sweep()

    def _accept(self) -> None:
        assert self._sock is not None
        for _ in range(ACCEPTS_A_TURN_MAX):
            try:
                sock, address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                logger.error("cannot accept a connection", extra={"fields": {"why": error.strerror}})
                self._pause_accepting()
                return
            self._admit(sock, str(address[0]))

    def _pause_accepting(self) -> None:
        """Out of file handles, say: who waits goes on being readable, and asking again at once would take all time."""
        assert self._sock is not None
        self._loop.remove_reader(self._sock.fileno())
        self._loop.call_later(ACCEPT_PAUSE_S, self._resume_accepting)

    def _resume_accepting(self) -> None:
        if self._sock is not None:
            self._loop.add_reader(self._sock.fileno(), self._accept)

    def _admit(self, sock: socket.socket, host: str) -> None:
        limits = self.limits
        mine = self._by_host.get(host, 0)
        if len(self._connections) >= limits.connections_max or mine >= limits.connections_per_ip_max:
            logger.warning(
                "connection refused: too many",
                extra={"fields": {"host": host, "connections": len(self._connections), "of_host": mine}},
            )
            sock.close()
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._by_host[host] = mine + 1
        connection = Connection(self, self._loop, sock, host)
        self._connections.add(connection)
        self._loop.add_reader(connection.fd, connection.on_readable)

    def open_session(self, connection: Connection) -> Session:
        self._opened += 1
        peer = Peer(ANONYMOUS, connection.host, self._authorizer, self._opened)
        cutter = FrameCutter(self._scratch, self._pool, self.limits.frame_bytes_max)
        assert self._route is not None, "connections come after the start"
        return Session(connection, peer, cutter, self._route, self._quotas)

    def must_wait(self, connection: Connection) -> bool:
        """Whether a new request has to wait until others, whose bytes are being received, are done."""
        limit = self.limits.queued_bytes_max
        if limit < 0 or self._pool.lent < limit or connection.session.receiving:
            return False
        connection.set_reading(False)
        self._waiting.append(connection)
        return True

    def _admit_waiting(self) -> None:
        """Memory came back: let those who wait for it read again, in the order they came."""
        while self._waiting and self._pool.lent < self.limits.queued_bytes_max:
            self._waiting.popleft().set_reading(True)

    def forget(self, connection: Connection) -> None:
        self._connections.discard(connection)
        left = self._by_host.get(connection.host, 1) - 1
        if left:
            self._by_host[connection.host] = left
        else:
            self._by_host.pop(connection.host, None)

    def _schedule_sweep(self) -> None:
        if self.limits.idle_ms_max > 0:
            self._sweep = self._loop.call_later(
                self.limits.idle_ms_max / 1000 / IDLE_SWEEPS, self._close_idle
            )

    def _close_idle(self) -> None:
        oldest = self.clock.monotonic_ms() - self.limits.idle_ms_max
        for connection in [c for c in self._connections if c.active_ms < oldest and c.session.idle]:
            connection.close()
        self._schedule_sweep()

    def stop_accepting(self) -> None:
        """Close the listening socket; connections go on."""
        if self._sock is not None:
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()
            self._sock = None

    def close(self) -> None:
        """Close everything."""
        self.stop_accepting()
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self._connections):
            connection.close()
