"""`python -m benchmarks`: runs the workloads, alternating between the systems, and prints the table.

python -m benchmarks                         everything; Headrace alone, or beside Kafka when HEADRACE_PEERS is set
python -m benchmarks --only produce,latency  some of it
python -m benchmarks --cluster               three brokers, three replicas, acks=all; and five of them
python -m benchmarks --groups                consumer groups
python -m benchmarks --quick                 small amounts, to try the benchmark itself
python -m benchmarks --record                also write benchmarks/README.md's table, latest.json and latest.svg;
                                             with --only, rows of the same day and machine stay as they are
"""

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from benchmarks.clusters import CLUSTER_ALONE, CLUSTER_SHARED, HeadraceCluster, KafkaCluster, rounds
from benchmarks.group_changes import GROUP_CHANGES
from benchmarks.groups import GROUPS
from benchmarks.report import FOLDER, Results, chart, machine, record, rows_of
from benchmarks.sink import Sink
from benchmarks.systems import Headrace, Kafka, System, Unavailable
from benchmarks.workloads import ALONE, SHARED, Numbers, Scale

Workloads = dict[str, Callable[[System, Scale], Numbers]]
WorkloadsAlone = dict[str, Callable[[type[System], Scale], Numbers]]

MORE_RUNS = {"produce": 2, "produce-flushed": 2}
"""How many times the runs that were asked for: these take a second, and what takes a second varies more."""

console = Console(stderr=True, highlight=False)


def measure(
    what: str, system: str, results: Results, absent: dict[str, str], work: Callable[[], Numbers]
) -> None:
    """One workload once on one system; why it could not be done is kept."""
    begun_s = time.monotonic()
    try:
        numbers = work()
    except Unavailable as reason:
        absent[what] = str(reason)
        return
    for key, number in numbers.items():
        results.setdefault(system, {}).setdefault(key, []).append(number)
    told = ", ".join(f"{key} {number:,.2f}" for key, number in numbers.items())
    console.print(
        f"[dim]{what:<16} {system:<9} {time.monotonic() - begun_s:5.1f} s[/]  {told}", soft_wrap=True
    )


def warm_up(system: System, scale: Scale, shared: Workloads) -> None:
    """One round that is not counted: a JVM compiles what it runs often, and the first round would pay for that."""
    for name in ("produce", "consume"):
        with contextlib.suppress(Unavailable):
            if name in shared and (system.workloads is None or name in system.workloads):
                shared[name](system, scale)


def run(
    kinds: list[type[System]],
    workloads: tuple[Workloads, WorkloadsAlone],
    wanted: list[str],
    scale: Scale,
    runs: int,
    keep: Callable[[Results], None],
) -> tuple[Results, dict[str, str]]:
    """All wanted workloads, each `runs` times, one system after the other within a run.

    `keep` is given the results after each workload: a run that is cut short leaves what it has measured.
    """
    results: Results = {}
    absent: dict[str, str] = {}
    together, apart = workloads
    shared = [name for name in together if name in wanted]
    systems: list[System] = []
    try:
        if shared:
            for kind in kinds:
                if kind.workloads is None or kind.workloads & set(shared):
                    systems.append(kind())
                    systems[-1].start()
            for system in systems:
                warm_up(system, scale, together)
        for name in shared:
            quick, wished = scale == Scale.quick(), runs * MORE_RUNS.get(name, 1)
            counts = {system.name: rounds(name, system.name, wished, quick) for system in systems}
            for number in range(max(counts.values())):
                for system in (each for each in systems if number < counts[each.name]):
                    if system.workloads is not None and name not in system.workloads:
                        continue
                    measure(
                        name, system.name, results, absent, lambda s=system, n=name: together[n](s, scale)
                    )
            keep(results)
    finally:
        for system in systems:
            system.remove()
    for name in (name for name in apart if name in wanted):
        for _ in range(runs):
            for kind in (kind for kind in kinds if kind.workloads is None):
                measure(name, kind.name, results, absent, lambda k=kind, n=name: apart[n](k, scale))
        keep(results)
    return results, absent


def print_table(results: Results, runs: int) -> None:
    table = Table(title=f"{machine()}; median of {runs} (lowest to highest)", title_justify="left")
    for column, justify in (
        ("", "left"),
        ("Headrace", "right"),
        ("Kafka", "right"),
        ("ratio", "right"),
        ("aim", "left"),
        ("stores nothing", "right"),
    ):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for row in rows_of(results):
        ratio = f"{row.ratio:.2f} ×" if row.ratio is not None else "-"
        colour = {True: "green", False: "red", None: ""}[row.met]
        table.add_row(
            row.measure.words,
            row.shown(row.headrace),
            row.shown(row.kafka),
            ratio,
            f"[{colour}]{row.aim}[/]" if colour else row.aim,
            row.shown(row.sink) if row.sink else "",
        )
    Console(highlight=False, width=None if sys.stdout.isatty() else 140).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3, help="how often each is measured (default: 3)")
    parser.add_argument("--cluster", action="store_true", help="three brokers, three replicas, acks=all")
    parser.add_argument("--groups", action="store_true", help="consumer groups")
    parser.add_argument(
        "--only",
        metavar="NAME,...",
        help=f"of {', '.join([*SHARED, *ALONE])}; of a cluster {', '.join([*CLUSTER_SHARED, *CLUSTER_ALONE])}; "
        f"of groups {', '.join([*GROUPS, *GROUP_CHANGES])}",
    )
    parser.add_argument("--quick", action="store_true", help="small amounts")
    parser.add_argument(
        "--no-kafka", action="store_true", help="Headrace alone, also where Kafka could be started"
    )
    parser.add_argument(
        "--record", action="store_true", help="write the README's table, latest.json and latest.svg"
    )
    arguments = parser.parse_args()
    workloads = (CLUSTER_SHARED, CLUSTER_ALONE) if arguments.cluster else (SHARED, ALONE)
    if arguments.groups:
        workloads = ({}, {**GROUPS, **GROUP_CHANGES})
    known = [name for group in workloads for name in group]
    wanted = arguments.only.split(",") if arguments.only else known
    if unknown := [name for name in wanted if name not in known]:
        parser.error(f"no workload is called {', '.join(unknown)}; there are {', '.join(known)}")
    kinds: list[type[System]] = [HeadraceCluster if arguments.cluster else Headrace]
    if Kafka.launcher() and not arguments.no_kafka:
        kinds.append(KafkaCluster if arguments.cluster else Kafka)
    else:
        console.print(
            "without Kafka to compare with: set HEADRACE_PEERS to a directory with a Kafka launcher, and have java"
        )
    if not (arguments.cluster or arguments.groups):
        kinds.append(Sink)
    scale = Scale.quick() if arguments.quick else Scale()
    recorded = "groups" if arguments.groups else "cluster" if arguments.cluster else "latest"

    def keep(results: Results) -> None:
        if arguments.record:
            record(results, arguments.runs, recorded)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what was started is ended
    results, absent = run(kinds, workloads, wanted, scale, arguments.runs, keep)
    print_table(results, arguments.runs)
    for name, reason in absent.items():
        console.print(f"not measured: {name}: {reason}")
    if arguments.record:
        drawn = f" and {recorded}.svg" if chart(results) else ""
        console.print(f"wrote {FOLDER}/README.md, {recorded}.json{drawn}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
