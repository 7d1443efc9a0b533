"""Whoever does the harm: carries out the steps of a schedule, and in the end makes everything whole.

Each broker has a thread that does to it what it is told in order, so that a start that waits for a majority does not
hold up the next fault. Called by the chaos run.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from heapq import heappop, heappush

from headrace.testing import BrokerFailed
from tests.chaos.schedule import Fault, Step
from tests.chaos.systems import System

START_ATTEMPTS_MAX = 5


class Nemesis:
    """Runs a schedule against a system. `whois` says which broker has a role now, or None."""

    def __init__(
        self, system: System, whois: Callable[[str, int], int | None], say: Callable[[str], None]
    ) -> None:
        self._system, self._whois, self._say = system, whois, say
        self._hands = {number: ThreadPoolExecutor(1, f"broker-{number}") for number in system.ids}
        self._pending: list[tuple[float, int, str, Callable[[], None]]] = []
        self._count = 0
        self.failed_starts = 0

    def run(self, steps: list[Step]) -> None:
        """Do every step at its time; return when the last is undone."""
        begun_s = time.monotonic()
        for step in steps:
            self._until(begun_s + step.at_s)
            self._begin(step, begun_s)
        while self._pending:
            self._until(self._pending[0][0])

    def _until(self, then_s: float) -> None:
        """Undo what is due, and return at the time given."""
        while True:
            now_s = time.monotonic()
            if self._pending and self._pending[0][0] <= now_s:
                _, _, what, undo = heappop(self._pending)
                self._say(what)
                undo()
            elif now_s >= then_s:
                return
            else:
                time.sleep(min(then_s, self._pending[0][0] if self._pending else then_s) - now_s)

    def _later(self, at_s: float, what: str, undo: Callable[[], None]) -> None:
        self._count += 1
        heappush(self._pending, (at_s, self._count, what, undo))

    def _do(self, number: int, action: Callable[[int], None]) -> "Future[None]":
        return self._hands[number].submit(self._attempt, number, action)

    def _attempt(self, number: int, action: Callable[[int], None]) -> None:
        try:
            action(number)
        except BrokerFailed as error:
            self.failed_starts += 1
            self._say(f"broker {number}: {action.__name__}: {str(error)[:2000]}")

    def _begin(self, step: Step, begun_s: float) -> None:
        system, end_s = self._system, begun_s + step.at_s + step.lasts_s
        ids = system.ids
        first = self._whois(step.role, step.pick) or ids[step.pick % len(ids)]
        second, third = (ids[(ids.index(first) + 1 + step.pick % 2 + more) % len(ids)] for more in (0, 1))
        hit = {Fault.SPLIT: [first, second], Fault.KILL_ALL: ids, Fault.STORM: [first, second, third]}
        names = ",".join(map(str, hit.get(step.fault, [first])))
        self._say(f"{step.fault.value}: broker {names} ({step.role}) for {step.lasts_s} s")
        match step.fault:
            case Fault.KILL | Fault.STOP:
                self._do(first, system.kill if step.fault is Fault.KILL else system.stop)
                self._later(end_s, f"start {first}", lambda: self._start([first]))
            case Fault.KILL_ALL:
                for number in ids:
                    self._do(number, system.kill)
                self._later(end_s, "start all", lambda: self._start(ids))
            case Fault.PAUSE:
                self._do(first, system.pause)
                self._later(end_s, f"resume {first}", lambda: self._resume([first]))
            case Fault.ISOLATE | Fault.ISOLATE_FROM_BROKERS:
                system.cut([first], clients=step.fault is Fault.ISOLATE, one_way=False)
                self._later(end_s, "mend cables", system.heal)
            case Fault.SPLIT:
                system.cut([first, second], clients=False, one_way=False)
                self._later(end_s, "mend cables", system.heal)
            case Fault.ONE_WAY:
                system.cut([first], clients=False, one_way=True)
                self._later(end_s, "mend cables", system.heal)
            case Fault.FULL_DISK:
                self._do(first, system.fill_disk)
                self._later(end_s, f"room on {first}", lambda: self._empty([first]))
            case Fault.STORM:
                self._do(first, system.kill)
                self._do(second, system.pause)
                system.cut([third], clients=True, one_way=False)
                self._later(end_s, "end of the storm", lambda: self._end_storm(first, second))

    def _start(self, numbers: list[int]) -> None:
        for number in numbers:
            self._do(number, self._system.start)

    def _resume(self, numbers: list[int]) -> None:
        for number in numbers:
            self._do(number, self._system.resume)

    def _empty(self, numbers: list[int]) -> None:
        for number in numbers:
            self._do(number, self._system.empty_disk)

    def _end_storm(self, killed: int, paused: int) -> None:
        self._system.heal()
        self._start([killed])
        self._resume([paused])

    def make_whole(self) -> None:
        """Mend, resume, make room and start everything. Raises BrokerFailed when a broker does not come back."""
        self._system.heal()
        self._resume(self._system.ids)
        self._empty(self._system.ids)
        for attempt in range(1, START_ATTEMPTS_MAX + 1):
            started = [self._hands[number].submit(self._system.start, number) for number in self._system.ids]
            errors = [error for future in started if (error := future.exception()) is not None]
            if not errors:
                break
            if attempt == START_ATTEMPTS_MAX:
                raise errors[0]
        for hands in self._hands.values():
            hands.shutdown()
