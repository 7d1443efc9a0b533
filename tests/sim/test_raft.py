"""Raft from seeds: the properties of the paper hold under every fault."""

import pytest

from tests.sim.raft_scenario import run_seed

SEEDS, CHUNK = 240, 60


@pytest.mark.parametrize("first", range(1, SEEDS + 1, CHUNK))
def test_raft_keeps_its_promises_whatever_happens(first: int) -> None:
    committed = sum([len(run_seed(seed).oracle.committed) for seed in range(first, first + CHUNK)])
    assert committed > 10 * CHUNK, "something was at stake"
