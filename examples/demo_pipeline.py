"""The demo's second act: a pipeline on Spark, over the death of a broker and of its own driver.

A shop writes orders and payments; `headrace pipeline run examples/spark/shop.yaml` joins them into a topic, exactly
once, and sums sales by window into Parquet. In the middle a broker is killed, then the whole Spark driver, both with
SIGKILL; the same command is started again and goes on from its checkpoint. At the end the topic (read_committed), the
Parquet files and the dead letters are held against what brokers acknowledged to the shop: every record, once.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from confluent_kafka import Consumer, TopicPartition
from rich.panel import Panel
from rich.table import Table

from examples.chart import write_chart
from examples.shop import CLOSING_ID, WINDOW_S, Ledger, Shop
from examples.telling import console, say, wait_for
from headrace.testing import Cluster

PIPELINE = Path(__file__).parent / "spark" / "shop.yaml"
FOLDER = Path("build", "demo")
TOPICS = ("orders", "payments", "paid", "orders.dead")
PARTITIONS = 3
RATE_PER_S = 1_000
BATCHES_BETWEEN = 2
DEAD_S = 3.0
SPARK_DEADLINE_S = 600.0
TELL_EVERY_S = 4.0


@dataclass
class Run:
    """One process of `headrace pipeline run`, and what it tells."""

    process: subprocess.Popen[str]
    log: Path
    batches: Counter[str] = field(default_factory=Counter)
    latest: dict[str, dict] = field(default_factory=dict)
    told_s: float = 0.0

    @classmethod
    def start(cls, bootstrap: str, folder: Path, number: int) -> "Run":
        log = folder / f"run-{number}.log"
        command = [
            str(Path(sys.executable).with_name("headrace")),
            "pipeline",
            "run",
            str(PIPELINE.resolve()),
        ]
        with log.open("w") as errors:
            process = subprocess.Popen(
                [*command, "-b", bootstrap, "--json", "--metrics-file", "metrics.prom"],
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        run = cls(process, log)
        threading.Thread(target=run._listen, daemon=True).start()
        return run

    def _listen(self) -> None:
        for line in self.process.stdout or ():
            event = json.loads(line) if line.startswith("{") else {}
            if event.get("event") == "progress":
                self.latest[event["query"]] = event
                self.batches[event["query"]] += event["rows_in"] > 0

    def working(self, batches: int) -> bool:
        """Whether every query has done so many batches; tells how it goes, and ends the demo when the run has."""
        if self.process.poll() is not None:
            sys.exit(
                f"demo: the pipeline ended with status {self.process.returncode}:\n{self.log.read_text()[-3000:]}"
            )
        now_s = time.monotonic()
        if now_s - self.told_s > TELL_EVERY_S:
            self.told_s = now_s
            say(self._told())
        return all(self.batches[f"shop-{query}"] >= batches for query in ("0-paid", "1-sales"))

    def _told(self) -> str:
        if not self.latest:
            return "[dim]Spark starts[/]"
        parts = []
        for name, label in (("shop-0-paid", "join"), ("shop-1-sales", "window")):
            event = self.latest.get(name)
            if event is not None:
                parts.append(
                    f"{label}: batch {event['batch']}, {event['rows_in_per_s']:,.0f} rows/s in, "
                    f"{event['rows_out_per_s']:,.0f} out, lag {sum(event['lag'].values()):,}, "
                    f"{event['batch_ms'] / 1000:.1f} s, state {event['state_rows']:,}"
                )
        return "[dim]" + "; ".join(parts) + "[/]"

    def drivers(self) -> list[int]:
        """The processes of the driver: Python's and the JVM's."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                group = int((folder / "stat").read_text().rpartition(")")[2].split()[2])
            except (OSError, ValueError):
                continue
            if group == self.process.pid:
                found.append(int(folder.name))
        return sorted(found)

    def kill(self) -> list[int]:
        pids = self.drivers()
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        return pids


@dataclass
class Books:
    """What came out of the pipeline, held against what went in."""

    expected: int = 0
    found: int = 0
    missing: int = 0
    doubled: int = 0
    foreign: int = 0

    @property
    def clean(self) -> bool:
        return not (self.missing or self.doubled or self.foreign)


def balance(expected: set, found: Counter) -> Books:
    """Every expected thing exactly once, and nothing else."""
    return Books(
        expected=len(expected),
        found=found.total(),
        missing=sum(thing not in found for thing in expected),
        doubled=sum(count - 1 for thing, count in found.items() if thing in expected),
        foreign=sum(count for thing, count in found.items() if thing not in expected),
    )


def balance_windows(ledger: Ledger, rows: list[dict]) -> Books:
    """Orders by window and region: each cell once, with the right number, cents and sum of ids."""
    cells = ledger.cells
    books = Books(expected=len(ledger.orders), found=sum(row["orders"] for row in rows))
    seen: set = set()
    for row in rows:
        cell = (row["start"], row["region"])
        orders, cents, ids = cells.get(cell, (0, 0, 0))
        if cell in seen or row["orders"] > orders:
            books.doubled += row["orders"] - (0 if cell in seen else orders)
        elif row["orders"] < orders:
            books.missing += orders - row["orders"]
        elif (row["cents"], row["ids"]) != (cents, ids):
            books.foreign += 1
        seen.add(cell)
    books.missing += sum(cells[cell][0] for cell in cells.keys() - seen)
    return books


def read_committed(bootstrap: str, topic: str, partitions: int) -> list[bytes]:
    """Every committed value of a topic, read by a foreign client."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "demo-account",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "enable.auto.commit": False,
        }
    )
    consumer.assign([TopicPartition(topic, p, 0) for p in range(partitions)])
    values: list[bytes] = []
    ended: set[int] = set()
    while len(ended) < partitions:
        for message in consumer.consume(10_000, 1.0):
            if message.error():
                ended.add(message.partition())
            else:
                values.append(message.value())
    consumer.close()
    return values


def read_sales(folder: Path) -> list[dict]:
    """The rows of the Parquet sink, of the files that its log lists: others are of batches that never ended."""
    files: dict[str, None] = {}
    log = folder / "_spark_metadata"
    numbers = {int(path.name.partition(".")[0]): path for path in log.glob("[0-9]*")}
    compact = max((n for n, path in numbers.items() if path.name.endswith(".compact")), default=-1)
    for number in sorted(n for n in numbers if n >= compact):
        for line in numbers[number].read_text().splitlines()[1:]:
            files[json.loads(line)["path"].removeprefix("file://")] = None
    rows: list[dict] = []
    for name in files:
        table = pq.read_table(name)
        start = table.column("start").cast(pa.timestamp("us"))
        rows += table.set_column(table.column_names.index("start"), "start", start).to_pylist()
    return [{**row, "start": row["start"].replace(tzinfo=UTC)} for row in rows]


def run_pipeline(cluster: Cluster) -> bool:
    """The act; whether the account balances."""
    folder = FOLDER.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for topic in TOPICS:
        cluster.create_topic(topic, PARTITIONS, 3, {"min.insync.replicas": "2"})
    say(f"a shop writes {RATE_PER_S:,} orders/s and their payments, acks=all")
    shop = Shop(cluster.bootstrap, RATE_PER_S)
    marks: list[tuple[datetime, str]] = []
    runs = [run := Run.start(cluster.bootstrap, folder, 1)]
    try:
        say(f"[bold]headrace pipeline run {PIPELINE.relative_to(Path.cwd())}[/]  process {run.process.pid}")
        shop.open()
        wait_for(lambda: run.working(BATCHES_BETWEEN), "the first batches", SPARK_DEADLINE_S, 0.1)
        _kill_a_broker(cluster, run, shop, marks)
        _kill_the_driver(run, shop, marks)
        runs.append(run := Run.start(cluster.bootstrap, folder, 2))
        say(f"[bold green]the same command again[/]  process {run.process.pid}, from its checkpoint")
        wait_for(lambda: run.working(BATCHES_BETWEEN), "batches after the restart", SPARK_DEADLINE_S, 0.1)
        shop.close()
        ledger = shop.ledger
        say(f"the shop closes: {len(ledger.orders):,} orders and {len(ledger.paid):,} payments acknowledged")
        wait_for(
            lambda: run.working(0) and _drained(ledger, cluster, folder),
            "the last window",
            SPARK_DEADLINE_S,
            1.0,
        )
        run.process.send_signal(signal.SIGTERM)
        run.process.wait(SPARK_DEADLINE_S)
        say(f"SIGTERM: the pipeline finished its batch and ended with status {run.process.returncode}")
    finally:
        for one in runs:
            if one.process.poll() is None:
                one.kill()
    return _account(ledger, cluster, folder, marks)


def _kill_a_broker(cluster: Cluster, run: Run, shop: Shop, marks: list[tuple[datetime, str]]) -> None:
    number = cluster.leader("paid", 0)
    victim = cluster.broker(number)
    pid = victim.pid
    victim.kill()
    marks.append((datetime.now(UTC), f"broker {number} killed"))
    say(
        f"[bold red]kill -9 {pid}[/]  broker {number}, leader of paid-0, at {len(shop.ledger.orders):,} orders"
    )
    done = max(run.batches.values())
    began_s = time.monotonic()
    wait_for(
        lambda: run.working(0) and time.monotonic() - began_s > DEAD_S, "the broker to be dead", every_s=0.1
    )
    victim.start()
    say(f"[bold green]started broker {number} again[/]  pid {victim.pid}")
    wait_for(
        lambda: run.working(done + BATCHES_BETWEEN), "batches after the broker's death", SPARK_DEADLINE_S, 0.1
    )


def _kill_the_driver(run: Run, shop: Shop, marks: list[tuple[datetime, str]]) -> None:
    pids = run.kill()
    marks.append((datetime.now(UTC), "driver killed"))
    say(
        f"[bold red]kill -9 {' '.join(map(str, pids))}[/]  the Spark driver (Python and JVM), in batch "
        f"{run.latest['shop-0-paid']['batch'] + 1}, at {len(shop.ledger.orders):,} orders"
    )


def _drained(ledger: Ledger, cluster: Cluster, folder: Path) -> bool:
    """Whether as much came out as went in; what exactly is for the account to say."""
    sales = read_sales(folder / "sales")
    if sum(row["orders"] for row in sales) < len(ledger.orders):
        return False
    paid = read_committed(cluster.bootstrap, "paid", PARTITIONS)
    dead = read_committed(cluster.bootstrap, "orders.dead", PARTITIONS)
    return len(paid) > len(ledger.joined) and len(dead) >= len(ledger.broken)


def _account(ledger: Ledger, cluster: Cluster, folder: Path, marks: list[tuple[datetime, str]]) -> bool:
    rows = [json.loads(value) for value in read_committed(cluster.bootstrap, "paid", PARTITIONS)]
    rows = [row for row in rows if row["id"] != CLOSING_ID]
    sales = read_sales(folder / "sales")
    dead = read_committed(cluster.bootstrap, "orders.dead", PARTITIONS)
    books = {
        "join → topic paid\n(read_committed)": balance(ledger.joined, Counter(row["id"] for row in rows)),
        "windows → Parquet\n(orders counted)": balance_windows(ledger, sales),
        "broken orders →\ntopic orders.dead": balance(ledger.broken, Counter(dead)),
    }
    _print_result(sales, rows)
    chart = folder / "sales.svg"
    title = f"Sales by region, every {WINDOW_S} seconds, as the pipeline wrote them to Parquet"
    cells = {(row["start"], row["region"]): row["cents"] / 100 for row in sales}
    write_chart(chart, title, cells, marks, WINDOW_S)
    table = Table(title="Account of every record of the shop", title_style="bold", width=90)
    table.add_column("", no_wrap=True)
    for name in books:
        table.add_column(name, justify="right")
    for label in ("expected", "found", "missing", "doubled", "foreign"):
        values = [getattr(one, label) for one in books.values()]
        bad = label in ("missing", "doubled", "foreign") and any(values)
        table.add_row(label, *(f"{value:,}" for value in values), style="bold red" if bad else "")
    console.print(table)
    complete = all(one.clean for one in books.values()) and not ledger.refused
    verdict = (
        "[bold green]Lost 0, doubled 0,[/] over a killed broker and a killed Spark driver."
        if complete
        else f"[bold red]The account does not balance: see the table.[/] {len(ledger.refused)} writes were refused."
    )
    text = (
        f"{verdict}\n[dim]chart: {os.path.relpath(chart)}   Parquet: {os.path.relpath(folder / 'sales')}   "
        f"Spark's logs and metrics.prom: {os.path.relpath(folder)}[/]"
    )
    console.print(Panel(text, width=90, border_style="green" if complete else "red"))
    return complete


def _print_result(sales: list[dict], paid: list[dict]) -> None:
    table = Table(title="Sales by region", title_style="bold", width=90)
    for name in ("region", "orders", "revenue", "paid orders", "paid", "windows"):
        table.add_column(name, justify="left" if name == "region" else "right")
    for region in sorted({row["region"] for row in sales}):
        mine = [row for row in sales if row["region"] == region]
        settled = [row["cents"] for row in paid if row["region"] == region]
        table.add_row(
            region,
            f"{sum(row['orders'] for row in mine):,}",
            f"{sum(row['cents'] for row in mine) / 100:,.2f}",
            f"{len(settled):,}",
            f"{sum(settled) / 100:,.2f}",
            str(len(mine)),
        )
    console.print()
    console.print(table)
