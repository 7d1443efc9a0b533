"""Files in memory: the storage of a broker that keeps nothing (`serve --memory`, and most tests).

Same interface and semantics as the disk, so that everything above runs the same code. Invariant: the bytes of
all files together stay under `max_bytes` when one is given; past it writes fail as on a full disk. Each segment
costs one descriptor (a memfd), all else none. Built by whoever composes the broker.
"""

import errno
import mmap
import os

from headrace.storage.files import Buffer


class _Content:
    """What a memory file holds: a segment in a memfd, to be sent without a copy; all else on the heap."""

    __slots__ = ("fd", "heap")

    def __init__(self, sendable: bool) -> None:
        self.fd = os.memfd_create("headrace", os.MFD_CLOEXEC) if sendable else -1
        self.heap = bytearray()

    def size(self) -> int:
        return os.fstat(self.fd).st_size if self.fd >= 0 else len(self.heap)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class MemoryFile:
    """A file in memory. Lives as long as its name or anyone who holds it."""

    __slots__ = ("_content", "_fs", "path")

    def __init__(self, path: str, content: _Content, fs: "MemoryFileSystem") -> None:
        self.path = path
        self._content = content
        self._fs = fs

    def fileno(self) -> int:
        if self._content.fd < 0:
            raise OSError(errno.EBADF, "only segments have a descriptor in memory", self.path)
        return self._content.fd

    def size(self) -> int:
        return self._content.size()

    def pread(self, length: int, offset: int) -> bytes:
        content = self._content
        if content.fd >= 0:
            return os.pread(content.fd, length, offset)
        return bytes(content.heap[offset : offset + length])

    def pwrite(self, data: Buffer, offset: int) -> None:
        view = memoryview(data)
        content = self._content
        growth = offset + view.nbytes - content.size()
        if growth > 0:
            self._fs.take(growth)
        if content.fd >= 0:
            done = os.pwrite(content.fd, view, offset)
            while done < view.nbytes:
                done += os.pwrite(content.fd, view[done:], offset + done)
            return
        if offset > len(content.heap):
            content.heap.extend(bytes(offset - len(content.heap)))
        content.heap[offset : offset + view.nbytes] = view

    def truncate(self, size: int) -> None:
        content = self._content
        growth = size - content.size()
        self._fs.take(growth)
        if content.fd >= 0:
            os.ftruncate(content.fd, size)
        elif growth > 0:
            content.heap.extend(bytes(growth))
        else:
            del content.heap[size:]

    def sync(self) -> None:
        """Memory is as stable as it gets."""

    def close(self) -> None:
        """The content stays until its name and its last reader are gone."""


class MemoryFileSystem:
    """Files in memory, with the semantics of a disk and the same code above them. Gone with the process."""

    def __init__(self, max_bytes: int | None = None) -> None:
        self.max_bytes = max_bytes
        self._used_bytes = 0
        self._files: dict[str, _Content] = {}
        self._directories: dict[str, set[str]] = {"": set()}

    def take(self, growth: int) -> None:
        """Account for bytes added (or given back); refuse past the bound, as a full disk would."""
        if growth > 0 and self.max_bytes is not None and self._used_bytes + growth > self.max_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._used_bytes += growth

    def open(self, path: str, create: bool = False) -> MemoryFile:
        content = self._files.get(path)
        if content is None:
            parent, name = os.path.split(path)
            if not create or parent not in self._directories:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            content = self._files[path] = _Content(sendable=name.endswith((".log", ".log.cleaned")))
            self._directories[parent].add(name)
        return MemoryFile(path, content, self)

    def exists(self, path: str) -> bool:
        return path in self._files or path in self._directories

    def size(self, path: str) -> int:
        return self.open(path).size()

    def listdir(self, path: str) -> list[str]:
        try:
            return sorted(self._directories[path])
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None

    def makedirs(self, path: str) -> None:
        while path and path not in self._directories:
            self._directories[path] = set()
            parent, name = os.path.split(path)
            self._directories.setdefault(parent, set()).add(name)
            path = parent

    def remove(self, path: str) -> None:
        content = self._files.pop(path, None)
        if content is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        parent, name = os.path.split(path)
        self._directories[parent].discard(name)
        self._used_bytes -= content.size()

    def rename(self, source: str, target: str) -> None:
        if source in self._directories:
            self._rename_directory(source, target)
            return
        content = self.open(source)._content
        if target in self._files:
            self.remove(target)
        for path, change in ((source, set.discard), (target, set.add)):
            parent, name = os.path.split(path)
            change(self._directories[parent], name)
        del self._files[source]
        self._files[target] = content

    def _rename_directory(self, source: str, target: str) -> None:
        names = self._directories.pop(source)
        self._directories[target] = names
        for path, change in ((source, set.discard), (target, set.add)):
            parent, name = os.path.split(path)
            change(self._directories[parent], name)
        for name in list(names):
            if (content := self._files.pop(f"{source}/{name}", None)) is not None:
                self._files[f"{target}/{name}"] = content
            else:
                self._rename_directory(f"{source}/{name}", f"{target}/{name}")

    def rmtree(self, path: str) -> None:
        """Touches nothing but what is below `path`: it runs in a thread beside the loop."""
        for name in list(self._directories.get(path, ())):
            child = f"{path}/{name}"
            if child in self._directories:
                self.rmtree(child)
            else:
                self.remove(child)
        self._directories.pop(path, None)
        parent, name = os.path.split(path)
        self._directories.get(parent, set()).discard(name)

    def sync_dir(self, path: str) -> None:
        """Nothing outlives the process."""

    def free_bytes(self) -> int:
        if self.max_bytes is not None:
            return self.max_bytes - self._used_bytes
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def read(self, path: str) -> bytes:
        file = self.open(path)
        return file.pread(file.size(), 0)

    def write_atomic(self, path: str, data: bytes, *, durable: bool = True) -> None:
        temporary = path + ".tmp"
        file = self.open(temporary, create=True)
        file.truncate(0)
        file.pwrite(data, 0)
        self.rename(temporary, path)

    def map(self, path: str, length: int) -> Buffer:
        content = self.open(path)._content
        if content.size() < length or length == 0:
            raise OSError(errno.EINVAL, "file is shorter than the map asked for", path)
        if content.fd >= 0:
            return mmap.mmap(content.fd, content.size(), mmap.MAP_SHARED, mmap.PROT_READ)
        return content.heap

    def forget(self, path: str) -> None:
        """Nothing is cached."""

    def close(self) -> None:
        self._files.clear()
