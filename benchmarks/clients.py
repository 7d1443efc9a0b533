"""Python clients beside each other: the same records through the same broker, one record a call.

    .venv/bin/python -m benchmarks.clients                      # a broker of this checkout
    .venv/bin/python -m benchmarks.clients --bootstrap HOST:PORT --records 500000 --runs 5

Each client runs in a process of its own, the clients take turns, and the median of the runs is shown with the processor
time of the client beside it (on a busy machine the steadier of the two). Settings are alike: linger 5 ms, batches of
about 256 KB, acks=1, no compression. Prints a table, and JSON with --json.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

RECORD_BYTES = 100
BATCH_BYTES = 256 * 1024
LINGER_MS = 5
POLL_RECORDS = 10_000
PARTITION_FETCH_BYTES = 8 * 1024 * 1024
CLIENTS = ("headrace", "headrace-blocking", "confluent-kafka", "aiokafka", "kafka-python")
VALUE = b"x" * RECORD_BYTES

Numbers = dict[str, float]


def timed(count: int, begun_s: float, begun_cpu_s: float) -> tuple[float, float]:
    """Records a second, and records a second of the client's own processor time."""
    return count / (time.perf_counter() - begun_s), count / (time.process_time() - begun_cpu_s)


async def headrace(bootstrap: str, topic: str, count: int) -> Numbers:
    from headrace import Consumer, Producer

    out: Numbers = {}
    async with Producer(
        bootstrap_servers=bootstrap,
        linger_ms=LINGER_MS,
        batch_size=BATCH_BYTES,
        max_request_size=4 * 1024 * 1024,
        acks=1,
    ) as producer:
        await producer.partitions(topic)
        begun = time.perf_counter(), time.process_time()
        for _ in range(count):
            await producer.send(topic, VALUE)
        await producer.flush()
        out["produce"], out["produce_cpu"] = timed(count, *begun)
    for name, one_by_one in (("consume", True), ("consume_many", False)):
        async with Consumer(
            bootstrap_servers=bootstrap,
            auto_offset_reset="earliest",
            max_partition_fetch_bytes=PARTITION_FETCH_BYTES,
        ) as consumer:
            consumer.assign(await consumer.partitions(topic))
            begun = time.perf_counter(), time.process_time()
            found = 0
            if one_by_one:
                async for record in consumer:
                    found += record.value is not None
                    if found == count:
                        break
            else:
                while found < count:
                    for record in await consumer.poll(1_000, POLL_RECORDS):
                        found += record.value is not None
            out[name], out[name + "_cpu"] = timed(count, *begun)
    return out


async def headrace_blocking(bootstrap: str, topic: str, count: int) -> Numbers:
    from headrace.blocking import Consumer, Producer

    out: Numbers = {}
    with Producer(
        bootstrap_servers=bootstrap,
        linger_ms=LINGER_MS,
        batch_size=BATCH_BYTES,
        max_request_size=4 * 1024 * 1024,
        acks=1,
    ) as producer:
        producer.partitions(topic)
        begun = time.perf_counter(), time.process_time()
        for _ in range(count):
            producer.send(topic, VALUE)
        producer.flush()
        out["produce"], out["produce_cpu"] = timed(count, *begun)
    with Consumer(
        bootstrap_servers=bootstrap,
        auto_offset_reset="earliest",
        max_partition_fetch_bytes=PARTITION_FETCH_BYTES,
    ) as consumer:
        consumer.assign(consumer.partitions(topic))
        begun = time.perf_counter(), time.process_time()
        found = 0
        for record in consumer:
            found += record.value is not None
            if found == count:
                break
        out["consume"], out["consume_cpu"] = timed(count, *begun)
    return out


async def confluent(bootstrap: str, topic: str, count: int) -> Numbers:
    from confluent_kafka import Consumer, Producer, TopicPartition

    out: Numbers = {}
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "linger.ms": LINGER_MS,
            "batch.size": BATCH_BYTES,
            "acks": 1,
            "queue.buffering.max.messages": 1_000_000,
        }
    )
    begun = time.perf_counter(), time.process_time()
    for _ in range(count):
        while True:
            try:
                producer.produce(topic, VALUE)
                break
            except BufferError:
                producer.poll(0.01)
    producer.flush()
    out["produce"], out["produce_cpu"] = timed(count, *begun)
    for name in ("consume", "consume_many"):
        consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": f"bench-{os.getpid()}",
                "enable.auto.commit": False,
                "max.partition.fetch.bytes": PARTITION_FETCH_BYTES,
            }
        )
        consumer.assign([TopicPartition(topic, 0, 0)])
        begun = time.perf_counter(), time.process_time()
        found = 0
        while found < count:
            if name == "consume":
                message = consumer.poll(1.0)
                found += message is not None and message.value() is not None
            else:
                for message in consumer.consume(POLL_RECORDS, 1.0):
                    found += message.value() is not None
        out[name], out[name + "_cpu"] = timed(count, *begun)
        consumer.close()
    return out


async def aiokafka(bootstrap: str, topic: str, count: int) -> Numbers:
    from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

    out: Numbers = {}
    producer = AIOKafkaProducer(
        bootstrap_servers=bootstrap, linger_ms=LINGER_MS, max_batch_size=BATCH_BYTES, acks=1
    )
    await producer.start()
    begun = time.perf_counter(), time.process_time()
    for _ in range(count):
        await producer.send(topic, VALUE)
    await producer.flush()
    out["produce"], out["produce_cpu"] = timed(count, *begun)
    await producer.stop()
    consumer = AIOKafkaConsumer(
        bootstrap_servers=bootstrap,
        auto_offset_reset="earliest",
        max_partition_fetch_bytes=PARTITION_FETCH_BYTES,
    )
    await consumer.start()
    consumer.assign([TopicPartition(topic, 0)])
    begun = time.perf_counter(), time.process_time()
    found = 0
    async for message in consumer:
        found += message.value is not None
        if found == count:
            break
    out["consume"], out["consume_cpu"] = timed(count, *begun)
    await consumer.stop()
    return out


async def kafka_python(bootstrap: str, topic: str, count: int) -> Numbers:
    from kafka import KafkaConsumer, KafkaProducer, TopicPartition

    out: Numbers = {}
    producer = KafkaProducer(bootstrap_servers=bootstrap, linger_ms=LINGER_MS, batch_size=BATCH_BYTES, acks=1)
    begun = time.perf_counter(), time.process_time()
    for _ in range(count):
        producer.send(topic, VALUE)
    producer.flush()
    out["produce"], out["produce_cpu"] = timed(count, *begun)
    producer.close()
    consumer = KafkaConsumer(
        bootstrap_servers=bootstrap,
        auto_offset_reset="earliest",
        max_partition_fetch_bytes=PARTITION_FETCH_BYTES,
    )
    consumer.assign([TopicPartition(topic, 0)])
    begun = time.perf_counter(), time.process_time()
    found = 0
    for message in consumer:
        found += message.value is not None
        if found == count:
            break
    out["consume"], out["consume_cpu"] = timed(count, *begun)
    consumer.close()
    return out


RUNS: dict[str, Callable[[str, str, int], Awaitable[Numbers]]] = {
    "headrace": headrace,
    "headrace-blocking": headrace_blocking,
    "confluent-kafka": confluent,
    "aiokafka": aiokafka,
    "kafka-python": kafka_python,
}


def one(client: str, bootstrap: str, count: int) -> Numbers:
    """One run of one client, on a topic of its own, in this process."""
    from headrace import Admin, NewTopic

    topic = f"clients-{client}-{time.time_ns()}"

    async def run() -> Numbers:
        async with Admin(bootstrap_servers=bootstrap) as admin:
            await admin.create_topic(NewTopic(topic, 1, 1))
            try:
                return await RUNS[client](bootstrap, topic, count)
            finally:
                await admin.delete_topics([topic])

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


def measure(bootstrap: str, count: int, runs: int, clients: list[str]) -> dict[str, dict[str, list[float]]]:
    """All runs of all clients, taking turns."""
    found: dict[str, dict[str, list[float]]] = {client: {} for client in clients}
    for _ in range(runs):
        for client in clients:
            slow = client in ("aiokafka", "kafka-python")
            command = [sys.executable, "-m", "benchmarks.clients", "--one", client, "--bootstrap", bootstrap]
            command += ["--records", str(count // 5 if slow else count)]
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
            for name, value in json.loads(done.stdout.splitlines()[-1]).items():
                found[client].setdefault(name, []).append(value)
    return found


def table(found: dict[str, dict[str, list[float]]]) -> str:
    """The medians as a table of Markdown, thousands of records a second."""
    columns = {"produce": "send", "consume": "one by one", "consume_many": "in lists"}
    lines = [
        "| client | " + " | ".join(f"{title} | (client CPU)" for title in columns.values()) + " |",
        "|---|" + "---:|---:|" * len(columns),
    ]
    for client, numbers in found.items():
        keys = [key for name in columns for key in (name, name + "_cpu")]
        cells = [f"{statistics.median(numbers[k]) / 1000:,.0f}" if k in numbers else "" for k in keys]
        lines.append(f"| {client} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bootstrap", help="the cluster (default: a broker of this checkout)")
    parser.add_argument("--records", type=int, default=500_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", help="these clients, with commas between them")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", choices=CLIENTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one, options.bootstrap, options.records)))
        return
    clients = options.only.split(",") if options.only else list(CLIENTS)

    def report(bootstrap: str) -> Any:
        found = measure(bootstrap, options.records, options.runs, clients)
        print(json.dumps(found) if options.json else table(found))

    if options.bootstrap:
        report(options.bootstrap)
        return
    from benchmarks.systems import Headrace

    system = Headrace()
    try:
        report(system.start().bootstrap)
    finally:
        system.remove()


if __name__ == "__main__":
    main()
