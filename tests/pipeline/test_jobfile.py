"""Pipeline files: what is taken, and how mistakes are named, before Spark starts."""

from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.pipeline.jobfile import TEMPLATE, FileError, load


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
    assert (job.sinks[0].topic, job.sinks[0].delivery, job.every) == ("totals", "exactly_once", "5 seconds")
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
    assert (job.name, job.master, job.sources[0].starting, job.sinks[0].mode) == (
        "job",
        "local[*]",
        "earliest",
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
            "job.yaml:5: a sink is one of topic, parquet or console",
        ),
        ("    topic: t", "    topic: t\n    decode: {format: jsn}", "job.yaml:4: 'jsn' is none of"),
        (
            "    topic: t",
            "    topic: t\n    decode: {format: json}",
            "job.yaml:3: source 'a' decodes json: give its schema",
        ),
        (
            "    topic: t",
            "    topic: t\n    options: {maxOffsetPerTrigger: 5}",
            "did you mean maxOffsetsPerTrigger?",
        ),
        ("    topic: t", "    topic: t\n    files: x", "needs either topic or files"),
        ("    topic: t", "    topic: [t]", "job.yaml:3: expected a single value here"),
        ("sinks:", "steps:\n  - name: s\nsinks:", "step 's' needs either sql or python"),
        ("sinks:", "steps:\n  - {name: s, python: f, from: a}\nsinks:", "module:function"),
        ("    topic: t", "    topic: 't", "no YAML"),
        ("  - from: a\n    console: true", "  []", "no sinks"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in GOOD
    assert any(said in line for line in complaints(tmp_path, GOOD.replace(old, new)))


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
