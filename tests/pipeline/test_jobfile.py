"""Pipeline files: what is taken, and how mistakes are named, before Spark starts."""

from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.pipeline.jobfile import TEMPLATE, load, starting_options
from headrace.pipeline.nodes import FileError


def write(folder: Path, text: str) -> Path:
    path = folder / "job.yaml"
    path.write_text(text)
    return path


def complaints(folder: Path, text: str) -> list[str]:
    with pytest.raises(FileError) as refused:
        load(write(folder, text))
    return [line.removeprefix(f"{folder}/") for line in refused.value.complaints]


def test_the_template_is_a_good_file(tmp_path: Path) -> None:
    job = load(write(tmp_path, TEMPLATE.format(name="job")))
    assert [source.name for source in job.sources] == ["orders"]
    assert job.sources[0].decode.format == "json"
    assert job.sources[0].watermark == ("at", "10 seconds")
    sink = job.sinks[0]
    assert (sink.label, sink.delivery, job.every) == ("topic totals", "exactly_once", "5 seconds")
    assert job.dead_letters == "orders.dead"


GOOD = """\
sources:
  a:
    topic: t
sinks:
  - from: a
    console: true
"""


@pytest.mark.parametrize("path", sorted(Path("examples/spark").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_examples_are_good_files(path: Path) -> None:
    assert load(path).sinks


def test_a_short_file_has_defaults(tmp_path: Path) -> None:
    job = load(write(tmp_path, GOOD))
    source, sink = job.sources[0], job.sinks[0]
    assert (job.name, job.master, source.starting, sink.mode) == (
        "job",
        "local[*]",
        {"startingOffsets": "earliest"},
        "append",
    )


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("    topic: t", "    topci: t", "job.yaml:3: source 'a' has no 'topci': did you mean topic?"),
        ("  - from: a", "  - from: aa", "job.yaml:5: no source or step 'aa' before this: did you mean a?"),
        ("sources:", "surces:", "job.yaml:2: a pipeline has no 'surces': did you mean sources?"),
        (
            "    console: true",
            "    console: true\n    topic: x",
            "job.yaml:5: a sink is one of topic, parquet, delta, console",
        ),
        ("    topic: t", "    topic: t\n    decode: {format: jsn}", "job.yaml:4: 'jsn' is none of"),
        (
            "    topic: t",
            "    topic: t\n    decode: {format: json}",
            "job.yaml:4: source 'a' decodes json: give its schema",
        ),
        (
            "    topic: t",
            "    topic: t\n    options: {maxOffsetPerTrigger: 5}",
            "did you mean maxOffsetsPerTrigger?",
        ),
        ("    topic: t", "    topic: t\n    files: x", "needs either topic, pattern or files"),
        ("    topic: t", "    topic: [t]", "job.yaml:3: expected a single value here"),
        ("sinks:", "steps:\n  - name: s\nsinks:", "step 's' needs either sql, python or dedup"),
        ("sinks:", "steps:\n  - {name: s, python: f, from: a}\nsinks:", "module:function"),
        ("    topic: t", "    topic: 't", "no YAML"),
        ("  - from: a\n    console: true", "  []", "no sinks"),
        (
            "    topic: t",
            "    topic: t\n    from: yesterday",
            "job.yaml:4: expected earliest, latest, a time like",
        ),
        ("    topic: t", "    topic: t\n    topic: u", "job.yaml:4: source 'a' has 'topic' twice"),
        (
            "    topic: t",
            "    topic: t\n    options: {subscribe: u}",
            "subscribe is said by topic or pattern already",
        ),
        (
            "    topic: t",
            "    topic: t\n    options: {failOnDataLoss: true, onDataLoss: skip}",
            "source 'a': Options 'failOnDataLoss' and 'onDataLoss' say the same thing",
        ),
        (
            "    topic: t",
            "    topic: t\n    options: {endingOffsets: latest}",
            "not supported in streaming queries",
        ),
        (
            "    topic: t",
            "    topic: t\n    decode: {format: json, schema: id bigin}",
            "job.yaml:4: schema: column 'id': no type 'bigin': did you mean bigint?",
        ),
        (
            "    topic: t",
            "    topic: t\n    decode: {format: json, schema: at timestamp}\n    watermark: {column: att, delay: 1 d}",
            "job.yaml:5: no column 'att': did you mean at?",
        ),
        (
            "    topic: t",
            "    topic: t\n    decode: {format: json, schema: at string}\n    watermark: {column: at, delay: 1 hour}",
            "a watermark wants a timestamp, and at is string",
        ),
        (
            "    topic: t",
            "    topic: t\n    watermark: {column: timestamp, delay: 5 secnds}",
            "did you mean seconds?",
        ),
        (
            "    topic: t",
            "    topic: t\n    decode: {format: csv, schema: a int, framing: registry}",
            "framing is for",
        ),
        ("    topic: t", "    topic: t\n    decode: {format: avro}", "decode avro: give its schema"),
        ("    topic: t", "    topic: t\n    decode: {format: avro, schema: no.avsc}", "no.avsc"),
        ("    topic: t", "    topic: t\n    decode: {format: avro, schema: '{'}", "no Avro schema"),
        ("    topic: t", "    topic: t\n    decode: {format: protobuf, schema: x}", "protobuf needs message"),
        (
            "    topic: t",
            "    topic: t\n    decode: {format: json, schema: a int, keep: kee}",
            "did you mean key?",
        ),
        ("    topic: t", "    files: x", "job.yaml:3: source 'a' reads files: say their format"),
        ("sinks:", "spark: {master: locale}\nsinks:", "job.yaml:4: no master 'locale'"),
        (
            "sinks:",
            "trigger: {every: 5 minuts}\nsinks:",
            "job.yaml:4: no unit 'minuts' of time: did you mean minutes?",
        ),
        ("sinks:", "trigger: {every: 5 minutes, available_now: true}\nsinks:", "not both"),
        ("sinks:", "trigger: {available_now: yess}\nsinks:", "'yess' is none of true, false"),
        ("sinks:", "steps:\n  - {name: s, dedup: id}\nsinks:", "step 's' needs from"),
        ("sinks:", "steps:\n  - {name: a, sql: SELECT 1}\nsinks:", "there is a source or step 'a' already"),
        (
            "sinks:",
            "steps:\n  - {name: s, python: 'nowhere:f', from: a}\nsinks:",
            "no module 'nowhere' beside this file",
        ),
        (
            "sinks:",
            "steps:\n  - name: s\n    sql: SELECT * FROM aa\nsinks:",
            "job.yaml:6: no source or step 'aa'",
        ),
        (
            "sinks:",
            "steps:\n  - name: s\n    sql: |\n      SELECT *\n      FROM a JOIN b USING (id)\nsinks:",
            "job.yaml:8: no source or step 'b'",
        ),
        (
            "sinks:",
            "steps:\n  - name: s\n    sql: SELECT count( FROM a\nsinks:",
            "SQL: a ( that is not closed",
        ),
        ("    console: true", "    parquet: out\n    mode: update", "files can only be appended to"),
        ("    console: true", "    parquet: out\n    key: id", "key is for a sink that is a topic"),
        ("    console: true", "    delta: out", "job.yaml:5: a delta sink needs Delta's jar"),
        ("    console: true", "    topic: out\n    delivery: exactly_onc", "did you mean exactly_once?"),
        (
            "    console: true",
            "    topic: out\n    options: {transactionalIdPrefx: x}",
            "transactionalIdPrefix?",
        ),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in GOOD
    assert any(said in line for line in complaints(tmp_path, GOOD.replace(old, new)))


def test_a_function_that_is_not_in_its_module_is_named_before_spark_starts(tmp_path: Path) -> None:
    (tmp_path / "scores.py").write_text("def running_score(rows):\n    return rows\n")
    text = GOOD.replace("sinks:", "steps:\n  - {name: s, python: 'scores:runing_score', from: a}\nsinks:")
    assert any("did you mean running_score?" in line for line in complaints(tmp_path, text))
    (tmp_path / "scores.py").write_text("def running_score(rows:\n")
    assert any("scores.py:1: " in line for line in complaints(tmp_path, text))


def test_a_delta_sink_whose_jar_is_named_brings_its_settings(tmp_path: Path) -> None:
    config = "spark: {config: {spark.jars.packages: 'io.delta:delta-spark:4'}}\n"
    job = load(write(tmp_path, config + GOOD.replace("console: true", "delta: out")))
    assert job.sinks[0].label == "delta out"
    assert job.config["spark.sql.extensions"] == "io.delta.sql.DeltaSparkSessionExtension"


def test_avro_schemas_by_id_serve_as_the_schema_of_the_source(tmp_path: Path) -> None:
    (tmp_path / "schemas").mkdir()
    schema = '{"type": "record", "name": "O", "fields": [{"name": "id", "type": "long"}%s]}'
    (tmp_path / "schemas" / "3.avsc").write_text(schema % "")
    (tmp_path / "schemas" / "12.avsc").write_text(
        schema % ', {"name": "to", "type": "string", "default": ""}'
    )
    text = GOOD.replace(
        "topic: t", "topic: t\n    decode: {format: avro, schemas: schemas, framing: registry}"
    )
    decoder = load(write(tmp_path, text)).sources[0].decode.decoder
    assert decoder is not None
    assert decoder.columns == {"id": "bigint", "to": "string"}


def test_a_start_is_a_word_a_time_or_offsets() -> None:
    assert starting_options("starting", "latest") == {"startingOffsets": "latest"}
    assert starting_options("ending", '{"t":{"0":5}}') == {"endingOffsets": '{"t":{"0":5}}'}
    assert starting_options("ending", "1970-01-01T00:00:01Z") == {"endingTimestamp": "1000"}
    assert starting_options("starting", "1970-01-01T02:00:00+02:00")["startingTimestamp"] == "0"


def test_all_mistakes_are_named_at_once(tmp_path: Path) -> None:
    text = GOOD.replace("topic: t", "topci: t").replace("from: a", "from: b")
    assert len(complaints(tmp_path, text)) >= 3


def test_the_command_checks_a_file_and_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new.yaml"
    assert main(["pipeline", "init", str(path)]) == 0
    assert main(["pipeline", "check", str(path)]) == 0
    assert "1 sources, 1 steps, 1 sinks: good" in capsys.readouterr().out
    assert main(["pipeline", "init", str(path)]) == 1
    path.write_text(path.read_text().replace("sinks:", "snks:"))
    assert main(["pipeline", "check", str(path)]) == 1
    assert "did you mean sinks?" in capsys.readouterr().err
