"""`headrace config describe|alter`: settings of topics and brokers."""

import argparse
import sys
from typing import Any

from headrace.base.errors import ErrorCode, KafkaError
from headrace.cli.options import add_client_options, client_config, run
from headrace.cli.output import print_json, print_table
from headrace.cli.parser import CommandError, Parser, UsageError, key_value, nearest, subcommands
from headrace.client.admin import Admin, ConfigEntry, ConfigOp, ConfigResource, ConfigSource, ResourceType

DESCRIPTION = "Describe and alter the settings of topics and brokers."
EXAMPLE = """\
example:
  headrace config describe topic orders
  headrace config describe broker 1 --all --json
  headrace config alter topic orders --set retention.ms=3600000 --unset segment.bytes
  headrace config alter broker default --set log.retention.ms=3600000     # all brokers"""

TYPES = {"topic": ResourceType.TOPIC, "broker": ResourceType.BROKER}
ALL_BROKERS = "default"
BAD_SETTING = (ErrorCode.INVALID_REQUEST, ErrorCode.INVALID_CONFIG)
BROKER_SETTING_HINT = (
    "'headrace config describe broker ID --all' lists keys and values; what is read-only there is given to"
    " 'headrace serve --set'"
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the actions."""
    add_client_options(parser)
    actions = subcommands(parser)
    describe = _action(
        actions, "describe", "show settings", describe_config, "headrace config describe topic orders --all"
    )
    describe.add_argument("--all", action="store_true", help="also those that have their default")
    describe.add_argument("--docs", action="store_true", help="with what each setting does")
    describe.add_argument("--json", action="store_true", help="as JSON")
    example = "headrace config alter topic orders --set cleanup.policy=compact"
    alter = _action(actions, "alter", "change settings", alter_config, example)
    for option, help_text in (
        ("--set", "give a setting a value"),
        ("--append", "add to a setting that is a list"),
        ("--subtract", "take from a setting that is a list"),
    ):
        alter.add_argument(
            option,
            *(("-c",) if option == "--set" else ()),
            metavar="KEY=VALUE",
            dest=option.strip("-") + "_pairs",
            type=key_value,
            action="append",
            default=[],
            help=help_text,
        )
    alter.add_argument("--unset", metavar="KEY", action="append", default=[], help="go back to the default")
    alter.add_argument("--dry-run", action="store_true", help="only ask the broker whether it would take it")


def _action(actions: Any, name: str, summary: str, handler: Any, example: str) -> Parser:
    parser: Parser = actions.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"example:\n  {example}",
    )
    parser.add_argument("type", choices=sorted(TYPES), help="what the settings belong to")
    parser.add_argument(
        "name", metavar="NAME", help=f"the topic, or the broker's id; '{ALL_BROKERS}' stands for all brokers"
    )
    add_client_options(parser, action=True)
    parser.set_defaults(run=lambda options: run(handler(options)))
    return parser


def _resource(options: argparse.Namespace) -> ConfigResource:
    kind = TYPES[options.type]
    whole = kind is ResourceType.BROKER and options.name == ALL_BROKERS
    return ConfigResource(kind, "" if whole else options.name)


async def describe_config(options: argparse.Namespace) -> int:
    """Show the settings of one topic or broker."""
    async with Admin(client_config(options, "admin")) as admin:
        entries = await admin.describe_configs(_resource(options), documentation=options.docs)
    if not options.all:
        entries = [entry for entry in entries if entry.source is not ConfigSource.DEFAULT_CONFIG]
    if options.json:
        print_json([_as_json(entry, options.docs) for entry in entries])
        return 0
    columns = ["setting", "value", "source", "read-only"]
    rows = [[e.name, _value(e), e.source.name, "yes" if e.read_only else "no"] for e in entries]
    if options.docs:
        columns.append("description")
        rows = [[*row, entry.documentation or ""] for row, entry in zip(rows, entries)]
    print_table(columns, rows)
    return 0


async def alter_config(options: argparse.Namespace) -> int:
    """Change the settings of one topic or broker."""
    changes: list[tuple[ConfigOp, str, str | None]] = []
    for op, pairs in (
        (ConfigOp.SET, options.set_pairs),
        (ConfigOp.APPEND, options.append_pairs),
        (ConfigOp.SUBTRACT, options.subtract_pairs),
    ):
        changes += [(op, name, value) for name, value in pairs]
    changes += [(ConfigOp.DELETE, name, None) for name in options.unset]
    if not changes:
        raise UsageError("nothing to alter: give --set, --unset, --append or --subtract")
    resource = _resource(options)
    async with Admin(client_config(options, "admin")) as admin:
        unknown = await _unknown_settings(admin, resource, changes)
        try:
            await admin.alter_configs(resource, changes, validate_only=options.dry_run)
        except KafkaError as error:
            if resource.type is ResourceType.BROKER and error.code in BAD_SETTING:
                raise CommandError(f"{error.message} ({error.code.name})\n  {BROKER_SETTING_HINT}") from None
            raise
    for note in unknown:
        print(f"headrace: note: {note}", file=sys.stderr)
    print(f"{'could alter' if options.dry_run else 'altered'} {options.type} {options.name}")
    return 0


async def _unknown_settings(
    admin: Admin, resource: ConfigResource, changes: list[tuple[ConfigOp, str, str | None]]
) -> list[str]:
    """What to say of settings that the broker does not have. It keeps them, as Kafka does, for plugins to read."""
    if resource.type is not ResourceType.BROKER:
        return []
    _, _, nodes = await admin.describe_cluster()
    name = resource.name or str(nodes[0].node_id)
    known = {entry.name for entry in await admin.describe_configs(ConfigResource(resource.type, name))}
    return [
        f"the broker has no setting {key!r}{nearest(key, known)}; it is kept, and has no effect"
        for op, key, _ in changes
        if op is not ConfigOp.DELETE and key not in known
    ]


def _value(entry: ConfigEntry) -> str:
    if entry.sensitive:
        return "(hidden)"
    return "" if entry.value is None else entry.value


def _as_json(entry: ConfigEntry, docs: bool) -> dict[str, Any]:
    out = {
        "name": entry.name,
        "value": entry.value,
        "source": entry.source.name,
        "read_only": entry.read_only,
        "sensitive": entry.sensitive,
    }
    return {**out, "documentation": entry.documentation} if docs else out
