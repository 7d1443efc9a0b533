"""Frames over a socket: the one narrow edge between the client and the network.

Owns cutting the byte stream into frames (a 4-byte length, then that many bytes) and the state of the socket's
send buffer. Invariants: a frame is delivered once, whole, in order; after `on_closed` nothing more is
delivered; a frame is never larger than `FRAME_BYTES_MAX`. TLS comes in as another `Connector`, authentication
as requests that the connection sends first; tests give a scripted one. Called by `connection`.
"""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from struct import Struct
from typing import Protocol, TypeAlias

from headrace.client.errors import NOT_KAFKA_HINT, Disconnected, NotKafka

FRAME_BYTES_MAX = 256 * 1024 * 1024
SCRATCH_BYTES = 256 * 1024
KEPT_MAX = 2
KEPT_BYTES_MAX = 8 * 1024 * 1024 + 64 * 1024  # each; an answer of 8 MB and what is around it

_LENGTH = Struct(">i")


class FrameHandler(Protocol):
    """Who gets the frames of one stream."""

    def on_frame(self, frame: memoryview) -> None:
        """One frame without its length. The memory is the handler's to keep."""
        ...

    def on_closed(self, error: Exception | None) -> None:
        """The stream has ended; nothing follows."""
        ...


class FrameStream(Protocol):
    """One open stream of frames."""

    def send(self, *parts: bytes | bytearray | memoryview) -> None:
        """Queue one frame made of these parts; its length is put before it."""
        ...

    async def drain(self) -> None:
        """Return when the send buffer has room again. Raises Disconnected."""
        ...

    def close(self) -> None:
        """Send what is queued, then end the stream; `on_closed` follows."""
        ...

    def abort(self) -> None:
        """End the stream at once; `on_closed` follows."""
        ...


Connector: TypeAlias = Callable[[str, int, FrameHandler], Awaitable[FrameStream]]


class SocketStream(asyncio.BufferedProtocol):
    """A FrameStream over an asyncio transport.

    Small frames are cut from one scratch buffer, so that a burst of them costs one system call; a frame that does
    not fit is received straight into memory of its own. That memory is used again once nobody looks at it any more:
    memory that is new to the process costs more than what is received into it.
    """

    def __init__(self, handler: FrameHandler) -> None:
        self._handler = handler
        self._transport: asyncio.Transport | None = None
        self._scratch = bytearray(SCRATCH_BYTES)
        self._filled = 0
        self._large: bytearray | None = None
        self._large_bytes = 0
        self._large_filled = 0
        self._kept: list[bytearray] = []  # earlier frames' memory
        self._room: asyncio.Future[None] | None = None
        self._failure: Exception | None = None
        self._closed = False

    # -- sending ----------------------------------------------------------------------------------------------------

    def send(self, *parts: bytes | bytearray | memoryview) -> None:
        if self._transport is None or self._closed:
            raise Disconnected("the connection is closed")
        self._transport.writelines([_LENGTH.pack(sum(map(len, parts))), *parts])

    async def drain(self) -> None:
        if self._room is not None:
            await asyncio.shield(self._room)
        if self._closed:
            raise Disconnected("the connection is closed")

    def close(self) -> None:
        if self._transport is not None and not self._closed:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None and not self._closed:
            self._transport.abort()

    # -- asyncio's side ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "writelines")
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, error: Exception | None) -> None:
        self._closed = True
        self.resume_writing()
        self._handler.on_closed(self._failure or error)

    def pause_writing(self) -> None:
        if self._room is None:
            self._room = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._room is not None:
            if not self._room.done():
                self._room.set_result(None)
            self._room = None

    def get_buffer(self, size_hint: int) -> memoryview:
        if self._large is not None:
            return memoryview(self._large)[self._large_filled : self._large_bytes]
        return memoryview(self._scratch)[self._filled :]

    def buffer_updated(self, count: int) -> None:
        if self._large is not None:
            self._large_filled += count
            if self._large_filled == self._large_bytes:
                frame, self._large = self._large, None
                if len(frame) <= KEPT_BYTES_MAX:
                    self._kept = [*self._kept[-KEPT_MAX + 1 :], frame]
                self._handler.on_frame(memoryview(frame)[: self._large_bytes])
            return
        self._filled += count
        self._cut()

    def _cut(self) -> None:
        """Deliver every whole frame in the scratch buffer; keep what is left of the last."""
        pos = 0
        while self._filled - pos >= _LENGTH.size and not self._closed:
            (length,) = _LENGTH.unpack_from(self._scratch, pos)
            if not 0 <= length <= FRAME_BYTES_MAX:
                self._refuse(length)
                return
            start = pos + _LENGTH.size
            if start + length > self._filled:
                if _LENGTH.size + length > SCRATCH_BYTES:
                    self._large, self._large_bytes = self._room_for(length), length
                    self._large_filled = self._filled - start
                    self._large[: self._large_filled] = memoryview(self._scratch)[start : self._filled]
                    self._filled = 0
                    return
                break
            # A copy, because the scratch buffer is used again.
            self._handler.on_frame(memoryview(bytes(memoryview(self._scratch)[start : start + length])))
            pos = start + length
        if pos:
            rest = self._filled - pos
            self._scratch[:rest] = self._scratch[pos : self._filled]
            self._filled = rest

    def _room_for(self, length: int) -> bytearray:
        for kept in self._kept:
            if length <= len(kept) <= 2 * length and unseen(kept):
                self._kept.remove(kept)
                return kept
        return bytearray(length)

    def _refuse(self, length: int) -> None:
        self._failure = NotKafka(
            f"an answer claims {length & 0xFFFFFFFF} bytes, which no Kafka broker sends",
            NOT_KAFKA_HINT,
        )
        self._filled = 0
        self.abort()


def unseen(buffer: bytearray) -> bool:
    """Whether nobody has a view of it: only then it can change its length."""
    try:
        buffer.append(buffer.pop())
    except BufferError:
        return False
    return True


def socket_connector(
    *, timeout_ms: int, receive_buffer_bytes: int = -1, send_buffer_bytes: int = -1
) -> Connector:
    """Plain TCP. Raises Disconnected, with the reason, when the address cannot be reached in time."""

    async def connect(host: str, port: int, handler: FrameHandler) -> FrameStream:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                transport, stream = await loop.create_connection(lambda: SocketStream(handler), host, port)
        except TimeoutError:
            raise Disconnected(
                f"{host}:{port} did not accept a connection within {timeout_ms} ms",
                "check the address and firewall",
            ) from None
        except OSError as error:
            raise Disconnected(
                f"cannot connect to {host}:{port}: {_reason(error)}", _next_step(error)
            ) from None
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for option, size in (
                (socket.SO_RCVBUF, receive_buffer_bytes),
                (socket.SO_SNDBUF, send_buffer_bytes),
            ):
                if size > 0:
                    sock.setsockopt(socket.SOL_SOCKET, option, size)
        return stream

    return connect


def _next_step(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "check bootstrap.servers (-b on the command line), and the names that brokers advertise"
    return "is the broker running? 'headrace serve' starts one; bootstrap.servers (-b) names another address"


def _reason(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "the host name is not known"
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno).lower()
    return str(error)
