"""Taking records away: retention, DeleteRecords, and truncation when a replica diverged.

Functions over a `PartitionLog`, which offers them as its methods. Invariants: only whole segments are deleted, from
the oldest on, so what is left is one run of offsets; the log keeps an active segment, be it empty; a crash half-way
leaves files that recovery sorts out. The log start offset may lie inside a segment; it never goes back.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.log import get_logger
from headrace.storage.files import FileSystem
from headrace.storage.producers import rebuild_producers
from headrace.storage.segment import Segment

if TYPE_CHECKING:
    from headrace.storage.log import PartitionLog

DELETED_AT_ONCE_MAX: Final = (
    50  # segments of a log; the rest waits for the next tick, so that the loop does not
)

CORRUPT_SUFFIX: Final = ".corrupt"

logger = get_logger(__name__)


def delete_records(log: "PartitionLog", before: int) -> int:
    """Make `before` the log start offset, unless it is past it already, and delete what lies wholly below.

    The caller has bounded `before` by the high watermark.
    """
    if before < 0 or before > log.log_end_offset:
        raise KafkaError(
            ErrorCode.OFFSET_OUT_OF_RANGE,
            f"Cannot delete records of {log.name} before {before}: the log ends at {log.log_end_offset}",
        )
    if before > log.log_start_offset:
        _advance_start(log, before)
        _delete_oldest(log, _count_below_start(log), "log start offset")
    return log.log_start_offset


def apply_retention(log: "PartitionLog", now_ms: int, limit_offset: int) -> int:
    """Delete the oldest segments that time, size or the log start offset condemn; how many.

    No segment that reaches past `limit_offset` (the high watermark) goes. When all are condemned, also the active
    one, a new one is begun first.
    """
    deleted = 0
    if "delete" in log.config.cleanup_policy:
        deleted += _delete_oldest(log, _count_expired(log, now_ms, limit_offset), "retention.ms", now_ms)
        deleted += _delete_oldest(log, _count_oversize(log, limit_offset), "retention.bytes", now_ms)
    return deleted + _delete_oldest(log, _count_below_start(log), "log start offset")


def _count_expired(log: "PartitionLog", now_ms: int, limit_offset: int) -> int:
    retention_ms = log.config.retention_ms
    count = 0
    if retention_ms >= 0:
        for segment in log.segments:
            timestamp = segment.max_timestamp
            age_ms = now_ms - (timestamp if timestamp >= 0 else segment.created_ms)
            if not segment.size or age_ms <= retention_ms or log.end_of(segment) > limit_offset:
                break
            count += 1
            if count == DELETED_AT_ONCE_MAX:
                break  # a segment's latest timestamp may have to be read
    return count


def _count_oversize(log: "PartitionLog", limit_offset: int) -> int:
    retention_bytes = log.config.retention_bytes
    count = 0
    if retention_bytes >= 0:
        excess = log.size_bytes - retention_bytes
        for segment in log.segments:
            excess -= segment.size
            if not segment.size or excess < 0 or log.end_of(segment) > limit_offset:
                break
            count += 1
    return count


def _count_below_start(log: "PartitionLog") -> int:
    """Segments before the active one that end at or below the log start offset."""
    count = 0
    for following in log.segments[1:]:
        if following.base_offset > log.log_start_offset:
            break
        count += 1
    return count


def _delete_oldest(log: "PartitionLog", count: int, reason: str, now_ms: int = 0) -> int:
    count = min(count, DELETED_AT_ONCE_MAX)
    if not count:
        return 0
    if count == len(log.segments):
        try:
            log.roll(now_ms)
        except OSError:  # a full disk, perhaps: then the others have to go first
            count -= 1
    if not count:
        return 0
    settled = all(log.is_settled(segment) for segment in log.segments[:count])
    if not settled:
        # What the producers did below must not get lost with the batches that tell it.
        with contextlib.suppress(FileNotFoundError):
            log.fs.open(log.snapshot_path(log.segments[count].base_offset)).sync()
    if not settled or not log.segments[count].size:
        log.segments[count].create()
        log.fs.sync_dir(log.directory)
    gone, kept = log.segments[:count], log.segments[count:]
    log.replace_segments(kept, truncated=False)
    if kept[0].base_offset > log.log_start_offset:
        _advance_start(log, kept[0].base_offset)
    log.flushed_offset = max(log.flushed_offset, log.log_start_offset)
    log.excuse(gone)
    for segment in gone:
        log.garbage += segment.discard()
        _remove_snapshot(log, segment.base_offset)
    if not settled:
        # Back after a crash, they would lie below the recovery point, and be served without having been scanned.
        log.fs.sync_dir(log.directory)
    logger.info(
        "segments deleted",
        extra={
            "fields": {
                "partition": log.name,
                "reason": reason,
                "segments": count,
                "bytes": sum([segment.size for segment in gone]),
                "log_start_offset": log.log_start_offset,
            }
        },
    )
    return count


def _advance_start(log: "PartitionLog", offset: int) -> None:
    log.log_start_offset = offset
    log.epochs.truncate_from_start(offset)
    log.producer_state.on_log_start_offset(offset)


def _remove_snapshot(log: "PartitionLog", offset: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        log.fs.remove(log.snapshot_path(offset))


def truncate_to(log: "PartitionLog", offset: int) -> int:
    """Cut the log so that it ends at `offset`, or before it if that is inside a batch; the new end offset.

    The recovery point may go down with it: the caller writes its checkpoint before it appends anything, or a crash
    would leave segments unscanned that it wrote since.
    """
    if offset >= log.log_end_offset:
        return log.log_end_offset
    if offset <= log.log_start_offset or offset <= log.segments[0].base_offset:
        truncate_fully(log, offset)
        return offset
    number = log.segment_number(offset)
    if _start_of_batch(log.segments[number], offset) <= log.log_start_offset:
        truncate_fully(log, log.log_start_offset)  # the cut takes the batch that the log starts in
        return log.log_start_offset
    kept, gone = log.segments[: number + 1], log.segments[number + 1 :]
    log.excuse(gone)
    with _whole_or_failed(log):
        for segment in reversed(gone):  # the last first, so that a crash on the way leaves one run
            log.garbage += segment.discard()
        log.fs.sync_dir(log.directory)
        end_offset = kept[-1].truncate_to(offset)
        _finish_truncation(log, kept, end_offset)
    logger.info("log truncated", extra={"fields": {"partition": log.name, "log_end_offset": end_offset}})
    return end_offset


def _start_of_batch(segment: Segment, offset: int) -> int:
    """The first offset of the batch that holds `offset`, or `offset` where there is none."""
    located = segment.locate(offset) if segment.size else None
    header = segment.header_at(located[0]) if located else None
    return offset if header is None else min(header.base_offset, offset)


def truncate_fully(log: "PartitionLog", new_start: int) -> None:
    """Drop everything; the log starts, and ends, at `new_start`."""
    # The new segment's name comes first: without any, a crash would leave a log that starts at 0 again.
    segment = Segment(log.fs, log.directory, new_start)
    segment.create()
    with _whole_or_failed(log):
        segment.cut(0)
        log.fs.sync_dir(log.directory)
        log.excuse(log.segments)
        for old in reversed(log.segments):
            if old.base_offset == new_start:
                old.remove_indexes()
            else:
                log.garbage += old.discard()
        log.fs.sync_dir(log.directory)
        log.log_start_offset = new_start
        log.flushed_offset = new_start
        log.epochs.clear()
        _finish_truncation(log, [segment], new_start)
    logger.info(
        "log truncated fully", extra={"fields": {"partition": log.name, "log_start_offset": new_start}}
    )


def quarantine(log: "PartitionLog", offset: int) -> int:
    """Cut the log where the segment with `offset` begins, and keep that one under another name; the new end offset.

    Nothing of the segment is read: what it holds is not to be trusted. The caller gets its records from elsewhere, and
    writes its checkpoint before it appends them, as after a truncation.
    """
    number = log.segment_number(offset)
    damaged, following = log.segments[number], log.segments[number + 1 :]
    end_offset = max(damaged.base_offset, log.log_start_offset)
    log.excuse([damaged, *following])
    for segment in reversed(following):
        log.garbage += segment.discard()
    damaged.forget()
    damaged.remove_indexes()
    spare = spare_name(log.fs, damaged.log_path)
    with contextlib.suppress(FileNotFoundError):
        log.fs.rename(damaged.log_path, spare)
    log.fs.sync_dir(log.directory)
    logger.error(
        "damaged segment put aside",
        extra={
            "fields": {"partition": log.name, "file": damaged.log_path, "renamed": spare, "offset": offset}
        },
    )
    if number == 0:
        log.replace_segments([Segment(log.fs, log.directory, damaged.base_offset)], truncated=True)
        truncate_fully(log, end_offset)
        return end_offset
    fresh = Segment(log.fs, log.directory, damaged.base_offset)
    fresh.create()
    _finish_truncation(log, [*log.segments[:number], fresh], end_offset)
    return end_offset


def spare_name(fs: FileSystem, path: str) -> str:
    """A name beside `path` that is free, for a file that cannot be served."""
    name = path + CORRUPT_SUFFIX
    number = 0
    while fs.exists(name):
        number += 1
        name = f"{path}{CORRUPT_SUFFIX}.{number}"
    return name


@contextlib.contextmanager
def _whole_or_failed(log: "PartitionLog") -> Iterator[None]:
    """A truncation that stops half-way leaves files that the log's numbers do not tell of: only recovery knows them."""
    try:
        yield
    except OSError as error:
        log.fail(error)
        raise


def _finish_truncation(log: "PartitionLog", segments: list[Segment], end_offset: int) -> None:
    log.log_end_offset = end_offset
    log.flushed_offset = min(log.flushed_offset, end_offset)
    log.replace_segments(segments, truncated=True)
    log.epochs.truncate_from_end(end_offset)
    if log.epochs.dirty:
        with contextlib.suppress(OSError):  # it stays dirty, and goes with the next flush
            log.fs.write_atomic(log.epochs_path, log.epochs.encode())
            log.epochs.dirty = False
    rebuild_producers(log)
