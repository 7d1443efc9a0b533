"""Cuts a byte stream into frames: a four-byte length, then that many bytes. No socket: bytes are received into its
memory.

The owner asks `target()` where to receive, receives there, and calls `received(n)`, which returns the frames that are
now whole. Small frames are parsed in place in one scratch buffer that all connections of a loop share, so an idle
connection holds no memory; a frame that is cut by the end of the scratch gets a buffer of its own and the rest of it
is received straight into that. The memory of a frame is good until `release()`: whoever keeps bytes longer copies
them.

A frame's buffer grows with what has arrived, not with what was announced, so a client that claims 100 MB and sends
nothing costs nothing.
"""

from collections.abc import Callable
from struct import Struct

from headrace.wire.primitives import Malformed

SCRATCH_BYTES = 64 * 1024
BUFFER_START_BYTES = 1024 * 1024
POOL_BYTES_MAX = 16 * 1024 * 1024

_LENGTH = Struct(">i")


class BufferPool:
    """Buffers for large frames, reused: zeroing a fresh megabyte for each request would cost more than its append."""

    __slots__ = ("_free", "_held", "_returned", "lent")

    def __init__(self, returned: Callable[[], None] = lambda: None) -> None:
        self._free: list[bytearray] = []
        self._held = 0
        self._returned = returned  # called whenever a buffer comes back
        self.lent = 0  # bytes of buffers in use

    def take(self, size: int) -> bytearray:
        """A buffer of at least `size` bytes."""
        for position in range(len(self._free) - 1, -1, -1):
            if len(self._free[position]) >= size:
                buffer = self._free.pop(position)
                self._held -= len(buffer)
                self.lent += len(buffer)
                return buffer
        self.lent += size
        return bytearray(size)

    def give(self, buffer: bytearray) -> None:
        """Take a buffer back; it is kept while the pool has room."""
        self.lent -= len(buffer)
        if self._held + len(buffer) <= POOL_BYTES_MAX:
            self._free.append(buffer)
            self._held += len(buffer)
        self._returned()


class FrameCutter:
    """One connection's incoming half: bytes in, whole frames out."""

    __slots__ = ("_buffer", "_filled", "_head", "_pool", "_scratch", "_size", "_size_max", "_spent")

    def __init__(self, scratch: memoryview, pool: BufferPool, size_max: int) -> None:
        self._scratch = scratch
        self._pool = pool
        self._size_max = size_max
        self._head = b""  # what came of a length prefix that was cut
        self._buffer: bytearray | None = None  # the frame under way, when it is cut
        self._size = 0
        self._filled = 0
        self._spent: bytearray | None = None  # a frame handed out, to go back to the pool

    @property
    def buffered(self) -> int:
        """Bytes held for a frame that is not whole yet."""
        return self._filled if self._buffer is not None else len(self._head)

    def target(self) -> memoryview:
        """Where the next bytes are to be received."""
        if self._buffer is None:
            kept = len(self._head)
            if kept:
                self._scratch[:kept] = self._head
            return self._scratch[kept:]
        if self._filled == len(self._buffer):
            self._grow()
        return memoryview(self._buffer)[self._filled : self._size]

    def received(self, count: int) -> list[memoryview]:
        """The frames made whole by `count` bytes received at `target()`. Raises Malformed for an impossible length."""
        if self._buffer is not None:
            self._filled += count
            if self._filled < self._size:
                return []
            whole = memoryview(self._buffer)[: self._size]
            self._spent, self._buffer = self._buffer, None
            return [whole]
        scratch, pos, end = self._scratch, 0, len(self._head) + count
        self._head = b""
        frames: list[memoryview] = []
        while end - pos >= 4:
            (size,) = _LENGTH.unpack_from(scratch, pos)
            if not 0 <= size <= self._size_max:
                raise Malformed(f"a frame of {size} bytes; the limit is {self._size_max}")
            if pos + 4 + size > end:
                self._begin(size, scratch[pos + 4 : end])
                return frames
            frames.append(scratch[pos + 4 : pos + 4 + size])
            pos += 4 + size
        self._head = bytes(scratch[pos:end])
        return frames

    def release(self) -> None:
        """Whoever got frames is done with them: their memory may be used again."""
        spent, self._spent = self._spent, None
        if spent is not None:
            self._pool.give(spent)

    def close(self) -> None:
        """Give back what is held; nothing more will be received."""
        for buffer in (self._buffer, self._spent):
            if buffer is not None:
                self._pool.give(buffer)
        self._buffer = self._spent = None

    def _begin(self, size: int, first: memoryview) -> None:
        self._buffer = self._pool.take(min(size, BUFFER_START_BYTES))
        self._size, self._filled = size, len(first)
        self._buffer[: len(first)] = first

    def _grow(self) -> None:
        assert self._buffer is not None
        larger = self._pool.take(min(self._size, 2 * len(self._buffer)))
        larger[: self._filled] = memoryview(self._buffer)[: self._filled]
        self._pool.give(self._buffer)
        self._buffer = larger
