"""How a run of a pipeline is shown: a table on a terminal, JSON lines elsewhere, Prometheus' text for who wants it.

Owns the drawing and the scrape. Invariant: it only shows; a scrape or a full disk under the text file never ends a run.
Called by `cli.pipeline`.
"""

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from headrace.cli.parser import CommandError
from headrace.pipeline.progress import Event, Totals

METRICS_PATHS = ("/", "/metrics")


class Reporter:
    """Shows events, and keeps the latest of each query for whoever scrapes them."""

    def __init__(self, *, as_json: bool, metrics_file: Path | None = None) -> None:
        self._as_json = as_json
        self._totals = Totals()
        self._metrics_file = metrics_file
        self._live: Any = None
        self._title = ""

    def __enter__(self) -> Self:
        if not self._as_json:
            from rich.live import Live

            self._live = Live(refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def report(self, event: Event) -> None:
        """One thing that happened: mostly, one batch of one query."""
        if event["event"] == "progress":
            self._totals.add(event)
            self._write_metrics()
        if self._as_json:
            print(json.dumps(event), flush=True)
            return
        if event["event"] == "started":
            self._title = f"{event['pipeline']}  Spark {event['spark']} on {event['master']}"
        elif event["event"] == "batch":
            self._live.console.print(f"{event['sink']}: written in {event['seconds']} s")
        elif event["event"] == "undecodable":
            if event["records"]:
                self._live.console.print(
                    f"{event['source']}: {event['records']} records could not be decoded"
                )
        elif event["event"] == "stopping":
            self._live.console.print("stopping when the batch is done")
        self._live.update(drawn(self._title, self._totals))

    def _write_metrics(self) -> None:
        """The text file of Prometheus' node exporter, whole or not at all."""
        if self._metrics_file is None:
            return
        beside = self._metrics_file.with_name(f".{self._metrics_file.name}.new")
        try:
            beside.write_text(self._totals.prometheus())
            os.replace(beside, self._metrics_file)
        except OSError as error:
            print(f"headrace: note: {self._metrics_file}: {error.strerror}", file=sys.stderr)
            self._metrics_file = None

    def serve(self, port: int) -> int:
        """Answer scrapes from a thread of their own, for as long as the process lives; the port."""
        totals = self._totals

        class Scrape(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = self.path.partition("?")[0] in METRICS_PATHS
                body = (totals.prometheus() if found else "metrics are at /metrics\n").encode()
                self.send_response(200 if found else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: Any) -> None:
                """Scrapes are no news."""

        try:
            server = ThreadingHTTPServer(("127.0.0.1", port), Scrape)
        except OSError as error:
            raise CommandError(f"metrics cannot be served on port {port}: {error.strerror}") from None
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(f"metrics on http://127.0.0.1:{server.server_port}/metrics", file=sys.stderr)
        return int(server.server_port)


def drawn(title: str, totals: Totals) -> Any:
    """The queries of a run, one a row."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for name in ("query", "batch", "in/s", "out/s", "batch time", "lag", "state", "watermark", "in", "out"):
        table.add_column(name, justify="left" if name in ("query", "lag", "watermark") else "right")
    for query, event in sorted(totals.latest.items()):
        lag = ", ".join(f"{topic} {count:,}" for topic, count in sorted(event["lag"].items())) or "-"
        state = (
            f"{event['state_rows']:,} rows, {event['state_bytes'] / 1e6:.1f} MB"
            if event["state_rows"]
            else "-"
        )
        table.add_row(
            query,
            str(event["batch"]),
            f"{event['rows_in_per_s']:,.0f}",
            f"{event['rows_out_per_s']:,.0f}",
            f"{event['batch_ms'] / 1000:.2f} s",
            lag,
            state,
            (event["watermark"] or "-").replace("T", " ").removesuffix("Z"),
            f"{totals.rows_in[query]:,}",
            f"{totals.rows_out[query]:,}",
        )
    dead = totals.dead_letters
    foot = Text(f"{dead:,} dead letters" if dead else "no dead letters", style="yellow" if dead else "dim")
    return Group(
        Text(title, style="bold"), table, foot, Text("Ctrl-C stops when the batch is done", style="dim")
    )
