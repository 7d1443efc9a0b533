"""Cables that can be cut: one small proxy before each broker of a test's cluster.

Owns the sockets between the nodes, and between clients and nodes, in a thread of its own. A node says who it is in the
first request of every connection (the client id of the protocol), so the proxy before broker B knows for each
connection whether it comes from node A or from a client, and can cut A from B while others still reach it.

Invariants. A cut is silent: connections stay open, bytes are held and not lost, and they arrive late when the cable is
mended, as TCP does it. Each direction has its own gate, so a cut may be one-way. When a broker is gone, connections
to it are reset, so that a dead process looks like one. Called by `headrace.testing.cluster`.
"""

import asyncio
import contextlib
import re
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

CHUNK_BYTES = 256 * 1024
FIRST_FRAME_BYTES_MAX = 4096
BACKLOG = 256
CALL_TIMEOUT_S = 30.0
CLIENTS = 0
"""The number that stands for whoever is not a node."""

_NODE = re.compile(rb"headrace-node-(\d+)")
_FRAME_HEAD = struct.Struct(">ihhih")  # length, API, version, correlation id, length of the client id
_RESET = struct.pack("ii", 1, 0)


class Cables:
    """The proxies of one cluster. `ports` are where nodes and clients connect, `targets` where brokers listen."""

    def __init__(self, ports: dict[int, int], targets: dict[int, int], host: str = "127.0.0.1") -> None:
        self._host = host
        self._targets = targets
        self._cut: set[tuple[int, int]] = set()
        self._mended: asyncio.Event | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._listeners: list[socket.socket] = []
        self._accepted: set[socket.socket] = (
            set()
        )  # not closed yet, whatever becomes of the task that carries them
        self._loop = asyncio.new_event_loop()
        for number, port in ports.items():
            listener = socket.create_server((host, port), backlog=BACKLOG)
            listener.setblocking(False)
            self._listeners.append(listener)
            self._loop.call_soon(self._loop.add_reader, listener, self._accept, listener, number)
        self._thread = threading.Thread(target=self._run, name="cables", daemon=True)
        self._thread.start()

    # -- what a test asks, from any thread ---------------------------------------------------------------------------

    def cut(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Hold everything that goes from the first to the second of each pair, from now on."""
        wanted = set(pairs)
        self._call(lambda: self._cut.update(wanted))

    def mend(self, pairs: Iterable[tuple[int, int]] | None = None) -> None:
        """Let everything through again, or what goes between these pairs."""
        wanted = None if pairs is None else set(pairs)

        def mend() -> None:
            self._cut -= self._cut if wanted is None else wanted
            if self._mended is not None:
                self._mended.set()
                self._mended = None

        self._call(mend)

    def close(self) -> None:
        """Reset every connection and end the thread."""
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_TIMEOUT_S)

    # -- inside the thread -------------------------------------------------------------------------------------------

    def _call(self, action: Callable[[], None]) -> None:
        done = threading.Event()

        def run() -> None:
            action()
            done.set()

        self._loop.call_soon_threadsafe(run)
        if not done.wait(CALL_TIMEOUT_S):
            raise TimeoutError("the thread of the cables does not answer")

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            for listener in self._listeners:
                self._loop.remove_reader(listener)
            for task in self._tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        finally:
            for sock in (*self._listeners, *self._accepted):
                sock.close()
            self._loop.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _accept(self, listener: socket.socket, number: int) -> None:
        """Take one connection, in one step: a task that is cancelled while it accepts would lose the socket."""
        try:
            client, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        client.setblocking(False)
        self._accepted.add(client)
        self._spawn(self._carry(client, number))

    async def _carry(self, client: socket.socket, number: int) -> None:
        broker = socket.socket()
        try:
            broker.setblocking(False)
            for sock in (client, broker):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            first, sender = await self._first_frame(client)
            await self._open(sender, number)
            await self._loop.sock_connect(broker, (self._host, self._targets[number]))
            await self._loop.sock_sendall(broker, first)
            await self._both_ways(client, broker, sender, number)
        except OSError:
            pass
        finally:
            for sock in (client, broker):
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                sock.close()
            self._accepted.discard(client)

    async def _first_frame(self, client: socket.socket) -> tuple[bytes, int]:
        """What the connection begins with, up to the client id, and the node that it names."""
        first = b""
        while len(first) < FIRST_FRAME_BYTES_MAX:
            chunk = await self._loop.sock_recv(client, CHUNK_BYTES)
            if not chunk:
                raise ConnectionResetError
            first += chunk
            if len(first) >= _FRAME_HEAD.size:
                id_bytes = max(0, _FRAME_HEAD.unpack_from(first)[4])
                if len(first) >= _FRAME_HEAD.size + id_bytes:
                    named = _NODE.match(first[_FRAME_HEAD.size : _FRAME_HEAD.size + id_bytes])
                    return first, int(named[1]) if named else CLIENTS
        return first, CLIENTS

    async def _both_ways(
        self, client: socket.socket, broker: socket.socket, sender: int, number: int
    ) -> None:
        ways = [
            self._loop.create_task(self._pump(client, broker, sender, number)),
            self._loop.create_task(self._pump(broker, client, number, sender)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _pump(self, source: socket.socket, sink: socket.socket, sender: int, receiver: int) -> None:
        while chunk := await self._loop.sock_recv(source, CHUNK_BYTES):
            await self._open(sender, receiver)
            await self._loop.sock_sendall(sink, chunk)
        await self._open(sender, receiver)  # the news that a connection ended is held by a cut, too

    async def _open(self, sender: int, receiver: int) -> None:
        """Wait while the way from one to the other is cut."""
        while (sender, receiver) in self._cut:
            if self._mended is None:
                self._mended = asyncio.Event()
            await self._mended.wait()
