"""What the storage tests share: batches to append, logs to append them to, and checks over a whole log."""

import struct

from headrace.base.settings import TopicConfig
from headrace.records.batch import BatchHeader
from headrace.records.builder import build_batch, iter_batches
from headrace.storage.files import FileSystem
from headrace.storage.log import PartitionLog
from headrace.storage.memory import MemoryFileSystem
from headrace.storage.scan import scan_segment

NOW_MS = 1_700_000_000_000
DIRECTORY = "topic-0"


def make_batch(
    count: int = 1,
    value_bytes: int = 20,
    *,
    timestamp: int = NOW_MS,
    key: bytes | None = b"key",
    producer_id: int = -1,
    producer_epoch: int = 0,
    sequence: int = 0,
    compression: int = 0,
    control: bool = False,
    transactional: bool = False,
    fill: bytes = b"v",
) -> bytearray:
    """A batch as a producer sends it; each record is a millisecond later than the one before."""
    records = [(timestamp + number, key, fill * value_bytes, ()) for number in range(count)]
    idempotent = producer_id >= 0
    return bytearray(
        build_batch(
            records,
            compression=compression,
            producer_id=producer_id,
            producer_epoch=producer_epoch if idempotent else -1,
            base_sequence=sequence if idempotent else -1,
            control=control,
            transactional=transactional,
        )
    )


def make_log(fs: FileSystem | None = None, **settings: object) -> PartitionLog:
    """An empty log of a topic with these settings, in memory unless a file system is given."""
    fs = fs or MemoryFileSystem()
    fs.makedirs(DIRECTORY)
    return PartitionLog(
        fs,
        DIRECTORY,
        "topic",
        0,
        TopicConfig(**settings),  # type: ignore[arg-type]
        now_ms=NOW_MS,
    )


def append(log: PartitionLog, data: bytearray, *, epoch: int = 0, now_ms: int = NOW_MS) -> int:
    """Append one batch as a producer's; the offset it got."""
    return log.append(memoryview(data), leader_epoch=epoch, now_ms=now_ms).first_offset


def append_many(log: PartitionLog, count: int = 100) -> None:
    """Append batches of one to four records of various sizes, each a millisecond after the one before."""
    for number in range(count):
        append(log, make_batch(1 + number % 4, number % 37, timestamp=NOW_MS + number))


def read_all(log: PartitionLog, max_bytes: int = 1 << 30) -> bytes:
    """Everything a consumer would get from the log start on, fetch by fetch."""
    parts = []
    offset = log.log_start_offset
    while offset < log.log_end_offset:
        got = log.read(offset, max_bytes, max_offset=log.log_end_offset).read()
        batches = list(iter_batches(got))
        assert batches, f"nothing at {offset} of {log}"
        assert sum(header.size for header, _ in batches) == len(got), "a batch was cut"
        offset = batches[-1][0].next_offset
        parts.append(got)
    return b"".join(parts)


def headers_of(data: bytes) -> list[BatchHeader]:
    """The headers of a run of batches, whose CRCs are checked."""
    return [header for header, _ in iter_batches(data)]


def check_indexes(log: PartitionLog) -> None:
    """Assert that every index is byte for byte what a scan of its segment gives."""
    for number, segment in enumerate(log.segments):
        sealed = number + 1 < len(log.segments)
        scanned = scan_segment(
            segment, log.config.index_interval_bytes, log.segments[number + 1].base_offset if sealed else None
        )
        assert scanned.valid_bytes == segment.size, segment
        assert scanned.next_offset == log.end_of(segment), segment
        times = scanned.time_entries
        if sealed and scanned.batches:
            newest, offset = scanned.newest
            entry = struct.pack(">qi", newest, offset - segment.base_offset)
            times += entry if not times or times[-12:-4] != entry[:8] else b""
        assert segment.index.encoded() == scanned.offset_entries, segment
        assert segment.time_index.encoded() == times, segment
        assert (segment.max_timestamp, segment.max_timestamp_offset) == scanned.newest, segment
