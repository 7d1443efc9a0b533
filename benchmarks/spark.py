"""Spark reading and writing topics: `headrace` beside Spark's own `kafka` format, same session, same broker, same rows.

    HEADRACE_SPARK_KAFKA_JARS=a.jar,b.jar .venv/bin/python -m benchmarks.spark [--rows N] [--runs N] [--only read,...]

The jars are those of Spark's own connector; without them only `headrace` is measured. Every job runs a few times to
warm up (the JVM compiles most of it only then) and then several times, the two formats in turn, so that whatever
else the machine does meets both; medians are compared.
Processor time is that of everything below this process: Spark's JVM, its Python workers, and the broker.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks.report import Results, record
from benchmarks.spark_floor import batch_ms, floor_ms
from headrace.client.arrow_write import ArrowWriter
from headrace.client.blocking import Consumer, Producer
from headrace.client.topics import TopicPartition
from headrace.testing import Broker

ROWS = 2_000_000
RUNS = 3
WARM_UPS = 4
CHUNK = 100_000
GROWTH_ROWS = (1_000_000, 20_000_000)
STREAM_RATE = 1_000
STREAM_SECONDS = 10.0
STREAM_WARM_SECONDS = 7.0
STREAM_BEGINS_SECONDS_MAX = 60.0
JSON_SCHEMA = "id bigint, customer string, amount double, note string"
PICKED = "value binary"
ONCE = {"delivery": "exactly_once"}
BESIDE = {"read picked": "read", "json picked": "json", "write once": "write"}  # what Spark has instead
JOBS = ("read", "json", "write", "stream")
BATCHES_COUNTED = 25
SOCKETS = "spark.python.unix.domain.socket.enabled"
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
OURS, THEIRS = "Headrace", "Kafka"  # the names that `report` knows the two sides by
NOTHING = "Sink"  # what does nothing
FORMATS = {OURS: "headrace", THEIRS: "kafka"}


async def fill(bootstrap: str, topic: str, rows: int, value: Callable[[int], bytes]) -> None:
    """So many rows of about 100 bytes, evenly over the partitions."""
    table = pa.table({"value": pa.array([value(n) for n in range(CHUNK)], pa.binary())})
    async with ArrowWriter({"bootstrap.servers": bootstrap}) as writer:
        for _ in range(rows // CHUNK):
            await writer.send_arrow(topic, table)


def plain(number: int) -> bytes:
    return b"%0100d" % number


def order(number: int) -> bytes:
    made = {"id": number, "customer": f"c{number % 1000}", "amount": number / 7, "note": "x" * 20}
    return json.dumps(made).encode()


# -- what processes cost ----------------------------------------------------------------------------------------------


def _processes() -> dict[int, tuple[int, float, int]]:
    """Every process: its parent, its processor seconds with those of children that ended, its resident bytes."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            cpu_s = sum(int(ticks) for ticks in fields[11:15]) * TICK_S
            found[int(entry.name)] = (int(fields[1]), cpu_s, int(fields[21]) * os.sysconf("SC_PAGE_SIZE"))
    return found


def below(root: int) -> dict[int, tuple[int, float, int]]:
    """The processes below one, and itself."""
    every = _processes()
    mine, grown = {root}, True
    while grown:
        more = {pid for pid, (parent, _, _) in every.items() if parent in mine} - mine
        mine |= more
        grown = bool(more)
    return {pid: every[pid] for pid in mine if pid in every}


def cpu_s() -> float:
    return sum(seconds for _, seconds, _ in below(os.getpid()).values())


@contextmanager
def peak_memory_mb() -> Iterator[list[float]]:
    """The largest resident memory of all processes below this one meanwhile, looked at ten times a second."""
    peak, stop = [0.0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.1):
            peak[0] = max(peak[0], sum(size for _, _, size in below(os.getpid()).values()) / 2**20)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        stop.set()
        watcher.join()


# -- the jobs ---------------------------------------------------------------------------------------------------------


class Jobs:
    """The jobs, over one session and one broker."""

    def __init__(self, spark: Any, broker: Broker, rows: int) -> None:
        self.spark, self.broker, self.rows = spark, broker, rows
        self.base = {"kafka.bootstrap.servers": broker.bootstrap}

    def table(self, form: str, topic: str, schema: str | None = None) -> Any:
        reader = self.spark.read.format(form).options(**self.base, subscribe=topic)
        return (reader.schema(schema) if schema else reader).load()

    def count(self, form: str, topic: str = "plain", schema: str | None = None) -> None:
        from pyspark.sql import functions as F

        found = self.table(form, topic, schema).agg(F.count("*"), F.sum(F.length("value"))).collect()
        assert found[0][1] == found[0][0] * 100, found

    def parse(self, form: str, schema: str | None = None) -> None:
        from pyspark.sql import functions as F

        text = F.col("value").cast("string")
        parsed = self.table(form, "json", schema).select(F.from_json(text, JSON_SCHEMA).alias("r"))
        found = parsed.agg(F.count("r.id"), F.sum("r.amount")).collect()
        assert found[0][0] == self.rows, found

    def write(self, form: str, **options: str) -> None:
        rows = self.spark.range(0, self.rows // 2, numPartitions=2)
        rows = rows.selectExpr("lpad(cast(id AS string), 100, '0') AS value")
        rows.write.format(form).options(**self.base, topic="out", **options).mode("append").save()

    def all(self, only: set[str]) -> list[tuple[str, str, int, Callable[[], None]]]:
        """Measure, side, rows, job."""
        jobs: list[tuple[str, str, int, Callable[[], None]]] = []
        for side, form in FORMATS.items():

            def add(name: str, rows: int, job: Callable[[], None], side: str = side) -> None:
                if (side == OURS or self.has_theirs) and name.split()[1] in only:
                    jobs.append((name, side, rows, job))

            add("spark read", self.rows, lambda form=form: self.count(form))  # type: ignore[misc]
            add("spark json", self.rows, lambda form=form: self.parse(form))  # type: ignore[misc]
            add("spark write", self.rows // 2, lambda form=form: self.write(form))  # type: ignore[misc]
            if side == OURS:
                add("spark read picked", self.rows, lambda: self.count("headrace", schema=PICKED))
                add("spark json picked", self.rows, lambda: self.parse("headrace", PICKED))
                add("spark write once", self.rows // 2, lambda: self.write("headrace", **ONCE))
        return jobs

    @property
    def has_theirs(self) -> bool:
        return bool(os.environ.get("HEADRACE_SPARK_KAFKA_JARS"))

    def latency_ms(self, form: str, folder: str, turn: int, **options: str) -> tuple[list[float], float]:
        """From the sending of a record to its arrival behind a query, at a steady rate; and the time of a batch."""
        name = "-".join((form, *options.values(), str(turn)))
        source, sink = f"in-{name}", f"out-{name}"
        self.broker.create_topic(source, 1)
        self.broker.create_topic(sink, 1)
        read = self.spark.readStream.format(form).options(**self.base, subscribe=source)
        query = (
            read.load()
            .selectExpr("value")
            .writeStream.format(form)
            .options(**self.base, topic=sink, checkpointLocation=f"{folder}/{name}", **options)
            .start()
        )
        taken: list[float] = []
        stop = threading.Event()

        def send() -> None:
            with Producer({"bootstrap.servers": self.broker.bootstrap, "linger.ms": "0"}) as producer:
                next_s = time.monotonic()
                while not stop.is_set():
                    producer.send(source, b"%d" % time.time_ns())
                    next_s += 1 / STREAM_RATE
                    if (wait_s := next_s - time.monotonic()) > 0:
                        time.sleep(wait_s)

        sender = threading.Thread(target=send)
        settings = {"bootstrap.servers": self.broker.bootstrap, "auto.offset.reset": "earliest"}
        try:
            with Consumer({**settings, "isolation.level": "read_committed"}) as consumer:
                consumer.assign([TopicPartition(sink, 0)])
                sender.start()
                started_s, begun_s = time.monotonic(), 0.0
                while not begun_s or time.monotonic() - begun_s < STREAM_WARM_SECONDS + STREAM_SECONDS:
                    got = consumer.poll(timeout_ms=200)
                    if got and not begun_s:  # Spark has started its workers
                        begun_s = time.monotonic()
                    if begun_s and time.monotonic() - begun_s > STREAM_WARM_SECONDS:
                        now_ns = time.time_ns()
                        taken += [(now_ns - int(one.value)) / 1e6 for one in got]
                    if not begun_s and time.monotonic() - started_s > STREAM_BEGINS_SECONDS_MAX:
                        raise RuntimeError(f"no row came through {form}: {query.exception()}")
                per_batch_ms = batch_ms(query.recentProgress, BATCHES_COUNTED)
        finally:
            stop.set()
            sender.join()
            query.stop()
        return taken, per_batch_ms


def run(jobs: Jobs, only: set[str], runs: int) -> Results:
    """Every job of `only`, in turns."""
    results: Results = {side: {} for side in FORMATS}
    todo = jobs.all(only)
    for turn in range(-WARM_UPS, runs):
        for name, side, rows, job in todo:
            begun_s, begun_cpu_s = time.monotonic(), cpu_s()
            job()
            taken_s, used_s = time.monotonic() - begun_s, cpu_s() - begun_cpu_s
            if turn >= 0:
                results[side].setdefault(f"{name} rows/s", []).append(rows / taken_s)
                results[side].setdefault(f"{name} cpu s/M", []).append(used_s / rows * 1e6)
            print(
                json.dumps({"job": name, "side": side, "s": round(taken_s, 2), "cpu": round(used_s, 2)}),
                flush=True,
            )
    for name, other in BESIDE.items():
        for unit in ("rows/s", "cpu s/M"):
            if found := results[THEIRS].get(f"spark {other} {unit}"):
                results[THEIRS][f"spark {name} {unit}"] = found
    return results


def stream(jobs: Jobs, folder: str, runs: int) -> Results:
    """Latencies behind a query: with Spark's guarantee, and exactly once beside it; in turns, the first to warm up."""
    results: Results = {side: {} for side in (*FORMATS, NOTHING)}
    todo = [("spark stream", OURS, {"delivery": "at_least_once"}), ("spark stream once", OURS, ONCE)]
    todo += [("spark stream", THEIRS, {})] if jobs.has_theirs else []
    for turn in range(runs + 1):
        for name, side, options in todo:
            latencies, per_batch_ms = jobs.latency_ms(FORMATS[side], folder, turn, **options)
            found = sorted(latencies)
            taken = {
                "p50 ms": statistics.median(found),
                "p99 ms": found[int(len(found) * 0.99)],
                "batch ms": per_batch_ms,
            }
            for unit, ms in taken.items():
                if turn:
                    results[side].setdefault(f"{name} {unit}", []).append(ms)
            print(json.dumps({"job": name, "side": side, "records": len(found), **taken}), flush=True)
        nothing_ms = floor_ms(jobs.spark, folder, turn, BATCHES_COUNTED)
        print(json.dumps({"job": "spark stream", "side": NOTHING, "batch ms": nothing_ms}), flush=True)
        if turn:
            results[NOTHING].setdefault("spark stream batch ms", []).append(nothing_ms)
    for unit in ("p50 ms", "p99 ms", "batch ms"):
        if theirs := results[THEIRS].get(f"spark stream {unit}"):
            results[THEIRS][f"spark stream once {unit}"] = theirs
    return results


def growth(jobs: Jobs) -> None:
    """The same job over a topic twenty times the size: what a row costs, and what memory it takes."""
    for rows in GROWTH_ROWS:
        topic = f"growth-{rows}"
        jobs.broker.create_topic(topic, 2)
        asyncio.run(fill(jobs.broker.bootstrap, topic, rows, plain))
        jobs.count("headrace", topic)
        with peak_memory_mb() as peak:
            begun_s, begun_cpu_s = time.monotonic(), cpu_s()
            jobs.count("headrace", topic)
            taken_s, used_s = time.monotonic() - begun_s, cpu_s() - begun_cpu_s
        print(
            json.dumps(
                {
                    "rows": rows,
                    "rows_per_s": round(rows / taken_s),
                    "cpu_s_per_million": round(used_s / rows * 1e6, 3),
                    "peak_memory_mb": round(peak[0]),
                }
            ),
            flush=True,
        )


@contextmanager
def session(unix_sockets: bool = True) -> Iterator[Any]:
    """Spark, with what `headrace pipeline` sets: unix sockets between the JVM and its Python workers."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.ui.showConsoleProgress", "false").config("spark.log.level", "ERROR")
    builder = builder.config("spark.driver.memory", "2g").config(SOCKETS, str(unix_sockets).lower())
    if extra := os.environ.get("HEADRACE_SPARK_JAVA_OPTIONS"):
        builder = builder.config("spark.driver.extraJavaOptions", extra)
    if jars := os.environ.get("HEADRACE_SPARK_KAFKA_JARS"):
        builder = builder.config("spark.jars", jars)
    spark = builder.getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--only", default=",".join(JOBS), help=f"of {', '.join(JOBS)}")
    parser.add_argument("--growth", action="store_true", help="1 and 20 million rows instead")
    parser.add_argument(
        "--tcp", action="store_true", help="TCP between the JVM and Python, as Spark has it by itself"
    )
    parser.add_argument("--record", action="store_true", help="write the table and the chart")
    arguments = parser.parse_args()
    only = set(arguments.only.split(","))
    with (
        tempfile.TemporaryDirectory() as folder,
        Broker(data_dir=f"{folder}/data") as broker,
        session(unix_sockets=not arguments.tcp) as spark,
    ):
        jobs = Jobs(spark, broker, arguments.rows)
        if arguments.growth:
            growth(jobs)
            return
        for topic, value in (("plain", plain), ("json", order)):
            broker.create_topic(topic, 2)
            asyncio.run(fill(broker.bootstrap, topic, arguments.rows, value))
        broker.create_topic("out", 2)
        parts: list[Callable[[], Results]] = [lambda: run(jobs, only, arguments.runs)]
        if "stream" in only:
            parts.append(lambda: stream(jobs, folder, arguments.runs))
        for part in parts:
            results = part()
            if arguments.record:
                record(results, arguments.runs, "spark", "Spark's connector")


if __name__ == "__main__":
    main()
