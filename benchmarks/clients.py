"""Python clients beside each other: the same records through the same broker, one record a call, and as Arrow tables.

    .venv/bin/python -m benchmarks.clients                      # a broker of this checkout
    .venv/bin/python -m benchmarks.clients --bootstrap HOST:PORT --records 500000 --runs 5
    .venv/bin/python -m benchmarks.clients --record             # and write the table and chart of benchmarks/README.md

Each client runs in a process of its own, the clients take turns, and the median of the runs is shown with the processor
time of the client beside it (on a busy machine the steadier of the two). What each does is in `client_runs` and
`client_latency`. Prints tables, and JSON with --json.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import date
from typing import Any
from xml.sax.saxutils import escape

from benchmarks import client_latency, client_runs
from benchmarks.report import FOLDER, FONT, machine

LATENCY_S = 8
IMPORTS = 7
IMPORT_MS_MAX = 150

Numbers = dict[str, float]
Found = dict[str, dict[str, list[float]]]  # client -> measure -> one number a run
Run = Callable[[str, str, int], Awaitable[Numbers]]

RUNS: dict[str, tuple[Run, Run | None, float]] = {  # what it does, how late it is, its share of the records
    "headrace": (client_runs.headrace, client_latency.headrace, 1.0),
    "headrace-blocking": (client_runs.headrace_blocking, client_latency.headrace_blocking, 1.0),
    "headrace-arrow": (client_runs.headrace_arrow, None, 4.0),
    "confluent-kafka": (client_runs.confluent, client_latency.confluent, 1.0),
    "aiokafka": (client_runs.aiokafka, client_latency.aiokafka, 0.1),
    "kafka-python": (client_runs.kafka_python, client_latency.kafka_python, 0.1),
}
RATES = {
    "produce": "send",
    "consume": "read one by one",
    "consume_many": "read in lists",
}
# What is asked for: this client's measure, at least so many times that of another.
AIMS = (
    ("headrace", "produce", "confluent-kafka", "produce", 1.0),
    ("headrace", "produce", "aiokafka", "produce", 5.0),
    ("headrace", "produce", "kafka-python", "produce", 5.0),
    ("headrace-blocking", "produce", "confluent-kafka", "produce", 1.0),
    ("headrace", "consume", "confluent-kafka", "consume", 2.0),
    ("headrace-blocking", "consume", "confluent-kafka", "consume", 2.0),
    ("headrace", "consume_many", "confluent-kafka", "consume_many", 2.0),
    ("headrace-arrow", "produce", "confluent-kafka", "produce", 5.0),
    ("headrace-arrow", "consume", "confluent-kafka", "consume_many", 5.0),
    ("headrace-arrow", "read_range", "confluent-kafka", "consume_many", 5.0),
    ("confluent-kafka", "latency_p99_ms", "headrace", "latency_p99_ms", 1.0),
)


def one(client: str, part: str, bootstrap: str, count: int) -> Numbers:
    """One run of one part of one client, on a topic of its own, in this process."""
    from headrace import Admin, NewTopic

    async def run() -> Numbers:
        rates, latency, share = RUNS[client]
        topic = f"clients-{client}-{time.time_ns()}"
        async with Admin(bootstrap_servers=bootstrap) as admin:
            await admin.create_topic(NewTopic(topic, 1, 1))
            try:
                if part == "latency":
                    assert latency is not None
                    return await latency(bootstrap, topic, LATENCY_S)
                return await rates(bootstrap, topic, int(count * share))
            finally:
                await admin.delete_topics([topic])

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


def measure(bootstrap: str, count: int, runs: int, clients: list[str]) -> Found:
    """All runs of all clients, taking turns: first rates, then, on processors that are kept awake, latencies."""
    found: Found = {client: {} for client in clients}

    def turns(part: str, clients: list[str]) -> None:
        for _ in range(runs):
            for client in clients:
                command = [sys.executable, "-m", "benchmarks.clients", "--one", client, "--part", part]
                command += ["--bootstrap", bootstrap, "--records", str(count)]
                done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
                for name, value in json.loads(done.stdout.splitlines()[-1]).items():
                    found[client].setdefault(name, []).append(value)

    turns("rates", clients)
    with awake():
        turns("latency", [client for client in clients if RUNS[client][1] is not None])
    return found


@contextmanager
def awake() -> Iterator[None]:
    """Keep every processor from halting, with a loop that runs only when nothing else wants to (SCHED_IDLE).

    A guest whose processor halts is woken when its host gets round to it; what is measured then is the host, and most
    of all with clients that sleep until there is something to do.
    """
    program = (
        "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); "
        "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\nwhile True: pass"
    )
    processors = sorted(os.sched_getaffinity(0))
    loops = [subprocess.Popen([sys.executable, "-c", program, str(number)]) for number in processors]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def import_ms() -> float:
    """What `from headrace import Producer, Consumer, Admin` takes in a new interpreter; the median of some.

    With byte code, as pip leaves an installed package: the first run, which may have to write it, does not count.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    program = (
        "from time import perf_counter as now; begun = now(); from headrace import Producer, Consumer, Admin; "
        "print((now() - begun) * 1000)"
    )
    times = []
    for _ in range(IMPORTS + 1):
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, check=True, env=environment, capture_output=True, text=True)
        times.append(float(done.stdout))
    return statistics.median(times[1:])


def _middle(found: Found, client: str, name: str) -> float | None:
    numbers = found.get(client, {}).get(name)
    return statistics.median(numbers) if numbers else None


def _shown(numbers: list[float] | None, scale: float = 1000.0, digits: int = 0) -> str:
    if not numbers:
        return ""
    low, middle, high = (
        f"{value / scale:,.{digits}f}".replace(",", " ")
        for value in (min(numbers), statistics.median(numbers), max(numbers))
    )
    return f"{middle} ({low} to {high})"


def tables(found: Found) -> str:
    """The medians as tables of Markdown, thousands of records a second, and what was asked for beside them."""
    lines = [
        "| client | "
        + " | ".join(f"{title} | client CPU" for title in RATES.values())
        + " | p50 ms | p99 ms |",
        "|---|" + "---:|---:|" * (len(RATES) + 1),
    ]
    for client, numbers in found.items():
        if client == "headrace-arrow":
            continue
        cells = []
        for name in RATES:
            spent = _middle(found, client, name + "_cpu")
            cells += [
                _shown(numbers.get(name)),
                "" if spent is None else f"{spent / 1000:,.0f}".replace(",", " "),
            ]
        cells += [_shown(numbers.get(f"latency_{name}_ms"), 1.0, 2) for name in ("p50", "p99")]
        lines.append(f"| {client} | " + " | ".join(cells) + " |")
    if arrow := found.get("headrace-arrow"):
        lines += ["", "| Arrow | records | client CPU |", "|---|---:|---:|"]
        for words, name in (
            ("send_arrow", "produce"),
            ("poll_arrow", "consume"),
            ("read_range", "read_range"),
        ):
            lines.append(f"| {words} | {_shown(arrow.get(name))} | {_shown(arrow.get(name + '_cpu'))} |")
        for words, name in (("columns to batches", "encode_cpu"), ("batches to columns", "decode_cpu")):
            lines.append(f"| codec alone: {words} | | {_shown(arrow.get(name))} |")
    lines += ["", "| | ratio | aim | |", "|---|---:|---|---|"]
    for ours, name, theirs, their_name, aim in AIMS:
        above, below = _middle(found, ours, name), _middle(found, theirs, their_name)
        if above and below:
            words = f"{ours} {name} / {theirs} {their_name}"
            mark = "✓" if above / below >= aim else "✗"
            lines.append(f"| {words} | {above / below:.2f} × | ≥ {aim:g} × | {mark} |")
    return "\n".join(lines)


BAR_HEIGHT, BAR_GAP, LEFT, WIDTH, TOP = 14, 4, 190, 640, 12


def chart(found: Found) -> str:
    """An SVG: a bar for each rate of each client, longer is better."""
    bars = [
        (f"{client}: {title}", middle, client.startswith("headrace"))
        for name, title in RATES.items()
        for client in found
        if (middle := _middle(found, client, name)) is not None and client != "headrace-arrow"
    ]
    reach = max(rate for _, rate, _ in bars)
    height = TOP + len(bars) * (BAR_HEIGHT + BAR_GAP) + 8
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" {FONT}>',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for place, (words, rate, own) in enumerate(bars):
        y = TOP + place * (BAR_HEIGHT + BAR_GAP)
        width = max(1.0, rate / reach * (WIDTH - LEFT - 90))
        colour = "#2a7f62" if own else "#8a8a8a"
        out.append(f'<text x="{LEFT - 8}" y="{y + 11}" text-anchor="end">{escape(words)}</text>')
        out.append(f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR_HEIGHT}" fill="{colour}"/>')
        out.append(f'<text x="{LEFT + width + 6:.1f}" y="{y + 11}">{rate / 1000:,.0f} k/s</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def page(found: Found, runs: int, took_ms: float) -> str:
    """What is written into benchmarks/README.md."""
    head = f"{date.today().isoformat()}, {machine()}. Median of {runs} runs (lowest to highest)."
    mark = "✓" if took_ms <= IMPORT_MS_MAX else "✗"
    imports = f"`from headrace import Producer, Consumer, Admin`: {took_ms:.0f} ms (≤ {IMPORT_MS_MAX}) {mark}"
    return f"{head}\n\n{tables(found)}\n\n{imports}"


def record(text: str, drawn: str) -> None:
    """Write the table and the chart of benchmarks/README.md."""
    (FOLDER / "clients.svg").write_text(drawn)
    readme = FOLDER / "README.md"
    begin, end = "<!-- clients -->\n", "<!-- end of clients -->"
    head, rest = readme.read_text().split(begin, 1)
    picture = "\n\n![records a second, by client](clients.svg)"
    readme.write_text(f"{head}{begin}{text}{picture}\n{end}{rest.split(end, 1)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bootstrap", help="the cluster (default: a broker of this checkout)")
    parser.add_argument("--records", type=int, default=500_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", help="these clients, with commas between them")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--record", action="store_true", help="write table and chart into benchmarks/README.md"
    )
    parser.add_argument("--one", choices=list(RUNS), help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=["rates", "latency"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one, options.part, options.bootstrap, options.records)))
        return
    clients = options.only.split(",") if options.only else list(RUNS)

    def report(bootstrap: str) -> Any:
        found = measure(bootstrap, options.records, options.runs, clients)
        text = page(found, options.runs, import_ms())
        print(json.dumps(found) if options.json else text)
        if options.record:
            record(text, chart(found))

    if options.bootstrap:
        report(options.bootstrap)
        return
    from benchmarks.systems import Headrace

    system = Headrace()
    try:
        report(system.start().bootstrap)
    finally:
        system.remove()


if __name__ == "__main__":
    main()
