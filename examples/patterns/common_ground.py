"""What the examples here share: a broker (one in memory, unless an address is given), a topic, and a few records.

The clients are confluent-kafka's; any other Kafka client does the same with the same words.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from confluent_kafka import Consumer, Message, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from headrace.testing import Broker

WAIT_S = 60.0


@contextmanager
def bootstrap() -> Iterator[str]:
    """The address on the command line, or a broker of our own."""
    if len(sys.argv) > 1:
        yield sys.argv[1]
    else:
        with Broker(settings={"group.initial.rebalance.delay.ms": 500}) as broker:
            yield broker.bootstrap


def create(servers: str, topic: str, partitions: int) -> None:
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
    admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result(WAIT_S)


def send(servers: str, topic: str, records: list[tuple[str, str]]) -> None:
    """Records of key and value; a key always goes to the same partition."""
    producer = Producer({"bootstrap.servers": servers, "acks": "all", "log_level": 0})
    for key, value in records:
        producer.produce(topic, value, key=key)
    assert producer.flush(WAIT_S) == 0


def member(servers: str, group: str, topic: str) -> Consumer:
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": group,
            "group.protocol": "consumer",
            "auto.offset.reset": "earliest",
            "log_level": 0,
        }
    )
    consumer.subscribe([topic])
    return consumer


def records(consumer: Consumer, wait_s: float = 0.1) -> list[Message]:
    """What the next poll brings."""
    return [message for message in consumer.consume(100, wait_s) if not message.error()]
