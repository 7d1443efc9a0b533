"""A flusher without threads, and a log manager on it, for tests that decide when work runs."""

from collections.abc import Callable, Mapping, Sequence

from headrace.base.clock import ManualClock
from headrace.base.errors import KafkaError
from headrace.base.settings import broker_config
from headrace.storage.files import FileSystem
from headrace.storage.log import PartitionLog
from headrace.storage.manager import LogManager
from tests.storage.workbench import NOW_MS


class Worker:
    """A flusher without threads: work waits until the test lets it run, or runs at once."""

    def __init__(self, at_once: bool = True) -> None:
        self.at_once = at_once
        self.full = False
        self.prepare: Callable[[PartitionLog], Callable[[], None] | None] | None = None
        self.waiting: list[tuple[Callable[[], None], Callable[[Exception | None], None] | None]] = []

    def is_flushing(self, log: PartitionLog, /) -> bool:
        return False

    def request(self, log: PartitionLog, waiter: Callable[[Exception | None], None] | None = None, /) -> None:
        error: Exception | None = None
        try:
            if self.prepare is not None and (first := self.prepare(log)):
                first()
            log.flush()
        except (KafkaError, OSError) as failure:
            error = failure
        if waiter is not None:
            waiter(error)

    def submit(
        self, work: Callable[[], None], done: Callable[[Exception | None], None] | None = None, /
    ) -> bool:
        if self.full:
            return False
        self.waiting.append((work, done))
        if self.at_once:
            self.run()
        return True

    def run(self) -> None:
        while self.waiting:
            work, done = self.waiting.pop(0)
            error: Exception | None = None
            try:
                work()
            except (KafkaError, OSError) as failure:
                error = failure
            if done is not None:
                done(error)

    def run_all(self, jobs: Sequence[Callable[[], None]], /) -> None:
        for job in jobs:
            job()


def open_manager(
    fs: FileSystem, worker: Worker | None = None, settings: Mapping[str, str] | None = None
) -> LogManager:
    """A manager on `fs`, started."""
    manager = LogManager(fs, "data", broker_config(settings or {}), ManualClock(NOW_MS), worker or Worker())
    manager.start()
    return manager
