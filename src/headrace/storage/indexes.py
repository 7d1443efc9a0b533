"""The offset and time indexes of one segment, in Kafka's file formats.

Each is a file of fixed-size entries in ascending order, searched by bisection over a memory map; the last few
entries wait in memory until there are enough for one write. Both are sparse and hold nothing that the log does not:
after a crash they are rebuilt from it, so they are never synced while their segment is still written to. Invariant:
the entries in the file followed by those in memory are what a rebuild would give. `Segment` is the only caller.

    offset index  relative offset i32 | position i32    the last offset of the batch that starts at `position`
    time index    timestamp i64 | relative offset i32   the largest timestamp up to here, last offset of its batch
"""

import struct
from typing import ClassVar, Final

from headrace.storage.files import FileSystem

PENDING_ENTRIES_MAX: Final = 64  # entries that wait in memory, per index of a segment that is written to

NO_TIMESTAMP: Final = -1


class _Index:
    """Entries (key, value) with ascending keys: what both indexes share."""

    __slots__ = ("_fs", "_pending", "_written", "base_offset", "path")

    _entry: ClassVar[struct.Struct]

    def __init__(self, fs: FileSystem, path: str, base_offset: int, written: int | None = None) -> None:
        self._fs = fs
        self.path = path
        self.base_offset = base_offset
        # Entries in the file. Not known until first needed: a log may have thousands of segments nobody reads.
        self._written = -1 if written is None else written
        self._pending: bytearray | None = None

    @property
    def written(self) -> int:
        """Entries in the file. A torn last entry does not count."""
        if self._written < 0:
            try:
                self._written = self._fs.size(self.path) // self._entry.size
            except FileNotFoundError:
                self._written = 0
        return self._written

    def __len__(self) -> int:
        return self.written + (len(self._pending) // self._entry.size if self._pending else 0)

    def is_full(self, bytes_max: int, reserve: int = 0) -> bool:
        """Whether another entry would take the file past `bytes_max`, keeping `reserve` entries free."""
        return len(self) + reserve >= bytes_max // self._entry.size

    def at(self, index: int) -> tuple[int, int]:
        """Entry number `index` as it is stored: the offset in it is relative."""
        size = self._entry.size
        if index < self.written:
            key, value = self._entry.unpack_from(self._fs.map(self.path, self.written * size), index * size)
        else:
            assert self._pending is not None, "no such entry"
            key, value = self._entry.unpack_from(self._pending, (index - self._written) * size)
        return key, value

    def _append(self, key: int, value: int) -> None:
        if self._pending is None:
            self._pending = bytearray()
        self._pending += self._entry.pack(key, value)

    @property
    def write_due(self) -> bool:
        """Enough entries wait for one write. Asked before a batch is written, so that a full disk refuses it whole."""
        return self._pending is not None and len(self._pending) >= PENDING_ENTRIES_MAX * self._entry.size

    def write(self) -> None:
        """Move the waiting entries into the file. OSError leaves them waiting."""
        if self._pending:
            size = self._entry.size
            self._fs.open(self.path, create=True).pwrite(self._pending, self.written * size)
            self._written += len(self._pending) // size
            self._pending = None

    def _search(self, key: int, field: int) -> int:
        """The number of the last entry whose `field` is at most `key`, -1 when there is none."""
        unpack = self._entry.unpack_from
        size = self._entry.size
        low = 0
        pending = self._pending
        if pending and unpack(pending, 0)[field] <= key:
            before = self.written
            view = memoryview(pending)
            high = len(pending) // size
        elif high := self.written:
            before = 0
            view = memoryview(self._fs.map(self.path, high * size))
        else:
            return -1
        with view:
            while low < high:
                middle = (low + high) >> 1
                if unpack(view, middle * size)[field] <= key:
                    low = middle + 1
                else:
                    high = middle
        return before + low - 1

    def _keep(self, count: int) -> None:
        """Drop the entries from number `count` on."""
        if count >= len(self):
            return
        written = self.written
        if count < written:
            self._pending = None
            self._fs.forget(self.path)
            self._fs.open(self.path).truncate(count * self._entry.size)
            self._written = count
        elif self._pending is not None:
            del self._pending[(count - written) * self._entry.size :]

    def reset(self) -> None:
        """Drop everything, also a torn entry that `written` does not count: a rebuild follows."""
        self._pending = None
        self._fs.forget(self.path)
        if self._fs.exists(self.path):
            self._fs.open(self.path).truncate(0)
        self._written = 0

    def load(self, entries: bytes) -> None:
        """Make these entries the whole content, in one write."""
        self.reset()
        if entries:
            self._fs.open(self.path, create=True).pwrite(entries, 0)
            self._written = len(entries) // self._entry.size

    def encoded(self) -> bytes:
        """All entries as the file would hold them, for comparison with a rebuild."""
        count = self.written
        stored = bytes(memoryview(self._fs.map(self.path, count * self._entry.size))) if count else b""
        return stored[: count * self._entry.size] + bytes(self._pending or b"")


class OffsetIndex(_Index):
    """From an offset to a position at or before its batch."""

    __slots__ = ()

    _entry = struct.Struct(">ii")

    def append(self, offset: int, position: int) -> None:
        self._append(offset - self.base_offset, position)

    def last(self) -> tuple[int, int] | None:
        """Offset and position of the last entry."""
        count = len(self)
        if not count:
            return None
        relative, position = self.at(count - 1)
        return self.base_offset + relative, position

    def lookup(self, offset: int) -> int:
        """The position of the last indexed batch whose last offset is at most `offset`; 0 when there is none."""
        at = self._search(offset - self.base_offset, 0)
        return self.at(at)[1] if at >= 0 else 0

    def lookup_position(self, position: int) -> int:
        """The last indexed start of a batch at or below `position`; 0 when there is none."""
        at = self._search(position, 1)
        return self.at(at)[1] if at >= 0 else 0

    def offset_after(self, position: int) -> int | None:
        """An offset that no record of a batch before `position` reaches; None when the index does not tell."""
        at = self._search(position - 1, 1) + 1
        return self.base_offset + self.at(at)[0] + 1 if at < len(self) else None

    def truncate_to(self, offset: int) -> None:
        """Drop the entries of batches that end at `offset` or later."""
        self._keep(self._search(offset - 1 - self.base_offset, 0) + 1)


class TimeIndex(_Index):
    """From a timestamp to an offset at or before the first record with that timestamp or a later one."""

    __slots__ = ("_newest",)

    ENTRY_BYTES: ClassVar = 12
    _entry = struct.Struct(">qi")

    def __init__(self, fs: FileSystem, path: str, base_offset: int, written: int | None = None) -> None:
        super().__init__(fs, path, base_offset, written)
        self._newest: int | None = None  # the last entry's timestamp, once it was asked for

    def append(self, timestamp: int, offset: int) -> bool:
        """Add an entry unless its timestamp adds nothing to the last one's."""
        newest = self._newest
        if newest is None:
            last = self.last()
            newest = NO_TIMESTAMP if last is None else last[0]
        if timestamp <= newest:
            self._newest = newest
            return False
        self._append(timestamp, offset - self.base_offset)
        self._newest = timestamp
        return True

    def _keep(self, count: int) -> None:
        self._newest = None
        super()._keep(count)

    def reset(self) -> None:
        self._newest = None
        super().reset()

    def last(self) -> tuple[int, int] | None:
        """Timestamp and offset of the last entry."""
        count = len(self)
        if not count:
            return None
        timestamp, relative = self.at(count - 1)
        return timestamp, self.base_offset + relative

    def lookup(self, timestamp: int) -> tuple[int, int]:
        """The last entry with a timestamp at most `timestamp`; (-1, base offset) when there is none."""
        at = self._search(timestamp, 0)
        if at < 0:
            return NO_TIMESTAMP, self.base_offset
        found, relative = self.at(at)
        return found, self.base_offset + relative

    def truncate_to(self, offset: int) -> None:
        """Drop the entries that point to `offset` or later."""
        self._keep(self._search(offset - 1 - self.base_offset, 1) + 1)
