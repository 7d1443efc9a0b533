"""Simulated time, machines and network: what any process runs on in the simulator, whatever it does.

One seed decides everything. `Kernel` owns time, in microseconds, and the events to come; `Machine` is where a process
runs, with its life and its pauses; `Network` loses, delays, reorders and doubles messages and cuts links. A process is
made by a factory when its machine starts and sees only its `Machine`. Invariant: nothing happens that is not an event
in the kernel's heap, in the order of time and then of birth, so a seed always gives the same run.
"""

import random
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any, Protocol

MS = 1_000  # microseconds in a millisecond
EVENTS_MAX = 200_000  # of one run; a run of more has processes that keep each other busy with nothing

Event = tuple[int, int, "Machine | None", int, Callable[..., None], tuple[Any, ...]]


class Runaway(AssertionError):
    """Far more happens than anything asked for."""


class Process(Protocol):
    """What runs on a machine, from its start to its crash."""

    def receive(self, sender: int, message: Any) -> None: ...

    def crashed(self, power_lost: bool) -> None:
        """The machine is gone. What was not durable is lost, unless only the process was killed."""
        ...


class Kernel:
    """Time and what happens in it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0
        self.events = 0
        self.after_step: Callable[[Machine], None] | None = None
        """Called after each event on a machine: where invariants are checked."""
        self.tracing: Callable[[str], None] | None = None
        self._heap: list[Event] = []
        self._born = 0

    def after(
        self, delay: int, call: Callable[..., None], *args: Any, machine: "Machine | None" = None
    ) -> None:
        """Call later; on a machine, only if that is still in the same life."""
        self._born += 1
        life = machine.life if machine is not None else 0
        heappush(self._heap, (self.now + delay, self._born, machine, life, call, args))

    def run(self, until: int) -> None:
        """Let time pass to `until`."""
        heap, after_step = self._heap, self.after_step
        while heap and heap[0][0] <= until:
            time, _, machine, life, call, args = heappop(heap)
            if machine is None:
                self.now = time
                self.events += 1
                call(*args)
            elif machine.life == life:
                self.now = time
                if machine.paused_until > time:
                    self._born += 1
                    heappush(heap, (machine.paused_until, self._born, machine, life, call, args))
                    continue
                self.events += 1
                call(*args)
                if after_step is not None:
                    after_step(machine)
            if self.events > EVENTS_MAX:
                raise Runaway(f"{EVENTS_MAX} events, and it is only {self.now / MS} ms")
        self.now = until

    def bring_forward(self, machine: "Machine", held_until: int) -> None:
        """What waits for a machine until that moment happens now."""
        self._heap[:] = [
            (self.now, *event[1:]) if event[0] == held_until and event[2] is machine else event
            for event in self._heap
        ]
        heapify(self._heap)

    def trace(self, text: str) -> None:
        if self.tracing is not None:
            self.tracing(f"{self.now / MS:10.3f} {text}")


class Machine:
    """Where one process runs."""

    def __init__(
        self, kernel: Kernel, network: "Network", machine_id: int, factory: Callable[["Machine"], Process]
    ) -> None:
        self.id = machine_id
        self.kernel = kernel
        self.random = kernel.random
        self.network = network
        self.life = 0
        """Changes with every start and crash; events of another life do not happen."""
        self.paused_until = 0
        self.process: Any = None
        self._factory = factory
        network.machines[machine_id] = self

    @property
    def up(self) -> bool:
        return self.process is not None

    def start(self) -> None:
        assert self.process is None
        self.life += 1
        self.paused_until = 0
        self.kernel.trace(f"{self.id}: start")
        self.process = self._factory(self)

    def crash(self, *, power_lost: bool) -> None:
        if self.process is None:
            return
        self.life += 1
        self.kernel.trace(f"{self.id}: {'power lost' if power_lost else 'killed'}")
        process, self.process = self.process, None
        process.crashed(power_lost)

    def crash_quietly(self) -> None:
        """The process has ended by itself, after it had said goodbye."""
        self.crash(power_lost=False)

    def pause(self, duration: int) -> None:
        """Do nothing for a while; everything that would have happened happens afterwards."""
        self.kernel.trace(f"{self.id}: pause {duration / MS} ms")
        self.paused_until = self.kernel.now + duration

    def resume(self) -> None:
        """Be paused no more; what was held happens now, in its order."""
        until, self.paused_until = self.paused_until, 0
        if until > self.kernel.now:
            self.kernel.bring_forward(self, until)

    def after(self, delay: int, call: Callable[..., None], *args: Any) -> None:
        self.kernel.after(delay, call, *args, machine=self)

    def send(self, to: int, message: Any) -> None:
        self.network.send(self.id, to, message)


class Network:
    """Between machines."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._random = kernel.random.random
        self.machines: dict[int, Machine] = {}
        self.cut: set[tuple[int, int]] = set()
        """Links that carry nothing, not even what was under way, by sender and receiver: one way at a time."""
        self.loss = 0.0
        self.duplication = 0.0
        self.delay_min = MS // 5
        self.delay_spread = MS
        self.ordered = True
        """As over one connection: nothing overtakes on a link, but for the stragglers."""
        self._arrivals: dict[tuple[int, int], int] = {}
        self.straggling = 0.0
        """The share of messages that take very long, and so arrive behind many sent later."""
        self.straggle_max = 300 * MS

    def send(self, sender: int, to: int, message: Any) -> None:
        if (sender, to) in self.cut or (self.loss and self._random() < self.loss):
            if self._kernel.tracing:
                self._kernel.trace(f"{sender} -> {to} lost: {message}")
            return
        self._deliver_later(sender, to, message)
        if self.duplication and self._random() < self.duplication:
            self._deliver_later(sender, to, message)

    def _deliver_later(self, sender: int, to: int, message: Any) -> None:
        now = self._kernel.now
        delay = self.delay_min + int(self._random() * self.delay_spread)
        if self.straggling and self._random() < self.straggling:
            delay += int(self._random() * self.straggle_max)
        elif self.ordered:
            arrival = max(now + delay, self._arrivals.get((sender, to), 0))
            self._arrivals[sender, to] = arrival
            delay = arrival - now
        self._kernel.after(delay, self._arrive, sender, to, message)

    def _arrive(self, sender: int, to: int, message: Any) -> None:
        machine = self.machines.get(to)
        if machine is None or machine.process is None or (sender, to) in self.cut:
            return
        kernel = self._kernel
        if machine.paused_until > kernel.now:
            kernel.after(machine.paused_until - kernel.now, self._arrive, sender, to, message)
            return
        if kernel.tracing:
            kernel.trace(f"{sender} -> {to}: {message}")
        machine.process.receive(sender, message)
        if kernel.after_step is not None:
            kernel.after_step(machine)

    def heal(self) -> None:
        """Carry everything, soon and once."""
        self.cut.clear()
        self.loss = self.duplication = self.straggling = 0.0
        self.ordered = True
        self.delay_min, self.delay_spread = MS // 5, MS

    def split(self, side: set[int], *, one_way: bool = False) -> None:
        """Cut all links from `side` to the others and, unless one way, back."""
        for here in side:
            for there in self.machines.keys() - side:
                self.cut.add((here, there))
                if not one_way:
                    self.cut.add((there, here))
