"""Snapshots of the metadata: the entries that make the whole state up to an offset, in one file beside the log.

A file is named like Kafka's, by the offset it reaches and the epoch (`00000000000000000042-0000000000.checkpoint`), and
holds record batches, the last of which ends with a count of all entries. Invariant: a file under that name is whole,
because it is written aside, synced and renamed; damage that comes later is found by the CRCs and the count. Called by
the metadata log, which cuts its log below a snapshot only once the snapshot is durable.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from headrace.base.errors import ErrorCode, KafkaError
from headrace.records.builder import build_batch, iter_batches, iter_records
from headrace.storage.files import FileSystem

SUFFIX: Final = ".checkpoint"
ENTRIES_PER_BATCH: Final = 5_000
FOOTER_KEY: Final = b"entries"


class SnapshotDamaged(KafkaError):
    """A snapshot that does not hold what was written."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(ErrorCode.KAFKA_STORAGE_ERROR, f"the metadata snapshot {path} is damaged: {why}")


def snapshot_name(end_offset: int, epoch: int) -> str:
    """The name of the snapshot of everything below `end_offset`."""
    return f"{end_offset:020d}-{epoch:010d}{SUFFIX}"


def find_snapshots(fs: FileSystem, directory: str) -> list[tuple[int, str]]:
    """The snapshots in a directory as (end offset, path), newest last."""
    found = []
    for name in fs.listdir(directory):
        offset, dash, epoch = name.removesuffix(SUFFIX).partition("-")
        if name.endswith(SUFFIX) and dash and offset.isdigit() and epoch.isdigit():
            found.append((int(offset), f"{directory}/{name}"))
    return sorted(found)


def encode_snapshot(entries: Sequence[bytes], now_ms: int) -> bytes:
    """The content of a snapshot of these entries."""
    rows: list[tuple[int, bytes | None, bytes, tuple[()]]] = [(now_ms, None, entry, ()) for entry in entries]
    rows.append((now_ms, FOOTER_KEY, str(len(entries)).encode(), ()))
    batches = [
        build_batch(rows[start : start + ENTRIES_PER_BATCH], base_offset=start)
        for start in range(0, len(rows), ENTRIES_PER_BATCH)
    ]
    return b"".join(batches)


def decode_snapshot(data: bytes, path: str) -> Iterator[bytes]:
    """The entries of a snapshot, in order. SnapshotDamaged, before the first, when they are not all there.

    `path` is for what is said of it.
    """
    entries: list[bytes] = []
    footer: bytes | None = None
    try:
        for _, batch in iter_batches(data):
            for record in iter_records(batch):
                if record.key == FOOTER_KEY:
                    footer = record.value
                elif record.value is not None:
                    entries.append(record.value)
    except KafkaError as error:
        raise SnapshotDamaged(path, error.message) from None
    if footer != str(len(entries)).encode():
        raise SnapshotDamaged(
            path, f"{len(entries)} entries, and its end is missing or speaks of another number"
        )
    return iter(entries)
