"""One life of one node: the production process of `headrace serve`, whole, on a simulated machine.

`server.main.Process` puts the real parts together: Raft host, metadata, controller, registration, forwarding, broker,
replication, logs, router, sessions. Only what touches the world is replaced, at the names by which the production
modules know it (`simulated`): the event loop, clocks, chance, sockets, sync threads and the file system. What Raft does
is told to the oracle. Made by the scenario, once for each life of its machine.
"""

import gc
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from headrace.base.settings import BrokerConfig, broker_config
from headrace.consensus.raft.durable import DurableStorage
from headrace.consensus.raft.messages import Entry, VoteReply, VoteRequest
from headrace.consensus.raft.ready import Ready
from headrace.server import broker, load, main, peers, quorum
from headrace.server.metadata import MetadataStore
from headrace.server.quorum import Quorum
from headrace.storage.faulty import FaultyFileSystem, PowerCut
from tests.sim.cluster_loop import Crashed, SimClock, SimFlusher, SimLoop, turning
from tests.sim.cluster_network import ClusterNetwork, SimLink, SimListener
from tests.sim.cluster_oracle import ClusterOracle
from tests.sim.kernel import MS, Kernel, Machine

_kernels: list[Kernel] = []


class SimDisk(FaultyFileSystem):
    """A disk that remembers that its power was cut: a task may have kept the news to itself."""

    is_cut = False

    def step(self, operation: str, path: str) -> None:
        if self._power_cut_at is None and not self._failures:
            self.steps += 1
            return
        try:
            super().step(operation, path)
        except PowerCut:
            self.is_cut = True
            raise


class SimStorage(DurableStorage):
    """Raft's storage on disk, every write of which is told to the oracle."""

    def write(self, ready: Ready) -> None:
        first = ready.first
        super().write(ready)
        if ready.entries:
            if first == self.snapshot.end:
                prev_term = self.snapshot.term
            elif first == 0:
                prev_term = 0
            else:
                prev_term = self.entries(first - 1, first, 1)[0].term
            node = turning[-1]
            node.oracle.told(node.oracle.raft.wrote, node.machine.id, first, prev_term, ready.entries)


class SimQuorum(Quorum):
    """The Raft host, watched."""

    def send(self, message: Any) -> None:
        node = turning[-1]
        kernel = node.machine.kernel
        if kernel.tracing:
            kernel.trace(f"{node.machine.id}: sends {message}")
        oracle = node.oracle
        if type(message) is VoteReply:
            if message.granted and not message.pre:
                oracle.told(oracle.raft.voted, message.sender, message.term, message.to)
        elif type(message) is VoteRequest and not message.pre:
            oracle.told(oracle.raft.voted, message.sender, message.term, message.sender)
        super().send(message)

    def _run(self, step: Callable[[], object]) -> None:
        super()._run(step)
        node = self.node
        if node is not None:
            oracle = turning[-1].oracle
            oracle.told(oracle.raft.check, node)

    def apply(self, first: int, entries: list[Entry]) -> None:
        node = turning[-1]
        assert self.node is not None
        node.oracle.told(node.oracle.raft.check, self.node)
        node.oracle.told(node.oracle.raft.applied, node.machine.id, first, entries)
        super().apply(first, entries)


class SimMetadata(MetadataStore):
    """The metadata of a node, whose images are held against those of the others."""

    def _show(self, image: Any, end: int) -> None:
        node = turning[-1]
        node.oracle.told(node.oracle.image, node.machine.id, image, end)
        super()._show(image, end)


class ClusterNode:
    """A process of the simulator."""

    def __init__(
        self,
        machine: Machine,
        fs: SimDisk,
        settings: dict[str, str],
        oracle: ClusterOracle,
        skew_ms: int,
        sync_delay: int,
        on_power_cut: Callable[[], None],
    ) -> None:
        self.machine = machine
        self.fs = fs
        self.oracle = oracle
        self.clock = SimClock(machine)
        self.clock.skew_ms = skew_ms
        self.power_cut = on_power_cut
        self.loop = SimLoop(machine, self)
        self.flusher: SimFlusher | None = None
        self.flushes = False
        """Whether what it has acknowledged is always synced."""
        self.sync_delay = sync_delay
        self.stopping = False
        self.stopped = False
        self.failure: str | None = None
        self.net: ClusterNetwork = machine.network  # type: ignore[assignment]
        self.net.started(machine.id)
        self._settings = settings
        self.process: main.Process | None = None
        self.loop.enter(self._begin)

    def _begin(self) -> None:
        options = main.ServeOptions(data_dir="data", host=f"node-{self.machine.id}", port=9092)
        config = _config(tuple(self._settings.items()))
        self.process = main.Process(options, config, self.loop, self._fail)
        self.starting = self.loop.create_task(self.process.start())
        self.starting.add_done_callback(self._started)

    def _started(self, task: Any) -> None:
        if task.cancelled() or task.exception() is None or self.stopping or self.fs.is_cut:
            return
        raise Crashed(f"node {self.machine.id} cannot start: {task.exception()!r}") from task.exception()

    def _fail(self) -> None:
        """The process wants to end: it says why and stops, and whoever watches it starts it again."""
        assert self.process is not None
        self.failure = self.process.failure
        self.machine.kernel.trace(f"{self.machine.id}: fails: {self.failure}")
        self._stop_soon()

    def stop(self) -> None:
        """As SIGTERM does."""
        self.loop.enter(self._stop_soon)

    def _stop_soon(self) -> None:
        if self.stopping:
            return
        self.stopping = True
        self.loop.create_task(self._stop()).add_done_callback(lambda task: task.result())

    async def _stop(self) -> None:
        assert self.process is not None
        if not self.starting.done():
            self.process._started = False
        await self.process.stop()
        self.starting.cancel()
        self.stopped = True
        self.machine.kernel.after(1, self.machine.crash_quietly)  # type: ignore[attr-defined]

    @property
    def quorum(self) -> Quorum | None:
        return None if self.process is None else self.process._quorum

    @property
    def broker(self) -> "broker.Broker | None":
        return None if self.process is None else self.process._broker

    def crashed(self, power_lost: bool) -> None:
        self.loop.ended()
        self.net.died(self.machine.id, power_lost)
        self.fs.is_cut = False
        self.fs.heal()
        if power_lost:
            self.fs.crash(self.machine.random)
            if not self.flushes:
                self.oracle.lost_power(self.machine.id)
        else:
            self.fs.life += 1  # the page cache stays, open files do not


@lru_cache(maxsize=8)
def _config(settings: tuple[tuple[str, str], ...]) -> BrokerConfig:
    return broker_config(dict(settings))


def _flusher(loop: SimLoop, on_flushed: Any) -> SimFlusher:
    node = turning[-1]
    node.flusher = SimFlusher(loop, on_flushed)
    node.flusher.sync_delay = node.sync_delay
    return node.flusher


class _Loud(logging.Handler):
    """Errors with a traceback in the logs are bugs that were survived."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None and record.exc_info[0] is not None:
            error = record.exc_info[1]
            if isinstance(error, Exception) and turning and turning[-1].oracle.failure is None:
                failure = Crashed(f"{record.getMessage()}: {error!r}")
                failure.__cause__ = error
                turning[-1].oracle.failure = failure
        if _kernels and _kernels[-1].tracing:
            fields = getattr(record, "fields", "")
            node = turning[-1].machine.id if turning else "-"
            _kernels[-1].trace(f"{node}: {record.levelname.lower()}: {record.getMessage()} {fields}")


def _urandom(size: int) -> bytes:
    return _kernels[-1].random.randbytes(size)


@contextmanager
def simulated(kernel: Kernel) -> Iterator[None]:
    """The production modules with the simulator's edges, for as long as it lasts."""
    chance = SimpleNamespace(
        Random=lambda: kernel.random, randrange=kernel.random.randrange, random=kernel.random.random
    )
    replaced: list[tuple[Any, str, Any]] = [
        (main, "SystemClock", lambda: turning[-1].clock),
        (main, "Listener", SimListener),
        (main, "Flusher", _flusher),
        (main, "DiskFileSystem", lambda path: turning[-1].fs),
        (main, "Quorum", SimQuorum),
        (main, "MetadataStore", SimMetadata),
        (main, "gc", SimpleNamespace(freeze=lambda: None)),
        (quorum, "DurableStorage", SimStorage),
        (quorum, "random", chance),
        (peers, "random", chance),
        (peers, "Link", SimLink),
        (broker, "random", chance),
        (load, "_memory_bytes", lambda: 0),
        (load, "_cpu_s", lambda: 0.0),
        (os, "urandom", _urandom),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    logger = logging.getLogger("headrace")
    logging_before = (logger.handlers[:], logger.level, logger.propagate)
    logger.handlers[:] = [_Loud()]
    logger.setLevel(logging.INFO if kernel.tracing else logging.ERROR)
    logger.propagate = False
    collecting = gc.isenabled()
    gc.disable()  # a collection at a chance moment would run what dead processes left behind
    _kernels.append(kernel)
    for owner, name, value in replaced:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
        _kernels.pop()
        logger.handlers[:], logger.propagate = logging_before[0], logging_before[2]
        logger.setLevel(logging_before[1])
        if collecting:
            gc.enable()


def default_delay() -> int:
    """How long a sync takes when all is well, at the most."""
    return MS
