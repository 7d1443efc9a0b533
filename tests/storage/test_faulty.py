"""The simulated disk keeps its own promises: synced is kept, not synced may be lost, errors come when asked for."""

import errno
import random

import pytest

from headrace.storage.faulty import PAGE_BYTES, FaultyFileSystem, PowerCut


def make(content: bytes = b"") -> FaultyFileSystem:
    fs = FaultyFileSystem()
    fs.makedirs("d")
    fs.sync_dir("")
    file = fs.open("d/a.log", create=True)
    file.pwrite(content, 0)
    file.sync()
    fs.sync_dir("d")
    return fs


def outcomes(prepare: object, count: int = 60) -> set[bytes | None]:
    """What is found in d/a.log after crashes that differ only by chance."""
    assert callable(prepare)
    found: set[bytes | None] = set()
    for seed in range(count):
        fs = prepare()
        fs.crash(random.Random(seed))
        found.add(fs.read("d/a.log") if fs.exists("d/a.log") else None)
    return found


def test_synced_bytes_survive_every_crash() -> None:
    assert outcomes(lambda: make(b"synced")) == {b"synced"}


def test_bytes_not_synced_are_kept_lost_or_torn() -> None:
    def prepare() -> FaultyFileSystem:
        fs = make(b"a" * PAGE_BYTES)
        fs.open("d/a.log").pwrite(b"b" * 3 * PAGE_BYTES, PAGE_BYTES)
        return fs

    found = outcomes(prepare)
    assert all(content is not None and content.startswith(b"a" * PAGE_BYTES) for content in found)
    assert b"a" * PAGE_BYTES in found
    assert b"a" * PAGE_BYTES + b"b" * 3 * PAGE_BYTES in found
    assert any(content and b"\0" in content for content in found), "never torn"


def test_a_name_not_synced_may_be_gone_and_a_removed_file_back() -> None:
    def created() -> FaultyFileSystem:
        fs = FaultyFileSystem()
        fs.makedirs("d")
        fs.sync_dir("")
        file = fs.open("d/a.log", create=True)
        file.pwrite(b"x", 0)
        file.sync()
        return fs

    def removed() -> FaultyFileSystem:
        fs = make(b"x")
        fs.remove("d/a.log")
        return fs

    assert outcomes(created) == {None, b"x"}
    assert outcomes(removed) == {None, b"x"}


def test_changes_of_names_are_kept_in_their_order() -> None:
    for seed in range(40):
        fs = make(b"old")
        fs.open("d/b", create=True)
        fs.rename("d/b", "d/a.log")
        fs.open("d/c", create=True)
        fs.crash(random.Random(seed))
        assert fs.listdir("d") in (["a.log"], ["a.log", "b"], ["a.log", "c"])


def test_an_unsynced_truncation_may_be_undone() -> None:
    def prepare() -> FaultyFileSystem:
        fs = make(b"0123456789")
        fs.open("d/a.log").truncate(4)
        return fs

    assert outcomes(prepare) == {b"0123", b"0123456789"}


def test_files_opened_before_a_crash_are_dead() -> None:
    fs = make(b"x")
    file = fs.open("d/a.log")
    fs.crash(random.Random(0))
    with pytest.raises(OSError, match="before the crash"):
        file.pread(1, 0)


def test_a_failed_sync_loses_what_it_could_not_write_for_good() -> None:
    fs = make(b"a" * PAGE_BYTES)
    file = fs.open("d/a.log")
    file.pwrite(b"b" * PAGE_BYTES, PAGE_BYTES)
    fs.fail("sync", errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        file.sync()
    assert file.pread(1, PAGE_BYTES) == b"b", "readers still see it"
    file.sync()
    fs.crash(random.Random(1))
    assert fs.read("d/a.log") == b"a" * PAGE_BYTES + bytes(PAGE_BYTES)


def test_failures_hit_the_operations_and_paths_they_are_meant_for() -> None:
    fs = make(b"x")
    fs.fail("pread", errno.EIO, path=".log", times=2)
    assert fs.open("d/b.index", create=True).pread(1, 0) == b""
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output"):
            fs.open("d/a.log").pread(1, 0)
    assert fs.open("d/a.log").pread(1, 0) == b"x"


def test_a_full_disk_takes_what_fits_and_refuses_the_rest() -> None:
    fs = make(b"12345")
    fs.capacity_bytes = 8
    with pytest.raises(OSError, match="No space"):
        fs.open("d/a.log").pwrite(b"abcdef", 5)
    assert fs.read("d/a.log") == b"12345abc"
    fs.open("d/a.log").pwrite(b"ABC", 5)
    fs.heal()
    fs.open("d/a.log").pwrite(b"abcdef", 5)
    assert fs.read("d/a.log") == b"12345abcdef"


def test_the_power_goes_in_the_middle_of_the_chosen_step() -> None:
    fs = make()
    fs.cut_power_after(1)
    file = fs.open("d/a.log")
    with pytest.raises(PowerCut):
        file.pwrite(b"abcdef", 0)
    assert bytes(fs._inode("d/a.log").current) == b"abc"


def test_flipped_bits_reach_only_what_was_not_synced() -> None:
    for seed in range(20):
        fs = make(b"a" * 100)
        fs.open("d/a.log").pwrite(b"b" * 100, 100)
        fs.crash(random.Random(seed), flips=5)
        assert fs.read("d/a.log")[:100] == b"a" * 100
