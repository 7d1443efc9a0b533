"""Waiting for a condition with a deadline, instead of sleeping for a guess."""

import os
import time
from collections.abc import Callable

DEADLINE_S = 60.0
LOOK_EVERY_S = 0.02


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Return when the condition holds; fail when it does not by the deadline."""
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, f"{what}: not within {deadline_s} s"
        time.sleep(LOOK_EVERY_S)


def process_gone(pid: int) -> bool:
    """Whether no such process runs (one that only waits to be collected counts as gone)."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
    except ProcessLookupError:
        return True
    finally:
        os.sched_yield()
