"""A short run of chaos in every run of the tests: a few faults, real clients, and the whole account."""

from tests.chaos.run import run
from tests.chaos.schedule import Fault, Step
from tests.chaos.systems import HeadraceSystem

STEPS = [
    Step(2.0, Fault.KILL, "leader", 0, 1.5),
    Step(6.0, Fault.ISOLATE_FROM_BROKERS, "leader", 1, 3.0),
    Step(10.0, Fault.KILL_ALL, "any", 0, 0.5),
]


def test_nothing_is_lost_doubled_or_reordered_over_a_few_faults() -> None:
    said: list[str] = []
    system = HeadraceSystem(3, disks=False)
    try:
        outcome = run(system, STEPS, said.append, partitions=2, writers=2, rate=50.0)
    finally:
        system.close()
    report = "\n".join([*said, *outcome.account.lines(), *outcome.problems, str(outcome.notes)])
    assert outcome.good, report
    assert outcome.account.acked == outcome.account.sent > 0, report
