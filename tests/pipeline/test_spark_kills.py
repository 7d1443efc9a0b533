"""Exactly once with real Spark processes: drivers killed, tasks that fail, brokers killed, two drivers by mistake.

A few of each; `make chaosspark` has every step and as many random moments as are asked for.
"""

import asyncio
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.testing import Broker
from tests.pipeline.spark_like import committed_values

pytest.importorskip("pyspark")

from tests.pipeline.spark_kills import PARTITIONS, BrokerKiller, History, end
from tests.pipeline.stepping import FAIL
from tests.testing.waiting import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

DEADLINE_S = 240.0


@pytest.fixture(scope="module")
def disk_broker(spark_allowed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(data_dir=tmp_path_factory.mktemp("data")) as broker:
        yield broker


def test_drivers_killed_at_steps_beside_brokers_that_are_killed_lose_and_double_nothing(
    disk_broker: Broker, tmp_path: Path
) -> None:
    history = History(disk_broker, tmp_path)
    source = random.Random(1)
    with BrokerKiller(disk_broker, 10.0, source) as killer:
        killed = [history.kill_at_step(number) for number in (5, 12, 17, 21)]
        history.forget_last_commit()
        history.kill_after(1.0)
    assert all(killed)
    assert killer.kills
    assert history.account() == (0, 0)


@pytest.mark.parametrize("step", ["task: rows sent", "task: prepared", "ledger read", "committing"])
def test_a_task_or_commit_that_fails_in_the_middle_is_made_good(
    disk_broker: Broker, tmp_path: Path, step: str
) -> None:
    history = History(disk_broker, tmp_path, f"fails-{step.replace(': ', '-').replace(' ', '-')}")
    history.add_rows()
    job = history.job(action=FAIL, name=step)
    process = history.start(job)
    process.communicate(timeout=DEADLINE_S)
    assert Path(f"{job.notes}.done").exists()
    assert (process.returncode == 0) == step.startswith("task"), "Spark tries a task again, but not a commit"
    assert history.account() == (0, 0)


def test_of_two_drivers_the_older_stops_and_no_row_is_doubled(disk_broker: Broker, tmp_path: Path) -> None:
    history = History(disk_broker, tmp_path, "two")
    checkpoint, other = tmp_path / "two-checkpoint", tmp_path / "other-checkpoint"
    job = history.job(until_stopped=True, rows_per_batch=1000)
    history.add_rows()
    older = history.start(job)
    newer = None
    try:
        wait_until((checkpoint / "commits" / "0").exists, "the first batch", DEADLINE_S)
        shutil.copytree(checkpoint, other)
        newer = history.start(replace(job, checkpoint=str(other)))
        assert newer.stdout is not None
        newer.stdout.readline()
        history.add_rows(1)  # which both may take up, as a batch that is one for either
        wait_until((other / "commits" / "1").exists, "the newer driver's batch", DEADLINE_S)
        history.add_rows()
        assert older.wait(DEADLINE_S) not in (0, None)
        assert "has taken over" in (tmp_path / "two-log-1").read_text()

        def seen() -> int:
            return len(asyncio.run(committed_values(disk_broker.bootstrap, "two-out", PARTITIONS)))

        wait_until(lambda: seen() >= history.rows, "every row", DEADLINE_S)
    finally:
        for process in (older, newer):
            if process is not None:
                end(process)
    checkpoint.rename(tmp_path / "abandoned")
    other.rename(checkpoint)
    assert history.account() == (0, 0)
