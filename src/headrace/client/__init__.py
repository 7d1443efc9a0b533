"""Connections, metadata, producer, consumer and admin of the Kafka protocol.

asyncio throughout. From the socket up: `transport` (frames over a socket, the one narrow edge), `connection`
(one broker, pipelined), `cluster` (metadata and the connection to each broker), then `producer`, `consumer`
and `admin`. Configuration uses Kafka's own keys. Names are loaded on first use.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.client.admin import Admin, NewTopic
    from headrace.client.consumer import Consumer, ConsumerRecord
    from headrace.client.producer import Delivery, Producer, RecordMetadata
    from headrace.client.topics import TopicPartition

_HOME = {
    "Admin": "admin",
    "NewTopic": "admin",
    "Consumer": "consumer",
    "ConsumerRecord": "consumer",
    "Delivery": "batches",
    "Producer": "producer",
    "RecordMetadata": "batches",
    "TopicPartition": "topics",
}

__all__ = [
    "Admin",
    "Consumer",
    "ConsumerRecord",
    "Delivery",
    "NewTopic",
    "Producer",
    "RecordMetadata",
    "TopicPartition",
]


def __getattr__(name: str) -> object:
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
