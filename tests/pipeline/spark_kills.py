"""Real Spark drivers, killed: at each numbered step of a batch, at random moments, with brokers killed beside them.

    .venv/bin/python -m tests.pipeline.spark_kills --steps 23 --random 100 --seed 7

A driver runs a few queries side by side, because its start is what costs; each has topics and a checkpoint of its own,
and its own history: each driver goes on from the checkpoints of the one before, over new rows. Every other time Spark's
note that a query's last batch was committed is removed, so that a batch that was written is replayed. A kill counts
once for every query that had not ended. At the end a reader of committed records must have seen every row once.
`make chaosspark` runs it; `make testspark` a few kills of it.
"""

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import pyarrow as pa

from headrace.client.arrow_write import ArrowWriter
from headrace.testing import Broker
from tests.pipeline.spark_home import spark_home
from tests.pipeline.spark_like import committed_values
from tests.pipeline.stepping import KILL, Job

ROOT = Path(__file__).resolve().parents[2]
PARTITIONS = 2
ROWS_A_RUN = 60
RUN_TIMEOUT_S = 240.0
BROKER_START_S = 120.0
FINISH_ATTEMPTS_MAX = 5
FINISH_TIMEOUT_S = 900.0  # what the killed ones left undone is done by one driver
WINDOW_GROWTH = 1.05
LOG_CHARACTERS = 6000
MASTER = "local[4,3]"  # so many tasks at once, so many attempts of each
EXCUSES = ("Disconnected", "RequestTimedOut", "Python worker failed to connect back")


@dataclass
class History:
    """One query over the deaths of its drivers."""

    broker: Broker
    folder: Path
    name: str = "kills"
    rows: int = 0
    runs: int = 0
    kills: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        for topic in (f"{self.name}-in", f"{self.name}-out"):
            self.broker.create_topic(topic, PARTITIONS)

    def job(self, **more: object) -> Job:
        """The job of the next run."""
        return Job(
            self.broker.bootstrap,
            f"{self.name}-in",
            f"{self.name}-out",
            str(self.folder / f"{self.name}-checkpoint"),
            str(self.folder / f"{self.name}-steps-{self.runs}"),
            **more,  # type: ignore[arg-type]
        )

    def add_rows(self, count: int = ROWS_A_RUN) -> None:
        """New rows to work on."""
        values = [b"%d" % n for n in range(self.rows, self.rows + count)]
        self.rows += count

        async def write() -> None:
            async with ArrowWriter({"bootstrap.servers": self.broker.bootstrap}) as writer:
                await writer.send_arrow(f"{self.name}-in", pa.table({"value": pa.array(values, pa.binary())}))

        asyncio.run(write())

    def start(self, job: Job) -> "subprocess.Popen[str]":
        """A driver of this query alone."""
        path = self.saved(job)
        return start_driver([path], self.folder / f"{self.name}-log-{self.runs}")

    def saved(self, job: Job) -> Path:
        """The file of a job that is about to run."""
        path = job.save(self.folder / f"{self.name}-job-{self.runs}.json")
        self.runs += 1
        return path

    def log(self) -> str:
        return (self.folder / f"{self.name}-log-{self.runs}").read_text()[-6000:]

    def run(self, job: Job) -> int:
        """Run a driver to its end, whichever that is."""
        process = self.start(job)
        try:
            process.communicate(timeout=RUN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            end(process)
            raise AssertionError(f"a driver did not end in {RUN_TIMEOUT_S} s\n{self.log()}") from None
        if process.returncode not in (0, -signal.SIGKILL):
            raise AssertionError(f"a driver failed with {process.returncode}\n{self.log()}")
        return process.returncode

    def kill_at_step(self, number: int) -> bool:
        """A run that is killed at a step; whether it came so far."""
        self.add_rows()
        job = self.job(action=KILL, at=number)
        code = self.run(job)
        if code:
            self.kills[Path(f"{job.notes}.done").read_text()] += 1
        return code != 0

    def kill_after(self, delay_s: float) -> bool:
        """A run whose driver is killed some time after its query was started; whether it still ran."""
        self.add_rows()
        process = self.start(self.job())
        assert process.stdout is not None
        process.stdout.readline()
        try:
            process.communicate(timeout=delay_s)
        except subprocess.TimeoutExpired:
            end(process)
            self.kills["random"] += 1
            return True
        if process.returncode:
            raise AssertionError(f"a driver failed with {process.returncode}\n{self.log()}")
        return False

    def forget_last_commit(self) -> bool:
        """Remove Spark's note of the last batch, if no other was begun; the next run replays it."""
        checkpoint = self.folder / f"{self.name}-checkpoint"
        offsets, commits = (
            sorted(int(p.name) for p in (checkpoint / kind).glob("*") if p.name.isdigit())
            for kind in ("offsets", "commits")
        )
        if not commits or offsets[-1] != commits[-1]:
            return False
        for note in (checkpoint / "commits").glob(f"*{commits[-1]}*"):
            if note.name.strip(".").split(".")[0] == str(commits[-1]):
                note.unlink()
        return True

    def account(self) -> tuple[int, int]:
        """Finish, and count rows that are lost and doubled."""
        self.run(self.job())
        return self.count()

    def count(self) -> tuple[int, int]:
        """Rows that are lost and doubled, as a reader of committed records sees it."""
        found = Counter(asyncio.run(committed_values(self.broker.bootstrap, f"{self.name}-out", PARTITIONS)))
        lost = sum(b"%d" % n not in found for n in range(self.rows))
        return lost, found.total() - len(found)


def start_driver(jobs: Sequence[Path], log: Path) -> "subprocess.Popen[str]":
    """A driver in a process of its own."""
    home = {"SPARK_HOME": str(spark_home(log.parent)), "SPARK_LOCAL_IP": "127.0.0.1"}
    with log.open("w") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.pipeline.stepping", *map(str, jobs)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **home},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )


def end(process: "subprocess.Popen[str]") -> None:
    """Kill a driver with its JVM; the Python workers, which are in groups of their own, find their sockets closed."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


@dataclass
class Chaos:
    """Drivers of several queries each, killed one after the other."""

    broker: Broker
    folder: Path
    source: random.Random
    histories: list[History]
    name: str = "chaos"
    drivers: int = 0
    killed: int = 0
    ended: int = 0  # drivers that came to their end before the kill
    gave_up: int = (
        0  # drivers that stopped because a broker stayed away, or a process of Spark did not start in time
    )
    forgotten: int = 0
    at_steps: Counter[str] = field(default_factory=Counter)  # kills at a wanted step, by its name
    at_random: Counter[str] = field(default_factory=Counter)  # other kills, by the last step before
    window_s: float = 10.0

    def kill_at_step(self, number: int) -> bool:
        """Kill a driver when one of its queries is at a step; whether it came so far."""
        victim = self.histories[self.drivers % len(self.histories)]
        process, jobs = self._start(victim, number)
        self._wait(process, RUN_TIMEOUT_S)
        done = Path(f"{jobs[victim.name].notes}.done")
        hit = process.returncode == -signal.SIGKILL and done.exists()
        if hit:
            self.at_steps[done.read_text()] += 1
            self._count_kill(job for name, job in jobs.items() if name != victim.name)
        return hit

    def kill_at_random(self) -> int:
        """Kill a driver at some moment after its queries were started; how many of them were cut off."""
        process, jobs = self._start(None, 0)
        started_s = time.monotonic()
        if self._wait(process, self.source.uniform(0.0, self.window_s), must_end=False):
            self.window_s = time.monotonic() - started_s
            return 0
        self.window_s *= WINDOW_GROWTH
        end(process)
        return self._count_kill(jobs.values())

    def finish(self) -> tuple[int, int]:
        """Let a driver come to its end, and count rows that are lost and doubled."""
        for _ in range(FINISH_ATTEMPTS_MAX):
            process, _ = self._start(None, 0, more_rows=False)
            self._wait(process, FINISH_TIMEOUT_S)
            if process.returncode == 0:
                counts = [history.count() for history in self.histories]
                return sum(lost for lost, _ in counts), sum(doubled for _, doubled in counts)
        raise AssertionError(f"no driver came to its end\n{self._log()}")

    def _count_kill(self, jobs: Iterable[Job]) -> int:
        self.killed += 1
        cut = [job for job in jobs if not Path(f"{job.notes}.ended").exists()]
        for job in cut:
            notes = Path(job.notes)
            steps = notes.read_text().splitlines() if notes.exists() else []
            self.at_random[steps[-1] if steps else "before the first"] += 1
        return len(cut)

    def _start(
        self, victim: History | None, step: int, *, more_rows: bool = True
    ) -> tuple["subprocess.Popen[str]", dict[str, Job]]:
        jobs, paths = {}, []
        for history in self.histories:
            if more_rows:
                self.forgotten += (
                    history.runs > 0 and self.source.random() < 0.5 and history.forget_last_commit()
                )
                history.add_rows()
            plan: dict[str, object] = {"action": KILL, "at": step} if history is victim else {}
            jobs[history.name] = history.job(master=MASTER, **plan)
            paths.append(history.saved(jobs[history.name]))
        self.drivers += 1
        process = start_driver(paths, self.folder / f"{self.name}-log-{self.drivers}")
        assert process.stdout is not None
        process.stdout.readline()
        return process, jobs

    def _wait(self, process: "subprocess.Popen[str]", timeout_s: float, *, must_end: bool = True) -> bool:
        """Whether a driver has ended by then; one that failed must have had a reason."""
        try:
            process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            if must_end:
                end(process)
                raise AssertionError(f"a driver did not end in {timeout_s} s\n{self._log()}") from None
            return False
        if process.returncode == 0:
            self.ended += 1
        elif process.returncode != -signal.SIGKILL:
            end(process)
            if not any(word in self._log() for word in EXCUSES):
                raise AssertionError(f"a driver failed with {process.returncode}\n{self._log()}")
            self.gave_up += 1
        return True

    def _log(self) -> str:
        """What a driver said, without where in Spark it was when it said so."""
        text = (self.folder / f"{self.name}-log-{self.drivers}").read_text()
        lines = [line for line in text.splitlines() if not line.startswith("\tat ")]
        return "\n".join(lines)[-LOG_CHARACTERS:]


class BrokerKiller:
    """Kills and restarts the broker now and then."""

    def __init__(self, broker: Broker, every_s: float, source: random.Random) -> None:
        self.kills = 0
        self._broker, self._every_s, self._source = broker, every_s, source
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.wait(self._every_s * self._source.uniform(0.5, 1.5)):
            self._broker.restart(clean=False)
            self.kills += 1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=1, help="the first step to kill at")
    parser.add_argument("--steps", type=int, default=23, help="and the last")
    parser.add_argument(
        "--random", type=int, default=100, help="and cut queries off at so many random moments"
    )
    parser.add_argument("--queries", type=int, default=4, help="how many queries a driver runs")
    parser.add_argument(
        "--broker-every", type=float, default=30.0, help="kill the broker about every so many seconds"
    )
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop and count after so long")
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    source = random.Random(arguments.seed)
    began_s = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        Broker(data_dir=f"{folder}/data", start_timeout_s=BROKER_START_S) as broker,
    ):
        histories = [History(broker, Path(folder), f"kills-{n}") for n in range(arguments.queries)]
        chaos = Chaos(broker, Path(folder), source, histories)
        missed: list[int] = []
        with BrokerKiller(broker, arguments.broker_every, random.Random(arguments.seed)) as killer:

            def report(what: str) -> bool:
                """Show how far it is; whether there is time left."""
                spent_s = time.monotonic() - began_s
                print(
                    f"{spent_s:5.0f} s  {what}: {chaos.killed} of {chaos.drivers} drivers killed, "
                    f"{chaos.at_steps.total()} at a step, {chaos.at_random.total()} queries cut off elsewhere, "
                    f"{killer.kills} brokers killed, {chaos.forgotten} commits forgotten",
                    flush=True,
                )
                return spent_s < arguments.seconds

            for step in range(arguments.first, arguments.steps + 1):
                if not chaos.kill_at_step(step):
                    missed.append(step)
                if not report(f"step {step}"):
                    break
            while chaos.at_random.total() < arguments.random:
                chaos.kill_at_random()
                if not report("random"):
                    break
        lost, doubled = chaos.finish()
        rows = sum(history.rows for history in histories)
    print(f"at steps: {dict(chaos.at_steps)}; steps not reached: {missed}")
    print(f"elsewhere, by the last step before: {dict(chaos.at_random)}")
    print(
        f"{chaos.drivers} drivers of {arguments.queries} queries: {chaos.killed} killed, {chaos.gave_up} gave up, "
        f"{chaos.ended} ended; {killer.kills} brokers killed, {chaos.forgotten} commits forgotten"
    )
    print(f"{rows} rows: {lost} lost, {doubled} doubled")
    return 1 if lost or doubled else 0


if __name__ == "__main__":
    sys.exit(main())
