"""What a broker's process runs on in the simulator, in place of the system: an event loop, a clock and sync threads.

`SimLoop` is asyncio's loop for one machine, over the kernel's time: futures, tasks, timeouts and callbacks of the real
code run on it unchanged, and stop with the machine's life. Everything that became ready in a turn is done in that turn,
as on a real loop; a pause or a crash falls between turns, or, by a power cut of the disk, into the middle of one.
Invariant: nothing here depends on anything but the kernel. Used by `cluster_node`.
"""

import asyncio
import inspect
from asyncio.events import _get_running_loop, _set_running_loop
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from headrace.storage.faulty import PowerCut
from headrace.storage.flusher import Flusher
from headrace.storage.log import PartitionLog
from tests.sim.kernel import MS, Machine

SECOND = 1_000 * MS
COROUTINES_KEPT = 100
WALL_MS = 1_700_000_000_000  # when the simulated world begins


class Crashed(Exception):
    """Something in a callback that nobody handles: a bug, wherever it came from."""


class SimHandle:
    """A callback to come."""

    __slots__ = ("args", "at", "callback")

    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...], at: float = 0.0) -> None:
        self.callback: Callable[..., object] | None = callback
        self.args = args
        self.at = at

    def cancel(self) -> None:
        self.callback = None
        self.args = ()

    def cancelled(self) -> bool:
        return self.callback is None

    def when(self) -> float:
        return self.at


class Owner(Protocol):
    """Whose loop it is: a node."""

    fs: Any
    oracle: Any

    def power_cut(self) -> None:
        """Called when the disk lost its power in the middle of a turn."""


turning: list[Any] = []
"""The node in whose turn we are, last."""


class SimLoop(asyncio.AbstractEventLoop):
    """The loop of one life of one machine."""

    def __init__(self, machine: Machine, owner: Owner) -> None:
        self.machine = machine
        self.kernel = machine.kernel
        self._life = machine.life
        self._ready: deque[SimHandle] = deque()
        self._coroutines: list[Any] = []
        self._turning = False
        self._owner = owner
        self._oracle = owner.oracle
        self._fs = owner.fs

    @property
    def alive(self) -> bool:
        return self.machine.life == self._life

    def enter(self, call: Callable[..., object], *args: Any) -> None:
        """One turn: an event from outside, and everything that it makes ready."""
        assert not self._turning, "one turn at a time"
        before = _get_running_loop()
        _set_running_loop(self)
        self._turning = True
        ready = self._ready
        turning.append(self._owner)
        try:
            call(*args)
            while ready:
                handle = ready.popleft()
                callback = handle.callback
                if callback is not None:
                    callback(*handle.args)
        except PowerCut:
            pass
        finally:
            self._turning = False
            _set_running_loop(before)
            turning.pop()
            if self._oracle.failure is not None:
                raise self._oracle.failure
        if self._fs.is_cut:
            ready.clear()
            self._owner.power_cut()

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Any = None) -> SimHandle:  # type: ignore[override]
        handle = SimHandle(callback, args)
        if self.machine.life == self._life:
            if not self._turning and not self._ready:
                self.kernel.after(0, self.enter, _nothing, machine=self.machine)
            self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> SimHandle:
        # Not before its time, however time is rounded.
        microseconds = int(delay * SECOND) + 1 if delay > 0 else 0
        handle = SimHandle(callback, args, self.kernel.now / SECOND + delay)
        if self.machine.life == self._life:
            self.kernel.after(microseconds, self._fire, handle, machine=self.machine)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> SimHandle:
        return self.call_later(when - self.time(), callback, *args)

    def _fire(self, handle: SimHandle) -> None:
        if handle.callback is not None:
            self.enter(handle.callback, *handle.args)

    def time(self) -> float:
        return self.kernel.now / SECOND

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> "asyncio.Task[Any]":
        task = asyncio.Task(coro, loop=self)
        if self.alive:
            if len(self._coroutines) > COROUTINES_KEPT:
                self._coroutines = [each for each in self._coroutines if _is_to_begin(each)]
            self._coroutines.append(coro)
        else:
            _close(coro)
        return task

    def ended(self) -> None:
        """The life is over: what it did not come to begin will never be awaited, and nobody is to be warned of it."""
        for coro in self._coroutines:
            _close(coro)
        self._coroutines.clear()

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> None:
        """Connections of the simulator deliver by themselves."""

    def remove_reader(self, fd: Any) -> bool:
        return True

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._turning

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """A failure that nobody looked at; in a life that is over there is nobody left to."""
        error = context.get("exception")
        if (
            self.alive and error is not None and not isinstance(error, PowerCut)
        ):  # that turn is the life's last
            crashed = Crashed(f"{context.get('message')}: {error!r}")
            crashed.__cause__ = error
            self._owner.oracle.failure = self._owner.oracle.failure or crashed  # a finalizer's own is ignored
            raise crashed


def _nothing() -> None:
    pass


def _is_to_begin(coro: Any) -> bool:
    return inspect.getcoroutinestate(coro) == inspect.CORO_CREATED


def _close(coro: Any) -> None:
    """Close a coroutine that has not begun, and with it those that it was given to await."""
    if _is_to_begin(coro):
        for given in coro.cr_frame.f_locals.values():
            if inspect.iscoroutine(given):
                _close(given)
        coro.close()


class SimClock:
    """A machine's clocks. The wall may jump; the other one only goes on."""

    def __init__(self, machine: Machine) -> None:
        self._kernel = machine.kernel
        self.skew_ms = 0

    def now_ms(self) -> int:
        return WALL_MS + self._kernel.now // MS + self.skew_ms

    def monotonic_ms(self) -> float:
        return self._kernel.now / MS


class SimFlusher(Flusher[PartitionLog]):
    """The flusher, whose threads are events: a sync takes its time, and what is not synced yet can be lost."""

    def __init__(self, loop: SimLoop, on_flushed: Callable[[PartitionLog], None] | None = None) -> None:
        super().__init__(loop, on_flushed)
        self._sim = loop
        self.sync_delay = MS
        self._waiting: deque[tuple[Callable[[], None], Callable[[Exception | None], None]]] = deque()

    def _enqueue(self, run: Callable[[], None], finish: Callable[[Exception | None], None]) -> None:
        self._queued += 1
        self._waiting.append((run, finish))
        delay = 1 + int(self._sim.machine.random.random() * self.sync_delay)
        self._sim.kernel.after(delay, self._sim.enter, self._run_next, machine=self._sim.machine)

    def _run_next(self) -> None:
        if self._waiting:
            self._run(*self._waiting.popleft())
            self._deliver()

    def _run(self, run: Callable[[], None], finish: Callable[[Exception | None], None]) -> None:
        error: Exception | None = None
        try:
            run()
        except Exception as failure:
            error = failure
        self._done.append((finish, error))

    def run_all(self, jobs: Sequence[Callable[[], None]]) -> None:
        for job in jobs:
            job()

    def _stop_threads(self) -> None:
        while self._waiting:
            self._run(*self._waiting.popleft())
