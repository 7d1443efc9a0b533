"""Frames come out whole and in order however the bytes were cut on the way in."""

from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.wire.frames import BufferPool, FrameCutter
from headrace.wire.primitives import Malformed


def feed(cutter: FrameCutter, data: bytes, cuts: list[int]) -> list[bytes]:
    frames, pos, cuts = [], 0, [*cuts, 1 << 30]
    while pos < len(data):
        target = cutter.target()
        count = min(len(target), max(1, cuts[0]), len(data) - pos)
        cuts = cuts[1:] or [1 << 30]
        target[:count] = data[pos : pos + count]
        frames += [bytes(frame) for frame in cutter.received(count)]
        cutter.release()
        pos += count
    return frames


@given(
    st.lists(st.one_of(st.binary(max_size=40), st.integers(60, 3_000_000).map(bytes)), max_size=6),
    st.lists(st.integers(1, 5000), max_size=60),
    st.integers(8, 300),
)
def test_frames_come_out_whole_whatever_the_cuts(payloads, cuts, scratch_size):
    cutter = FrameCutter(memoryview(bytearray(scratch_size)), BufferPool(), 1 << 24)
    data = b"".join(pack(">i", len(p)) + p for p in payloads)
    assert feed(cutter, data, cuts) == payloads
    assert cutter.buffered == 0


@pytest.mark.parametrize("length", [-1, 1001, 2**31 - 1])
def test_an_impossible_length_is_refused_at_once(length):
    cutter = FrameCutter(memoryview(bytearray(64)), BufferPool(), 1000)
    with pytest.raises(Malformed):
        feed(cutter, pack(">i", length), [])


def test_a_frame_that_is_only_announced_takes_little_memory():
    cutter = FrameCutter(memoryview(bytearray(64)), BufferPool(), 100_000_000)
    feed(cutter, pack(">i", 100_000_000) + bytes(10), [])
    assert len(cutter.target()) <= 1024 * 1024
