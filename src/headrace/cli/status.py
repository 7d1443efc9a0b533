"""`headrace status`: the brokers of a cluster, their state, role and load, and how its partitions are."""

import argparse
import asyncio

from headrace.cli.cluster_view import (
    COLOURS,
    Meter,
    View,
    ask,
    columns_and_rows,
    local_view,
    remote_view,
    summary,
)
from headrace.cli.local_cluster import LocalCluster, add_data_option, directory_of
from headrace.cli.options import add_client_options, client_config, run
from headrace.cli.output import print_json, print_table

DESCRIPTION = """\
Show a cluster: each broker's state, role, load and how many partitions it leads and holds.

Of the cluster that 'headrace up' started in --data; with -b of any cluster, such as one over several machines, of which
processes are not known here. Load is CPU, memory and disk, and what brokers reported to the controller with their last
heartbeat: bytes in and out a second, and messages that producers wrote a second.

states: running (in service), fenced (its process runs, the cluster does not count on it), stopped (by a command),
dead (its process ended without being asked to)"""

EXAMPLE = """\
example:
  headrace status
  headrace status --json
  headrace status -b node1:9092,node2:9092"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_data_option(parser)
    add_client_options(parser)
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=show_status)


def show_status(options: argparse.Namespace) -> int:
    """Print the state of the cluster; 0 also when some of it is not well."""
    if options.bootstrap or options.config or options.keys:
        config = client_config(options, "admin")
        view = remote_view(str(config["bootstrap.servers"]), run(ask(config)))
    else:
        local = LocalCluster(directory_of(options.data))
        view = asyncio.run(local_view(local, local.plan(), Meter()))
    if options.json:
        print_json(view.as_json())
        return 0
    _print(view)
    return 0


def _print(view: View) -> None:
    columns, rows = columns_and_rows(view)
    print_table(columns, rows, title=view.bootstrap, colours=COLOURS)
    print(summary(view))
