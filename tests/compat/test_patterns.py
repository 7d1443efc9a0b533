"""The examples of how groups are used run as they stand, and say what they did."""

import subprocess
import sys
from pathlib import Path

import pytest

PATTERNS = Path(__file__).resolve().parents[2] / "examples" / "patterns"
SAYS = {
    "competing_consumers.py": "60 tasks, each done once",
    "publish_subscribe.py": "archive saw 20 events",
    "fifo_per_key.py": "5 accounts, 20 moves each, all in order",
    "replay.py": "read 20 of them again, from offset 10",
}


@pytest.mark.parametrize("name", SAYS)
def test_a_pattern_runs_and_says_what_it_did(name: str) -> None:
    done = subprocess.run(
        [sys.executable, str(PATTERNS / name)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert SAYS[name] in done.stdout


def test_every_pattern_is_run() -> None:
    assert {path.name for path in PATTERNS.glob("*.py")} == {*SAYS, "common_ground.py"}
