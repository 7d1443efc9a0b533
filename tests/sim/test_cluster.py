"""Whole clusters from seeds: what was acknowledged is there, in one order, once; and everything is well in the end."""

import pytest

from tests.sim.cluster_scenario import run_seed

SEEDS, CHUNK = 160, 20


@pytest.mark.parametrize("first", range(1, SEEDS + 1, CHUNK))
def test_clusters_lose_nothing_and_recover_whatever_happens(first: int) -> None:
    acknowledged = excused = 0
    for seed in range(first, first + CHUNK):
        scenario = run_seed(seed)  # what it raises tells what does not hold
        acknowledged += scenario.oracle.acked_count
        excused += scenario.excused
    assert acknowledged > 10 * CHUNK and excused < CHUNK // 2, "something was at stake"


def test_a_seed_always_gives_the_same_run() -> None:
    traces: list[list[str]] = [[], []]
    for trace in traces:
        run_seed(7, trace=trace.append)
    assert traces[0] == traces[1] and len(traces[0]) > 100
