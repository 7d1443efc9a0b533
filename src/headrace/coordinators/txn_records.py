"""The records of `__transaction_state`, byte for byte as Kafka writes them.

A key is a version (0) and a transactional id; a value has version 1, the flexible one, and version 0 is read too.
Invariant: what is encoded here decodes to the same; a value that cannot be read raises KafkaError. The shard's replay
and its steps call it.
"""

import struct
from collections.abc import Mapping
from typing import Final, NamedTuple

from headrace.base.errors import ErrorCode, KafkaError
from headrace.coordinators.txn_states import TxnState
from headrace.wire.primitives import Malformed, read_uvarint, write_uvarint

KEY_VERSION: Final = 0
VALUE_VERSION: Final = 1
FLEXIBLE_FROM: Final = 1
NO_PRODUCER_ID: Final = -1
NO_EPOCH: Final = -1

TAG_PREVIOUS_PRODUCER_ID, TAG_NEXT_PRODUCER_ID, TAG_CLIENT_VERSION, TAG_NEXT_PRODUCER_EPOCH = 0, 1, 2, 3

_SHORT: Final = struct.Struct(">h")
_INT: Final = struct.Struct(">i")
_LONG: Final = struct.Struct(">q")
_HEAD: Final = struct.Struct(">hqhib")
_TIMES: Final = struct.Struct(">qq")


class TxnValue(NamedTuple):
    """What is stored of a transactional id."""

    producer_id: int
    previous_producer_id: int
    next_producer_id: int
    producer_epoch: int
    timeout_ms: int
    state: TxnState
    partitions: frozenset[tuple[str, int]]
    last_update_ms: int
    start_ms: int
    client_version: int
    """The transaction.version that the client used for the transaction at hand."""


def txn_key(transactional_id: str) -> bytes:
    raw = transactional_id.encode()
    return _SHORT.pack(KEY_VERSION) + _SHORT.pack(len(raw)) + raw


def txn_value(value: TxnValue) -> bytes:
    out = bytearray(
        _HEAD.pack(VALUE_VERSION, value.producer_id, value.producer_epoch, value.timeout_ms, value.state)
    )
    if value.state is TxnState.EMPTY:
        write_uvarint(out, 0)  # null
    else:
        topics: dict[str, list[int]] = {}
        for topic, index in sorted(value.partitions):
            topics.setdefault(topic, []).append(index)
        write_uvarint(out, len(topics) + 1)
        for topic, indexes in topics.items():
            raw = topic.encode()
            write_uvarint(out, len(raw) + 1)
            out += raw
            write_uvarint(out, len(indexes) + 1)
            out += struct.pack(f">{len(indexes)}i", *indexes)
            out.append(0)
    out += _TIMES.pack(value.last_update_ms, value.start_ms)
    tags: list[tuple[int, bytes]] = []
    if value.previous_producer_id != NO_PRODUCER_ID:
        tags.append((TAG_PREVIOUS_PRODUCER_ID, _LONG.pack(value.previous_producer_id)))
    if value.next_producer_id != NO_PRODUCER_ID:
        tags.append((TAG_NEXT_PRODUCER_ID, _LONG.pack(value.next_producer_id)))
    if value.client_version:
        tags.append((TAG_CLIENT_VERSION, _SHORT.pack(value.client_version)))
    write_uvarint(out, len(tags))
    for tag, data in tags:
        write_uvarint(out, tag)
        write_uvarint(out, len(data))
        out += data
    return bytes(out)


def decode_txn_key(key: bytes) -> str | None:
    """The transactional id; None for a key of another kind."""
    try:
        if _SHORT.unpack_from(key)[0] != KEY_VERSION:
            return None
        length: int = _SHORT.unpack_from(key, 2)[0]
        if length < 0 or 4 + length != len(key):
            raise ValueError("key of the wrong length")
        return key[4:].decode()
    except (struct.error, ValueError) as error:
        raise _corrupt(error) from None


def decode_txn_value(data: bytes) -> TxnValue:
    """What a record says of its transactional id. KafkaError when it says nothing that makes sense."""
    try:
        return _decode(data)
    except (struct.error, ValueError, Malformed) as error:
        raise _corrupt(error) from None


def _decode(data: bytes) -> TxnValue:
    version, producer_id, epoch, timeout_ms, state = _HEAD.unpack_from(data)
    if version not in (0, VALUE_VERSION):
        raise ValueError(f"version {version}")
    flexible = version >= FLEXIBLE_FROM
    pos = _HEAD.size
    partitions: set[tuple[str, int]] = set()
    count, pos = _length(data, pos, flexible)
    for _ in range(max(count, 0)):
        size, pos = _text_length(data, pos, flexible)
        topic = data[pos : pos + size].decode()
        number, pos = _length(data, pos + size, flexible)
        if number < 0 or number * 4 > len(data) - pos:
            raise ValueError("more partitions than bytes")
        partitions.update([(topic, index) for index in struct.unpack_from(f">{number}i", data, pos)])
        pos += 4 * number
        if flexible:
            _, pos = _tags(data, pos)
    last_update_ms, start_ms = _TIMES.unpack_from(data, pos)
    tags: dict[int, bytes] = {}
    if flexible:
        tags, _ = _tags(data, pos + _TIMES.size)
    return TxnValue(
        producer_id,
        _tagged(tags, TAG_PREVIOUS_PRODUCER_ID, _LONG, NO_PRODUCER_ID),
        _tagged(tags, TAG_NEXT_PRODUCER_ID, _LONG, NO_PRODUCER_ID),
        epoch,
        timeout_ms,
        TxnState(state),
        frozenset(partitions),
        last_update_ms,
        start_ms,
        _tagged(tags, TAG_CLIENT_VERSION, _SHORT, 0),
    )


def _length(data: bytes, pos: int, flexible: bool) -> tuple[int, int]:
    if not flexible:
        return _INT.unpack_from(data, pos)[0], pos + 4
    length, pos = read_uvarint(data, pos)
    return length - 1, pos


def _text_length(data: bytes, pos: int, flexible: bool) -> tuple[int, int]:
    size, pos = _length(data, pos, True) if flexible else (_SHORT.unpack_from(data, pos)[0], pos + 2)
    if size < 0 or size > len(data) - pos:
        raise ValueError("text longer than its record")
    return size, pos


def _tags(data: bytes, pos: int) -> tuple[dict[int, bytes], int]:
    count, pos = read_uvarint(data, pos)
    tags: dict[int, bytes] = {}
    for _ in range(count):
        tag, pos = read_uvarint(data, pos)
        size, pos = read_uvarint(data, pos)
        if size > len(data) - pos:
            raise ValueError("tagged field longer than its record")
        tags[tag] = data[pos : pos + size]
        pos += size
    return tags, pos


def _tagged(tags: Mapping[int, bytes], tag: int, kind: struct.Struct, default: int) -> int:
    return default if tag not in tags else int(kind.unpack(tags[tag])[0])


def _corrupt(error: Exception) -> KafkaError:
    return KafkaError(ErrorCode.CORRUPT_MESSAGE, f"a record of __transaction_state cannot be read: {error}")
