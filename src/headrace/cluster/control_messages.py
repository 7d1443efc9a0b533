"""What brokers and the active controller say to each other about registration, life and load.

Values only, in msgpack, under API keys of Headrace's own: Kafka's messages for this have no room for an incarnation's
load. Decoding raises `Malformed`. Sent by the registration of a broker, answered by the active controller.
"""

from typing import TypeVar

import msgspec

T = TypeVar("T")


class Malformed(ValueError):
    """Bytes that are not the message they should be."""


class PartitionLoad(msgspec.Struct, frozen=True, array_like=True):
    """What one partition has to do with its broker's load: what would go if it went."""

    topic: str
    index: int
    size_bytes: int = 0
    bytes_in: float = 0.0
    """A second, as all the rates; from producers, so nothing where the replica follows."""
    bytes_out: float = 0.0
    messages_in: float = 0.0


class BrokerLoad(msgspec.Struct, frozen=True, array_like=True):
    """What a broker has to do, measured over the last moments."""

    cpu: float = 0.0
    """Of one core."""
    memory_bytes: int = 0
    disk_bytes: int = 0
    disk_free_bytes: int = -1
    bytes_in: float = 0.0
    """A second, as all the rates."""
    bytes_out: float = 0.0
    messages_in: float = 0.0
    partitions: int = 0
    leaders: int = 0
    heaviest: tuple[PartitionLoad, ...] = ()
    """The few partitions that most of it comes from, so that the report stays small however many there are."""


class RegisterRequest(msgspec.Struct, frozen=True, array_like=True):
    """A process says that it is a broker, and where it is reached."""

    node_id: int
    incarnation: bytes
    host: str
    port: int
    rack: str | None
    cluster_id: str
    """Of its data directory; empty when that is new."""


class RegisterReply(msgspec.Struct, frozen=True, array_like=True):
    """The epoch it is registered under, to be seen in the image once that has everything below `offset`."""

    error: int
    message: str = ""
    leader: int = -1
    """Whom to ask instead, where the error is that this is not the active controller."""
    epoch: int = -1
    offset: int = -1
    cluster_id: str = ""


class HeartbeatRequest(msgspec.Struct, frozen=True, array_like=True):
    """A broker is there, under the epoch it registered with, and has the metadata below `offset`."""

    node_id: int
    epoch: int
    offset: int
    want_shutdown: bool = False
    load: BrokerLoad | None = None
    want_fence: bool = False
    """It is still opening its logs: it is there, and must not lead yet."""


class HeartbeatReply(msgspec.Struct, frozen=True, array_like=True):
    """What the controller makes of it. Changes that it brought are in the image below `offset`."""

    error: int
    message: str = ""
    leader: int = -1
    fenced: bool = True
    may_stop: bool = False
    offset: int = -1
    silence_ms: float = 0.0
    """For how long the controller has heard of no majority, and so may be none any more."""


class LoadsReply(msgspec.Struct, frozen=True, array_like=True):
    """What the active controller last heard of each broker's load."""

    error: int
    leader: int = -1
    """Whom to ask instead, where the error is that this is not the active controller."""
    loads: dict[int, BrokerLoad] = {}


encode = msgspec.msgpack.Encoder().encode


def decode(kind: type[T], data: bytes | memoryview) -> T:
    """The message of a kind that these bytes are."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Malformed(str(error)) from None
