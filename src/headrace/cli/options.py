"""What every client command shares: how to reach the cluster, and how its asynchronous work is run.

Owns `-b`, `--config` and `-X`, and the translation of the client's errors into exit statuses: a wrong key or
value is wrong usage (2), anything else a failed command (1), each with its hint. Called by the client
commands.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

from headrace.base.errors import KafkaError
from headrace.cli.parser import CommandError, Parser, UsageError, key_value
from headrace.client.config import KEYS, check_keys, foreign_keys
from headrace.client.errors import ClientError, ConfigError

DEFAULT_BOOTSTRAP = "127.0.0.1:9092"

T = TypeVar("T")


def add_client_options(parser: argparse.ArgumentParser, *, action: bool = False) -> None:
    """Declare `-b`, `--config` and `-X`. Those given after an action (`topic list -b X`) win over those before it."""
    group = parser.add_argument_group("cluster")
    group.add_argument(
        "-b",
        "--bootstrap",
        metavar="HOST:PORT,…",
        default=argparse.SUPPRESS if action else None,
        help=f"brokers to begin with (default: $HEADRACE_BOOTSTRAP, else {DEFAULT_BOOTSTRAP})",
    )
    group.add_argument(
        "--config",
        metavar="FILE",
        default=argparse.SUPPRESS if action else None,
        help="a file of Kafka client keys, key=value a line",
    )
    group.add_argument(
        "-X",
        metavar="KEY=VALUE",
        dest="keys",
        type=key_value,
        action="append",
        default=argparse.SUPPRESS if action else [],
        help="one Kafka client key; may be repeated",
    )


def add_action(actions: Any, name: str, summary: str, handler: Any, example: str) -> Parser:
    """Declare one action of a client command (`topic list`): its help, how it reaches the cluster, what it runs."""
    parser: Parser = actions.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"example:\n  {example}",
    )
    add_client_options(parser, action=True)
    parser.set_defaults(run=lambda options: run(handler(options)))
    return parser


def client_config(options: argparse.Namespace, *clients: str) -> dict[str, object]:
    """Kafka's keys from the file, then `-X`, then `-b`; says which have no effect."""
    values: dict[str, object] = {
        "bootstrap.servers": os.environ.get("HEADRACE_BOOTSTRAP") or DEFAULT_BOOTSTRAP
    }
    if options.config:
        values.update(read_properties(options.config))
    values.update(options.keys)
    if options.bootstrap:
        values["bootstrap.servers"] = options.bootstrap
    foreign = foreign_keys(values, *clients)
    try:
        check_keys({name: value for name, value in values.items() if name in KEYS or name not in foreign})
    except ConfigError as error:
        raise UsageError(with_hint(error)) from None
    for name in foreign:
        print(f"headrace: note: {name} has no effect on this command", file=sys.stderr)
        del values[name]
    return values


def read_properties(path: str) -> dict[str, str]:
    """A Java properties file: comments, `key=value`, `key: value`, lines continued by `\\`."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        raise CommandError(
            f"cannot read {path}: {(error.strerror or '').lower()}\n  check --config"
        ) from None
    except UnicodeDecodeError:
        raise CommandError(f"cannot read {path}: it is not UTF-8 text\n  check --config") from None
    values: dict[str, str] = {}
    for number, line in enumerate(text.replace("\\\n", "").splitlines(), 1):
        line = line.strip()
        if not line or line[0] in "#!":
            continue
        ends = [at for at in (line.find("="), line.find(":")) if at > 0]
        if not ends:
            raise CommandError(f"{path}, line {number}: expected key=value, got {line!r}")
        values[line[: min(ends)].strip()] = line[min(ends) + 1 :].strip()
    return values


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a command's work to its end, with errors as the command line shows them."""
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(work)
    except ConfigError as error:
        raise UsageError(with_hint(error)) from None
    except KafkaError as error:
        raise CommandError(with_hint(error)) from None


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def with_hint(error: KafkaError) -> str:
    """What went wrong, and on a second line what to do next."""
    if isinstance(error, ClientError):
        return f"{error.message}\n  {error.hint}" if error.hint else error.message
    hint = HINTS.get(error.code.name) or (TRY_AGAIN_HINT if error.retriable else REFUSED_HINT)
    text = error.message if error.code.name in error.message else f"{error.message} ({error.code.name})"
    return f"{text}\n  {hint}"


TRY_AGAIN_HINT = "try again; if it stays so, the broker's log may say why"
REFUSED_HINT = "the broker refused it: change what was asked; its log may say more"
HINTS = {
    "INVALID_TOPIC_EXCEPTION": "a name has 1 to 249 letters, digits, '.', '_' and '-', and is neither '.' nor '..'",
    "KAFKA_STORAGE_ERROR": "the broker's disk is full or failing; its log says which",
    "UNKNOWN_TOPIC_OR_PARTITION": "'headrace topic list' shows the topics there are",
    "TOPIC_ALREADY_EXISTS": "choose another name, or --if-not-exists to leave it as it is",
    "INVALID_REPLICATION_FACTOR": "use a replication factor (-r) of at most the number of brokers",
    "INVALID_PARTITIONS": "the number of partitions can only grow",
    "INVALID_CONFIG": "'headrace config describe topic NAME --all' lists keys and values",
    "TOPIC_AUTHORIZATION_FAILED": "the cluster does not let this client do that",
    "CLUSTER_AUTHORIZATION_FAILED": "the cluster does not let this client do that",
    "UNSUPPORTED_VERSION": "the broker does not offer this; is it older?",
}
