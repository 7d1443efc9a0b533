"""Putting a cleaned segment in the place of those it was made from; a kill at any point leaves one or the other.

The names tell how far it got. `.cleaned`: written by a thread, worthless after a crash, though synced when it is handed
over. Then, in one turn of the loop: the log becomes `.swap`, the old files become `.deleted`, the new ones lose their
suffix, the list of segments changes. A crash on the way leaves a first part of these renames; where that includes the
`.swap`, recovery does the others: it removes what the segment reaches over and takes the suffix off. The transaction
index cannot be had from the segment alone, so it takes the same way as the log, one step behind it. Readers that hold
a range of an old file read on. Invariant: what a cleaned segment replaces is never served beside it, nor missed without
it. `Cleaner` is the caller.
"""

import contextlib
from typing import TYPE_CHECKING, Final

from headrace.storage.files import FileSystem
from headrace.storage.segment import Segment

if TYPE_CHECKING:
    from headrace.storage.log import PartitionLog

CLEANED_SUFFIX: Final = ".cleaned"
SWAP_SUFFIX: Final = ".swap"


def use_suffix(segment: Segment, suffix: str) -> None:
    """Have a new segment's files be found under their names with this suffix."""
    segment.log_path += suffix
    segment.index.path += suffix
    segment.time_index.path += suffix
    segment.txn_index.path += suffix


def can_swap(log: "PartitionLog", replaced: list[Segment]) -> bool:
    """Whether the log still consists of these segments in a row: none was deleted or truncated meanwhile."""
    if log.failed:
        return False
    number = log.segment_number(replaced[0].base_offset)
    return log.segments[number : number + len(replaced)] == replaced


def swap_in(log: "PartitionLog", segment: Segment, replaced: list[Segment]) -> None:
    """Make a segment that is durable under `.cleaned` take the place of `replaced`; on the loop.

    OSError leaves the log failed: what was begun, recovery finishes.
    """
    assert can_swap(log, replaced), f"{segment} has nothing to replace in {log}"
    number = log.segment_number(replaced[0].base_offset)
    fs, log_path = log.fs, segment.log_path.removesuffix(CLEANED_SUFFIX)
    try:
        fs.rename(segment.log_path, log_path + SWAP_SUFFIX)
        txn_path = segment.txn_index.path.removesuffix(CLEANED_SUFFIX)
        with contextlib.suppress(FileNotFoundError):
            fs.rename(segment.txn_index.path, txn_path + SWAP_SUFFIX)
        for old in replaced:
            log.garbage += old.discard()
        for index in (segment.index, segment.time_index):
            path = index.path.removesuffix(CLEANED_SUFFIX)
            with contextlib.suppress(FileNotFoundError):
                fs.rename(index.path, path)
            index.path = path
        fs.rename(log_path + SWAP_SUFFIX, log_path)
        segment.log_path = log_path
        with contextlib.suppress(FileNotFoundError):
            fs.rename(txn_path + SWAP_SUFFIX, txn_path)
        segment.txn_index.path = txn_path
    except OSError:
        log.failed = True
        raise
    # A merged segment's start is no segment's any more; a snapshot of it would never be removed.
    log.garbage += [log.snapshot_path(old.base_offset) for old in replaced[1:]]
    segments = [*log.segments[:number], segment, *log.segments[number + len(replaced) :]]
    log.replace_segments(segments, truncated=False)
    log.names_changed()


def discard_cleaned(fs: FileSystem, segment: Segment) -> None:
    """Remove the files of a segment that is to replace nothing."""
    for path in (segment.log_path, segment.index.path, segment.time_index.path, segment.txn_index.path):
        with contextlib.suppress(FileNotFoundError):
            fs.remove(path)
