"""A file system that is really full: writes refused, reads served, nothing torn, writes again once there is room."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.settings import TopicConfig
from headrace.storage.files import DiskFileSystem
from headrace.storage.log import PartitionLog
from headrace.storage.manager import LogManager, Wanted
from tests.storage.inline_worker import open_manager
from tests.storage.workbench import append, headers_of, make_batch, read_all

SIZE_KB = 1024
BALLAST_KB = 256
BATCHES_MAX = 10_000
TOPIC_ID = bytes(15) + b"\x0a"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory on a file system of its own, with room for a megabyte."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE_KB}k", "headrace-test", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mount.returncode != 0:
        pytest.skip(f"a file system cannot be mounted here: {mount.stderr.strip()}")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def ballast(disk: Path) -> Path:
    """Something else on the disk that can be taken away."""
    path = disk / "ballast"
    path.write_bytes(bytes(BALLAST_KB * 1024))
    return path


def fill(log: PartitionLog) -> int:
    """Append until the disk refuses; how many batches it took."""
    batches = 0

    def append_all() -> None:
        nonlocal batches
        while batches < BATCHES_MAX:
            append(log, make_batch(10, 500))
            batches += 1

    with pytest.raises(KafkaError, match="No space left") as caught:
        append_all()
    assert caught.value.code is ErrorCode.KAFKA_STORAGE_ERROR
    return batches


def offsets_are_whole(log: PartitionLog) -> bool:
    headers = headers_of(read_all(log))
    return [header.base_offset for header in headers] == list(range(0, log.log_end_offset, 10))


def start(disk: Path, config: TopicConfig) -> tuple[LogManager, PartitionLog]:
    manager = open_manager(DiskFileSystem(str(disk / "data")))
    manager.load([Wanted("a", 0, TOPIC_ID, config)])
    return manager, manager.create("a", 0, TOPIC_ID, config)


@pytest.mark.parametrize("segment_bytes", [20_000, 1 << 30])
def test_full_disk_refuses_writes_and_serves_reads_until_there_is_room(
    small_disk: Path, segment_bytes: int
) -> None:
    config = TopicConfig(segment_bytes=segment_bytes)
    removable = ballast(small_disk)
    manager, log = start(small_disk, config)
    taken = fill(log)
    assert taken > 20
    assert log.log_end_offset == taken * 10
    before = read_all(log)
    assert offsets_are_whole(log)
    for _ in range(3):
        with pytest.raises(KafkaError) as caught:
            append(log, make_batch(10, 500))
        assert caught.value.code is ErrorCode.KAFKA_STORAGE_ERROR
        assert read_all(log) == before, "readers notice nothing"

    removable.unlink()
    for number in range(5):
        assert append(log, make_batch(10, 500)) == (taken + number) * 10, "no offset was lost or used twice"
    assert offsets_are_whole(log)
    after = read_all(log)
    assert after.startswith(before)
    manager.close()

    manager, log = start(small_disk, config)
    assert manager.was_clean
    assert read_all(log) == after
    manager.close()


def test_kill_on_a_full_disk_loses_nothing_that_was_taken(small_disk: Path) -> None:
    config = TopicConfig(segment_bytes=20_000)
    removable = ballast(small_disk)
    manager, log = start(small_disk, config)
    fill(log)
    before = read_all(log)
    manager.close(clean=False)

    removable.unlink()
    manager, log = start(small_disk, config)
    assert not manager.was_clean
    assert read_all(log) == before
    append(log, make_batch(10, 500))
    assert offsets_are_whole(log)
    manager.close()


def test_start_on_a_full_disk_serves_reads(small_disk: Path) -> None:
    config = TopicConfig(segment_bytes=20_000)
    manager, log = start(small_disk, config)
    removable = ballast(small_disk)
    fill(log)
    before = read_all(log)
    manager.close()  # whether or not it could be recorded as clean
    fill_rest(small_disk)

    manager, log = start(small_disk, config)
    assert manager.offline == {}
    assert read_all(log) == before
    with pytest.raises(KafkaError):
        append(log, make_batch(10, 5000))
    removable.unlink()
    assert append(log, make_batch(10, 500)) == log.log_end_offset - 10
    manager.close()


def fill_rest(disk: Path) -> None:
    """Leave not a single byte free."""
    with (disk / "rest").open("ab", buffering=0) as file:
        for size in (65536, 4096, 512, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue
