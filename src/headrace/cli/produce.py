"""`headrace produce`: lines as records.

Owns reading lines without stopping the event loop: a thread reads blocks, a bounded number of them ahead, so
that a terminal delivers each line as it is typed and a file is read as fast as the cluster takes it. Every
line is a record or is counted as failed; the exit status says whether all of them were acknowledged. A line
that cannot be sent ends the command, and its number is said: the lines before it are sent, none after it is.
"""

import argparse
import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator
from typing import BinaryIO

from headrace.base.errors import KafkaError
from headrace.cli.options import add_client_options, client_config, run, with_hint
from headrace.cli.output import print_json
from headrace.cli.parser import CommandError, UsageError, key_value, whole_number
from headrace.client.errors import RecordTooLarge
from headrace.client.producer import Delivery, Producer

DESCRIPTION = """\
Send each line of standard input, or of a file, as one record. Bytes are sent as they are, without the end of the line.
Records that are lost to a broker's restart are sent again, in order and without duplicates."""

EXAMPLE = """\
example:
  echo hello | headrace produce orders
  headrace produce orders --key-separator : --file orders.txt
  headrace produce orders -H source=shop --acks 1 --compression zstd < orders.txt"""

BLOCK_BYTES = 256 * 1024
BLOCKS_AHEAD_MAX = 4
TOPIC_WAIT_MS = 5_000
TOO_LONG_HINT = "raise it with -X max.request.size=…; the topic's max.message.bytes must allow it too"
DEFAULTS = {"batch.size": 131_072, "linger.ms": 5, "buffer.memory": 16 * 1024 * 1024}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("topic", metavar="TOPIC")
    parser.add_argument(
        "--key-separator",
        metavar="C",
        help="what stands between key and value in a line; a line without it has no key",
    )
    parser.add_argument("--file", metavar="F", help="read lines from this file instead of standard input")
    parser.add_argument(
        "-H",
        "--header",
        metavar="NAME=VALUE",
        dest="headers",
        type=key_value,
        action="append",
        default=[],
        help="a header for every record; may be repeated",
    )
    parser.add_argument(
        "--acks", choices=("0", "1", "all", "-1"), help="who must have a record (default: all)"
    )
    parser.add_argument(
        "--compression", choices=("none", "gzip", "snappy", "lz4", "zstd"), help="compression (default: none)"
    )
    parser.add_argument(
        "--partition",
        metavar="N",
        type=whole_number(0),
        help="send to this partition (default: by key, else spread)",
    )
    parser.add_argument("--json", action="store_true", help="report the counts as JSON")
    add_client_options(parser)
    parser.set_defaults(run=lambda options: run(produce(options)))


class _Tally:
    """What became of the records."""

    def __init__(self) -> None:
        self.acknowledged = 0
        self.failed = 0
        self.first_error: KafkaError | None = None

    def note(self, delivery: Delivery) -> None:
        error = delivery.exception()
        if error is None:
            self.acknowledged += 1
        else:
            self.failed += 1
            self.first_error = self.first_error or error


async def produce(options: argparse.Namespace) -> int:
    """Send every line."""
    if options.key_separator == "":
        raise UsageError("--key-separator: expected at least one character")
    separator = None if options.key_separator is None else os.fsencode(options.key_separator)
    headers = [(name, os.fsencode(value)) for name, value in options.headers]
    config: dict[str, object] = {**DEFAULTS, **client_config(options, "producer")}
    if options.acks is not None:
        config["acks"] = options.acks
    if options.compression is not None:
        config["compression.type"] = options.compression
    tally = _Tally()
    stopped: str | None = None
    async with Producer(config) as producer:
        count = await producer.partitions(options.topic, TOPIC_WAIT_MS)
        if options.partition is not None and options.partition >= count:
            raise CommandError(
                f"topic {options.topic!r} has {count} partitions, so there is no partition {options.partition}\n"
                f"  use 0 to {count - 1}"
            )
        number = 0
        try:
            async for lines in _lines(options.file, producer.config.max_request_size):
                for line in lines:
                    number += 1
                    key, value = _split(line, separator)
                    delivery = await producer.send(
                        options.topic, value, key=key, headers=headers, partition=options.partition
                    )
                    delivery.add_done_callback(tally.note)
        except _LineTooLong as error:
            stopped = f"stopped at line {number + 1}: {error}"
        except RecordTooLarge as error:
            stopped = f"stopped at line {number}: {error.message}\n  {TOO_LONG_HINT}"
        except KafkaError as error:
            stopped = f"stopped at line {number}: {with_hint(error)}"
        except CommandError as error:
            stopped = str(error)
        await producer.flush()
    return _report(options, tally, stopped)


def _split(line: bytes, separator: bytes | None) -> tuple[bytes | None, bytes]:
    if separator is None:
        return None, line
    key, found, value = line.partition(separator)
    return (key, value) if found else (None, line)


def _report(options: argparse.Namespace, tally: _Tally, stopped: str | None) -> int:
    if options.json:
        print_json({"topic": options.topic, "produced": tally.acknowledged, "failed": tally.failed})
    else:
        noun = "record" if tally.acknowledged == 1 else "records"
        print(f"produced {tally.acknowledged} {noun} to {options.topic}")
    problems = [] if stopped is None else [stopped]
    if tally.first_error is not None:
        total = tally.failed + tally.acknowledged
        hint = getattr(tally.first_error, "hint", "") or "mend the cause and send them again"
        problems.append(
            f"{tally.failed} of {total} records were not acknowledged: {tally.first_error.message}\n  {hint}"
        )
    if problems:
        raise CommandError("\n".join(problems))
    return 0


class _LineTooLong(Exception):
    """A line that outgrew what one record may have before its end was seen."""


async def _lines(path: str | None, line_bytes_max: int) -> AsyncIterator[list[bytes]]:
    """Whole lines, some at a time; the last may lack its end."""
    rest = b""
    async for block in _blocks(path):
        lines = (rest + block).split(b"\n")
        rest = lines.pop()
        if lines:
            yield lines
        if len(rest) > line_bytes_max:
            raise _LineTooLong(
                f"it is longer than max.request.size={line_bytes_max} bytes\n  {TOO_LONG_HINT}"
            )
    if rest:
        yield [rest]


async def _blocks(path: str | None) -> AsyncIterator[bytes]:
    """Blocks of a file or of standard input, read by a thread that a Ctrl-C does not have to wait for."""
    try:
        source: BinaryIO = sys.stdin.buffer if path is None else open(path, "rb")  # noqa: ASYNC230, SIM115
    except OSError as error:
        raise CommandError(f"cannot read {path}: {(error.strerror or '').lower()}\n  check --file") from None
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[bytes | OSError] = asyncio.Queue()
    ahead = threading.Semaphore(BLOCKS_AHEAD_MAX)

    def read() -> None:
        block: bytes | OSError = b" "
        while block and not isinstance(block, OSError):
            ahead.acquire()
            try:
                block = os.read(source.fileno(), BLOCK_BYTES)
            except OSError as error:
                block = error
            try:
                loop.call_soon_threadsafe(queue.put_nowait, block)
            except RuntimeError:
                return  # the command has ended

    threading.Thread(target=read, name="lines", daemon=True).start()
    while block := await queue.get():
        if isinstance(block, OSError):
            raise CommandError(
                f"cannot read {path or 'standard input'}: {(block.strerror or '').lower()}\n  check where it comes from"
            )
        ahead.release()
        yield block
