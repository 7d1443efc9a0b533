"""What a fetch brought for one partition, turned into records as they are asked for.

Owns decoding. Invariants: records below the position asked for are skipped (a fetch begins with the whole
batch that holds it); control batches and, when only committed records are wanted, those of aborted
transactions are never handed out; the position moves past everything that was read, handed out or not. Pure.
Called by `fetcher`.
"""

import heapq
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from headrace.base.errors import ErrorCode, KafkaError
from headrace.client.topics import TopicPartition
from headrace.records.batch import HEADER_SIZE, BatchHeader, parse_header
from headrace.records.builder import iter_batches, iter_records, read_records

CONTROL_ABORT = 0


class ConsumerRecord(NamedTuple):
    """One record as it was read."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: Any  # bytes or None, or what the key_deserializer made of them
    value: Any
    headers: tuple[tuple[str, bytes | None], ...]
    leader_epoch: int


def end_of(data: memoryview, start: int) -> int:
    """The offset after the last whole batch in `data`, which begins at or before `start`."""
    pos, end = 0, start
    while len(data) - pos >= HEADER_SIZE:
        header = parse_header(data, pos)
        if header.size > len(data) - pos:
            break
        end = max(end, header.next_offset)
        pos += header.size
    return end


class Chunk:
    """The bytes that one fetch brought for one partition."""

    def __init__(
        self,
        partition: TopicPartition,
        data: memoryview,
        start: int,
        aborted: Sequence[tuple[int, int]] | None,
        *,
        check_crcs: bool,
    ) -> None:
        self.partition = partition
        self.size_bytes = len(data)
        self.next_offset = start
        self.end_offset = end_of(data, start)
        self._data = data
        self._check_crcs = check_crcs
        self._aborted = None if aborted is None else sorted((first, producer) for producer, first in aborted)
        self._records: Iterator[list[ConsumerRecord]] = self._batches()
        self._left: list[ConsumerRecord] = []
        self._taken = 0

    @property
    def spent(self) -> bool:
        """Whether all of it has been taken."""
        return self._taken == len(self._left) and self.next_offset >= self.end_offset

    def take(self, count_max: int) -> list[ConsumerRecord]:
        """The next records, at most so many; an empty list when there are no more."""
        while self._taken == len(self._left):
            self._taken = 0
            self._left = next(self._records, [])
            if not self._left:
                self.next_offset = max(self.next_offset, self.end_offset)
                return []
        out = self._left[self._taken : self._taken + count_max]
        self._taken += len(out)
        self.next_offset = out[-1].offset + 1
        return out

    def _batches(self) -> Iterator[list[ConsumerRecord]]:
        """The records of each batch that has any to hand out."""
        for header, view in self.visible():
            records = self._decode(header, view)
            if records:
                yield records

    def visible(self) -> Iterator[tuple[BatchHeader, memoryview]]:
        """The batches that have records to hand out, from the next offset on."""
        hidden = None if self._aborted is None else Aborted(self.partition, self._aborted)
        for header, view in iter_batches(self._data, check_crc=self._check_crcs):
            if header.last_offset < self.next_offset:
                continue
            if header.is_control:
                if hidden is not None:
                    hidden.note_marker(header, view)
                continue
            if hidden is None or not hidden.hides(header):
                yield header, view

    def _decode(self, header: BatchHeader, view: memoryview) -> list[ConsumerRecord]:
        topic, number = self.partition
        epoch, position = header.partition_leader_epoch, self.next_offset
        try:
            return read_records(header, view, (ConsumerRecord, topic, number, epoch, position))
        except KafkaError as error:
            raise KafkaError(
                error.code, f"{self.partition} at offset {header.base_offset}: {error.message}"
            ) from error


class Aborted:
    """Which batches of one fetch belong to aborted transactions."""

    def __init__(self, partition: TopicPartition, aborted: Sequence[tuple[int, int]]) -> None:
        self._partition = partition
        self._waiting = list(aborted)  # sorted by first offset, which is a heap
        self._open: set[int] = set()

    def hides(self, header: BatchHeader) -> bool:
        """Whether a batch is part of an aborted transaction; batches come in the order of offsets."""
        if not header.is_transactional:
            return False
        while self._waiting and self._waiting[0][0] <= header.last_offset:
            _, producer_id = heapq.heappop(self._waiting)
            self._open.add(producer_id)
        return header.producer_id in self._open

    def note_marker(self, header: BatchHeader, view: memoryview) -> None:
        """An abort marker ends what its producer had open; later batches of it are another transaction's."""
        for record in iter_records(view):
            key = record.key
            if key is None or len(key) < 4:
                raise KafkaError(
                    ErrorCode.CORRUPT_MESSAGE, f"{self._partition}: a control record without its type"
                )
            if int.from_bytes(key[2:4], "big", signed=True) == CONTROL_ABORT:
                self._open.discard(header.producer_id)
