"""What the cluster knows at one offset of the metadata log: an immutable image, and the step to the next one.

Invariant: `apply(image, records)` depends on nothing but its arguments, so every broker that reads the log has the
same image at the same offset. Images share what did not change: a new image costs a copy of the outer maps only.
Handlers read images; nobody changes one.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from headrace.cluster.records import (
    BrokerRecord,
    BrokerStateRecord,
    ClusterRecord,
    ConfigRecord,
    FeatureRecord,
    MetadataRecord,
    PartitionRecord,
    ProducerIdsRecord,
    RemoveTopicRecord,
    TopicRecord,
    UnregisterBrokerRecord,
)

ConfigKey: TypeAlias = tuple[int, str]
"""Resource type and name."""

TOPIC_RESOURCE, BROKER_RESOURCE = 2, 4
NO_LEADER = -1
NO_INCARNATION = bytes(16)
NO_CONFIG: Mapping[str, str] = MappingProxyType({})


class PartitionRegistration(NamedTuple):
    """Where a partition lives and who leads it; `leader` is NO_LEADER while none of its replicas may."""

    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    leader: int
    leader_epoch: int
    partition_epoch: int
    adding: tuple[int, ...] = ()
    removing: tuple[int, ...] = ()


class BrokerRegistration(NamedTuple):
    """A broker and where clients reach it."""

    id: int
    host: str
    port: int
    rack: str | None
    epoch: int
    incarnation: bytes = NO_INCARNATION
    fenced: bool = False
    controlled_shutdown: bool = False

    @property
    def may_lead(self) -> bool:
        """Whether partitions may be led by it, or come into sync on it."""
        return not self.fenced and not self.controlled_shutdown


@dataclass(frozen=True, slots=True)
class TopicImage:
    """One topic and its partitions, by index."""

    name: str
    id: bytes
    partitions: tuple[PartitionRegistration, ...] = ()


@dataclass(frozen=True, slots=True)
class ClusterImage:
    """All of it."""

    topics: Mapping[str, TopicImage] = field(default_factory=dict)
    names: Mapping[bytes, str] = field(default_factory=dict)
    configs: Mapping[ConfigKey, Mapping[str, str]] = field(default_factory=dict)
    brokers: Mapping[int, BrokerRegistration] = field(default_factory=dict)
    next_producer_id: int = 0
    features: Mapping[str, int] = field(default_factory=dict)
    """The levels that were set; see `features` for what holds where none was."""
    cluster_id: str = ""
    """Empty until the first controller has given one."""

    def topic_by_id(self, topic_id: bytes) -> TopicImage | None:
        name = self.names.get(topic_id)
        return None if name is None else self.topics[name]

    def config(self, resource_type: int, name: str) -> Mapping[str, str]:
        """The values set for a resource; empty when none are."""
        return self.configs.get((resource_type, name), NO_CONFIG)


EMPTY = ClusterImage()


def apply(image: ClusterImage, records: Iterable[MetadataRecord]) -> ClusterImage:
    """The image after these records."""
    step = _Step(image)
    for record in records:
        step.take(record)
    return step.image()


class _Step:
    """An image under way. Maps are copied when first changed, partitions gathered per topic until the end."""

    def __init__(self, image: ClusterImage) -> None:
        self._old = image
        self._topics: dict[str, TopicImage] | None = None
        self._names: dict[bytes, str] | None = None
        self._configs: dict[ConfigKey, Mapping[str, str]] | None = None
        self._brokers: dict[int, BrokerRegistration] | None = None
        self._next_producer_id = image.next_producer_id
        self._features = image.features
        self._cluster_id = image.cluster_id
        self._partitions: dict[bytes, list[PartitionRegistration]] = {}

    def take(self, record: MetadataRecord) -> None:
        match record:
            case PartitionRecord():
                self._partition(record)
            case TopicRecord():
                self._own_topics()[record.name] = TopicImage(record.name, record.topic_id)
                self._own_names()[record.topic_id] = record.name
            case RemoveTopicRecord():
                self._remove(record.topic_id)
            case ConfigRecord():
                self._config(record)
            case BrokerRecord():
                self._own_brokers()[record.broker_id] = BrokerRegistration(
                    record.broker_id,
                    record.host,
                    record.port,
                    record.rack,
                    record.broker_epoch,
                    record.incarnation,
                    record.fenced,
                    record.controlled_shutdown,
                )
            case BrokerStateRecord():
                brokers = self._own_brokers()
                before = brokers[record.broker_id]
                assert before.epoch == record.broker_epoch, "the state of another registration"
                brokers[record.broker_id] = before._replace(
                    fenced=record.fenced, controlled_shutdown=record.controlled_shutdown
                )
            case UnregisterBrokerRecord():
                assert self._own_brokers()[record.broker_id].epoch == record.broker_epoch
                del self._own_brokers()[record.broker_id]
            case ProducerIdsRecord():
                self._next_producer_id = record.next_id
            case FeatureRecord():
                self._features = {**self._features, record.name: record.level}
            case ClusterRecord():
                self._cluster_id = record.cluster_id

    def image(self) -> ClusterImage:
        for topic_id, partitions in self._partitions.items():
            name = self._own_names()[topic_id]
            topics = self._own_topics()
            topics[name] = replace(topics[name], partitions=tuple(partitions))
        old = self._old
        return ClusterImage(
            topics=old.topics if self._topics is None else self._topics,
            names=old.names if self._names is None else self._names,
            configs=old.configs if self._configs is None else self._configs,
            brokers=old.brokers if self._brokers is None else self._brokers,
            next_producer_id=self._next_producer_id,
            features=self._features,
            cluster_id=self._cluster_id,
        )

    def _partition(self, record: PartitionRecord) -> None:
        partitions = self._partitions.get(record.topic_id)
        if partitions is None:
            topic = self._own_topics()[self._own_names()[record.topic_id]]
            partitions = self._partitions[record.topic_id] = list(topic.partitions)
        isr = record.replicas if record.isr == record.replicas else record.isr  # mostly so: share the tuple
        registration = PartitionRegistration(
            record.replicas,
            isr,
            record.leader,
            record.leader_epoch,
            record.partition_epoch,
            record.adding,
            record.removing,
        )
        if record.index == len(partitions):
            partitions.append(registration)
        else:
            partitions[record.index] = registration

    def _remove(self, topic_id: bytes) -> None:
        name = self._own_names().pop(topic_id)
        del self._own_topics()[name]
        self._partitions.pop(topic_id, None)
        self._own_configs().pop((TOPIC_RESOURCE, name), None)

    def _config(self, record: ConfigRecord) -> None:
        key = (record.resource_type, record.resource_name)
        values = dict(self._own_configs().get(key, NO_CONFIG))
        if record.value is None:
            values.pop(record.name, None)
        else:
            values[record.name] = record.value
        if values:
            self._own_configs()[key] = values
        else:
            self._own_configs().pop(key, None)

    def _own_topics(self) -> dict[str, TopicImage]:
        if self._topics is None:
            self._topics = dict(self._old.topics)
        return self._topics

    def _own_names(self) -> dict[bytes, str]:
        if self._names is None:
            self._names = dict(self._old.names)
        return self._names

    def _own_brokers(self) -> dict[int, BrokerRegistration]:
        if self._brokers is None:
            self._brokers = dict(self._old.brokers)
        return self._brokers

    def _own_configs(self) -> dict[ConfigKey, Mapping[str, str]]:
        if self._configs is None:
            self._configs = dict(self._old.configs)
        return self._configs


def records_of(image: ClusterImage) -> list[MetadataRecord]:
    """Records that make this image out of nothing: a snapshot."""
    records: list[MetadataRecord] = [BrokerRecord(*broker) for broker in image.brokers.values()]
    for topic in image.topics.values():
        records.append(TopicRecord(topic.name, topic.id))
        records += [PartitionRecord(topic.id, index, *p) for index, p in enumerate(topic.partitions)]
    for (resource_type, resource_name), values in image.configs.items():
        records += [ConfigRecord(resource_type, resource_name, name, value) for name, value in values.items()]
    records += [FeatureRecord(name, level) for name, level in image.features.items()]
    if image.cluster_id:
        records.append(ClusterRecord(image.cluster_id))
    if image.next_producer_id:
        records.append(ProducerIdsRecord(image.next_producer_id))
    return records
