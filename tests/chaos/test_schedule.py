"""A seed gives one schedule, and schedules have the faults they should."""

from tests.chaos.schedule import Fault, schedule

ALL = list(Fault)


def test_a_seed_always_gives_the_same_schedule() -> None:
    assert schedule(7, 600, ALL) == schedule(7, 600, ALL)
    assert schedule(7, 600, ALL) != schedule(8, 600, ALL)


def test_every_fault_is_over_before_the_end_and_all_kinds_come_up() -> None:
    seen: set[Fault] = set()
    for seed in range(20):
        steps = schedule(seed, 600, ALL)
        assert all(step.at_s + step.lasts_s <= 600 for step in steps)
        assert [step.at_s for step in steps] == sorted(step.at_s for step in steps)
        seen |= {step.fault for step in steps}
    assert seen == set(Fault)


def test_only_faults_that_are_offered_come_up() -> None:
    assert {step.fault for step in schedule(3, 600, [Fault.KILL, Fault.PAUSE])} == {Fault.KILL, Fault.PAUSE}
