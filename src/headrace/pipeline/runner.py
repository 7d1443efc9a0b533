"""Runs a pipeline file: starts its queries, watches them, stops them between two batches.

Owns the Spark session of a run, and one streaming query for each sink and one for dead letters. Invariant: a stop is
taken between batches, so the batch that runs is finished; a query that fails stops the others and its error is the
run's. Called by the command line.
"""

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from headrace.pipeline.job import Job, SinkSpec
from headrace.pipeline.plan import Bounds, Views, build_views, letters, rows_for
from headrace.pipeline.preflight import check_brokers, check_checkpoint
from headrace.pipeline.progress import DEAD_QUERY, OBSERVED, Event, summarize
from headrace.pipeline.runs import announced, running
from headrace.pipeline.spark_errors import failure, first_line

POLL_S = 0.25
STOP_POLL_S = 0.02
STOP_WAIT_S_MAX = 600.0
START_WAIT_S_MAX = 120.0
START_ATTEMPTS_MAX = 3
BACKFILL_SUFFIX = "-backfill"
WORKER_LATE = "failed to connect back"  # Spark gives a worker ten seconds, and has no setting for it

SETTINGS = {
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    # In every micro-batch the JVM talks to Python several times; over TCP that took some 35 ms more in all.
    "spark.python.unix.domain.socket.enabled": "true",
}
"""Of a session, where the file does not say otherwise."""

Report = Callable[[Event], None]


class RunError(Exception):
    """The run ended with an error; its text is for the person at the terminal."""


def run_stream(job: Job, report: Report) -> None:
    """Run until stopped, or until everything available is done. Raises RunError, PlanError, PreflightError."""
    _refuse_second(job)
    topics = asyncio.run(check_brokers(job))
    check_checkpoint(job, topics)
    # In this order: a new session takes SIGINT for itself, and would cancel the batch instead of finishing it.
    with _session(job) as spark, announced(job) as stopping:
        report({"event": "started", "pipeline": job.name, "spark": spark.version, "master": job.master})
        views = build_views(spark, job, None)
        queries: list[Any] = []
        try:
            for number, sink in enumerate(job.sinks):
                queries.append(_start(job, number, sink, views))
            bad = letters(views) if job.dead_letters is not None else None
            if bad is not None:
                queries.append(_start_dead_letters(job, bad))
            _watch(queries, stopping, report)
        finally:
            for query in queries:
                if query.isActive:
                    query.stop()
    report({"event": "stopped", "pipeline": job.name})


def run_batch(job: Job, bounds: Bounds, report: Report) -> None:
    """Run the same file once over a bounded part of its topics: a backfill. Raises as `run_stream`."""
    asyncio.run(check_brokers(job))
    with _session(job) as spark:
        views = build_views(spark, job, bounds)
        for sink in job.sinks:
            started_s = time.monotonic()
            _write_batch(job, sink, rows_for(sink, views.frames[sink.source]))
            report({"event": "batch", "sink": sink.label, "seconds": round(time.monotonic() - started_s, 3)})
        for name, bad in views.bad.items():
            report({"event": "undecodable", "source": name, "records": bad.count()})


def check_plan(job: Job) -> None:
    """What only Spark can judge: the steps' SQL and the columns they use. Reads nothing. Raises PlanError."""
    with _session(job) as spark:
        build_views(spark, job, None)


# -- inside ------------------------------------------------------------------------------------------------------------


@contextmanager
def _session(job: Job) -> Iterator[Any]:
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(job.name)
    builder = builder.remote(job.master) if job.master.startswith("sc://") else builder.master(job.master)
    for name, value in {**SETTINGS, **job.config}.items():
        builder = builder.config(name, value)
    try:
        session = builder.getOrCreate()
    except Exception as error:
        raise RunError(f"Spark does not start with master {job.master}: {first_line(error)}") from error
    try:
        yield session
    finally:
        session.stop()


def _refuse_second(job: Job) -> None:
    for state in running():
        if state.name == job.name and state.pid != os.getpid():
            raise RunError(
                f"pipeline '{job.name}' runs already, as process {state.pid}: headrace pipeline stop {job.name}"
            )


def _topic_options(job: Job, sink: SinkSpec) -> dict[str, str]:
    return {**job.client, "topic": sink.to, "delivery": sink.delivery, **sink.options}


def _write_batch(job: Job, sink: SinkSpec, rows: Any) -> None:
    if sink.kind == "console":
        rows.show(truncate=False)
        return
    writer = rows.write.mode("append")
    if sink.kind == "topic":
        writer.format("headrace").options(**_topic_options(job, sink)).save()
        return
    # Not beside a stream's files: readers of those go by the stream's own list, and would not see these.
    path = sink.to + (BACKFILL_SUFFIX if sink.kind == "parquet" else "")
    writer.format(sink.kind).options(**sink.options).partitionBy(*sink.partition_by).save(path)


def _start(job: Job, number: int, sink: SinkSpec, views: Views) -> Any:
    writer = _counted(rows_for(sink, views.frames[sink.source])).writeStream
    if sink.kind == "topic" and sink.mode == "update":
        # Spark knows no Python sink that takes updates. A batch write in a stream's batch is once as well.
        writer = writer.foreachBatch(_updates(job, sink))
    elif sink.kind == "topic":
        writer = writer.format("headrace").options(**_topic_options(job, sink))
    elif sink.kind == "console":
        writer = writer.format("console").option("truncate", "false").options(**sink.options)
    else:
        writer = writer.format(sink.kind).options(**sink.options).option("path", sink.to)
        writer = writer.partitionBy(*sink.partition_by) if sink.partition_by else writer
    return _go(job, writer.outputMode(sink.mode), f"{number}-{sink.source}")


def _updates(job: Job, sink: SinkSpec) -> Callable[[Any, int], None]:
    if job.master.startswith("sc://"):
        raise RunError(
            f"{job.path}: sink '{sink.label}' has mode update, which cannot be exactly once through Spark Connect: "
            "use a watermark and mode append, mode complete, or another master"
        )
    options = _topic_options(job, sink)

    def write(rows: Any, batch: int) -> None:
        rows.write.format("headrace").options(**options).mode("append").save()

    return write


def _start_dead_letters(job: Job, bad: Any) -> Any:
    writer = _counted(bad).writeStream.format("headrace")
    return _go(job, writer.options(**job.client, topic=job.dead_letters), DEAD_QUERY)


def _counted(rows: Any) -> Any:
    from pyspark.sql import functions as F

    return rows.observe(OBSERVED, F.count(F.lit(1)).alias("rows"))


def _go(job: Job, writer: Any, name: str) -> Any:
    """Start a query, and wait until it works: too many Python workers at once time out on a small machine."""
    trigger = {"availableNow": True} if job.every is None else {"processingTime": job.every}
    checkpoint = f"{job.checkpoint.rstrip('/')}/{name}"
    writer = (
        writer.queryName(f"{job.name}-{name}").option("checkpointLocation", checkpoint).trigger(**trigger)
    )
    for attempt in range(START_ATTEMPTS_MAX):
        try:
            query = writer.start()
        except Exception as error:
            raise RunError(f"{job.name}-{name} does not start: {first_line(error)}") from error
        deadline_s = time.monotonic() + START_WAIT_S_MAX
        while query.isActive and "nitializing" in query.status["message"] and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        ended = None if query.isActive else query.exception()
        if ended is None or WORKER_LATE not in str(ended) or attempt == START_ATTEMPTS_MAX - 1:
            break
    return query


def _watch(queries: list[Any], stopping: Callable[[], bool], report: Report) -> None:
    seen: dict[str, int] = {}
    while any(query.isActive for query in queries):
        for query in queries:
            _tell(query, seen, report)
        failed = [
            error for query in queries if not query.isActive and (error := query.exception()) is not None
        ]
        if failed:
            raise RunError(failure(str(failed[0])))
        if stopping():
            report({"event": "stopping", "queries": [query.name for query in queries if query.isActive]})
            _stop_between_batches(queries)
            break
        time.sleep(POLL_S)
    for query in queries:
        _tell(query, seen, report)
        if (error := query.exception()) is not None:
            raise RunError(failure(str(error)))


def _stop_between_batches(queries: list[Any]) -> None:
    """Stop each query when the batch that it is in has ended; one that is always behind never pauses between two."""
    batch = {query.name: _batch(query) for query in queries}
    deadline_s = time.monotonic() + STOP_WAIT_S_MAX
    left = [query for query in queries if query.isActive]
    while left and time.monotonic() < deadline_s:
        for query in left:
            if not query.status["isTriggerActive"] or _batch(query) != batch[query.name]:
                query.stop()
        left = [query for query in left if query.isActive]
        time.sleep(STOP_POLL_S)


def _batch(query: Any) -> int:
    progress = query.lastProgress
    return -1 if progress is None else int(progress["batchId"])


def _tell(query: Any, seen: dict[str, int], report: Report) -> None:
    """Report the batches that were not reported yet."""
    last = query.lastProgress
    if last is None or last["batchId"] <= seen.get(query.name, -1):
        return
    missed = last["batchId"] > seen.get(query.name, -1) + 1
    for progress in query.recentProgress if missed else [last]:
        if progress["batchId"] > seen.get(query.name, -1):
            seen[query.name] = progress["batchId"]
            report(summarize(query.name, progress))
