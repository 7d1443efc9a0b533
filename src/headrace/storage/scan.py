"""Reading a segment from end to end: the recovery loop.

Owns the rebuild of both indexes. Invariant: the entries it gives are those that appending the same batches one by one
would have given, and every batch it counts has been read whole and its CRC found right. The file is read in windows
with pread, not mapped: a bad sector is then an error to handle, where a map would kill the process.
`recovery` is the caller.
"""

from typing import Final, NamedTuple

from headrace.base.errors import KafkaError
from headrace.base.log import get_logger
from headrace.records import codec
from headrace.records.batch import CONTROL_BIT, BatchHeader, Scan, ScanStop, SegmentScan
from headrace.storage.epochs import EpochCache
from headrace.storage.producers import Replay
from headrace.storage.segment import Segment

WINDOW_BYTES: Final = 1 << 20  # read and checked at a time; a larger batch gets a window of its own

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
    state = SegmentScan(segment.base_offset, interval_bytes, stop_at_gaps=True)
    if epochs is not None:
        state.leader_epoch = epochs.latest_epoch
    position = 0
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
        found = _scan_window(segment, state, window, position, end_offset, replay)
        stop = found.stop
        position += found.position
        if stop.corrupt or len(window) < asked or found.needed_bytes > segment.size - position:
            break
        wanted = max(WINDOW_BYTES, found.needed_bytes)
    if position == segment.size:
        stop = ScanStop.END
    if epochs is not None:
        for epoch, start_offset in state.epochs:
            epochs.assign(epoch, start_offset)
    return Scanned(
        position,
        state.next_offset,
        stop,
        state.batch_count,
        bytes(state.offset_entries),
        bytes(state.time_entries),
        (state.max_timestamp, state.max_timestamp_offset),
    )


def _scan_window(
    segment: Segment,
    state: SegmentScan,
    window: bytes,
    position: int,
    end_offset: int | None,
    replay: Replay | None,
) -> Scan:
    """Scan one window, which begins at `position` of the file; over gaps in the offsets as far as they are believed."""
    at = 0
    while True:
        found = codec.scan_segment(state, window, at, len(window), position)
        if replay is not None:
            for batch in found.batches:
                control = batch.attributes & CONTROL_BIT
                replay.add(batch, window[batch.position :] if control else b"")
        if found.stop is not ScanStop.GAP:
            return found
        header = segment.header_at(position + found.position)
        if header is None or not _gap_confirmed(segment, position + found.position, header, end_offset):
            return found._replace(stop=ScanStop.BAD_OFFSET)
        state.next_offset = header.base_offset
        at = found.position


def _gap_confirmed(segment: Segment, position: int, header: BatchHeader, end_offset: int | None) -> bool:
    """Whether the batch at `position`, which skips offsets, stands where it was written, as far as offsets tell.

    A base offset is outside its batch's CRC. Compaction leaves gaps, so a gap alone is no damage; but a batch that
    skips offsets counts only when what follows it agrees.
    """
    try:
        after = segment.header_at(position + header.size)
    except (KafkaError, OSError):
        return False
    follower = end_offset if after is None else after.base_offset
    return follower is not None and follower > header.last_offset
