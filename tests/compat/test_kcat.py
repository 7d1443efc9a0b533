"""kcat, often an old librdkafka from a distribution's packages, takes the broker for Kafka. Skipped where absent."""

import json
import shutil
import subprocess
from collections.abc import Callable

import pytest

from tests.compat.clients import produce_confluent
from tests.compat.samples import COMPRESSIONS, WAIT_S, Sample

MakeTopic = Callable[..., str]

pytestmark = pytest.mark.skipif(
    shutil.which("kcat") is None, reason="kcat is not installed (Debian: apt install kcat)"
)


def kcat(bootstrap: str, *arguments: str, stdin: bytes = b"") -> bytes:
    done = subprocess.run(
        ["kcat", "-b", bootstrap, "-m", "20", *arguments],
        input=stdin,
        capture_output=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def read_all(bootstrap: str, topic: str, *more: str) -> list[dict[str, object]]:
    out = kcat(bootstrap, "-C", "-t", topic, "-o", "beginning", "-e", "-q", "-J", *more)
    return [json.loads(line) for line in out.decode().splitlines()]


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_lines_go_in_and_come_out_in_order(compression: str, bootstrap: str, make_topic: MakeTopic) -> None:
    topic = make_topic()
    lines = [f"key-{i}:value-{i}-{'x' * 50}" for i in range(1000)]
    kcat(bootstrap, "-P", "-t", topic, "-K:", "-z", compression, stdin="\n".join(lines).encode())
    assert [f"{r['key']}:{r['payload']}" for r in read_all(bootstrap, topic)] == lines


def test_headers_and_nulls_are_kept(bootstrap: str, make_topic: MakeTopic) -> None:
    topic = make_topic()
    kcat(
        bootstrap,
        "-P",
        "-t",
        topic,
        "-K:",
        "-Z",
        "-H",
        "a=1",
        "-H",
        "a=2",
        "-H",
        "b",
        stdin=b"k:v\ngone:\n:no key",
    )
    seen = read_all(bootstrap, topic)
    assert [(r["key"], r["payload"]) for r in seen] == [("k", "v"), ("gone", None), (None, "no key")]
    assert all(r["headers"] == ["a", "1", "a", "2", "b", None] for r in seen)


def test_the_cluster_is_listed(bootstrap: str, make_topic: MakeTopic) -> None:
    topic = make_topic(3)
    listed = json.loads(kcat(bootstrap, "-L", "-J"))
    assert [b["name"] for b in listed["brokers"]] == [bootstrap]
    found = next(t for t in listed["topics"] if t["topic"] == topic)
    leader = listed["brokers"][0]["id"]
    assert [(p["partition"], p["leader"]) for p in found["partitions"]] == [(i, leader) for i in range(3)]


def test_an_offset_is_found_by_its_time(bootstrap: str, make_topic: MakeTopic, now_ms: int) -> None:
    topic = make_topic()
    produce_confluent(
        bootstrap, topic, [Sample(None, b"%d" % i, age_ms=1000 * (10 - i)) for i in range(10)], now_ms
    )
    assert kcat(bootstrap, "-Q", "-t", f"{topic}:0:{now_ms - 7500}").decode().split() == [
        topic,
        "[0]",
        "offset",
        "3",
    ]


def test_reading_starts_at_an_offset_or_so_many_before_the_end(bootstrap: str, make_topic: MakeTopic) -> None:
    topic = make_topic()
    kcat(bootstrap, "-P", "-t", topic, stdin=b"\n".join(b"%d" % i for i in range(100)))
    assert kcat(bootstrap, "-C", "-t", topic, "-o", "42", "-c", "3", "-q").split() == [b"42", b"43", b"44"]
    assert kcat(bootstrap, "-C", "-t", topic, "-o", "-2", "-e", "-q").split() == [b"98", b"99"]


def test_an_idempotent_producer_is_served(bootstrap: str, make_topic: MakeTopic) -> None:
    topic = make_topic()
    lines = [f"{i:06d}" for i in range(5000)]
    kcat(
        bootstrap,
        *("-P", "-t", topic, "-X", "enable.idempotence=true", "-X", "batch.num.messages=100"),
        stdin="\n".join(lines).encode(),
    )
    assert [r["payload"] for r in read_all(bootstrap, topic)] == lines
