"""Headrace: Kafka you can pip install.

The client's names live here (`from headrace import Producer, Consumer, Admin`); each is loaded on first use, so that
importing the package costs nothing. `headrace.blocking` has the same without asyncio.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.base.errors import ErrorCode as ErrorCode
    from headrace.base.errors import KafkaError as KafkaError
    from headrace.client.admin import Admin as Admin
    from headrace.client.admin import NewTopic as NewTopic
    from headrace.client.consumer import Consumer as Consumer
    from headrace.client.error_policy import DeadLetter as DeadLetter
    from headrace.client.fetched import ConsumerRecord as ConsumerRecord
    from headrace.client.group import RebalanceListener as RebalanceListener
    from headrace.client.producer import Producer as Producer
    from headrace.client.topics import OffsetAndMetadata as OffsetAndMetadata
    from headrace.client.topics import TopicPartition as TopicPartition
    from headrace.records.codec import Delivery as Delivery
    from headrace.records.codec import RecordMetadata as RecordMetadata

__version__ = "0.1.0"

_HOME = {
    "Admin": "client.admin",
    "Consumer": "client.consumer",
    "ConsumerRecord": "client.fetched",
    "DeadLetter": "client.error_policy",
    "Delivery": "records.codec",
    "ErrorCode": "base.errors",
    "KafkaError": "base.errors",
    "NewTopic": "client.admin",
    "OffsetAndMetadata": "client.topics",
    "Producer": "client.producer",
    "RebalanceListener": "client.group",
    "RecordMetadata": "records.codec",
    "TopicPartition": "client.topics",
}

__all__ = ["__version__", *_HOME]  # noqa: PLE0604


def __getattr__(name: str) -> object:
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
