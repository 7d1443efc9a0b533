"""One connection to another node: requests under way, replies matched to them, one-way posts.

Owns the socket and everything that waits on it. Invariants: each request is answered once, by its reply or by a
KafkaError; replies come in the order of their requests, because the other end answers so; a large reply is received
straight into memory of its own size and handed over without another copy. The link connects when it is first wanted
and, from then on, again whenever it is lost, after a pause that grows and has some chance in it. A node may have
several addresses: the one that was connected to last is tried first, and after a failure the next. Who answers at
another than the first may be a stranger, and the node itself be late: so the first is tried further on meanwhile.

How it was lost matters. A peer that is *gone* refused a connection, or reset one: no process listens there. One that
merely closed, or does not answer, may be slow or cut off. A kill mostly looks like a close at first, so the first
attempt to connect again is made at once, and it is the refusal of that one that tells. Made by `Peers`.
"""

import asyncio
import errno
import socket
from collections import deque
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any, Protocol, TypeAlias

from headrace.base.clock import Clock, Timer
from headrace.base.errors import ErrorCode, KafkaError
from headrace.wire.headers import encode_request_header, parse_response_header
from headrace.wire.messages import Message, decode_response, encode_request
from headrace.wire.primitives import Malformed

Address: TypeAlias = tuple[str, int]
Data: TypeAlias = bytes | bytearray | memoryview
Done: TypeAlias = "Callable[[memoryview | None, KafkaError | None], None]"

FRAME_BYTES_MAX = 256 * 1024 * 1024
SCRATCH_BYTES = 64 * 1024
GATHER_PARTS_MAX = 64
UNSENT_BYTES_MAX = 64 * 1024 * 1024
REQUESTS_MAX = 10_000
CONNECT_TIMEOUT_S = 2.0
REQUEST_TIMEOUT_MS = 30_000
SWEEP_S = 0.5
BACKOFF_MS = 20.0
BACKOFF_MAX_MS = 500.0
LOOK_S = 1.0
"""How often a link that is connected elsewhere tries the first address."""
GONE = (errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE)

_LENGTH = Struct(">i")
_scratch = memoryview(bytearray(SCRATCH_BYTES))


class Chance(Protocol):
    """Where the jitter comes from: `random.Random`."""

    def random(self) -> float: ...


class _Request:
    """A request under way."""

    __slots__ = ("api", "deadline_ms", "done", "version")

    def __init__(self, api: int, version: int, deadline_ms: float, done: Done) -> None:
        self.api = api
        self.version = version
        self.deadline_ms = deadline_ms
        self.done = done


class Link:
    """See the module. All methods are called on the loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        chance: Chance,
        node_id: int,
        client_id: str,
        addresses: Callable[[int], Sequence[Address]],
        on_up: Callable[[int], None],
        on_down: Callable[[int, Address | None, bool], None],
    ) -> None:
        self.node_id = node_id
        self.up = False
        self.bytes_in = 0
        self.bytes_out = 0
        self._loop = loop
        self._clock = clock
        self._chance = chance
        self._client_id = client_id
        self._addresses = addresses
        self._on_up = on_up
        self._on_down = on_down
        self._turn = 0
        self._tried: Address | None = None
        self._sock: socket.socket | None = None
        self._fd = -1
        self._connecting: asyncio.Task[None] | None = None
        self._retry: Timer | None = None
        self._sweep: Timer | None = None
        self._look: Timer | None = None
        self._looking: asyncio.Task[None] | None = None
        self._failures = 0
        self._wanted = False
        self._closed = False
        self._correlation = 0
        self._requests: deque[tuple[int, _Request]] = deque()
        self._out: deque[Data] = deque()
        self._unsent = 0
        self._flush_due = False
        self._writing = False
        self._head = b""
        self._frame: bytearray | None = None
        self._filled = 0

    # -- asking --------------------------------------------------------------------------------------------------------

    def request(
        self, api: int, version: int, body: dict[str, Any], timeout_ms: float = REQUEST_TIMEOUT_MS
    ) -> "asyncio.Future[Message]":
        """Send a request; the future has the decoded reply, or KafkaError when there will be none."""
        future: asyncio.Future[Message] = self._loop.create_future()

        def done(view: memoryview | None, error: KafkaError | None) -> None:
            if future.done():
                return
            if view is None:
                assert error is not None
                future.set_exception(error)
                return
            try:
                future.set_result(decode_response(api, version, bytes(view)))
            except Malformed as malformed:
                future.set_exception(KafkaError(ErrorCode.CORRUPT_MESSAGE, str(malformed)))

        self.call(api, version, [encode_request(api, version, body)], done, timeout_ms)
        return future

    def request_raw(
        self, api: int, version: int, body: Data | Sequence[Data], timeout_ms: float = REQUEST_TIMEOUT_MS
    ) -> "asyncio.Future[memoryview]":
        """Send an encoded body, whole or in parts; the future has the body of the reply, which is the caller's."""
        future: asyncio.Future[memoryview] = self._loop.create_future()

        def done(view: memoryview | None, error: KafkaError | None) -> None:
            if future.done():
                return
            if view is None:
                assert error is not None
                future.set_exception(error)
            else:
                future.set_result(view)

        self.call(api, version, _parts(body), done, timeout_ms)
        return future

    def call(
        self,
        api: int,
        version: int,
        parts: Sequence[Data],
        done: Done,
        timeout_ms: float = REQUEST_TIMEOUT_MS,
    ) -> None:
        """As `request_raw`, with a callback in the turn of the loop in which the reply comes."""
        if self._closed:
            done(None, _unreachable(self.node_id, "the link is closed"))
            return
        if len(self._requests) >= REQUESTS_MAX or self._unsent >= UNSENT_BYTES_MAX:
            done(None, _unreachable(self.node_id, "too much is under way to it"))
            return
        self._correlation = (self._correlation + 1) & 0x7FFFFFFF
        deadline_ms = self._clock.monotonic_ms() + timeout_ms
        self._requests.append((self._correlation, _Request(api, version, deadline_ms, done)))
        if self._sweep is None:
            self._sweep = self._loop.call_later(SWEEP_S, self._check_deadlines)
        self._send(api, version, self._correlation, parts)

    def post(self, api: int, version: int, body: Data) -> bool:
        """Send what has no reply. False when it was not even tried: the link is down, or has too much to send."""
        if not self.up or self._unsent >= UNSENT_BYTES_MAX:
            self.open()
            return False
        self._send(api, version, 0, [body])
        return True

    def _send(self, api: int, version: int, correlation: int, parts: Sequence[Data]) -> None:
        head = encode_request_header(api, version, correlation, self._client_id)
        size = len(head) + sum([len(part) for part in parts])
        self._out.append(_LENGTH.pack(size) + head)
        self._out.extend(parts)
        self._unsent += size + 4
        if not self.up:
            self.open()
        elif not self._writing and not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    # -- connecting ----------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Be connected from now on, as far as it depends on this end."""
        self._wanted = True
        if self.up or self._closed or self._connecting is not None or self._retry is not None:
            return
        self._connecting = self._loop.create_task(self._connect())

    def readdress(self) -> None:
        """The address may have changed: when it did, connect anew."""
        known = self._addresses(self.node_id)
        if self.up and known and self._tried not in known:
            self._failures = self._turn = 0
            self._lose(_unreachable(self.node_id, "it moved to another address"), gone=False)
        elif self.up:
            self._look_later()
        elif self._wanted and self._retry is not None:
            self._retry.cancel()
            self._try_again()

    def _next_address(self) -> Address | None:
        """Where to connect to now, if that is known."""
        known = self._addresses(self.node_id)
        self._tried = known[self._turn % len(known)] if known else None
        return self._tried

    async def _connect(self) -> None:
        try:
            address = self._next_address()
            if address is None:
                raise OSError(errno.EADDRNOTAVAIL, "its address is not known")
            sock = await self._reach(address)
        except OSError as error:
            self._connecting = None
            gone = error.errno in GONE
            self._lose(_unreachable(self.node_id, str(error) or "it does not answer"), gone=gone)
            return
        self._connecting = None
        self._connected(sock)

    async def _reach(self, address: Address) -> socket.socket:
        """A socket that is connected to an address. OSError when that cannot be."""
        family, kind, protocol, _, resolved = (
            await self._loop.getaddrinfo(*address, type=socket.SOCK_STREAM)
        )[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.wait_for(self._loop.sock_connect(sock, resolved), CONNECT_TIMEOUT_S)
        except BaseException:
            sock.close()
            raise
        return sock

    def _look_later(self) -> None:
        """Try the first address in a while, if the link is connected to another."""
        elsewhere = self._tried not in self._addresses(self.node_id)[:1]
        if elsewhere and self._look is None and self._looking is None:
            self._look = self._loop.call_later(LOOK_S, self._look_at_first)

    def _look_at_first(self) -> None:
        self._look = None
        known = self._addresses(self.node_id)
        if known:
            self._looking = self._loop.create_task(self._go_over(known[0]))

    async def _go_over(self, address: Address) -> None:
        """Connect to the first address instead, if someone answers there."""
        try:
            (await self._reach(address)).close()
        except OSError:
            answers = False
        else:
            answers = True
        self._looking = None
        if answers and self.up and self._tried != address:
            self._turn = 0
            self._lose(_unreachable(self.node_id, "it is reached at another address"), gone=False)
        elif self.up:
            self._look_later()

    def _connected(self, sock: socket.socket) -> None:
        self._sock, self._fd = sock, sock.fileno()
        self._failures = 0
        self.up = True
        self._look_later()
        self._loop.add_reader(self._fd, self._on_readable)
        self._flush()
        if self.up:
            self._on_up(self.node_id)

    def _lose(self, error: KafkaError, *, gone: bool) -> None:
        """The connection is gone, or could not be made: whoever waits is told, and another is tried."""
        was_up = self.up
        self._drop_socket()
        requests, self._requests = self._requests, deque()
        if self._wanted and not self._closed:
            # At once after a loss: only a refusal tells that the process is gone.
            delay_ms = 0.0
            if not was_up:
                delay_ms = min(BACKOFF_MS * 2**self._failures, BACKOFF_MAX_MS) * (0.5 + self._chance.random())
                self._failures += 1
                self._turn += 1
            self._retry = self._loop.call_later(delay_ms / 1000, self._try_again)
        if was_up or gone:
            self._on_down(self.node_id, self._tried, gone)
        for _, request in requests:
            request.done(None, error)

    def _try_again(self) -> None:
        self._retry = None
        self.open()

    def _drop_socket(self) -> None:
        if self._sock is not None:
            self._loop.remove_reader(self._fd)
            if self._writing:
                self._loop.remove_writer(self._fd)
            self._sock.close()
        if self._look is not None:
            self._look.cancel()
        self._sock, self._look = None, None
        self.up = self._writing = False
        self._out.clear()
        self._unsent = 0
        self._head, self._frame, self._filled = b"", None, 0

    def close(self) -> None:
        """Be connected no more; whoever waits is told."""
        self._closed = True
        for timer in (self._retry, self._sweep):
            if timer is not None:
                timer.cancel()
        for task in (self._connecting, self._looking):
            if task is not None:
                task.cancel()
        self._drop_socket()
        requests, self._requests = self._requests, deque()
        for _, request in requests:
            request.done(None, _unreachable(self.node_id, "the link is closed"))

    def _check_deadlines(self) -> None:
        self._sweep = None
        now_ms = self._clock.monotonic_ms()
        if any(request.deadline_ms <= now_ms for _, request in self._requests):
            late = KafkaError(ErrorCode.REQUEST_TIMED_OUT, f"node {self.node_id} did not answer in time")
            if self.up:
                self._lose(late, gone=False)
            else:
                requests, self._requests = self._requests, deque()
                self._out.clear()
                self._unsent = 0
                for _, request in requests:
                    request.done(None, late)
        if self._requests and self._sweep is None:
            self._sweep = self._loop.call_later(SWEEP_S, self._check_deadlines)

    # -- the socket ----------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        self._flush_due = False
        sock, out = self._sock, self._out
        if sock is None:
            return
        try:
            while out:
                parts = [out[number] for number in range(min(len(out), GATHER_PARTS_MAX))]
                sent = sock.sendmsg(parts)
                self._unsent -= sent
                self.bytes_out += sent
                while sent:
                    first = out[0]
                    if sent >= len(first):
                        sent -= len(first)
                        out.popleft()
                    else:
                        out[0] = memoryview(first)[sent:]
                        sent = 0
                while out and not len(out[0]):
                    out.popleft()
        except (BlockingIOError, InterruptedError):
            if not self._writing:
                self._writing = True
                self._loop.add_writer(self._fd, self._flush)
            return
        except OSError as error:
            self._failed(error)
            return
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._fd)

    def _failed(self, error: OSError) -> None:
        self._lose(_unreachable(self.node_id, error.strerror or str(error)), gone=error.errno in GONE)

    def _on_readable(self) -> None:
        sock = self._sock
        if sock is None:
            return
        kept = len(self._head)
        target = _scratch[kept:] if self._frame is None else memoryview(self._frame)[self._filled :]
        try:
            count = sock.recv_into(target)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._failed(error)
            return
        self.bytes_in += count
        if count == 0:
            self._lose(_unreachable(self.node_id, "it closed the connection"), gone=False)
        elif self._frame is not None:
            self._filled += count
            if self._filled == len(self._frame):
                whole, self._frame = memoryview(self._frame), None
                self._take(whole)
        else:
            _scratch[:kept] = self._head
            self._cut(bytes(_scratch[: kept + count]))

    def _cut(self, data: bytes) -> None:
        """Frames out of what was received; `data` is not used again, so replies may keep parts of it."""
        view, position, end = memoryview(data), 0, len(data)
        self._head = b""
        while end - position >= 4:
            (size,) = _LENGTH.unpack_from(data, position)
            if not 0 <= size <= FRAME_BYTES_MAX:
                self._lose(_unreachable(self.node_id, f"it sent a frame of {size} bytes"), gone=False)
                return
            position += 4
            if position + size > end:
                self._frame = bytearray(size)
                self._filled = end - position
                self._frame[: self._filled] = view[position:end]
                return
            self._take(view[position : position + size])
            if not self.up:
                return
            position += size
        self._head = data[position:end]

    def _take(self, frame: memoryview) -> None:
        try:
            if not self._requests:
                raise Malformed("a reply that nobody asked for")
            correlation, request = self._requests[0]
            answered, body = parse_response_header(request.api, request.version, frame)
            if answered != correlation:
                raise Malformed(f"the reply to request {answered} instead of {correlation}")
        except Malformed as error:
            self._lose(_unreachable(self.node_id, f"it sent {error}"), gone=False)
            return
        self._requests.popleft()
        request.done(frame[body:], None)


def _parts(body: Data | Sequence[Data]) -> Sequence[Data]:
    return [body] if isinstance(body, bytes | bytearray | memoryview) else body


def _unreachable(node_id: int, why: str) -> KafkaError:
    return KafkaError(ErrorCode.NETWORK_EXCEPTION, f"node {node_id} cannot be reached: {why}")
