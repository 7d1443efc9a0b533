"""Making a partition durable: what one group commit has to write and sync, as a parcel for a thread.

The loop builds a `FlushTicket` (`PartitionLog.begin_flush`), a thread runs it, the loop takes the result back
(`finish_flush`). Invariant: once a ticket has run without error, everything the log held when it was built is on
stable storage, also its names in the directories, so a crash afterwards cannot lose it. A ticket holds its own
references and copies, so the loop may append, roll, and delete while it runs.
"""

from typing import TYPE_CHECKING, Final

from headrace.storage.files import File, FileSystem

if TYPE_CHECKING:
    from headrace.storage.segment import Segment


class FlushTicket:
    """One flush under way. `run` is the only part that may leave the loop."""

    __slots__ = (
        "_directories",
        "_files",
        "_fs",
        "_texts",
        "dirty",
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
        files: list[File],
        texts: list[tuple[str, bytes]],
        directories: list[str],
        dirty: "list[Segment]",
        sealed: "list[Segment]",
    ) -> None:
        self._fs: Final = fs
        self.target_offset: Final = target_offset
        """Everything below it is durable afterwards."""
        self.generation: Final = generation
        """Which life of the log this belongs to: a truncation begins a new one."""
        self._files: Final = files
        self._texts: Final = texts
        self._directories: Final = directories
        self.dirty: Final = dirty
        """Segments whose bytes it syncs."""
        self.sealed: Final = sealed
        """Segments whose indexes it syncs."""
        self.lost = False
        """A sync failed: the kernel may have dropped what it could not write, so the log cannot be trusted."""

    def run(self) -> None:
        """Write and sync. OSError says why not."""
        for path, data in self._texts:
            self._fs.write_atomic(path, data, durable=True)
        try:
            for file in self._files:
                file.sync()
            for directory in self._directories:
                self._fs.sync_dir(directory)
        except OSError:
            self.lost = True
            raise
