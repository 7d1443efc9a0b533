"""The pipeline file: one YAML file that says what flows from where to where.

Owns its form and the check of it. Invariant: what `load` returns can be run as far as the file alone can tell, and
every complaint names file, line and, for a misspelt word, the nearest right one; nothing of Spark is needed for that.
Called by the command line and by `runner`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from headrace.pipeline.options import SINK_WORDS, SOURCE_OPTIONS

DECODERS = ("json", "csv", "string", "raw")
FILE_FORMATS = ("csv", "json", "parquet")
OUTPUT_MODES = ("append", "update", "complete")
DELIVERIES = ("exactly_once", "at_least_once")

_TOP = ("name", "bootstrap", "spark", "sources", "steps", "sinks", "trigger", "checkpoint", "dead_letters")
_SPARK = ("master", "config")
_SOURCE = ("topic", "files", "format", "schema", "options", "from", "decode", "watermark")
_DECODE = ("format", "schema")
_WATERMARK = ("column", "delay")
_STEP = ("name", "sql", "python", "from")
_SINK = ("from", "topic", "key", "value", "parquet", "console", "mode", "delivery", "options")
_TRIGGER = ("every", "available_now")


class FileError(Exception):
    """The file is wrong in one or more places; each complaint is a line of its own."""

    def __init__(self, complaints: list[str]) -> None:
        super().__init__("\n".join(complaints))
        self.complaints = complaints


@dataclass(frozen=True)
class Decode:
    """How the value of a record becomes columns."""

    format: str = "raw"
    schema: str | None = None


@dataclass(frozen=True)
class SourceSpec:
    """A topic, or files to join with."""

    name: str
    topic: str | None
    files: str | None
    format: str | None
    schema: str | None
    starting: str
    decode: Decode
    watermark: tuple[str, str] | None
    options: Mapping[str, str]


@dataclass(frozen=True)
class Step:
    """A new view made of others, by SQL or by a Python function."""

    name: str
    sql: str | None
    python: str | None
    source: str | None


@dataclass(frozen=True)
class SinkSpec:
    """Where a view goes."""

    source: str
    topic: str | None
    key: str | None
    value: str
    parquet: str | None
    console: bool
    mode: str
    delivery: str
    options: Mapping[str, str]

    @property
    def label(self) -> str:
        return (
            f"topic {self.topic}" if self.topic else f"parquet {self.parquet}" if self.parquet else "console"
        )


@dataclass(frozen=True)
class Job:
    """A pipeline file, checked."""

    path: Path
    name: str
    bootstrap: str
    master: str
    config: Mapping[str, str]
    sources: tuple[SourceSpec, ...]
    steps: tuple[Step, ...]
    sinks: tuple[SinkSpec, ...]
    every: str | None
    checkpoint: str
    dead_letters: str | None


def load(path: Path) -> Job:
    """Read and check a file. Raises FileError."""
    try:
        text = path.read_text()
    except OSError as error:
        raise FileError([f"{path}: {error.strerror}"]) from None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = mark.line + 1 if mark is not None else 1
        raise FileError([f"{path}:{line}: no YAML: {error.problem}"]) from None
    return _Check(path).job(root)


@dataclass
class _Check:
    """Walks the nodes of the file, which know their lines."""

    path: Path
    complaints: list[str] = field(default_factory=list)

    def job(self, root: Any) -> Job:
        top = self._mapping(root, _TOP, "a pipeline")
        spark = self._mapping(top.get("spark"), _SPARK, "spark")
        sources = tuple(
            self._source(name, node) for name, node in self._entries(top.get("sources"), "sources")
        )
        if not sources:
            self._complain(root, "no sources: name at least one topic to read")
        known = [source.name for source in sources]
        steps = tuple(self._step(node, known) for node in self._items(top.get("steps"), "steps"))
        sinks = tuple(self._sink(node, known) for node in self._items(top.get("sinks"), "sinks"))
        if not sinks:
            self._complain(root, "no sinks: say where the result goes")
        every = self._trigger(top.get("trigger"))
        job = Job(
            path=self.path,
            name=self._text(top.get("name")) or self.path.stem,
            bootstrap=self._text(top.get("bootstrap")) or "127.0.0.1:9092",
            master=self._text(spark.get("master")) or "local[*]",
            config=self._texts(spark.get("config"), "spark.config"),
            sources=sources,
            steps=steps,
            sinks=sinks,
            every=every,
            checkpoint=self._text(top.get("checkpoint")) or f".headrace/checkpoints/{self.path.stem}",
            dead_letters=self._text(top.get("dead_letters")),
        )
        if self.complaints:
            raise FileError(self.complaints)
        return job

    # -- the parts --------------------------------------------------------------------------------------------------

    def _source(self, name: str, node: Any) -> SourceSpec:
        found = self._mapping(node, _SOURCE, f"source '{name}'")
        topic, files = self._text(found.get("topic")), self._text(found.get("files"))
        if (topic is None) == (files is None):
            self._complain(node, f"source '{name}' needs either topic or files")
        if files is not None and self._text(found.get("format")) is None:
            self._complain(node, f"source '{name}' reads files: say their format ({', '.join(FILE_FORMATS)})")
        decode = self._mapping(found.get("decode"), _DECODE, "decode")
        kind = self._choice(decode.get("format"), DECODERS, "raw")
        if kind in ("json", "csv") and "schema" not in decode:
            self._complain(
                node, f"source '{name}' decodes {kind}: give its schema, as in 'id bigint, name string'"
            )
        watermark = self._mapping(found.get("watermark"), _WATERMARK, "watermark")
        column, delay = self._text(watermark.get("column")), self._text(watermark.get("delay"))
        if watermark and (column is None or delay is None):
            self._complain(found["watermark"], "a watermark needs column and delay")
        return SourceSpec(
            name=name,
            topic=topic,
            files=files,
            format=self._choice(found.get("format"), FILE_FORMATS, None),
            schema=self._text(found.get("schema")),
            starting=self._text(found.get("from")) or "earliest",
            decode=Decode(kind or "raw", self._text(decode.get("schema"))),
            watermark=(column, delay) if column and delay else None,
            options=self._options(found.get("options"), SOURCE_OPTIONS),
        )

    def _step(self, node: Any, known: list[str]) -> Step:
        found = self._mapping(node, _STEP, "a step")
        name = self._text(found.get("name"))
        sql, python = self._text(found.get("sql")), self._text(found.get("python"))
        if name is None:
            self._complain(node, "a step needs a name")
        if (sql is None) == (python is None):
            self._complain(node, f"step '{name}' needs either sql or python")
        if python is not None and ":" not in python:
            self._complain(found["python"], "a python step is named module:function")
        source = self._view(found.get("from"), known)
        if python is not None and "from" not in found:
            self._complain(node, f"step '{name}' needs from: the view that the function is given")
        known.append(name or "")
        return Step(name or "", sql, python, source)

    def _sink(self, node: Any, known: list[str]) -> SinkSpec:
        found = self._mapping(node, _SINK, "a sink")
        if sum(word in found for word in ("topic", "parquet", "console")) != 1:
            self._complain(node, "a sink is one of topic, parquet or console")
        source = self._view(found.get("from"), known)
        if "from" not in found:
            self._complain(node, "a sink needs from: the view that is written")
        return SinkSpec(
            source=source or "",
            topic=self._text(found.get("topic")),
            key=self._text(found.get("key")),
            value=self._text(found.get("value")) or "json",
            parquet=self._text(found.get("parquet")),
            console=(self._text(found.get("console")) or "false").lower() == "true",
            mode=self._choice(found.get("mode"), OUTPUT_MODES, "append") or "append",
            delivery=self._choice(found.get("delivery"), DELIVERIES, "exactly_once") or "exactly_once",
            options=self._options(found.get("options"), SINK_WORDS),
        )

    def _trigger(self, node: Any) -> str | None:
        found = self._mapping(node, _TRIGGER, "trigger")
        every = self._text(found.get("every"))
        now = (self._text(found.get("available_now")) or "false").lower() == "true"
        if every and now:
            self._complain(node, "a trigger is every or available_now, not both")
        return None if now else every or "1 second"

    # -- nodes ------------------------------------------------------------------------------------------------------

    def _complain(self, node: Any, what: str) -> None:
        line = node.start_mark.line + 1 if node is not None else 1
        self.complaints.append(f"{self.path}:{line}: {what}")

    def _entries(self, node: Any, what: str) -> list[tuple[str, Any]]:
        if node is None:
            return []
        if not isinstance(node, yaml.MappingNode):
            self._complain(node, f"{what} is a mapping of names")
            return []
        return [(key.value, value) for key, value in node.value]

    def _items(self, node: Any, what: str) -> list[Any]:
        if node is None:
            return []
        if not isinstance(node, yaml.SequenceNode):
            self._complain(node, f"{what} is a list")
            return []
        return list(node.value)

    def _mapping(self, node: Any, words: tuple[str, ...], what: str) -> dict[str, Any]:
        found = {}
        for name, value in self._entries(node, what):
            if name in words:
                found[name] = value
            else:
                near = get_close_matches(name, words, n=1, cutoff=0.5)
                hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(words)}"
                self._complain(value, f"{what} has no '{name}': {hint}")
        return found

    def _text(self, node: Any) -> str | None:
        if node is None:
            return None
        if not isinstance(node, yaml.ScalarNode):
            self._complain(node, "expected a single value here")
            return None
        return str(node.value)

    def _texts(self, node: Any, what: str) -> dict[str, str]:
        return {name: self._text(value) or "" for name, value in self._entries(node, what)}

    def _choice(self, node: Any, words: tuple[str, ...], default: str | None) -> str | None:
        text = self._text(node)
        if text is None or text in words:
            return text or default
        near = get_close_matches(text, words, n=1, cutoff=0.5)
        self._complain(
            node, f"'{text}' is none of {', '.join(words)}" + (f": did you mean {near[0]}?" if near else "")
        )
        return default

    def _view(self, node: Any, known: list[str]) -> str | None:
        name = self._text(node)
        if name is not None and name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            self._complain(node, f"no source or step '{name}' before this: {hint}")
        return name

    def _options(self, node: Any, words: tuple[str, ...]) -> dict[str, str]:
        lower = {word.lower(): word for word in words}
        found = {}
        for name, value in self._entries(node, "options"):
            if name.lower() not in lower and not name.lower().startswith("kafka."):
                near = get_close_matches(name.lower(), lower, n=1, cutoff=0.5)
                hint = (
                    f"did you mean {lower[near[0]]}?"
                    if near
                    else "options are those of the format and kafka.*"
                )
                self._complain(value, f"no option '{name}': {hint}")
            found[name] = self._text(value) or ""
        return found


TEMPLATE = """\
# A pipeline: headrace pipeline check FILE, then headrace pipeline run FILE
name: {name}
bootstrap: 127.0.0.1:9092
spark:
  master: local[2]
sources:
  orders:
    topic: orders
    from: earliest
    decode:
      format: json
      schema: id bigint, customer string, amount double, at timestamp
    watermark:
      column: at
      delay: 10 seconds
steps:
  - name: totals
    sql: >
      SELECT window.start AS start, customer, sum(amount) AS total
      FROM orders GROUP BY window(at, '1 minute'), customer
sinks:
  - from: totals
    topic: totals
    key: customer
trigger:
  every: 5 seconds
checkpoint: .headrace/checkpoints/{name}
dead_letters: orders.dead
"""
