"""`headrace consume`: records to standard output.

Owns the choice of where to begin and end, and the output formats. Invariant: bytes of values reach standard
output as they are; in JSON what is not UTF-8 text is base64 and says so; what was written when the command
ends is whole records.
"""

import argparse
import base64
import json
import os
import sys
from datetime import datetime
from typing import Any

from headrace.cli.options import add_client_options, client_config, run
from headrace.cli.parser import CommandError, UsageError, whole_number
from headrace.client.consumer import Consumer, ConsumerRecord
from headrace.client.offsets import LATEST, list_offsets
from headrace.client.topics import TopicPartition

DESCRIPTION = """\
Print the records of topics: the value of each and the end of a line, or with --json one object a line:
{"topic", "partition", "offset", "timestamp" (ms), "key", "value", "headers": [{"name", "value"}, …]}.
A key or value that is not UTF-8 is given in base64, with "key_encoding" or "value_encoding" set to "base64" beside it.
Runs until Ctrl-C unless --max or --exit-at-end ends it."""

EXAMPLE = """\
example:
  headrace consume orders                                   # from the first record on, then as they come
  headrace consume orders --from latest
  headrace consume orders payments --from 2025-06-01T00:00:00Z --exit-at-end --json
  headrace consume orders --partition 0 --from 4200 --max 10
  headrace consume orders --group billing --exit-at-end      # what the group has not read yet"""

POLL_MS = 500
POLL_RECORDS_MAX = 5_000
# A whole number this large is a time in milliseconds (it was passed in 1973), a smaller one an offset.
TIMESTAMP_MS_MIN = 100_000_000_000


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("topics", metavar="TOPIC", nargs="+")
    parser.add_argument(
        "--group", metavar="G", help="read as a member of this group, and commit what was printed"
    )
    parser.add_argument(
        "--from",
        metavar="WHERE",
        dest="start",
        help="earliest, latest, an offset, or a time (ISO 8601, or milliseconds since 1970); default: "
        "auto.offset.reset if it is given, else earliest",
    )
    parser.add_argument(
        "--partition", metavar="N", type=whole_number(0), action="append", help="only this partition"
    )
    parser.add_argument("--max", metavar="N", type=whole_number(0), help="end after so many records")
    parser.add_argument(
        "--exit-at-end",
        action="store_true",
        help="end after the last record that was there when the command began",
    )
    parser.add_argument(
        "--key-separator", metavar="C", help="print key, C and value (default: the value alone)"
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object a line, with key, headers and position"
    )
    parser.add_argument(
        "--read-committed", action="store_true", help="leave out records of open and aborted transactions"
    )
    add_client_options(parser)
    parser.set_defaults(run=lambda options: run(consume(options)))


def parse_start(text: str) -> tuple[str, int]:
    """Where to begin: ("earliest" | "latest", 0), ("offset", n) or ("time", ms). Raises ValueError."""
    if text in ("earliest", "latest"):
        return text, 0
    if text.isdigit():
        number = int(text)
        return ("time", number) if number >= TIMESTAMP_MS_MIN else ("offset", number)
    moment = datetime.fromisoformat(text)  # a time without a zone is local time
    return "time", int(moment.timestamp() * 1000)


async def consume(options: argparse.Namespace) -> int:
    """Print records until told to stop."""
    config = client_config(options, "consumer")
    if options.group is not None:
        config["group.id"] = options.group
    if options.read_committed:
        config["isolation.level"] = "read_committed"
    config.setdefault("auto.offset.reset", "earliest")
    start = options.start
    if start is None:
        start = "latest" if config["auto.offset.reset"] == "latest" else "earliest"
    try:
        kind, number = parse_start(start)
    except ValueError:
        raise UsageError(
            f"--from {start}: expected earliest, latest, an offset, or a time such as 2025-06-01T12:00:00Z"
        ) from None
    if config.get("group.id") is not None:
        return await _consume_in_group(options, config, kind)
    async with Consumer(config) as consumer:
        partitions = await _partitions(consumer, options)
        consumer.assign(partitions)
        if kind == "offset":
            await _seek(consumer, partitions, number)
        elif kind == "time":
            consumer.seek_to_time(partitions, number)
        elif kind == "latest":
            consumer.seek_to_end(partitions)
        else:
            consumer.seek_to_beginning(partitions)
        await _print_all(consumer, options, partitions)
    return 0


async def _consume_in_group(options: argparse.Namespace, config: dict[str, Any], start: str) -> int:
    """Print what the group gives this member; what is printed is committed."""
    if options.partition is not None or start not in ("earliest", "latest"):
        raise UsageError("--group goes on where the group was: it takes no --partition, offset or time")
    if options.start is not None:
        config["auto.offset.reset"] = start
    config.setdefault("enable.auto.commit", False)
    remaining = options.max
    render = _json_line if options.json else _plain(options.key_separator)
    async with Consumer(config) as consumer:
        for topic in dict.fromkeys(options.topics):
            await consumer.partitions(topic)
        consumer.subscribe(options.topics)
        while remaining is None or remaining > 0:
            count_max = POLL_RECORDS_MAX if remaining is None else min(POLL_RECORDS_MAX, remaining)
            records = await consumer.poll(POLL_MS, count_max)
            if records:
                sys.stdout.buffer.write(b"".join([render(record) for record in records]))
                sys.stdout.buffer.flush()
                await consumer.commit()
                if remaining is not None:
                    remaining -= len(records)
            elif options.exit_at_end and await _at_end(consumer):
                break
    return 0


async def _at_end(consumer: Consumer) -> bool:
    """Whether this member has partitions, and all of them were read to their end."""
    mine = consumer.assignment
    ends = await consumer.end_offsets(mine)
    return bool(mine) and all([await consumer.position(p) >= ends[p] for p in mine])


async def _seek(consumer: Consumer, partitions: list[TopicPartition], offset: int) -> None:
    """Begin at an offset; where a partition does not have it, at the nearest that it has, and say so.

    Left to `auto.offset.reset`, an offset past the end would print everything from the beginning.
    """
    first = await consumer.beginning_offsets(partitions)
    # The end of the log, also when only committed records are read: they may end before the offset asked for.
    end = await list_offsets(
        consumer.cluster,
        dict.fromkeys(partitions, LATEST),
        read_committed=False,
        timeout_ms=consumer.config.default_api_timeout_ms,
    )
    for partition in partitions:
        lowest, highest = first[partition], end[partition].offset
        nearest = min(max(offset, lowest), highest)
        if nearest != offset:
            place = "end" if offset > highest else "first record"
            print(
                f"headrace: note: {partition} has no offset {offset}; reading from its {place}, {nearest}",
                file=sys.stderr,
            )
        consumer.seek(partition, nearest)


async def _partitions(consumer: Consumer, options: argparse.Namespace) -> list[TopicPartition]:
    found: list[TopicPartition] = []
    for topic in dict.fromkeys(options.topics):
        there = await consumer.partitions(topic)
        wanted = [p for p in there if options.partition is None or p.partition in options.partition]
        missing = set(options.partition or ()) - {p.partition for p in wanted}
        if missing:
            raise CommandError(
                f"topic {topic!r} has no partition {min(missing)}\n  it has {len(there)}: 0 to {len(there) - 1}"
            )
        found += wanted
    return found


async def _print_all(
    consumer: Consumer, options: argparse.Namespace, partitions: list[TopicPartition]
) -> None:
    remaining = options.max
    ends = await consumer.end_offsets(partitions) if options.exit_at_end else None
    render = _json_line if options.json else _plain(options.key_separator)
    out = sys.stdout.buffer
    while remaining is None or remaining > 0:
        if ends is not None and await _drop_finished(consumer, ends):
            return
        count_max = POLL_RECORDS_MAX if remaining is None else min(POLL_RECORDS_MAX, remaining)
        records = await consumer.poll(POLL_MS, count_max)
        if ends is not None:
            records = [r for r in records if r.offset < ends.get(TopicPartition(r.topic, r.partition), 0)]
        if records:
            out.write(b"".join([render(record) for record in records]))
            out.flush()
            if remaining is not None:
                remaining -= len(records)


async def _drop_finished(consumer: Consumer, ends: dict[TopicPartition, int]) -> bool:
    """Stop reading partitions that have reached their end; returns whether all have."""
    for partition in list(ends):
        if await consumer.position(partition) >= ends[partition]:
            del ends[partition]
    if set(consumer.assignment) != set(ends):
        consumer.assign(list(ends))
    return not ends


def _plain(key_separator: str | None) -> Any:
    if key_separator is None:
        return lambda record: (record.value or b"") + b"\n"
    between = os.fsencode(key_separator)
    return lambda record: (record.key or b"") + between + (record.value or b"") + b"\n"


def _json_line(record: ConsumerRecord) -> bytes:
    fields: dict[str, Any] = {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": record.timestamp_ms,
        **_text("key", record.key),
        **_text("value", record.value),
        "headers": [
            {
                "name": name.encode("utf-8", "surrogateescape").decode("utf-8", "replace"),
                **_text("value", value),
            }
            for name, value in record.headers
        ],
    }
    return json.dumps(fields, ensure_ascii=False).encode() + b"\n"


def _text(name: str, value: bytes | None) -> dict[str, str | None]:
    """A field as text, or as base64 with a field beside it that says so."""
    if value is None:
        return {name: None}
    try:
        return {name: value.decode()}
    except UnicodeDecodeError:
        return {name: base64.b64encode(value).decode(), f"{name}_encoding": "base64"}
