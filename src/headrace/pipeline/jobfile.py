"""The pipeline file: one YAML file that says what flows from where to where.

Owns its form and the check of it. Invariant: what `load` returns can be run as far as the file alone can tell, and
every complaint names file, line and, for a misspelt word, the nearest right one; nothing of Spark is needed for that.
Called by the command line and by `runner`.
"""

import ast
import importlib.util
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from headrace.pipeline.ddl import SchemaError, columns
from headrace.pipeline.decode import Decoder
from headrace.pipeline.job import (
    BY_DECODER,
    BY_SCHEMA,
    DECODERS,
    DEFAULT_BOOTSTRAP,
    DEFAULT_MASTER,
    DELIVERIES,
    DELTA_CONFIG,
    FILE_FORMATS,
    FRAMINGS,
    KEPT,
    OUTPUT_MODES,
    RECORD_COLUMNS,
    SINK_KINDS,
    UNITS,
    Decode,
    Job,
    SinkSpec,
    SourceSpec,
    Step,
)
from headrace.pipeline.nodes import FileError, Nodes, compose, hint, line_of
from headrace.pipeline.options import SINK_WORDS, SOURCE_OPTIONS, OptionError, parse_source_options
from headrace.pipeline.schemas import schemas_by_id
from headrace.pipeline.sqltext import mistake_in, views_read

_TOP = (
    "name",
    "bootstrap",
    "kafka",
    "spark",
    "sources",
    "steps",
    "sinks",
    "trigger",
    "checkpoint",
    "dead_letters",
)
_SPARK = ("master", "config")
_SOURCE = ("topic", "pattern", "files", "format", "schema", "options", "from", "decode", "watermark")
_DECODE = ("format", "schema", "schemas", "message", "framing", "keep")
_WATERMARK = ("column", "delay")
_STEP = ("name", "sql", "python", "dedup", "from")
_SINK = (*SINK_KINDS, "from", "key", "value", "mode", "delivery", "partition_by", "options")
_TRIGGER = ("every", "available_now")
_MASTERS = re.compile(r"local(\[.+\])?|(spark|sc|k8s)://.+|yarn")


def load(path: Path) -> Job:
    """Read and check a file. Raises FileError."""
    return _Check(path).job(compose(path))


def starting_options(side: str, text: str) -> dict[str, str]:
    """`earliest`, `latest`, a time or offsets in JSON as options of a source. Raises ValueError."""
    if text in ("earliest", "latest") or text.lstrip().startswith("{"):
        return {f"{side}Offsets": text}
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"expected earliest, latest, a time like 2026-01-31T12:00:00Z or JSON offsets, got '{text}'"
        ) from None
    when = when if when.tzinfo is not None else when.replace(tzinfo=UTC)
    more = {"startingOffsetsByTimestampStrategy": "latest"} if side == "starting" else {}
    return {f"{side}Timestamp": str(int(when.timestamp() * 1000)), **more}


class _Check(Nodes):
    """Walks the nodes of the file."""

    def job(self, root: Any) -> Job:
        top = self.mapping(root, _TOP, "a pipeline")
        spark = self.mapping(top.get("spark"), _SPARK, "spark")
        config = self.texts(spark.get("config"), "spark.config")
        bootstrap = self.text(top.get("bootstrap")) or DEFAULT_BOOTSTRAP
        sources = tuple(
            self._source(name, node, bootstrap) for name, node in self.entries(top.get("sources"), "sources")
        )
        if not any(source.subscription for source in sources):
            self.complain(root, "no sources: name at least one topic to read")
        known = [source.name for source in sources]
        steps = tuple(self._step(node, known) for node in self.items(top.get("steps"), "steps"))
        sinks = tuple(self._sink(node, known, config) for node in self.items(top.get("sinks"), "sinks"))
        if not sinks:
            self.complain(root, "no sinks: say where the result goes")
        every = self._trigger(top.get("trigger"))
        master = self.text(spark.get("master")) or DEFAULT_MASTER
        if _MASTERS.fullmatch(master) is None:
            self.complain(
                spark.get("master"),
                f"no master '{master}': local[*], spark://host:7077, sc://host:15002, yarn, k8s://…",
            )
        if any(sink.kind == "delta" for sink in sinks):
            config = {**DELTA_CONFIG, **config}
        job = Job(
            path=self.path,
            name=self._name(top.get("name")),
            bootstrap=bootstrap,
            kafka=self.texts(top.get("kafka"), "kafka"),
            master=master,
            config=config,
            sources=sources,
            steps=steps,
            sinks=sinks,
            every=every,
            checkpoint=self.text(top.get("checkpoint")) or f".headrace/checkpoints/{self.path.stem}",
            dead_letters=self.text(top.get("dead_letters")),
        )
        if self.complaints:
            raise FileError(self.by_line())
        return job

    # -- the parts --------------------------------------------------------------------------------------------------

    def _name(self, node: Any) -> str:
        name = self.text(node) or self.path.stem
        if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
            self.complain(node, f"the name '{name}' may have letters, digits, '.', '_' and '-'")
        return name

    def _source(self, name: str, node: Any, bootstrap: str) -> SourceSpec:
        found = self.mapping(node, _SOURCE, f"source '{name}'")
        topic, pattern = self.text(found.get("topic")), self.text(found.get("pattern"))
        files = self.text(found.get("files"))
        if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is None:
            self.complain(node, f"'{name}' cannot be a view in SQL: use letters, digits and '_'")
        if sum(given is not None for given in (topic, pattern, files)) != 1:
            self.complain(node, f"source '{name}' needs either topic, pattern or files")
        if files is not None:
            for word in ("decode", "watermark", "options", "from"):
                if word in found:
                    self.complain(found[word], f"source '{name}' reads files: {word} is for topics")
            if "format" not in found:
                self.complain(
                    node, f"source '{name}' reads files: say their format ({', '.join(FILE_FORMATS)})"
                )
        elif "format" in found or "schema" in found:
            self.complain(node, f"source '{name}' reads a topic: format and schema belong into its decode")
        schema = self.text(found.get("schema"))
        if schema is not None:
            self._columns(found["schema"], schema)
        decode, decoded = self._decode(name, found.get("decode"))
        spec = SourceSpec(
            name=name,
            line=line_of(node),
            topic=topic,
            pattern=pattern,
            files=files,
            format=self.choice(found.get("format"), FILE_FORMATS, "parquet"),
            schema=schema,
            starting=self._starting(found.get("from")),
            decode=decode,
            watermark=self._watermark(found.get("watermark"), decoded),
            options=self._options(found.get("options"), SOURCE_OPTIONS),
        )
        if spec.subscription and not self.complaints:
            self._agree(node, spec, bootstrap)
        return spec

    def _agree(self, node: Any, spec: SourceSpec, bootstrap: str) -> None:
        """The source's own check of its options, which knows those that exclude each other."""
        for word in spec.options:
            if word.lower() in ("subscribe", "subscribepattern", "assign"):
                self.complain(node, f"source '{spec.name}': {word} is said by topic or pattern already")
                return
        try:
            given = {
                "kafka.bootstrap.servers": bootstrap,
                **spec.subscription,
                **spec.starting,
                **spec.options,
            }
            parse_source_options(given, streaming=True)
        except OptionError as error:
            self.complain(node, f"source '{spec.name}': {error}")

    def _starting(self, node: Any) -> dict[str, str]:
        try:
            return starting_options("starting", self.text(node) or "earliest")
        except ValueError as error:
            self.complain(node, str(error))
            return {}

    def _decode(self, source: str, node: Any) -> tuple[Decode, dict[str, str]]:
        found = self.mapping(node, _DECODE, "decode")
        kind = self.choice(found.get("format"), DECODERS, "raw")
        framed = self.choice(found.get("framing"), FRAMINGS, "none") == "registry"
        schema = self.text(found.get("schema"))
        keep = self.names(found.get("keep"))
        for name in keep:
            if name not in KEPT:
                self.complain(found["keep"], f"a record has no '{name}' to keep: {hint(name, KEPT)}")
        unwanted = {"schemas": ("avro",), "message": ("protobuf",), "keep": (*BY_SCHEMA, *BY_DECODER)}
        unwanted |= {"framing": ("json", *BY_DECODER), "schema": (*BY_SCHEMA, *BY_DECODER)}
        for word, formats in unwanted.items():
            if word in found and kind not in formats:
                self.complain(found[word], f"{word} is for {', '.join(formats)}, not for {kind}")
        given = {name: dict(RECORD_COLUMNS)[name] for name in keep if name in RECORD_COLUMNS}
        if kind in BY_SCHEMA:
            if schema is None:
                self.complain(
                    node, f"source '{source}' decodes {kind}: give its schema, as in 'id bigint, name string'"
                )
                return Decode(kind), {}
            read = self._columns(found["schema"], schema)
            return Decode(kind, schema, framed, None, keep), {**read, **given}
        if kind in BY_DECODER:
            decoder = self._decoder(node, kind, found, framed)
            if decoder is None:
                return Decode(kind), {}
            return Decode(kind, None, framed, decoder, keep), {**decoder.columns, **given}
        return Decode(kind), dict(RECORD_COLUMNS)

    def _decoder(self, node: Any, kind: str, found: dict[str, Any], framed: bool) -> Decoder | None:
        where = found.get("schema", node)
        try:
            message = self.text(found.get("message")) or ""
            if kind == "protobuf" and not message:
                raise SchemaError("protobuf needs message: its full name, as in shop.Order")
            writers = (
                schemas_by_id(self._beside(directory))
                if (directory := self.text(found.get("schemas")))
                else {}
            )
            if writers and not framed:
                raise SchemaError("schemas by id are named by the framing: add 'framing: registry'")
            decoder = Decoder(kind, self._schema_text(found.get("schema"), writers), framed, message, writers)
            if not self.complaints:
                return decoder if decoder.columns else None
        except (SchemaError, OSError) as error:
            self.complain(where, f"decode {kind}: {error}")
        return None

    def _schema_text(self, node: Any, writers: Mapping[int, str]) -> bytes:
        """A schema in the file itself or in one that it names; else the newest of those with an id."""
        text = self.text(node)
        if text is None:
            if not writers:
                raise SchemaError("give its schema: a file beside this one, or the text of it")
            return writers[max(writers)].encode()
        if text.lstrip().startswith(("{", "[")):
            return text.encode()
        path = self._beside(text)
        if not path.is_file():
            near = [other.name for other in path.parent.glob("*")] if path.parent.is_dir() else []
            raise SchemaError(f"no file {path}: {hint(path.name, near, 'is the path right?')}")
        return path.read_bytes()

    def _beside(self, name: str) -> Path:
        return self.path.parent / name

    def _columns(self, node: Any, schema: str) -> dict[str, str]:
        try:
            return columns(schema)
        except SchemaError as error:
            self.complain(node, f"schema: {error}")
            return {}

    def _watermark(self, node: Any, known: Mapping[str, str]) -> tuple[str, str] | None:
        found = self.mapping(node, _WATERMARK, "watermark")
        column, delay = self.text(found.get("column")), self._interval(found.get("delay"))
        if node is not None and not {"column", "delay"} <= found.keys():
            self.complain(node, "a watermark needs column and delay, as in {column: at, delay: 10 seconds}")
        if column is not None and known:
            if column not in known:
                self.complain(found["column"], f"no column '{column}': {hint(column, known)}")
            elif not known[column].startswith("timestamp"):
                self.complain(
                    found["column"], f"a watermark wants a timestamp, and {column} is {known[column]}"
                )
        return (column, delay) if column and delay else None

    def _interval(self, node: Any) -> str | None:
        text = self.text(node)
        if text is None:
            return None
        words = text.lower().split()
        for number, unit in zip(words[::2], words[1::2]):
            if not number.isdigit():
                break
            if unit.removesuffix("s") not in UNITS:
                self.complain(node, f"no unit '{unit}' of time: {hint(unit, [u + 's' for u in UNITS])}")
                return None
        else:
            if words and len(words) % 2 == 0:
                return text
        self.complain(node, f"expected a time like '10 seconds', got '{text}'")
        return None

    def _step(self, node: Any, known: list[str]) -> Step:
        found = self.mapping(node, _STEP, "a step")
        name = self.text(found.get("name")) or ""
        sql, python = self.text(found.get("sql")), self.text(found.get("python"))
        dedup = self.names(found.get("dedup"))
        if not name:
            self.complain(node, "a step needs a name")
        elif re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is None:
            self.complain(node, f"'{name}' cannot be a view in SQL: use letters, digits and '_'")
        elif name in known:
            self.complain(node, f"there is a source or step '{name}' already")
        if sum(word in found for word in ("sql", "python", "dedup")) != 1:
            self.complain(node, f"step '{name}' needs either sql, python or dedup")
        if sql is not None:
            self._sql(found["sql"], sql, known)
        if python is not None:
            self._function(found["python"], python)
        views = self.names(found.get("from"))
        for view in views:
            self._view(found["from"], view, known)
        if sql is not None and views:
            self.complain(found["from"], f"step '{name}' says in its SQL what it reads: leave from out")
        if sql is None and not views:
            self.complain(node, f"step '{name}' needs from: the view that it is given")
        if dedup and len(views) > 1:
            self.complain(found["from"], f"step '{name}': dedup is of one view")
        known.append(name)
        return Step(name, line_of(found.get("sql", node)), sql, python, dedup, views)

    def _sql(self, node: Any, sql: str, known: list[str]) -> None:
        literal = isinstance(node, yaml.ScalarNode) and node.style == "|"

        def say(line: int, what: str) -> None:
            self.complaints.append(f"{self.path}:{line_of(node) + (line if literal else 0)}: {what}")

        mistake = mistake_in(sql)
        if mistake is not None:
            say(mistake.line, f"SQL: {mistake.what}")
            return
        lower = {name.lower() for name in known}
        for view, line in views_read(sql):
            if view.lower() not in lower:
                say(line, f"no source or step '{view}' before this: {hint(view, known)}")

    def _function(self, node: Any, text: str) -> None:
        module, colon, function = text.partition(":")
        if not (module and colon and function.isidentifier()):
            self.complain(node, "a python step is named module:function")
            return
        path = self.path.parent.joinpath(*module.split(".")).with_suffix(".py")
        if not path.is_file():
            try:
                spec = importlib.util.find_spec(module)
            except (ImportError, ValueError):
                spec = None
            if spec is None:
                near = [other.stem for other in path.parent.glob("*.py")] if path.parent.is_dir() else []
                self.complain(node, f"no module '{module}' beside this file: {hint(module, near)}")
            return
        try:
            tree = ast.parse(path.read_text())
        except SyntaxError as error:
            self.complain(node, f"{path}:{error.lineno}: {error.msg}")
            return
        names = [part.name for part in tree.body if isinstance(part, ast.FunctionDef)]
        bound = {name.id for part in ast.walk(tree) if isinstance(part, ast.Assign) for name in part.targets
                 if isinstance(name, ast.Name)}  # fmt: skip
        bound |= {
            a.asname or a.name
            for part in ast.walk(tree)
            if isinstance(part, ast.ImportFrom)
            for a in part.names
        }
        if function not in names and function not in bound:
            self.complain(node, f"{path} has no function '{function}': {hint(function, names)}")

    def _sink(self, node: Any, known: list[str], config: Mapping[str, str]) -> SinkSpec:
        found = self.mapping(node, _SINK, "a sink")
        kinds = [word for word in SINK_KINDS if word in found]
        if len(kinds) != 1:
            self.complain(node, f"a sink is one of {', '.join(SINK_KINDS)}")
        kind = kinds[0] if kinds else "console"
        view = self.text(found.get("from"))
        if view is None:
            self.complain(node, "a sink needs from: the view that is written")
        else:
            self._view(found["from"], view, known)
        for word in ("key", "value", "delivery"):
            if word in found and kind != "topic":
                self.complain(found[word], f"{word} is for a sink that is a topic")
        if "partition_by" in found and kind not in ("parquet", "delta"):
            self.complain(found["partition_by"], "partition_by is for parquet and delta")
        mode = self.choice(found.get("mode"), OUTPUT_MODES, "append")
        if kind == "parquet" and mode != "append":
            self.complain(
                found["mode"], "files can only be appended to: with a window, give its source a watermark"
            )
        if kind == "delta":
            jars = " ".join(value for name, value in config.items() if name.startswith("spark.jars"))
            if "delta" not in jars.lower():
                self.complain(
                    node,
                    "a delta sink needs Delta's jar: name it in spark.config as spark.jars or spark.jars.packages",
                )
        if kind == "console" and not self.flag(found.get("console")):
            self.complain(node, "write 'console: true', or leave the sink out")
        return SinkSpec(
            source=view or "",
            line=line_of(node),
            kind=kind,
            to=(self.text(found.get(kind)) or "") if kind != "console" else "",
            key=self.text(found.get("key")),
            value=self.text(found.get("value")) or "json",
            mode=mode,
            delivery=self.choice(found.get("delivery"), DELIVERIES, "exactly_once"),
            partition_by=self.names(found.get("partition_by")),
            options=self._options(found.get("options"), SINK_WORDS if kind == "topic" else None),
        )

    def _trigger(self, node: Any) -> str | None:
        found = self.mapping(node, _TRIGGER, "trigger")
        every, now = self._interval(found.get("every")), self.flag(found.get("available_now"))
        if every and now:
            self.complain(node, "a trigger is every or available_now, not both")
        return None if now else every or "1 second"

    def _view(self, node: Any, name: str, known: list[str]) -> None:
        if name not in known:
            self.complain(node, f"no source or step '{name}' before this: {hint(name, known)}")

    def _options(self, node: Any, words: tuple[str, ...] | None) -> dict[str, str]:
        """Options by name; with `words`, only those and Kafka's own."""
        found = {}
        for name, value in self.entries(node, "options"):
            known = words is None or name.lower() in {word.lower() for word in words}
            if not known and not name.lower().startswith("kafka."):
                near = hint(name, words or (), "options are those of the format and kafka.*")
                self.complain(value, f"no option '{name}': {near}")
            found[name] = self.text(value) or ""
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
