"""`headrace topic` and `headrace config` on a live broker."""

import json
from collections.abc import Callable

from tests.cli.command import fails, headrace_command, succeeds

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
    shown = fails(1, "topic", "create", "no spaces please", env=env)
    assert "INVALID_TOPIC_EXCEPTION" in shown
    assert "a name has 1 to 249 letters" in shown
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
    assert "there is no broker 77" in fails(1, "config", "describe", "broker", "77", env=env)
    assert "is not a broker id" in fails(2, "config", "describe", "broker", "first", env=env)


def test_a_setting_that_a_broker_does_not_take_is_answered_with_the_next_step(env: Env) -> None:
    alter = ("config", "alter", "broker", "1", "--dry-run", "--set")
    assert "headrace serve --set" in fails(1, *alter, "num.partitions=4", env=env)
    assert "headrace config describe broker" in fails(1, *alter, "log.segment.bytes=1", env=env)
    for broker in ("1", "default"):
        done = headrace_command(
            "config", "alter", "broker", broker, "--dry-run", "--set", "log.retention.msec=5", env=env
        )
        assert done.returncode == 0
        assert b"no setting 'log.retention.msec' (did you mean 'log.retention.ms'?)" in done.stderr


def test_a_topic_that_is_not_there_is_named_whatever_was_asked_of_it(env: Env) -> None:
    for arguments in (
        ("topic", "describe", "not-there"),
        ("topic", "alter", "not-there", "-p", "3"),
        ("topic", "alter", "not-there", "-c", "retention.ms=1"),
        ("topic", "delete", "not-there"),
        ("config", "describe", "topic", "not-there"),
        ("config", "alter", "topic", "not-there", "--set", "retention.ms=1"),
    ):
        shown = fails(1, *arguments, env=env)
        assert "not-there" in shown
        assert "headrace topic list" in shown
