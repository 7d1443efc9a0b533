"""`headrace topic create|list|describe|alter|delete`."""

import argparse
from typing import Any

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.ids import format_id
from headrace.cli.options import add_action, add_client_options, client_config
from headrace.cli.output import print_json, print_table
from headrace.cli.parser import CommandError, Parser, UsageError, key_value, subcommands, whole_number
from headrace.client.admin import Admin, ConfigOp, ConfigResource, ConfigSource, NewTopic, ResourceType
from headrace.client.cluster import NO_NODE, TopicInfo
from headrace.client.offsets import EARLIEST, LATEST, list_offsets
from headrace.client.topics import TopicPartition

DESCRIPTION = "Create, list, describe, alter and delete topics."
EXAMPLE = """\
example:
  headrace topic create orders -p 6 -c retention.ms=86400000
  headrace topic list
  headrace topic describe orders --json"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the actions."""
    add_client_options(parser)
    actions = subcommands(parser)

    create = add_action(
        actions, "create", "create a topic", create_topic, "headrace topic create orders -p 6 -r 1"
    )
    create.add_argument("name", metavar="NAME")
    create.add_argument(
        "-p",
        "--partitions",
        metavar="N",
        type=whole_number(1),
        help="partitions (default: the broker's num.partitions)",
    )
    create.add_argument(
        "-r",
        "--replication-factor",
        metavar="R",
        type=whole_number(1, 32767),
        help="replicas (default: the broker's default.replication.factor)",
    )
    _add_settings(create)
    create.add_argument("--if-not-exists", action="store_true", help="succeed when the topic exists already")
    create.add_argument(
        "--dry-run", action="store_true", help="only ask the broker whether it would create it"
    )

    listing = add_action(actions, "list", "list topics", list_topics, "headrace topic list --json")
    listing.add_argument("--json", action="store_true", help="as JSON")

    describe = add_action(
        actions, "describe", "describe topics", describe_topics, "headrace topic describe orders --offsets"
    )
    describe.add_argument("names", metavar="NAME", nargs="*", help="topics (default: all)")
    describe.add_argument(
        "--offsets", action="store_true", help="with the first and the end offset of each partition"
    )
    describe.add_argument("--json", action="store_true", help="as JSON")

    alter = add_action(
        actions,
        "alter",
        "add partitions, change settings",
        alter_topic,
        "headrace topic alter orders -p 12 -c retention.ms=-1",
    )
    alter.add_argument("name", metavar="NAME")
    alter.add_argument(
        "-p", "--partitions", metavar="N", type=whole_number(1), help="the new total of partitions"
    )
    _add_settings(alter)
    alter.add_argument(
        "--unset", metavar="KEY", action="append", default=[], help="go back to the default of a setting"
    )

    delete = add_action(
        actions, "delete", "delete topics and their records", delete_topics, "headrace topic delete orders"
    )
    delete.add_argument("names", metavar="NAME", nargs="+")
    delete.add_argument("--if-exists", action="store_true", help="succeed when there is no such topic")


def _add_settings(parser: Parser) -> None:
    parser.add_argument(
        "-c",
        "--set",
        metavar="KEY=VALUE",
        dest="settings",
        type=key_value,
        action="append",
        default=[],
        help="a topic setting by its Kafka name; may be repeated",
    )


async def create_topic(options: argparse.Namespace) -> int:
    """Create one topic."""
    topic = NewTopic(
        options.name, options.partitions or -1, options.replication_factor or -1, dict(options.settings)
    )
    async with Admin(client_config(options, "admin")) as admin:
        try:
            await admin.create_topic(topic, validate_only=options.dry_run)
        except KafkaError as error:
            if options.if_not_exists and error.code is ErrorCode.TOPIC_ALREADY_EXISTS:
                print(f"topic {topic.name} exists")
                return 0
            raise
    print(f"topic {topic.name} could be created" if options.dry_run else f"created topic {topic.name}")
    return 0


async def list_topics(options: argparse.Namespace) -> int:
    """All topics."""
    async with Admin(client_config(options, "admin")) as admin:
        topics = await admin.list_topics()
    if options.json:
        print_json(
            [
                {
                    "name": topic.name,
                    "id": format_id(topic.topic_id),
                    "partitions": len(topic.partitions),
                    "replication_factor": _replication_factor(topic),
                    "internal": topic.internal,
                }
                for topic in topics
            ]
        )
    else:
        rows = [(topic.name, len(topic.partitions), _replication_factor(topic)) for topic in topics]
        print_table(("topic", "partitions", "replicas"), rows)
    return 0


async def describe_topics(options: argparse.Namespace) -> int:
    """Topics with their partitions and the settings that differ from the defaults."""
    described = []
    async with Admin(client_config(options, "admin")) as admin:
        topics = await (admin.describe_topics(options.names) if options.names else admin.list_topics())
        for topic in topics:
            if topic.error is not ErrorCode.NONE:
                raise KafkaError(topic.error, f"topic {topic.name!r}: {topic.error.name}")
            entries = await admin.describe_configs(ConfigResource(ResourceType.TOPIC, topic.name))
            settings = {e.name: e.value for e in entries if e.source is ConfigSource.DYNAMIC_TOPIC_CONFIG}
            described.append((topic, settings, await _offsets(admin, topic) if options.offsets else {}))
    if options.json:
        print_json([_as_json(*item) for item in described])
        return 0
    for topic, settings, offsets in described:
        _print_description(topic, settings, offsets)
    return 0


async def _offsets(admin: Admin, topic: TopicInfo) -> dict[int, tuple[int, int]]:
    """First and end offset of each partition that has a leader."""
    led = [TopicPartition(topic.name, p.partition) for p in topic.partitions.values() if p.leader != NO_NODE]
    timeout_ms = admin.config.default_api_timeout_ms
    first, end = [
        await list_offsets(
            admin.cluster, dict.fromkeys(led, spec), read_committed=False, timeout_ms=timeout_ms
        )
        for spec in (EARLIEST, LATEST)
    ]
    return {where.partition: (first[where].offset, end[where].offset) for where in led}


def _as_json(
    topic: TopicInfo, settings: dict[str, str | None], offsets: dict[int, tuple[int, int]]
) -> dict[str, Any]:
    partitions = []
    for number, info in sorted(topic.partitions.items()):
        entry: dict[str, Any] = {
            "partition": number,
            "leader": None if info.leader == NO_NODE else info.leader,
            "leader_epoch": info.leader_epoch,
            "replicas": list(info.replicas),
            "isr": list(info.isr),
            "offline": list(info.offline),
        }
        if number in offsets:
            entry["start_offset"], entry["end_offset"] = offsets[number]
        partitions.append(entry)
    return {
        "name": topic.name,
        "id": format_id(topic.topic_id),
        "internal": topic.internal,
        "replication_factor": _replication_factor(topic),
        "partitions": partitions,
        "config": settings,
    }


def _print_description(
    topic: TopicInfo, settings: dict[str, str | None], offsets: dict[int, tuple[int, int]]
) -> None:
    title = f"{topic.name}  id {format_id(topic.topic_id)}"
    columns = ["partition", "leader", "epoch", "replicas", "in sync"]
    rows: list[list[object]] = []
    for number, info in sorted(topic.partitions.items()):
        leader = "none" if info.leader == NO_NODE else info.leader
        row: list[object] = [number, leader, info.leader_epoch, _join(info.replicas), _join(info.isr)]
        rows.append([*row, *offsets.get(number, ("", ""))] if offsets else row)
    print_table([*columns, "start", "end"] if offsets else columns, rows, title=title)
    for name, value in sorted(settings.items()):
        print(f"{name}={value}")
    print()


async def alter_topic(options: argparse.Namespace) -> int:
    """Add partitions and change settings."""
    changes = [(ConfigOp.SET, name, value) for name, value in options.settings]
    changes += [(ConfigOp.DELETE, name, None) for name in options.unset]
    if options.partitions is None and not changes:
        raise UsageError("nothing to alter: give -p, -c or --unset")
    async with Admin(client_config(options, "admin")) as admin:
        if changes:
            await admin.alter_configs(ConfigResource(ResourceType.TOPIC, options.name), changes)
        if options.partitions is not None:
            await admin.create_partitions(options.name, options.partitions)
    print(f"altered topic {options.name}")
    return 0


async def delete_topics(options: argparse.Namespace) -> int:
    """Delete topics; those that cannot be deleted are named, and the others are deleted all the same."""
    async with Admin(client_config(options, "admin")) as admin:
        outcomes = await admin.delete_topics(options.names)
    failed = []
    for name, error in outcomes:
        if error is None:
            print(f"deleted topic {name}")
        elif not (options.if_exists and error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION):
            failed.append(f"cannot delete {name}: {error.message}")
    if failed:
        raise CommandError("\n".join(failed) + "\n  'headrace topic list' shows the topics there are")
    return 0


def _replication_factor(topic: TopicInfo) -> int:
    return max((len(info.replicas) for info in topic.partitions.values()), default=0)


def _join(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))
