"""Power cut at any step of a data directory's life: the next start loses nothing durable and mixes nothing up."""

import random
from dataclasses import dataclass, field

import pytest

from headrace.base.settings import TopicConfig
from headrace.storage.faulty import FaultyFileSystem, PowerCut
from headrace.storage.log import PartitionLog
from headrace.storage.manager import LogManager, Wanted
from tests.storage.inline_worker import open_manager
from tests.storage.workbench import NOW_MS, append, make_batch, read_all

CONFIG = TopicConfig(segment_bytes=600)
TOPICS = ("a", "b", "c")
SEEDS = 150
LIVES = 4
STEPS_PER_LIFE = 25


@dataclass
class Model:
    """What the cluster's metadata and the producers know of one partition."""

    topic_id: bytes
    appended: bytearray = field(default_factory=bytearray)
    durable_bytes: int = 0
    deleted_before: int = 0


class Life:
    """A data directory under random use. The metadata (which topic has which id) is kept outside, and is durable."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.fs = FaultyFileSystem()
        self.models: dict[str, Model] = {}
        self.next_id = 1
        self.now_ms = NOW_MS

    def new_id(self) -> bytes:
        self.next_id += 1
        return self.next_id.to_bytes(16, "big")

    def log(self, manager: LogManager, topic: str) -> PartitionLog:
        model = self.models.get(topic)
        if model is None:
            model = self.models[topic] = Model(self.new_id())
        return manager.create(topic, 0, model.topic_id, CONFIG)

    def step(self, manager: LogManager) -> None:
        topic = self.random.choice(TOPICS)
        match self.random.choice(["append"] * 8 + ["flush"] * 3 + ["tick"] * 3 + ["trim", "delete"]):
            case "append":
                log = self.log(manager, topic)
                batch = make_batch(self.random.randint(1, 4), self.random.randint(0, 60), fill=topic.encode())
                append(log, batch)  # the offset is written into the batch
                self.models[topic].appended += batch
            case "flush":
                self.flush(manager, self.log(manager, topic))
                self.models[topic].durable_bytes = len(self.models[topic].appended)
            case "trim":
                log = self.log(manager, topic)
                before = self.random.randint(log.log_start_offset, log.log_end_offset)
                self.models[topic].deleted_before = before
                log.delete_records(before)
            case "delete":
                if topic in self.models:
                    # The metadata says so first.
                    del self.models[topic]
                    manager.delete(topic, 0)
            case "tick":
                self.now_ms += 500
                manager.tick(self.now_ms)

    def start(self) -> LogManager:
        manager = open_manager(self.fs)
        manager.load([Wanted(topic, 0, model.topic_id, CONFIG) for topic, model in self.models.items()])
        assert manager.offline == {}
        manager.put_aside_strays()
        return manager

    def check(self, manager: LogManager, *, power_cut: bool) -> None:
        for topic, model in self.models.items():
            log = self.log(manager, topic)
            model.deleted_before = max(model.deleted_before, log.log_start_offset)
            got = read_all(log)
            if log.log_start_offset < log.log_end_offset:
                assert got in bytes(model.appended), (
                    f"{topic} holds what was never appended to it, or has a hole"
                )
            kept_bytes = bytes(model.appended).find(got) + len(got) if got else 0
            if not power_cut or model.durable_bytes == 0:
                pass
            elif got:
                assert kept_bytes >= model.durable_bytes, f"{topic} lost what was flushed"
            else:
                assert log.log_start_offset >= self.end_offset(
                    bytes(model.appended[: model.durable_bytes])
                ), topic
            if not power_cut:
                assert not got or kept_bytes == len(model.appended), f"{topic} lost what was written"
            self.adopt(manager, model, log)

    @staticmethod
    def end_offset(data: bytes) -> int:
        from headrace.records.builder import iter_batches

        batches = list(iter_batches(data))
        return batches[-1][0].next_offset if batches else 0

    @staticmethod
    def flush(manager: LogManager, log: PartitionLog) -> None:
        told: list[Exception | None] = []
        manager._worker.request(log, told.append)
        assert told == [None]

    def adopt(self, manager: LogManager, model: Model, log: PartitionLog) -> None:
        """From here on the log's content is what there is."""
        self.flush(manager, log)
        whole = bytearray()
        for segment in log.segments:
            if segment.size:
                whole += segment.file().pread(segment.size, 0)
        model.appended = whole
        model.durable_bytes = len(whole)


@pytest.mark.parametrize("group", range(5))
def test_no_power_cut_loses_durable_records_or_mixes_up_topics(group: int) -> None:
    for seed in range(group, SEEDS, 5):
        life = Life(seed)
        for _ in range(LIVES):
            manager = life.start()
            ending = life.random.choice(["cut in a step", "cut between", "kill", "clean"])
            if ending == "cut in a step":
                life.fs.cut_power_after(life.random.randint(1, 150))
            try:
                for _ in range(life.random.randint(1, STEPS_PER_LIFE)):
                    life.step(manager)
                if ending in ("clean", "cut in a step"):
                    manager.close()
            except PowerCut:
                pass
            power_cut = ending.startswith("cut")
            if power_cut:
                life.fs.crash(life.random)
            life.check(again := life.start(), power_cut=power_cut)
            again.close(clean=False)


def test_torn_segment_behind_the_recovery_point_is_not_read_before_it_is_scanned() -> None:
    fs = FaultyFileSystem()
    manager = open_manager(fs)
    log = manager.create("a", 0, bytes(15) + b"\x01", CONFIG)
    while len(log.segments) < 2:
        append(log, make_batch(2, 60))
    manager.tick(NOW_MS)
    base_offset = log.active.base_offset
    assert log.recovery_point == base_offset
    before = log.segments[0].file().pread(log.segments[0].size, 0)
    manager.close(clean=False)
    fs.remove(f"a-0/{base_offset:020d}.snapshot")  # so that the segments before it are looked at
    fs.open(f"a-0/{base_offset:020d}.log").pwrite(bytes(40), 0)

    manager = open_manager(fs)
    manager.load([Wanted("a", 0, bytes(15) + b"\x01", CONFIG)])
    assert manager.offline == {}
    again = manager.get("a", 0)
    assert again is not None and again.log_end_offset == base_offset
    assert read_all(again) == before


def test_what_a_killed_process_left_unflushed_is_flushed_before_it_can_be_read_where_the_topic_asks_for_it() -> (
    None
):
    """Killed, the page cache keeps it; read, a power cut must not take it away again."""
    flushed, lazy = TopicConfig(flush_messages=1), TopicConfig()
    fs = FaultyFileSystem()
    manager = open_manager(fs)
    for topic, config in (("flushed", flushed), ("lazy", lazy)):
        append(manager.create(topic, 0, bytes(15) + topic.encode()[:1], config), make_batch(3, 10))
    manager = open_manager(fs)  # the first one was killed
    manager.load(
        Wanted(topic, 0, bytes(15) + topic.encode()[:1], config)
        for topic, config in (("flushed", flushed), ("lazy", lazy))
    )
    logs = {log.topic: log for log in manager}
    assert {log.log_end_offset for log in logs.values()} == {3}
    assert logs["flushed"].flushed_offset == 3
    assert logs["lazy"].flushed_offset == 0, "that would only take time"
    seen = read_all(logs["flushed"])
    fs.crash(random.Random(1))
    manager = open_manager(fs)
    assert read_all(manager.create("flushed", 0, bytes(15) + b"f", flushed)) == seen
