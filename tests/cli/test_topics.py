"""`headrace topic` and `headrace config` on a live broker."""

import json
from collections.abc import Callable

from tests.cli.command import fails, succeeds

Env = dict[str, str]


def test_a_topic_is_created_listed_described_altered_and_deleted(
    env: Env, new_topic: Callable[..., str]
) -> None:
    name = new_topic("-p", "3", "-r", "1", "-c", "retention.ms=5000", "-c", "cleanup.policy=compact")
    listed = {item["name"]: item for item in json.loads(succeeds("topic", "list", "--json", env=env))}
    assert (listed[name]["partitions"], listed[name]["replication_factor"]) == (3, 1)
    assert not listed[name]["internal"]
    assert name in succeeds("topic", "list", env=env).decode()

    succeeds(
        "topic", "alter", name, "-p", "4", "-c", "retention.ms=6000", "--unset", "cleanup.policy", env=env
    )
    (described,) = json.loads(succeeds("topic", "describe", name, "--json", "--offsets", env=env))
    assert described["config"] == {"retention.ms": "6000"}
    assert [partition["partition"] for partition in described["partitions"]] == [0, 1, 2, 3]
    assert described["partitions"][0]["leader"] == described["partitions"][0]["isr"][0]
    assert described["partitions"][0]["end_offset"] == 0
    plain = succeeds("topic", "describe", name, env=env).decode()
    assert plain.startswith(f"{name}  id {described['id']}\nPARTITION  LEADER")

    assert succeeds("topic", "delete", name, env=env) == f"deleted topic {name}\n".encode()
    assert name not in succeeds("topic", "list", env=env).decode()


def test_creating_what_exists_fails_unless_that_is_fine(env: Env, new_topic: Callable[..., str]) -> None:
    name = new_topic()
    assert "TOPIC_ALREADY_EXISTS" in fails(1, "topic", "create", name, env=env)
    succeeds("topic", "create", name, "--if-not-exists", env=env)


def test_a_dry_run_creates_nothing(env: Env) -> None:
    assert b"could be created" in succeeds("topic", "create", "dry", "--dry-run", env=env)
    assert "'dry'" in fails(1, "topic", "describe", "dry", env=env)


def test_deleting_several_deletes_those_that_exist_and_names_the_rest(
    env: Env, new_topic: Callable[..., str]
) -> None:
    name = new_topic()
    shown = fails(1, "topic", "delete", "not-there", name, env=env)
    assert "cannot delete not-there" in shown
    assert name not in succeeds("topic", "list", env=env).decode()
    succeeds("topic", "delete", "not-there", "--if-exists", env=env)


def test_what_the_broker_refuses_is_said_with_its_reason(env: Env, new_topic: Callable[..., str]) -> None:
    assert "INVALID_TOPIC_EXCEPTION" in fails(1, "topic", "create", "no spaces please", env=env)
    assert "INVALID_REPLICATION_FACTOR" in fails(1, "topic", "create", "toomany", "-r", "7", env=env)
    assert "INVALID_CONFIG" in fails(1, "topic", "create", "odd", "-c", "no.such.key=1", env=env)
    name = new_topic("-p", "2")
    assert "INVALID_PARTITIONS" in fails(1, "topic", "alter", name, "-p", "1", env=env)
    assert "UNKNOWN_TOPIC_OR_PARTITION" in fails(1, "topic", "describe", "not-there", env=env)


def test_settings_of_a_topic_are_described_and_altered(env: Env, new_topic: Callable[..., str]) -> None:
    name = new_topic()
    arguments = ("--set", "retention.ms=1234", "--append", "cleanup.policy=compact")
    assert (
        succeeds("config", "alter", "topic", name, *arguments, env=env) == f"altered topic {name}\n".encode()
    )
    changed = {
        item["name"]: item
        for item in json.loads(succeeds("config", "describe", "topic", name, "--json", env=env))
    }
    assert changed["retention.ms"]["value"] == "1234"
    assert set(changed["cleanup.policy"]["value"].split(",")) == {"delete", "compact"}
    assert "segment.bytes" not in changed
    everything = json.loads(succeeds("config", "describe", "topic", name, "--all", "--json", env=env))
    assert "segment.bytes" in [item["name"] for item in everything]
    succeeds("config", "alter", "topic", name, "--unset", "retention.ms", env=env)
    assert "retention.ms" not in succeeds("config", "describe", "topic", name, env=env).decode()


def test_settings_of_a_broker_are_described(env: Env) -> None:
    everything = json.loads(succeeds("config", "describe", "broker", "1", "--all", "--json", env=env))
    assert {"name", "value", "source", "read_only", "sensitive"} <= set(everything[0])
    assert "there is no broker 77" in fails(2, "config", "describe", "broker", "77", env=env)
