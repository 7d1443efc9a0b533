"""Which compacted log is to be cleaned next, and how far: decisions, nothing else.

A log consists of a clean part, up to where the last cleaning got, and a dirty part up to what may be cleaned at all.
Invariants: never past the high watermark, the first unstable offset, the active segment or what is durable, nor into a
segment with a record younger than min.compaction.lag.ms. A log is due when its dirty share passes
min.cleanable.dirty.ratio, or when its oldest dirty record has waited for max.compaction.lag.ms. `Cleaner` calls it, on
the loop.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from headrace.storage.log import PartitionLog
from headrace.storage.segment import Segment


class Candidate(NamedTuple):
    """A log that is due."""

    log: PartitionLog
    first_dirty_offset: int
    end_offset: int
    """Nothing from here on is cleaned."""
    dirty_ratio: float


def filthiest(
    logs: Iterable[PartitionLog],
    clean_offset: Callable[[PartitionLog], int | None],
    limit_offset: Callable[[PartitionLog], int],
    now_ms: int,
) -> Candidate | None:
    """The log with the largest dirty share among those that are due."""
    best: Candidate | None = None
    for log in logs:
        if "compact" not in log.config.cleanup_policy or log.failed or len(log.segments) < 2:
            continue
        found = examine(log, clean_offset(log), limit_offset(log), now_ms)
        if found is not None and (best is None or found.dirty_ratio > best.dirty_ratio):
            best = found
    return best


def examine(log: PartitionLog, clean_offset: int | None, limit_offset: int, now_ms: int) -> Candidate | None:
    """What there is to clean in one log, if it is due."""
    first_dirty = log.log_start_offset if clean_offset is None else max(clean_offset, log.log_start_offset)
    if first_dirty > log.log_end_offset:
        first_dirty = log.log_start_offset  # not this log's: it was cut, or is another of the name
    end_offset = _end_offset(log, first_dirty, limit_offset, now_ms)
    if end_offset <= first_dirty:
        return None
    clean_bytes = dirty_bytes = 0
    overdue = False
    max_lag_ms = log.config.max_compaction_lag_ms
    for segment in log.segments:
        if segment.base_offset >= end_offset:
            break
        if log.end_of(segment) <= first_dirty:
            clean_bytes += segment.size
            continue
        dirty_bytes += segment.size
        overdue = overdue or (0 <= segment.first_timestamp < now_ms - max_lag_ms)
    if not dirty_bytes:
        return None
    ratio = dirty_bytes / (clean_bytes + dirty_bytes)
    if not overdue and ratio <= log.config.min_cleanable_dirty_ratio:
        return None
    return Candidate(log, first_dirty, end_offset, ratio)


def _end_offset(log: PartitionLog, first_dirty: int, limit_offset: int, now_ms: int) -> int:
    unstable = log.producer_state.first_unstable_offset(limit_offset)
    end_offset = min(limit_offset, log.active.base_offset, log.recovery_point)
    if unstable is not None:
        end_offset = min(end_offset, unstable)
    min_lag_ms = log.config.min_compaction_lag_ms
    if min_lag_ms > 0:
        for segment in _dirty(log, first_dirty):
            if segment.max_timestamp > now_ms - min_lag_ms:
                return min(end_offset, segment.base_offset)
    return end_offset


def _dirty(log: PartitionLog, first_dirty: int) -> list[Segment]:
    return log.segments[log.segment_number(first_dirty) : -1]
