"""Reading a partition: byte ranges by offset, offsets by timestamp.

Functions over a `PartitionLog`, which offers them as its methods. Invariant: what is handed out are whole batches, as
they lie in the files, never decoded and never past the bound the caller gives (high watermark or last stable offset);
only the two timestamp lookups look inside, and only at the one batch that holds the answer.
"""

from typing import TYPE_CHECKING, NamedTuple

from headrace.base.errors import ErrorCode, KafkaError
from headrace.records.batch import parse_header
from headrace.records.builder import iter_records
from headrace.storage.files import FileRange
from headrace.storage.txn_index import collect

if TYPE_CHECKING:
    from headrace.storage.log import PartitionLog
    from headrace.storage.segment import Segment


class LogSlice(NamedTuple):
    """Whole batches of a log, in order, as ranges of its files."""

    ranges: list[FileRange]
    size: int

    def read(self) -> bytes:
        """The bytes themselves, where a copy is wanted."""
        return b"".join([part.read() for part in self.ranges])


class TimestampOffset(NamedTuple):
    """A record found by time."""

    offset: int
    timestamp: int
    leader_epoch: int


EMPTY = LogSlice([], 0)


def read(
    log: "PartitionLog", offset: int, max_bytes: int, max_offset: int, min_one_batch: bool = True
) -> LogSlice:
    """Batches from the one that holds `offset` on: at most `max_bytes`, none that reaches `max_offset`.

    With `min_one_batch` the first one comes whole even if it is larger than `max_bytes`.
    """
    end_offset = log.log_end_offset
    if offset < log.log_start_offset or offset > end_offset:
        raise KafkaError(
            ErrorCode.OFFSET_OUT_OF_RANGE,
            f"Received request for offset {offset} for partition {log.name}, "
            f"but we only have log segments from offset {log.log_start_offset} to {end_offset}.",
        )
    if offset >= max_offset or offset == end_offset:
        return EMPTY
    segments = log.segments
    number = log.segment_number(offset)
    while True:
        segment = segments[number]
        located = segment.locate(offset) if segment.size else None
        if located is not None:
            break
        number += 1
        if number == len(segments):
            return EMPTY
    start, first_end = located
    end = segment.size if max_offset >= end_offset else _bound(segment, max_offset)
    if first_end > end:
        return EMPTY  # the batch reaches past max_offset
    if end - start > max_bytes:
        if first_end - start > max_bytes:
            if not min_one_batch:
                return EMPTY
            end = first_end
        else:
            end = segment.boundary(start, start + max_bytes)
        return LogSlice([segment.range(start, end)], end - start)
    ranges = [segment.range(start, end)]
    size = end - start
    # The segment's rest fits: go on with the next ones while they do.
    while end == segment.size and size < max_bytes and number + 1 < len(segments):
        number += 1
        segment = segments[number]
        end = segment.size if max_offset >= end_offset else _bound(segment, max_offset)
        if end > max_bytes - size:
            end = segment.boundary(0, max_bytes - size)
        if not end:
            break
        ranges.append(segment.range(0, end))
        size += end
    return LogSlice(ranges, size)


def aborted_transactions(
    log: "PartitionLog", offset: int, found: LogSlice, max_offset: int
) -> list[tuple[int, int]]:
    """(producer id, first offset) of the aborted transactions with records in `found`, which was read from `offset` on.

    Transactions that begin a little behind it may be told too: how far it reaches is known as far as the index tells.
    """
    number = log.segment_number(offset)
    if not found.size or not any(segment.txn_index for segment in log.segments[number:]):
        return []
    last = found.ranges[-1]
    path = last.file.path
    holder = next((n for n in range(number, len(log.segments)) if log.segments[n].log_path == path), None)
    to_offset = max_offset
    if holder is not None:
        segment = log.segments[holder]
        to_offset = min(
            max_offset, segment.index.offset_after(last.offset + last.length) or log.end_of(segment)
        )
    return collect([segment.txn_index for segment in log.segments[number:]], offset, to_offset)


def _bound(segment: "Segment", max_offset: int) -> int:
    """Where the batches of a segment that end below `max_offset` end."""
    if not segment.size or segment.base_offset >= max_offset:
        return 0
    located = segment.locate(max_offset)
    return segment.size if located is None else located[0]


def offset_for_timestamp(log: "PartitionLog", timestamp: int, max_offset: int) -> TimestampOffset | None:
    """The first record below `max_offset` with this timestamp or a later one."""
    for segment in log.segments:
        if segment.max_timestamp < timestamp or not segment.size:
            continue
        indexed_offset = segment.time_index.lookup(timestamp)[1]
        position = segment.index.lookup(max(indexed_offset, log.log_start_offset))
        while (located := segment.locate_timestamp(position, timestamp)) is not None:
            start, position = located
            batch = segment.file().pread(position - start, start)
            header = segment.header_at(start)
            assert header is not None
            if header.base_offset >= max_offset:
                return None
            for record in iter_records(batch):
                if record.timestamp >= timestamp and log.log_start_offset <= record.offset < max_offset:
                    return TimestampOffset(record.offset, record.timestamp, header.partition_leader_epoch)
    return None


def max_timestamp_offset(log: "PartitionLog") -> TimestampOffset | None:
    """The first record that has the largest timestamp of the log; None when no record has one."""
    newest: Segment | None = None
    for segment in log.segments:
        if segment.size and (newest is None or segment.max_timestamp > newest.max_timestamp):
            newest = segment
    if newest is None or newest.max_timestamp < 0:
        return None
    located = newest.locate(newest.max_timestamp_offset)
    if located is None:
        return None
    start, end = located
    header = newest.header_at(start)
    assert header is not None
    records = iter_records(newest.file().pread(end - start, start))
    if not records:
        return _max_timestamp_by_headers(log)
    best = max(records, key=lambda record: record.timestamp)
    return TimestampOffset(best.offset, best.timestamp, header.partition_leader_epoch)


def _max_timestamp_by_headers(log: "PartitionLog") -> TimestampOffset | None:
    """As `max_timestamp_offset`, where compaction emptied the batch that the index tells of: of those with records."""
    newest: tuple[int, int, Segment, int] | None = None
    for segment in log.segments:
        for position, header in segment.headers():
            if header.record_count and (newest is None or header.max_timestamp > newest[0]):
                newest = header.max_timestamp, position, segment, header.size
    if newest is None or newest[0] < 0:
        return None
    _, position, segment, size = newest
    batch = segment.file().pread(size, position)
    best = max(iter_records(batch), key=lambda record: record.timestamp)
    return TimestampOffset(best.offset, best.timestamp, parse_header(batch).partition_leader_epoch)
