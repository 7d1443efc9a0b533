"""What goes wrong, and when: a list of faults that follows from a seed.

Pure. Who is hit is said by role (the leader of a partition, the controller, any broker), because which broker has it is
known only when the moment comes; everything else is decided here, so that a seed is enough to run the same again.
Called by the chaos run.
"""

import random
from enum import StrEnum
from typing import NamedTuple

QUIET_BEFORE_S = 3.0
QUIET_AFTER_S = 5.0
PAUSE_BETWEEN_S = (1.0, 6.0)
OVERLAP = 0.3


class Fault(StrEnum):
    """What can be done to a cluster."""

    KILL = "kill -9"
    STOP = "stop cleanly"
    PAUSE = "pause"
    ISOLATE = "cut off from brokers and clients"
    ISOLATE_FROM_BROKERS = "cut off from brokers, clients reach it"
    SPLIT = "split off two brokers"
    ONE_WAY = "may hear but not speak to the others"
    FULL_DISK = "full disk"
    KILL_ALL = "kill -9 all at once"
    STORM = "kill one, pause one, cut one off"


LASTS_S: dict[Fault, tuple[float, float]] = {
    Fault.KILL: (0.2, 8.0),
    Fault.STOP: (0.2, 6.0),
    Fault.PAUSE: (0.5, 15.0),
    Fault.ISOLATE: (1.0, 15.0),
    Fault.ISOLATE_FROM_BROKERS: (1.0, 15.0),
    Fault.SPLIT: (1.0, 12.0),
    Fault.ONE_WAY: (1.0, 12.0),
    Fault.FULL_DISK: (2.0, 10.0),
    Fault.KILL_ALL: (0.2, 3.0),
    Fault.STORM: (1.0, 10.0),
}
WEIGHT: dict[Fault, int] = {Fault.KILL: 5, Fault.PAUSE: 3, Fault.KILL_ALL: 1}
DEFAULT_WEIGHT = 2
ROLES = ("leader", "leader", "controller", "any")


class Step(NamedTuple):
    """One fault: when it begins, whom it hits, how long it lasts. `pick` chooses where the role leaves a choice."""

    at_s: float
    fault: Fault
    role: str
    pick: int
    lasts_s: float

    def __str__(self) -> str:
        return f"{self.at_s:7.1f} s  {self.fault.value} ({self.role}, {self.pick})  for {self.lasts_s:.1f} s"


def schedule(seed: int, seconds: float, faults: list[Fault]) -> list[Step]:
    """The faults of a run, in order; all are over a while before its end."""
    chance = random.Random(seed)
    weights = [WEIGHT.get(fault, DEFAULT_WEIGHT) for fault in faults]
    steps: list[Step] = []
    at_s = QUIET_BEFORE_S
    while True:
        (fault,) = chance.choices(faults, weights)
        lasts_s = chance.uniform(*LASTS_S[fault])
        step = Step(
            round(at_s, 1), fault, chance.choice(ROLES), chance.randrange(1_000_000), round(lasts_s, 1)
        )
        if step.at_s + step.lasts_s > seconds - QUIET_AFTER_S:
            return steps
        steps.append(step)
        overlaps = chance.random() < OVERLAP
        at_s += (
            (chance.uniform(0.2, 1.0) * lasts_s) if overlaps else lasts_s + chance.uniform(*PAUSE_BETWEEN_S)
        )
