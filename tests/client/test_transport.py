"""Frames come out whole and in order, however the bytes are cut on the way."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.client.errors import NotKafka
from headrace.client.transport import FRAME_BYTES_MAX, SCRATCH_BYTES, SocketStream


class Collector:
    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.closed: list[Exception | None] = []

    def on_frame(self, frame: memoryview) -> None:
        self.frames.append(bytes(frame))

    def on_closed(self, error: Exception | None) -> None:
        self.closed.append(error)


class Socket:
    """What the stream needs of asyncio's transport."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.aborted = False

    def writelines(self, parts: list[bytes]) -> None:
        self.written.extend(bytes(part) for part in parts)

    def abort(self) -> None:
        self.aborted = True


def feed(stream: SocketStream, data: bytes, cuts: list[int]) -> None:
    """Deliver bytes as a socket would: at most as many as there is room for, at most so many at a time."""
    pos, turn = 0, 0
    while pos < len(data):
        room = stream.get_buffer(-1)
        size = min(len(room), len(data) - pos, cuts[turn % len(cuts)])
        room[:size] = data[pos : pos + size]
        stream.buffer_updated(size)
        pos += size
        turn += 1


sizes = st.one_of(
    st.integers(0, 40), st.sampled_from([SCRATCH_BYTES - 4, SCRATCH_BYTES - 3, SCRATCH_BYTES, 600_000])
)


@given(st.lists(sizes, max_size=12), st.lists(st.integers(1, 300_000), min_size=1, max_size=8))
def test_frames_survive_any_cutting_of_the_stream(lengths: list[int], cuts: list[int]) -> None:
    frames = [bytes([at % 251]) * length for at, length in enumerate(lengths)]
    data = b"".join(len(frame).to_bytes(4, "big") + frame for frame in frames)
    collector = Collector()
    cuts = [max(cut, len(data) // 2_000 + 1) for cut in cuts]  # keep the number of steps within reason
    feed(SocketStream(collector), data, cuts)
    assert collector.frames == frames


@given(st.integers(1, 7))
def test_small_frames_survive_delivery_byte_by_byte(cut: int) -> None:
    frames = [b"", b"a", b"bc", bytes(300), b"", b"end"]
    data = b"".join(len(frame).to_bytes(4, "big") + frame for frame in frames)
    collector = Collector()
    feed(SocketStream(collector), data, [cut])
    assert collector.frames == frames


def test_a_length_that_no_broker_sends_ends_the_connection() -> None:
    for claim in (FRAME_BYTES_MAX + 1, -1, int.from_bytes(b"HTTP", "big")):
        collector, socket = Collector(), Socket()
        stream = SocketStream(collector)
        stream.connection_made(socket)  # type: ignore[arg-type]
        feed(stream, (claim & 0xFFFFFFFF).to_bytes(4, "big") + b"rest", [100])
        assert socket.aborted
        stream.connection_lost(None)
        (error,) = collector.closed
        assert isinstance(error, NotKafka)
        assert collector.frames == []


def test_parts_of_a_request_leave_as_one_frame() -> None:
    socket = Socket()
    stream = SocketStream(Collector())
    stream.connection_made(socket)  # type: ignore[arg-type]
    stream.send(b"ab", memoryview(b"cde"))
    assert b"".join(socket.written) == b"\x00\x00\x00\x05abcde"
