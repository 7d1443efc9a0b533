"""A Raft snapshot as a file: the voters as one record batch of their own, then the application's batches.

Owns the names and the first batch; the rest is the application's. Invariants: a file under a snapshot's name is whole,
because it is written or received aside, synced and renamed; bytes are sent to followers as they lie in the file. A file
without the first batch is one of a cluster that never had other voters than those it was begun with. Called by the
durable storage.
"""

from typing import Final

from headrace.base.errors import KafkaError
from headrace.consensus.raft.messages import SnapshotMeta, Voters, decode_voters, encode_voters
from headrace.consensus.snapshots import SUFFIX, SnapshotDamaged, find_snapshots, snapshot_name
from headrace.records.batch import HEADER_SIZE, parse_header
from headrace.records.builder import build_batch, iter_batches, iter_records
from headrace.storage.files import FileSystem

VOTERS_KEY: Final = b"voters"
INCOMING_NAME: Final = f"incoming{SUFFIX}.part"


def path_of(directory: str, meta: SnapshotMeta) -> str:
    """Where the snapshot of `meta` lies."""
    return f"{directory}/{snapshot_name(meta.end, meta.term)}"


def encode(meta: SnapshotMeta, body: bytes, now_ms: int) -> bytes:
    """The content of a snapshot whose application part is `body`."""
    if meta.voters is None:
        return body
    return build_batch([(now_ms, VOTERS_KEY, encode_voters(meta.voters), ())]) + body


def split(data: bytes) -> tuple[Voters | None, int]:
    """The voters that a snapshot tells, and where the application's part begins. KafkaError when it is damaged."""
    if len(data) < HEADER_SIZE:
        return None, 0
    header = parse_header(data)
    for _, batch in iter_batches(data[: header.size]):
        record = iter_records(batch)[0]
        if record.key == VOTERS_KEY and record.value is not None:
            return decode_voters(record.value), header.size
    return None, 0


def find_newest(fs: FileSystem, directory: str) -> SnapshotMeta:
    """What the newest snapshot in `directory` stands for. SnapshotDamaged when that cannot be told."""
    found = find_snapshots(fs, directory)
    if not found:
        return SnapshotMeta()
    end, path = found[-1]
    term = int(path.removesuffix(SUFFIX).rpartition("-")[2])
    try:
        voters, _ = split(fs.read(path))
    except (KafkaError, ValueError) as error:
        raise SnapshotDamaged(path, str(error)) from None
    return SnapshotMeta(end, term, voters)


def check_whole(fs: FileSystem, path: str) -> None:
    """SnapshotDamaged unless the file is record batches to its very end, each with its CRC."""
    data = fs.read(path)
    try:
        size = sum([header.size for header, _ in iter_batches(data)])
    except KafkaError as error:
        raise SnapshotDamaged(path, error.message) from None
    if size != len(data):
        raise SnapshotDamaged(path, f"it ends in the middle of a batch, at byte {len(data)}")


def remove_older(fs: FileSystem, directory: str, end: int) -> None:
    """Remove the snapshots that reach less far than `end`."""
    for other, path in find_snapshots(fs, directory):
        if other < end:
            fs.remove(path)
