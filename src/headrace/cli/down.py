"""`headrace down`: stops the cluster of `headrace up` cleanly; its data stays."""

import argparse

from headrace.cli.local_cluster import STOP_WAIT_S, LocalCluster, add_data_option, directory_of
from headrace.cli.parser import CommandError

DESCRIPTION = "Stop the cluster that 'headrace up' started. Data stays; 'headrace up' starts it again."
EXAMPLE = """\
example:
  headrace down
  headrace down --data /tmp/three"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_data_option(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Stop every broker that runs."""
    local = LocalCluster(directory_of(options.data))
    plan = local.plan()
    with local.locked():
        running = sorted(local.processes(plan))
        stubborn = local.stop(running)
        for number in plan.ids:
            local.forget(number)
    if not running:
        raise CommandError(f"nothing runs in {local.directory}\n  'headrace up' starts the cluster")
    if stubborn:
        killed = ", ".join(map(str, stubborn))
        raise CommandError(
            f"brokers {killed} did not stop within {STOP_WAIT_S:.0f} s and were killed\n"
            "  nothing acknowledged is lost; they check their logs at the next start"
        )
    print(f"stopped {len(running)} broker{'s' * (len(running) != 1)}; data stays in {local.directory}")
    return 0
