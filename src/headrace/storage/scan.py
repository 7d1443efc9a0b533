"""Reading a segment from end to end: the recovery loop.

Owns the rebuild of both indexes. Invariant: the entries it gives are those that appending the same batches one by one
would have given, and every batch it counts has been read whole and its CRC found right. The file is read in windows
with pread, not mapped: a bad sector is then an error to handle, where a map would kill the process.
`recovery` is the caller.
"""

import struct
from typing import Final, NamedTuple

from headrace.base.errors import KafkaError
from headrace.base.log import get_logger
from headrace.records.batch import CONTROL_BIT, Scan, ScanStop
from headrace.records.codec import scan
from headrace.storage.epochs import EpochCache
from headrace.storage.producers import Replay
from headrace.storage.segment import NO_TIMESTAMP, RELATIVE_OFFSET_MAX, Segment

WINDOW_BYTES: Final = 1 << 20  # read and checked at a time; a larger batch gets a window of its own

_OFFSET_ENTRY: Final = struct.Struct(">ii")
_TIME_ENTRY: Final = struct.Struct(">qi")

logger = get_logger(__name__)


class Scanned(NamedTuple):
    """What a segment really holds."""

    valid_bytes: int
    next_offset: int
    stop: ScanStop
    batches: int
    offset_entries: bytes
    time_entries: bytes
    newest: tuple[int, int]
    """The largest timestamp and the last offset of its batch."""


def scan_segment(
    segment: Segment,
    interval_bytes: int,
    end_offset: int | None = None,
    epochs: EpochCache | None = None,
    replay: Replay | None = None,
) -> Scanned:
    """Check every batch up to the first that is not whole, and collect indexes, epochs and producers of those.

    `end_offset` is the base of the next segment, None when this is the last. A read that fails (EIO) ends the
    segment there, like a batch that is damaged.
    """
    base_offset = segment.base_offset
    offset_entries = bytearray()
    time_entries = bytearray()
    position = last_entry = batches = 0
    next_offset = base_offset
    newest, newest_offset = NO_TIMESTAMP, base_offset
    newest_indexed = NO_TIMESTAMP
    epoch = epochs.latest_epoch if epochs is not None else -1
    stop = ScanStop.END
    wanted = WINDOW_BYTES
    file = segment.file() if segment.size else None
    while file is not None and position < segment.size:
        asked = min(wanted, segment.size - position)
        try:
            window = file.pread(asked, position)
        except OSError as error:
            logger.error("segment cannot be read", extra={"fields": {"file": file.path, "error": str(error)}})
            stop = ScanStop.BAD_CRC
            break
        found = scan(window, 0, len(window), next_offset)
        stop = found.stop
        if found.next_offset - base_offset > RELATIVE_OFFSET_MAX + 1:
            near = [b for b in found.batches if b.last_offset - base_offset <= RELATIVE_OFFSET_MAX]
            found, stop = _first(found, len(near), next_offset), ScanStop.BAD_OFFSET
        for number, batch in enumerate(found.batches):
            at, _, batch_base, last_offset, timestamp, batch_epoch, attributes, producer_id, _, _, _ = batch
            if batch_base != next_offset and not _gap_confirmed(segment, position, found, number, end_offset):
                found, stop = _first(found, number, next_offset), ScanStop.BAD_OFFSET
                break
            next_offset = last_offset + 1
            if timestamp > newest:
                newest, newest_offset = timestamp, last_offset
            at += position
            if at - last_entry > interval_bytes:
                offset_entries += _OFFSET_ENTRY.pack(last_offset - base_offset, at)
                if newest > newest_indexed:
                    time_entries += _TIME_ENTRY.pack(newest, newest_offset - base_offset)
                    newest_indexed = newest
                last_entry = at
            if batch_epoch != epoch and batch_epoch >= 0 and epochs is not None:
                epochs.assign(batch_epoch, batch_base)
                epoch = batch_epoch
            if producer_id >= 0 and replay is not None:
                replay.add(batch, window[at - position :] if attributes & CONTROL_BIT else b"")
        batches += len(found.batches)
        position += found.position
        if stop.corrupt or len(window) < asked or found.needed_bytes > segment.size - position:
            break
        wanted = max(WINDOW_BYTES, found.needed_bytes)
    if position == segment.size:
        stop = ScanStop.END
    return Scanned(
        position,
        next_offset,
        stop,
        batches,
        bytes(offset_entries),
        bytes(time_entries),
        (newest, newest_offset),
    )


def _gap_confirmed(segment: Segment, position: int, found: Scan, number: int, end_offset: int | None) -> bool:
    """Whether batch `number`, which skips offsets, stands where it was written, as far as offsets tell.

    A base offset is outside its batch's CRC. Compaction leaves gaps, so a gap alone is no damage; but a batch that
    skips offsets counts only when what follows it agrees.
    """
    batch = found.batches[number]
    if number + 1 < len(found.batches):
        follower: int | None = found.batches[number + 1].base_offset
    else:
        try:
            header = segment.header_at(position + batch.position + batch.size)
        except (KafkaError, OSError):
            return False
        follower = end_offset if header is None else header.base_offset
    return follower is not None and follower > batch.last_offset


def _first(found: Scan, count: int, next_offset: int) -> Scan:
    """Only the first `count` batches of a scan."""
    kept = found.batches[:count]
    if kept:
        next_offset = kept[-1].last_offset + 1
    return Scan(found.batches[count].position, ScanStop.BAD_OFFSET, 0, next_offset, kept)
