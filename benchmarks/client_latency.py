"""How late records are that go from producer to consumer of a Python client at a steady rate; see `benchmarks.clients`.

Both ends are in one process and on one clock: in two threads where calls block, in two tasks of one event loop where
they are awaited. A record carries the time at which it was handed to the producer. Nothing lingers, acks=1, and the
first second does not count.

The rate is steady to a tenth of a millisecond for all. Where calls block, the writer naps that long; an event loop is
rung by the kernel instead (a timerfd), because uvloop counts in whole milliseconds: a task that sleeps between records
would send them in twos and threes, and the second would be measured waiting for the first.
"""

import asyncio
import ctypes
import os
import statistics
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable

RATE_PER_S = 1_000
WARM = RATE_PER_S
PADDING = b"x" * 80
NAP_S = 0.0001

Numbers = dict[str, float]


def stamp() -> bytes:
    return b"%.9f" % time.perf_counter() + PADDING


class Watch:
    """Takes the records as they arrive, and sums up."""

    def __init__(self, seconds: int) -> None:
        self.total = WARM + RATE_PER_S * seconds
        self.seen = 0
        self.took_ms: list[float] = []

    def arrived(self, value: bytes | None) -> bool:
        """One more has come; whether it was the last."""
        assert value is not None
        self.seen += 1
        if self.seen > WARM:
            self.took_ms.append((time.perf_counter() - float(value.rstrip(b"x"))) * 1000)
        return self.seen >= self.total

    def numbers(self) -> Numbers:
        quantiles = statistics.quantiles(self.took_ms, n=100)
        return {"latency_p50_ms": quantiles[49], "latency_p99_ms": quantiles[98]}


def write_in_thread(
    total: int, send: Callable[[bytes], object], idle: Callable[[], object]
) -> threading.Thread:
    """Send at the steady rate from a thread of its own, and `idle` in between."""

    def write() -> None:
        begun_s = time.perf_counter()
        for number in range(total):
            while time.perf_counter() < begun_s + number / RATE_PER_S:
                time.sleep(NAP_S)
                idle()
            send(stamp())

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    return writer


async def due(total: int) -> AsyncIterator[bytes]:
    """What to send, each when its time has come."""
    loop = asyncio.get_running_loop()
    rang = asyncio.Event()
    timer = metronome()
    loop.add_reader(timer, rang.set)
    try:
        sent = rings = 0
        while sent < total:
            await rang.wait()
            rang.clear()
            (missed,) = struct.unpack("=Q", os.read(timer, 8))
            rings += missed
            while sent < min(rings, total):
                sent += 1
                yield stamp()
    finally:
        loop.remove_reader(timer)
        os.close(timer)


def metronome() -> int:
    """A descriptor that can be read at the steady rate, as often as it rang since the last time."""
    libc = ctypes.CDLL(None, use_errno=True)
    timer: int = libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
    every_ns = 1_000_000_000 // RATE_PER_S
    if timer < 0 or libc.timerfd_settime(timer, 0, struct.pack("=4q", 0, every_ns, 0, every_ns), None) < 0:
        raise OSError(ctypes.get_errno(), "no timer")
    return timer


async def headrace(bootstrap: str, topic: str, seconds: int) -> Numbers:
    from headrace import Consumer, Producer

    watch = Watch(seconds)
    async with (
        Producer(bootstrap_servers=bootstrap, linger_ms=0, acks=1) as producer,
        Consumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest") as consumer,
    ):
        consumer.assign(await consumer.partitions(topic))

        async def write() -> None:
            async for value in due(watch.total):
                await producer.send(topic, value)

        writer = asyncio.create_task(write())
        async for record in consumer:
            if watch.arrived(record.value):
                break
        await writer
    return watch.numbers()


async def headrace_blocking(bootstrap: str, topic: str, seconds: int) -> Numbers:
    from headrace.blocking import Consumer, Producer

    watch = Watch(seconds)
    with (
        Producer(bootstrap_servers=bootstrap, linger_ms=0, acks=1) as producer,
        Consumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest") as consumer,
    ):
        consumer.assign(consumer.partitions(topic))
        writer = write_in_thread(watch.total, lambda value: producer.send(topic, value), lambda: None)
        for record in consumer:
            if watch.arrived(record.value):
                break
        writer.join()
    return watch.numbers()


async def confluent(bootstrap: str, topic: str, seconds: int) -> Numbers:
    from confluent_kafka import Consumer, Producer, TopicPartition

    watch = Watch(seconds)
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 0, "acks": 1})
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "bench", "enable.auto.commit": False})
    consumer.assign([TopicPartition(topic, 0, 0)])
    writer = write_in_thread(
        watch.total, lambda value: producer.produce(topic, value), lambda: producer.poll(0)
    )
    while (message := consumer.poll(10)) is None or not watch.arrived(message.value()):
        pass
    writer.join()
    producer.flush(30)
    consumer.close()
    return watch.numbers()


async def aiokafka(bootstrap: str, topic: str, seconds: int) -> Numbers:
    from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

    watch = Watch(seconds)
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, linger_ms=0, acks=1)
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest")
    await producer.start()
    await consumer.start()
    consumer.assign([TopicPartition(topic, 0)])

    async def write() -> None:
        async for value in due(watch.total):
            await producer.send(topic, value)

    writer = asyncio.create_task(write())
    async for message in consumer:
        if watch.arrived(message.value):
            break
    await writer
    await producer.stop()
    await consumer.stop()
    return watch.numbers()


async def kafka_python(bootstrap: str, topic: str, seconds: int) -> Numbers:
    from kafka import KafkaConsumer, KafkaProducer, TopicPartition

    watch = Watch(seconds)
    producer = KafkaProducer(bootstrap_servers=bootstrap, linger_ms=0, acks=1)
    consumer = KafkaConsumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest")
    consumer.assign([TopicPartition(topic, 0)])
    writer = write_in_thread(watch.total, lambda value: producer.send(topic, value), lambda: None)
    for message in consumer:
        if watch.arrived(message.value):
            break
    writer.join()
    producer.close()
    consumer.close()
    return watch.numbers()
