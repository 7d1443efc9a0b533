"""`headrace txn list|describe|abort`."""

import argparse
import time

from headrace.cli.options import add_action, add_client_options, client_config
from headrace.cli.output import print_json, print_table
from headrace.cli.parser import UsageError, subcommands, whole_number
from headrace.client.admin import Admin
from headrace.client.admin_txn import (
    TransactionInfo,
    abort_hanging,
    abort_transaction,
    describe_producers,
    describe_transaction,
    list_transactions,
)
from headrace.client.topics import TopicPartition

DESCRIPTION = "List, describe and abort transactions."
EXAMPLE = """\
example:
  headrace txn list
  headrace txn describe copier-1
  headrace txn abort copier-1"""

OPEN = ("Ongoing", "PrepareCommit", "PrepareAbort")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the actions."""
    add_client_options(parser)
    actions = subcommands(parser)
    listing = add_action(
        actions, "list", "list transactional ids", list_all, "headrace txn list --state Ongoing"
    )
    listing.add_argument(
        "--state",
        metavar="STATE",
        action="append",
        default=[],
        help="only ids in this state; may be repeated",
    )
    listing.add_argument("--json", action="store_true", help="as JSON")
    describe = add_action(
        actions, "describe", "describe transactional ids", describe_some, "headrace txn describe copier-1"
    )
    describe.add_argument("ids", metavar="ID", nargs="+")
    describe.add_argument("--json", action="store_true", help="as JSON")
    abort = add_action(
        actions,
        "abort",
        "shut a producer out and abort what it has open",
        abort_one,
        "headrace txn abort copier-1\n  headrace txn abort --partition orders:3 --start-offset 1042",
    )
    abort.add_argument("id", metavar="ID", nargs="?", help="a transactional id")
    abort.add_argument(
        "--partition", metavar="TOPIC:N", type=_partition, help="a partition with a transaction that hangs"
    )
    abort.add_argument(
        "--start-offset",
        metavar="OFFSET",
        type=whole_number(0),
        help="where that transaction began; without it, those open are listed",
    )


def _partition(text: str) -> TopicPartition:
    topic, _, index = text.rpartition(":")
    if not topic or not index.isdigit():
        raise argparse.ArgumentTypeError(f"expected TOPIC:N, got {text!r}")
    return TopicPartition(topic, int(index))


def _age_s(info: TransactionInfo) -> float | None:
    if info.state not in OPEN or info.start_ms < 0:
        return None
    return max(0.0, round(time.time() - info.start_ms / 1000, 1))


async def list_all(options: argparse.Namespace) -> int:
    """Transactional ids; of open ones, how long they have been."""
    async with Admin(client_config(options, "admin")) as admin:
        listed = await list_transactions(admin, options.state)
        opened = [
            await describe_transaction(admin, each.transactional_id) for each in listed if each.state in OPEN
        ]
    ages = {info.transactional_id: _age_s(info) for info in opened}
    if options.json:
        print_json([{**each._asdict(), "age_s": ages.get(each.transactional_id)} for each in listed])
        return 0
    print_table(
        ("transactional id", "state", "producer id", "coordinator", "age s"),
        [
            (
                each.transactional_id,
                each.state,
                each.producer_id,
                each.coordinator,
                ages.get(each.transactional_id),
            )
            for each in listed
        ],
    )
    known = [age for age in ages.values() if age is not None]
    if known:
        print(f"oldest open transaction: {max(known)} s")
    return 0


async def describe_some(options: argparse.Namespace) -> int:
    """Transactional ids with the partitions of their open transactions."""
    async with Admin(client_config(options, "admin")) as admin:
        found = [await describe_transaction(admin, each) for each in options.ids]
    if options.json:
        print_json(
            [
                {
                    **each._asdict(),
                    "partitions": [p._asdict() for p in each.partitions],
                    "age_s": _age_s(each),
                }
                for each in found
            ]
        )
        return 0
    for each in found:
        print_table(
            ("state", "producer id", "epoch", "coordinator", "timeout ms", "age s"),
            [
                (
                    each.state,
                    each.producer_id,
                    each.producer_epoch,
                    each.coordinator,
                    each.timeout_ms,
                    _age_s(each),
                )
            ],
            title=each.transactional_id,
        )
        for where in each.partitions:
            print(f"  {where.topic}-{where.partition}")
    return 0


async def abort_one(options: argparse.Namespace) -> int:
    """Abort by transactional id, or what hangs in a partition."""
    if (options.id is None) == (options.partition is None):
        raise UsageError("name a transactional id or --partition, one of the two")
    async with Admin(client_config(options, "admin")) as admin:
        if options.id is not None:
            await abort_transaction(admin, options.id)
            print(f"shut out the producer of {options.id}; what it had open is aborted")
            return 0
        where: TopicPartition = options.partition
        if options.start_offset is None:
            producers = await describe_producers(admin, where)
            print_table(
                ("start offset", "producer id", "epoch", "last write s ago"),
                [
                    (p.open_from, p.producer_id, p.epoch, round(time.time() - p.last_timestamp_ms / 1000, 1))
                    for p in producers
                    if p.open_from >= 0
                ],
            )
            return 0
        producer_id = await abort_hanging(admin, where, options.start_offset)
        print(f"aborted the transaction of producer {producer_id} in {where.topic}-{where.partition}")
    return 0
