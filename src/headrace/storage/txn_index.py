"""The transaction index of a segment: the aborted transactions whose marker lies in it, in Kafka's `.txnindex` format.

A read_committed reader gets records of aborted transactions too, and leaves them out by this list. An entry is written
when its marker is appended, so entries ascend by `last_offset`. Invariant: the entries in the file followed by those
that the disk would not take yet are what replaying the segment's markers would give; the file of the segment that is
written to is never synced, because recovery rebuilds it. A segment without aborted transactions has no file, and
nobody looks for one twice. `Segment` owns it; the log appends to it, readers and the cleaner read it.

    version i16 | producer id i64 | first offset i64 | last offset i64 (the marker's) | last stable offset i64
"""

import contextlib
import struct
from collections.abc import Iterable
from typing import Final, NamedTuple

from headrace.storage.files import FileSystem

TXN_INDEX_SUFFIX: Final = ".txnindex"
ENTRY_VERSION: Final = 0

_ENTRY: Final = struct.Struct(">hqqqq")


class AbortedTransaction(NamedTuple):
    """One line: records of the producer from `first_offset` up to the marker at `last_offset` do not count."""

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int
    """Where the last stable offset was once this one had ended: none of a later line reaches below it."""


def encode_entries(entries: Iterable[AbortedTransaction]) -> bytes:
    return b"".join([_ENTRY.pack(ENTRY_VERSION, *entry) for entry in entries])


class TransactionIndex:
    """The aborted transactions of one segment, by where they ended."""

    __slots__ = ("_fs", "_unwritten", "_written", "path")

    def __init__(self, fs: FileSystem, path: str, written_bytes: int | None = None) -> None:
        self._fs = fs
        self.path = path
        self._written = -1 if written_bytes is None else written_bytes
        self._unwritten = b""

    @property
    def written_bytes(self) -> int:
        """Bytes of whole entries in the file."""
        if self._written < 0:
            try:
                size = self._fs.size(self.path)
            except FileNotFoundError:
                size = 0
            self._written = size - size % _ENTRY.size
        return self._written

    def __bool__(self) -> bool:
        return bool(self._unwritten) or self.written_bytes > 0

    def append(self, entry: AbortedTransaction | None) -> None:
        """Add a line, if there is one to add. It counts at once, also while the disk would not take it."""
        if entry is None:
            return
        self._unwritten += _ENTRY.pack(ENTRY_VERSION, *entry)
        with contextlib.suppress(OSError):
            self.write()

    def write(self) -> None:
        """Bring what waits into the file. OSError leaves it waiting."""
        if self._unwritten:
            self._fs.open(self.path, create=True).pwrite(self._unwritten, self.written_bytes)
            self._written += len(self._unwritten)
            self._unwritten = b""

    def entries(self) -> list[AbortedTransaction]:
        """All lines, ascending by where they ended."""
        if not self:
            return []
        size = self.written_bytes
        data = (self._fs.open(self.path).pread(size, 0) if size else b"") + self._unwritten
        whole = len(data) - len(data) % _ENTRY.size
        return [AbortedTransaction(*fields[1:]) for fields in _ENTRY.iter_unpack(data[:whole])]

    def load(self, entries: Iterable[AbortedTransaction]) -> None:
        """Make these the only lines."""
        data = encode_entries(entries)
        if not data and not self:
            return
        if self.written_bytes:
            self._fs.open(self.path).truncate(0)
        self._written = 0
        self._unwritten = data
        self.write()

    def truncate_to(self, offset: int) -> None:
        """Drop the transactions that ended at `offset` or later: their markers are cut off."""
        if self:
            entries = self.entries()
            kept = [entry for entry in entries if entry.last_offset < offset]
            if len(kept) < len(entries):
                self.load(kept)


def collect(indexes: Iterable[TransactionIndex], from_offset: int, to_offset: int) -> list[tuple[int, int]]:
    """(producer id, first offset) of each aborted transaction with records from `from_offset` up to `to_offset`.

    `indexes` are those of the segments from the one that holds `from_offset` on. A marker may lie in a later
    segment than the records it ends, so the search goes on until a line says that none below `to_offset` is open any
    more, or the segments are at an end.
    """
    found: list[tuple[int, int]] = []
    for index in indexes:
        if not index:
            continue
        for entry in index.entries():
            if entry.last_offset >= from_offset and entry.first_offset < to_offset:
                found.append((entry.producer_id, entry.first_offset))
            if entry.last_stable_offset >= to_offset:
                return found
    return found
