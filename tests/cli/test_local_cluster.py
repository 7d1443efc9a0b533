"""`headrace up`, `down`, `status` and `broker`: processes, what is said of them, and what is refused."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.local_cluster import LocalCluster, Plan, Process, identify
from headrace.testing.ports import free_ports, free_row
from tests.cli.command import fails, headrace_command, succeeds
from tests.testing.waiting import process_gone, wait_until


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Path]:
    """A cluster of one broker, running."""
    directory = tmp_path / "one"
    (port,) = free_ports(1)
    said = succeeds("up", "--brokers", "1", "--port", str(port), "--data", str(directory), "--detach")
    assert said.decode() == f"ready 127.0.0.1:{port}\n"
    yield directory
    headrace_command("down", "--data", str(directory))


def status(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(succeeds("status", "--json", "--data", str(directory)))
    return found


def state(directory: Path) -> tuple[str, int | None]:
    (broker,) = status(directory)["brokers"]
    return broker["state"], broker["pid"]


def test_status_has_the_promised_fields_and_true_numbers(one: Path) -> None:
    bootstrap = status(one)["bootstrap"]
    succeeds("topic", "create", "orders", "-p", "3", "-b", bootstrap)
    seen = status(one)
    (broker,) = seen["brokers"]
    assert seen["controller"] == 1
    assert seen["partitions"] == {"total": 3, "offline": 0, "under_replicated": 0}
    assert f"{broker['host']}:{broker['port']}" == bootstrap
    expected = {"id": 1, "state": "running", "controller": "leader", "leaders": 3, "replicas": 3}
    assert {name: broker[name] for name in expected} == expected
    assert Path(f"/proc/{broker['pid']}").is_dir()
    assert broker["load"]["memory_bytes"] > 1_000_000 and broker["load"]["disk_bytes"] > 0
    table = succeeds("status", "--data", str(one)).decode()
    assert "running" in table and "3 partitions, 0 offline" in table
    by_protocol = json.loads(succeeds("status", "--json", "-b", bootstrap))
    assert by_protocol["partitions"] == seen["partitions"]
    assert by_protocol["brokers"][0]["state"] == "running"


def test_a_broker_is_killed_started_paused_resumed_and_stopped(one: Path) -> None:
    at = ("--data", str(one))
    _, pid = state(one)
    assert pid is not None
    succeeds("broker", "kill", "1", *at)
    assert process_gone(pid)
    assert state(one) == ("dead", None)
    succeeds("broker", "start", "1", *at)
    running, again = state(one)
    assert running == "running" and again != pid and again is not None
    succeeds("broker", "pause", "1", *at)
    wait_until(lambda: Path(f"/proc/{again}/stat").read_text().rpartition(")")[2].split()[0] == "T", "paused")
    assert state(one) == ("fenced", again)
    succeeds("broker", "resume", "1", *at)
    assert state(one) == ("running", again)
    succeeds("broker", "stop", "1", *at)
    assert state(one) == ("stopped", None)


def test_down_keeps_the_data_and_up_starts_the_same_cluster_again(one: Path) -> None:
    bootstrap = status(one)["bootstrap"]
    succeeds("topic", "create", "kept", "-b", bootstrap)
    succeeds("down", "--data", str(one))
    assert state(one) == ("stopped", None)
    assert succeeds("up", "--detach", "--data", str(one)).decode() == f"ready {bootstrap}\n"
    assert b"kept" in succeeds("topic", "list", "-b", bootstrap)


def test_a_cluster_comes_up_on_other_ports_than_it_went_down_on(tmp_path: Path) -> None:
    directory = tmp_path / "moved"
    at = ("--data", str(directory), "--detach")
    port = free_row(5)
    try:
        succeeds("up", "--brokers", "4", "--port", str(port), *at)
        succeeds("topic", "create", "kept", "-r", "3", "-b", status(directory)["bootstrap"])
        succeeds("down", "--data", str(directory))
        # One further each: where a broker was, its neighbour is now.
        said = succeeds("up", "--port", str(port + 1), *at).decode()
        bootstrap = ",".join(f"127.0.0.1:{port + number}" for number in range(1, 5))
        assert said == f"ready {bootstrap}\n"
        assert {broker["state"] for broker in status(directory)["brokers"]} == {"running"}
        succeeds("produce", "kept", "-b", bootstrap, stdin=b"moved\n")
    finally:
        headrace_command("down", "--data", str(directory))


def test_what_cannot_be_done_is_said_with_what_to_do_next(one: Path, tmp_path: Path) -> None:
    at = ("--data", str(one))
    assert "running already" in fails(1, "up", "--detach", *at)
    assert "running already" in fails(1, "broker", "start", "1", *at)
    assert "not paused" in fails(1, "broker", "resume", "1", *at)
    assert "its brokers are 1 to 1" in fails(1, "broker", "stop", "7", *at)
    port = str(status(one)["brokers"][0]["port"])
    elsewhere = ("--data", str(tmp_path / "elsewhere"))
    assert "in use" in fails(1, "up", "--brokers", "1", "--port", port, *elsewhere)
    for command in (["status"], ["down"], ["broker", "kill", "1"]):
        assert "headrace up" in fails(1, *command, *elsewhere)
    assert "leave it out" in fails(2, "up", "--set", "node.id=4", *elsewhere)
    assert "no such broker setting" in fails(2, "up", "--set", "no.such=4", *elsewhere)
    succeeds("down", *at)
    assert "nothing runs" in fails(1, "down", *at)
    assert "is not running" in fails(1, "broker", "stop", "1", *at)
    single = tmp_path / "single"
    single.mkdir()
    (single / "meta.properties").write_text("node.id=1\n")
    assert "single broker" in fails(1, "up", "--data", str(single))


def test_a_broker_that_cannot_start_is_quoted_and_nothing_is_left_running(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    directory = tmp_path / "bad"
    (directory / "broker-1").mkdir(parents=True)
    (directory / "broker-1" / "meta.properties").write_text(
        "version=1\nnode.id=9\ncluster.id=AAAAAAAAAAAAAAAAAAAAAA\n"
    )
    said = fails(1, "up", "--brokers", "1", "--port", str(port), "--data", str(directory), "--detach")
    assert "broker 1 did not start" in said and str(directory / "broker-1.log") in said
    assert "nothing runs" in fails(1, "down", "--data", str(directory))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_in_the_foreground_a_signal_stops_the_cluster(number: signal.Signals, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "headrace", "up", "--brokers", "1", "--port", str(port)]
    with subprocess.Popen([*command, "--data", str(tmp_path / "d")], stdout=subprocess.PIPE, text=True) as up:
        assert up.stdout is not None and up.stdout.readline() == f"ready 127.0.0.1:{port}\n"
        _, pid = state(tmp_path / "d")
        up.send_signal(number)
        assert up.wait(60) == 0
        assert pid is not None and process_gone(pid)
        assert state(tmp_path / "d") == ("stopped", None)


def test_no_broker_outlives_a_foreground_that_is_killed(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "headrace", "up", "--brokers", "1", "--port", str(port)]
    with subprocess.Popen([*command, "--data", str(tmp_path / "d")], stdout=subprocess.PIPE, text=True) as up:
        assert up.stdout is not None and up.stdout.readline().startswith("ready ")
        _, pid = state(tmp_path / "d")
        up.kill()
    assert pid is not None
    wait_until(lambda: process_gone(pid), "the broker ends")


def test_a_recycled_pid_is_not_taken_for_a_broker(tmp_path: Path) -> None:
    """The pid file names a process that lives, but began at another time: it is somebody else's."""
    local = LocalCluster(tmp_path)
    local.keep(Plan(1, 9092))
    mine = identify(os.getpid())
    assert mine is not None and mine.alive()
    pid_file = tmp_path / "broker-1.pid"
    pid_file.write_text(json.dumps({"pid": mine.pid, "began": mine.began}))
    assert local.process(1) == mine
    stranger = Process(mine.pid, "another-boot/1")
    assert not stranger.alive() and not stranger.send(signal.SIGKILL)
    pid_file.write_text(json.dumps({"pid": stranger.pid, "began": stranger.began}))
    assert local.process(1) is None and local.ended_by_itself(1)


def test_ports_and_voters_follow_from_the_plan() -> None:
    plan = Plan(5, 9092)
    assert plan.bootstrap == ",".join(f"127.0.0.1:{port}" for port in range(9092, 9097))
    assert plan.voters == "1@127.0.0.1:9092,2@127.0.0.1:9093,3@127.0.0.1:9094"


def test_a_cluster_does_not_shrink_by_being_started_with_fewer(tmp_path: Path) -> None:
    LocalCluster(tmp_path).keep(Plan(3, 9092))
    assert "3 brokers" in fails(1, "up", "--brokers", "2", "--data", str(tmp_path))


def test_a_plan_of_before_controllers_were_written_down_has_those_it_was_started_with(tmp_path: Path) -> None:
    for brokers, controllers in ((1, 1), (2, 2), (5, 3)):
        (tmp_path / "cluster.json").write_text(json.dumps({"brokers": brokers, "port": 9092}))
        assert LocalCluster(tmp_path).plan().controllers == controllers


def test_a_cluster_of_one_that_grew_survives_the_loss_of_its_first_voter(tmp_path: Path) -> None:
    at = ("--data", str(tmp_path))
    port = free_row(4)
    try:
        succeeds("up", "--brokers", "1", "--port", str(port), "--detach", *at)
        succeeds("topic", "create", "kept", "-b", f"127.0.0.1:{port}")
        succeeds("down", *at)
        succeeds("up", "--brokers", "4", "--detach", *at)
        roles = [broker["controller"] for broker in status(tmp_path)["brokers"]]
        assert sorted(roles[:3]) == ["leader", "voter", "voter"] and roles[3] == "none"
        assert LocalCluster(tmp_path).plan().controllers == 3
        succeeds("broker", "kill", "1", *at)
        succeeds("topic", "create", "later", "-b", f"127.0.0.1:{port + 3}")
        succeeds("broker", "start", "1", *at)
        succeeds("down", *at)
        succeeds("up", "--detach", *at)
        assert {broker["state"] for broker in status(tmp_path)["brokers"]} == {"running"}
        listed = succeeds("topic", "list", "-b", f"127.0.0.1:{port}")
        assert b"kept" in listed and b"later" in listed
    finally:
        headrace_command("down", *at)


def test_a_cluster_that_could_not_grow_is_started_as_it_was(tmp_path: Path) -> None:
    at = ("--data", str(tmp_path))
    port = free_row(2)
    stranger = tmp_path / "broker-2" / "meta.properties"
    try:
        succeeds("up", "--brokers", "1", "--port", str(port), "--detach", *at)
        succeeds("down", *at)
        stranger.parent.mkdir()
        stranger.write_text("version=1\nnode.id=9\ncluster.id=AAAAAAAAAAAAAAAAAAAAAA\n")
        grown = ("up", "--brokers", "2", "--set", "num.partitions=7", "--detach", *at)
        assert "broker 2 did not start" in fails(1, *grown)
        assert LocalCluster(tmp_path).plan() == Plan(1, port)
        assert succeeds("up", "--detach", *at).decode() == f"ready 127.0.0.1:{port}\n"
        assert status(tmp_path)["controller"] == 1
    finally:
        headrace_command("down", *at)


def test_a_port_that_somebody_listens_on_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        said = fails(1, "up", "--brokers", "1", "--port", str(port), "--data", str(tmp_path / "d"))
        assert str(port) in said and "in use" in said
    assert not (tmp_path / "d" / "cluster.json").exists()
