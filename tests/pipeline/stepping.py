"""A Spark job from topic to topic in a process of its own, whose sink can be killed or made to fail at a numbered step.

`format("headrace-stepping")` is the ordinary sink with a note of every step it passes, in a file that all processes of
the job append to; at the wanted one it does what the plan says. `python -m tests.pipeline.stepping JOB.json...` is the
driver. Used by `spark_kills`.
"""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import MutableMapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pyspark.sql.datasource import DataSourceStreamWriter
from pyspark.sql.types import StructType

from headrace.pipeline.sink import SinkOptions, StreamWriter, parse_sink_options
from pyspark_headrace import DefaultSource

KILL, FAIL = "kill", "fail"
OPTION = "steps"
WAIT_S = 120.0
LOOK_EVERY_S = 0.1
INITIALIZING = "Initializing"  # Spark's words


class Planted(Exception):
    """A task that was made to fail."""


@dataclass(frozen=True)
class Plan:
    """What happens at which step."""

    notes: str
    action: str = ""
    at: int = 0  # the number of a step, counted over all processes of the run
    name: str = ""  # or the first step of this name
    victims: tuple[int, ...] = ()

    def reached(self, name: str) -> None:
        with open(self.notes, "a") as notes:
            notes.write(f"{name}\n")
        passed = len(Path(self.notes).read_text().splitlines())
        due = 0 < self.at <= passed or self.name == name
        done = Path(f"{self.notes}.done")
        if self.action and due and _first(done):
            done.write_text(name)
            if self.action == FAIL:
                raise Planted(name)
            for victim in (*self.victims, os.getpid()):
                os.kill(victim, signal.SIGKILL)


class SteppingWriter(StreamWriter):
    """The ordinary writer with a plan."""

    def __init__(self, options: SinkOptions, schema: StructType, plan: Plan) -> None:
        super().__init__(options, schema)
        self._plan = plan

    def step(self, name: str) -> None:
        self._plan.reached(name)


class SteppingSource(DefaultSource):
    """The ordinary source and sink under another name."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__({name: value for name, value in options.items() if name.lower() != OPTION})
        self._plan = Plan(**json.loads(dict(options).get(OPTION, '{"notes": "/dev/null"}')))

    @classmethod
    def name(cls) -> str:
        return "headrace-stepping"

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 (Spark's name)
        return SteppingWriter(parse_sink_options(self.options, streaming=True), schema, self._plan)


@dataclass(frozen=True)
class Job:
    """What a driver is told."""

    bootstrap: str
    source: str
    sink: str
    checkpoint: str
    notes: str
    action: str = ""
    at: int = 0
    name: str = ""
    master: str = "local[2,3]"
    rows_per_batch: int = 40
    until_stopped: bool = False
    config: tuple[tuple[str, str], ...] = ()
    hook: str = ""  # a function of this module that a UDF calls with each value
    hook_folder: str = ""

    def save(self, path: Path) -> Path:
        path.write_text(json.dumps(asdict(self)))
        return path


def straggle(folder: str, value: str) -> str:
    """The first attempt that meets the value hangs, so that another is started beside it."""
    marker = Path(folder) / "straggled"
    if value == "7" and _first(marker):
        deadline_s = time.monotonic() + WAIT_S
        while not (Path(folder) / "let go").exists() and time.monotonic() < deadline_s:
            time.sleep(0.05)
    return value


def kill_executor(folder: str, value: str) -> str:
    """The executor that meets the value first is killed: the parent of the daemon that forked this worker."""
    if value == "7" and _first(Path(folder) / "killed"):
        daemon = os.getppid()
        executor = int(Path(f"/proc/{daemon}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(executor, signal.SIGKILL)
        time.sleep(WAIT_S)
    return value


def _first(marker: Path) -> bool:
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def session(job: Job) -> Any:
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    builder = SparkSession.builder.master(job.master).appName("stepping")
    settings = {
        "spark.ui.enabled": "false",
        "spark.log.level": "ERROR",
        "spark.sql.shuffle.partitions": "2",
        "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        **dict(job.config),
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def load(path: str) -> Job:
    read = json.loads(Path(path).read_text())
    return Job(**{**read, "config": tuple((n, v) for n, v in read["config"])})


def start(spark: Any, job: Job) -> Any:
    """The query of a job, running."""
    from pyspark.sql import functions as F

    victims = (os.getpid(), spark.sparkContext._gateway.proc.pid)
    plan = Plan(job.notes, job.action, job.at, job.name, victims)
    base = {"kafka.bootstrap.servers": job.bootstrap}
    rows = (
        spark.readStream.format("headrace")
        .options(
            **base,
            subscribe=job.source,
            startingOffsets="earliest",
            maxOffsetsPerTrigger=str(job.rows_per_batch),
        )
        .load()
        .selectExpr("cast(value AS string) AS value")
    )
    if job.hook:
        hook, folder = globals()[job.hook], job.hook_folder
        rows = rows.select(
            F.udf(lambda value: hook(folder, value), "string", useArrow=False)("value").alias("value")
        )
    writer = rows.writeStream.format("headrace-stepping").options(
        **base, topic=job.sink, checkpointLocation=job.checkpoint, steps=json.dumps(asdict(plan))
    )
    return (writer if job.until_stopped else writer.trigger(availableNow=True)).start()


def main() -> None:
    """Run the queries of all jobs that are named, side by side in one driver."""
    jobs = [load(path) for path in sys.argv[1:]]
    spark = session(jobs[0])
    spark.dataSource.register(SteppingSource)
    open_ones = {}
    for job in jobs:
        query = open_ones[job] = start(spark, job)
        # One by one: Spark gives the process of a source ten seconds to start, which several at once may not make.
        while len(jobs) > 1 and query.isActive and query.status["message"].startswith(INITIALIZING):
            time.sleep(LOOK_EVERY_S)
    print("started", flush=True)
    try:
        while open_ones:
            for job, query in list(open_ones.items()):
                if query.awaitTermination(LOOK_EVERY_S):  # raises when it failed
                    Path(f"{job.notes}.ended").touch()
                    del open_ones[job]
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # before the other queries fill the log with what a session that stops does to them
    spark.stop()


if __name__ == "__main__":
    from tests.pipeline import stepping  # under its own name, so that workers find what they are sent

    stepping.main()
