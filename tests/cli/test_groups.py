"""`headrace group`: lag of each partition and who reads it, resets of every kind, and what is refused."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace.testing import Broker
from tests.cli.command import fails, succeeds
from tests.compat.group_clients import Confluent, ConfluentConsumer, Member, wait_until

RECORDS = 10


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    settings = {"group.initial.rebalance.delay.ms": 0, "group.consumer.heartbeat.interval.ms": 5000}
    with Broker(settings=settings) as running:
        yield running


@pytest.fixture
def env(broker: Broker) -> Mapping[str, str]:
    return {"HEADRACE_BOOTSTRAP": broker.bootstrap}


@pytest.fixture
def topic(new_topic: Callable[..., str], env: Mapping[str, str]) -> str:
    name = new_topic("-p", "2")
    for partition in (0, 1):
        lines = b"".join(b"%d\n" % number for number in range(RECORDS))
        succeeds("produce", name, "--partition", str(partition), stdin=lines, env=env)
    return name


def reset(env: Mapping[str, str], group: str, *options: str) -> dict[int, int]:
    rows = json.loads(succeeds("group", "reset", group, *options, "--json", env=env))
    return {row["partition"]: row["after"] for row in rows}


@pytest.mark.parametrize("family", [Confluent, ConfluentConsumer], ids=["classic", "consumer"])
def test_a_group_is_listed_described_and_deleted(
    family: type[Member], broker: Broker, topic: str, env: Mapping[str, str]
) -> None:
    group = f"described-{family.__name__.lower()}"
    with family(broker.bootstrap, group, topic, **{"client.id": "reader"}) as member:
        wait_until(lambda: len(set(member.seen)) == 2 * RECORDS, "all is read", member)
        listed = json.loads(succeeds("group", "list", "--state", "stable", "--json", env=env))
        kind = "classic" if family is Confluent else "consumer"
        assert {"group_id": group, "type": kind}.items() <= {g["group_id"]: g for g in listed}[group].items()
        table = succeeds("group", "describe", group, env=env).decode().splitlines()
        assert table[0].startswith(f"{group}: Stable, {kind}, ")
        assert [line.split()[:2] for line in table[2:]] == [[topic, "0"], [topic, "1"]]
        assert all("reader" in line.split() for line in table[2:])
        assert "reader" in succeeds("group", "describe", group, "--members", env=env).decode()
        assert "has members" in fails(
            1, "group", "reset", group, "--to", "earliest", "--topic", topic, env=env
        )
        assert "it has members" in fails(1, "group", "delete", group, env=env)
    [told] = json.loads(succeeds("group", "describe", group, "--json", env=env))
    assert told["state"] == "Empty"
    assert [(row["committed"], row["end"], row["lag"]) for row in told["partitions"]] == [(10, 10, 0)] * 2
    assert succeeds("group", "delete", group, env=env) == f"deleted group {group}\n".encode()
    assert group in fails(1, "group", "describe", group, env=env)


def test_offsets_are_reset_in_every_way(topic: str, env: Mapping[str, str], tmp_path: Path) -> None:
    group = "reset"
    assert "has committed nothing" in fails(1, "group", "reset", group, "--to", "latest", env=env)
    assert reset(env, group, "--topic", topic, "--to", "latest") == {0: 10, 1: 10}
    assert reset(env, group, "--shift", "-4") == {0: 6, 1: 6}
    assert reset(env, group, "--topic", f"{topic}:1", "--shift", "-40") == {1: 0}
    assert reset(env, group, "--to", "3", "--dry-run") == {0: 3, 1: 3}
    assert reset(env, group, "--shift", "0") == {0: 6, 1: 0}
    assert reset(env, group, "--to", "earliest") == {0: 0, 1: 0}
    assert reset(env, group, "--to", "2100-01-01T00:00:00+00:00") == {0: 10, 1: 10}
    assert reset(env, group, "--to", "2001-01-01T00:00:00+00:00") == {0: 0, 1: 0}
    plan = tmp_path / "offsets.csv"
    plan.write_text(f"{topic},0,7\n{topic},1,99\n")
    assert reset(env, group, "--file", str(plan)) == {0: 7, 1: 10}
    [told] = json.loads(succeeds("group", "describe", group, "--json", env=env))
    assert [row["lag"] for row in told["partitions"]] == [3, 0]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("reset", "g"), "one of the arguments --to --shift --file is required"),
        (("reset", "g", "--to", "never"), "earliest, latest, an offset or a time"),
        (("reset", "g", "--to", "latest", "--topic", "t:x"), "TOPIC:N"),
        (("reset", "g", "--file", "/nowhere/offsets.csv"), "cannot read"),
        (("list", "extra"), "unrecognized arguments"),
    ],
)
def test_wrong_usage_is_told(options: tuple[str, ...], told: str, env: Mapping[str, Any]) -> None:
    assert told in fails(2, "group", *options, env=env)
