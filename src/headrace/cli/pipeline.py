"""`headrace pipeline init|check|run|stop|list|redrive`: pipelines on Spark, declared in one file.

Owns the way from the command line to `headrace.pipeline`, and how progress is shown: a line a batch on a terminal, JSON
lines elsewhere, and Prometheus' text on a port when one is given. What needs Spark is imported when it is needed, so
that `check` works where there is none.
"""

import argparse
import json
import shutil
import sys
import threading
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from headrace.cli.options import run as run_loop
from headrace.cli.output import print_table
from headrace.cli.parser import CommandError, Parser, subcommands, whole_number

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
    start = _action(
        actions, "run", "run a pipeline until it is stopped", run_file, "headrace pipeline run totals.yaml"
    )
    start.add_argument("file", metavar="FILE", type=Path)
    start.add_argument("--backfill", action="store_true", help="once, as a batch, over a part of the topics")
    start.add_argument(
        "--from", dest="begin", metavar="WHEN", help="where a backfill begins: a time or JSON offsets"
    )
    start.add_argument("--to", dest="end", metavar="WHEN", help="where it ends: a time or JSON offsets")
    start.add_argument(
        "--json", action="store_true", help="progress as JSON lines, as where there is no terminal"
    )
    start.add_argument(
        "--metrics-port",
        metavar="PORT",
        type=whole_number(0, 65535),
        help="serve Prometheus metrics on 127.0.0.1",
    )
    stop = _action(
        actions, "stop", "stop a pipeline after its batch", stop_one, "headrace pipeline stop totals"
    )
    stop.add_argument("name", metavar="NAME", help="the pipeline's name, or its file")
    _action(actions, "list", "pipelines that run from this directory", list_all, "headrace pipeline list")
    again = _action(
        actions,
        "redrive",
        "send dead letters again to where they came from",
        redrive_file,
        "headrace pipeline redrive totals.yaml",
    )
    again.add_argument("file", metavar="FILE", type=Path)


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
    print(f"{options.file}: {len(job.sources)} sources, {len(job.steps)} steps, {len(job.sinks)} sinks: good")
    return 0


def run_file(options: argparse.Namespace) -> int:
    """Run it, in the foreground."""
    job = _load(options.file)
    _need_spark()
    from headrace.pipeline.plan import Bounds, PlanError
    from headrace.pipeline.runner import RunError, run_batch, run_stream

    if not options.backfill and (options.begin or options.end):
        raise CommandError("--from and --to are for --backfill; a stream goes on where its checkpoint is")
    reporter = Reporter(as_json=options.json or not sys.stdout.isatty())
    if options.metrics_port is not None:
        reporter.serve(options.metrics_port)
    try:
        if options.backfill:
            bounds = Bounds(_bound("starting", options.begin), _bound("ending", options.end))
            run_batch(job, bounds, reporter.report)
        else:
            run_stream(job, reporter.report)
    except (PlanError, RunError) as error:
        raise CommandError(str(error)) from None
    return 0


def stop_one(options: argparse.Namespace) -> int:
    """Ask a run to stop."""
    _need_spark()
    from headrace.pipeline.runner import stop

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
    _need_spark()
    from headrace.pipeline.runner import running

    rows = [
        (
            s.name,
            s.pid,
            s.file,
            datetime.fromtimestamp(s.started_ms / 1000, UTC).isoformat(timespec="seconds"),
        )
        for s in running()
    ]
    print_table(("name", "process", "file", "since"), rows)
    return 0


def redrive_file(options: argparse.Namespace) -> int:
    """Send dead letters again."""
    from headrace.pipeline.redrive import redrive

    job = _load(options.file)
    if job.dead_letters is None:
        raise CommandError(f"{options.file} names no topic for dead letters")
    sent = run_loop(redrive({"bootstrap.servers": job.bootstrap}, job.dead_letters))
    for topic, count in sorted(sent.items()):
        print(f"{count} to {topic}")
    print(f"{sum(sent.values())} dead letters of {job.dead_letters} sent again")
    return 0


class Reporter:
    """Shows progress, and keeps the latest of each query for whoever scrapes it."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._latest: dict[str, dict[str, Any]] = {}

    def report(self, event: dict[str, Any]) -> None:
        """One batch of one query."""
        if event["event"] == "progress":
            self._latest[event["query"]] = event
        if self._as_json:
            print(json.dumps(event), flush=True)
        elif event["event"] == "progress":
            lag = ", ".join(f"{topic} {count}" for topic, count in event["lag"].items()) or "none"
            print(
                f"{event['query']}  batch {event['batch']}  {event['rows_in']} rows in, {event['rows_out']} out, "
                f"{event['rows_in_per_s']:.0f} rows/s, {event['batch_ms']} ms, state {event['state_rows']}, lag {lag}",
                flush=True,
            )
        else:
            print(f"{event['sink']}: written in {event['seconds']} s", flush=True)

    def serve(self, port: int) -> None:
        """Answer scrapes from a thread of their own, for as long as the process lives."""
        from headrace.pipeline.runner import prometheus

        latest = self._latest

        class Scrape(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = prometheus(dict(latest)).encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: Any) -> None:
                """Scrapes are no news."""

        server = ThreadingHTTPServer(("127.0.0.1", port), Scrape)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(f"metrics on http://127.0.0.1:{server.server_port}/metrics", file=sys.stderr)


def _load(path: Path) -> Any:
    try:
        from headrace.pipeline.jobfile import FileError, load
    except ImportError:
        raise CommandError("pipelines need PyYAML and pyarrow: pip install 'headrace[spark]'") from None
    try:
        return load(path)
    except FileError as error:
        raise CommandError(str(error)) from None


def _need_spark() -> None:
    try:
        import importlib.util

        found = importlib.util.find_spec("pyspark")
    except ImportError:
        found = None
    if found is None:
        raise CommandError("pyspark is not installed: pip install 'headrace[spark]'")
    if shutil.which("java") is None:
        raise CommandError(
            "no Java found, and Spark needs one: install a runtime of version 17 or newer "
            "(Debian, Ubuntu: apt install openjdk-17-jre-headless)"
        )


def _bound(side: str, text: str | None) -> dict[str, str]:
    """A time, or offsets in JSON, as the source's option."""
    if text is None:
        return {}
    if text.lstrip().startswith("{"):
        return {f"{side}Offsets": text}
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise CommandError(
            f"expected a time like 2026-01-31T12:00:00 or JSON offsets, got {text!r}"
        ) from None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return {
        f"{side}Timestamp": str(int(when.timestamp() * 1000)),
        **({"startingOffsetsByTimestampStrategy": "latest"} if side == "starting" else {}),
    }
