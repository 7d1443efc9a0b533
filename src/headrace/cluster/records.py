"""The records of the metadata log. What the cluster knows is what these records, applied in order, say.

Each kind is a small struct, encoded as msgpack with its tag; a field added later needs a default, so that old logs are
read by new brokers. `image.apply` is the only reader of their meaning.
"""

from collections.abc import Sequence
from typing import TypeAlias

import msgspec


class TopicRecord(msgspec.Struct, frozen=True, array_like=True, tag="topic"):
    """A topic exists."""

    name: str
    topic_id: bytes


class RemoveTopicRecord(msgspec.Struct, frozen=True, array_like=True, tag="remove_topic"):
    """A topic is gone, with its partitions and its configuration."""

    topic_id: bytes


class PartitionRecord(msgspec.Struct, frozen=True, array_like=True, tag="partition"):
    """The whole registration of one partition, new or changed."""

    topic_id: bytes
    index: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    leader: int
    """-1 while no replica may lead."""
    leader_epoch: int
    partition_epoch: int
    adding: tuple[int, ...] = ()
    """Replicas that a reassignment brings; they are among `replicas` already."""
    removing: tuple[int, ...] = ()
    """Replicas that go when the reassignment is done."""


class ConfigRecord(msgspec.Struct, frozen=True, array_like=True, tag="config"):
    """A configuration value set, or with None removed. Resource types have Kafka's numbers."""

    resource_type: int
    resource_name: str
    name: str
    value: str | None


class BrokerRecord(msgspec.Struct, frozen=True, array_like=True, tag="broker"):
    """A broker registered, under an epoch that grows with each of its starts."""

    broker_id: int
    host: str
    port: int
    rack: str | None
    broker_epoch: int
    incarnation: bytes = bytes(16)
    """Chosen anew by each process: tells a registration that was sent twice from one of another process."""
    fenced: bool = False
    controlled_shutdown: bool = False


class BrokerStateRecord(msgspec.Struct, frozen=True, array_like=True, tag="broker_state"):
    """A registered broker is fenced or not, and is about to leave or not. The epoch is that of its registration."""

    broker_id: int
    broker_epoch: int
    fenced: bool
    controlled_shutdown: bool = False


class UnregisterBrokerRecord(msgspec.Struct, frozen=True, array_like=True, tag="unregister_broker"):
    """A broker is gone for good."""

    broker_id: int
    broker_epoch: int


class ClusterRecord(msgspec.Struct, frozen=True, array_like=True, tag="cluster"):
    """The id of the cluster: the first record of its first controller."""

    cluster_id: str


class ProducerIdsRecord(msgspec.Struct, frozen=True, array_like=True, tag="producer_ids"):
    """Every producer id below `next_id` is given to some broker."""

    next_id: int


class FeatureRecord(msgspec.Struct, frozen=True, array_like=True, tag="feature"):
    """A feature of the cluster has this level from now on; 0 is off."""

    name: str
    level: int


MetadataRecord: TypeAlias = (
    TopicRecord
    | RemoveTopicRecord
    | PartitionRecord
    | ConfigRecord
    | BrokerRecord
    | BrokerStateRecord
    | UnregisterBrokerRecord
    | ClusterRecord
    | ProducerIdsRecord
    | FeatureRecord
)

_encoder = msgspec.msgpack.Encoder()
_records_decoder = msgspec.msgpack.Decoder(list[MetadataRecord])
_SEVERAL = b"\xc1"  # no msgpack value begins with it
ENTRY_BYTES_MAX = 4 * 1024 * 1024

encode_record = _encoder.encode
decode_record = msgspec.msgpack.Decoder(MetadataRecord).decode


def encode_entries(records: Sequence[MetadataRecord]) -> list[bytes]:
    """Records that belong together as one entry of the log, so that they are applied together, or none of them.

    Only more than an entry may hold, many thousands of partitions, becomes several.
    """
    data = _SEVERAL + _encoder.encode(records)
    if len(data) <= ENTRY_BYTES_MAX or len(records) == 1:
        return [data]
    half = len(records) // 2
    return encode_entries(records[:half]) + encode_entries(records[half:])


def decode_entry(data: bytes) -> list[MetadataRecord]:
    """The records of an entry that `encode_entries` made, or a single record, as older logs and snapshots have."""
    if data[:1] == _SEVERAL:
        return _records_decoder.decode(memoryview(data)[1:])
    return [decode_record(data)]
