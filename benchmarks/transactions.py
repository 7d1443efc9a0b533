"""What transactions cost: how many a second, what committing each second takes of the rate, and read_committed.

All by confluent-kafka, the same for every system. Short transactions measure the coordinator and the markers; the flood
with a commit a second measures what partitions pay for being told whose records they hold.
"""

import statistics
import time
import uuid
from typing import TYPE_CHECKING

from benchmarks.systems import System
from benchmarks.workloads import QUIET, Numbers, Scale, topic

if TYPE_CHECKING:
    from confluent_kafka import Producer

PARTITIONS = 4
MESSAGES = 100
VALUE = b"x" * 100
WARM_UP = 20
WAIT_S = 60.0
TURNS = 2
FLOOD_SHARE = 0.35
READ_MAX = 500_000
FLOOD = {"linger.ms": 5, "batch.size": 200_000, "queue.buffering.max.messages": 200_000, **QUIET}


def transactions(system: System, scale: Scale) -> Numbers:
    """Transactions of 100 messages over 4 partitions; a flood with and without commits; both ways to read it.

    What is compared within the system is done in turns, and the medians are compared.
    """
    flood_s = scale.latency_s * FLOOD_SHARE
    with topic(system, PARTITIONS) as name:
        short = _short(system, name, scale.latency_s / 2)
    plain: list[float] = []
    committing: list[float] = []
    uncommitted: list[float] = []
    committed: list[float] = []
    for _ in range(TURNS):
        with topic(system, PARTITIONS) as name:
            plain.append(_flood(_producer(system, None), name, flood_s))
        with topic(system, PARTITIONS) as name:
            committing.append(_flood(_producer(system, "flood"), name, flood_s, every_s=1.0))
            uncommitted.append(_read(system, name, "read_uncommitted"))
            committed.append(_read(system, name, "read_committed"))
    return {
        "transactions/s": short,
        "flood msg/s": statistics.median(plain),
        "flood in transactions msg/s": statistics.median(committing),
        "transactional share": statistics.median(committing) / statistics.median(plain),
        "read_uncommitted msg/s": statistics.median(uncommitted),
        "read_committed msg/s": statistics.median(committed),
        "read_committed share": statistics.median(committed) / statistics.median(uncommitted),
    }


def _producer(system: System, purpose: str | None) -> "Producer":
    from confluent_kafka import Producer

    config = {"bootstrap.servers": system.bootstrap, "enable.idempotence": True, **FLOOD}
    if purpose is None:
        return Producer(config)
    producer = Producer({**config, "transactional.id": f"{purpose}-{uuid.uuid4().hex[:8]}"})
    producer.init_transactions(WAIT_S)
    return producer


def _short(system: System, name: str, seconds: float) -> float:
    producer = _producer(system, "short")
    for _ in range(WARM_UP):
        _transaction(producer, name)
    done, begun_s = 0, time.monotonic()
    while time.monotonic() - begun_s < seconds:
        _transaction(producer, name)
        done += 1
    return done / (time.monotonic() - begun_s)


def _transaction(producer: "Producer", name: str) -> None:
    producer.begin_transaction()
    for number in range(MESSAGES):
        producer.produce(name, VALUE, partition=number % PARTITIONS)
    producer.commit_transaction(WAIT_S)


def _flood(producer: "Producer", name: str, seconds: float, every_s: float | None = None) -> float:
    begun_s = committed_s = time.monotonic()
    sent = 0
    if every_s is not None:
        producer.begin_transaction()
    while time.monotonic() - begun_s < seconds:
        try:
            producer.produce(name, VALUE, partition=sent // MESSAGES % PARTITIONS)
            sent += 1
        except BufferError:
            producer.poll(0.01)
        if every_s is not None and time.monotonic() - committed_s > every_s:
            producer.commit_transaction(WAIT_S)
            producer.begin_transaction()
            committed_s = time.monotonic()
    if every_s is not None:
        producer.commit_transaction(WAIT_S)
    else:
        producer.flush(WAIT_S)
    return sent / (time.monotonic() - begun_s)


def _read(system: System, name: str, isolation: str) -> float:
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer(
        {
            "bootstrap.servers": system.bootstrap,
            "group.id": "bench",
            "isolation.level": isolation,
            "enable.partition.eof": True,
            **QUIET,
        }
    )
    consumer.assign([TopicPartition(name, index, 0) for index in range(PARTITIONS)])
    ends = seen = 0
    begun_s = time.monotonic()
    while ends < PARTITIONS and seen < READ_MAX:
        for message in consumer.consume(10_000, 5):
            if message.error():
                ends += 1
            else:
                seen += 1
    taken_s = time.monotonic() - begun_s
    consumer.close()
    return seen / taken_s
