"""Pipeline files on real Spark and a real broker: decoders, steps, examples, stop and restart."""

import asyncio
import io
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pytest

from headrace.client.arrow_read import ArrowReader, read_range
from headrace.client.arrow_write import ArrowWriter
from headrace.client.framing import frame
from headrace.pipeline.job import Job
from headrace.pipeline.jobfile import load
from headrace.testing import Broker
from tests.pipeline.test_decode import descriptor_set, order

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

EXAMPLES = Path("examples/spark").resolve()
Run = Callable[..., list[dict[str, Any]]]


def write(broker: Broker, topic: str, *values: bytes | dict[str, Any], key: bytes | None = None) -> None:
    rows = [value if isinstance(value, bytes) else json.dumps(value).encode() for value in values]
    table = pa.table({"key": pa.array([key] * len(rows), pa.binary()), "value": pa.array(rows, pa.binary())})

    async def send() -> None:
        async with ArrowWriter({"bootstrap.servers": broker.bootstrap}) as writer:
            await writer.send_arrow(topic, table)

    asyncio.run(send())


def values_in(broker: Broker, topic: str) -> list[bytes | None]:
    """The committed values of a topic of one partition, in their order."""

    async def read() -> list[bytes | None]:
        async with ArrowReader(
            {"bootstrap.servers": broker.bootstrap, "isolation.level": "read_committed"}
        ) as reader:
            found: list[bytes | None] = (
                (await reader.table(topic, 0, columns=["value"])).column("value").to_pylist()
            )
            return found

    return asyncio.run(read())


def rows_in(broker: Broker, topic: str) -> list[Any]:
    return [json.loads(value) for value in values_in(broker, topic) if value is not None]


@pytest.fixture
def run(spark: Any, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Run a job in the session of these tests, until everything available is done; its events."""
    from headrace.pipeline import runner

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "_session", lambda job: nullcontext(spark))
    yield lambda job, report=None: _run(runner, job, report)
    for query in spark.streams.active:
        query.stop()


def _run(runner: Any, job: Job, report: Callable[[dict[str, Any]], None] | None) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []

    def tell(event: dict[str, Any]) -> None:
        events.append(event)
        if report is not None:
            report(event)

    runner.run_stream(job, tell)
    return events


def written(folder: Path, broker: Broker, text: str) -> Job:
    path = folder / "job.yaml"
    head = f"name: job\nbootstrap: {broker.bootstrap}\ncheckpoint: {folder}/checkpoint\n"
    # Spark goes by the directory that its JVM was started in, which is not the one of this test.
    path.write_text(head + text.replace("parquet: ", f"parquet: {folder}/"))
    return load(path)


def example(name: str, broker: Broker, folder: Path) -> Job:
    """An example as it is in the repository, but on this broker, and ending when everything is done."""
    job = load(EXAMPLES / f"{name}.yaml")
    topics = [source.topic for source in job.sources] + [
        sink.to for sink in job.sinks if sink.kind == "topic"
    ]
    for topic in {*topics, job.dead_letters}:
        if topic is not None:
            broker.create_topic(topic, 1)
    sinks = tuple(
        replace(sink, to=str(folder / sink.to)) if sink.kind == "parquet" else sink for sink in job.sinks
    )
    return replace(
        job, bootstrap=broker.bootstrap, every=None, checkpoint=str(folder / "checkpoint"), sinks=sinks
    )


@pytest.fixture
def broker() -> Iterator[Broker]:
    """One for each test, because examples share names of topics."""
    with Broker() as running:
        yield running


def test_every_format_is_decoded_and_what_is_malformed_becomes_a_dead_letter(
    run: Run, spark: Any, broker: Broker, tmp_path: Path
) -> None:
    schema = {"type": "record", "name": "O", "fields": [{"name": "id", "type": "long"}]}
    (tmp_path / "schemas").mkdir()
    (tmp_path / "schemas" / "7.avsc").write_text(json.dumps(schema))
    (tmp_path / "order.desc").write_bytes(descriptor_set())
    avro = io.BytesIO()
    fastavro.schemaless_writer(avro, fastavro.parse_schema(schema), {"id": 1})
    for topic in ("a", "p", "c", "j", "dead"):
        broker.create_topic(topic, 1)
    write(broker, "a", frame(7, avro.getvalue()), frame(8, avro.getvalue()), avro.getvalue(), key=b"k")
    write(broker, "p", order(), b"\xff\xff")
    write(broker, "c", b"3,three", b"x,y")
    write(broker, "j", frame(7, b'{"id": 4}'), b'{"id": 5}', frame(7, b"{"))
    job = written(
        tmp_path,
        broker,
        """\
sources:
  a: {topic: a, decode: {format: avro, schemas: schemas, framing: registry, keep: [key, offset]}}
  p: {topic: p, decode: {format: protobuf, schema: order.desc, message: shop.Order}}
  c: {topic: c, decode: {format: csv, schema: "id bigint, name string"}}
  j: {topic: j, decode: {format: json, schema: id bigint, framing: registry}}
steps:
  - name: all_of_them
    sql: |
      SELECT 'a' AS source, id, cast(key AS string) AS what FROM a
      UNION ALL SELECT 'p', id, lines[0].what FROM p
      UNION ALL SELECT 'c', id, name FROM c
      UNION ALL SELECT 'j', id, NULL FROM j
sinks:
  - {from: all_of_them, parquet: out}
trigger: {available_now: true}
dead_letters: dead
""",
    )
    events = run(job)
    found = {tuple(row) for row in spark.read.parquet(str(tmp_path / "out")).collect()}
    assert found == {("a", 1, "k"), ("p", 5, "bread"), ("c", 3, "three"), ("j", 4, None)}
    columns = ("key", "value", "headers")
    batches = list(read_range({"bootstrap.servers": broker.bootstrap}, "dead", 0, 0, 6, columns))
    letters = [row for batch in batches for row in batch.to_pylist()]
    said = {}
    for letter in letters:
        headers = {header["key"]: header["value"].decode() for header in letter["headers"]}
        said[headers["headrace.origin.topic"], int(headers["headrace.origin.offset"])] = headers[
            "headrace.reason"
        ]
    assert said[("a", 1)] == "no schema with the id 8 is known"
    assert set(said) == {("a", 1), ("a", 2), ("p", 1), ("c", 1), ("j", 1), ("j", 2)}
    assert "was not written with a schema registry" in said[("j", 1)]
    assert said[("j", 2)] == "the value does not fit the schema"
    told = {event["query"]: event for event in events if event["event"] == "progress"}
    assert told["job-0-all_of_them"]["rows_out"] == 4
    assert told["job-dead"]["rows_out"] == 6
    assert told["job-dead"]["lag"] == {"a": 0, "p": 0, "c": 0, "j": 0}


def test_a_run_stops_after_its_batch_and_the_next_goes_on_there(
    run: Run, spark: Any, broker: Broker, tmp_path: Path
) -> None:
    for topic in ("in", "out"):
        broker.create_topic(topic, 1)
    write(broker, "in", *({"id": n} for n in range(100)))
    text = """\
sources:
  rows: {topic: in, decode: {format: json, schema: id bigint}, options: {maxOffsetsPerTrigger: 10}}
sinks:
  - {from: rows, topic: out}
trigger: {every: 1 second}
"""
    job = written(tmp_path, broker, text)

    def stop_at_second_batch(event: dict[str, Any]) -> None:
        if event.get("batch") == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    events = run(job, stop_at_second_batch)
    assert [event["event"] for event in events][-1] == "stopped"
    done = len(rows_in(broker, "out"))
    assert 20 <= done < 100
    run(replace(job, every=None))
    assert sorted(row["id"] for row in rows_in(broker, "out")) == list(range(100))


def test_a_step_that_spark_cannot_read_ends_the_run_before_data_moves(
    run: Run, spark: Any, broker: Broker, tmp_path: Path
) -> None:
    from headrace.pipeline.plan import PlanError

    for topic in ("in", "out"):
        broker.create_topic(topic, 1)
    text = """\
sources:
  rows: {topic: in, decode: {format: json, schema: id bigint}}
steps:
  - name: wrong
    sql: SELECT di FROM rows
sinks:
  - {from: wrong, topic: out}
"""
    with pytest.raises(PlanError, match=r"job\.yaml:8: step 'wrong': .*UNRESOLVED_COLUMN.*`di`.*`id`"):
        run(written(tmp_path, broker, text))
    with pytest.raises(PlanError, match=r"job\.yaml:10: sink 'topic out': .*`idd`"):
        run(written(tmp_path, broker, text.replace("di FROM", "id FROM").replace("out}", "out, key: idd}")))
    assert not spark.streams.active


def test_windows_joins_and_dedup_give_the_rows_they_promise(
    run: Run, spark: Any, broker: Broker, tmp_path: Path
) -> None:
    for topic in ("events", "once", "dead"):
        broker.create_topic(topic, 1)
    (tmp_path / "names.csv").write_text("id,name\n1,one\n2,two\n")
    events = [{"id": n % 2 + 1, "at": f"2026-01-01T00:00:{n:02d}Z"} for n in range(40)]
    write(broker, "events", *events, *events[:5], {"id": 1, "at": "2026-01-01T01:00:00Z"})
    job = written(
        tmp_path,
        broker,
        """\
sources:
  events:
    topic: events
    decode: {format: json, schema: "id bigint, at timestamp"}
    watermark: {column: at, delay: 1 minute}
  names: {files: names.csv, format: csv, schema: "id bigint, name string"}
steps:
  - {name: once, dedup: [id, at], from: events}
  - name: named
    sql: SELECT name, at FROM once JOIN names USING (id)
  - name: tumbling
    sql: SELECT name, window.start AS start, count(*) AS n FROM named GROUP BY window(at, '20 seconds'), name
  - name: sliding
    sql: SELECT window.start AS start, count(*) AS n FROM events GROUP BY window(at, '20 seconds', '10 seconds')
sinks:
  - {from: tumbling, parquet: tumbling}
  - {from: sliding, parquet: sliding}
  - {from: once, topic: once, key: id}
trigger: {available_now: true}
""",
    )
    run(job)
    assert len(rows_in(broker, "once")) == 41
    tumbling = spark.read.parquet(str(tmp_path / "tumbling")).collect()
    assert sorted((row.name, row.n) for row in tumbling) == [
        ("one", 10),
        ("one", 10),
        ("two", 10),
        ("two", 10),
    ]
    sliding = {str(row.start)[-8:]: row.n for row in spark.read.parquet(str(tmp_path / "sliding")).collect()}
    assert sliding == {"23:59:50": 15, "00:00:00": 25, "00:00:10": 20, "00:00:20": 20, "00:00:30": 10}


# -- the examples ------------------------------------------------------------------------------------------------------


def test_the_examples_do_what_they_say(run: Run, spark: Any, broker: Broker, tmp_path: Path) -> None:
    _word_count(run, broker, tmp_path / "words")
    _sessions(run, broker, tmp_path / "sessions")
    _upsert(run, broker, tmp_path / "upsert")
    _fraud(run, spark, tmp_path / "fraud")


def _word_count(run: Run, broker: Broker, folder: Path) -> None:
    job = example("word_count", broker, folder)
    write(broker, "lines", b"the river and the mill", b"The wheel")
    run(job)
    write(broker, "lines", b"a mill")
    run(job)
    latest = {row["word"]: row["count"] for row in rows_in(broker, "word-counts")}
    assert latest == {"the": 3, "river": 1, "and": 1, "mill": 2, "wheel": 1, "a": 1}


def _sessions(run: Run, broker: Broker, folder: Path) -> None:
    job = example("clickstream_sessions", broker, folder)
    times = ["10:00", "10:10", "10:35", "12:00", "18:00"]
    write(broker, "clicks", *({"user": "u", "page": "/", "at": f"2026-01-01T{at}:00Z"} for at in times), b"?")
    run(job)
    assert sorted(row["clicks"] for row in rows_in(broker, "sessions")) == [1, 3]
    assert values_in(broker, "clicks.dead") == [b"?"]


def _upsert(run: Run, broker: Broker, folder: Path) -> None:
    job = example("cdc_upsert", broker, folder)
    change = {"id": 1, "name": "Ada", "city": "London"}
    write(
        broker,
        "customers.changes",
        {"op": "c", **change},
        {"op": "u", **change, "city": "Paris"},
        {"op": "d", "id": 1},
    )
    run(job)
    config = {"bootstrap.servers": broker.bootstrap}
    rows = [
        row
        for batch in read_range(config, "customers", 0, 0, 3, ("key", "value"))
        for row in batch.to_pylist()
    ]
    assert [row["key"] for row in rows] == [b"1"] * 3
    assert [json.loads(row["value"])["city"] if row["value"] else None for row in rows] == [
        "London",
        "Paris",
        None,
    ]


def _fraud(run: Run, spark: Any, folder: Path) -> None:
    with Broker() as broker:
        job = example("order_fraud", broker, folder)
        for name, value in job.config.items():
            spark.conf.set(name, value)
        orders = [
            {"id": n, "user": "u", "card": "c", "country": "DE", "at": f"2026-01-01T10:0{n}:00Z"}
            for n in range(5)
        ]
        logins = [
            {"user": "u", "country": "DE", "login_at": "2026-01-01T10:00:00Z"},
            {"user": "u", "country": "FR", "login_at": "2026-01-01T10:02:30Z"},
        ]
        write(broker, "orders", *orders)
        write(broker, "logins", *logins)
        run(job)
        assert sorted(row["id"] for row in rows_in(broker, "fraud-alerts")) == [3, 4]
        write(broker, "orders", {**orders[0], "id": 9})
        run(job)
        assert [(row["id"], row["uses"]) for row in rows_in(broker, "fraud-cards")] == [
            (3, 4),
            (4, 5),
            (9, 6),
        ]


def test_a_backfill_is_the_same_file_over_a_part_of_the_past(
    spark: Any, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.pipeline import runner
    from headrace.pipeline.plan import Bounds

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "_session", lambda job: nullcontext(spark))
    job = example("backfill_to_parquet", broker, tmp_path)
    orders = [{"id": n, "customer": "c", "amount": 1.5, "at": "2026-01-01T10:00:00Z"} for n in range(10)]
    write(broker, "orders", *orders, b"broken")
    events: list[dict[str, Any]] = []
    bounds = Bounds({"startingOffsets": '{"orders":{"0":3}}'}, {"endingOffsets": '{"orders":{"0":8}}'})
    runner.run_batch(job, bounds, events.append)
    back = spark.read.parquet(str(tmp_path / "data" / "orders-backfill"))
    assert sorted(row.id for row in back.collect()) == [3, 4, 5, 6, 7]
    runner.run_batch(job, Bounds({"startingTimestamp": "1"}, {}), events.append)
    assert back.sparkSession.read.parquet(str(tmp_path / "data" / "orders-backfill")).count() == 15
    assert [event["records"] for event in events if event["event"] == "undecodable"] == [0, 1]
    runner.run_stream(job, events.append)
    stream = spark.read.parquet(str(tmp_path / "data" / "orders"))
    assert (stream.count(), str(stream.first().day)) == (10, "2026-01-01")
