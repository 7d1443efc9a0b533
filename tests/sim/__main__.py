"""Run seeds: `python -m tests.sim --seeds 1-1000`. Prints every seed that fails, and how to see it happen again."""

import argparse
import sys
import time
import traceback
from collections.abc import Sequence

from tests.sim.raft_scenario import run_seed


def parse_seeds(text: str) -> range:
    """`7`, or `1-1000`."""
    first, dash, last = text.partition("-")
    return range(int(first), int(last) + 1) if dash else range(int(first), int(first) + 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; 1 when a seed failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=parse_seeds, default=range(1, 501), help="one seed, or first-last")
    parser.add_argument("--files", action="store_true", help="all nodes on the production storage")
    parser.add_argument("--trace", action="store_true", help="print everything that happens")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first failure")
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    failed = events = done = 0
    for seed in options.seeds:
        try:
            scenario = run_seed(seed, files=options.files or None, trace=print if options.trace else None)
        except Exception as error:
            failed += 1
            if options.trace:
                traceback.print_exc()
            files = " --files" if options.files else ""
            print(f"seed {seed}: {type(error).__name__}: {error}")
            print(f"  again, step by step: python -m tests.sim --seeds {seed}{files} --trace")
            if not options.keep_going:
                return 1
        else:
            events += scenario.kernel.events
        done += 1
    elapsed = time.perf_counter() - began
    print(
        f"{done} seeds, {failed} failed, {done / elapsed * 60:.0f} a minute, {events / max(done, 1):.0f} events each"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
