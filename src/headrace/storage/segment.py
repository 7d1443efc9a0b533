"""One segment of a partition: a run of batches in a `.log` file, with its offset and time index.

Owns the file's logical size, the two indexes, and the largest timestamp so far. Invariants: the bytes below `size`
are whole batches in ascending offset order, all at or above `base_offset`; what lies beyond `size` (a write that
failed half-way) is never read and is overwritten next; the indexes are what `rebuild` over those bytes would give.
Only the last segment of a log is appended to; `PartitionLog`, its readers and recovery are the callers.

A segment costs nothing until it is used: its file is created by the first append, its index files by the first
write of entries, and of a sealed segment nothing is read before someone asks.
"""

import contextlib
import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Final

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.log import get_logger
from headrace.records.batch import HEADER_SIZE, LOG_OVERHEAD, BatchHeader, parse_header
from headrace.records.codec import find_offset, find_timestamp
from headrace.storage.files import Buffer, File, FileRange, FileSystem
from headrace.storage.indexes import PENDING_ENTRIES_MAX, OffsetIndex, TimeIndex
from headrace.storage.txn_index import TXN_INDEX_SUFFIX, TransactionIndex

LOG_SUFFIX: Final = ".log"
INDEX_SUFFIX: Final = ".index"
TIME_INDEX_SUFFIX: Final = ".timeindex"
DELETED_SUFFIX: Final = ".deleted"
SUFFIXES: Final = (LOG_SUFFIX, INDEX_SUFFIX, TIME_INDEX_SUFFIX, TXN_INDEX_SUFFIX)

RELATIVE_OFFSET_MAX: Final = 2**31 - 1
POSITION_MAX: Final = 2**31 - 1

RECENT_BATCHES_MAX: Final = (
    64  # batches at the tail whose place is remembered, so that readers there ask no file
)
HEADER_CHUNK_BYTES: Final = 8192  # read at a time when walking headers

UNKNOWN: Final = -2  # a timestamp that was not read yet; -1 is Kafka's "none"
NO_TIMESTAMP: Final = -1

_OFFSET_AND_LENGTH: Final = struct.Struct(">qi")

logger = get_logger(__name__)


class Segment:
    """Batches from `base_offset` up to the base of the next segment. Single owner, no locks."""

    __slots__ = (
        "_bytes_since_entry",
        "_entries",
        "_first_timestamp",
        "_fs",
        "_max_timestamp",
        "_max_timestamp_offset",
        "_pending_entries",
        "_recent_offsets",
        "_recent_positions",
        "base_offset",
        "created_ms",
        "index",
        "log_path",
        "size",
        "time_index",
        "txn_index",
    )

    def __init__(
        self, fs: FileSystem, directory: str, base_offset: int, size: int = 0, created_ms: int = 0
    ) -> None:
        prefix = f"{directory}/{base_offset:020d}"
        known_empty = 0 if size == 0 else None
        self._fs = fs
        self.base_offset = base_offset
        self.size = size
        self.created_ms = created_ms
        self.log_path = prefix + LOG_SUFFIX
        self.index = OffsetIndex(fs, prefix + INDEX_SUFFIX, base_offset, known_empty)
        self.time_index = TimeIndex(fs, prefix + TIME_INDEX_SUFFIX, base_offset, known_empty)
        self.txn_index = TransactionIndex(fs, prefix + TXN_INDEX_SUFFIX, known_empty)
        self._first_timestamp = NO_TIMESTAMP if size == 0 else UNKNOWN
        self._max_timestamp = NO_TIMESTAMP if size == 0 else UNKNOWN
        self._max_timestamp_offset = base_offset
        self._bytes_since_entry = 0
        self._entries = 0
        self._pending_entries = 0
        # The last offset and the position of the latest batches; bounded, and only while this is written to.
        self._recent_offsets: array[int] | None = None
        self._recent_positions: array[int] | None = None

    def __repr__(self) -> str:
        return f"Segment({self.log_path}, size={self.size})"

    def file(self) -> File:
        return self._fs.open(self.log_path)

    # -- appending -------------------------------------------------------------------------------------------

    def write(self, data: Buffer) -> int:
        """Put whole batches at the end; the position they got. OSError leaves the segment as it was."""
        if self._pending_entries >= PENDING_ENTRIES_MAX:
            self.write_indexes()
        position = self.size
        file = self._fs.open(self.log_path, position == 0)
        try:
            file.pwrite(data, position)
        except OSError:
            # Give the space of a half-written batch back; if even that fails, nobody reads beyond `size`.
            with contextlib.suppress(OSError):
                file.truncate(position)
            raise
        return position

    def account(
        self, position: int, size: int, last_offset: int, max_timestamp: int, interval_bytes: int
    ) -> None:
        """Take a batch that was written at `position` into the indexes."""
        if position == 0:
            self._first_timestamp = max_timestamp
        if max_timestamp > self._max_timestamp:
            self._max_timestamp = max_timestamp
            self._max_timestamp_offset = last_offset
        if self._bytes_since_entry > interval_bytes:
            self.index.append(last_offset, position)
            self.time_index.append(self._max_timestamp, self._max_timestamp_offset)
            self._entries += 1
            self._pending_entries += 1
            self._bytes_since_entry = size
        else:
            self._bytes_since_entry += size
        self.size = position + size
        offsets, positions = self._recent_offsets, self._recent_positions
        if offsets is None or positions is None:
            self._recent_offsets = array("q", (last_offset,))
            self._recent_positions = array("q", (position,))
            return
        offsets.append(last_offset)
        positions.append(position)
        if len(offsets) > 2 * RECENT_BATCHES_MAX:
            del offsets[:RECENT_BATCHES_MAX]
            del positions[:RECENT_BATCHES_MAX]

    def write_indexes(self) -> None:
        """Move the index entries that wait in memory into the files."""
        self.index.write()
        self.time_index.write()
        self.txn_index.write()
        self._pending_entries = 0
        if not self.index.written and self.time_index.written:
            # Kafka's tools read a time index only beside an offset index, be it an empty one.
            self._fs.open(self.index.path, create=True)

    def seal(self) -> None:
        """No more appends: complete the time index, as Kafka does at a roll. May be called again if it fails."""
        if self.size:
            self.time_index.append(self.max_timestamp, self.max_timestamp_offset)
        self.write_indexes()
        self._recent_offsets = self._recent_positions = None

    def can_hold(self, last_offset: int) -> bool:
        """Whether `last_offset` can be told relative to this segment's base."""
        return last_offset - self.base_offset <= RELATIVE_OFFSET_MAX

    def indexes_full(self, bytes_max: int) -> bool:
        """Whether an index has no room for another entry (the time index keeps one for `seal`)."""
        if self._entries < bytes_max // TimeIndex.ENTRY_BYTES - 1:
            return False  # the time index has the larger entries, and no more of them
        return self.index.is_full(bytes_max) or self.time_index.is_full(bytes_max, reserve=1)

    def index_files(self) -> list[File]:
        """The index files that exist."""
        files = []
        for path in (self.index.path, self.time_index.path, self.txn_index.path):
            with contextlib.suppress(FileNotFoundError):
                files.append(self._fs.open(path))
        return files

    # -- timestamps ------------------------------------------------------------------------------------------

    @property
    def max_timestamp(self) -> int:
        """The largest timestamp of the segment, -1 when it has none."""
        if self._max_timestamp == UNKNOWN:
            self._load_max_timestamp()
        return self._max_timestamp

    @property
    def max_timestamp_offset(self) -> int:
        """The last offset of the first batch that holds the largest timestamp."""
        if self._max_timestamp == UNKNOWN:
            self._load_max_timestamp()
        return self._max_timestamp_offset

    def _load_max_timestamp(self) -> None:
        last = self.time_index.last()
        self._max_timestamp, self._max_timestamp_offset = last or (NO_TIMESTAMP, self.base_offset)

    @property
    def first_timestamp(self) -> int:
        """The largest timestamp of the first batch, -1 when there is none: what age is counted from."""
        if self._first_timestamp == UNKNOWN:
            header = self.header_at(0)
            self._first_timestamp = NO_TIMESTAMP if header is None else header.max_timestamp
        return self._first_timestamp

    # -- finding ---------------------------------------------------------------------------------------------

    def header_at(self, position: int) -> BatchHeader | None:
        """The header of the batch at `position`, None at the end. KafkaError where there is no batch."""
        if position + HEADER_SIZE > self.size:
            return None
        return parse_header(self.file().pread(HEADER_SIZE, position))

    def locate(self, offset: int) -> tuple[int, int] | None:
        """Start and end of the first batch whose last offset is `offset` or later; None past the last batch."""
        offsets, positions = self._recent_offsets, self._recent_positions
        if offsets is not None and positions is not None:
            at = bisect_left(offsets, offset)
            if at or positions[0] == 0:
                if at == len(offsets):
                    return None
                return positions[at], positions[at + 1] if at + 1 < len(offsets) else self.size
        start = self.index.lookup(offset)
        try:
            return self._walk_to(start, offset)
        except KafkaError as error:
            if start == 0:
                raise
            # The index does not point at a batch: it is damaged, the log may well be whole.
            logger.error(
                "offset index points at no batch, reading from the start of the segment",
                extra={"fields": {"file": self.log_path, "position": start, "error": str(error)}},
            )
            return self._walk_to(0, offset)

    def _walk_to(self, position: int, offset: int) -> tuple[int, int] | None:
        size = self.size
        file = self.file()
        while position + HEADER_SIZE <= size:
            chunk = file.pread(min(HEADER_CHUNK_BYTES, size - position), position)
            at, found = find_offset(chunk, 0, len(chunk), offset)
            if found:
                length: int = _OFFSET_AND_LENGTH.unpack_from(chunk, at)[1]
                return position + at, min(position + at + length + LOG_OVERHEAD, size)
            if at == 0:
                break  # fewer bytes than a header: the file is shorter than it was
            position += at
        return None

    def locate_timestamp(self, position: int, timestamp: int) -> tuple[int, int] | None:
        """Start and end of the first batch from `position` on with a timestamp of `timestamp` or later."""
        size = self.size
        file = self.file()
        while position + HEADER_SIZE <= size:
            chunk = file.pread(min(HEADER_CHUNK_BYTES, size - position), position)
            at, found = find_timestamp(chunk, 0, len(chunk), timestamp)
            if found:
                length: int = _OFFSET_AND_LENGTH.unpack_from(chunk, at)[1]
                return position + at, min(position + at + length + LOG_OVERHEAD, size)
            if at == 0:
                break
            position += at
        return None

    def boundary(self, start: int, limit: int) -> int:
        """The end of the last whole batch that fits between `start`, itself one's start, and `limit`.

        It may stop short of the last by what the index leaves out, but never at `start` if a batch does fit.
        """
        positions = self._recent_positions
        if positions and positions[0] <= limit:
            found = positions[bisect_right(positions, limit) - 1]
        else:
            found = self.index.lookup_position(limit)
        if found > start:
            return found
        end = start
        file = self.file()
        while (
            len(head := file.pread(_OFFSET_AND_LENGTH.size, end)) == _OFFSET_AND_LENGTH.size
            and end + _OFFSET_AND_LENGTH.unpack(head)[1] + LOG_OVERHEAD <= limit
        ):
            end += max(HEADER_SIZE, _OFFSET_AND_LENGTH.unpack(head)[1] + LOG_OVERHEAD)
        return end

    def range(self, start: int, end: int) -> FileRange:
        return FileRange(self._fs.open(self.log_path), start, end - start)

    def headers(self, position: int = 0) -> Iterator[tuple[int, BatchHeader]]:
        """Position and header of each batch from `position` on. KafkaError where there is no batch."""
        file = self.file() if self.size else None
        chunk, chunk_start = b"", position
        while file is not None and position + HEADER_SIZE <= self.size:
            at = position - chunk_start
            if at + HEADER_SIZE > len(chunk):
                chunk_start, at = position, 0
                chunk = file.pread(min(HEADER_CHUNK_BYTES, self.size - position), position)
            header = parse_header(chunk, at)
            yield position, header
            position += header.size

    # -- opening, cutting, removing --------------------------------------------------------------------------

    def open_tail(self, interval_bytes: int = POSITION_MAX) -> int:
        """Make a segment that was closed in order ready for appends; the offset after its last batch.

        Only the batches behind the last index entry are looked at. KafkaError when they do not end where the
        file does, or reach further than entries are apart: then the segment was not closed in order, or its
        indexes are not all there, and it must be rebuilt.
        """
        last = self.index.last()
        newest = self.time_index.last()
        position = last[1] if last else 0
        self._max_timestamp, self._max_timestamp_offset = newest or (NO_TIMESTAMP, self.base_offset)
        next_offset = self.base_offset
        end = position
        whole = True
        for start, header in self.headers(position):
            if last is not None and start == position and newest is None:
                whole = header.max_timestamp < 0  # else there would be an entry for it
            if header.max_timestamp > self._max_timestamp:
                self._max_timestamp, self._max_timestamp_offset = header.max_timestamp, header.last_offset
            whole = whole and start - position <= interval_bytes
            next_offset = header.next_offset
            end = start + header.size
        self._bytes_since_entry = self.size - position
        self._entries = len(self.index)
        if not whole or end != self.size or (last is not None and next_offset <= last[0]):
            raise KafkaError(
                ErrorCode.CORRUPT_MESSAGE, f"{self.log_path} and its indexes do not end with the same batch"
            )
        return next_offset

    def load_indexes(self, offset_entries: bytes, time_entries: bytes, newest: tuple[int, int]) -> None:
        """Take over what a scan of the whole segment gave; `newest` is its largest timestamp and that offset."""
        self.index.load(offset_entries)
        self.time_index.load(time_entries)
        self._max_timestamp, self._max_timestamp_offset = newest
        self._pending_entries = 0
        self._recent_offsets = self._recent_positions = None
        last = self.index.last()
        self._bytes_since_entry = self.size - (last[1] if last else 0)
        self._entries = len(self.index)

    def truncate_to(self, offset: int) -> int:
        """Cut the batch that holds `offset`, and all after it; the new end offset. Durable when it returns."""
        located = self.locate(offset)
        if located is None:
            return self.open_tail()
        self.cut(located[0])
        self.index.truncate_to(offset)
        # An entry of the time index belongs to the offset index's entry made with it; without that one, a rebuild
        # would not make it either.
        last = self.index.last()
        self.time_index.truncate_to(last[0] + 1 if last else self.base_offset)
        self.txn_index.truncate_to(offset)
        # The batches are gone already: the log must come to know its new end, although a full disk takes no entries.
        # They wait in memory for the next write, and can be had from the batches after a crash.
        with contextlib.suppress(OSError):
            self.write_indexes()
        return self.open_tail()

    def cut(self, position: int) -> None:
        """Make the file end at `position`, durably: old batches must not show up behind new ones after a crash."""
        file = self.file()
        file.truncate(position)
        file.sync()
        self.size = position
        self._recent_offsets = self._recent_positions = None
        if position == 0:
            self._first_timestamp = NO_TIMESTAMP

    def create(self) -> None:
        """Make the file exist while it is empty, so that its name remembers the offset."""
        self._fs.open(self.log_path, create=True)

    def discard(self) -> list[str]:
        """Take the files out of the log by renaming them; the new names, to be removed where waiting does no harm.

        Removing a large file takes the kernel long. Readers that hold a range read on.
        """
        doomed = []
        for path in (self.log_path, self.index.path, self.time_index.path, self.txn_index.path):
            with contextlib.suppress(FileNotFoundError):
                self._fs.rename(path, path + DELETED_SUFFIX)
                doomed.append(path + DELETED_SUFFIX)
        return doomed

    def remove_indexes(self) -> None:
        """Delete the index files; what they held can be had from the log."""
        for path in (self.index.path, self.time_index.path, self.txn_index.path):
            with contextlib.suppress(FileNotFoundError):
                self._fs.remove(path)

    def forget(self) -> None:
        """Give back descriptors and maps."""
        self._fs.forget(self.log_path)
        self._fs.forget(self.index.path)
        self._fs.forget(self.time_index.path)
        self._fs.forget(self.txn_index.path)
