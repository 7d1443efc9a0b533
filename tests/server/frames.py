"""Real frames to break: what real clients send, recorded by a proxy between them and a broker, and a mutator for
them.
"""

import contextlib
import random
import socket
import threading
from struct import pack, unpack

from headrace.wire.apis import Api
from headrace.wire.fetch import REPLICA_STATE_FROM
from headrace.wire.headers import parse_request_header

EXTREMES = (0, 1, -1, 0x7F, 0x80, 0xFF, 0x7FFF, -0x8000, 0x7FFFFFFF, -0x80000000, 0x10000, 100_000_000)


class RecordingProxy:
    """Passes bytes between clients and a broker and keeps every frame that the clients sent."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.frames: list[bytes] = []
        self._target: tuple[str, int] | None = None
        self._sockets: list[socket.socket] = [self._listener]
        self._pumps: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)

    def start(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._accepting.start()

    def close(self) -> None:
        self._shut(self._listener)
        self._accepting.join()
        for sock in self._sockets:
            self._shut(sock)
        for thread in self._pumps:
            thread.join()
        for sock in self._sockets:
            sock.close()

    def _shut(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(client)
            try:
                server = socket.create_connection(self._target)
            except OSError:
                continue
            self._sockets.append(server)
            for ends in ((client, server, True), (server, client, False)):
                thread = threading.Thread(target=self._pump, args=ends, daemon=True)
                self._pumps.append(thread)
                thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, record: bool) -> None:
        held = b""
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
                if record:
                    held = self._keep(held + data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def _keep(self, data: bytes) -> bytes:
        while len(data) >= 4:
            (size,) = unpack(">i", data[:4])
            if len(data) < 4 + size:
                break
            self.frames.append(data[4 : 4 + size])
            data = data[4 + size :]
        return data


def impatient(frame: bytes) -> bytes:
    """The same frame, but a fetch asks not to wait: a fuzzer that waits for data at the end of a log gets nowhere."""
    header = parse_request_header(frame)
    if header.api != Api.FETCH:
        return frame
    at = header.body + (0 if header.version >= REPLICA_STATE_FROM else 4)
    return frame[:at] + bytes(4) + frame[at + 4 :]


def mutate(frame: bytes, chance: random.Random) -> tuple[bytes, bool]:
    """A broken copy of a frame with its length prefix, and whether that prefix tells the truth."""
    raw = bytearray(frame)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        at = chance.randrange(len(raw)) if raw else 0
        match chance.randrange(8):
            case 0 if raw:
                raw[at] ^= 1 << chance.randrange(8)
            case 1 if raw:
                raw[at] = chance.randrange(256)
            case 2:
                width, kind = chance.choice(((1, "b"), (2, "h"), (4, "i"), (8, "q")))
                value = chance.choice(EXTREMES) & ((1 << (8 * width)) - 1)
                value -= (value >> (8 * width - 1)) << (8 * width)
                raw[at : at + width] = pack(">" + kind, value)
            case 3:
                del raw[at:]
            case 4:
                del raw[at : at + chance.randrange(1, 9)]
            case 5:
                raw[at:at] = chance.randbytes(chance.randrange(1, 9))
            case 6:
                raw[at:at] = raw[at : at + chance.randrange(1, 65)]
            case 7:
                raw[at : at + 5] = b"\xff\xff\xff\xff\x0f"
    size = len(raw)
    if chance.randrange(50) == 0:
        size = chance.choice((-1, 0, 3, size - 1, size + 1, 0x7FFFFFFF, 104_857_601))
    return pack(">i", size) + raw, size == len(raw)
