"""`headrace partition reassign|elect`: where replicas are, and who leads.

Owns the commands' options and output. Invariant: what will be done can be seen first (`--dry-run`), and a move that was
begun is finished by the cluster whether or not the command waits for it. Called by `cli.main`.
"""

import argparse
import asyncio
import time
from collections.abc import Iterable, Mapping

from headrace.base.errors import ErrorCode, KafkaError
from headrace.cli.moves import NoRoom, Replicas, after_moves, being_emptied, spread, without
from headrace.cli.options import add_action, add_client_options, client_config
from headrace.cli.output import print_json, print_table
from headrace.cli.parser import CommandError, UsageError, subcommands, whole_number
from headrace.client.admin import Admin
from headrace.client.cluster import TopicInfo
from headrace.client.cluster_admin import (
    Election,
    Outcomes,
    alter_reassignments,
    describe_brokers,
    elect_leaders,
    list_reassignments,
)
from headrace.client.topics import TopicPartition

DESCRIPTION = "Move replicas of partitions between brokers, and elect leaders."
EXAMPLE = """\
example:
  headrace partition reassign orders --to 1,2,3            # spread the topic over these brokers
  headrace partition reassign orders:0 --to 3,1            # one partition, broker 3 first
  headrace partition reassign --drain 5 --wait             # everything off broker 5
  headrace partition reassign --list
  headrace partition elect orders"""

LOOK_EVERY_S = 0.2
WAIT_MAX_S = 3600.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the actions."""
    add_client_options(parser)
    actions = subcommands(parser)
    reassign = add_action(
        actions,
        "reassign",
        "move replicas to other brokers",
        reassign_partitions,
        "headrace partition reassign orders --to 1,2,3 --wait",
    )
    reassign.add_argument("what", metavar="TOPIC[:PARTITION]", nargs="*", type=_topic_or_partition)
    reassign.add_argument(
        "--to",
        metavar="ID,ID,…",
        type=_ids,
        help="brokers to use; of one partition its replicas in order, of a topic spread in turn and over racks",
    )
    reassign.add_argument(
        "-r",
        "--replication-factor",
        metavar="R",
        type=whole_number(1, 32767),
        help="with --to: how many replicas (default: as many as there are)",
    )
    reassign.add_argument(
        "--drain", metavar="ID", type=whole_number(0), help="take everything off this broker"
    )
    reassign.add_argument("--cancel", action="store_true", help="end moves that are under way and go back")
    reassign.add_argument("--list", action="store_true", help="only show moves that are under way")
    reassign.add_argument("--wait", action="store_true", help="return when the moves are done")
    reassign.add_argument("--dry-run", action="store_true", help="only show what would be moved")
    reassign.add_argument("--json", action="store_true", help="as JSON")
    elect = add_action(
        actions,
        "elect",
        "give leadership back to the preferred replicas",
        elect_partitions,
        "headrace partition elect orders:0",
    )
    elect.add_argument(
        "what",
        metavar="TOPIC[:PARTITION]",
        nargs="*",
        type=_topic_or_partition,
        help="partitions (default: all)",
    )
    elect.add_argument(
        "--unclean",
        action="store_true",
        help="of partitions without a leader: take a replica that lives although it may lack records",
    )
    elect.add_argument("--json", action="store_true", help="as JSON")


def _topic_or_partition(text: str) -> tuple[str, int | None]:
    topic, colon, number = text.rpartition(":")
    if not colon:
        return text, None
    if not topic or not number.isdigit():
        raise argparse.ArgumentTypeError(f"expected TOPIC or TOPIC:PARTITION, got {text!r}")
    return topic, int(number)


def _ids(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"expected broker ids such as 1,2,3, got {text!r}")
    numbers = tuple(int(part) for part in parts)
    if len(set(numbers)) != len(numbers):
        raise argparse.ArgumentTypeError(f"a broker is named twice in {text!r}")
    return numbers


async def reassign_partitions(options: argparse.Namespace) -> int:
    """Begin moves, show them, end them, wait for them."""
    _check_usage(options)
    async with Admin(client_config(options, "admin")) as admin:
        if options.list:
            return await _show_moves(admin, options)
        wanted = await _wanted(admin, options)
        if not wanted:
            if options.json:
                print_json([])
            else:
                print("nothing to move" if not options.cancel else "nothing is being moved")
            return 0
        if options.dry_run:
            _print_wanted(wanted, options)
            return 0
        _raise_failed(await alter_reassignments(admin, wanted), "cannot move")
        _print_wanted(wanted, options)
        if options.wait:
            await _until_done(admin, set(wanted))
    return 0


def _check_usage(options: argparse.Namespace) -> None:
    chosen = [
        name
        for name, given in (
            ("--to", options.to is not None),
            ("--drain", options.drain is not None),
            ("--cancel", options.cancel),
            ("--list", options.list),
        )
        if given
    ]
    if len(chosen) != 1:
        raise UsageError(
            "give one of --to, --drain, --cancel and --list\n  try 'headrace partition reassign --help'"
        )
    if options.to is not None and not options.what:
        raise UsageError("--to: name the topics or partitions to move")
    if options.drain is not None and options.what:
        raise UsageError("--drain moves everything off a broker: name no topics")
    if options.replication_factor is not None and options.to is None:
        raise UsageError("--replication-factor: name the brokers with --to")
    if options.replication_factor is not None and options.replication_factor > len(options.to):
        raise UsageError(
            f"--replication-factor {options.replication_factor}: --to names only {len(options.to)} brokers"
        )


async def _wanted(admin: Admin, options: argparse.Namespace) -> Mapping[TopicPartition, Replicas | None]:
    if options.cancel:
        moving = await list_reassignments(admin)
        names = {(at.topic, None) for at in moving} if not options.what else set(options.what)
        return {at: None for at in moving if (at.topic, None) in names or at in names}
    if options.drain is not None:
        return await _drained(admin, options.drain)
    wanted: dict[TopicPartition, Replicas | None] = {}
    racks = {broker.node_id: broker.rack for broker in (await describe_brokers(admin)).brokers}
    moving = await list_reassignments(admin)  # before the topics: what ends in between is then seen ended
    for name, number in options.what:
        topic = await _topic(admin, name)
        after = after_moves(_replicas([topic]), moving)
        current = {at.partition: replicas for at, replicas in after.items()}
        if number is None:
            try:
                moves = spread(current, options.to, racks, options.replication_factor)
            except NoRoom as error:
                raise UsageError(
                    f"--to names {len(options.to)} brokers, too few for {name}: {error}\n"
                    f"  name more brokers, or ask for fewer replicas with -r {len(options.to)}"
                ) from None
        elif number not in current:
            raise CommandError(
                f"topic {name} has no partition {number}\n  'headrace topic describe {name}' shows them"
            )
        else:
            to = options.to[: options.replication_factor] if options.replication_factor else options.to
            moves = {number: to} if current[number] != to else {}
        wanted.update({TopicPartition(name, partition): to for partition, to in moves.items()})
    return wanted


async def _drained(admin: Admin, leaving: int) -> dict[TopicPartition, Replicas | None]:
    brokers = (await describe_brokers(admin)).brokers
    if leaving not in {broker.node_id for broker in brokers}:
        known = ", ".join(str(broker.node_id) for broker in brokers)
        raise CommandError(f"there is no broker {leaving}\n  the brokers are: {known}")
    moving = await list_reassignments(admin)  # before the topics: what ends in between is then seen ended
    current = after_moves(_replicas(await admin.list_topics()), moving)
    leaving_too = being_emptied(current, moving)
    others = [b.node_id for b in brokers if not b.fenced and b.node_id not in leaving_too]
    try:
        moves = without(current, leaving, others, {b.node_id: b.rack for b in brokers})
    except NoRoom as error:
        raise CommandError(
            f"broker {leaving} cannot be drained: {error}\n  add a broker, or give the topic fewer replicas first"
        ) from None
    return dict(moves)


def _replicas(topics: Iterable[TopicInfo]) -> dict[TopicPartition, Replicas]:
    return {
        TopicPartition(topic.name, p.partition): p.replicas
        for topic in topics
        for p in topic.partitions.values()
    }


async def _topic(admin: Admin, name: str) -> TopicInfo:
    (topic,) = await admin.describe_topics([name])
    if topic.error is not ErrorCode.NONE:
        raise KafkaError(topic.error, f"topic {name!r}: {topic.error.name}")
    return topic


async def _show_moves(admin: Admin, options: argparse.Namespace) -> int:
    moving = sorted((await list_reassignments(admin)).items())
    if options.json:
        print_json(
            [
                {
                    "topic": at.topic,
                    "partition": at.partition,
                    "replicas": list(move.replicas),
                    "adding": list(move.adding),
                    "removing": list(move.removing),
                }
                for at, move in moving
            ]
        )
        return 0
    if not moving:
        print("nothing is being moved")
        return 0
    rows = [[*at, _join(move.replicas), _join(move.adding), _join(move.removing)] for at, move in moving]
    print_table(("topic", "partition", "replicas", "adding", "removing"), rows)
    return 0


def _print_wanted(wanted: Mapping[TopicPartition, Replicas | None], options: argparse.Namespace) -> None:
    if options.json:
        print_json(
            [
                {"topic": at.topic, "partition": at.partition, "replicas": None if to is None else list(to)}
                for at, to in sorted(wanted.items())
            ]
        )
        return
    rows = [[*at, "back" if to is None else _join(to)] for at, to in sorted(wanted.items())]
    print_table(("topic", "partition", "to"), rows)


async def _until_done(admin: Admin, wanted: set[TopicPartition]) -> None:
    deadline_s = time.monotonic() + WAIT_MAX_S
    while wanted & (await list_reassignments(admin)).keys():
        if time.monotonic() > deadline_s:
            raise CommandError(
                "the moves are still under way\n  'headrace partition reassign --list' shows them, --cancel ends them"
            )
        await asyncio.sleep(LOOK_EVERY_S)


async def elect_partitions(options: argparse.Namespace) -> int:
    """Elect leaders; partitions that have the right one already are left out of the output."""
    kind = Election.UNCLEAN if options.unclean else Election.PREFERRED
    async with Admin(client_config(options, "admin")) as admin:
        outcomes = await elect_leaders(admin, kind, await _chosen(admin, options.what))
    elected = sorted(at for at, error in outcomes.items() if error is None)
    if options.json:
        print_json([{"topic": at.topic, "partition": at.partition} for at in elected])
    elif elected:
        print_table(("topic", "partition"), elected, title="new leaders")
    else:
        print("every leader is as it should be")
    _raise_failed(
        {
            at: e
            for at, e in outcomes.items()
            if e is not None and e.code is not ErrorCode.ELECTION_NOT_NEEDED
        },
        "cannot elect a leader of",
    )
    return 0


async def _chosen(admin: Admin, what: list[tuple[str, int | None]]) -> list[TopicPartition] | None:
    if not what:
        return None
    chosen: list[TopicPartition] = []
    for name, number in what:
        if number is not None:
            chosen.append(TopicPartition(name, number))
        else:
            topic = await _topic(admin, name)
            chosen += [TopicPartition(name, partition) for partition in sorted(topic.partitions)]
    return chosen


def _raise_failed(outcomes: Outcomes, what: str) -> None:
    failed = [f"{what} {at.topic}-{at.partition}: {e.message}" for at, e in outcomes.items() if e is not None]
    if failed:
        raise CommandError(
            "\n".join(failed) + "\n  'headrace status' and 'headrace topic describe' show the cluster"
        )


def _join(numbers: Replicas) -> str:
    return ",".join(map(str, numbers))
