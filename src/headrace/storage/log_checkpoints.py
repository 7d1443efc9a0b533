"""Recovery points and log start offsets of all logs, kept in the two checkpoint files.

Owns what was read at start, what was written last, and when the next write is due. Invariants: a recovery point in the
file is never past what the log has durable, or is lowered by the next write; a log start that no segment's name tells
(DeleteRecords moved it) is written as soon as it is seen; entries of logs that are there but not open are carried over.
Writing waits for the disk, so it is prepared here (`due`), done by a worker (`PendingWrite.run`), and noted here after.
Called by `LogManager`.
"""

import threading
from collections.abc import Iterable, Mapping
from typing import Final

from headrace.base.log import get_logger
from headrace.storage.checkpoints import LOG_STARTS_NAME, RECOVERY_POINTS_NAME, OffsetCheckpoint, Offsets
from headrace.storage.files import FileSystem
from headrace.storage.log import PartitionLog

Key = tuple[str, int]
Logs = Mapping[Key, PartitionLog]

logger = get_logger(__name__)


class PendingWrite:
    """What has to be written; None where the file is right as it is."""

    def __init__(self, checkpoints: "LogCheckpoints", points: Offsets | None, starts: Offsets | None) -> None:
        self._checkpoints = checkpoints
        self.points: Final = points
        self.starts: Final = starts

    def run(self) -> None:
        """Write it, less the logs deleted and made anew since it was prepared; runs in a thread."""
        checkpoints = self._checkpoints
        with checkpoints.files:
            if self.points is not None:
                checkpoints.recovery_points.write(_without(self.points, checkpoints.made_anew))
            if self.starts is not None:
                checkpoints.log_starts.write(_without(self.starts, checkpoints.made_anew))


class LogCheckpoints:
    """Both checkpoint files of one data directory."""

    def __init__(self, fs: FileSystem, now_ms: int) -> None:
        self.recovery_points: Final = OffsetCheckpoint(fs, RECOVERY_POINTS_NAME)
        self.log_starts: Final = OffsetCheckpoint(fs, LOG_STARTS_NAME)
        self._found_points: Offsets = {}
        self._found_starts: Offsets = {}
        self._written_points: Offsets = {}
        self._written_starts: Offsets = {}
        self._points_written_ms = now_ms
        self._points_wanted = False
        self._writing = False
        # Deleted logs that the files may still tell of; and those of them that were made anew during a write.
        self._stale: set[Key] = set()
        self.made_anew: set[Key] = set()
        self.files: Final = threading.Lock()
        """Held while the files are written: by the thread, or by the loop in the rare case that it cannot wait."""

    def read(self) -> None:
        self._written_points = self.recovery_points.read()
        self._written_starts = self.log_starts.read()
        self._found_points = dict(self._written_points)
        self._found_starts = dict(self._written_starts)

    def recovery_point(self, key: Key) -> int:
        """Where recovery of a log has to start, by what the process before this one wrote."""
        return self._found_points.get(key, 0)

    def log_start(self, key: Key) -> int:
        """The log start offset of a log, by what the process before this one wrote."""
        return self._found_starts.get(key, 0)

    def due(
        self, logs: Logs, not_open: Iterable[Key], now_ms: int, interval_ms: int, points_moved: bool
    ) -> PendingWrite | None:
        """What to write now, if anything. The caller has it run, then calls `written`; one at a time."""
        self._points_wanted |= points_moved
        if self._writing:
            return None
        not_open = list(not_open)
        points: Offsets | None = None
        if (
            self._points_wanted
            or now_ms - self._points_written_ms >= interval_ms
            or self._point_past_log(logs)
        ):
            points = self._current_points(logs, not_open)
            self._points_wanted = False
            self._points_written_ms = now_ms
        starts = self._current_starts(logs, not_open)
        changed_points = points if points != self._written_points else None
        changed_starts = starts if starts != self._written_starts else None
        if changed_points is None and changed_starts is None:
            return None
        self._writing = True
        return PendingWrite(self, changed_points, changed_starts)

    def written(self, pending: PendingWrite, error: Exception | None) -> None:
        """The outcome of what `due` gave."""
        self._writing = False
        if error is not None:
            self.made_anew.clear()
            self._points_wanted = True
            logger.error("offset checkpoints cannot be written", extra={"fields": {"why": str(error)}})
            return
        if pending.points is not None:
            self._written_points = _without(pending.points, self.made_anew)
        if pending.starts is not None:
            self._written_starts = _without(pending.starts, self.made_anew)
        self.made_anew.clear()
        self._stale &= self._written_points.keys() | self._written_starts.keys()

    def write(self, logs: Logs, not_open: Iterable[Key]) -> None:
        """Write both files now; for shutdown."""
        not_open = list(not_open)
        self.recovery_points.write(self._current_points(logs, not_open))
        self.log_starts.write(self._current_starts(logs, not_open))

    def lower(self, key: Key, flushed_offset: int) -> None:
        """A log was cut: what is written of its recovery point may not be past that. Rare, so it waits for the disk."""
        with self.files:
            if self._writing:
                self.made_anew.add(key)  # what is being written may have the higher one: it is left out
            elif self._written_points.get(key, 0) <= flushed_offset:
                return
            points = _without(self._written_points, {key})
            self.recovery_points.write(points)
            self._written_points = points

    def forget(self, key: Key) -> None:
        """The log was deleted: what is written of it says nothing about a later one of its name."""
        self._found_points.pop(key, None)
        self._found_starts.pop(key, None)
        self._stale.add(key)
        self._points_wanted |= key in self._written_points

    def make_room(self, key: Key) -> None:
        """A log of this name is about to be made: nothing may be left of an earlier one.

        After a kill the new log would be taken to start where the old one did, and lose records, or to be durable up to
        where the old one was.
        """
        if key not in self._stale:
            return
        with self.files:  # a write under way is waited for: it may be bringing the old log's offsets back
            if self._writing:
                self.made_anew.add(key)
            if self._writing or key in self._written_points or key in self._written_starts:
                self._drop_stale()

    def _drop_stale(self) -> None:
        # Not synced, so that it takes no time: a kill leaves the page cache in place, and a power cut that undoes or
        # tears it undoes the making of the new log as well, or leaves a file that counts as empty.
        points = _without(self._written_points, self._stale)
        starts = _without(self._written_starts, self._stale)
        try:
            self.recovery_points.write(points, durable=False)
            self.log_starts.write(starts, durable=False)
        except OSError as error:
            self._points_wanted = True
            logger.error("offset checkpoints cannot be written", extra={"fields": {"why": str(error)}})
            return
        self._written_points, self._written_starts = points, starts
        if not self._writing:
            self._stale.clear()

    def _point_past_log(self, logs: Logs) -> bool:
        """Whether a recovery would start too late in some log: a truncation has set its flushed offset back."""
        return any(
            (log := logs.get(key)) is not None and log.flushed_offset < point
            for key, point in self._written_points.items()
        )

    def _current_points(self, logs: Logs, not_open: list[Key]) -> Offsets:
        points = {key: point for key, log in logs.items() if (point := log.recovery_point) > 0}
        return _carry_over(points, self._found_points, not_open)

    def _current_starts(self, logs: Logs, not_open: list[Key]) -> Offsets:
        starts = {
            key: log.log_start_offset
            for key, log in logs.items()
            if log.log_start_offset > log.segments[0].base_offset
        }
        return _carry_over(starts, self._found_starts, not_open)


def _without(offsets: Offsets, keys: set[Key]) -> Offsets:
    return {key: offset for key, offset in offsets.items() if key not in keys}


def _carry_over(offsets: Offsets, found: Offsets, keys: list[Key]) -> Offsets:
    for key in keys:
        if key in found:
            offsets[key] = found[key]
    return offsets
