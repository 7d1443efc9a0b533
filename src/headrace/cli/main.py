"""The `headrace` command: finds the command that was asked for and runs it.

Owns the table of commands, the exit status and the way errors are shown. Invariant: only the module of the
command that was asked for is imported. Start-up and idle memory of `serve` are promises, so the parser is
argparse: on the machine where it was decided, importing it took 25 ms and 1.3 MB, typer 90 ms and 11 MB (with
rich, which its help needs, 260 ms and 20 MB), and those would stay in the broker for as long as it runs.
Client commands load rich when they draw a table on a terminal, and only then. Called by the console script
and by `python -m headrace`.

Exit status: 0 done, 1 an error (one line on standard error and what to do next), 2 wrong usage, 130 after Ctrl-C.
"""

import os
import sys
from collections.abc import Sequence
from types import ModuleType

from headrace.cli.parser import CommandError, Parser, UsageError

COMMANDS: dict[str, tuple[str, str]] = {
    "up": ("headrace.cli.up", "start a cluster on this machine"),
    "down": ("headrace.cli.down", "stop that cluster"),
    "status": ("headrace.cli.status", "brokers and partitions of a cluster"),
    "broker": ("headrace.cli.broker", "start, stop, kill, pause and resume one broker"),
    "serve": ("headrace.cli.serve", "run one broker"),
    "topic": ("headrace.cli.topic", "create, list, describe, alter and delete topics"),
    "produce": ("headrace.cli.produce", "send lines of standard input or a file as records"),
    "consume": ("headrace.cli.consume", "print records of topics"),
    "group": ("headrace.cli.group", "list, describe, reset and delete consumer groups"),
    "config": ("headrace.cli.config", "describe and alter settings of topics and brokers"),
    "txn": ("headrace.cli.txn", "list, describe and abort transactions"),
    "partition": ("headrace.cli.partition", "move replicas, elect leaders"),
    "pipeline": ("headrace.cli.pipeline", "run pipelines on Spark, declared in a file"),
    "bench": ("headrace.cli.bench", "measure a cluster: produce, consume, latency"),
    "doctor": ("headrace.cli.doctor", "what this machine offers and lacks"),
}

LATER = ("acl", "user", "quota")

EXAMPLE = """\
example:
  headrace serve --memory                  # a broker on 127.0.0.1:9092, nothing kept on disk
  headrace topic create orders -p 3
  echo hello | headrace produce orders
  headrace consume orders --from earliest --exit-at-end

'headrace COMMAND --help' describes a command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _dispatch(arguments)
        sys.stdout.flush()
        return status
    except UsageError as error:
        print(f"headrace: {error}", file=sys.stderr)
        return 2
    except CommandError as error:
        print(f"headrace: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has gone (`| head`): the conventional end of a filter, without a trace. Standard
        # output is pointed elsewhere so that the flush at exit does not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _dispatch(arguments: list[str]) -> int:
    if not arguments:
        print(_overview(), file=sys.stderr)
        return 2
    if arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if arguments[0] in ("-V", "--version"):
        from headrace import __version__

        print(f"headrace {__version__}")
        return 0
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        raise UsageError(_unknown(name))
    from importlib import import_module

    return _run(import_module(COMMANDS[name][0]), name, rest)


def _run(module: ModuleType, name: str, rest: list[str]) -> int:
    parser = Parser(prog=f"headrace {name}", description=module.DESCRIPTION, epilog=module.EXAMPLE)
    module.configure(parser)
    options, unknown = parser.parse_known_args(rest)
    if unknown:
        # argparse would name the command and point at its help, which lists no option of the action that was asked for.
        prog = " ".join(filter(None, ("headrace", name, getattr(options, "action", None))))
        Parser(prog=prog).error(f"unrecognized arguments: {' '.join(unknown)}")
    return int(options.run(options))


def _overview() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = "\n".join(f"  {name:<{width}}{summary}" for name, (_, summary) in COMMANDS.items())
    return (
        "usage: headrace [--help] [--version] COMMAND ...\n\n"
        "Headrace: a distributed log that speaks Apache Kafka's protocol.\n\n"
        f"commands:\n{lines}\n\n{EXAMPLE}"
    )


def _unknown(name: str) -> str:
    if name in LATER:
        return f"'{name}' is not available in this version; 'headrace --help' lists what is"
    from headrace.cli.parser import nearest

    return f"no command '{name}'{nearest(name, COMMANDS)}; 'headrace --help' lists them"
