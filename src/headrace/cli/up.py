"""`headrace up`: a cluster on this machine, in the foreground with a live view or detached.

Owns the start of a whole cluster. Invariant: either every broker is in service when `ready` is printed, or the command
fails, says why in the words of the broker that failed, leaves none of the processes behind that it started, and the
directory with the plan it had. Called by `cli.main`.
"""

import argparse
import asyncio
import signal
import sys
import threading
import time
from dataclasses import replace

from headrace.cli.local_cluster import (
    BROKERS_MAX,
    PORT_HIGHEST,
    LocalCluster,
    Plan,
    add_data_option,
    directory_of,
    port_taken,
)
from headrace.cli.parser import CommandError, UsageError, key_value, whole_number
from headrace.cli.serve import check_settings

DESCRIPTION = """\
Start a cluster on this machine: brokers 1 to N on ports P to P+N-1, the first three of them also controllers.

Prints 'ready BOOTSTRAP' on standard output when every broker is in service. In the foreground it shows the state of
the cluster and stops it on Ctrl-C; with --detach it returns, and 'headrace down' stops the cluster. Data stays either
way, and the next 'headrace up' on the directory starts the same cluster."""

EXAMPLE = """\
example:
  headrace up                                   # five brokers on 127.0.0.1:9092 to 9096, data in .headrace
  headrace up --brokers 3 --port 19092 --data /tmp/three --detach
  headrace up --set default.replication.factor=3 --set min.insync.replicas=2

environment:
  HEADRACE_DATA                  the directory when --data is not given"""

DEFAULT_BROKERS = 5
DEFAULT_PORT = 9092
READY_WAIT_S = 60.0
LOOK_EVERY_S = 0.02
REFRESH_EVERY_S = 1.0
RESERVED = (
    "node.id",
    "broker.id",
    "controller.quorum.voters",
    "listeners",
    "advertised.listeners",
    "log.dirs",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--brokers",
        metavar="N",
        type=whole_number(1, BROKERS_MAX),
        help=f"how many brokers (default: as many as the directory has, else {DEFAULT_BROKERS})",
    )
    add_data_option(parser)
    parser.add_argument(
        "--port",
        metavar="P",
        type=whole_number(1, PORT_HIGHEST),
        help=f"port of the first broker (default: the directory's, else {DEFAULT_PORT})",
    )
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        type=key_value,
        action="append",
        default=[],
        dest="settings",
        help="a broker setting by its Kafka name, for all brokers; may be repeated",
    )
    parser.add_argument("--detach", action="store_true", help="return when every broker is in service")
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        type=str.lower,
        help="how much brokers log to broker-N.log in the directory (default: warning)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Start the cluster; in the foreground also show it and stop it."""
    local = LocalCluster(directory_of(options.data))
    local.refuse_single_broker()
    before = local.plan_if_any()
    plan = _plan(options, before)
    stopping = threading.Event()
    if not options.detach:
        for which in (signal.SIGTERM, signal.SIGINT):
            signal.signal(which, lambda *_: stopping.set())
    with local.locked():
        _refuse_running(local)
        _refuse_taken_ports(plan)
        local.keep(plan)
        try:
            for number in plan.ids:
                local.start(plan, number, lifeline=not options.detach)
            _await_in_service(local, plan, stopping)
            before = None  # there is no way back: the new brokers may hold replicas, and votes
            _add_voters(local, plan)
        except BaseException:
            local.stop(list(plan.ids))
            if before is not None:
                local.keep(before)
            raise
    print(f"ready {plan.bootstrap}", flush=True)
    if options.detach:
        return 0
    try:
        _show_until(local, plan, stopping)
    finally:
        with local.locked():
            local.stop(list(plan.ids))
            for number in plan.ids:
                local.forget(number)
    return 0


def _plan(options: argparse.Namespace, before: Plan | None) -> Plan:
    """What is asked for now, on top of what the directory had."""
    settings = dict(options.settings)
    for name in settings:
        if name in RESERVED:
            raise UsageError(f"--set {name}: 'headrace up' gives each broker its own\n  leave it out")
    check_settings(settings)
    if before is None:
        before = Plan(options.brokers or DEFAULT_BROKERS, DEFAULT_PORT)
    elif options.brokers is not None and options.brokers < before.brokers:
        raise CommandError(
            f"the cluster in this directory has {before.brokers} brokers, and some hold data that the others lack\n"
            "  start it with all of them, drain what should go ('headrace partition reassign --drain N'), or choose "
            "another directory with --data"
        )
    plan = Plan(
        options.brokers or before.brokers,
        options.port or before.port,
        settings={**before.settings, **settings},
        log_level=options.log_level or before.log_level,
        controllers=before.controllers,
    )
    if plan.port_of(plan.brokers) > PORT_HIGHEST:
        raise UsageError(
            f"--port {plan.port}: {plan.brokers} brokers need as many ports, up to {PORT_HIGHEST}"
        )
    return plan


def _refuse_running(local: LocalCluster) -> None:
    before = local.plan_if_any()
    if before is not None and (running := local.processes(before)):
        raise CommandError(
            f"the cluster in {local.directory} is running already ({len(running)} of {before.brokers} brokers)\n"
            "  'headrace status' shows it, 'headrace broker start N' starts one broker, 'headrace down' stops all"
        )


def _refuse_taken_ports(plan: Plan) -> None:
    taken = [plan.port_of(number) for number in plan.ids if port_taken(plan.host, plan.port_of(number))]
    if taken:
        ports = ", ".join(map(str, taken))
        raise CommandError(
            f"port{'s' * (len(taken) > 1)} {ports} on {plan.host} {'are' if len(taken) > 1 else 'is'} in use\n"
            "  stop what listens there or choose others with --port"
        )


def _await_in_service(local: LocalCluster, plan: Plan, stopping: threading.Event) -> None:
    """Return when every broker is registered and unfenced."""
    from headrace.cli.cluster_view import ask
    from headrace.cli.options import run as run_async

    async def wait() -> None:
        deadline_s = time.monotonic() + READY_WAIT_S
        ready: set[int] = set()
        while len(ready) < plan.brokers:
            _refuse_dead(local, plan)
            if stopping.is_set():
                raise KeyboardInterrupt
            if time.monotonic() > deadline_s:
                missing = ", ".join(str(number) for number in plan.ids if number not in ready)
                raise CommandError(
                    f"brokers {missing} were not in service within {READY_WAIT_S:.0f} s\n"
                    f"  their logs are in {local.directory}"
                )
            ready |= {n for n in plan.ids if n not in ready and local.said_ready(n)}
            await asyncio.sleep(LOOK_EVERY_S)
        while True:
            answers = await ask({"bootstrap.servers": plan.bootstrap})
            if len([b for b in answers.cluster.brokers if not b.fenced]) >= plan.brokers:
                return
            _refuse_dead(local, plan)
            if stopping.is_set():
                raise KeyboardInterrupt
            if time.monotonic() > deadline_s:
                raise CommandError(
                    f"not every broker was in service within {READY_WAIT_S:.0f} s\n"
                    f"  their logs are in {local.directory}"
                )
            await asyncio.sleep(LOOK_EVERY_S)

    run_async(wait())


def _add_voters(local: LocalCluster, plan: Plan) -> None:
    """Have as many brokers vote as in a new cluster of this size, which one that grew has not by itself.

    Each is written down as soon as it votes, so that every broker is told of it at the next start. A cluster that
    cannot do it now works as it did before it grew, so it is left running, with a note.
    """
    from headrace.base.errors import ErrorCode, KafkaError
    from headrace.cli.options import run as run_async
    from headrace.client.admin import Admin
    from headrace.client.cluster_admin import add_voter, describe_quorum

    async def add() -> None:
        async with Admin({"bootstrap.servers": plan.bootstrap}) as admin:
            voters = set((await describe_quorum(admin)).voters)
            for number in plan.ids[: plan.controllers_wanted]:
                if number in voters or len(voters) >= plan.controllers_wanted:
                    continue
                try:
                    await add_voter(admin, number, f"{plan.host}:{plan.port_of(number)}")
                except KafkaError as error:
                    if error.code is not ErrorCode.DUPLICATE_VOTER:  # which tells that an earlier try did it
                        raise
                voters.add(number)
                local.keep(replace(plan, controllers=max(plan.controllers, number)))

    try:
        run_async(add())
    except CommandError as error:
        print(
            f"headrace: note: not all of the first {plan.controllers_wanted} brokers are controllers yet: {error}\n"
            "  the cluster works, but may not survive the loss of a controller; "
            "'headrace down' and 'headrace up' try again",
            file=sys.stderr,
        )


def _refuse_dead(local: LocalCluster, plan: Plan) -> None:
    for number in plan.ids:
        if local.process(number) is None:
            raise CommandError(
                f"broker {number} did not start; it said:\n{_indented(local.last_words(number))}\n"
                f"  its log is {local.log_file(number)}"
            )


def _indented(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.splitlines()[-10:])


def _show_until(local: LocalCluster, plan: Plan, stopping: threading.Event) -> None:
    """Show the cluster until a signal comes or every broker is gone."""
    if not sys.stdout.isatty():
        while local.processes(plan) and not stopping.wait(REFRESH_EVERY_S):
            local.collect()
        return
    from headrace.cli.live_view import show

    show(local, plan, stopping, REFRESH_EVERY_S)
