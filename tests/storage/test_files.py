"""The file systems: the same semantics on disk and in memory, with bounded descriptors and maps."""

import errno
import os
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.storage.files import DiskFileSystem, FileRange, FileSystem
from headrace.storage.memory import MemoryFileSystem


@pytest.fixture(params=["disk", "memory"])
def fs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FileSystem]:
    system: FileSystem = DiskFileSystem(str(tmp_path)) if request.param == "disk" else MemoryFileSystem()
    yield system
    system.close()


def test_what_is_written_is_read_back_at_its_offset(fs: FileSystem) -> None:
    fs.makedirs("d")
    file = fs.open("d/a.log", create=True)
    file.pwrite(b"hello", 0)
    file.pwrite(memoryview(b"world"), 5)
    file.pwrite(b"J", 0)
    assert file.pread(100, 0) == b"Jelloworld"
    assert file.pread(3, 5) == b"wor"
    assert file.pread(3, 10) == b""
    assert (file.size(), fs.size("d/a.log")) == (10, 10)


def test_a_write_past_the_end_leaves_zeros_between(fs: FileSystem) -> None:
    for name in ("a.log", "a.index"):
        file = fs.open(name, create=True)
        file.pwrite(b"x", 4)
        assert file.pread(10, 0) == b"\0\0\0\0x"


def test_truncation_cuts_and_extends(fs: FileSystem) -> None:
    for name in ("a.log", "a.index"):
        file = fs.open(name, create=True)
        file.pwrite(b"abcdef", 0)
        file.truncate(2)
        assert fs.open(name).pread(10, 0) == b"ab"
        file.truncate(4)
        assert file.pread(10, 0) == b"ab\0\0"


def test_a_file_is_not_created_unless_asked_for(fs: FileSystem) -> None:
    with pytest.raises(FileNotFoundError):
        fs.open("missing.log")
    with pytest.raises(FileNotFoundError):
        fs.open("no/such/directory.log", create=True)
    with pytest.raises(FileNotFoundError):
        fs.size("missing.log")
    with pytest.raises(FileNotFoundError):
        fs.remove("missing.log")
    with pytest.raises(FileNotFoundError):
        fs.listdir("missing")


def test_directories_list_their_names_in_order(fs: FileSystem) -> None:
    fs.makedirs("d/e")
    fs.makedirs("d/e")
    for name in ("b", "a", "c"):
        fs.open(f"d/{name}", create=True)
    fs.remove("d/c")
    assert fs.listdir("d") == ["a", "b", "e"]
    assert fs.exists("d/e") and fs.exists("d/a") and not fs.exists("d/c")
    fs.rmtree("d")
    fs.rmtree("d")
    assert fs.listdir("") == []


def test_a_range_outlives_the_deletion_of_its_file(fs: FileSystem) -> None:
    fs.makedirs("d")
    fs.open("d/a.log", create=True).pwrite(b"0123456789", 0)
    part = FileRange(fs.open("d/a.log"), 2, 5)
    fs.rmtree("d")
    assert part.read() == b"23456"
    assert os.pread(part.file.fileno(), part.length, part.offset) == b"23456"


def test_a_rename_replaces_and_later_opens_see_the_new_file(fs: FileSystem) -> None:
    fs.open("old.log", create=True).pwrite(b"old", 0)
    fs.open("new.log", create=True).pwrite(b"newer", 0)
    fs.rename("new.log", "old.log")
    assert fs.open("old.log").pread(10, 0) == b"newer"
    assert fs.listdir("") == ["old.log"]


def test_a_renamed_directory_takes_its_files_along(fs: FileSystem) -> None:
    fs.makedirs("t-0")
    fs.open("t-0/a.log", create=True).pwrite(b"first", 0)
    fs.rename("t-0", "t-0.deleted")
    fs.makedirs("t-0")
    fs.open("t-0/a.log", create=True).pwrite(b"2", 0)
    assert fs.open("t-0/a.log").pread(10, 0) == b"2"
    assert fs.open("t-0.deleted/a.log").pread(10, 0) == b"first"


class _Unwalked(OrderedDict[str, Any]):
    """A cache that nobody may go through from end to end."""

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("all open files were looked at")


def test_renaming_a_directory_looks_at_its_own_files_only(tmp_path: Path) -> None:
    fs = DiskFileSystem(str(tmp_path))
    for directory in ("t-0", "t-1"):
        fs.makedirs(directory)
        fs.open(f"{directory}/a.index", create=True).pwrite(b"12345678", 0)
        fs.map(f"{directory}/a.index", 8)
    fs._open, fs._maps = _Unwalked(fs._open), _Unwalked(fs._maps)
    fs.rename("t-0", "t-0.deleted")
    assert (fs.open_count(), fs.map_count()) == (1, 1)
    fs.rmtree("t-1")
    assert (fs.open_count(), fs.map_count()) == (0, 0)


def test_small_files_are_replaced_as_one_step(fs: FileSystem) -> None:
    fs.write_atomic("checkpoint", b"one")
    fs.write_atomic("checkpoint", b"2", durable=False)
    assert fs.read("checkpoint") == b"2"
    assert fs.listdir("") == ["checkpoint"]


def test_a_map_shows_the_file_and_grows_with_it(fs: FileSystem) -> None:
    file = fs.open("a.index", create=True)
    file.pwrite(b"12345678", 0)
    assert bytes(fs.map("a.index", 8))[:8] == b"12345678"
    file.pwrite(b"abcdefgh", 8)
    assert bytes(fs.map("a.index", 16))[:16] == b"12345678abcdefgh"
    with pytest.raises(OSError, match="shorter"):
        fs.map("a.index", 17)


def test_descriptors_stay_within_their_bound_and_held_files_stay_open(tmp_path: Path) -> None:
    fs = DiskFileSystem(str(tmp_path), max_open=16)
    held = fs.open("held.log", create=True)
    held.pwrite(b"still here", 0)
    before = _descriptors()
    for number in range(200):
        fs.open(f"{number}.log", create=True).pwrite(b"x", 0)
    assert fs.open_count() == 16
    assert _descriptors() - before <= 16
    assert held.pread(20, 0) == b"still here"
    assert fs.open("0.log").pread(1, 0) == b"x"


def test_maps_stay_within_their_bound(tmp_path: Path) -> None:
    fs = DiskFileSystem(str(tmp_path), max_maps=4)
    for number in range(20):
        fs.open(f"{number}.index", create=True).pwrite(bytes(8), 0)
        assert len(bytes(fs.map(f"{number}.index", 8))) == 8
    assert fs.map_count() == 4


def test_a_process_out_of_descriptors_gets_some_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fs = DiskFileSystem(str(tmp_path), max_open=100)
    for number in range(20):
        fs.open(f"{number}.log", create=True)
    real_open = os.open
    refused: list[str] = []

    def sometimes(path: str, flags: int, mode: int = 0o777) -> int:
        if not refused:
            refused.append(path)
            raise OSError(errno.EMFILE, "Too many open files")
        return real_open(path, flags, mode)

    monkeypatch.setattr(os, "open", sometimes)
    fs.open("another.log", create=True).pwrite(b"x", 0)
    assert refused and fs.open_count() == 11


def test_a_short_write_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fs = DiskFileSystem(str(tmp_path))
    file = fs.open("a.log", create=True)
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:3], offset))
    file.pwrite(b"0123456789", 0)
    assert file.pread(20, 0) == b"0123456789"


def test_a_failed_atomic_write_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = DiskFileSystem(str(tmp_path))
    fs.write_atomic("checkpoint", b"old")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space"):
        fs.write_atomic("checkpoint", b"new")
    assert fs.read("checkpoint") == b"old"
    assert fs.listdir("") == ["checkpoint"]


def test_memory_refuses_past_its_bound_and_takes_again_what_was_given_back() -> None:
    fs = MemoryFileSystem(max_bytes=100)
    fs.open("a.log", create=True).pwrite(bytes(60), 0)
    with pytest.raises(OSError, match="No space"):
        fs.open("b.index", create=True).pwrite(bytes(60), 0)
    fs.open("a.log").pwrite(bytes(60), 0)  # no growth
    fs.open("a.log").truncate(10)
    fs.open("b.index").pwrite(bytes(60), 0)
    assert fs.free_bytes() == 30
    fs.remove("b.index")
    assert fs.free_bytes() == 90


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
