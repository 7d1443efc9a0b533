"""One cleaning of one compacted log: from what its segments hold to the segments that take their place.

Two passes, as Kafka's. The first reads the part not cleaned yet (the dirty part) and remembers the last offset of every
key in a map of bounded size; when that is full, this cleaning ends there and the next goes on. The second copies all
segments before that point and leaves out each record whose key has a later one, and tombstones whose time is over.
Segments that became small are merged, up to segment.bytes.

What stays as it was: offsets, timestamps, headers, compression, leader epochs; a batch that loses nothing is copied
byte for byte. A batch that loses all its records goes too, unless it is the last one of a producer (its sequence number
must survive) or the last one of the new segment (which then says how far it reaches): those stay as empty batches.
A tombstone's time (delete.retention.ms) counts from the first cleaning that meets it, which writes the end of it into
the batch: attribute bit 6, and the base timestamp (KIP-534). Records of aborted transactions go and take no other's
place; committed ones are cleaned like any. A marker stays as long as anything of its transaction does; then it gets a
time like a tombstone's, so that readers that saw the records also see how they ended. Nothing at or past the first
unstable offset is cleaned, so no open transaction is ever met.

Invariants: only sealed segments that are durable are read, none is changed; of a batch nothing is used before its CRC
was found right. `steps` runs in a thread, a portion at a time; it yields how many bytes it read and wrote, or a
`CleanedSegment` for the loop to put in place (`swaps`). `Cleaner` plans and drives it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from headrace.base.errors import ErrorCode, KafkaError
from headrace.records import codec, compaction
from headrace.records.batch import (
    COMPRESSION_MASK,
    CONTROL_BIT,
    DELETE_HORIZON_BIT,
    HEADER_SIZE,
    TRANSACTIONAL_BIT,
    BatchHeader,
    BatchInfo,
    ScanStop,
    SegmentScan,
    parse_header,
)
from headrace.records.builder import finish_batch, finish_in_place, iter_records
from headrace.records.compression import INFLATED_BYTES_MAX, decompress
from headrace.storage.clean_txns import OpenTransactions
from headrace.storage.files import File, FileSystem
from headrace.storage.markers import parse_marker
from headrace.storage.producer_entry import NO_OFFSET
from headrace.storage.segment import POSITION_MAX, RELATIVE_OFFSET_MAX, Segment
from headrace.storage.swaps import CLEANED_SUFFIX, discard_cleaned, use_suffix
from headrace.storage.txn_index import AbortedTransaction

WINDOW_BYTES: Final = 1 << 18  # read at a time: a portion; a larger batch gets a window of its own
SPARE_SLOTS: Final = (
    4  # one for so many offsets of the dirty part, besides one for each; as far as memory allows
)
MARKS_SHARE: Final = (
    16  # of its memory the map spends so small a part at most on a bit for each offset of the dirty part
)
TIME_MAX: Final = 2**63 - 1

Group = list[Segment]
Kept = bytes | bytearray | memoryview


class Plan(NamedTuple):
    """What a cleaning needs to know, taken on the loop."""

    fs: FileSystem
    directory: str
    segments: list[Segment]
    """All from the log's first up to the last that reaches below `end_offset`."""
    first_dirty_offset: int
    end_offset: int
    """Nothing from here on may be cleaned."""
    map_bytes_max: int
    load_factor: float
    segment_bytes: int
    segment_index_bytes: int
    index_interval_bytes: int
    delete_retention_ms: int
    now_ms: int
    last_offsets: Mapping[int, int]
    """Producer id -> last offset of its last batch, -1 when its epoch has none."""
    last_epochs: Mapping[int, int]
    """Producer id -> its epoch."""
    aborted: Sequence[AbortedTransaction]
    """Aborted transactions with records below `end_offset`."""


class CleanedSegment(NamedTuple):
    """A segment, durable under the suffix `.cleaned`, that stands for `replaced`."""

    segment: Segment
    replaced: Group


class Totals:
    """What a cleaning did, for the log."""

    __slots__ = ("bytes_read", "bytes_written", "keys", "records_dropped")

    def __init__(self) -> None:
        self.bytes_read = 0
        self.bytes_written = 0
        self.records_dropped = 0
        self.keys = 0


class Cleaning:
    """One cleaning under way. `clean_offset` is how far the log is clean once all its steps are done."""

    def __init__(self, plan: Plan) -> None:
        self.plan: Final = plan
        self.clean_offset = plan.first_dirty_offset
        self.totals: Final = Totals()
        self._open = OpenTransactions(plan.aborted)
        self._dropped_markers: set[int] = set()

    def steps(self) -> Iterator[int | CleanedSegment]:
        """Do it, portion by portion. OSError: the disk would not. KafkaError: the log is damaged."""
        plan = self.plan
        keys = _new_map(plan)
        yield from self._map_dirty(keys)
        self.totals.keys = keys.count
        self._open = OpenTransactions(plan.aborted)
        for group in groups(plan, self.clean_offset):
            yield from self._clean(group, keys)
        # Before anyone writes down how far the log is clean: a power cut that undid the last swap would leave a value
        # that no later cleaning looks at, and its tombstone would go.
        plan.fs.sync_dir(plan.directory)

    # -- the first pass --------------------------------------------------------------------------------------

    def _map_dirty(self, keys: compaction.KeyMap) -> Iterator[int]:
        plan = self.plan
        for segment, following in zip(plan.segments, [*plan.segments[1:], None], strict=False):
            if following is not None and following.base_offset <= plan.first_dirty_offset:
                continue
            located = segment.locate(plan.first_dirty_offset) if segment.size else None
            for window, batches in self._windows(segment, located[0] if located else segment.size):
                for batch in batches:
                    full_at = self._map(keys, window, batch)
                    if full_at >= 0:
                        self.clean_offset = full_at
                        return
                yield len(window)
        self.clean_offset = plan.end_offset

    def _map(self, keys: compaction.KeyMap, window: bytes, batch: BatchInfo) -> int:
        """Take a batch's keys into the map; the offset of the first that found no room, or -1."""
        plan = self.plan
        if batch.last_offset >= plan.end_offset:
            return min(batch.base_offset, plan.end_offset)
        if batch.attributes & CONTROL_BIT:
            self._meets_marker(window, batch)
            return -1
        if batch.attributes & TRANSACTIONAL_BIT and self._open.is_aborted(
            batch.producer_id, batch.base_offset
        ):
            return -1
        data, start, end = _records(window, batch)
        return compaction.map_keys(keys, data, start, end, batch.base_offset, plan.first_dirty_offset)

    # -- the second pass -------------------------------------------------------------------------------------

    def _clean(self, group: Group, keys: compaction.KeyMap) -> Iterator[int | CleanedSegment]:
        """Write what is left of a group of segments as one; nothing when that is what there is already."""
        plan = self.plan
        target = _Target(plan, group)
        changed = len(group) > 1
        for segment in group:
            last = segment is group[-1]
            for window, batches in self._windows(segment, 0):
                out: list[Kept] = []
                view = memoryview(window)
                for batch in batches:
                    at_end = last and batch is batches[-1] and self._reached_end
                    kept = self._filter(keys, window, batch, at_end)
                    changed = changed or kept is not None
                    if kept is None:
                        kept = view[batch.position : batch.position + batch.size]
                    out.append(kept)
                written = target.write(out[0] if len(out) == 1 else b"".join(out))
                self.totals.bytes_written += written
                yield len(window) + written
        if not changed:
            target.discard()
            return
        aborted = [
            entry
            for segment in group
            for entry in segment.txn_index.entries()
            if entry.last_offset not in self._dropped_markers
        ]
        yield CleanedSegment(target.finish(aborted), group)

    def _filter(self, keys: compaction.KeyMap, window: bytes, batch: BatchInfo, at_end: bool) -> Kept | None:
        """What stays of a batch: None when it stays as it is."""
        plan = self.plan
        header = parse_header(window, batch.position)
        if batch.attributes & CONTROL_BIT:
            return self._filter_marker(window, batch, header, at_end)
        if (
            batch.attributes & TRANSACTIONAL_BIT
            and self._open.is_aborted(batch.producer_id, batch.base_offset)
            and batch.last_offset < plan.end_offset
        ):
            self.totals.records_dropped += header.record_count
            if not at_end and plan.last_offsets.get(header.producer_id) != header.last_offset:
                return b""
            return _empty(header) if header.record_count else None
        horizon_ms = header.base_timestamp if header.has_delete_horizon else TIME_MAX
        data, start, end = _records(window, batch) if header.record_count else (b"", 0, 0)
        kept, dropped, tombstones, latest_delta, out = compaction.filter_records(
            keys,
            data,
            start,
            end,
            header.record_count,
            header.base_offset,
            header.last_offset,
            self.clean_offset,
            plan.now_ms < horizon_ms,
            HEADER_SIZE,
        )
        self.totals.records_dropped += dropped
        if not kept:
            if not at_end and plan.last_offsets.get(header.producer_id) != header.last_offset:
                return b""
            return _empty(header) if dropped else None
        sets_horizon = bool(tombstones) and not header.has_delete_horizon
        if not dropped and not sets_horizon:
            return None
        if not header.is_log_append_time:
            header = header._replace(max_timestamp=header.base_timestamp + latest_delta)
        if sets_horizon:
            if out is not None:
                data, start, end = bytes(out), HEADER_SIZE, len(out)
            return _with_horizon(plan, header._replace(record_count=kept), data, start, end)
        assert out is not None, "nothing was dropped, and yet it is not left as it was"
        return finish_in_place(header._replace(record_count=kept), out)

    def _meets_marker(self, window: bytes, batch: BatchInfo) -> bool | None:
        """Whether nothing is left of the transaction that a marker ends; None when the batch is no marker any more."""
        view = memoryview(window)[batch.position : batch.position + batch.size]
        records = iter_records(view)
        marker = parse_marker(records[0].key, records[0].value) if records else None
        if marker is None:
            return None if not records else False
        return self._open.is_dispensable(batch.producer_id, batch.base_offset, marker.committed)

    def _filter_marker(
        self, window: bytes, batch: BatchInfo, header: BatchHeader, at_end: bool
    ) -> Kept | None:
        """What stays of a control batch: all while it is needed, then all with the end of its time, then nothing."""
        plan = self.plan
        dispensable = self._meets_marker(window, batch)
        if dispensable is False or batch.last_offset >= plan.end_offset:
            return None
        last_of_producer = (
            plan.last_offsets.get(header.producer_id) == NO_OFFSET
            and plan.last_epochs.get(header.producer_id) == header.producer_epoch
        )
        if dispensable is None:  # emptied before
            return None if at_end or last_of_producer else b""
        if not header.has_delete_horizon:
            return _with_horizon(plan, header, *_records(window, batch))
        if plan.now_ms < header.base_timestamp:
            return None
        self._dropped_markers.add(batch.base_offset)
        self.totals.records_dropped += 1
        return _empty(header) if at_end or last_of_producer else b""

    # -- reading ---------------------------------------------------------------------------------------------

    def _windows(self, segment: Segment, position: int) -> Iterator[tuple[bytes, list[BatchInfo]]]:
        """The whole batches of a segment from `position` on, a window at a time, their CRCs checked.

        `_reached_end` says whether the window given last is the segment's last.
        """
        file: File | None = segment.file() if segment.size else None
        wanted = WINDOW_BYTES
        while file is not None and position < segment.size:
            asked = min(wanted, segment.size - position)
            window = file.pread(asked, position)
            found = codec.scan(window, 0, len(window), segment.base_offset)
            if (
                found.stop.corrupt
                or len(window) < asked
                or (
                    found.stop is ScanStop.NEED_MORE
                    and found.needed_bytes > segment.size - position - found.position
                )
            ):
                raise KafkaError(
                    ErrorCode.CORRUPT_MESSAGE,
                    f"{segment.log_path} is damaged at {position + found.position}: {found.stop.name}",
                )
            position += found.position
            # With the header after it, so that a window never ends in a batch that has to be read again.
            wanted = max(WINDOW_BYTES, found.needed_bytes + HEADER_SIZE)
            self._reached_end = position == segment.size
            self.totals.bytes_read += found.position
            if found.batches:
                yield window, found.batches

    _reached_end = False


class _Target:
    """The segment being written, under the `.cleaned` suffix."""

    def __init__(self, plan: Plan, group: Group) -> None:
        self._plan = plan
        self._group = group
        self._segment = Segment(plan.fs, plan.directory, group[0].base_offset)
        use_suffix(self._segment, CLEANED_SUFFIX)
        self.discard()
        self._file = plan.fs.open(self._segment.log_path, create=True)
        self._scan = SegmentScan(group[0].base_offset, plan.index_interval_bytes)
        self._size = 0

    def write(self, data: Kept) -> int:
        if not data:
            return 0
        if self._size + len(data) > POSITION_MAX:
            raise KafkaError(ErrorCode.KAFKA_STORAGE_ERROR, f"{self._segment.log_path} grows too large")
        found = codec.scan_segment(self._scan, data, 0, len(data), self._size)
        assert found.stop is ScanStop.END, f"the cleaner wrote no batch: {found.stop.name}"
        self._file.pwrite(data, self._size)
        self._size += len(data)
        return len(data)

    def finish(self, aborted: Sequence[AbortedTransaction]) -> Segment:
        """Make it durable, with its indexes.

        The directory too: what was swapped in before this must not come back once this one stands, or a value could
        outlive its tombstone.
        """
        plan, group = self._plan, self._group
        segment = Segment(
            plan.fs, plan.directory, group[0].base_offset, self._size, max(old.created_ms for old in group)
        )
        use_suffix(segment, CLEANED_SUFFIX)
        scan = self._scan
        segment.load_indexes(
            bytes(scan.offset_entries),
            bytes(scan.time_entries),
            (scan.max_timestamp, scan.max_timestamp_offset),
        )
        segment.txn_index.load(aborted)
        segment.seal()
        self._file.sync()
        for file in segment.index_files():
            file.sync()
        plan.fs.sync_dir(plan.directory)
        return segment

    def discard(self) -> None:
        """Remove what is there under these names."""
        discard_cleaned(self._plan.fs, self._segment)


def groups(plan: Plan, clean_offset: int) -> Iterator[Group]:
    """The segments to clean, in runs that fit into one segment each, oldest first."""
    group: Group = []
    size = index_bytes = 0
    for number, segment in enumerate(plan.segments):
        if segment.base_offset >= clean_offset:
            break
        following = plan.segments[number + 1] if number + 1 < len(plan.segments) else None
        end_offset = following.base_offset if following is not None else plan.end_offset
        entry_bytes = max(len(segment.index) * 8, len(segment.time_index) * 12)
        if group and (
            size + segment.size > plan.segment_bytes
            or index_bytes + entry_bytes > plan.segment_index_bytes
            or end_offset - group[0].base_offset > RELATIVE_OFFSET_MAX
        ):
            yield group
            group, size, index_bytes = [], 0, 0
        group.append(segment)
        size += segment.size
        index_bytes += entry_bytes
    if group:
        yield group


def _new_map(plan: Plan) -> compaction.KeyMap:
    offsets = plan.end_offset - plan.first_dirty_offset
    mark_bytes = min(offsets // 8 + 1, plan.map_bytes_max // MARKS_SHARE)
    slot_bytes = plan.map_bytes_max - mark_bytes
    slots = max(2, min(slot_bytes // compaction.SLOT_BYTES, offsets + offsets // SPARE_SLOTS + 1))
    entries_max = max(1, min(int(slots * plan.load_factor), slots - 1))
    return compaction.KeyMap(slots, entries_max, plan.first_dirty_offset, min(offsets, mark_bytes * 8))


def _records(window: bytes, batch: BatchInfo) -> tuple[bytes, int, int]:
    """Where a batch's records lie: in the window itself unless they are compressed."""
    start, end = batch.position + HEADER_SIZE, batch.position + batch.size
    compression = batch.attributes & COMPRESSION_MASK
    if not compression:
        return window, start, end
    inflated = bytes(decompress(compression, memoryview(window)[start:end], INFLATED_BYTES_MAX))
    return inflated, 0, len(inflated)


def _with_horizon(plan: Plan, header: BatchHeader, data: bytes, start: int, end: int) -> bytearray:
    """A batch of these records that says from when on its tombstones, or its marker, may go."""
    horizon_ms = min(plan.now_ms + plan.delete_retention_ms, TIME_MAX)
    out = bytearray(HEADER_SIZE)
    out += compaction.rebase_records(data, start, end, header.base_timestamp - horizon_ms)
    attributes = header.attributes | DELETE_HORIZON_BIT
    return finish_in_place(header._replace(base_timestamp=horizon_ms, attributes=attributes), out)


def _empty(header: BatchHeader) -> bytes:
    """The batch without its records: its offsets and what its producer's state is made of."""
    attributes = header.attributes & ~(COMPRESSION_MASK | DELETE_HORIZON_BIT)
    return finish_batch(
        header._replace(attributes=attributes, base_timestamp=header.max_timestamp, record_count=0),
        bytearray(HEADER_SIZE),
    )
