"""Transactions hold over any failure; and the simulation that shows it finds the bugs that are planted."""

import pytest

from headrace.coordinators import txn_metadata
from tests.coordinators.txn_mutants import MUTANTS, planted
from tests.coordinators.txn_sim import Sim, Violation

VERSIONS = (0, 2)
SEEDS = range(12)
MUTANT_SEEDS_MAX = 25
FIRST_SEEDS = {
    "say-that-an-id-is-unknown-without-making-sure": 624,
    "send-markers-before-the-decision-is-stored": 17,
}
"""Where to begin looking for a bug that few seeds show."""


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("seed", SEEDS)
def test_transactions_are_whole_once_and_never_in_the_way(seed: int, version: int) -> None:
    Sim(seed, version).run()


@pytest.mark.parametrize("seed", range(4))
def test_a_producer_id_whose_epochs_are_used_up_is_replaced(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(txn_metadata, "EPOCH_MAX", 5)
    sim = Sim(seed, 2)
    sim.run()
    assert sim.current.machine.transactions["copier"].value.previous_producer_id > 0


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_planted_bug_is_found(name: str) -> None:
    first = FIRST_SEEDS.get(name, 0)
    with planted(name):
        for seed in range(first, first + MUTANT_SEEDS_MAX):
            for version in reversed(VERSIONS):
                try:
                    Sim(seed, version).run()
                except (Violation, AssertionError):
                    return
    pytest.fail(f"no seed finds {name}")
