"""Apache Kafka's own command-line tools take the broker for Kafka. Skipped where they are not installed."""

import re
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from headrace.testing import Broker
from tests.compat.clients import produce_confluent
from tests.compat.java_tools import WITH_TOOLS, run_tool
from tests.compat.samples import COMPRESSIONS, SAMPLES, Sample

MakeTopic = Callable[..., str]

pytestmark = WITH_TOOLS


@pytest.fixture
def tool(bootstrap: str) -> Callable[..., str]:
    def run(name: str, *arguments: str, stdin: str = "", status: int = 0) -> str:
        return run_tool(name, "--bootstrap-server", bootstrap, *arguments, stdin=stdin, status=status)

    return run


def test_topics_are_created_described_grown_and_deleted(tool: Callable[..., str], now_ms: int) -> None:
    name = f"compat-java-{now_ms}"
    assert f"Created topic {name}." in tool("kafka-topics", "--create", "--topic", name, "--partitions", "3")
    described = tool("kafka-topics", "--describe", "--topic", name)
    assert len(re.findall(r"Partition: \d+\s+Leader: \d+\s+Replicas: \d+\s+Isr: \d+", described)) == 3
    tool("kafka-topics", "--alter", "--topic", name, "--partitions", "5")
    assert "PartitionCount: 5" in tool("kafka-topics", "--describe", "--topic", name)
    tool("kafka-topics", "--delete", "--topic", name)
    assert name not in tool("kafka-topics", "--list").split()


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_console_lines_go_in_and_come_out(
    compression: str, tool: Callable[..., str], make_topic: MakeTopic
) -> None:
    topic = make_topic()
    lines = [f"h:{i}\tkey-{i}\tvalue-{i}" for i in range(200)]
    tool(
        "kafka-console-producer",
        *("--topic", topic, "--compression-codec", compression),
        *("--reader-property", "parse.key=true", "--reader-property", "parse.headers=true"),
        stdin="\n".join(lines) + "\n",
    )
    out = tool(
        "kafka-console-consumer",
        *("--topic", topic, "--partition", "0", "--offset", "earliest", "--max-messages", "200"),
        *("--timeout-ms", "20000", "--formatter-property", "print.key=true"),
        *("--formatter-property", "print.headers=true"),
    )
    assert out.splitlines() == lines


def test_offsets_are_told_and_records_deleted(
    tool: Callable[..., str], bootstrap: str, make_topic: MakeTopic, now_ms: int, tmp_path: Path
) -> None:
    topic = make_topic()
    produce_confluent(bootstrap, topic, [Sample(None, b"%d" % i, age_ms=100 - i) for i in range(10)], now_ms)
    assert tool("kafka-get-offsets", "--topic", topic).split() == [f"{topic}:0:10"]
    assert tool("kafka-get-offsets", "--topic", topic, "--time", str(now_ms - 95)).split() == [f"{topic}:0:5"]
    plan = tmp_path / "delete.json"
    plan.write_text(f'{{"version": 1, "partitions": [{{"topic": "{topic}", "partition": 0, "offset": 6}}]}}')
    assert "low_watermark: 6" in tool("kafka-delete-records", "--offset-json-file", str(plan))
    assert tool("kafka-get-offsets", "--topic", topic, "--time", "earliest").split() == [f"{topic}:0:6"]


def test_settings_of_a_topic_are_altered_and_described(
    tool: Callable[..., str], make_topic: MakeTopic
) -> None:
    topic = make_topic()
    about = ("--entity-type", "topics", "--entity-name", topic)
    tool("kafka-configs", *about, "--alter", "--add-config", "retention.ms=60000,segment.bytes=1048576")
    assert re.search(r"retention\.ms=60000", tool("kafka-configs", *about, "--describe"))
    tool("kafka-configs", *about, "--alter", "--delete-config", "retention.ms")
    described = tool("kafka-configs", *about, "--describe")
    assert "retention.ms=60000" not in described
    assert "segment.bytes=1048576" in described


def test_the_performance_tools_run(bootstrap: str, make_topic: MakeTopic) -> None:
    topic = make_topic()
    out = run_tool(
        "kafka-producer-perf-test",
        *("--topic", topic, "--num-records", "20000", "--record-size", "100", "--throughput", "-1"),
        *("--producer-props", f"bootstrap.servers={bootstrap}", "acks=all"),
    )
    assert out.splitlines()[-1].startswith("20000 records sent")


def test_the_dump_tool_reads_segment_files_without_complaint(tmp_path: Path, now_ms: int) -> None:
    with Broker(data_dir=tmp_path) as broker:
        broker.create_topic("dumped", config={"segment.bytes": "1048576", "index.interval.bytes": "4096"})
        samples = (*SAMPLES, Sample(b"noise", Random(1).randbytes(300_000)))
        for compression in COMPRESSIONS:
            for _ in range(3):
                produce_confluent(broker.bootstrap, "dumped", samples, now_ms, compression)
    folder = tmp_path / "dumped-0"
    logs = sorted(folder.glob("*.log"))
    assert len(logs) > 1
    files = ",".join(str(path) for path in [*logs, *folder.glob("*.index"), *folder.glob("*.timeindex")])
    out = run_tool("kafka-dump-log", "--deep-iteration", "--files", files)
    offsets = [int(n) for n in re.findall(r"^\| offset: (\d+)", out, re.M)]
    assert offsets == list(range(15 * len(samples)))
    assert "isvalid: false" not in out.lower()
    assert not re.search(r"mismatch|corrupt|found timestamp|Non-secutive|misplaced", out, re.I)
