"""`headrace serve`: one broker process.

Owns the options of the command. Invariant: nothing is imported here that the broker itself does not need,
apart from the parser; the settings are checked before the broker is built. Called by `cli.main`; hands over
to `headrace.server.main`.
"""

import argparse
import os
import sys

from headrace.cli.parser import UsageError, key_value, nearest, whole_number

DESCRIPTION = """\
Run one node in this process: a cluster of its own, or one broker of several when it is told who the controllers are.

Prints 'ready HOST:PORT' on standard output when a produce would be accepted. SIGTERM and SIGINT stop it cleanly."""

EXAMPLE = """\
example:
  headrace serve                                     # data in .headrace, on 127.0.0.1:9092
  headrace serve --memory --port 0                   # nothing on disk, any free port
  headrace serve --data /var/lib/headrace --host 0.0.0.0 --set num.partitions=6 --set log.retention.hours=24
  headrace serve --config node.toml                  # settings of one node of a cluster, by their Kafka names

environment:
  HEADRACE_DATA                  the data directory when --data is not given
  HEADRACE_STOP_ON_STDIN_EOF=1   stop when standard input ends: a program that starts a broker and holds the other end
                                 of its input cannot leave it behind"""

HOST, PORT = "127.0.0.1", 9092
STOP_GRACE_S = 10.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    storage = parser.add_mutually_exclusive_group()
    storage.add_argument(
        "--data", metavar="DIR", help="data directory (default: $HEADRACE_DATA, else .headrace)"
    )
    storage.add_argument("--memory", action="store_true", help="keep everything in memory")
    parser.add_argument(
        "--config", metavar="FILE", help="a file of settings: TOML, or Java properties when it ends so"
    )
    parser.add_argument("--host", help=f"address to listen on (default: that of listeners, else {HOST})")
    parser.add_argument(
        "--port",
        type=whole_number(0, 65535),
        help=f"port to listen on; 0 picks one (default: that of listeners, else {PORT})",
    )
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        type=key_value,
        action="append",
        default=[],
        dest="settings",
        help="a broker setting by its Kafka name, before what the file says; may be repeated",
    )
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        type=str.lower,
        default="warning",
        help="how much to log on standard error (default: warning)",
    )
    parser.add_argument("--log-json", action="store_true", help="log as JSON, one object a line")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Check the settings and run the broker until it is told to stop."""
    settings: dict[str, str] = dict(options.settings)
    check_settings(settings)
    if options.config:
        from headrace.cli.node_file import read_node_file

        settings = {**read_node_file(options.config), **settings}
        check_settings(settings, options.config)
    host, port = _address(options, settings)
    if os.environ.get("HEADRACE_STOP_ON_STDIN_EOF") == "1":
        _stop_on_stdin_eof()
    data_dir = None
    if not options.memory:
        data_dir = options.data or settings.get("log.dirs") or os.environ.get("HEADRACE_DATA") or ".headrace"
    from headrace.server.main import ServeOptions, serve

    return serve(
        ServeOptions(
            data_dir=data_dir,
            memory=options.memory,
            host=host,
            port=port,
            settings=settings,
            log_level=options.log_level.upper(),
            log_json=options.log_json,
        )
    )


def _address(options: argparse.Namespace, settings: dict[str, str]) -> tuple[str, int]:
    """Where to listen: the options, else the setting `listeners`, which then says what is done, else the default."""
    host, port = HOST, PORT
    if settings.get("listeners"):
        from headrace.cli.node_file import listener_address

        host, port = listener_address(settings["listeners"])
    if options.host is not None or options.port is not None:
        settings.pop("listeners", None)
    return options.host or host, port if options.port is None else options.port


def check_settings(settings: dict[str, str], where: str = "--set") -> None:
    """Refuse what no broker has, before anything is started or touched."""
    if not settings:
        return
    from headrace.base.errors import KafkaError
    from headrace.base.settings import BROKER_SETTINGS, broker_config

    for name in settings:
        if name not in BROKER_SETTINGS:
            raise UsageError(
                f"{where} {name}: there is no such broker setting{nearest(name, BROKER_SETTINGS)}\n"
                "  'headrace config describe broker 1 --all' lists those of a running broker"
            )
    try:
        broker_config(settings)
    except KafkaError as error:
        raise UsageError(
            f"{where}: {error.message}\n  correct the value, or leave it out for the default"
        ) from None


def _stop_on_stdin_eof() -> None:
    import signal
    import threading

    def watch() -> None:
        descriptor = sys.stdin.fileno()
        while os.read(descriptor, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        if not threading.Event().wait(STOP_GRACE_S):
            os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
