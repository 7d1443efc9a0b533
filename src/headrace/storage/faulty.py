"""A disk that fails on purpose: the file system of crash tests.

Keeps two versions of everything, what a reader sees and what a power cut would leave. `crash` makes the second one
real: of what was written but not synced, each page may be there, missing, or torn; a file may have its old length, its
new one, or one in between; names that were created, renamed or removed without a `sync_dir` may be so or not, in the
order they were done. Errors can be injected by operation, the disk can be full, a failed sync loses the pages it could
not write (the next one succeeds and does not bring them back, as on Linux), and bits can be flipped.
Invariant: what was synced, and named durably, survives `crash` bit for bit. For tests and the simulator only.
"""

import errno
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, Protocol

from headrace.storage.files import Buffer

PAGE_BYTES: Final = 512  # smaller than a real page, so that small batches are torn as well

OPERATIONS: Final = (
    "open",
    "pread",
    "pwrite",
    "truncate",
    "sync",
    "sync_dir",
    "remove",
    "rename",
    "makedirs",
)


class Dice(Protocol):
    """What decides the outcome of a crash: a seeded `random.Random`."""

    def random(self) -> float: ...

    def randrange(self, stop: int, /) -> int: ...

    def choice(self, options: Sequence[int], /) -> int: ...


class PowerCut(BaseException):
    """The moment chosen by `cut_power_after`. Not an Exception: nothing on the way up may handle it."""


class _Inode:
    """A file's content: as seen, and as it would be found after a power cut."""

    __slots__ = ("current", "durable", "lost_pages", "sizes")

    def __init__(self) -> None:
        self.current = bytearray()
        self.durable = b""
        self.sizes = [0]  # lengths the file has had since it was last synced
        self.lost_pages: set[int] = set()

    def dirty_pages(self) -> list[int]:
        pages = range((max(len(self.current), len(self.durable)) + PAGE_BYTES - 1) // PAGE_BYTES)
        return [page for page in pages if self._page(self.current, page) != self._page(self.durable, page)]

    @staticmethod
    def _page(content: Buffer, page: int) -> bytes:
        return bytes(content[page * PAGE_BYTES : (page + 1) * PAGE_BYTES])

    def sync(self) -> None:
        content = bytearray(self.current)
        for page in self.lost_pages:
            start = page * PAGE_BYTES
            old = self._page(self.durable, page)[: max(0, len(content) - start)]
            content[start : start + PAGE_BYTES] = old.ljust(min(PAGE_BYTES, len(content) - start), b"\0")
        self.durable = bytes(content)
        self.sizes = [len(self.current)]

    def lose(self) -> None:
        self.lost_pages.update(self.dirty_pages())

    def crash(self, random: Dice, flips: int) -> None:
        """Become one of the contents that a power cut may leave."""
        size = random.choice([len(self.durable), *self.sizes])
        content = bytearray(self.durable[:size].ljust(size, b"\0"))
        for page in self.dirty_pages():
            start = page * PAGE_BYTES
            if page in self.lost_pages or start >= size:
                continue
            new = self._page(self.current, page)
            whole = random.random()
            if whole < 0.4:
                new = new[: random.randrange(len(new) + 1)]  # torn: the rest of the page is the old one
            elif whole < 0.6:
                continue  # never written
            content[start : start + len(new)] = new
        del content[size:]
        if size > len(self.durable):
            for _ in range(flips):
                content[len(self.durable) + random.randrange(size - len(self.durable))] ^= (
                    1 << random.randrange(8)
                )
        self.current = content
        self.durable = bytes(content)
        self.sizes = [size]
        self.lost_pages.clear()


class _Directory:
    """Names: as seen, as durable, and the changes between the two in the order they were made."""

    __slots__ = ("changes", "durable", "names")

    def __init__(self) -> None:
        self.names: dict[str, _Inode | _Directory] = {}
        self.durable: dict[str, _Inode | _Directory] = {}
        # (removed name or "", added name or "", what was added)
        self.changes: list[tuple[str, str, _Inode | _Directory | None]] = []

    def change(self, removed: str, added: str = "", node: "_Inode | _Directory | None" = None) -> None:
        self.changes.append((removed, added, node))
        _apply(self.names, removed, added, node)

    def sync(self) -> None:
        self.durable = dict(self.names)
        self.changes.clear()

    def crash(self, random: Dice, flips: int) -> None:
        for removed, added, node in self.changes[: random.randrange(len(self.changes) + 1)]:
            _apply(self.durable, removed, added, node)
        self.names = dict(self.durable)
        self.changes.clear()
        for child in self.names.values():
            child.crash(random, flips)


def _apply(
    names: "dict[str, _Inode | _Directory]", removed: str, added: str, node: "_Inode | _Directory | None"
) -> None:
    if removed:
        names.pop(removed, None)
    if added:
        assert node is not None
        names[added] = node


_split = lru_cache(maxsize=1_000)(os.path.split)


class FaultyFile:
    """A file of a `FaultyFileSystem`; unusable after a crash."""

    __slots__ = ("_fs", "_inode", "_life", "path")

    def __init__(self, fs: "FaultyFileSystem", path: str, inode: _Inode) -> None:
        self._fs = fs
        self._inode = inode
        self._life = fs.life
        self.path = path

    def _step(self, operation: str) -> None:
        if self._life != self._fs.life:
            raise OSError(errno.EBADF, "opened before the crash", self.path)
        self._fs.step(operation, self.path)

    def fileno(self) -> int:
        raise OSError(errno.EBADF, "no descriptor behind a simulated file", self.path)

    def size(self) -> int:
        return len(self._inode.current)

    def pread(self, length: int, offset: int) -> bytes:
        self._step("pread")
        return bytes(self._inode.current[offset : offset + length])

    def pwrite(self, data: Buffer, offset: int) -> None:
        inode = self._inode
        view = memoryview(data)
        growth = max(0, offset + view.nbytes - len(inode.current))
        room = self._fs.free_bytes()
        if growth > room:  # as a real one does: write what fits, then fail
            self._write(view[: max(0, view.nbytes - growth + room)], offset)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)
        try:
            self._step("pwrite")
        except (OSError, PowerCut):
            self._write(view[: view.nbytes // 2], offset)
            raise
        self._write(view, offset)

    def _write(self, view: memoryview, offset: int) -> None:
        inode = self._inode
        if offset > len(inode.current):
            inode.current.extend(bytes(offset - len(inode.current)))
        inode.current[offset : offset + view.nbytes] = view
        inode.sizes.append(len(inode.current))
        if inode.lost_pages:
            first, last = offset // PAGE_BYTES, (offset + view.nbytes) // PAGE_BYTES
            inode.lost_pages.difference_update(range(first, last + 1))

    def truncate(self, size: int) -> None:
        self._step("truncate")
        current = self._inode.current
        if size > len(current):
            current.extend(bytes(size - len(current)))
        del current[size:]
        self._inode.sizes.append(size)

    def sync(self) -> None:
        try:
            self._step("sync")
        except OSError:
            self._inode.lose()
            raise
        self._inode.sync()

    def close(self) -> None:
        """Nothing is held."""


class FaultyFileSystem:
    """Files in memory that remember what was synced, and errors on demand."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        """A full disk: writes that would take all files together past it fail with ENOSPC."""
        self.life = 0
        """How many crashes there were."""
        self.steps = 0
        """Operations done so far, to aim `cut_power_after` at."""
        self._power_cut_at: int | None = None
        self._failures: list[tuple[str, str, int, int]] = []
        self._root = _Directory()

    # -- what can go wrong -----------------------------------------------------------------------------------

    def fail(self, operation: str, error: int, *, path: str = "", times: int = 1) -> None:
        """Let the next `times` operations of this kind on paths that contain `path` fail with `error`."""
        assert operation in OPERATIONS, operation
        self._failures.append((operation, path, error, times))

    def heal(self) -> None:
        """No more failures."""
        self._failures.clear()
        self._power_cut_at = None
        self.capacity_bytes = None

    def cut_power_after(self, steps: int) -> None:
        """Raise `PowerCut` in the middle of the operation that many steps from now."""
        self._power_cut_at = self.steps + steps

    def crash(self, random: Dice, *, flips: int = 0) -> None:
        """Lose power: what was not durable is gone, torn or there, as `random` decides. Open files are dead."""
        self.life += 1
        self._power_cut_at = None
        self._failures.clear()
        self._root.crash(random, flips)

    def flip(self, path: str, offset: int, bit: int = 0) -> None:
        """Damage a byte behind the back of everyone, synced or not."""
        inode = self._inode(path)
        inode.current[offset] ^= 1 << bit
        if offset < len(inode.durable):
            durable = bytearray(inode.durable)
            durable[offset] ^= 1 << bit
            inode.durable = bytes(durable)

    def step(self, operation: str, path: str) -> None:
        self.steps += 1
        if self._power_cut_at is not None and self.steps > self._power_cut_at:
            raise PowerCut
        for number, (wanted, fragment, error, times) in enumerate(self._failures):
            if wanted == operation and fragment in path:
                if times > 1:
                    self._failures[number] = (wanted, fragment, error, times - 1)
                else:
                    del self._failures[number]
                raise OSError(error, os.strerror(error), path)

    # -- the interface of a file system ----------------------------------------------------------------------

    def _directory(self, path: str) -> _Directory:
        node: _Inode | _Directory | None = self._root
        for name in path.split("/") if path else ():
            node = node.names.get(name) if isinstance(node, _Directory) else None
        if not isinstance(node, _Directory):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return node

    def _inode(self, path: str) -> _Inode:
        parent, name = _split(path)
        node = self._directory(parent).names.get(name)
        if not isinstance(node, _Inode):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return node

    def open(self, path: str, create: bool = False) -> FaultyFile:
        self.step("open", path)
        parent, name = _split(path)
        directory = self._directory(parent)
        node = directory.names.get(name)
        if node is None and create:
            node = _Inode()
            directory.change("", name, node)
        if not isinstance(node, _Inode):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return FaultyFile(self, path, node)

    def exists(self, path: str) -> bool:
        try:
            parent, name = _split(path)
            return not path or name in self._directory(parent).names
        except FileNotFoundError:
            return False

    def size(self, path: str) -> int:
        return len(self._inode(path).current)

    def listdir(self, path: str) -> list[str]:
        return sorted(self._directory(path).names)

    def makedirs(self, path: str) -> None:
        self.step("makedirs", path)
        directory = self._root
        for name in path.split("/"):
            if name not in directory.names:
                directory.change("", name, _Directory())
            child = directory.names[name]
            assert isinstance(child, _Directory), f"{path} is a file"
            directory = child

    def remove(self, path: str) -> None:
        self._inode(path)
        self.step("remove", path)
        parent, name = _split(path)
        self._directory(parent).change(name)

    def rename(self, source: str, target: str) -> None:
        parent, name = _split(source)
        target_parent, target_name = _split(target)
        node = self._directory(parent).names.get(name)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)
        self.step("rename", source)
        if parent == target_parent:
            self._directory(parent).change(name, target_name, node)
        else:
            self._directory(target_parent).change("", target_name, node)
            self._directory(parent).change(name)

    def rmtree(self, path: str) -> None:
        if self.exists(path):
            self.step("remove", path)
            parent, name = _split(path)
            self._directory(parent).change(name)

    def sync_dir(self, path: str) -> None:
        directory = self._directory(path)
        self.step("sync_dir", path)
        directory.sync()

    def free_bytes(self) -> int:
        if self.capacity_bytes is None:
            return 1 << 62
        return max(0, self.capacity_bytes - _used(self._root))

    def read(self, path: str) -> bytes:
        self.step("pread", path)
        return bytes(self._inode(path).current)

    def write_atomic(self, path: str, data: bytes, *, durable: bool = True) -> None:
        temporary = path + ".tmp"
        try:
            file = self.open(temporary, create=True)
            file.truncate(0)
            file.pwrite(data, 0)
            if durable:
                file.sync()
            self.rename(temporary, path)
        except OSError:
            if self.exists(temporary):
                parent, name = _split(temporary)
                self._directory(parent).change(name)
            raise
        if durable:
            self.sync_dir(os.path.dirname(path))

    def map(self, path: str, length: int) -> Buffer:
        content = self._inode(path).current
        if len(content) < length or length == 0:
            raise OSError(errno.EINVAL, "file is shorter than the map asked for", path)
        return bytes(content)

    def forget(self, path: str) -> None:
        """Nothing is cached."""

    def close(self) -> None:
        """Nothing is held."""


def _used(directory: _Directory) -> int:
    return sum(
        [len(node.current) if isinstance(node, _Inode) else _used(node) for node in directory.names.values()]
    )
