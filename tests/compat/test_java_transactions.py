"""Apache Kafka's own tools for transactions: the copier of its system tests, the perf tool, `kafka-transactions`.

Found by `java_tools`, and skipped where they are not.
"""

import re
from collections.abc import Callable

import pytest
from confluent_kafka import Producer

from tests.compat.java_tools import WITH_TOOLS, run_tool, tool_command
from tests.compat.samples import QUIET, WAIT_S, eventually
from tests.compat.test_transactions import committed, new_id, transactional

MakeTopic = Callable[..., str]

pytestmark = WITH_TOOLS
COPIER = "transactional-message-copier"
ROW = re.MULTILINE


def produce_numbers(bootstrap: str, topic: str, count: int, partitions: int = 1) -> list[bytes]:
    plain = Producer({**QUIET, "bootstrap.servers": bootstrap})
    values = [b"%d" % number for number in range(count)]
    for number, value in enumerate(values):
        plain.produce(topic, value, partition=number % partitions)
    assert plain.flush(WAIT_S) == 0
    return values


@pytest.mark.skipif(
    tool_command(COPIER) is None, reason="Kafka's copier of its system tests is not installed"
)
@pytest.mark.parametrize("mode", ["assigned", "subscribed"])
def test_the_copier_that_aborts_at_random_copies_every_record_once(
    mode: str, bootstrap: str, make_topic: MakeTopic
) -> None:
    partitions = 1 if mode == "assigned" else 3
    source, target, name = make_topic(partitions), make_topic(partitions), new_id("copier")
    values = produce_numbers(bootstrap, source, 500, partitions)
    how = (
        ("--input-partition", "0")
        if mode == "assigned"
        else ("--input-partition", "-1", "--group-mode", "--use-group-metadata")
    )
    out = run_tool(
        COPIER,
        *("--broker-list", bootstrap, "--input-topic", source, *how, "--output-topic", target),
        *("--transactional-id", name, "--consumer-group", name, "--transaction-size", "50"),
        "--enable-random-aborts",
    )
    assert re.search(r'"remaining":"?0\b', out), out
    seen = committed(bootstrap, target, partitions)
    assert (seen if mode == "assigned" else sorted(seen, key=int)) == values


def test_the_perf_tool_commits_as_it_goes(bootstrap: str, make_topic: MakeTopic) -> None:
    topic = make_topic()
    out = run_tool(
        "kafka-producer-perf-test",
        *("--topic", topic, "--num-records", "5000", "--record-size", "100", "--throughput", "10000"),
        *("--transactional-id", new_id("perf"), "--transaction-duration-ms", "100"),
        *("--producer-props", f"bootstrap.servers={bootstrap}"),
    )
    assert "5000 records sent" in out
    assert len(committed(bootstrap, topic)) == 5000


def test_open_transactions_are_listed_described_and_aborted(bootstrap: str, make_topic: MakeTopic) -> None:
    topic, name = make_topic(), new_id("open")
    producer = transactional(bootstrap, name)
    producer.begin_transaction()
    producer.produce(topic, b"open", partition=0)
    producer.flush(WAIT_S)

    def tool(*arguments: str) -> str:
        return run_tool("kafka-transactions", "--bootstrap-server", bootstrap, *arguments)

    assert re.search(rf"^{name}\s+\d+\s+\d+\s+Ongoing", tool("list"), ROW)
    assert name in tool("list", "--transactional-id-pattern", "open-.*")
    assert name not in tool("list", "--transactional-id-pattern", "other-.*")
    assert name not in tool("list", "--duration-filter", "10000000")
    described = tool("describe", "--transactional-id", name)
    assert re.search(rf"^\d+\s+{name}\s+\d+\s+\d+\s+Ongoing\s+\d+\s+\d+\s+\d+\s+{topic}-0", described, ROW)
    where = ("--topic", topic, "--partition", "0")
    assert re.search(r"^\d+\s+\d+\s+-?\d+\s+\d+\s+\d+\s+0\s*$", tool("describe-producers", *where), ROW)
    assert name not in tool("find-hanging", "--topic", topic, "--max-transaction-timeout", "15")
    tool("abort", *where, "--start-offset", "0")
    assert re.search(r"^\d+\s+\d+\s+-?\d+\s+\d+\s+\d+\s+None\s*$", tool("describe-producers", *where), ROW)
    assert committed(bootstrap, topic) == []


def test_a_transaction_is_ended_by_force_and_its_producer_shut_out(
    bootstrap: str, make_topic: MakeTopic
) -> None:
    topic, name = make_topic(), new_id("forced")
    producer = transactional(bootstrap, name)
    producer.begin_transaction()
    producer.produce(topic, b"open", partition=0)
    producer.flush(WAIT_S)
    server = ("--bootstrap-server", bootstrap)
    run_tool("kafka-transactions", *server, "forceTerminateTransaction", "--transactionalId", name)
    plain = Producer({**QUIET, "bootstrap.servers": bootstrap})
    plain.produce(topic, b"behind it", partition=0)
    plain.flush(WAIT_S)
    eventually(lambda: committed(bootstrap, topic), [b"behind it"])
    with pytest.raises(Exception, match=r"fenced|epoch|newer|FENCED"):
        producer.commit_transaction(WAIT_S)
