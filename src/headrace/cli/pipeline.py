"""`headrace pipeline init|check|run|stop|list|redrive`: pipelines on Spark, declared in one file.

Owns the way from the command line to `headrace.pipeline`. Invariant: what needs Spark is imported when it is needed, so
that `check`, `list`, `stop` and `redrive` work where there is none. How a run is shown is in `pipeline_view`.
"""

import argparse
import json
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headrace.cli.options import run as run_loop
from headrace.cli.output import print_table
from headrace.cli.parser import CommandError, Parser, UsageError, subcommands, whole_number

DESCRIPTION = "Run pipelines on Spark: topics in, SQL or Python, topics and files out."
EXAMPLE = """\
example:
  headrace pipeline init totals.yaml
  headrace pipeline check totals.yaml
  headrace pipeline run totals.yaml
  headrace pipeline run totals.yaml --backfill --from 2026-01-01T00:00:00"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the actions."""
    actions = subcommands(parser)
    init = _action(
        actions,
        "init",
        "write a pipeline file to begin with",
        init_file,
        "headrace pipeline init totals.yaml",
    )
    init.add_argument("file", metavar="FILE", type=Path)
    check = _action(
        actions,
        "check",
        "find mistakes in a pipeline file, without Spark",
        check_file,
        "headrace pipeline check totals.yaml",
    )
    check.add_argument("file", metavar="FILE", type=Path)
    check.add_argument(
        "--spark", action="store_true", help="also let Spark judge the SQL and the columns; nothing is read"
    )
    start = _action(
        actions, "run", "run a pipeline until it is stopped", run_file, "headrace pipeline run totals.yaml"
    )
    start.add_argument("file", metavar="FILE", type=Path)
    start.add_argument(
        "-b", "--bootstrap", metavar="HOST:PORT,…", help="brokers, instead of those in the file"
    )
    start.add_argument("--master", metavar="URL", help="Spark's master, instead of the one in the file")
    start.add_argument("--backfill", action="store_true", help="once, as a batch, over a part of the topics")
    start.add_argument(
        "--from", dest="begin", metavar="WHEN", help="where a backfill begins: a time or JSON offsets"
    )
    start.add_argument(
        "--to", dest="end", metavar="WHEN", help="where a backfill ends: a time or JSON offsets"
    )
    start.add_argument(
        "--json", action="store_true", help="progress as JSON lines, as where there is no terminal"
    )
    start.add_argument(
        "--metrics-port",
        metavar="PORT",
        type=whole_number(0, 65535),
        help="serve Prometheus metrics on 127.0.0.1; 0 picks a port",
    )
    start.add_argument(
        "--metrics-file",
        metavar="FILE",
        type=Path,
        help="keep Prometheus metrics in a file, for a node exporter",
    )
    stop = _action(
        actions, "stop", "stop a pipeline after its batch", stop_one, "headrace pipeline stop totals"
    )
    stop.add_argument("name", metavar="NAME", help="the pipeline's name, or its file")
    listed = _action(
        actions, "list", "pipelines that run from this directory", list_all, "headrace pipeline list"
    )
    listed.add_argument("--json", action="store_true", help="as JSON")
    again = _action(
        actions,
        "redrive",
        "send dead letters again to where they came from",
        redrive_file,
        "headrace pipeline redrive totals.yaml",
    )
    again.add_argument("file", metavar="FILE", type=Path)
    again.add_argument(
        "-b", "--bootstrap", metavar="HOST:PORT,…", help="brokers, instead of those in the file"
    )


def _action(actions: Any, name: str, summary: str, handler: Any, example: str) -> Parser:
    parser: Parser = actions.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"example:\n  {example}",
    )
    parser.set_defaults(run=handler)
    return parser


def init_file(options: argparse.Namespace) -> int:
    """Write the template."""
    from headrace.pipeline.jobfile import TEMPLATE

    path: Path = options.file
    if path.exists():
        raise CommandError(f"{path} is there already; choose another name")
    path.write_text(TEMPLATE.format(name=path.stem))
    print(f"wrote {path}; next: headrace pipeline check {path}")
    return 0


def check_file(options: argparse.Namespace) -> int:
    """Check, and say what the file does."""
    job = _load(options.file)
    if options.spark:
        _need_spark(job.master)
        from headrace.pipeline.plan import PlanError
        from headrace.pipeline.runner import RunError, check_plan

        try:
            check_plan(job)
        except (PlanError, RunError) as error:
            raise CommandError(str(error)) from None
    print(f"{options.file}: {len(job.sources)} sources, {len(job.steps)} steps, {len(job.sinks)} sinks: good")
    return 0


def run_file(options: argparse.Namespace) -> int:
    """Run it, in the foreground."""
    if not options.backfill and (options.begin or options.end):
        raise UsageError("--from and --to are for --backfill; a stream goes on where its checkpoint is")
    bounds = (_bound("starting", options.begin), _bound("ending", options.end))
    job = _load(options.file)
    job = replace(job, bootstrap=options.bootstrap or job.bootstrap, master=options.master or job.master)
    _need_spark(job.master)
    from headrace.cli.pipeline_view import Reporter
    from headrace.pipeline.plan import Bounds, PlanError
    from headrace.pipeline.preflight import PreflightError
    from headrace.pipeline.runner import RunError, run_batch, run_stream

    as_json = options.json or not sys.stdout.isatty()
    with Reporter(as_json=as_json, metrics_file=options.metrics_file) as reporter:
        if options.metrics_port is not None:
            reporter.serve(options.metrics_port)
        try:
            if options.backfill:
                run_batch(job, Bounds(*bounds), reporter.report)
            else:
                run_stream(job, reporter.report)
        except (PlanError, PreflightError, RunError) as error:
            raise CommandError(str(error)) from None
    return 0


def stop_one(options: argparse.Namespace) -> int:
    """Ask a run to stop."""
    from headrace.pipeline.runs import stop

    name = Path(options.name).stem if options.name.endswith((".yaml", ".yml")) else options.name
    state = stop(name)
    if state is None:
        raise CommandError(
            f"no pipeline '{name}' runs from this directory; headrace pipeline list shows those that do"
        )
    print(f"{name} (process {state.pid}) stops after its batch")
    return 0


def list_all(options: argparse.Namespace) -> int:
    """The runs of this directory."""
    from headrace.pipeline.runs import running

    found = [
        (
            s.name,
            s.pid,
            s.file,
            datetime.fromtimestamp(s.started_ms / 1000, UTC).isoformat(timespec="seconds"),
        )
        for s in running()
    ]
    columns = ("name", "process", "file", "since")
    if options.json:
        print(json.dumps([dict(zip(columns, row)) for row in found]))
    else:
        print_table(columns, found)
    return 0


def redrive_file(options: argparse.Namespace) -> int:
    """Send dead letters again."""
    from headrace.pipeline.redrive import redrive

    job = _load(options.file)
    if job.dead_letters is None:
        raise CommandError(f"{options.file} names no topic for dead letters")
    config = {"bootstrap.servers": options.bootstrap or job.bootstrap, **job.kafka}
    sent = run_loop(redrive(config, job.dead_letters))
    for topic, count in sorted(sent.items()):
        print(f"{count} to {topic}")
    print(f"{sum(sent.values())} dead letters of {job.dead_letters} sent again")
    return 0


def _load(path: Path) -> Any:
    try:
        from headrace.pipeline.jobfile import load
        from headrace.pipeline.nodes import FileError
    except ImportError:
        raise CommandError("pipelines need PyYAML and pyarrow: pip install 'headrace[spark]'") from None
    try:
        return load(path)
    except FileError as error:
        raise CommandError(str(error)) from None


def _need_spark(master: str) -> None:
    from headrace.pipeline.environment import NotReady, check_spark

    try:
        check_spark(master)
    except NotReady as error:
        raise CommandError(str(error)) from None


def _bound(side: str, text: str | None) -> dict[str, str]:
    """A time, or offsets in JSON, as the source's option."""
    from headrace.pipeline.jobfile import starting_options

    try:
        return {} if text is None else starting_options(side, text)
    except ValueError as error:
        raise UsageError(str(error)) from None
