"""End-of-transaction markers: the record of the control batch that commits or aborts a transaction.

Owns their bytes (key: version, type; value: version, coordinator epoch), as Kafka writes them. Called by
recovery, by the log and by whoever writes markers.
"""

import struct
from typing import NamedTuple

from headrace.base.errors import ErrorCode, KafkaError
from headrace.records.builder import build_batch

_MARKER_KEY = struct.Struct(">hh")
_MARKER_VALUE = struct.Struct(">hi")
_MARKER_ABORT = 0
_MARKER_COMMIT = 1


class EndTransactionMarker(NamedTuple):
    """The content of a control batch that ends a transaction."""

    committed: bool
    coordinator_epoch: int


def parse_marker(key: bytes | None, value: bytes | None) -> EndTransactionMarker | None:
    """The marker in a control record; None for other kinds, which have no producer state."""
    if key is None or len(key) < _MARKER_KEY.size:
        raise KafkaError(ErrorCode.INVALID_RECORD, "Invalid key size found for control record")
    version, kind = _MARKER_KEY.unpack_from(key)
    if version < 0:
        raise KafkaError(ErrorCode.INVALID_RECORD, f"Invalid version found for control record: {version}")
    if kind not in (_MARKER_ABORT, _MARKER_COMMIT):
        return None
    if value is None or len(value) < _MARKER_VALUE.size:
        raise KafkaError(ErrorCode.INVALID_RECORD, "Invalid value size found for end transaction marker")
    version, coordinator_epoch = _MARKER_VALUE.unpack_from(value)
    if version < 0:
        raise KafkaError(
            ErrorCode.INVALID_RECORD, f"Invalid version found for end transaction marker: {version}"
        )
    return EndTransactionMarker(kind == _MARKER_COMMIT, coordinator_epoch)


def encode_marker(marker: EndTransactionMarker) -> tuple[bytes, bytes]:
    """Key and value of the control record that holds `marker`."""
    key = _MARKER_KEY.pack(0, _MARKER_COMMIT if marker.committed else _MARKER_ABORT)
    return key, _MARKER_VALUE.pack(0, marker.coordinator_epoch)


def marker_batch(producer: tuple[int, int], marker: EndTransactionMarker, now_ms: int) -> bytes:
    """The control batch that ends the transaction of a producer, by its id and epoch."""
    key, value = encode_marker(marker)
    return build_batch(
        [(now_ms, key, value, ())],
        producer_id=producer[0],
        producer_epoch=producer[1],
        transactional=True,
        control=True,
    )
