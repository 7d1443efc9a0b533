"""Real Spark drivers, killed: at each numbered step of a batch, at random moments, with brokers killed beside them.

    .venv/bin/python -m tests.pipeline.spark_kills --steps 23 --random 100 --seed 7

One history: each driver goes on from the checkpoint of the one before, over new rows. Every other time Spark's note
that the last batch was committed is removed, so that a batch that was written is replayed. At the end a reader of
committed records must have seen every row once. `make chaosspark` runs it; `make testspark` a few kills of it.
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
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import pyarrow as pa

from headrace.client.arrow_write import ArrowWriter
from headrace.testing import Broker
from tests.pipeline.spark_like import committed_values
from tests.pipeline.stepping import KILL, Job

ROOT = Path(__file__).resolve().parents[2]
PARTITIONS = 2
ROWS_A_RUN = 60
RUN_TIMEOUT_S = 240.0
RANDOM_DELAY_S_MAX = 4.0


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
        """A driver in a process of its own."""
        path = job.save(self.folder / f"{self.name}-job-{self.runs}.json")
        self.runs += 1
        log = (self.folder / f"{self.name}-log-{self.runs}").open("w")
        with log:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.pipeline.stepping", str(path)],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )

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
        found = Counter(asyncio.run(committed_values(self.broker.bootstrap, f"{self.name}-out", PARTITIONS)))
        lost = sum(b"%d" % n not in found for n in range(self.rows))
        return lost, found.total() - len(found)


def end(process: "subprocess.Popen[str]") -> None:
    """Kill a driver with its JVM; the Python workers, which are in groups of their own, find their sockets closed."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


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
    parser.add_argument("--steps", type=int, default=23, help="kill at each of the first so many steps")
    parser.add_argument("--random", type=int, default=100, help="and at so many random moments")
    parser.add_argument(
        "--broker-every", type=float, default=20.0, help="kill the broker about every so many seconds"
    )
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop and count after so long")
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    source = random.Random(arguments.seed)
    deadline_s = time.monotonic() + arguments.seconds
    replays = missed = 0
    with tempfile.TemporaryDirectory() as folder, Broker(data_dir=f"{folder}/data") as broker:
        history = History(broker, Path(folder))
        with BrokerKiller(broker, arguments.broker_every, source) as killer:
            plan: list[int | None] = [*range(1, arguments.steps + 1), *[None] * arguments.random]
            for step in plan:
                if time.monotonic() > deadline_s:
                    break
                replays += source.random() < 0.5 and history.runs > 0 and history.forget_last_commit()
                if step is not None:
                    missed += not history.kill_at_step(step)
                else:
                    missed += not history.kill_after(source.uniform(0.0, RANDOM_DELAY_S_MAX))
                print(
                    f"{history.runs} drivers, {history.kills.total()} killed, {killer.kills} brokers",
                    flush=True,
                )
        lost, doubled = history.account()
    print(
        f"kills by step: {dict(history.kills)}; ended before the kill: {missed}; forgotten commits: {replays}"
    )
    print(
        f"{history.kills.total()} drivers and {killer.kills} brokers killed over {history.rows} rows: "
        f"{lost} lost, {doubled} doubled"
    )
    return 1 if lost or doubled else 0


if __name__ == "__main__":
    sys.exit(main())
