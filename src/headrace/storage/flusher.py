"""Group commit: the threads that sync logs while the loop goes on.

Owns a few threads and, for each log with a flush asked for, who waits. Invariants: at most one flush of a log runs at
a time; everyone who asked before it began shares it, everyone later shares the next; each is told once, on the loop,
after the log itself (`finish_flush`) was told. A log is flushed no more often than its disk can do it, so the busier
the producers are, the more of them one fdatasync serves.

Requests of one turn of the loop are gathered and begin together at its end. Threads are started when first needed and
take work from one queue; they hand results back in batches, one wake-up of the loop for all that finished meanwhile.
Called by the produce path (acknowledgement after a flush), the metadata log, and `LogManager` (background work).
The queue holds at most one flush a log, and `WORK_MAX` other pieces of work.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Generic, Protocol, TypeAlias, TypeVar

from headrace.base.log import get_logger

THREADS_MAX = 8
"""Syncs under way at once: file systems merge what concurrent ones commit. Started only as they are needed."""

WORK_MAX = 1024
"""Pieces of background work waiting or running; past it `submit` refuses, and its caller tries again later."""

Failure: TypeAlias = Exception | None
Waiter: TypeAlias = Callable[[Failure], None]

logger = get_logger(__name__)


class Ticket(Protocol):
    """A flush under way."""

    def run(self) -> None:
        """Make it durable; runs in a thread. Raises OSError when that fails."""
        ...


TicketT = TypeVar("TicketT", bound=Ticket)


class Flushable(Protocol[TicketT]):
    """What can be flushed: a `PartitionLog`. Both steps run on the loop."""

    def begin_flush(self) -> TicketT | None:
        """What is to be made durable, or None when all is."""
        ...

    def finish_flush(self, ticket: TicketT, error: Exception | None) -> None:
        """The ticket was run, with this outcome."""
        ...


LogT = TypeVar("LogT", bound=Flushable)  # type: ignore[type-arg]


class Loop(Protocol):
    """The part of an event loop that is used."""

    def call_soon(self, callback: Callable[[], None], /) -> object: ...

    def call_soon_threadsafe(self, callback: Callable[[], None], /) -> object: ...


class FlusherClosed(Exception):
    """Asked for after `close`."""


class _Flush:
    """A log that is being flushed, or is about to be."""

    __slots__ = ("again", "later", "running", "ticket", "waiters")

    def __init__(self) -> None:
        self.running = False
        self.ticket: Ticket | None = None
        self.waiters: list[Waiter] = []
        # Asked for while a flush ran, which does not cover it:
        self.again = False
        self.later: list[Waiter] = []


class Flusher(Generic[LogT]):
    """Flushes logs in a few threads. All methods are called on the loop."""

    def __init__(
        self, loop: Loop, on_flushed: Callable[[LogT], None] | None = None, threads_max: int = THREADS_MAX
    ) -> None:
        """`on_flushed` is called after every flush that ran, before the waiters of that flush."""
        assert threads_max > 0
        self._loop = loop
        self._on_flushed = on_flushed
        self.prepare: Callable[[LogT], Callable[[], None] | None] | None = None
        """Asked on the loop before a flush begins for what has to be done in the thread first, if anything."""
        self._threads_max = threads_max
        self._threads: list[threading.Thread] = []
        self._flushes: dict[LogT, _Flush] = {}
        self._due: list[LogT] = []
        self._work_count = 0
        self._queued = 0
        # Work for the threads, and what they finished: each item is (run, finish); None tells a thread to end.
        self._todo: SimpleQueue[tuple[Callable[[], None], Waiter] | None] = SimpleQueue()
        self._done: deque[tuple[Waiter, Failure]] = deque()
        self._wake_pending = False
        self._closed = False

    def request(self, log: LogT, waiter: Waiter | None = None) -> None:
        """Make all that `log` holds now durable; then call `waiter` with None, or with what went wrong."""
        if self._closed:
            if waiter is not None:
                waiter(FlusherClosed("the broker is shutting down"))
            return
        flush = self._flushes.get(log)
        if flush is None:
            flush = self._flushes[log] = _Flush()
            if not self._due:
                self._loop.call_soon(self._begin_due)
            self._due.append(log)
        if flush.running:
            flush.again = True
            if waiter is not None:
                flush.later.append(waiter)
        elif waiter is not None:
            flush.waiters.append(waiter)

    def is_flushing(self, log: LogT) -> bool:
        """Whether a flush of `log` is running or about to."""
        return log in self._flushes

    def submit(self, work: Callable[[], None], done: Waiter | None = None) -> bool:
        """Run `work` in a thread, then `done` on the loop. False when too much waits already: try later."""
        if self._closed or self._work_count >= WORK_MAX:
            return False
        self._work_count += 1

        def finish(error: Failure) -> None:
            self._work_count -= 1
            if done is not None:
                done(error)
            elif error is not None:
                logger.error("background work failed", extra={"fields": {"why": repr(error)}})

        self._enqueue(work, finish)
        return True

    def run_all(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Run jobs in threads and wait for them: for start-up and shutdown. They handle their own errors."""
        remaining = SimpleQueue[Callable[[], None]]()
        for job in jobs:
            remaining.put(job)
        failures: list[BaseException] = []

        def work() -> None:
            try:
                while True:
                    remaining.get_nowait()()
            except Empty:
                return
            except BaseException as failure:
                failures.append(failure)

        threads = [threading.Thread(target=work) for _ in range(min(self._threads_max, len(jobs)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def close(self) -> None:
        """Finish everything that was asked for, on this thread's time, tell all who wait, end the threads."""
        if self._closed:
            return
        # Completions may ask for more (a waiter that appends, a flush asked for while one ran): until nothing is left.
        while self._due or self._queued or self._done:
            self._begin_due()
            self._stop_threads()
            self._deliver()
        self._closed = True
        self._stop_threads()

    # -- on the loop -----------------------------------------------------------------------------------------

    def _begin_due(self) -> None:
        due, self._due = self._due, []
        for log in due:
            self._begin(log, self._flushes[log])

    def _begin(self, log: LogT, flush: _Flush) -> None:
        try:
            ticket = log.begin_flush()
        except Exception as error:
            self._settle(log, flush, error)
            return
        if ticket is None:
            self._settle(log, flush, None)
            return
        flush.running = True

        def finish(error: Failure) -> None:
            log.finish_flush(ticket, error)
            flush.running = False
            self._settle(log, flush, error)

        try:
            first = self.prepare(log) if self.prepare is not None else None
        except Exception as error:
            finish(error)
            return
        self._enqueue(ticket.run if first is None else _in_turn(first, ticket.run), finish)

    def _settle(self, log: LogT, flush: _Flush, error: Failure) -> None:
        """The flush of `log` is over: begin the next if one was asked for, then tell those who shared this one."""
        waiters = flush.waiters
        if flush.again:
            flush.waiters, flush.later, flush.again = flush.later, [], False
            if not self._due:
                self._loop.call_soon(self._begin_due)
            self._due.append(log)
        else:
            del self._flushes[log]
        if self._on_flushed is not None:
            self._on_flushed(log)
        for waiter in waiters:
            try:
                waiter(error)
            except Exception:
                # One that cannot be told must not keep the others waiting.
                logger.exception("a waiter for a flush failed")

    def _enqueue(self, run: Callable[[], None], finish: Waiter) -> None:
        self._queued += 1
        if len(self._threads) < min(self._queued, self._threads_max):
            thread = threading.Thread(
                target=self._serve, name=f"headrace-flush-{len(self._threads)}", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        self._todo.put((run, finish))

    def _deliver(self) -> None:
        # Cleared first: a thread that finishes from here on wakes the loop again, one that finished before is in
        # `_done` already.
        self._wake_pending = False
        done = self._done
        while done:
            finish, error = done.popleft()
            self._queued -= 1
            try:
                finish(error)
            except Exception:
                logger.exception("completion of a flush failed")

    def _stop_threads(self) -> None:
        for _ in self._threads:
            self._todo.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    # -- in a thread -----------------------------------------------------------------------------------------

    def _serve(self) -> None:
        todo, done = self._todo, self._done
        while (item := todo.get()) is not None:
            run, finish = item
            error: Failure = None
            try:
                run()
            except Exception as failure:
                error = failure
            done.append((finish, error))
            # They keep a log's files open, and must not do so in an idle thread.
            del item, run, finish, error
            if not self._wake_pending:
                self._wake_pending = True
                try:
                    self._loop.call_soon_threadsafe(self._deliver)
                except RuntimeError:
                    pass  # the loop is closed; `close` delivers what is left


def _in_turn(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        first()
        second()

    return run
