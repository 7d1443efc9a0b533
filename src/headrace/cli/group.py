"""`headrace group list|describe|reset|delete`."""

import argparse
import csv
from collections.abc import Mapping
from pathlib import Path

from headrace.base.errors import ErrorCode, KafkaError
from headrace.cli.consume import parse_start
from headrace.cli.options import add_action, add_client_options, client_config
from headrace.cli.output import print_json, print_table
from headrace.cli.parser import CommandError, UsageError, subcommands
from headrace.client.admin import Admin
from headrace.client.group_admin import (
    GroupInfo,
    alter_group_offsets,
    delete_groups,
    describe_group,
    group_offsets,
    list_groups,
)
from headrace.client.offsets import EARLIEST, LATEST, list_offsets
from headrace.client.topics import TopicPartition

DESCRIPTION = "List, describe, reset and delete consumer groups."
EXAMPLE = """\
example:
  headrace group list
  headrace group describe readers
  headrace group reset readers --topic orders --to earliest
  headrace group delete readers"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the actions."""
    add_client_options(parser)
    actions = subcommands(parser)
    listing = add_action(actions, "list", "list groups", list_all, "headrace group list --state stable")
    listing.add_argument("--state", metavar="STATE", action="append", default=[], help="only in this state")
    listing.add_argument("--type", metavar="TYPE", action="append", default=[], help="classic or consumer")
    listing.add_argument("--json", action="store_true", help="as JSON")
    describe = add_action(
        actions,
        "describe",
        "describe groups: who reads what, and how far it is behind",
        describe_some,
        "headrace group describe readers --members",
    )
    describe.add_argument("groups", metavar="GROUP", nargs="+")
    describe.add_argument("--members", action="store_true", help="the members instead of the partitions")
    describe.add_argument("--json", action="store_true", help="as JSON")
    reset = add_action(
        actions,
        "reset",
        "set the offsets of a group without members",
        reset_offsets,
        "headrace group reset readers --topic orders --to 2026-11-17T08:00\n"
        "  headrace group reset readers --topic orders:0,2 --shift -100\n"
        "  headrace group reset readers --file offsets.csv",
    )
    reset.add_argument("group", metavar="GROUP")
    reset.add_argument(
        "--topic",
        metavar="TOPIC[:N,…]",
        type=_topic,
        action="append",
        default=[],
        help="which partitions (default: all that the group has committed); may be repeated",
    )
    where = reset.add_mutually_exclusive_group(required=True)
    where.add_argument("--to", metavar="WHERE", type=_where, help="earliest, latest, an offset or a time")
    where.add_argument(
        "--shift", metavar="N", type=int, help="forward by so many records, or back if below 0"
    )
    where.add_argument("--file", metavar="PATH", type=Path, help="lines of topic,partition,offset")
    reset.add_argument("--dry-run", action="store_true", help="only show what would be committed")
    reset.add_argument("--json", action="store_true", help="as JSON")
    delete = add_action(
        actions,
        "delete",
        "delete groups without members, and their offsets",
        delete_some,
        "headrace group delete readers",
    )
    delete.add_argument("groups", metavar="GROUP", nargs="+")


def _topic(text: str) -> tuple[str, list[int]]:
    name, colon, numbers = text.rpartition(":")
    if not colon:
        return text, []
    parts = numbers.split(",")
    if not name or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"expected TOPIC or TOPIC:N,N, got {text!r}")
    return name, [int(part) for part in parts]


def _where(text: str) -> tuple[str, int]:
    try:
        return parse_start(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected earliest, latest, an offset or a time, got {text!r}"
        ) from None


async def list_all(options: argparse.Namespace) -> int:
    """All groups, or those in some states or of some types."""
    async with Admin(client_config(options, "admin")) as admin:
        groups = await list_groups(admin, states=options.state, types=options.type)
    if options.json:
        print_json([group._asdict() for group in groups])
    else:
        rows = [(group.group_id, group.type, group.state, group.coordinator) for group in groups]
        print_table(("group", "type", "state", "coordinator"), rows)
    return 0


async def describe_some(options: argparse.Namespace) -> int:
    """Groups with their partitions: committed, end, lag, and who reads them."""
    async with Admin(client_config(options, "admin")) as admin:
        described = [
            (await describe_group(admin, group_id), await _partitions(admin, group_id))
            for group_id in options.groups
        ]
    if options.json:
        print_json([_as_json(info, offsets) for info, offsets in described])
        return 0
    for info, offsets in described:
        title = f"{info.group_id}: {info.state}, {info.type}, {info.assignor or 'no assignor'}"
        if options.members:
            members = [
                (
                    member.member_id,
                    member.instance_id,
                    member.client_id,
                    member.client_host,
                    len(member.assignment),
                )
                for member in info.members
            ]
            print_table(("member", "instance", "client", "host", "partitions"), members, title=title)
        else:
            rows = [tuple(row.values()) for row in _rows(info, offsets)]
            columns = ("topic", "partition", "committed", "end", "lag", "member", "client", "host")
            print_table(columns, rows, title=title)
    return 0


Offsets = Mapping[TopicPartition, tuple[int | None, int]]


async def _partitions(admin: Admin, group_id: str) -> Offsets:
    """What a group committed or is assigned, with the end of each partition."""
    info = await describe_group(admin, group_id)
    committed = {
        partition: entry.offset for partition, entry in (await group_offsets(admin, group_id)).items()
    }
    wanted = set(committed) | {partition for member in info.members for partition in member.assignment}
    ends = await _listed(admin, dict.fromkeys(wanted, LATEST))
    return {partition: (committed.get(partition), ends[partition]) for partition in sorted(wanted)}


async def _listed(admin: Admin, wanted: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
    timeout_ms = admin.config.default_api_timeout_ms
    found = await list_offsets(admin.cluster, wanted, read_committed=False, timeout_ms=timeout_ms)
    return {partition: entry.offset for partition, entry in found.items()}


def _rows(info: GroupInfo, offsets: Offsets) -> list[dict[str, object]]:
    owners = {partition: member for member in info.members for partition in member.assignment}
    rows: list[dict[str, object]] = []
    for partition, (committed, end) in offsets.items():
        owner = owners.get(partition)
        rows.append(
            {
                "topic": partition.topic,
                "partition": partition.partition,
                "committed": committed,
                "end": end,
                "lag": None if committed is None else max(end - committed, 0),
                "member": owner.member_id if owner is not None else None,
                "client": owner.client_id if owner is not None else None,
                "host": owner.client_host if owner is not None else None,
            }
        )
    return rows


def _as_json(info: GroupInfo, offsets: Offsets) -> dict[str, object]:
    return {
        "group": info.group_id,
        "type": info.type,
        "state": info.state,
        "assignor": info.assignor,
        "members": [
            {
                "member": member.member_id,
                "instance": member.instance_id,
                "client": member.client_id,
                "host": member.client_host,
                "topics": list(member.topics),
            }
            for member in info.members
        ],
        "partitions": _rows(info, offsets),
    }


async def reset_offsets(options: argparse.Namespace) -> int:
    """Commit other offsets for a group that nobody reads in."""
    async with Admin(client_config(options, "admin")) as admin:
        before = {
            partition: entry.offset
            for partition, entry in (await group_offsets(admin, options.group)).items()
        }
        if options.file is not None:
            wanted = _from_file(options.file)
            after = await _within(admin, wanted)
        else:
            after = await _moved(admin, options, before)
        if not after:
            raise CommandError(
                f"group {options.group!r} has committed nothing; name the partitions with --topic"
            )
        if not options.dry_run:
            try:
                await alter_group_offsets(admin, options.group, after)
            except KafkaError as error:
                if error.code is ErrorCode.UNKNOWN_MEMBER_ID:
                    raise CommandError(
                        f"group {options.group!r} has members; stop them before its offsets are reset"
                    ) from None
                raise
    rows = [(p.topic, p.partition, before.get(p), offset) for p, offset in sorted(after.items())]
    if options.json:
        keys = ("topic", "partition", "before", "after")
        print_json([dict(zip(keys, row, strict=True)) for row in rows])
    else:
        print_table(("topic", "partition", "before", "after"), rows)
    return 0


def _from_file(path: Path) -> dict[TopicPartition, int]:
    wanted = {}
    try:
        with path.open(newline="") as lines:
            for number, line in enumerate(csv.reader(lines), 1):
                if not line:
                    continue
                if len(line) != 3 or not all(part.strip().isdecimal() for part in line[1:]):
                    raise UsageError(f"{path}, line {number}: expected topic,partition,offset")
                wanted[TopicPartition(line[0].strip(), int(line[1]))] = int(line[2])
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    return wanted


async def _moved(
    admin: Admin, options: argparse.Namespace, before: Mapping[TopicPartition, int]
) -> dict[TopicPartition, int]:
    partitions = await _named(admin, options.topic) if options.topic else list(before)
    if options.shift is not None:
        missing = [str(partition) for partition in partitions if partition not in before]
        if missing:
            raise CommandError(f"nothing is committed for {', '.join(missing)}, so it cannot be shifted")
        return await _within(admin, {each: before[each] + options.shift for each in partitions})
    kind, number = options.to
    if kind == "offset":
        return await _within(admin, dict.fromkeys(partitions, number))
    asked = {"earliest": EARLIEST, "latest": LATEST}.get(kind, number)
    found = await _listed(admin, dict.fromkeys(partitions, asked))
    late = [partition for partition, offset in found.items() if offset < 0]  # no record is as late as that
    return found | await _listed(admin, dict.fromkeys(late, LATEST))


async def _named(admin: Admin, topics: list[tuple[str, list[int]]]) -> list[TopicPartition]:
    infos = {info.name: info for info in await admin.describe_topics([name for name, _ in topics])}
    return [
        TopicPartition(name, number)
        for name, numbers in topics
        for number in numbers or range(len(infos[name].partitions))
    ]


async def _within(admin: Admin, wanted: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
    """Offsets that the partitions have: those before the first or past the end become the nearest there is."""
    first = await _listed(admin, dict.fromkeys(wanted, EARLIEST))
    end = await _listed(admin, dict.fromkeys(wanted, LATEST))
    return {each: min(max(offset, first[each]), end[each]) for each, offset in wanted.items()}


async def delete_some(options: argparse.Namespace) -> int:
    """Delete groups, as far as that goes; the first that cannot be is told of."""
    async with Admin(client_config(options, "admin")) as admin:
        outcomes = await delete_groups(admin, options.groups)
    for outcome in outcomes:
        if outcome.error is None:
            print(f"deleted group {outcome.name}")
    for outcome in outcomes:
        if outcome.error is not None:
            has_members = outcome.error.code is ErrorCode.NON_EMPTY_GROUP
            why = "it has members; stop them first" if has_members else outcome.error.message
            raise CommandError(f"cannot delete group {outcome.name!r}: {why}")
    return 0
