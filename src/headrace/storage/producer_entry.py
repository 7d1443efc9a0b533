"""One producer as a partition knows it, and the file that keeps all of them: Kafka's producer snapshot.

Owns the entry (epoch, last batches, open transaction) and the bytes of a `.snapshot` file, which
`kafka-dump-log` reads. Invariant: a snapshot that does not check out raises `CorruptSnapshot` before anything
is used of it. `ProducerState` is the only caller.
"""

import struct
from collections import deque
from collections.abc import Collection
from typing import NamedTuple

from headrace.records.batch import NO_PRODUCER_EPOCH, NO_SEQUENCE, NO_TIMESTAMP, add_sequence
from headrace.records.crc import crc32c

BATCHES_REMEMBERED = 5
"""As Kafka: the most requests that an idempotent producer may have in flight on one connection."""

NO_OFFSET = -1

# The `.snapshot` file: version int16, crc uint32 over all that follows it, count int32, then the entries.
_SNAPSHOT_VERSION = 1
_SNAPSHOT_HEAD = struct.Struct(">hIi")
_SNAPSHOT_CRC_END = 6
_SNAPSHOT_ENTRY = struct.Struct(">qhiqiqiq")


class CorruptSnapshot(Exception):
    """A snapshot file that cannot be trusted; the table is rebuilt from the log instead."""


class RememberedBatch(NamedTuple):
    """One of a producer's last batches, in the terms that the snapshot stores."""

    last_sequence: int
    last_offset: int
    offset_delta: int
    timestamp: int

    @property
    def first_sequence(self) -> int:
        return add_sequence(self.last_sequence, -self.offset_delta)

    @property
    def first_offset(self) -> int:
        return self.last_offset - self.offset_delta


class ProducerEntry:
    """One producer, as this partition knows it."""

    __slots__ = (
        "batches",
        "coordinator_epoch",
        "epoch",
        "last_timestamp",
        "producer_id",
        "transaction_first_offset",
    )

    def __init__(self, producer_id: int) -> None:
        self.producer_id = producer_id
        self.epoch = NO_PRODUCER_EPOCH
        self.coordinator_epoch = -1
        self.last_timestamp = NO_TIMESTAMP
        self.transaction_first_offset = NO_OFFSET
        self.batches: deque[RememberedBatch] = deque(maxlen=BATCHES_REMEMBERED)

    @property
    def last_sequence(self) -> int:
        return self.batches[-1].last_sequence if self.batches else NO_SEQUENCE

    @property
    def last_offset(self) -> int:
        return self.batches[-1].last_offset if self.batches else NO_OFFSET

    def state(self) -> tuple[int, int, int, int, int, tuple[RememberedBatch, ...]]:
        """All of it as a value, to compare tables."""
        return (
            self.producer_id,
            self.epoch,
            self.coordinator_epoch,
            self.last_timestamp,
            self.transaction_first_offset,
            tuple(self.batches),
        )

    def find_duplicate(self, base_sequence: int, last_sequence: int) -> RememberedBatch | None:
        for batch in self.batches:
            if batch.last_sequence == last_sequence and batch.first_sequence == base_sequence:
                return batch
        return None


def encode_snapshot(producers: Collection[ProducerEntry]) -> bytes:
    """The content of a snapshot file; of each producer's batches only the last is in it."""
    parts = [_SNAPSHOT_HEAD.pack(_SNAPSHOT_VERSION, 0, len(producers))]
    for entry in producers:
        last = entry.batches[-1] if entry.batches else None
        parts.append(
            _SNAPSHOT_ENTRY.pack(
                entry.producer_id,
                entry.epoch,
                last.last_sequence if last else NO_SEQUENCE,
                last.last_offset if last else NO_OFFSET,
                last.offset_delta if last else 0,
                entry.last_timestamp,
                entry.coordinator_epoch,
                entry.transaction_first_offset,
            )
        )
    data = bytearray(b"".join(parts))
    struct.pack_into(">I", data, 2, crc32c(memoryview(data)[_SNAPSHOT_CRC_END:]))
    return bytes(data)


def decode_snapshot(data: bytes) -> dict[int, ProducerEntry]:
    """The entries of a snapshot file, by producer id."""
    if len(data) < _SNAPSHOT_HEAD.size:
        raise CorruptSnapshot(f"snapshot of {len(data)} bytes is shorter than its head")
    version, crc, count = _SNAPSHOT_HEAD.unpack_from(data)
    if version != _SNAPSHOT_VERSION:
        raise CorruptSnapshot(f"snapshot contained an unknown file version {version}")
    if count < 0 or len(data) != _SNAPSHOT_HEAD.size + count * _SNAPSHOT_ENTRY.size:
        raise CorruptSnapshot(f"snapshot of {len(data)} bytes cannot hold {count} entries")
    if crc != crc32c(memoryview(data)[_SNAPSHOT_CRC_END:]):
        raise CorruptSnapshot("snapshot is corrupt (CRC is no longer valid)")
    entries: dict[int, ProducerEntry] = {}
    for fields in _SNAPSHOT_ENTRY.iter_unpack(memoryview(data)[_SNAPSHOT_HEAD.size :]):
        producer_id, epoch, last_sequence, last_offset, delta, timestamp, coordinator_epoch, first_offset = (
            fields
        )
        entry = entries[producer_id] = ProducerEntry(producer_id)
        entry.epoch = epoch
        entry.coordinator_epoch = coordinator_epoch
        entry.last_timestamp = timestamp
        entry.transaction_first_offset = first_offset
        if last_offset >= 0:
            entry.batches.append(RememberedBatch(last_sequence, last_offset, delta, timestamp))
    return entries
