"""Making a partition durable: what one group commit has to write and sync, as a parcel for a thread.

The loop builds a `FlushTicket` (`PartitionLog.begin_flush`), a thread runs it, the loop takes the result back
(`finish_flush`). Invariant: once a ticket has run without error, everything the log held when it was built is on
stable storage, also its names in the directories, so a crash afterwards cannot lose it. A ticket goes by names and
copies, so the loop may append, roll, and delete while it runs.
"""

import contextlib
from typing import TYPE_CHECKING, Final

from headrace.storage.files import FileSystem

if TYPE_CHECKING:
    from headrace.storage.segment import Segment


class FlushTicket:
    """One flush under way. `run` is the only part that may leave the loop."""

    __slots__ = (
        "_directories",
        "_fs",
        "_logs",
        "_others",
        "_texts",
        "dirty",
        "excused",
        "garbage",
        "generation",
        "lost",
        "sealed",
        "target_offset",
    )

    def __init__(
        self,
        fs: FileSystem,
        target_offset: int,
        generation: int,
        logs: list[str],
        others: list[str],
        texts: list[tuple[str, bytes]],
        directories: list[str],
        garbage: list[str],
        dirty: "list[Segment]",
        sealed: "list[Segment]",
    ) -> None:
        self._fs: Final = fs
        self.target_offset: Final = target_offset
        """Everything below it is durable afterwards."""
        self.generation: Final = generation
        """Which life of the log this belongs to: a truncation begins a new one."""
        self._logs: Final = logs
        self._others: Final = others
        self._texts: Final = texts
        self._directories: Final = directories
        self.garbage: Final = garbage
        """Files of deleted segments, to be removed on the way."""
        self.dirty: Final = dirty
        """Segments whose bytes it syncs."""
        self.sealed: Final = sealed
        """Segments whose indexes it syncs."""
        self.lost = False
        """A sync failed: the kernel may have dropped what it could not write, so the log cannot be trusted."""

        self.excused: set[str] = set()
        """Segments deleted since: the loop adds them before it takes their files away."""

    def run(self) -> None:
        """Write and sync. OSError says why not. Files are opened one at a time, however many there are."""
        for path in self.garbage:  # first: it may be what makes room for the rest
            with contextlib.suppress(FileNotFoundError):
                self._fs.remove(path)
        for path, data in self._texts:
            self._fs.write_atomic(path, data, durable=True)
        try:
            for path in self._logs:
                try:
                    self._fs.open(path).sync()
                except FileNotFoundError:
                    if path not in self.excused:
                        raise
            for path in self._others:  # an index without entries has no file
                with contextlib.suppress(FileNotFoundError):
                    self._fs.open(path).sync()
            for directory in self._directories:
                self._fs.sync_dir(directory)
        except OSError:
            self.lost = True
            raise
