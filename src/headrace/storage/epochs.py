"""Which leader epoch wrote which offsets of one partition.

Owns the list of (epoch, start offset); invariant: both rise strictly along it. It is a function of the
batches in the log, so it can be rebuilt by `assign` over their headers; the file is a shortcut.
`PartitionLog` assigns on append and truncates with the log; replication and OffsetForLeaderEpoch ask for end
offsets. Semantics and file format (`leader-epoch-checkpoint`) are those of Kafka's LeaderEpochFileCache. No
file is touched here: `dirty` tells the log that `encode()` is due.
"""

from bisect import bisect_left, bisect_right
from typing import NamedTuple

UNDEFINED_EPOCH = -1
UNDEFINED_EPOCH_OFFSET = -1

CHECKPOINT_NAME = "leader-epoch-checkpoint"
_VERSION = 0


class CorruptEpochs(Exception):
    """A checkpoint file that cannot be read; the list is rebuilt from the log."""


class EpochEntry(NamedTuple):
    """One epoch and the offset of its first record."""

    epoch: int
    start_offset: int


class EpochCache:
    """The epochs of one partition. Single owner, no locks."""

    __slots__ = ("_epochs", "_starts", "dirty")

    def __init__(self) -> None:
        # Parallel, both strictly rising. A partition that never changed leader has one entry or none.
        self._epochs: list[int] = []
        self._starts: list[int] = []
        self.dirty = False
        """The list changed since the owner last wrote it; the owner resets it."""

    def __len__(self) -> int:
        return len(self._epochs)

    @property
    def latest_epoch(self) -> int:
        """The epoch of the last assignment, -1 when there is none."""
        return self._epochs[-1] if self._epochs else UNDEFINED_EPOCH

    @property
    def entries(self) -> list[EpochEntry]:
        return [EpochEntry(epoch, start) for epoch, start in zip(self._epochs, self._starts, strict=True)]

    def assign(self, epoch: int, start_offset: int) -> bool:
        """`epoch` writes from `start_offset` on; False when known. Entries that contradict it are dropped."""
        assert epoch >= 0 and start_offset >= 0, (epoch, start_offset)
        epochs, starts = self._epochs, self._starts
        if epochs and epoch == epochs[-1] and start_offset >= starts[-1]:
            return False
        while epochs and (epochs[-1] >= epoch or starts[-1] >= start_offset):
            epochs.pop()
            starts.pop()
        epochs.append(epoch)
        starts.append(start_offset)
        self.dirty = True
        return True

    def end_offset_for(self, epoch: int, log_end_offset: int) -> EpochEntry:
        """The largest known epoch at or below `epoch`, and the offset where it ends; (-1, -1) when undefined.

        The latest epoch ends at the log's end. An epoch older than all known ones keeps its number and ends
        where the first known one starts: its data is gone, and a follower goes on from there.
        """
        if epoch == UNDEFINED_EPOCH:
            return EpochEntry(UNDEFINED_EPOCH, UNDEFINED_EPOCH_OFFSET)
        epochs = self._epochs
        if epochs and epoch == epochs[-1]:
            return EpochEntry(epoch, log_end_offset)
        higher = bisect_right(epochs, epoch)
        if higher == len(epochs):
            return EpochEntry(UNDEFINED_EPOCH, UNDEFINED_EPOCH_OFFSET)
        return EpochEntry(epochs[higher - 1] if higher else epoch, self._starts[higher])

    def epoch_for_offset(self, offset: int) -> int:
        """The epoch that wrote `offset`, -1 when it lies before all that is known."""
        at = bisect_right(self._starts, offset) - 1
        return self._epochs[at] if at >= 0 else UNDEFINED_EPOCH

    def previous_epoch(self, epoch: int) -> int:
        """The largest known epoch below `epoch`, -1 when there is none."""
        at = bisect_left(self._epochs, epoch) - 1
        return self._epochs[at] if at >= 0 else UNDEFINED_EPOCH

    def truncate_from_end(self, end_offset: int) -> None:
        """The log was cut at `end_offset`: drop epochs that start there or later."""
        keep = bisect_left(self._starts, end_offset)
        if keep < len(self._starts):
            del self._epochs[keep:]
            del self._starts[keep:]
            self.dirty = True

    def truncate_from_start(self, start_offset: int) -> None:
        """The log starts here now: the epoch that wrote this offset starts with it, older ones are dropped."""
        first = bisect_right(self._starts, start_offset) - 1
        if first < 0 or (first == 0 and self._starts[0] == start_offset):
            return
        del self._epochs[:first]
        del self._starts[:first]
        self._starts[0] = start_offset
        self.dirty = True

    def clear(self) -> None:
        if self._epochs:
            self._epochs.clear()
            self._starts.clear()
            self.dirty = True

    def encode(self) -> bytes:
        """The content of the checkpoint file: version, count, then one `epoch start_offset` a line."""
        lines = [str(_VERSION), str(len(self._epochs))]
        lines += [f"{epoch} {start}" for epoch, start in zip(self._epochs, self._starts, strict=True)]
        return ("\n".join(lines) + "\n").encode()

    def load(self, data: bytes) -> None:
        """Replace the list by the content of a checkpoint file. CorruptEpochs changes nothing."""
        loaded = EpochCache()
        try:
            lines = data.decode("ascii").split("\n")
            if lines and not lines[-1]:
                lines.pop()
            if lines:  # Kafka leaves an empty file where nothing was ever assigned
                version, count = int(lines[0]), int(lines[1])
                if version != _VERSION:
                    raise ValueError(f"unknown version {version}")
                if len(lines) != count + 2:
                    raise ValueError(f"{count} entries promised, {len(lines) - 2} found")
                for line in lines[2:]:
                    epoch, start_offset = map(int, line.split(" "))
                    if epoch < 0 or start_offset < 0:
                        raise ValueError(f"negative entry {line!r}")
                    loaded.assign(epoch, start_offset)
        except (ValueError, IndexError) as error:
            raise CorruptEpochs(str(error)) from error
        self._epochs, self._starts, self.dirty = loaded._epochs, loaded._starts, False
