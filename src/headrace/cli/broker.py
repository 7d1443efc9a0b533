"""`headrace broker start|stop|kill|pause|resume N`: one broker of the cluster that `headrace up` started."""

import argparse
import signal
import time
from collections.abc import Callable

from headrace.cli.cluster_view import paused
from headrace.cli.local_cluster import (
    LOOK_EVERY_S,
    STOP_WAIT_S,
    LocalCluster,
    Plan,
    Process,
    add_data_option,
    directory_of,
    port_taken,
)
from headrace.cli.parser import CommandError, Parser, subcommands, whole_number

DESCRIPTION = "Start, stop, kill, pause and resume one broker of the cluster that 'headrace up' started."
EXAMPLE = """\
example:
  headrace broker kill 2          # as in a crash
  headrace broker start 2         # it recovers and catches up
  headrace broker pause 3         # it keeps its connections and answers nothing
  headrace broker resume 3"""

READY_WAIT_S = 60.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the actions."""
    actions = subcommands(parser)
    for name, (summary, act) in ACTIONS.items():
        action: Parser = actions.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog=f"example:\n  headrace broker {name} 2",
        )
        action.add_argument("number", metavar="N", type=whole_number(1), help="the broker's id")
        add_data_option(action)
        action.set_defaults(run=run, act=act)


def run(options: argparse.Namespace) -> int:
    """Find the broker and do with it what was asked."""
    local = LocalCluster(directory_of(options.data))
    plan = local.plan()
    number = options.number
    if number not in plan.ids:
        raise CommandError(
            f"there is no broker {number} in {local.directory}\n  its brokers are 1 to {plan.brokers}"
        )
    with local.locked():
        act: Callable[[LocalCluster, Plan, int], str] = options.act
        print(act(local, plan, number))
    return 0


def _start(local: LocalCluster, plan: Plan, number: int) -> str:
    if (process := local.process(number)) is not None:
        raise CommandError(f"broker {number} is running already, pid {process.pid}")
    if port_taken(plan.host, plan.port_of(number)):
        raise CommandError(
            f"port {plan.port_of(number)} on {plan.host} is in use\n  stop what listens there, then try again"
        )
    local.start(plan, number)
    deadline_s = time.monotonic() + READY_WAIT_S
    while not local.said_ready(number):
        process = local.process(number)
        if process is None:
            raise CommandError(
                f"broker {number} did not start; it said:\n  {local.last_words(number)[-1000:]}"
                f"\n  its log is {local.log_file(number)}"
            )
        if time.monotonic() > deadline_s:
            raise CommandError(
                f"broker {number} runs, but was not in service within {READY_WAIT_S:.0f} s\n"
                f"  its log is {local.log_file(number)}"
            )
        time.sleep(LOOK_EVERY_S)
    process = local.process(number)
    return f"started broker {number}, pid {process.pid if process else 'gone again'}"


def _stop(local: LocalCluster, plan: Plan, number: int) -> str:
    _running(local, number)
    if local.stop([number]):
        raise CommandError(
            f"broker {number} did not stop within {STOP_WAIT_S:.0f} s and was killed\n"
            "  nothing acknowledged is lost; it checks its logs at the next start"
        )
    return f"stopped broker {number}"


def _kill(local: LocalCluster, plan: Plan, number: int) -> str:
    process = _running(local, number)
    local.kill(number)
    return f"killed broker {number}, pid {process.pid}"


def _pause(local: LocalCluster, plan: Plan, number: int) -> str:
    process = _running(local, number)
    process.send(signal.SIGSTOP)
    return f"paused broker {number}, pid {process.pid}"


def _resume(local: LocalCluster, plan: Plan, number: int) -> str:
    process = _running(local, number)
    if not paused(process.pid):
        raise CommandError(f"broker {number} is not paused")
    process.send(signal.SIGCONT)
    return f"resumed broker {number}, pid {process.pid}"


def _running(local: LocalCluster, number: int) -> Process:
    process = local.process(number)
    if process is None:
        raise CommandError(f"broker {number} is not running\n  'headrace broker start {number}' starts it")
    return process


ACTIONS: dict[str, tuple[str, Callable[[LocalCluster, Plan, int], str]]] = {
    "start": ("start a broker that does not run", _start),
    "stop": ("stop a broker cleanly; its leaderships move first", _stop),
    "kill": ("end a broker at once (SIGKILL)", _kill),
    "pause": ("freeze a broker (SIGSTOP)", _pause),
    "resume": ("let a paused broker go on (SIGCONT)", _resume),
}
