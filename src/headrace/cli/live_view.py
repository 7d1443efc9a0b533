"""The live view of a cluster in a terminal.

Owns the drawing. Invariant: it only looks; keys and signals are the caller's. Loaded by `up` when standard output is a
terminal, because rich takes longer to load than a broker to start.
"""

import asyncio
import threading

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headrace.cli.cluster_view import COLOURS, Meter, View, columns_and_rows, local_view, summary
from headrace.cli.local_cluster import LocalCluster, Plan


def show(local: LocalCluster, plan: Plan, stopping: threading.Event, every_s: float) -> None:
    """Draw the cluster again and again until told to stop, or until every broker is gone."""
    meter = Meter()
    with Live(refresh_per_second=4, screen=False) as live:
        while local.processes(plan) and not stopping.is_set():
            live.update(drawn(asyncio.run(local_view(local, plan, meter)), local))
            local.collect()
            stopping.wait(every_s)
        live.update(Text("stopping" if stopping.is_set() else "every broker has ended"))


def drawn(view: View, local: LocalCluster) -> Group:
    """The table of brokers and what concerns all of them."""
    columns, rows = columns_and_rows(view)
    table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in ("state", "controller", "address") else "right")
    for row in rows:
        cells = ["" if cell is None else str(cell) for cell in row]
        table.add_row(*(Text(cell, style=COLOURS.get(cell, "")) for cell in cells))
    bad = view.offline or view.controller is None
    style = "bold red" if bad else "yellow" if view.under_replicated else "green"
    return Group(
        Text(f"headrace {view.bootstrap}", style="bold"),
        table,
        Text(summary(view), style=style),
        Text(f"data and logs in {local.directory}; Ctrl-C stops the cluster", style="dim"),
    )
