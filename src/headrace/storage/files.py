"""Files: the one door between the storage layer and a disk (`memory` and `faulty` are the other two).

Owns file descriptors and memory maps. Invariant: however many files there are, at most `max_open` descriptors
and `max_maps` maps are kept; a file evicted while someone still holds it (a `FileRange` on its way to a
socket, a flush in a thread) stays open until the last reference is dropped, so nobody who has a `File` ever
sees it closed under them. Segments, indexes, checkpoints and the log manager are the callers; none of them calls the
operating system itself. Paths are relative to the root of the file system.
"""

import contextlib
import errno
import mmap
import os
import resource
import shutil
import threading
from collections import OrderedDict
from typing import NamedTuple, Protocol

Buffer = bytes | bytearray | memoryview | mmap.mmap

OPEN_FILES_MAX = 4096  # descriptors kept open when the process limit allows it
OPEN_FILES_MIN = 16
INDEX_MAPS_MAX = 1024  # memory maps kept


class File(Protocol):
    """An open file. Offsets are explicit: there is no position to share."""

    @property
    def path(self) -> str: ...

    def fileno(self) -> int:
        """A real descriptor, good for `os.sendfile`."""
        ...

    def size(self) -> int: ...

    def pread(self, length: int, offset: int) -> bytes:
        """Up to `length` bytes; short only at the end of the file."""
        ...

    def pwrite(self, data: Buffer, offset: int) -> None:
        """All of `data`, or OSError (and then any part of it may be in the file)."""
        ...

    def truncate(self, size: int) -> None: ...

    def sync(self) -> None:
        """Data and size are on stable storage when this returns (fdatasync)."""
        ...

    def close(self) -> None: ...


class FileRange(NamedTuple):
    """Bytes of a file, for a reader to send on. Holding it keeps the file open, even when it is deleted."""

    file: File
    offset: int
    length: int

    def read(self) -> bytes:
        return self.file.pread(self.length, self.offset)


class FileSystem(Protocol):
    """Where a broker keeps its state. Every method that can fail raises OSError."""

    def open(self, path: str, create: bool = False) -> File: ...

    def exists(self, path: str) -> bool: ...

    def size(self, path: str) -> int: ...

    def listdir(self, path: str) -> list[str]: ...

    def makedirs(self, path: str) -> None: ...

    def remove(self, path: str) -> None: ...

    def rename(self, source: str, target: str) -> None:
        """Atomic; replaces the target."""
        ...

    def rmtree(self, path: str) -> None: ...

    def sync_dir(self, path: str) -> None:
        """The names in a directory are on stable storage when this returns."""
        ...

    def free_bytes(self) -> int: ...

    def read(self, path: str) -> bytes:
        """The whole of a small file."""
        ...

    def write_atomic(self, path: str, data: bytes, *, durable: bool = True) -> None:
        """Replace a small file as one step; without `durable` it is atomic but not yet synced."""
        ...

    def map(self, path: str, length: int) -> Buffer:
        """A read-only view of at least the first `length` bytes, which must exist. Cached, within a bound."""
        ...

    def forget(self, path: str) -> None:
        """Drop the cached descriptor and map of a file."""
        ...

    def close(self) -> None: ...


class DiskFile:
    """A file on disk. Closed when the last reference goes, not before."""

    __slots__ = ("_fd", "path")

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def pread(self, length: int, offset: int) -> bytes:
        data = os.pread(self._fd, length, offset)
        if len(data) == length or not data:
            return data
        parts = [data]
        done = len(data)
        while done < length and (data := os.pread(self._fd, length - done, offset + done)):
            parts.append(data)
            done += len(data)
        return b"".join(parts)

    def pwrite(self, data: Buffer, offset: int) -> None:
        view = data if type(data) is memoryview else memoryview(data)
        size = view.nbytes
        done = os.pwrite(self._fd, view, offset)
        while done < size:
            written = os.pwrite(self._fd, view[done:], offset + done)
            if written == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)
            done += written

    def truncate(self, size: int) -> None:
        os.ftruncate(self._fd, size)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


def default_max_open() -> int:
    """Half of what the process may open, so that the other half is left to connections."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return OPEN_FILES_MAX
    return max(OPEN_FILES_MIN, min(OPEN_FILES_MAX, soft // 2))


class DiskFileSystem:
    """Files under one directory, with bounded caches of descriptors and maps.

    The loop and the recovery threads share the caches; the lock is taken only when one of them changes.
    """

    def __init__(self, root: str, max_open: int | None = None, max_maps: int = INDEX_MAPS_MAX) -> None:
        self.root = os.path.abspath(root)
        self._prefix = self.root.rstrip("/") + "/"
        self.max_open = max_open or default_max_open()
        self.max_maps = max_maps
        self._open: OrderedDict[str, DiskFile] = OrderedDict()
        self._maps: OrderedDict[str, mmap.mmap] = OrderedDict()
        # Directory -> paths in it that are in a cache: renaming one directory must not look at all others' files.
        self._cached: dict[str, set[str]] = {}
        self._lock = threading.Lock()
        os.makedirs(self.root, exist_ok=True)

    def _real(self, path: str) -> str:
        return self._prefix + path

    def open(self, path: str, create: bool = False) -> DiskFile:
        try:
            file = self._open[path]
            self._open.move_to_end(path)
            return file
        except KeyError:
            return self._open_new(path, create)

    def _open_new(self, path: str, create: bool) -> DiskFile:
        with self._lock:
            known = self._open.get(path)
            if known is not None:
                return known
            flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
            try:
                fd = os.open(self._real(path), flags, 0o644)
            except OSError as error:
                # Someone else used up the descriptors: give back half of the cache and try once more.
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._open:
                    raise
                self._evict(len(self._open) // 2)
                fd = os.open(self._real(path), flags, 0o644)
            file = self._open[path] = DiskFile(path, fd)
            self._enlist(path)
            self._evict(self.max_open)
            return file

    def _evict(self, keep: int) -> None:
        while len(self._open) > keep:
            self._unlist(self._open.popitem(last=False)[0])

    def _enlist(self, path: str) -> None:
        self._cached.setdefault(os.path.dirname(path), set()).add(path)

    def _unlist(self, path: str) -> None:
        """A path left a cache: forget it unless the other one has it."""
        if path in self._open or path in self._maps:
            return
        directory = os.path.dirname(path)
        if (names := self._cached.get(directory)) is not None:
            names.discard(path)
            if not names:
                del self._cached[directory]

    def map(self, path: str, length: int) -> Buffer:
        try:
            view = self._maps[path]
            if len(view) >= length:
                self._maps.move_to_end(path)
                return view
        except KeyError:
            pass
        file = self.open(path)
        size = file.size()
        if size < length or length == 0:
            raise OSError(errno.EINVAL, "file is shorter than the map asked for", path)
        with self._lock:
            view = self._maps[path] = mmap.mmap(file.fileno(), size, mmap.MAP_SHARED, mmap.PROT_READ)
            self._maps.move_to_end(path)
            self._enlist(path)
            while len(self._maps) > self.max_maps:
                self._unlist(self._maps.popitem(last=False)[0])
        return view

    def forget(self, path: str) -> None:
        with self._lock:
            self._open.pop(path, None)
            self._maps.pop(path, None)
            self._unlist(path)

    def _forget_in(self, directory: str) -> None:
        """Forget the files of a directory, which has no directories in it: partitions lie side by side."""
        for path in list(self._cached.get(directory, ())):
            self.forget(path)

    def exists(self, path: str) -> bool:
        return os.path.exists(self._real(path))

    def size(self, path: str) -> int:
        return os.stat(self._real(path)).st_size

    def listdir(self, path: str) -> list[str]:
        return sorted(os.listdir(self._real(path)))

    def makedirs(self, path: str) -> None:
        real = self._real(path)
        try:
            os.mkdir(real)  # the usual case: one partition directory under the root
        except FileExistsError:
            pass
        except FileNotFoundError:
            os.makedirs(real, exist_ok=True)

    def remove(self, path: str) -> None:
        self.forget(path)
        os.unlink(self._real(path))

    def rename(self, source: str, target: str) -> None:
        self.forget(source)
        self.forget(target)
        os.replace(self._real(source), self._real(target))
        if os.path.isdir(self._real(target)):
            self._forget_in(source)

    def rmtree(self, path: str) -> None:
        self._forget_in(path)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._real(path))

    def sync_dir(self, path: str) -> None:
        fd = os.open(self._real(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def free_bytes(self) -> int:
        stat = os.statvfs(self.root)
        return stat.f_bavail * stat.f_frsize

    def read(self, path: str) -> bytes:
        with open(self._real(path), "rb") as file:
            return file.read()

    def write_atomic(self, path: str, data: bytes, *, durable: bool = True) -> None:
        temporary = path + ".tmp"
        fd = os.open(self._real(temporary), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        file = DiskFile(temporary, fd)
        try:
            file.pwrite(data, 0)
            if durable:
                file.sync()
            self.rename(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(self._real(temporary))
            raise
        finally:
            file.close()
        if durable:
            self.sync_dir(os.path.dirname(path))

    def open_count(self) -> int:
        return len(self._open)

    def map_count(self) -> int:
        return len(self._maps)

    def close(self) -> None:
        with self._lock:
            self._maps.clear()
            self._open.clear()
            self._cached.clear()
