"""From numbers to a table, a chart and a page.

`MEASURES` says what each number is, which way is better, and what Headrace aims for. A ratio is always Headrace over
Kafka in the same run; the chart turns it so that longer is better. "stores nothing" is what the same client reaches
against `sink`, and so more than any broker can have of it.
"""

import json
import math
import os
import platform
import re
import statistics
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from xml.sax.saxutils import escape

RUNS_TOLD_FROM = 5
"""A number that was measured more often than this says so."""
FOLDER = Path(__file__).resolve().parent
Results = dict[str, dict[str, list[float]]]  # system -> measure -> one number a run


@dataclass(frozen=True)
class Measure:
    """One number: its key in the results, its words, and its aim."""

    key: str
    words: str
    more_is_better: bool
    ratio_aim: float | None = None  # Headrace over Kafka: at least (more is better) or at most
    value_aim: float | None = None  # Headrace alone: at least (more is better) or at most
    digits: int = 2
    compared: bool = True  # whether a ratio says anything: not of what was merely so at the time


STOLEN = "processors taken away by the host meanwhile (%)"
MEASURES = (
    Measure("produce msg/s", "produce, kcat, acks=1 (msg/s)", True, 1.5, digits=0),
    Measure("produce cpu s/GB", "its broker CPU (s per GB)", False, 0.5),
    Measure("java produce msg/s", "produce, Kafka's perf tool (msg/s)", True, 1.2, digits=0),
    Measure("java produce cpu s/GB", "its broker CPU (s per GB)", False, 0.5),
    Measure("flushed produce msg/s", "produce, flush.messages=1 (msg/s)", True, 1.2, digits=0),
    Measure("flushed produce cpu s/GB", "its broker CPU (s per GB)", False),
    Measure("spread produce msg/s", "produce over 1 000 partitions (msg/s)", True, 1.5, digits=0),
    Measure("spread produce cpu s/GB", "its broker CPU (s per GB)", False),
    Measure("consume msg/s", "consume, kcat (msg/s)", True, 1.2, digits=0),
    Measure("consume cpu s/GB", "its broker CPU (s per GB)", False, 1.0),
    Measure("latency p50 ms", "end to end at 1 000 msg/s, p50 (ms)", False),
    Measure("latency p99 ms", "end to end at 1 000 msg/s, p99 (ms)", False, 1.0),
    Measure("latency stolen %", STOLEN, False, digits=1, compared=False),
    Measure("start after a clean stop s", "start to first ack, clean (s)", False, value_aim=0.5),
    Measure("start after a kill s", "start to first ack, killed with 1 GB (s)", False, value_aim=1.0),
    Measure("idle memory MB", "idle memory (MB)", False, value_aim=60.0, digits=0),
    Measure(
        "memory per partition KB", "idle memory a partition, of 1 000 (KB)", False, value_aim=10.0, digits=1
    ),
    Measure("create 100 topics s", "create 100 topics of 10 partitions (s)", False, 1.0),
    Measure("commits /s", "offset commits (a second)", True, 1.0, value_aim=20_000.0, digits=0),
    Measure("commits cpu us", "its broker CPU (µs a commit)", False),
    Measure("heartbeats cores", "1 000 groups × 5 members, heartbeats (cores)", False, value_aim=0.25),
    Measure("100 000 commits loaded s", "100 000 commits loaded after a restart (s)", False, value_aim=1.0),
    Measure(
        "rebalance cooperative s", "one of 20 members leaves 100 partitions, cooperative (s)", False, 0.5
    ),
    Measure("rebalance eager s", "the same, range assignor (s)", False, 0.5),
    Measure("rebalance usual s", "the same, cooperative, heartbeats every 3 s (s)", False, 0.5),
    Measure("rebalance consumer s", "the same, consumer protocol (s)", False, 0.5),
    Measure("form cooperative s", "20 members come together, cooperative (s)", False),
    Measure("form eager s", "the same, range assignor (s)", False),
    Measure("form usual s", "the same, cooperative, heartbeats every 3 s (s)", False),
    Measure("form consumer s", "the same, consumer protocol (s)", False),
    Measure("coordinator killed, commits s", "coordinator killed: no commit for (s)", False, value_aim=2.0),
    Measure("coordinator killed, reading s", "coordinator killed: no record for (s)", False, value_aim=2.0),
)
CLUSTER_MEASURES = (
    Measure("cluster produce msg/s", "produce, kcat, acks=all (msg/s)", True, 1.5, digits=0),
    Measure("cluster produce cpu s/GB", "its broker CPU (s per GB)", False, 0.5),
    Measure("cluster java produce msg/s", "produce, Kafka's perf tool (msg/s)", True, 1.5, digits=0),
    Measure("cluster java produce cpu s/GB", "its broker CPU (s per GB)", False, 0.5),
    Measure("cluster latency p50 ms", "end to end at 1 000 msg/s, p50 (ms)", False),
    Measure("cluster latency p99 ms", "end to end at 1 000 msg/s, p99 (ms)", False, value_aim=10.0),
    Measure("cluster latency stolen %", STOLEN, False, digits=1, compared=False),
    Measure("write gap after a kill s", "write gap, leader killed (s)", False, value_aim=1.5),
    Measure(
        "write gap after a controller's kill s",
        "write gap, leader killed that is the active controller (s)",
        False,
        value_aim=1.5,
    ),
    Measure("write gap after a stop s", "write gap, leader stopped cleanly (s)", False, value_aim=0.3),
    Measure("five brokers start s", "five brokers: start to all in service (s)", False, value_aim=3.0),
    Measure(
        "five brokers memory MB", "five brokers: idle memory in all (MB)", False, value_aim=300.0, digits=0
    ),
    Measure("cluster create 100 topics s", "create 100 topics of 10 partitions, led (s)", False, 1.0),
    Measure(
        "rejoin with 1000 partitions s",
        "restarted broker of 1 000 partitions in all ISRs (s)",
        False,
        value_aim=5.0,
    ),
    Measure("cluster transactions/s", "transactions of 100 messages over 4 partitions (a second)", True, 1.0),
    Measure("cluster flood msg/s", "confluent-kafka, acks=all, 4 partitions (msg/s)", True, digits=0),
    Measure("cluster flood in transactions msg/s", "the same, a commit each second (msg/s)", True, digits=0),
    Measure(
        "cluster transactional share",
        "a commit each second: share of the rate without transactions",
        True,
        value_aim=0.9,
    ),
    Measure("cluster read_uncommitted msg/s", "reading it, read_uncommitted (msg/s)", True, digits=0),
    Measure("cluster read_committed msg/s", "reading it, read_committed (msg/s)", True, digits=0),
    Measure(
        "cluster read_committed share",
        "read_committed: share of the rate of read_uncommitted",
        True,
        value_aim=0.95,
    ),
)
COMPACTION_MEASURES = (
    Measure(
        "compaction MB/s a core",
        "compaction, 100-byte records, 1 M keys (MB/s a core)",
        True,
        value_aim=100.0,
        digits=0,
    ),
    Measure("produce p99 idle ms", "produce at 1 000 msg/s, idle, p99 (ms)", False),
    Measure("produce p99 compacting ms", "the same during a compaction (ms)", False),
    Measure("produce p99 of its idle value", "as a multiple of idle", False, value_aim=2.0),
)
# Of Spark: what is called Kafka in the results is Spark's own connector there.
SPARK_MEASURES = (
    Measure("spark read rows/s", "read, count and sum of lengths (rows/s)", True, 3.0, digits=0),
    Measure("spark read cpu s/M", "its CPU (s per million rows)", False),
    Measure("spark read picked rows/s", 'the same with `.schema("value binary")` (rows/s)', True, digits=0),
    Measure("spark read picked cpu s/M", "its CPU (s per million rows)", False),
    Measure("spark json rows/s", "read, value parsed from JSON (rows/s)", True, 1.5, digits=0),
    Measure("spark json cpu s/M", "its CPU (s per million rows)", False),
    Measure("spark json picked rows/s", 'the same with `.schema("value binary")` (rows/s)', True, digits=0),
    Measure("spark json picked cpu s/M", "its CPU (s per million rows)", False),
    Measure("spark write rows/s", "write, at least once (rows/s)", True, 1.5, digits=0),
    Measure("spark write cpu s/M", "its CPU (s per million rows)", False),
    Measure(
        "spark write once rows/s", "write, exactly once beside at least once (rows/s)", True, 1.0, digits=0
    ),
    Measure("spark write once cpu s/M", "its CPU (s per million rows)", False),
    Measure("spark stream p50 ms", "topic to topic at 1 000 rows/s, p50 (ms)", False, 1.0, digits=0),
    Measure("spark stream batch ms", "one micro-batch of it (ms)", False, digits=0),
    Measure("spark stream p99 ms", "topic to topic at 1 000 rows/s, p99 (ms)", False, digits=0),
    Measure(
        "spark stream once p50 ms", "the same, exactly once beside at least once, p50 (ms)", False, digits=0
    ),
    Measure("spark stream once batch ms", "one micro-batch of it (ms)", False, digits=0),
    Measure(
        "spark stream once p99 ms", "the same, exactly once beside at least once, p99 (ms)", False, digits=0
    ),
)


@dataclass(frozen=True)
class Row:
    """One measure of one run, summed up."""

    measure: Measure
    headrace: list[float]
    kafka: list[float]
    sink: list[float] = field(default_factory=list)  # against a broker that stores nothing

    @property
    def ratio(self) -> float | None:
        """Headrace over Kafka, by medians."""
        if not self.measure.compared or not self.headrace or not self.kafka:
            return None
        below = statistics.median(self.kafka)
        return statistics.median(self.headrace) / below if below > 0 else None

    @property
    def aim(self) -> str:
        sign = "≥" if self.measure.more_is_better else "≤"
        aims = []
        if self.measure.ratio_aim is not None:
            aims.append(f"{sign} {self.measure.ratio_aim:g} ×")
        if self.measure.value_aim is not None:
            aims.append(f"{sign} {self.measure.value_aim:,g}".replace(",", " "))
        return ", ".join(aims)

    @property
    def met(self) -> bool | None:
        """Whether the aim was reached; None when there is none or it cannot be told."""
        reached = []
        more_is_better = self.measure.more_is_better
        if self.measure.ratio_aim is not None and self.ratio is not None:
            reached.append(_reaches(self.ratio, self.measure.ratio_aim, more_is_better))
        if self.measure.value_aim is not None and self.headrace:
            reached.append(_reaches(statistics.median(self.headrace), self.measure.value_aim, more_is_better))
        return all(reached) if reached else None

    def shown(self, numbers: list[float]) -> str:
        """The median, and from where to where the runs went."""
        if not numbers:
            return "-"
        digits = self.measure.digits

        def text(number: float) -> str:
            return f"{number:,.{digits}f}".replace(",", " ")

        middle = text(statistics.median(numbers))
        if len(numbers) == 1:
            return middle
        many = f", {len(numbers)} times" if len(numbers) > RUNS_TOLD_FROM else ""
        return f"{middle} ({text(min(numbers))} to {text(max(numbers))}{many})"


def _reaches(number: float, aim: float, more_is_better: bool) -> bool:
    return number >= aim if more_is_better else number <= aim


def rows_of(results: Results) -> list[Row]:
    """A row for every measure that was taken."""
    rows = [
        Row(m, *(results.get(system, {}).get(m.key, []) for system in ("Headrace", "Kafka", "Sink")))
        for m in (*MEASURES, *CLUSTER_MEASURES, *COMPACTION_MEASURES, *SPARK_MEASURES)
    ]
    return [row for row in rows if row.headrace or row.kafka]


def machine() -> str:
    """What it was measured on."""
    model = ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and (found := re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text())):
        model = found[1].strip()
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    system = f"{platform.system()}, Python {platform.python_version()}"
    return f"{os.cpu_count()} cores {model}, {memory_gb:.0f} GB, {system}"


def markdown(results: Results, runs: int, peer: str = "Kafka") -> str:
    """The table for the README, with machine and date."""
    rows = rows_of(results)
    limits = any(row.sink for row in rows)
    nothing = "stores nothing" if peer == "Kafka" else "does nothing"
    out = [
        f"{date.today().isoformat()}, {machine()}. Median of {runs} runs, alternating (lowest to highest).",
        "",
        f"| | Headrace | {peer} | Headrace / {peer} | aim | |" + (f" {nothing} |" if limits else ""),
        "|---|---:|---:|---:|---|---|" + ("---:|" if limits else ""),
    ]
    for row in rows:
        ratio = f"{row.ratio:.2f} ×" if row.ratio is not None else "-"
        mark = {True: "✓", False: "✗", None: ""}[row.met]
        cells = [row.measure.words, row.shown(row.headrace), row.shown(row.kafka), ratio, row.aim, mark]
        if limits:
            cells.append(row.shown(row.sink) if row.sink else "")
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out)


FONT = 'font-family="sans-serif" font-size="12"'
BAR_HEIGHT, BAR_GAP, LEFT, RIGHT, TOP = 16, 8, 300, 560, 46


def chart(results: Results, peer: str = "Kafka") -> str:
    """An SVG: for each measure how many times better Headrace did, on a logarithmic scale around "the same"."""
    gains = [
        (row.measure.words, row.ratio if row.measure.more_is_better else 1 / row.ratio)
        for row in rows_of(results)
        if row.ratio
    ]
    if not gains:
        return ""
    reach = max(1.0, *(abs(math.log2(gain)) for _, gain in gains))
    middle = LEFT + (RIGHT - LEFT) * 0.4

    def place(gain: float) -> float:
        scale = (RIGHT - middle) if gain >= 1 else (middle - LEFT)
        return middle + math.log2(gain) / reach * scale

    height = TOP + len(gains) * (BAR_HEIGHT + BAR_GAP) + 10
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="640" height="{height}" {FONT}>',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="{middle}" y="18" text-anchor="middle" font-weight="bold">times better than {peer}</text>',
        f'<text x="{middle}" y="36" text-anchor="middle" fill="#666666">same</text>',
        f'<line x1="{middle}" y1="{TOP - 6}" x2="{middle}" y2="{height - 6}" stroke="#999999"/>',
    ]
    words_before = ""
    for i, (words, gain) in enumerate(gains):
        y = TOP + i * (BAR_HEIGHT + BAR_GAP)
        begin, end = sorted((middle, place(gain)))
        colour = "#2a7f62" if gain >= 1 else "#c0504d"
        own = not words.startswith(("its broker CPU", "its CPU"))
        words_before = words.split(" (")[0] if own else words_before
        label = words_before if own else f"{words_before}: CPU"
        out.append(f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end">{escape(label)}</text>')
        out.append(
            f'<rect x="{begin:.1f}" y="{y}" width="{max(1.0, end - begin):.1f}" height="{BAR_HEIGHT}" fill="{colour}"/>'
        )
        out.append(f'<text x="{max(end, middle) + 6:.1f}" y="{y + 12}">{gain:.2f} ×</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def record(results: Results, runs: int, name: str = "latest", peer: str = "Kafka") -> None:
    """Write the numbers, the chart and the table of the README that has this name.

    What was recorded on this day and machine before, and not measured again, stays.
    """
    file, taken = FOLDER / f"{name}.json", {"machine": machine(), "date": date.today().isoformat()}
    before = json.loads(file.read_text()) if file.exists() else {}
    if taken.items() <= before.items():
        results = {
            system: {**before["results"].get(system, {}), **results.get(system, {})}
            for system in {**before["results"], **results}
        }
    file.write_text(json.dumps({**taken, "runs": runs, "results": results}, indent=1) + "\n")
    if drawn := chart(results, peer):
        (FOLDER / f"{name}.svg").write_text(drawn)
    page = FOLDER / "README.md"
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    head, rest = page.read_text().split(begin, 1)
    picture = f"\n\n![times better than {peer}]({name}.svg)" if drawn else ""
    page.write_text(f"{head}{begin}{markdown(results, runs, peer)}{picture}\n{end}{rest.split(end, 1)[1]}")
