"""Two verbs, produce and consume, in the words of each foreign client.

Every `produce_*` sends samples to one partition in order and returns the offsets that the broker acknowledged; every
`consume_*` reads a number of records from an assigned partition, starting at an offset, without a group. All of them
raise on the first error and give up after `WAIT_S`.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from tests.compat.samples import QUIET, SAMPLES, WAIT_S, Sample, Seen

Produce = Callable[..., list[int]]
Consume = Callable[..., list[Seen]]


def produce_confluent(
    bootstrap: str,
    topic: str,
    samples: Sequence[Sample],
    now_ms: int,
    compression: str = "none",
    **config: object,
) -> list[int]:
    from confluent_kafka import KafkaException, Producer

    # A linger long enough to put all samples into one batch, so that compression sees several records.
    producer = Producer(
        {
            **QUIET,
            "bootstrap.servers": bootstrap,
            "compression.type": compression,
            "linger.ms": 50,
            "acks": "all",
            **config,
        }
    )
    offsets: dict[int, int] = {}

    def delivered(index: int) -> Callable[..., None]:
        def report(error, message) -> None:
            if error:
                raise KafkaException(error)
            offsets[index] = message.offset()

        return report

    for i, sample in enumerate(samples):
        producer.produce(
            topic,
            sample.value,
            sample.key,
            partition=0,
            on_delivery=delivered(i),
            timestamp=now_ms - sample.age_ms,
            headers=sample.headers,
        )
    assert producer.flush(WAIT_S) == 0, "not everything was acknowledged in time"
    return [offsets[i] for i in range(len(samples))]


def consume_confluent(
    bootstrap: str, topic: str, count: int, offset: int = 0, partition: int = 0, **config: object
) -> list[Seen]:
    from confluent_kafka import Consumer, KafkaException, TopicPartition

    consumer = Consumer(
        {
            **QUIET,
            "bootstrap.servers": bootstrap,
            "group.id": "unused",
            "enable.auto.commit": False,
            "check.crcs": True,
            **config,
        }
    )
    seen: list[Seen] = []
    try:
        consumer.assign([TopicPartition(topic, partition, offset)])
        deadline_s = time.monotonic() + WAIT_S
        while len(seen) < count and time.monotonic() < deadline_s:
            message = consumer.poll(1.0)
            if message is None:
                continue
            if message.error():
                raise KafkaException(message.error())
            _, timestamp_ms = message.timestamp()
            seen.append(
                Seen(
                    message.offset(),
                    timestamp_ms,
                    message.key(),
                    message.value(),
                    list(message.headers() or []),
                )
            )
    finally:
        consumer.close()
    return seen


def produce_kafka_python(
    bootstrap: str,
    topic: str,
    samples: Sequence[Sample],
    now_ms: int,
    compression: str = "none",
    **config: object,
) -> list[int]:
    from kafka import KafkaProducer

    producer = KafkaProducer(
        bootstrap_servers=bootstrap,
        compression_type=None if compression == "none" else compression,
        linger_ms=50,
        acks=config.pop("acks", "all"),
        **config,
    )
    try:
        sent = [
            producer.send(
                topic,
                value=sample.value,
                key=sample.key,
                headers=sample.headers,
                partition=0,
                timestamp_ms=now_ms - sample.age_ms,
            )
            for sample in samples
        ]
        return [future.get(timeout=WAIT_S).offset for future in sent]
    finally:
        producer.close(timeout=5)


def consume_kafka_python(
    bootstrap: str, topic: str, count: int, offset: int = 0, partition: int = 0, **config: object
) -> list[Seen]:
    from kafka import KafkaConsumer, TopicPartition

    consumer = KafkaConsumer(bootstrap_servers=bootstrap, group_id=None, check_crcs=True, **config)
    seen: list[Seen] = []
    try:
        where = TopicPartition(topic, partition)
        consumer.assign([where])
        consumer.seek(where, offset)
        deadline_s = time.monotonic() + WAIT_S
        while len(seen) < count and time.monotonic() < deadline_s:
            for batch in consumer.poll(timeout_ms=1000).values():
                seen += [Seen(r.offset, r.timestamp, r.key, r.value, list(r.headers)) for r in batch]
    finally:
        consumer.close()
    return seen[:count]


def produce_aiokafka(
    bootstrap: str,
    topic: str,
    samples: Sequence[Sample],
    now_ms: int,
    compression: str = "none",
    **config: object,
) -> list[int]:
    from aiokafka import AIOKafkaProducer

    async def produce() -> list[int]:
        producer = AIOKafkaProducer(
            bootstrap_servers=bootstrap,
            compression_type=None if compression == "none" else compression,
            linger_ms=50,
            acks=config.pop("acks", "all"),
            **config,
        )
        await producer.start()
        try:
            sent = [
                await producer.send(
                    topic,
                    value=sample.value,
                    key=sample.key,
                    headers=sample.headers,
                    partition=0,
                    timestamp_ms=now_ms - sample.age_ms,
                )
                for sample in samples
            ]
            told = [await asyncio.wait_for(future, WAIT_S) for future in sent]
            return [metadata.offset if metadata else -1 for metadata in told]  # acks=0 is told nothing
        finally:
            await producer.stop()

    return asyncio.run(produce())


def consume_aiokafka(
    bootstrap: str, topic: str, count: int, offset: int = 0, partition: int = 0, **config: object
) -> list[Seen]:
    from aiokafka import AIOKafkaConsumer, TopicPartition

    async def consume() -> list[Seen]:
        consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, check_crcs=True, **config)
        await consumer.start()
        seen: list[Seen] = []
        try:
            where = TopicPartition(topic, partition)
            consumer.assign([where])
            consumer.seek(where, offset)
            deadline_s = time.monotonic() + WAIT_S
            while len(seen) < count and time.monotonic() < deadline_s:
                for batch in (await consumer.getmany(timeout_ms=1000)).values():
                    seen += [Seen(r.offset, r.timestamp, r.key, r.value, list(r.headers)) for r in batch]
        finally:
            await consumer.stop()
        return seen[:count]

    return asyncio.run(consume())


PRODUCERS: dict[str, Produce] = {
    "confluent": produce_confluent,
    "kafka-python": produce_kafka_python,
    "aiokafka": produce_aiokafka,
}
CONSUMERS: dict[str, Consume] = {
    "confluent": consume_confluent,
    "kafka-python": consume_kafka_python,
    "aiokafka": consume_aiokafka,
}


def samples_for(writer: str) -> tuple[Sample, ...]:
    """The samples that a client can send: two refuse a record without key and value, one a header without a value."""
    samples = SAMPLES
    if writer != "confluent":
        samples = tuple(s for s in samples if s.key is not None or s.value is not None)
    if writer == "kafka-python":
        samples = tuple(replace(s, headers=[h for h in s.headers if h[1] is not None]) for s in samples)
    return samples
