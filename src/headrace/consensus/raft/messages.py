"""What Raft nodes store and say to each other: entries, and the messages that carry them.

Values only, immutable, with one encoding (msgpack arrays) for whatever transport carries them; decoding checks types
and raises `Malformed`. Indexes count entries from 0 and ends are exclusive, so that an index is an offset of the
metadata partition, a log's `end` its log end offset, and a term its leader epoch. `end`, `start` and `commit` are
all "number of entries below". Created by the node and its leadership; read by them and by storage.
"""

from enum import IntEnum
from typing import Final, TypeAlias

import msgspec
from msgspec import Struct

ENTRY_OVERHEAD_BYTES: Final = 16  # what an entry is charged beside its data when sizes are bounded

Voters: TypeAlias = dict[int, str]
"""Who votes: node ids, each with the address that its node gave. The address is opaque here."""


class EntryKind(IntEnum):
    """Whose business an entry is."""

    DATA = 0
    """The application's."""
    LEADER = 1
    """The first entry of a leader's term; its data are the voters, restated."""
    VOTERS = 2
    """A change of the voters; its data are the new ones."""


class Entry(Struct, frozen=True, array_like=True, gc=False):
    """One entry of the log: opaque bytes, and the term of the leader that appended it."""

    term: int
    data: bytes
    kind: int = EntryKind.DATA

    @property
    def size(self) -> int:
        """What it counts for where bytes are bounded."""
        return len(self.data) + ENTRY_OVERHEAD_BYTES


class HardState(Struct, frozen=True, gc=False):
    """What a node must never forget: its term, and whom it voted for in it."""

    term: int = 0
    vote: int | None = None


class SnapshotMeta(Struct, frozen=True):
    """What a snapshot stands for: all entries below `end`, the last of them of `term`, and the voters then."""

    end: int = 0
    term: int = 0
    voters: Voters | None = None
    """None when no entry below `end` told: those the cluster was begun with."""


class Message(Struct, frozen=True, array_like=True):
    """From one node to another, in the sender's term."""

    to: int
    sender: int
    term: int


class VoteRequest(Message, frozen=True, tag=1):
    """A candidate asks for a vote; with `pre`, whether it would get one in `term`, which it has not entered yet."""

    end: int
    last_term: int
    pre: bool = False
    transfer: bool = False
    """The leader itself asked for this election, so it is no disturbance."""


class VoteReply(Message, frozen=True, tag=2):
    """The answer to a VoteRequest. A granted pre-vote has the term that was asked for."""

    granted: bool
    pre: bool = False


class Append(Message, frozen=True, tag=3):
    """Entries from index `start` on, good only behind an entry of `prev_term`; and how far the log is committed."""

    start: int
    prev_term: int
    commit: int
    entries: list[Entry]
    attempt: int = 0
    """Which attempt of the leader's to find where the logs agree; the reply tells it back."""


class AppendReply(Message, frozen=True, tag=4):
    """Either "my log is as yours below `end`", durably, or how far it may be so.

    In a refusal, the log here has nothing above `end` that could match, and the entry before `end` is of `last_term`:
    Kafka's diverging epoch and its end offset.
    """

    accepted: bool
    end: int
    last_term: int = 0
    attempt: int = 0


class Heartbeat(Message, frozen=True, tag=5):
    """The leader is there. `commit` is never past what the receiver is known to have; `round` 0 asks for no reply."""

    commit: int
    round: int


class HeartbeatReply(Message, frozen=True, tag=6):
    """The receiver is there too, and follows the sender of `round`."""

    round: int


class SnapshotChunk(Message, frozen=True, tag=7):
    """A piece of the leader's snapshot, which stands for all entries below `end`."""

    end: int
    last_term: int
    voters: Voters | None
    position: int
    data: bytes
    last: bool

    @property
    def meta(self) -> SnapshotMeta:
        """What the whole snapshot stands for."""
        return SnapshotMeta(self.end, self.last_term, self.voters)


class SnapshotReply(Message, frozen=True, tag=8):
    """How many bytes of the snapshot that reaches `end` the receiver has."""

    end: int
    position: int


class TransferNow(Message, frozen=True, tag=9):
    """The leader asks a voter that has all of the log to be elected at once."""


class Follow(Message, frozen=True, tag=10):
    """A node that no leader sends to asks whoever leads to be sent the log; who does not lead passes it on, once."""

    forwarded: bool = False


AnyMessage: TypeAlias = (
    VoteRequest
    | VoteReply
    | Append
    | AppendReply
    | Heartbeat
    | HeartbeatReply
    | SnapshotChunk
    | SnapshotReply
    | TransferNow
    | Follow
)


class Malformed(ValueError):
    """Bytes that are no message, or no voters."""


_encoder: Final = msgspec.msgpack.Encoder()
_message_decoder: Final = msgspec.msgpack.Decoder(AnyMessage)
_voters_decoder: Final = msgspec.msgpack.Decoder(Voters)


def encode_message(message: AnyMessage) -> bytes:
    """The bytes of a message, whole but not framed."""
    return _encoder.encode(message)


def decode_message(data: bytes | memoryview) -> AnyMessage:
    """The message that these bytes are; Malformed when they are none."""
    try:
        message: AnyMessage = _message_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Malformed(str(error)) from None
    return message


def wrap(cluster_id: str, message: bytes) -> bytes:
    """A message with the id of its sender's cluster before it, which is empty as long as that is not known."""
    name = cluster_id.encode()
    return bytes([len(name)]) + name + message


def unwrap(data: memoryview) -> tuple[str, memoryview]:
    """The cluster and the message of what `wrap` made."""
    length = data[0] if data else 0
    return str(data[1 : 1 + length], errors="replace"), data[1 + length :]


def encode_voters(voters: Voters) -> bytes:
    """The data of an entry, or the part of a snapshot, that says who votes."""
    return _encoder.encode(dict(sorted(voters.items())))


def decode_voters(data: bytes) -> Voters:
    """The voters in an entry's data."""
    try:
        voters = _voters_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Malformed(str(error)) from None
    if not voters:
        raise Malformed("a cluster without voters")
    return voters
