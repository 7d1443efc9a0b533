"""The runs of pipelines from a directory: how others see a run and ask it to stop.

Owns the state file of a run and the signals that stop it. Invariant: a run that was killed is not shown as one that
lives, because its process is looked for. Needs nothing of Spark. Called by `runner` and by the command line.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace.pipeline.job import Job

STATE_DIRECTORY = Path(".headrace", "pipelines")


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


@contextmanager
def announced(job: Job, directory: Path = STATE_DIRECTORY) -> Iterator[Callable[[], bool]]:
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
