"""What keeps a run from beginning is said before Spark starts."""

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.pipeline import environment
from headrace.pipeline.environment import NotReady, check_java, check_spark
from headrace.pipeline.job import Job
from headrace.pipeline.jobfile import load
from headrace.pipeline.preflight import PreflightError, check_brokers, check_checkpoint
from headrace.pipeline.runs import announced, running, stop
from headrace.testing import Broker
from headrace.testing.ports import free_ports

FILE = """\
bootstrap: {bootstrap}
sources:
  orders: {{topic: orders}}
sinks:
  - {{from: orders, topic: copies}}
  - {{from: orders, parquet: files}}
checkpoint: {folder}/checkpoint
dead_letters: letters
"""


@pytest.fixture
def broker() -> Iterator[Broker]:
    """One for each test: which topics there are is the matter here."""
    with Broker() as running:
        yield running


def job_of(folder: Path, bootstrap: str, old: str = "", new: str = "") -> Job:
    path = folder / "job.yaml"
    path.write_text(FILE.format(bootstrap=bootstrap, folder=folder).replace(old, new))
    return load(path)


def check(job: Job) -> None:
    check_checkpoint(job, asyncio.run(check_brokers(job)))


def test_brokers_that_are_not_there_are_named(tmp_path: Path) -> None:
    job = job_of(
        tmp_path,
        f"127.0.0.1:{free_ports(1)[0]}",
        "sources:",
        "kafka: {default.api.timeout.ms: 500}\nsources:",
    )
    with pytest.raises(PreflightError, match=f"cannot reach the brokers at {job.bootstrap}"):
        asyncio.run(check_brokers(job))


def test_topics_that_are_not_there_are_named_with_line_and_nearest(tmp_path: Path, broker: Broker) -> None:
    broker.create_topic("ordres", 1)
    with pytest.raises(PreflightError) as refused:
        asyncio.run(check_brokers(job_of(tmp_path, broker.bootstrap)))
    lines = str(refused.value).splitlines()
    assert lines[0] == (
        f"{tmp_path}/job.yaml:3: source 'orders' reads topic 'orders', which does not exist: did you mean ordres?"
    )
    assert lines[1].endswith("create it with: headrace topic create copies")
    assert len(lines) == 3


def test_a_checkpoint_of_another_pipeline_is_refused(tmp_path: Path, broker: Broker) -> None:
    for name in ("orders", "copies", "letters", "others"):
        broker.create_topic(name, 1)
    job = job_of(tmp_path, broker.bootstrap)
    check(job)
    for query in ("0-orders", "1-orders", "dead"):
        (tmp_path / "checkpoint" / query / "offsets").mkdir(parents=True)
    check(job)
    with pytest.raises(PreflightError, match="is of topic copies, and the file now says topic others"):
        check(job_of(tmp_path, broker.bootstrap, "topic: copies", "topic: others"))
    with pytest.raises(PreflightError, match="0-orders is of orders, and the file now reads others"):
        check(job_of(tmp_path, broker.bootstrap, "orders: {topic: orders}", "orders: {topic: others}"))
    with pytest.raises(PreflightError, match="as 0-orders; it is 0-more now, and would begin anew"):
        check(
            job_of(
                tmp_path,
                broker.bootstrap,
                "sinks:\n  - {from: orders",
                "steps: [{name: more, sql: SELECT * FROM orders}]\nsinks:\n  - {from: more",
            )
        )
    (tmp_path / "checkpoint" / "headrace.json").write_text("{")
    with pytest.raises(PreflightError, match="is damaged"):
        check(job)


def test_a_topic_that_was_created_again_since_the_checkpoint_is_told_apart(
    tmp_path: Path, broker: Broker
) -> None:
    for name in ("orders", "copies", "letters"):
        broker.create_topic(name, 1)
    job = job_of(tmp_path, broker.bootstrap)
    topics = asyncio.run(check_brokers(job))
    log = tmp_path / "checkpoint" / "0-orders" / "offsets"
    log.mkdir(parents=True)

    def write_offsets(topic_id: str) -> None:
        at = {"orders": {"id": topic_id, "offsets": {"0": 5}, "epochs": {}}}
        (log / "9").write_text('v1\n{"batchWatermarkMs":0}\n' + json.dumps({"version": 1, "topics": at}))
        (log / "10").write_text('v1\n{"batchWatermarkMs":0}\n' + json.dumps({"version": 1, "topics": at}))

    write_offsets(topics["orders"].topic_id.hex())
    check(job)
    write_offsets("00" * 15 + "01")
    with pytest.raises(PreflightError, match="topic 'orders' was deleted and created again"):
        check(job)
    check(
        job_of(tmp_path, broker.bootstrap, "{topic: orders}", "{topic: orders, options: {onDataLoss: skip}}")
    )


# -- this machine ------------------------------------------------------------------------------------------------------


def java_that_says(folder: Path, text: str, status: int = 0) -> None:
    java = folder / "java"
    java.write_text(f"#!/bin/sh\necho '{text}' >&2\nexit {status}\n")
    java.chmod(0o755)


def test_a_missing_java_is_named_with_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(NotReady, match="no Java found, and Spark needs one: install a runtime of version 17"):
        check_java()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(NotReady, match="no Java found in JAVA_HOME"):
        check_java()


def test_a_java_that_is_too_old_or_broken_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    java_that_says(tmp_path, 'openjdk version "1.8.0_392"')
    with pytest.raises(NotReady, match="is version 8, too old for Spark"):
        check_java()
    java_that_says(tmp_path, "no libjvm.so", 1)
    with pytest.raises(NotReady, match="does not run"):
        check_java()
    java_that_says(tmp_path, 'openjdk version "21.0.1" 2026-01-01')
    check_java()


def test_a_wrong_version_of_spark_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "check_java", lambda: None)
    for version in ("3.5.1", "5.0.0"):
        monkeypatch.setattr("importlib.metadata.version", lambda name, version=version: version)
        with pytest.raises(
            NotReady, match=f"pyspark {version} is installed, and 4.2 or newer, below 5 is needed"
        ):
            check_spark("local[*]")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "4.3.0")
    check_spark("local[*]")


def test_the_command_ends_before_spark_when_something_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job_of(tmp_path, "127.0.0.1:1")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "3.5.1")
    assert main(["pipeline", "run", str(tmp_path / "job.yaml")]) == 1
    assert "pyspark 3.5.1 is installed" in capsys.readouterr().err
    assert main(["pipeline", "run", str(tmp_path / "job.yaml"), "--from", "2026-01-01"]) == 2
    assert "--from and --to are for --backfill" in capsys.readouterr().err
    assert main(["pipeline", "run", str(tmp_path / "job.yaml"), "--backfill", "--from", "monday"]) == 2
    assert "expected earliest, latest, a time like" in capsys.readouterr().err


# -- runs --------------------------------------------------------------------------------------------------------------


def test_a_run_is_listed_while_it_lives_and_can_be_told_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    job = job_of(tmp_path, "127.0.0.1:1")
    with announced(job) as stopping:
        assert [(state.name, state.pid) for state in running()] == [("job", os.getpid())]
        assert main(["pipeline", "list", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)[0]["name"] == "job"
        assert not stopping()
        assert main(["pipeline", "stop", "job.yaml"]) == 0
        assert stopping()
    assert running() == []
    assert stop("job") is None
    assert main(["pipeline", "stop", "job"]) == 1
    assert "no pipeline 'job' runs from this directory" in capsys.readouterr().err


def test_a_run_that_was_killed_is_not_listed(tmp_path: Path) -> None:
    gone = os.spawnlp(os.P_NOWAIT, "true", "true")
    os.waitpid(gone, 0)
    (tmp_path / "x.json").write_text(
        json.dumps({"name": "x", "pid": gone, "file": "x.yaml", "started_ms": 0})
    )
    (tmp_path / "y.json").write_text("{")
    assert running(tmp_path) == []
