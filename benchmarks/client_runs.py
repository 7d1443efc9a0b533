"""What each Python client does in `benchmarks.clients`: the same records through the same broker.

A run takes the bootstrap address, an empty topic of one partition and a number of records, and returns rates. Settings
are alike: linger 5 ms, batches of about 256 KB, acks=1, no compression. Called in a process of its own for every run.
"""

import os
import time
from typing import Any

RECORD_BYTES = 100
BATCH_BYTES = 256 * 1024
LINGER_MS = 5
POLL_RECORDS = 10_000
PARTITION_FETCH_BYTES = 8 * 1024 * 1024
ARROW_ROWS = 100_000
ARROW_BATCH_BYTES = 512 * 1024
CODEC_ROUNDS = 20
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


async def headrace_arrow(bootstrap: str, topic: str, count: int) -> Numbers:
    import pyarrow as pa

    from headrace import Consumer, Producer

    out: Numbers = {}
    count -= count % ARROW_ROWS
    tables = [pa.table({"value": pa.array([VALUE] * ARROW_ROWS, pa.binary())})] * (count // ARROW_ROWS)
    async with Producer(
        bootstrap_servers=bootstrap,
        batch_size=ARROW_BATCH_BYTES,
        max_request_size=4 * 1024 * 1024,
        acks=1,
    ) as producer:
        await producer.partitions(topic)
        begun = time.perf_counter(), time.process_time()
        for table in tables:
            await producer.send_arrow(topic, table)
        await producer.flush()
        out["produce"], out["produce_cpu"] = timed(count, *begun)
    async with Consumer(
        bootstrap_servers=bootstrap,
        auto_offset_reset="earliest",
        max_partition_fetch_bytes=PARTITION_FETCH_BYTES,
    ) as consumer:
        [place] = await consumer.partitions(topic)
        consumer.assign([place])
        begun = time.perf_counter(), time.process_time()
        found = 0
        while found < count:
            found += (await consumer.poll_arrow(1_000)).num_rows
        out["consume"], out["consume_cpu"] = timed(count, *begun)
        begun = time.perf_counter(), time.process_time()
        assert (await consumer.read_range(topic, 0, 0, count)).num_rows == count
        out["read_range"], out["read_range_cpu"] = timed(count, *begun)
    out["encode_cpu"], out["decode_cpu"] = arrow_codec(tables[0])
    return out


def arrow_codec(table: Any) -> tuple[float, float]:
    """Rows a second of one core between Arrow columns and the bytes of record batches, without any network."""
    from headrace.client.arrow import TableMaker, rows_of
    from headrace.records.builder import iter_batches
    from headrace.records.columns import add_batch, build_batch_of_rows

    [batch] = table.to_batches()
    begun = time.process_time()
    for _ in range(CODEC_ROUNDS):
        encoded = []
        rows = rows_of(batch, key=None, value="value", headers=None, timestamp=None)
        rows.digests = False
        order, starts = rows.assign(None, 1, 0)
        at = starts[0]
        while at < starts[1]:
            data, done = build_batch_of_rows(rows, order, at, starts[1], size_max=ARROW_BATCH_BYTES, now_ms=1)
            encoded.append(data)
            at = done
    encode = CODEC_ROUNDS * batch.num_rows / (time.process_time() - begun)
    begun = time.process_time()
    for _ in range(CODEC_ROUNDS):
        maker = TableMaker("t", 0, ["offset", "timestamp", "key", "value"])
        for data in encoded:
            for header, view in iter_batches(data):
                held = maker.new_columns()
                add_batch(held, header, view, 0, 2**63 - 1)
                maker.make(held, 0)
    return encode, CODEC_ROUNDS * batch.num_rows / (time.process_time() - begun)
