"""Whole clusters from seeds: what was acknowledged is there, in one order, once; and everything is well in the end."""

import asyncio
import inspect
from types import SimpleNamespace

import pytest

from tests.sim.cluster_loop import SimLoop
from tests.sim.cluster_scenario import run_seed
from tests.sim.kernel import Kernel, Machine, Network

SEEDS, CHUNK = 200, 20


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


def test_what_a_machine_did_not_live_to_begin_is_closed() -> None:
    async def work(given: object = None) -> None:
        await asyncio.get_running_loop().create_future()

    kernel = Kernel(1)
    owner = SimpleNamespace(oracle=SimpleNamespace(failure=None), fs=SimpleNamespace(is_cut=False))
    machine = Machine(kernel, Network(kernel), 1, lambda machine: None)  # type: ignore[arg-type, return-value]
    loop = SimLoop(machine, owner)
    given = work()
    begun, waiting, late = work(), work(given), work()
    loop.create_task(begun)
    kernel.run(1)
    loop.create_task(waiting)
    loop.ended()
    machine.life += 1
    loop.create_task(late)
    states = [inspect.getcoroutinestate(each) for each in (begun, waiting, given, late)]
    assert states == [inspect.CORO_SUSPENDED, *[inspect.CORO_CLOSED] * 3]
