"""The names in a data directory, and the lock that gives it to one process.

Owns how a partition's directory is called (`topic-partition`), also once it is deleted (`….<unique>-delete`) or found
to belong to no topic (`….<unique>-stray`), and the lock file. Invariant: every name fits the 255 bytes of a file system
and none of the three kinds can be taken for another. Called by `LogManager`.
"""

import contextlib
import fcntl
import os
from typing import Final

LOCK_NAME: Final = ".lock"
DELETED_SUFFIX: Final = "-delete"
STRAY_SUFFIX: Final = "-stray"
NAME_BYTES_MAX: Final = 255
PARTITION_MAX: Final = 2**31 - 1


class DirectoryInUse(Exception):
    """Another process has the data directory; the message says which file tells so and what to do."""


def directory_name(topic: str, partition: int) -> str:
    """Where a partition lives."""
    return f"{topic}-{partition}"


def parse_directory_name(name: str) -> tuple[str, int] | None:
    """The partition that lives in a directory of this name; None when it is no partition's."""
    topic, _, digits = name.rpartition("-")
    if not topic or not digits.isdecimal() or not digits.isascii():
        return None
    partition = int(digits)
    if partition > PARTITION_MAX or str(partition) != digits:
        return None
    return topic, partition


def aside_name(directory: str, unique: str, suffix: str) -> str:
    """The name of a partition's directory when it is put aside; a long topic's name is cut to fit."""
    topic, _, partition = directory.rpartition("-")
    tail = f"-{partition}.{unique}{suffix}"
    return topic[: NAME_BYTES_MAX - len(tail)] + tail


def is_deleted(name: str) -> bool:
    """Whether a directory of this name only waits to be removed."""
    return name.endswith(DELETED_SUFFIX) and "." in name


class DirectoryLock:
    """A data directory, held by this process until `release` or its end, however it ends."""

    def __init__(self, directory: str) -> None:
        """DirectoryInUse when another process holds it."""
        self.path = os.path.join(directory, LOCK_NAME)
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip()
            os.close(self._fd)
            raise DirectoryInUse(
                f"the data directory {directory} is in use: another process"
                f"{f' (pid {holder})' if holder.isdecimal() else ''} holds the lock on {self.path}. "
                f"Stop that broker first, or give this one another directory with --data."
            ) from None
        with contextlib.suppress(
            OSError
        ):  # on a full disk the lock holds all the same, only without a name to it
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, b"%d\n" % os.getpid(), 0)

    def release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
