"""The examples run, and say what they did."""

import subprocess
import sys
import uuid
from pathlib import Path

from headrace.testing import Broker

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "client"


def example(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_of_the_client_runs_and_says_what_it_did() -> None:
    with Broker(settings={"group.initial.rebalance.delay.ms": 0}) as broker:
        for topic in ("orders", "dead", "copies"):
            broker.create_topic(topic)
        at = broker.bootstrap
        sent = example("produce.py", at, "orders")
        assert "orders-0 at offset 0" in sent
        assert "9 records acknowledged" in sent
        read = example("consume_group.py", at, "orders", "9")
        assert "reading orders-0" in read
        assert "orders-0@8: {'id': 9}" in read
        assert "9 records handled" in example("process_parallel.py", at, "orders", "dead", "9")
        assert "copied" in example("copy_exactly_once.py", at, "orders", "copies", "9")
        plain = example("without_asyncio.py", at, f"plain-{uuid.uuid4().hex[:6]}")
        assert "read to offset 9" in plain
        assert {path.name for path in EXAMPLES.glob("*.py")} == {
            "produce.py",
            "consume_group.py",
            "process_parallel.py",
            "copy_exactly_once.py",
            "without_asyncio.py",
        }, "an example that is not run here"
