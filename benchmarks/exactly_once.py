"""`python -m benchmarks.exactly_once`: transactions on clusters of three, and compaction on one broker.

python -m benchmarks.exactly_once                    both; beside Kafka when HEADRACE_PEERS is set
python -m benchmarks.exactly_once --only compaction  one of them
python -m benchmarks.exactly_once --record           also write the table of benchmarks/README.md and transactions.json
"""

import argparse
import json
import sys

from benchmarks.__main__ import console, print_table, run
from benchmarks.clusters import CLUSTER_SHARED, HeadraceCluster, KafkaCluster
from benchmarks.compaction import COMPACTION
from benchmarks.report import FOLDER, Results, record
from benchmarks.systems import Headrace, Kafka
from benchmarks.workloads import Scale

TABLE = "transactions"


def _with_others(results: Results) -> Results:
    """The numbers of this run, and those of the workload that was not measured as they were recorded last."""
    path = FOLDER / f"{TABLE}.json"
    merged: Results = json.loads(path.read_text())["results"] if path.exists() else {}
    for system, numbers in results.items():
        merged.setdefault(system, {}).update(numbers)
    return merged


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3, help="how often each is measured (default: 3)")
    parser.add_argument("--only", choices=("transactions", "compaction"), help="one of the two")
    parser.add_argument("--quick", action="store_true", help="small amounts")
    parser.add_argument(
        "--record", action="store_true", help="write the README's table and transactions.json"
    )
    arguments = parser.parse_args()
    beside = Kafka.launcher() is not None
    scale = Scale.quick() if arguments.quick else Scale()
    results: Results = {}
    for name, shared, apart, kinds in (
        ("transactions", CLUSTER_SHARED, {}, [HeadraceCluster, KafkaCluster]),
        ("compaction", {}, COMPACTION, [Headrace, Kafka]),
    ):
        if arguments.only in (None, name):
            found, absent = run(
                kinds[: 1 + beside],
                (shared, apart),  # type: ignore[arg-type]
                [name],
                scale,
                arguments.runs,
                lambda found: None,
            )
            for system, numbers in found.items():
                results.setdefault(system, {}).update(numbers)
            if arguments.record:  # after each: a run that is cut short leaves what it has measured
                record(_with_others(results), arguments.runs, TABLE)
            for what, reason in absent.items():
                console.print(f"not measured: {what}: {reason}")
    print_table(results, arguments.runs)
    if arguments.record:
        console.print(f"wrote {FOLDER}/README.md and {TABLE}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
