"""`headrace up` as people use it: five brokers, a topic of three replicas, one broker killed and started again."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.testing.ports import free_row
from tests.cli.command import fails, headrace_command, succeeds
from tests.testing.waiting import wait_until

DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("five") / "data"
    port = free_row(5)
    try:
        said = succeeds("up", "--port", str(port), "--data", str(directory), "--detach").decode()
        assert said == "ready " + ",".join(f"127.0.0.1:{port + at}" for at in range(5)) + "\n"
        yield directory
    finally:
        headrace_command("down", "--data", str(directory))


def status(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(succeeds("status", "--json", "--data", str(directory)))
    return found


def states(directory: Path) -> dict[int, str]:
    return {broker["id"]: broker["state"] for broker in status(directory)["brokers"]}


def test_five_brokers_are_one_cluster_with_three_controllers(five: Path) -> None:
    seen = status(five)
    bootstrap = ("-b", seen["bootstrap"])
    succeeds("topic", "create", "orders", "-p", "10", "-r", "3", *bootstrap)
    seen = status(five)
    assert [broker["id"] for broker in seen["brokers"]] == [1, 2, 3, 4, 5]
    assert {broker["state"] for broker in seen["brokers"]} == {"running"}
    roles = [broker["controller"] for broker in seen["brokers"]]
    assert sorted(roles) == ["leader", "none", "none", "voter", "voter"] and roles[3:] == ["none", "none"]
    assert roles[seen["controller"] - 1] == "leader"
    assert seen["partitions"] == {"total": 10, "offline": 0, "under_replicated": 0}
    assert sum(broker["leaders"] for broker in seen["brokers"]) == 10
    assert sum(broker["replicas"] for broker in seen["brokers"]) == 30
    assert all(broker["leaders"] for broker in seen["brokers"]), "leaders are spread at creation"
    (topic,) = json.loads(succeeds("topic", "describe", "orders", "--json", *bootstrap))
    for partition in topic["partitions"]:
        assert partition["leader"] == partition["replicas"][0]
        assert sorted(partition["isr"]) == sorted(partition["replicas"])


def test_a_killed_broker_is_dead_and_comes_back_into_every_isr(five: Path) -> None:
    at = ("--data", str(five))
    bootstrap = ("-b", status(five)["bootstrap"])
    succeeds("topic", "create", "kept", "-p", "5", "-r", "3", *bootstrap)
    succeeds("broker", "kill", "2", *at)
    wait_until(lambda: status(five)["partitions"]["offline"] == 0, "new leaders", DEADLINE_S)
    seen = states(five)
    assert seen.pop(2) == "dead" and set(seen.values()) == {"running"}
    succeeds("produce", "kept", *bootstrap, stdin=b"one\ntwo\n")
    succeeds("broker", "start", "2", *at)
    wait_until(lambda: status(five)["partitions"]["under_replicated"] == 0, "all in sync", DEADLINE_S)
    assert set(states(five).values()) == {"running"}
    read = succeeds("consume", "kept", "--from", "earliest", "--exit-at-end", *bootstrap)
    assert sorted(read.split()) == [b"one", b"two"]


def test_nobody_is_shown_as_the_controller_while_most_voters_are_dead(five: Path) -> None:
    """The broker that was asked named itself, to have requests sent to it."""
    at = ("--data", str(five))
    try:
        for number in "12":
            succeeds("broker", "kill", number, *at)
        wait_until(
            lambda: status(five)["controller"] is None, "broker 3 knows that it leads no more", DEADLINE_S
        )
        assert {broker["controller"] for broker in status(five)["brokers"]} == {"none"}
        assert "no active controller" in succeeds("status", *at).decode()
        assert "no active controller" in succeeds("status", "-b", status(five)["bootstrap"]).decode()
    finally:
        for number in "12":
            succeeds("broker", "start", number, *at)
    assert status(five)["controller"] in (1, 2, 3)
    wait_until(lambda: status(five)["partitions"]["under_replicated"] == 0, "all in sync", DEADLINE_S)


def test_a_topic_moves_between_brokers_and_leadership_goes_back(five: Path) -> None:
    bootstrap = ("-b", status(five)["bootstrap"])
    succeeds("topic", "create", "moved", "-p", "1", "-r", "1", *bootstrap)
    succeeds("produce", "moved", *bootstrap, stdin=b"cargo\n")
    wanted = ("partition", "reassign", "moved:0", "--to", "4,5,1", *bootstrap)
    assert b"4,5,1" in succeeds(*wanted, "--dry-run")
    succeeds(*wanted, "--wait")
    (topic,) = json.loads(succeeds("topic", "describe", "moved", "--json", *bootstrap))
    (partition,) = topic["partitions"]
    assert partition["replicas"] == [4, 5, 1] and sorted(partition["isr"]) == [1, 4, 5]
    assert b"nothing is being moved" in succeeds("partition", "reassign", "--list", *bootstrap)
    succeeds("partition", "elect", "moved", *bootstrap)
    (topic,) = json.loads(succeeds("topic", "describe", "moved", "--json", *bootstrap))
    assert topic["partitions"][0]["leader"] == 4
    assert b"as it should be" in succeeds("partition", "elect", "moved", *bootstrap)
    read = succeeds("consume", "moved", "--from", "earliest", "--exit-at-end", *bootstrap)
    assert read == b"cargo\n"


def test_draining_a_broker_keeps_the_number_of_replicas_of_a_partition_that_is_on_its_way(five: Path) -> None:
    at = ("--data", str(five))
    bootstrap = ("-b", status(five)["bootstrap"])
    succeeds("topic", "create", "under-way", "-p", "1", "-r", "1", *bootstrap)
    succeeds("partition", "reassign", "under-way:0", "--to", "5,4,1", "--wait", *bootstrap)
    succeeds("broker", "kill", "3", *at)  # so that the move does not end
    try:
        succeeds("partition", "reassign", "under-way:0", "--to", "3,4,1", *bootstrap)
        planned = json.loads(
            succeeds("partition", "reassign", "--drain", "4", "--dry-run", "--json", *bootstrap)
        )
        (to,) = [move["replicas"] for move in planned if move["topic"] == "under-way"]
        assert len(to) == 3 and to[0] == 3 and to[2] == 1 and to[1] in (2, 5)
        assert b"nothing to move" in succeeds(
            "partition", "reassign", "under-way:0", "--to", "3,4,1", *bootstrap
        )
    finally:
        succeeds("broker", "start", "3", *at)


def test_settings_of_one_broker_are_changed_wherever_the_controller_is(five: Path) -> None:
    bootstrap = ("-b", status(five)["bootstrap"])
    for number in "15":
        change = ("config", "alter", "broker", number, "--set", "log.cleaner.backoff.ms=20000")
        assert b"altered broker" in succeeds(*change, *bootstrap)
        described = json.loads(succeeds("config", "describe", "broker", number, "--json", *bootstrap))
        assert {"log.cleaner.backoff.ms": "20000"}.items() <= {
            e["name"]: e["value"] for e in described
        }.items()


def test_what_the_cluster_cannot_do_is_said(five: Path) -> None:
    bootstrap = ("-b", status(five)["bootstrap"])
    assert "replication factor" in fails(1, "topic", "create", "big", "-r", "6", *bootstrap).lower()
    succeeds("topic", "create", "here", "-p", "1", "-r", "1", *bootstrap)
    assert "cannot move" in fails(1, "partition", "reassign", "here", "--to", "99", *bootstrap)
    succeeds("topic", "create", "safe", "-p", "2", "-r", "3", *bootstrap)
    fewer = ("partition", "reassign", "safe", "--to", "1,2", "--dry-run", *bootstrap)
    assert "-r 2" in fails(2, *fewer)
    assert b"1,2" in succeeds(*fewer, "-r", "2")
    assert "no partition 7" in fails(1, "partition", "reassign", "here:7", "--to", "1", *bootstrap)
    assert "no broker 99" in fails(1, "partition", "reassign", "--drain", "99", *bootstrap)


@pytest.mark.parametrize("by_protocol", [False, True])
def test_what_brokers_reported_to_the_controller_shows_in_status(five: Path, by_protocol: bool) -> None:
    bootstrap = ("-b", status(five)["bootstrap"])
    where = bootstrap if by_protocol else ("--data", str(five))
    name = f"metered-{by_protocol}".lower()
    succeeds("topic", "create", name, "-p", "1", "-r", "3", *bootstrap)
    (topic,) = json.loads(succeeds("topic", "describe", name, "--json", *bootstrap))
    (partition,) = topic["partitions"]

    def loads() -> dict[int, dict[str, Any]]:
        seen = json.loads(succeeds("status", "--json", *where))
        return {broker["id"]: broker["load"] or {} for broker in seen["brokers"]}

    def busy() -> bool:
        succeeds("produce", name, *bootstrap, stdin=(b"x" * 1000 + b"\n") * 500)
        found = loads()
        return (found[partition["leader"]].get("messages_in_per_s") or 0) > 1 and all(
            (found[broker].get("bytes_in_per_s") or 0) > 10_000 for broker in partition["replicas"]
        )

    wait_until(busy, "rates of the leader, and of followers that fetch from it", DEADLINE_S)
    told = [loads()[broker] for broker in partition["replicas"]]
    assert all(load["memory_bytes"] > 1_000_000 and load["disk_bytes"] > 0 for load in told)
    assert "msg/s" in succeeds("status", *where).decode().lower()
