"""Messages come back from their bytes as they were, and bytes that are none are refused without harm."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.consensus.raft.messages import (
    Append,
    AppendReply,
    Entry,
    EntryKind,
    Follow,
    Heartbeat,
    HeartbeatReply,
    Malformed,
    SnapshotChunk,
    SnapshotReply,
    TransferNow,
    VoteReply,
    VoteRequest,
    decode_message,
    decode_voters,
    encode_message,
    encode_voters,
)

MESSAGES = [
    VoteRequest(1, 2, 3, 4, 5, True, False),
    VoteReply(1, 2, 3, True, False),
    Append(1, 2, 3, 4, 5, 6, [Entry(1, b"data"), Entry(2, b"", EntryKind.LEADER)], 7),
    AppendReply(1, 2, 3, False, 4, 5, 6),
    Heartbeat(1, 2, 3, 4, 5),
    HeartbeatReply(1, 2, 3, 4),
    SnapshotChunk(1, 2, 3, 4, 5, {1: "one:9092"}, 6, b"bytes", True),
    SnapshotChunk(1, 2, 3, 4, 5, None, 0, b"", False),
    SnapshotReply(1, 2, 3, 4, 5),
    TransferNow(1, 2, 3),
    Follow(1, 2, 3, True),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_as_it_was(message) -> None:
    decoded = decode_message(memoryview(encode_message(message)))
    assert decoded == message
    assert type(decoded) is type(message)


@given(st.sampled_from(MESSAGES), st.data())
def test_damaged_bytes_are_refused_or_are_another_message(message, data: st.DataObject) -> None:
    encoded = bytearray(encode_message(message))
    position = data.draw(st.integers(0, len(encoded) - 1))
    if data.draw(st.booleans()):
        del encoded[position:]
    else:
        encoded[position] ^= 1 << data.draw(st.integers(0, 7))
    try:
        decode_message(bytes(encoded))
    except Malformed:
        return


@given(st.binary(max_size=60))
def test_arbitrary_bytes_raise_nothing_but_malformed(data: bytes) -> None:
    for decode in (decode_message, decode_voters):
        try:
            decode(data)
        except Malformed:
            continue


def test_voters_come_back_and_no_voters_are_refused() -> None:
    assert decode_voters(encode_voters({3: "c", 1: "a"})) == {1: "a", 3: "c"}
    with pytest.raises(Malformed):
        decode_voters(encode_voters({}))
