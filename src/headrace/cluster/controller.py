"""The controller's decisions about topics: requests and an image in, records and an answer for each request out.

Pure: nothing is read but the arguments, ids come from `new_id`. Invariant: the records returned fit the image they were
decided on; a request that is refused adds no record. Decisions of one call see each other (two topics of one request
cannot collide), and their order is that of the requests. Codes and words are Kafka's. Called by the handlers of topics
and of metadata (auto-creation); settings are decided in `settings_control`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.settings import BrokerConfig, check_topic_config
from headrace.cluster.elections import leadership_of
from headrace.cluster.image import TOPIC_RESOURCE, ClusterImage, TopicImage
from headrace.cluster.names import CLUSTER_METADATA_TOPIC, Collisions, check_topic_name
from headrace.cluster.placement import Holdings, PlaceableBroker, place
from headrace.cluster.records import (
    ConfigRecord,
    MetadataRecord,
    PartitionRecord,
    RemoveTopicRecord,
    TopicRecord,
)

PARTITIONS_PER_REQUEST_MAX = 10_000
DEFAULT = -1
NewId: TypeAlias = Callable[[], bytes]


class NewTopic(NamedTuple):
    """A topic to create. Counts of -1 ask for the broker's defaults; `assignments` are (partition, replicas)."""

    name: str
    num_partitions: int = DEFAULT
    replication_factor: int = DEFAULT
    assignments: Sequence[tuple[int, Sequence[int]]] = ()
    configs: Sequence[tuple[str, str | None]] = ()


class NewPartitions(NamedTuple):
    """A topic to grow to `total` partitions; `assignments` are the replicas of the new ones, where the client chose."""

    name: str
    total: int
    assignments: Sequence[Sequence[int]] | None = None


@dataclass(frozen=True, slots=True)
class Created:
    """What became of one new topic."""

    name: str
    error: KafkaError | None
    topic_id: bytes = bytes(16)
    num_partitions: int = -1
    replication_factor: int = -1
    configs: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a change to one topic."""

    name: str | None
    topic_id: bytes
    error: KafkaError | None


def create_topics(
    image: ClusterImage, requests: Sequence[NewTopic], config: BrokerConfig, new_id: NewId
) -> tuple[list[MetadataRecord], list[Created]]:
    """Decide on new topics. Names that appear twice are refused once each, after the others, as Kafka does."""
    named = Counter(request.name for request in requests)
    creation = _Creation(image, config, new_id)
    records: list[MetadataRecord] = []
    results: list[Created] = []
    flood = _partitions_asked(requests, config) > PARTITIONS_PER_REQUEST_MAX
    for request in requests:
        if named[request.name] > 1:
            continue
        try:
            if flood:
                raise KafkaError(
                    ErrorCode.POLICY_VIOLATION, "Excessively large number of partitions per request."
                )
            made, result = creation.decide(request)
        except KafkaError as error:
            results.append(Created(request.name, error))
        else:
            records += made
            results.append(result)
    twice = KafkaError(ErrorCode.INVALID_REQUEST, "Duplicate topic name.")
    results += [Created(name, twice) for name, count in named.items() if count > 1]
    return records, results


def find_topic(image: ClusterImage, name: str | None, topic_id: bytes) -> TopicImage:
    """The topic that a name or an id stands for; KafkaError when it stands for none."""
    if name is not None:
        topic = image.topics.get(name)
        if topic is None:
            raise _no_such_topic()
        return topic
    topic = image.topic_by_id(topic_id)
    if topic is None:
        raise KafkaError(ErrorCode.UNKNOWN_TOPIC_ID, "This server does not host this topic ID.")
    return topic


def delete_topics(topics: Iterable[TopicImage]) -> list[MetadataRecord]:
    """The records that remove these topics, with all they have."""
    return [RemoveTopicRecord(topic.id) for topic in topics]


def create_partitions(
    image: ClusterImage, requests: Sequence[NewPartitions]
) -> tuple[list[MetadataRecord], list[Outcome]]:
    """Decide on more partitions for topics."""
    named = Counter(request.name for request in requests)
    records: list[MetadataRecord] = []
    results: list[Outcome] = []
    for request in requests:
        if named[request.name] > 1:
            continue
        topic = image.topics.get(request.name)
        topic_id = bytes(16) if topic is None else topic.id
        try:
            if topic is None:
                raise _no_such_topic()
            records += _more_partitions(image, topic, request, len(records))
        except KafkaError as error:
            results.append(Outcome(request.name, topic_id, error))
        else:
            results.append(Outcome(request.name, topic_id, None))
    twice = KafkaError(ErrorCode.INVALID_REQUEST, "Duplicate topic name.")
    results += [Outcome(name, bytes(16), twice) for name, count in named.items() if count > 1]
    return records, results


class _Creation:
    """The topics of one request, decided one after the other."""

    def __init__(self, image: ClusterImage, config: BrokerConfig, new_id: NewId) -> None:
        self._image = image
        self._config = config
        self._new_id = new_id
        self._collisions = Collisions(image.topics)
        self._holdings = holdings_of(image)

    def decide(self, request: NewTopic) -> tuple[list[MetadataRecord], Created]:
        if request.name == CLUSTER_METADATA_TOPIC:
            raise KafkaError(
                ErrorCode.INVALID_REQUEST, f"Creation of internal topic {request.name} is prohibited."
            )
        check_topic_name(request.name)
        if request.name in self._image.topics:
            raise KafkaError(ErrorCode.TOPIC_ALREADY_EXISTS, f"Topic '{request.name}' already exists.")
        configs = self._configs(request)
        replicas = _assigned(self._image, request) if request.assignments else self._placed(request)
        self._collisions.check(request.name)
        topic_id = self._new_id()
        records: list[MetadataRecord] = [TopicRecord(request.name, topic_id)]
        records += [ConfigRecord(TOPIC_RESOURCE, request.name, *item) for item in configs.items()]
        records += _registrations(self._image, topic_id, 0, replicas)
        return records, Created(request.name, None, topic_id, len(replicas), len(replicas[0]), configs)

    def _configs(self, request: NewTopic) -> dict[str, str]:
        configs: dict[str, str] = {}
        for name, value in request.configs:
            if value is None:
                raise KafkaError(
                    ErrorCode.INVALID_CONFIG, f"Null value not supported for topic configs: {name}"
                )
            configs[name] = value
        check_topic_config(configs, self._config)
        return configs

    def _placed(self, request: NewTopic) -> list[tuple[int, ...]]:
        partitions, replication_factor = request.num_partitions, request.replication_factor
        if partitions == DEFAULT:
            partitions = self._config.num_partitions
        elif partitions <= 0:
            raise KafkaError(
                ErrorCode.INVALID_PARTITIONS, "Number of partitions was set to an invalid non-positive value."
            )
        if replication_factor == DEFAULT:
            replication_factor = self._config.default_replication_factor
        elif replication_factor <= 0:
            raise KafkaError(
                ErrorCode.INVALID_REPLICATION_FACTOR,
                "Replication factor must be larger than 0, or -1 to use the default value.",
            )
        return _place(self._image, replication_factor, partitions, request.name, 0, self._holdings)


def _more_partitions(
    image: ClusterImage, topic: TopicImage, request: NewPartitions, already: int
) -> list[MetadataRecord]:
    have = len(topic.partitions)
    if request.total == have:
        raise KafkaError(ErrorCode.INVALID_PARTITIONS, f"Topic already has {have} partition(s).")
    if request.total < have:
        raise KafkaError(
            ErrorCode.INVALID_PARTITIONS,
            f"The topic {request.name} currently has {have} partition(s); {request.total} would not be an increase.",
        )
    more = request.total - have
    if request.assignments is not None and len(request.assignments) != more:
        raise KafkaError(
            ErrorCode.INVALID_REPLICA_ASSIGNMENT,
            f"Attempted to add {more} additional partition(s), but only {len(request.assignments)} "
            "assignment(s) were specified.",
        )
    if already + more > PARTITIONS_PER_REQUEST_MAX:
        raise KafkaError(ErrorCode.POLICY_VIOLATION, "Excessively large number of partitions per request.")
    replication_factor = len(topic.partitions[0].replicas)
    if request.assignments is None:
        siblings = [partition.replicas for partition in topic.partitions]
        replicas = _place(image, replication_factor, more, topic.name, have, holdings_of(image), siblings)
    else:
        replicas = [_checked(image, chosen, replication_factor) for chosen in request.assignments]
    return _registrations(image, topic.id, have, replicas)


def _assigned(image: ClusterImage, request: NewTopic) -> list[tuple[int, ...]]:
    """The replicas that the client chose, partition by partition."""
    for value, field in (
        (request.replication_factor, "replication factor"),
        (request.num_partitions, "numPartitions"),
    ):
        if value != DEFAULT:
            raise KafkaError(
                ErrorCode.INVALID_REQUEST,
                f"A manual partition assignment was specified, but {field} was not set to -1.",
            )
    chosen: dict[int, tuple[int, ...]] = {}
    replication_factor: int | None = None
    for partition, replicas in request.assignments:
        if partition in chosen:
            raise KafkaError(
                ErrorCode.INVALID_REPLICA_ASSIGNMENT,
                f"Found multiple manual partition assignments for partition {partition}",
            )
        chosen[partition] = _checked(image, replicas, replication_factor)
        replication_factor = len(replicas)
    if sorted(chosen) != list(range(len(chosen))):
        raise KafkaError(
            ErrorCode.INVALID_REPLICA_ASSIGNMENT,
            "partitions should be a consecutive 0-based integer sequence",
        )
    return [chosen[partition] for partition in range(len(chosen))]


def _checked(image: ClusterImage, replicas: Sequence[int], replication_factor: int | None) -> tuple[int, ...]:
    """One chosen list of replicas; INVALID_REPLICA_ASSIGNMENT when it cannot be."""
    code = ErrorCode.INVALID_REPLICA_ASSIGNMENT
    words = "The manual partition assignment includes"
    if not replicas:
        raise KafkaError(code, f"{words} an empty replica list.")
    seen: set[int] = set()
    for broker in sorted(replicas):
        if broker in seen:
            raise KafkaError(code, f"{words} the broker {broker} more than once.")
        if broker not in image.brokers:
            raise KafkaError(code, f"{words} broker {broker}, but no such broker is registered.")
        seen.add(broker)
    if replication_factor is not None and len(replicas) != replication_factor:
        raise KafkaError(
            code,
            f"{words} a partition with {len(replicas)} replica(s), but this is not consistent with previous "
            f"partitions, which have {replication_factor} replica(s).",
        )
    return tuple(replicas)


def _place(
    image: ClusterImage,
    replication_factor: int,
    partitions: int,
    name: str,
    first: int,
    holdings: Holdings,
    siblings: Sequence[Sequence[int]] = (),
) -> list[tuple[int, ...]]:
    brokers = [
        PlaceableBroker(broker.id, broker.rack, not broker.may_lead) for broker in image.brokers.values()
    ]
    if all(broker.fenced for broker in brokers):
        raise KafkaError(
            ErrorCode.INVALID_REPLICATION_FACTOR,
            f"Unable to replicate the partition {replication_factor} time(s): All brokers are currently fenced.",
        )
    if replication_factor > len(brokers):
        raise KafkaError(
            ErrorCode.INVALID_REPLICATION_FACTOR,
            f"Unable to replicate the partition {replication_factor} time(s): The target replication factor of "
            f"{replication_factor} cannot be reached because only {len(brokers)} broker(s) are registered.",
        )
    return place(brokers, replication_factor, partitions, name, first, holdings, siblings)


def holdings_of(image: ClusterImage) -> Holdings:
    """What each broker has to do with partitions as it is."""
    return Holdings(
        registration.replicas for topic in image.topics.values() for registration in topic.partitions
    )


def _registrations(
    image: ClusterImage, topic_id: bytes, first: int, replicas: Sequence[tuple[int, ...]]
) -> list[MetadataRecord]:
    """New partitions: every replica that lives in sync, the first of them leads."""
    may_lead = leadership_of(image)
    records: list[MetadataRecord] = []
    for index, chosen in enumerate(replicas, first):
        isr = tuple([replica for replica in chosen if may_lead(replica)])
        if not isr:
            raise KafkaError(
                ErrorCode.INVALID_REPLICA_ASSIGNMENT,
                f"All brokers specified in the manual partition assignment for partition {index} are fenced "
                "or in controlled shutdown.",
            )
        isr = chosen if isr == chosen else isr
        records.append(
            PartitionRecord(topic_id, index, chosen, isr, isr[0], leader_epoch=0, partition_epoch=0)
        )
    return records


def _no_such_topic() -> KafkaError:
    words = "This server does not host this topic-partition."
    return KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, words)


def _partitions_asked(requests: Sequence[NewTopic], config: BrokerConfig) -> int:
    """How many partitions a request would make, before anything is built for them."""
    return sum(
        len(request.assignments)
        or (config.num_partitions if request.num_partitions == DEFAULT else max(0, request.num_partitions))
        for request in requests
    )
