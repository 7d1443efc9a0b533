"""`headrace bench produce|consume|latency`: the standard workloads, with this package's client, against any cluster.

Owns the workloads. Invariants: each works in a topic of its own, which it deletes; what it reports was
acknowledged or read, and checked to be all of it. Figures are those of this client: other clients and the
broker may be faster.
"""

import argparse
import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from headrace.cli.options import add_client_options, client_config, run
from headrace.cli.output import print_json, print_table
from headrace.cli.parser import CommandError, Parser, key_value, subcommands, whole_number
from headrace.client.admin import Admin, NewTopic
from headrace.client.consumer import Consumer
from headrace.client.producer import Delivery, Producer
from headrace.client.topics import TopicPartition

DESCRIPTION = (
    "Measure a cluster with standard workloads. Each uses a topic of its own and deletes it afterwards."
)
EXAMPLE = """\
example:
  headrace bench produce --records 1000000 --size 100
  headrace bench consume --against 127.0.0.1:9092 --json
  headrace bench latency --rate 1000 --seconds 10"""

BATCH_BYTES = 256 * 1024
REQUEST_BYTES_MAX = 4 * 1024 * 1024
BUFFER_BYTES = 64 * 1024 * 1024
POLL_RECORDS_MAX = 10_000
STALL_S = 60.0

Workload = Callable[[argparse.Namespace, dict[str, Any], str], Awaitable[dict[str, Any]]]


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the workloads."""
    add_client_options(parser)
    actions = subcommands(parser)
    produce = _workload(actions, "produce", "how fast records are acknowledged", bench_produce)
    produce.add_argument("--acks", choices=("0", "1", "all"), default="all", help="(default: all)")
    consume = _workload(actions, "consume", "how fast records are read", bench_consume)
    for parser_ in (produce, consume):
        parser_.add_argument(
            "--records", metavar="N", type=whole_number(1), default=500_000, help="(default: 500000)"
        )
        parser_.add_argument(
            "--compression",
            choices=("none", "gzip", "snappy", "lz4", "zstd"),
            default="none",
            help="(default: none)",
        )
    latency = _workload(actions, "latency", "how long a record takes from send to reader", bench_latency)
    latency.add_argument("--acks", choices=("1", "all"), default="all", help="(default: all)")
    latency.add_argument(
        "--rate", metavar="N", type=whole_number(1), default=1_000, help="records a second (default: 1000)"
    )
    latency.add_argument("--seconds", metavar="S", type=whole_number(1), default=10, help="(default: 10)")


def _workload(actions: Any, name: str, summary: str, workload: Workload) -> Parser:
    parser: Parser = actions.add_parser(
        name,
        help=summary,
        description=f"Measure {summary}.",
        epilog=f"example:\n  headrace bench {name} --against 127.0.0.1:9092 --json",
    )
    parser.add_argument("--against", metavar="BOOTSTRAP", help="the cluster to measure (the same as -b)")
    parser.add_argument(
        "--size", metavar="BYTES", type=whole_number(8), default=100, help="value size (default: 100)"
    )
    parser.add_argument("--partitions", metavar="N", type=whole_number(1), default=1, help="(default: 1)")
    parser.add_argument(
        "--topic-config",
        metavar="KEY=VALUE",
        type=key_value,
        action="append",
        default=[],
        help="a setting of the topic",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    add_client_options(parser, action=True)
    parser.set_defaults(run=lambda options: run(_run(options, name, workload)))
    return parser


async def _run(options: argparse.Namespace, name: str, workload: Workload) -> int:
    options.bootstrap = options.against or options.bootstrap
    config = client_config(options, "producer", "consumer", "admin")
    async with _topic(options, config) as topic:
        result = await workload(options, config, topic)
    report = {"workload": name, "bootstrap": str(config["bootstrap.servers"]), **result}
    if options.json:
        print_json(report)
    else:
        print_table(
            ("measure", "value"), [(key.replace("_", " "), _shown(value)) for key, value in report.items()]
        )
    return 0


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.3f}" if value < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


@asynccontextmanager
async def _topic(options: argparse.Namespace, config: dict[str, Any]) -> AsyncIterator[str]:
    """A fresh topic, deleted at the end."""
    name = f"headrace-bench-{os.getpid()}-{time.time_ns()}"
    settings = dict(options.topic_config)
    async with Admin(_only(config, "admin")) as admin:
        await admin.create_topic(NewTopic(name, options.partitions, -1, settings))
        try:
            yield name
        finally:
            await admin.delete_topics([name])


def _only(config: dict[str, Any], client: str) -> dict[str, Any]:
    from headrace.client.config import foreign_keys

    return {key: value for key, value in config.items() if key not in foreign_keys(config, client)}


async def bench_produce(options: argparse.Namespace, config: dict[str, Any], topic: str) -> dict[str, Any]:
    """Send as fast as the cluster acknowledges."""
    elapsed_s = await _fill(options, config, topic, options.acks)
    return _rates(options, elapsed_s) | {"acks": options.acks, "compression": options.compression}


async def bench_consume(options: argparse.Namespace, config: dict[str, Any], topic: str) -> dict[str, Any]:
    """Fill the topic, then read it as fast as it comes."""
    await _fill(options, config, topic, "1")
    large = {"max.partition.fetch.bytes": 8 * 1024 * 1024, "auto.offset.reset": "earliest"}
    async with Consumer({**large, **_only(config, "consumer")}) as consumer:
        consumer.assign(await consumer.partitions(topic))
        begin_s = time.perf_counter()
        count = 0
        while count < options.records:
            records = await consumer.poll(STALL_S * 1000, POLL_RECORDS_MAX)
            if not records:
                raise CommandError(
                    f"read {count} of {options.records} records, then nothing for {STALL_S:.0f} s"
                )
            count += len(records)
        elapsed_s = time.perf_counter() - begin_s
    return _rates(options, elapsed_s) | {"compression": options.compression}


async def _fill(options: argparse.Namespace, config: dict[str, Any], topic: str, acks: str) -> float:
    tuned = {
        "batch.size": BATCH_BYTES,
        "max.request.size": REQUEST_BYTES_MAX,
        "buffer.memory": BUFFER_BYTES,
        "compression.type": options.compression,
    }
    failed: list[Delivery] = []

    def note(delivery: Delivery) -> None:
        if delivery.exception() is not None:
            failed.append(delivery)

    async with Producer({**tuned, **_only(config, "producer"), "acks": acks}) as producer:
        await producer.partitions(topic)
        value = os.urandom((options.size + 1) // 2).hex().encode()[: options.size]
        begin_s = time.perf_counter()
        for _ in range(options.records):
            (await producer.send(topic, value)).add_done_callback(note)
        await producer.flush()
        elapsed_s = time.perf_counter() - begin_s
    if failed:
        raise CommandError(f"{len(failed)} records were not acknowledged: {failed[0].exception()}")
    return elapsed_s


def _rates(options: argparse.Namespace, elapsed_s: float) -> dict[str, Any]:
    return {
        "records": options.records,
        "record_bytes": options.size,
        "partitions": options.partitions,
        "seconds": round(elapsed_s, 3),
        "records_per_s": round(options.records / elapsed_s),
        "megabytes_per_s": round(options.records * options.size / elapsed_s / 1e6, 2),
    }


async def bench_latency(options: argparse.Namespace, config: dict[str, Any], topic: str) -> dict[str, Any]:
    """Send at a steady rate; each value holds the time of its sending, which the reader compares with its own clock."""
    total = options.rate * options.seconds
    latencies_ms: list[float] = []
    quick = {"linger.ms": 0, "acks": options.acks}
    async with Consumer({"fetch.max.wait.ms": 500, **_only(config, "consumer")}) as consumer:
        partitions = await consumer.partitions(topic)
        consumer.assign(partitions)
        consumer.seek_to_beginning(partitions)
        for partition in partitions:
            await consumer.position(partition)
        async with Producer({**_only(config, "producer"), **quick}) as producer:
            await producer.partitions(topic)
            await (
                await producer.send(topic, _stamp(options.size))
            )  # connections and producer id, not measured
            await _await_warm(consumer)
            reader = asyncio.create_task(_read_latencies(consumer, partitions, total, latencies_ms))
            begin_s = time.perf_counter()
            for number in range(total):
                ahead_s = begin_s + number / options.rate - time.perf_counter()
                if ahead_s > 0:
                    await asyncio.sleep(ahead_s)
                await producer.send(topic, _stamp(options.size))
            await producer.flush()
            await reader
    latencies_ms.sort()
    return {
        "records": total,
        "record_bytes": options.size,
        "rate_per_s": options.rate,
        "acks": options.acks,
        **{
            f"p{str(p).replace('.', '')}_ms": round(_percentile(latencies_ms, p), 3)
            for p in (50, 90, 99, 99.9)
        },
        "max_ms": round(latencies_ms[-1], 3),
    }


def _stamp(size: int) -> bytes:
    return time.perf_counter_ns().to_bytes(8, "big").ljust(size, b".")


async def _await_warm(consumer: Consumer) -> None:
    if not await consumer.poll(STALL_S * 1000):
        raise CommandError(f"the first record did not arrive within {STALL_S:.0f} s")


async def _read_latencies(
    consumer: Consumer, partitions: list[TopicPartition], total: int, latencies_ms: list[float]
) -> None:
    while len(latencies_ms) < total:
        records = await consumer.poll(STALL_S * 1000)
        now_ns = time.perf_counter_ns()
        if not records:
            raise CommandError(
                f"{len(latencies_ms)} of {total} records arrived, then none for {STALL_S:.0f} s"
            )
        for record in records:
            assert record.value is not None
            latencies_ms.append((now_ns - int.from_bytes(record.value[:8], "big")) / 1e6)


def _percentile(ordered: list[float], percent: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
