"""Group commit: who shares a flush, who is told what, and that the loop never waits for a disk."""

import errno
import gc
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.storage import flusher as module
from headrace.storage.flusher import Flusher, FlusherClosed

DEADLINE_S = 60.0


class FakeLoop:
    """An event loop of which the test turns the crank."""

    def __init__(self) -> None:
        self.ready: deque[Callable[[], None]] = deque()
        self.arrived = threading.Condition()
        self.threadsafe: deque[Callable[[], None]] = deque()
        self.closed = False

    def call_soon(self, callback: Callable[[], None], /) -> None:
        self.ready.append(callback)

    def call_soon_threadsafe(self, callback: Callable[[], None], /) -> None:
        if self.closed:
            raise RuntimeError("Event loop is closed")
        with self.arrived:
            self.threadsafe.append(callback)
            self.arrived.notify()

    def turn(self) -> None:
        while self.ready:
            self.ready.popleft()()

    def run_until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            self.turn()
            with self.arrived:
                while not self.threadsafe and not condition():
                    left = deadline - time.monotonic()
                    assert left > 0, "nothing came back in time"
                    self.arrived.wait(left)
                self.ready.extend(self.threadsafe)
                self.threadsafe.clear()
            self.turn()
            if condition():
                return


class FakeTicket:
    def __init__(self, log: "FakeLog", covers: int) -> None:
        self.log = log
        self.covers = covers

    def run(self) -> None:
        self.log.started.set()
        assert self.log.gate.wait(DEADLINE_S)
        if self.log.error is not None:
            raise self.log.error


class FakeLog:
    """A log whose sync takes until the gate opens."""

    def __init__(self) -> None:
        self.written = 0
        self.flushed = 0
        self.running = 0
        self.flush_count = 0
        self.finished: list[Exception | None] = []
        self.gate = threading.Event()
        self.gate.set()
        self.started = threading.Event()
        self.error: OSError | None = None
        self.begin_error: Exception | None = None

    def begin_flush(self) -> FakeTicket | None:
        assert self.running == 0, "two flushes of one log at once"
        if self.begin_error is not None:
            raise self.begin_error
        if self.flushed == self.written:
            return None
        self.running += 1
        self.flush_count += 1
        return FakeTicket(self, self.written)

    def finish_flush(self, ticket: FakeTicket, error: Exception | None) -> None:
        self.running -= 1
        self.finished.append(error)
        if error is None:
            self.flushed = ticket.covers


Told = list[tuple[int, Exception | None]]


class Rig:
    def __init__(self, **options: int) -> None:
        self.loop = FakeLoop()
        self.flushed: list[FakeLog] = []
        self.flusher: Flusher[FakeLog] = Flusher(self.loop, self.flushed.append, **options)
        self.told: Told = []

    def write(self, log: FakeLog, tag: int = 0) -> None:
        log.written += 1
        self.flusher.request(log, lambda error: self.told.append((tag, error)))


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_requests_of_one_turn_share_one_flush(rig: Rig) -> None:
    log = FakeLog()
    for tag in range(10):
        rig.write(log, tag)
    assert log.flush_count == 0, "it begins at the end of the turn"
    rig.loop.run_until(lambda: len(rig.told) == 10)
    assert log.flush_count == 1
    assert rig.told == [(tag, None) for tag in range(10)]
    assert rig.flushed == [log]
    rig.flusher.close()


def test_a_flush_that_cannot_be_prepared_fails_alone_and_can_be_asked_for_again(rig: Rig) -> None:
    """It went on for ever as the one under way, and those that were to begin in the same turn never did."""
    broken, whole = FakeLog(), FakeLog()

    def prepare(log: FakeLog) -> None:
        if log is broken and not broken.finished:
            raise OSError(errno.EMFILE, "Too many open files")

    rig.flusher.prepare = prepare
    rig.write(broken, 1)
    rig.write(whole, 2)
    rig.loop.run_until(lambda: len(rig.told) == 2)
    assert {tag: error is None for tag, error in rig.told} == {1: False, 2: True}
    rig.write(broken, 3)
    rig.loop.run_until(lambda: len(rig.told) == 3)
    assert rig.told[2] == (3, None)
    rig.flusher.close()


def test_requests_during_a_flush_share_the_next_one(rig: Rig) -> None:
    log = FakeLog()
    log.gate.clear()
    rig.write(log, 1)
    rig.loop.turn()
    assert log.started.wait(DEADLINE_S)
    for tag in (2, 3, 4):
        rig.write(log, tag)
    rig.loop.turn()
    assert rig.told == [] and log.flush_count == 1, "the loop went on while the disk was busy"
    log.gate.set()
    rig.loop.run_until(lambda: len(rig.told) == 4)
    assert log.flush_count == 2
    assert [tag for tag, _ in rig.told] == [1, 2, 3, 4]
    assert log.flushed == log.written == 4
    rig.flusher.close()


def test_waiter_is_told_after_the_log_and_only_when_its_write_is_durable(rig: Rig) -> None:
    log = FakeLog()
    seen: list[int] = []
    for _ in range(20):
        log.written += 1
        mine = log.written
        rig.flusher.request(log, lambda error, mine=mine: seen.append(log.flushed - mine))  # type: ignore[misc]
        rig.loop.turn()
    rig.loop.run_until(lambda: len(seen) == 20)
    assert min(seen) >= 0
    rig.flusher.close()


def test_clean_log_answers_without_a_thread(rig: Rig) -> None:
    log = FakeLog()
    rig.flusher.request(log, lambda error: rig.told.append((0, error)))
    rig.loop.turn()
    assert rig.told == [(0, None)]
    assert log.flush_count == 0
    rig.flusher.close()


def test_different_logs_sync_at_the_same_time(rig: Rig) -> None:
    logs = [FakeLog() for _ in range(4)]
    for log in logs:
        log.gate.clear()
        rig.write(log)
    rig.loop.turn()
    for log in logs:
        assert log.started.wait(DEADLINE_S), "each sync began although no other had ended"
    for log in logs:
        log.gate.set()
    rig.loop.run_until(lambda: len(rig.told) == 4)
    rig.flusher.close()


def test_threads_are_few_and_started_only_when_needed() -> None:
    rig = Rig(threads_max=2)
    assert rig.flusher._threads == []
    logs = [FakeLog() for _ in range(10)]
    for log in logs:
        log.gate.clear()
        rig.write(log)
    rig.loop.turn()
    assert len(rig.flusher._threads) == 2
    for log in logs:
        log.gate.set()
    rig.loop.run_until(lambda: len(rig.told) == 10)
    rig.flusher.close()
    assert rig.flusher._threads == []


def test_failed_sync_reaches_the_log_and_all_who_shared_it(rig: Rig) -> None:
    log = FakeLog()
    log.error = OSError(5, "Input/output error")
    log.gate.clear()
    rig.write(log, 1)
    rig.write(log, 2)
    rig.loop.turn()
    assert log.started.wait(DEADLINE_S)
    rig.write(log, 3)
    log.gate.set()
    rig.loop.run_until(lambda: len(rig.told) == 3)
    assert [tag for tag, _ in rig.told] == [1, 2, 3]
    assert all(error is log.error for _, error in rig.told)
    assert log.finished == [log.error, log.error]
    rig.flusher.close()


def test_log_that_cannot_begin_tells_its_waiters(rig: Rig) -> None:
    log = FakeLog()
    log.begin_error = OSError(24, "Too many open files")
    rig.write(log, 1)
    rig.loop.turn()
    assert rig.told == [(1, log.begin_error)]
    log.begin_error = None
    rig.write(log, 2)
    rig.loop.run_until(lambda: len(rig.told) == 2)
    assert rig.told[1] == (2, None)
    rig.flusher.close()


def test_waiter_that_raises_keeps_no_other_from_being_told(rig: Rig) -> None:
    log = FakeLog()
    log.written = 1

    def broken(error: Exception | None) -> None:
        raise ValueError("a bug elsewhere")

    rig.flusher.request(log, broken)
    rig.write(log, 2)
    rig.loop.run_until(lambda: rig.told)
    assert rig.told == [(2, None)]
    rig.flusher.close()


def test_close_finishes_what_was_asked_for(rig: Rig) -> None:
    log, other = FakeLog(), FakeLog()
    rig.write(log, 1)
    rig.write(other, 2)
    rig.loop.closed = True  # the loop is gone: nothing can be delivered through it
    rig.flusher.close()
    assert sorted(rig.told) == [(1, None), (2, None)]
    assert log.flushed == 1 and other.flushed == 1
    rig.write(log, 3)
    (_, _, (tag, error)) = rig.told
    assert tag == 3 and isinstance(error, FlusherClosed)


def test_close_finishes_what_was_asked_for_during_a_flush(rig: Rig) -> None:
    log = FakeLog()
    log.gate.clear()
    rig.write(log, 1)
    rig.loop.turn()
    assert log.started.wait(DEADLINE_S)
    rig.write(log, 2)
    log.gate.set()
    rig.flusher.close()
    assert rig.told == [(1, None), (2, None)]
    assert log.flushed == 2
    rig.loop.run_until(lambda: True)
    assert len(rig.told) == 2, "a wake-up that was under way delivers nothing twice"


def test_finished_flush_leaves_no_reference_to_its_ticket(rig: Rig) -> None:
    log = FakeLog()
    tickets: list[weakref.ref[FakeTicket]] = []
    begin = log.begin_flush

    def spy() -> FakeTicket | None:
        ticket = begin()
        assert ticket is not None
        tickets.append(weakref.ref(ticket))
        return ticket

    log.begin_flush = spy  # type: ignore[method-assign]
    rig.write(log)
    rig.loop.run_until(lambda: rig.told)
    gc.collect()
    assert tickets[0]() is None, "an idle thread would keep the files of a deleted log open"
    rig.flusher.close()


def test_background_work_runs_in_a_thread_and_reports_on_the_loop(rig: Rig) -> None:
    where: list[int] = []
    outcomes: list[Exception | None] = []
    failure = OSError(28, "No space left on device")

    def fails() -> None:
        raise failure

    assert rig.flusher.submit(lambda: where.append(threading.get_ident()), outcomes.append)
    assert rig.flusher.submit(fails, outcomes.append)
    rig.loop.run_until(lambda: len(outcomes) == 2)
    assert where != [threading.get_ident()]
    assert set(outcomes) == {None, failure}
    rig.flusher.close()
    assert not rig.flusher.submit(fails)


def test_background_work_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WORK_MAX", 3)
    rig = Rig(threads_max=1)
    gate = threading.Event()
    done: list[Exception | None] = []
    for _ in range(3):
        assert rig.flusher.submit(lambda: assert_true(gate.wait(DEADLINE_S)), done.append)
    assert not rig.flusher.submit(gate.set)
    gate.set()
    rig.loop.run_until(lambda: len(done) == 3)
    assert rig.flusher.submit(gate.set, done.append)
    rig.flusher.close()
    assert done == [None] * 4


def assert_true(value: bool) -> None:
    assert value


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(["write", "write", "turn", "wait", "break", "mend"])),
        max_size=60,
    )
)
def test_everyone_is_told_once_and_never_before_it_is_true(script: list[tuple[int, str]]) -> None:
    rig = Rig(threads_max=3)
    logs = [FakeLog() for _ in range(4)]
    asked = 0
    lies: list[object] = []
    answered: list[int] = []

    for number, step in script:
        log = logs[number]
        if step == "write":
            log.written += 1
            asked += 1

            def told(error: Exception | None, log: FakeLog = log, mine: int = log.written) -> None:
                answered.append(mine)
                if error is None and log.flushed < mine:
                    lies.append((log, mine))

            rig.flusher.request(log, told)
        elif step == "turn":
            rig.loop.turn()
        elif step == "wait":
            rig.loop.run_until(lambda asked=asked: len(answered) == asked)  # type: ignore[misc]
        else:
            log.error = OSError(5, "Input/output error") if step == "break" else None
    rig.flusher.close()
    assert lies == []
    assert len(answered) == asked
