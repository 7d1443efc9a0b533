"""The pytest plugin, as a user's own tests see it: in a pytest run of its own."""

import subprocess
import sys
from pathlib import Path

PLUGIN = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest")


def run_pytest(tmp_path: Path, source: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "test_users.py").write_text(source)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
    return subprocess.run(
        [sys.executable, "-m", "pytest", *PLUGIN, "-q", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
    )


def test_the_fixture_gives_each_test_a_fresh_broker(tmp_path: Path) -> None:
    run = run_pytest(
        tmp_path,
        """
from confluent_kafka import Producer
seen = []

def produce(headrace):
    producer = Producer({"bootstrap.servers": headrace.bootstrap})
    headrace.create_topic("orders")
    errors = []
    producer.produce("orders", b"hello", on_delivery=lambda error, _: errors.append(error))
    assert producer.flush(30) == 0
    assert errors == [None]
    seen.append(headrace.pid)

def test_one(headrace):
    produce(headrace)

def test_two(headrace):
    produce(headrace)
    assert len(set(seen)) == 2
""",
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_session_fixture_gives_all_tests_the_same_broker(tmp_path: Path) -> None:
    run = run_pytest(
        tmp_path,
        """
seen = []
def test_one(headrace_session):
    seen.append(headrace_session.pid)
def test_two(headrace_session):
    assert headrace_session.pid == seen[0]
""",
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_marker_passes_arguments_to_the_broker(tmp_path: Path) -> None:
    run = run_pytest(
        tmp_path,
        """
import pytest
@pytest.mark.headrace(memory=False, settings={"num.partitions": 2})
def test_one(headrace):
    assert headrace.data_dir is not None
    assert headrace.settings == {"num.partitions": "2"}
""",
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_a_failed_test_shows_the_log_of_its_broker(tmp_path: Path) -> None:
    run = run_pytest(
        tmp_path,
        """
def test_one(headrace):
    assert "opened" in headrace.log()
    assert False, "on purpose"
""",
    )
    assert run.returncode == 1
    assert "on purpose" in run.stdout
    assert "Headrace broker log (127.0.0.1:" in run.stdout


def test_a_run_without_brokers_starts_none(tmp_path: Path) -> None:
    run = run_pytest(
        tmp_path,
        """
import sys
def test_one():
    assert "headrace.testing.broker" not in sys.modules
""",
    )
    assert run.returncode == 0, run.stdout + run.stderr
