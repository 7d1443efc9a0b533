"""Runs a pipeline file: starts its queries, watches them, stops them between two batches.

Owns the Spark session of a run, one streaming query for each sink (and one for dead letters), and the state file by
which others see and stop a run. Invariant: a stop is taken between batches, so the batch that runs is finished; a query
that fails stops the others and its error is the run's. Called by the command line.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.pipeline.jobfile import Job, SinkSpec
from headrace.pipeline.plan import Bounds, build_views, dead_letters, rows_for_topic

POLL_S = 0.25
START_WAIT_S_MAX = 120.0
START_ATTEMPTS_MAX = 3
BACKFILL_SUFFIX = "-backfill"
WORKER_LATE = "failed to connect back"  # Spark gives a worker ten seconds, and has no setting for it
STATE_DIRECTORY = Path(".headrace", "pipelines")

Report = Callable[[dict[str, Any]], None]


class RunError(Exception):
    """The run ended with an error; its text is for the person at the terminal."""


@dataclass(frozen=True)
class RunState:
    """What is known of a run from outside: its state file."""

    name: str
    pid: int
    file: str
    started_ms: int

    @property
    def alive(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except OSError:
            return False
        return True


def run_stream(job: Job, report: Report) -> None:
    """Run until stopped, or until everything available is done. Raises RunError."""
    with _session(job) as spark, _state(job) as stopping:
        views = build_views(spark, job, None)
        queries = [_start(job, number, sink, views) for number, sink in enumerate(job.sinks)]
        queries += _start_dead_letters(job, views)
        _watch(queries, stopping, report)


def run_batch(job: Job, bounds: Bounds, report: Report) -> None:
    """Run the same file once over a bounded part of its topics: a backfill."""
    with _session(job) as spark, _state(job):
        views = build_views(spark, job, bounds)
        for sink in job.sinks:
            frame = views[sink.source]
            started_s = time.monotonic()
            if sink.topic is not None:
                writer = (
                    rows_for_topic(sink, frame).write.format("headrace").options(**_topic_options(job, sink))
                )
                writer.mode("append").save()
            elif sink.parquet is not None:
                # Not beside a stream's files: readers of those go by the stream's own list, and would not see these.
                frame.write.mode("append").parquet(sink.parquet + BACKFILL_SUFFIX)
            else:
                frame.show(truncate=False)
            report({"event": "batch", "sink": sink.label, "seconds": round(time.monotonic() - started_s, 3)})


def running(directory: Path = STATE_DIRECTORY) -> list[RunState]:
    """The runs that were started from here and live."""
    found = []
    for path in sorted(directory.glob("*.json")):
        try:
            state = RunState(**json.loads(path.read_text()))
        except (ValueError, TypeError, OSError):
            continue
        if state.alive:
            found.append(state)
    return found


def stop(name: str, directory: Path = STATE_DIRECTORY) -> RunState | None:
    """Ask a run to stop after its batch; None when there is none of that name."""
    for state in running(directory):
        if state.name == name:
            os.kill(state.pid, signal.SIGTERM)
            return state
    return None


# -- inside ------------------------------------------------------------------------------------------------------------


@contextmanager
def _session(job: Job) -> Iterator[Any]:
    import sys

    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(job.name)
    builder = builder.remote(job.master) if job.master.startswith("sc://") else builder.master(job.master)
    builder = builder.config("spark.ui.showConsoleProgress", "false").config("spark.log.level", "ERROR")
    for name, value in job.config.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    try:
        yield session
    finally:
        session.stop()


@contextmanager
def _state(job: Job, directory: Path = STATE_DIRECTORY) -> Iterator[Callable[[], bool]]:
    """The state file, and whether somebody asked to stop (SIGTERM, SIGINT)."""
    asked: list[int] = []
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{job.name}.json"
    state = {
        "name": job.name,
        "pid": os.getpid(),
        "file": str(job.path),
        "started_ms": time.time_ns() // 1_000_000,
    }
    path.write_text(json.dumps(state))
    before = {
        number: signal.signal(number, lambda got, _: asked.append(got))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        path.unlink(missing_ok=True)


def _topic_options(job: Job, sink: SinkSpec) -> dict[str, str]:
    return {
        "kafka.bootstrap.servers": job.bootstrap,
        "topic": sink.topic or "",
        "delivery": sink.delivery,
        **sink.options,
    }


def _start(job: Job, number: int, sink: SinkSpec, views: dict[str, Any]) -> Any:
    frame = views[sink.source]
    if sink.topic is not None:
        writer = (
            rows_for_topic(sink, frame).writeStream.format("headrace").options(**_topic_options(job, sink))
        )
    elif sink.parquet is not None:
        writer = frame.writeStream.format("parquet").option("path", sink.parquet)
    else:
        writer = frame.writeStream.format("console").option("truncate", "false")
    return _go(job, writer.outputMode(sink.mode), f"{number}-{sink.source}")


def _start_dead_letters(job: Job, views: dict[str, Any]) -> list[Any]:
    if job.dead_letters is None:
        return []
    started = []
    for source in job.sources:
        bad = dead_letters(source, views[source.name + "!"]) if source.topic is not None else None
        if bad is not None:
            options = {"kafka.bootstrap.servers": job.bootstrap, "topic": job.dead_letters}
            writer = bad.writeStream.format("headrace").options(**options)
            started.append(_go(job, writer, f"dead-{source.name}"))
    return started


def _go(job: Job, writer: Any, name: str) -> Any:
    """Start a query, and wait until it works: too many Python workers at once time out on a small machine."""
    trigger = {"availableNow": True} if job.every is None else {"processingTime": job.every}
    checkpoint = str(Path(job.checkpoint, name))
    writer = (
        writer.queryName(f"{job.name}-{name}").option("checkpointLocation", checkpoint).trigger(**trigger)
    )
    for attempt in range(START_ATTEMPTS_MAX):
        query = writer.start()
        deadline_s = time.monotonic() + START_WAIT_S_MAX
        while query.isActive and "nitializing" in query.status["message"] and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        error = None if query.isActive else query.exception()
        if error is None or WORKER_LATE not in str(error) or attempt == START_ATTEMPTS_MAX - 1:
            break
    return query


def _watch(queries: list[Any], stopping: Callable[[], bool], report: Report) -> None:
    seen: dict[str, int] = {}
    try:
        while any(query.isActive for query in queries):
            for query in queries:
                _tell(query, seen, report)
            failed = [
                error for query in queries if not query.isActive and (error := query.exception()) is not None
            ]
            if failed:
                raise RunError(str(failed[0]))
            if stopping() and not any(query.status["isTriggerActive"] for query in queries if query.isActive):
                return
            time.sleep(POLL_S)
        for query in queries:
            _tell(query, seen, report)
            if (error := query.exception()) is not None:
                raise RunError(str(error))
    finally:
        for query in queries:
            if query.isActive:
                query.stop()


def _tell(query: Any, seen: dict[str, int], report: Report) -> None:
    """Report a batch that was not reported yet."""
    progress = query.lastProgress
    if progress is None or seen.get(query.name) == progress["batchId"]:
        return
    seen[query.name] = progress["batchId"]
    report(summarize(query.name, progress))


def summarize(name: str, progress: Any) -> dict[str, Any]:
    """One batch of one query in a few numbers."""
    lag: dict[str, int] = {}
    for source in progress["sources"]:
        latest, end = _offsets(source["latestOffset"]), _offsets(source["endOffset"])
        for partition, offset in latest.items():
            topic = partition.rsplit("/", 1)[0]
            lag[topic] = lag.get(topic, 0) + max(0, offset - end.get(partition, 0))
    return {
        "event": "progress",
        "query": name,
        "batch": progress["batchId"],
        "rows_in": progress["numInputRows"],
        "rows_in_per_s": round(progress["processedRowsPerSecond"] or 0.0, 1),
        "rows_out": max(0, progress["sink"]["numOutputRows"] or 0),
        "batch_ms": progress["durationMs"].get("triggerExecution", 0),
        "watermark": progress["eventTime"].get("watermark"),
        "state_rows": sum(operator["numRowsTotal"] for operator in progress["stateOperators"]),
        "lag": lag,
    }


def _offsets(text: str | None) -> dict[str, int]:
    try:
        read = json.loads(text or "{}")
        return {
            f"{topic}/{number}": int(offset)
            for topic, parts in read.get("topics", {}).items()
            for number, offset in parts["offsets"].items()
        }
    except (ValueError, AttributeError, KeyError, TypeError):
        return {}


def prometheus(reports: dict[str, dict[str, Any]]) -> str:
    """The latest report of each query in Prometheus' text format."""
    lines = []
    for name in ("rows_in", "rows_in_per_s", "rows_out", "batch_ms", "state_rows", "batch"):
        lines.append(f"# TYPE headrace_pipeline_{name} gauge")
        lines += [
            f'headrace_pipeline_{name}{{query="{query}"}} {r[name]}' for query, r in sorted(reports.items())
        ]
    lines.append("# TYPE headrace_pipeline_lag gauge")
    for query, one in sorted(reports.items()):
        lines += [
            f'headrace_pipeline_lag{{query="{query}",topic="{topic}"}} {lag}'
            for topic, lag in sorted(one["lag"].items())
        ]
    return "\n".join(lines) + "\n"
