"""Run seeds: `python -m tests.sim cluster --seeds 1..1000`. Prints every seed that fails, and how to see it again."""

import argparse
import gc
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

from tests.coordinators import txn_mutants, txn_sim
from tests.sim import cluster_mutants, cluster_scenario, mutants, raft_scenario

TRANSACTION_VERSIONS = (0, 2)
BATCH = 20  # seeds that a worker is given at a time
PROGRESS_EVERY_S = 60.0


class Outcome(NamedTuple):
    """What became of one seed."""

    seed: int
    failure: str = ""
    events: int = 0
    excused: bool = False
    acknowledged: int = 0


def parse_seeds(text: str) -> range:
    """`7`, `1..1000` or `1-1000`."""
    first, dots, last = text.replace("-", "..").partition("..")
    return range(int(first), int(last) + 1) if dots else range(int(first), int(first) + 1)


def run_one(
    world: str, seed: int, mutant: str | None, files: bool, trace: Callable[[str], None] | None
) -> Outcome:
    """Run one seed of one world, with a bug planted in it or not."""
    try:
        if world == "cluster":
            with cluster_mutants.planted(mutant) if mutant else nullcontext():
                cluster = cluster_scenario.run_seed(seed, trace=trace)
            return Outcome(seed, "", cluster.kernel.events, cluster.excused, cluster.oracle.acked_count)
        if world == "transactions":
            with txn_mutants.planted(mutant) if mutant else nullcontext():
                sims = [txn_sim.Sim(seed, version) for version in TRANSACTION_VERSIONS]
                for sim in sims:
                    sim.run()
            return Outcome(seed, "", sum(sim.events for sim in sims), False, sum(sim.seen for sim in sims))
        with mutants.planted(mutant) if mutant else nullcontext():
            raft = raft_scenario.run_seed(seed, files=files or None, trace=trace)
        return Outcome(seed, "", raft.kernel.events)
    except Exception as error:
        if trace is not None:
            traceback.print_exc()
        return Outcome(seed, f"{type(error).__name__}: {error}")


def settle(world: str) -> None:
    """Leave what is loaded by now out of the collections between seeds. Clusters call for theirs themselves."""
    gc.collect()
    gc.freeze()
    if world == "cluster":
        gc.disable()


def run_some(world: str, mutant: str | None, files: bool, seeds: range) -> list[Outcome]:
    """Run seeds one after the other, in a process of their own."""
    return [run_one(world, seed, mutant, files, None) for seed in seeds]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; 1 when a seed failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument(
        "world",
        nargs="?",
        choices=("raft", "cluster", "transactions"),
        default="raft",
        help="what is simulated",
    )
    parser.add_argument(
        "--seeds", "--seed", type=parse_seeds, default=range(1, 501), help="one, or first..last"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes to run them in")
    parser.add_argument("--mutant", help="plant a bug first")
    parser.add_argument("--files", action="store_true", help="raft: all nodes on the production storage")
    parser.add_argument("--trace", action="store_true", help="print everything that happens")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first failure")
    options = parser.parse_args(arguments)
    settle(options.world)
    began = time.perf_counter()
    done: list[Outcome] = []
    failed = 0
    seeds: range = options.seeds
    pieces = [seeds[start : start + BATCH] for start in range(0, len(seeds), BATCH)]
    work = partial(run_some, options.world, options.mutant, options.files)
    workers = options.jobs > 1
    with (
        ProcessPoolExecutor(options.jobs, initializer=settle, initargs=(options.world,))
        if workers
        else nullcontext()
    ) as pool:
        if options.trace:
            results = ([run_one(options.world, s, options.mutant, options.files, print)] for s in seeds)
        elif pool is not None:
            results = pool.map(work, pieces)  # type: ignore[assignment]
        else:
            results = ([run_one(options.world, s, options.mutant, options.files, None)] for s in seeds)
        told = began
        for outcomes in results:
            if (now := time.perf_counter()) - told > PROGRESS_EVERY_S:
                told, rate = now, len(done) / (now - began) * 60
                so_far = f"{len(done)} of {len(seeds)} seeds, {failed} failed, {rate:.0f} a minute"
                print(so_far, file=sys.stderr, flush=True)
            for outcome in outcomes:
                done.append(outcome)
                if outcome.failure:
                    failed += 1
                    again = f"{options.world} --seed {outcome.seed}" + (" --files" if options.files else "")
                    again += f" --mutant {options.mutant}" if options.mutant else ""
                    print(f"seed {outcome.seed}: {outcome.failure}")
                    print(f"  again, step by step: python -m tests.sim {again} --trace", flush=True)
            if failed and not options.keep_going:
                if pool is not None:
                    pool.shutdown(cancel_futures=True)
                break
    elapsed = time.perf_counter() - began
    count = max(len(done), 1)
    print(
        f"{len(done)} seeds, {failed} failed, {sum([each.excused for each in done])} excused, "
        f"{len(done) / elapsed * 60:.0f} a minute, {sum([each.events for each in done]) / count:.0f} events each, "
        f"{sum([each.acknowledged for each in done])} records acknowledged"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
