"""`headrace produce` and `headrace consume` on a live broker."""

import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.cli.consume import parse_start
from headrace.testing import Broker
from tests.cli.command import fails, headrace_command, succeeds

Env = dict[str, str]
AT_END = ("--from", "earliest", "--exit-at-end")


def records_of(topic: str, env: Env, *more: str) -> list[dict[str, object]]:
    return [
        json.loads(line)
        for line in succeeds("consume", topic, *AT_END, "--json", *more, env=env).splitlines()
    ]


def test_lines_come_back_as_they_went_in(env: Env, new_topic: Callable[..., str]) -> None:
    topic = new_topic()
    lines = b"one\n\n  two  \r\n\xff\xfe\x00binary\nlast without an end"
    assert succeeds("produce", topic, stdin=lines, env=env) == f"produced 5 records to {topic}\n".encode()
    assert succeeds("consume", topic, *AT_END, env=env) == lines + b"\n"


def test_keys_headers_compression_and_partition(env: Env, new_topic: Callable[..., str]) -> None:
    topic = new_topic("-p", "3")
    options = (
        "--key-separator",
        "::",
        "-H",
        "source=shop",
        "-H",
        "n=1=2",
        "--compression",
        "lz4",
        "--partition",
        "2",
    )
    out = succeeds("produce", topic, *options, "--json", stdin=b"k::v::w\nno key\n", env=env)
    assert json.loads(out) == {"topic": topic, "produced": 2, "failed": 0}
    one, two = records_of(topic, env)
    assert (one["partition"], one["offset"], one["key"], one["value"]) == (2, 0, "k", "v::w")
    assert one["headers"] == [{"name": "source", "value": "shop"}, {"name": "n", "value": "1=2"}]
    assert isinstance(one["timestamp"], int)
    assert (two["key"], two["value"]) == (None, "no key")
    assert succeeds("consume", topic, *AT_END, "--key-separator", "|", env=env) == b"k|v::w\n|no key\n"


def test_what_is_not_text_is_base64_in_json(env: Env, new_topic: Callable[..., str]) -> None:
    topic = new_topic()
    succeeds("produce", topic, "--key-separator", ":", stdin=b"\xff:\xfe\n", env=env)
    (record,) = records_of(topic, env)
    assert (record["key_encoding"], record["value_encoding"]) == ("base64", "base64")
    assert base64.b64decode(str(record["value"])) == b"\xfe"


@pytest.mark.parametrize("acks", ["0", "1", "all"])
def test_a_file_is_sent_whole(acks: str, env: Env, new_topic: Callable[..., str], tmp_path: Path) -> None:
    topic = new_topic()
    file = tmp_path / "lines"
    file.write_bytes(b"".join(b"%d\n" % number for number in range(20_000)))
    out = succeeds("produce", topic, "--file", str(file), "--acks", acks, env=env)
    assert out == f"produced 20000 records to {topic}\n".encode()
    if acks != "0":
        assert succeeds("consume", topic, *AT_END, env=env) == file.read_bytes()
    else:
        assert succeeds("consume", topic, "--max", "20000", env=env) == file.read_bytes()


def test_consuming_begins_and_ends_where_it_is_told(env: Env, new_topic: Callable[..., str]) -> None:
    topic = new_topic()
    succeeds("produce", topic, stdin=b"a\nb\nc\nd\n", env=env)
    assert succeeds("consume", topic, "--max", "2", env=env) == b"a\nb\n"
    assert succeeds("consume", topic, "--from", "2", "--exit-at-end", env=env) == b"c\nd\n"
    assert succeeds("consume", topic, "--from", "latest", "--exit-at-end", env=env) == b""
    assert succeeds("consume", topic, "--max", "0", env=env) == b""
    assert (
        succeeds("consume", topic, "--from", "2001-01-01T00:00:00Z", "--exit-at-end", env=env)
        == b"a\nb\nc\nd\n"
    )
    assert succeeds("consume", topic, "--from", "2100-01-01", "--exit-at-end", env=env) == b""


def test_an_offset_that_a_partition_lacks_gives_the_nearest_and_a_note(
    env: Env, new_topic: Callable[..., str], headrace_session: Broker
) -> None:
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import AdminClient

    topic = new_topic()
    succeeds("produce", topic, stdin=b"a\nb\nc\nd\n", env=env)
    past = headrace_command("consume", topic, "--from", "100", "--exit-at-end", env=env)
    assert (past.returncode, past.stdout) == (0, b"")
    assert past.stderr == f"headrace: note: {topic}-0 has no offset 100; reading from its end, 4\n".encode()
    admin = AdminClient({"bootstrap.servers": headrace_session.bootstrap})
    for done in admin.delete_records([TopicPartition(topic, 0, 2)]).values():
        done.result(30)
    gone = headrace_command("consume", topic, "--from", "1", "--exit-at-end", env=env)
    assert (gone.returncode, gone.stdout) == (0, b"c\nd\n")
    assert b"has no offset 1; reading from its first record, 2" in gone.stderr


def test_where_to_begin_may_be_given_by_the_client_key(env: Env, new_topic: Callable[..., str]) -> None:
    topic = new_topic()
    succeeds("produce", topic, stdin=b"a\n", env=env)
    key = ("-X", "auto.offset.reset=latest", "--exit-at-end")
    assert succeeds("consume", topic, *key, env=env) == b""
    assert succeeds("consume", topic, *key, "--from", "earliest", env=env) == b"a\n"


def test_several_topics_are_read_together(env: Env, new_topic: Callable[..., str]) -> None:
    one, two = new_topic("-p", "2"), new_topic()
    succeeds("produce", one, stdin=b"1\n", env=env)
    succeeds("produce", two, stdin=b"2\n", env=env)
    assert sorted(succeeds("consume", one, two, *AT_END, env=env).split()) == [b"1", b"2"]


@pytest.mark.parametrize(
    "text, start",
    [
        ("earliest", ("earliest", 0)),
        ("latest", ("latest", 0)),
        ("0", ("offset", 0)),
        ("99999999999", ("offset", 99_999_999_999)),
        ("1700000000000", ("time", 1_700_000_000_000)),
        ("2023-11-14T22:13:20Z", ("time", 1_700_000_000_000)),
        ("2023-11-14T23:13:20+01:00", ("time", 1_700_000_000_000)),
    ],
)
def test_where_to_begin_is_an_offset_or_a_time(text: str, start: tuple[str, int]) -> None:
    assert parse_start(text) == start


def test_what_cannot_be_read_or_written_is_named(env: Env, new_topic: Callable[..., str]) -> None:
    topic = new_topic()
    assert "does not exist" in fails(1, "consume", "not-there", env=env)
    assert "has no partition 5" in fails(1, "consume", topic, "--partition", "5", env=env)
    assert "takes no --partition" in fails(2, "consume", topic, "--group", "g", "--partition", "0", env=env)
    assert "no such file" in fails(1, "produce", topic, "--file", "/no/such/file", env=env)
    assert "no partition 5" in fails(1, "produce", topic, "--partition", "5", stdin=b"x\n", env=env)
    assert "max.request.size" in fails(1, "produce", topic, stdin=bytes(1_100_000), env=env)


@pytest.mark.headrace(settings={"group.initial.rebalance.delay.ms": 0})
def test_a_group_is_given_each_record_once(headrace: Broker) -> None:
    headrace.create_topic("orders")
    env = {"HEADRACE_BOOTSTRAP": headrace.bootstrap}
    succeeds("produce", "orders", stdin=b"a\nb\nc\n", env=env)
    assert succeeds("consume", "orders", "--group", "g", "--max", "2", env=env) == b"a\nb\n"
    assert succeeds("consume", "orders", "--group", "g", "--exit-at-end", env=env) == b"c\n"
    assert succeeds("consume", "orders", "--group", "g", "--exit-at-end", env=env) == b""


@pytest.mark.headrace(settings={"auto.create.topics.enable": False})
def test_producing_to_a_topic_that_is_not_there_says_how_to_create_it(headrace: Broker) -> None:
    shown = fails(1, "produce", "nowhere", "-b", headrace.bootstrap, stdin=b"x\n")
    assert "topic 'nowhere' does not exist" in shown
    assert "headrace topic create nowhere" in shown


def test_records_the_broker_refuses_are_counted_and_fail_the_command(
    env: Env, new_topic: Callable[..., str]
) -> None:
    topic = new_topic("-c", "max.message.bytes=200")
    done = headrace_command("produce", topic, stdin=b"small\n" + b"x" * 1_000 + b"\nalso small\n", env=env)
    assert done.returncode == 1
    assert b"produced 2 records" in done.stdout
    assert b"1 of 3 records were not acknowledged" in done.stderr
    assert succeeds("consume", topic, *AT_END, env=env) == b"small\nalso small\n"


@pytest.mark.parametrize("size", [600_000, 3_000_000], ids=["whole", "unfinished"])
def test_a_line_that_is_too_long_is_numbered_and_those_before_it_are_sent(
    size: int, env: Env, new_topic: Callable[..., str]
) -> None:
    topic = new_topic()
    lines = b"one\ntwo\n" + b"x" * size + b"\nafter\n"
    arguments = ("produce", topic, "--json", "-X", "max.request.size=500000")
    done = headrace_command(*arguments, stdin=lines, env=env)
    assert done.returncode == 1
    assert json.loads(done.stdout) == {"topic": topic, "produced": 2, "failed": 0}
    assert done.stderr.startswith(b"headrace: stopped at line 3: ")
    assert b"raise it with -X max.request.size" in done.stderr
    assert succeeds("consume", topic, *AT_END, env=env) == b"one\ntwo\n"


def test_producing_survives_a_restart_of_the_broker(tmp_path: Path) -> None:
    with Broker(data_dir=tmp_path / "data") as broker:
        broker.create_topic("t", config={"flush.messages": "1"})
        command = [sys.executable, "-m", "headrace", "produce", "t", "-b", broker.bootstrap]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as producing:
            assert producing.stdin is not None
            producing.stdin.write(b"before\n")
            producing.stdin.flush()
            assert succeeds("consume", "t", "--max", "1", "-b", broker.bootstrap) == b"before\n"
            broker.kill()
            producing.stdin.write(b"while it is down\n")
            producing.stdin.flush()
            broker.start()
            out, _ = producing.communicate(b"after\n", timeout=90)
            assert (producing.returncode, out) == (0, b"produced 3 records to t\n")
        out = succeeds("consume", "t", *AT_END, "-b", broker.bootstrap)
        assert out == b"before\nwhile it is down\nafter\n"


def test_a_reader_that_goes_away_ends_the_command_quietly(env: Env, new_topic: Callable[..., str]) -> None:
    topic = new_topic()
    succeeds("produce", topic, stdin=b"line\n" * 50_000, env=env)
    command = [sys.executable, "-m", "headrace", "consume", topic]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **env}
    ) as consuming:
        assert consuming.stdout is not None and consuming.stderr is not None
        assert consuming.stdout.readline() == b"line\n"
        consuming.stdout.close()
        # It follows the topic, so it writes again and finds that nobody reads.
        succeeds("produce", topic, stdin=b"more\n", env=env)
        assert consuming.wait(60) == 141
        assert consuming.stderr.read() == b""


def test_ctrl_c_ends_a_command_quietly(env: Env, new_topic: Callable[..., str]) -> None:
    topic = new_topic()
    succeeds("produce", topic, stdin=b"first\n", env=env)
    command = [sys.executable, "-m", "headrace", "consume", topic]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **env},
        # As at a terminal: a shell has its background jobs, of which the tests may be one, ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 (it takes no lock)
    ) as consuming:
        assert consuming.stdout is not None and consuming.stderr is not None
        assert consuming.stdout.readline() == b"first\n"
        consuming.send_signal(signal.SIGINT)
        assert consuming.wait(60) == 130
        assert consuming.stderr.read() == b""
