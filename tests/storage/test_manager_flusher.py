"""The log manager, the flusher and a real disk together, with real threads."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.base.clock import ManualClock
from headrace.base.errors import KafkaError
from headrace.base.settings import TopicConfig, broker_config
from headrace.storage.directories import is_deleted
from headrace.storage.files import DiskFileSystem
from headrace.storage.flusher import Flusher
from headrace.storage.log import PartitionLog
from headrace.storage.manager import LogManager, Wanted
from tests.storage.workbench import NOW_MS, append, make_batch, read_all

DEADLINE_S = 30.0
TOPIC_ID = bytes(15) + b"\x0a"
OTHER_ID = bytes(15) + b"\x0b"
DURABLE = TopicConfig(flush_messages=1)


class Broker:
    """As much of a broker as it takes: a loop, a flusher, a manager."""

    def __init__(self, fs: DiskFileSystem, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.flusher: Flusher[PartitionLog] = Flusher(loop)
        self.logs = LogManager(fs, fs.root, broker_config({}), ManualClock(NOW_MS), self.flusher)
        self.logs.start()

    async def produce(self, log: PartitionLog) -> int:
        offset = append(log, make_batch())
        done: asyncio.Future[None] = self.loop.create_future()

        def flushed(error: Exception | None) -> None:
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        self.flusher.request(log, flushed)
        await asyncio.wait_for(done, DEADLINE_S)
        assert log.flushed_offset > offset
        return offset

    def stop(self, clean: bool = True) -> None:
        self.flusher.close()
        self.logs.close(clean)


class GatedDisk(DiskFileSystem):
    """A disk whose directories sync only when the test says so."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.gate = threading.Event()
        self.gate.set()
        self.arrived = threading.Event()

    def sync_dir(self, path: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            self.arrived.set()
            assert self.gate.wait(DEADLINE_S)
        super().sync_dir(path)


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def test_many_producers_share_flushes_and_find_their_records_after_a_kill(
    tmp_path: Path, loop: asyncio.AbstractEventLoop
) -> None:
    broker = Broker(DiskFileSystem(str(tmp_path)), loop)
    logs = [broker.logs.create("a", number, TOPIC_ID, DURABLE) for number in range(8)]
    begun = 0
    begin = PartitionLog.begin_flush

    async def producer(log: PartitionLog, count: int) -> None:
        for _ in range(count):
            await broker.produce(log)

    async def run() -> None:
        await asyncio.gather(*(producer(log, 5) for log in logs for _ in range(10)))

    def counted(log: PartitionLog) -> object:
        nonlocal begun
        ticket = begin(log)
        begun += ticket is not None
        return ticket

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartitionLog, "begin_flush", counted)
        loop.run_until_complete(run())
    assert begun <= 8 * 5 * 10 / 2, "producers of one log share a flush"
    before = [read_all(log) for log in logs]
    broker.stop(clean=False)

    again = Broker(DiskFileSystem(str(tmp_path)), loop)
    again.logs.load([Wanted("a", number, TOPIC_ID, DURABLE) for number in range(8)])
    assert [read_all(log) for log in again.logs] == before
    again.stop()


def test_clean_stop_closes_all_logs_in_threads(tmp_path: Path, loop: asyncio.AbstractEventLoop) -> None:
    broker = Broker(DiskFileSystem(str(tmp_path)), loop)
    for number in range(50):
        append(broker.logs.create("a", number, TOPIC_ID, TopicConfig()), make_batch(3))
    broker.stop()
    again = Broker(DiskFileSystem(str(tmp_path)), loop)
    assert again.logs.was_clean
    again.logs.load([Wanted("a", number, TOPIC_ID, TopicConfig()) for number in range(50)])
    assert {log.log_end_offset for log in again.logs} == {3}
    again.stop()


def test_topic_deleted_and_created_again_during_a_flush_keeps_the_two_apart(
    tmp_path: Path, loop: asyncio.AbstractEventLoop
) -> None:
    fs = GatedDisk(str(tmp_path))
    broker = Broker(fs, loop)
    old = broker.logs.create("a", 0, TOPIC_ID, DURABLE)

    async def run() -> int:
        fs.gate.clear()
        append(old, make_batch(5))
        told: list[asyncio.Future[Exception | None]] = [loop.create_future() for _ in range(2)]
        broker.flusher.request(old, told[0].set_result)
        await asyncio.to_thread(fs.arrived.wait, DEADLINE_S)
        broker.flusher.request(old, told[1].set_result)
        broker.logs.delete("a", 0)
        with pytest.raises(KafkaError):
            append(old, make_batch())
        fresh = broker.logs.create("a", 0, OTHER_ID, DURABLE)
        fs.gate.set()
        offset = await broker.produce(fresh)
        await asyncio.wait_for(asyncio.gather(*told), DEADLINE_S)  # nobody is left waiting
        return offset

    assert loop.run_until_complete(run()) == 0
    broker.stop()
    assert not any(is_deleted(name) for name in fs.listdir(""))

    again = Broker(DiskFileSystem(str(tmp_path)), loop)
    again.logs.load([Wanted("a", 0, OTHER_ID, DURABLE)])
    log = again.logs.get("a", 0)
    assert log is not None and log.log_end_offset == 1
    again.stop()


def test_large_deletion_leaves_the_loop_free(tmp_path: Path, loop: asyncio.AbstractEventLoop) -> None:
    removing = threading.Event()
    gate = threading.Event()

    class SlowRemoval(DiskFileSystem):
        def rmtree(self, path: str) -> None:
            removing.set()
            assert gate.wait(DEADLINE_S)
            super().rmtree(path)

    fs = SlowRemoval(str(tmp_path))
    broker = Broker(fs, loop)
    append(broker.logs.create("a", 0, TOPIC_ID, TopicConfig()), make_batch())
    broker.logs.delete("a", 0)
    assert removing.wait(DEADLINE_S)
    fresh = broker.logs.create("a", 0, OTHER_ID, DURABLE)
    assert loop.run_until_complete(broker.produce(fresh)) == 0, "while the files are still there"
    gate.set()
    broker.stop()
    assert not any(is_deleted(name) for name in fs.listdir(""))
