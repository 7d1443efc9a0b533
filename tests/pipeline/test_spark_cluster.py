"""The same source and sink on a standalone cluster, through Spark Connect, and in Declarative Pipelines."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from headrace.client.arrow_write import ArrowWriter
from headrace.testing import Broker
from tests.pipeline.spark_like import committed_values

pytest.importorskip("pyspark")

from tests.pipeline.spark_kills import History
from tests.pipeline.spark_processes import HOST, ROOT, SPARK_HOME, connect_server, environment, standalone

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cluster(spark_allowed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with standalone(tmp_path_factory.mktemp("cluster")) as address:
        yield address


def settings(**more: str) -> tuple[tuple[str, str], ...]:
    base = {"spark.executor.cores": "1", "spark.executor.memory": "512m", "spark.task.maxFailures": "4"}
    base |= {"spark.driver.host": HOST, "spark.driver.bindAddress": HOST}
    return tuple({**base, **more}.items())


def run(history: History, master: str, hook: str, **more: str) -> None:
    history.add_rows()
    history.run(
        history.job(master=master, config=settings(**more), hook=hook, hook_folder=str(history.folder))
    )


def test_an_executor_that_dies_in_the_middle_of_a_batch_loses_and_doubles_nothing(
    cluster: str, broker: Broker, tmp_path: Path
) -> None:
    history = History(broker, tmp_path, "executors")
    run(history, cluster, "kill_executor")
    assert (tmp_path / "killed").exists()
    assert history.account() == (0, 0)


def test_a_speculated_task_counts_once(cluster: str, broker: Broker, tmp_path: Path) -> None:
    history = History(broker, tmp_path, "speculated")
    speculation = {
        "spark.speculation": "true",
        "spark.speculation.interval": "100ms",
        "spark.speculation.quantile": "0.5",
        "spark.speculation.multiplier": "1.1",
        "spark.speculation.minTaskRuntime": "500ms",
    }
    run(history, cluster, "straggle", **speculation)
    assert (tmp_path / "straggled").exists()
    assert history.account() == (0, 0)


CONNECTED = """
import sys
from pyspark.sql import SparkSession
address, bootstrap, checkpoint = sys.argv[1:]
spark = SparkSession.builder.remote(address).getOrCreate()
base = {"kafka.bootstrap.servers": bootstrap}
assert spark.read.format("headrace").options(**base, subscribe="connect-in").load().count() == 50
read = spark.readStream.format("headrace").options(**base, subscribe="connect-in", startingOffsets="earliest")
write = read.load().select("key", "value").writeStream.format("headrace")
write = write.options(**base, topic="connect-out", checkpointLocation=checkpoint)
write.trigger(availableNow=True).start().awaitTermination()
"""


def put(broker: Broker, topic: str, rows: list[bytes]) -> None:
    async def run() -> None:
        async with ArrowWriter({"bootstrap.servers": broker.bootstrap}) as writer:
            await writer.send_arrow(topic, pa.table({"value": pa.array(rows, pa.binary())}))

    asyncio.run(run())


@pytest.fixture
def connect_client(spark_allowed: None) -> None:
    pytest.importorskip("grpc", reason="scripts/setup-spark connect installs what Spark Connect needs")
    pytest.importorskip("pandas", reason="scripts/setup-spark connect installs what Spark Connect needs")


def test_a_client_of_spark_connect_reads_and_writes_topics(
    connect_client: None, broker: Broker, tmp_path: Path
) -> None:
    broker.create_topic("connect-in", 2)
    broker.create_topic("connect-out", 2)
    rows = [b"%d" % n for n in range(50)]
    put(broker, "connect-in", rows)
    with connect_server(tmp_path) as address:
        done = subprocess.run(
            [sys.executable, "-c", CONNECTED, address, broker.bootstrap, str(tmp_path / "checkpoint")],
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    assert asyncio.run(committed_values(broker.bootstrap, "connect-out", 2)) == sorted(rows)


PIPELINE = """name: {name}
bootstrap: {bootstrap}
spark:
  master: local[2]
  config: {{spark.sql.shuffle.partitions: 2, spark.driver.host: 127.0.0.1}}
sources:
  lines:
    topic: {name}-lines
    decode: {{format: string}}
steps:
  - name: loud
    python: loudly:loud
    from: lines
  - name: words
    sql: SELECT explode(split(value, ' ')) AS word FROM loud
sinks:
  - from: words
    topic: {name}-words
    key: word
trigger: {{available_now: true}}
checkpoint: {folder}/checkpoint
"""

STEP = """
from pyspark.sql import functions as F

@F.udf("string", useArrow=False)
def louder(value):
    return value.upper()

def loud(lines):
    return lines.select(louder("value").alias("value"))
"""


def run_pipeline_on(master: str, name: str, broker: Broker, folder: Path) -> None:
    """The same file, by the command line, twice: over new lines, and over what came after the first run."""
    for topic in (f"{name}-lines", f"{name}-words"):
        broker.create_topic(topic, 2)
    path = folder / "pipeline.yaml"
    path.write_text(PIPELINE.format(name=name, bootstrap=broker.bootstrap, folder=folder))
    (folder / "loudly.py").write_text(STEP)
    expected: list[bytes] = []
    for lines in ([b"one two", b"three"], [b"four five"]):
        put(broker, f"{name}-lines", lines)
        done = subprocess.run(
            [sys.executable, "-m", "headrace", "pipeline", "run", str(path), "--master", master, "--json"],
            env=environment(),
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=400,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        expected += [word for line in lines for word in line.upper().split()]
        found = [json.loads(v) for v in asyncio.run(committed_values(broker.bootstrap, f"{name}-words", 2))]
        assert sorted(row["word"].encode() for row in found) == sorted(expected)


def test_a_pipeline_file_runs_on_a_standalone_cluster(cluster: str, broker: Broker, tmp_path: Path) -> None:
    run_pipeline_on(cluster, "standalone", broker, tmp_path)


def test_a_declarative_pipeline_writes_each_row_once_over_two_runs(
    connect_client: None, broker: Broker, tmp_path: Path
) -> None:
    broker.create_topic("orders", 2)
    broker.create_topic("large-orders", 2)
    example = ROOT / "examples" / "spark" / "declarative"
    spec = tmp_path / "spark-pipeline.yml"
    text = (example / "spark-pipeline.yml").read_text()
    spec.write_text(text.replace("file:///tmp/headrace-declarative", f"file://{tmp_path}/storage"))
    (tmp_path / "transformations").symlink_to(example / "transformations")
    expected = []
    for first in (0, 50):
        orders = [{"id": n, "customer": f"c{n % 3}", "amount": 50.0 + n} for n in range(first, first + 50)]
        put(broker, "orders", [json.dumps(order).encode() for order in orders])
        expected += [(o["id"], o["amount"]) for o in orders if float(str(o["amount"])) >= 100]
        done = subprocess.run(
            [str(SPARK_HOME / "bin" / "spark-pipelines"), "run", "--spec", str(spec)],
            env=environment(
                HEADRACE_BOOTSTRAP=broker.bootstrap,
                PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            ),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    found = [json.loads(v) for v in asyncio.run(committed_values(broker.bootstrap, "large-orders", 2))]
    assert sorted((row["id"], row["amount"]) for row in found) == sorted(expected)
