"""Who leads a partition, and what becomes of partitions when brokers come and go: pure functions from image to records.

Invariants: a leader is in the ISR, unless the topic allows an unclean election and nobody in the ISR may lead; the ISR
is never empty: its last member stays in it, because it is the one that is known to have every acknowledged record; a
change of the leader raises the leader epoch, any change the partition epoch. Called by the controller's parts.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias

from headrace.cluster.image import NO_LEADER, ClusterImage, PartitionRegistration, TopicImage
from headrace.cluster.records import MetadataRecord, PartitionRecord

Unclean: TypeAlias = Callable[[str], bool]
"""Whether a topic takes a leader that may lack records rather than none."""


def never(topic: str) -> bool:
    """No topic does."""
    return False


def elected(
    registration: PartitionRegistration, may_lead: Callable[[int], bool], *, unclean: bool = False
) -> PartitionRegistration:
    """The registration with the leader it should have: the one it has, else the first replica in sync that may."""
    if registration.leader in registration.isr and may_lead(registration.leader):
        return registration
    in_sync = set(registration.isr)
    for replica in registration.replicas:
        if replica in in_sync and may_lead(replica):
            return registration._replace(leader=replica)
    if unclean:
        for replica in registration.replicas:
            if may_lead(replica):
                return registration._replace(leader=replica, isr=(replica,))
    return registration._replace(leader=NO_LEADER)


def record_of(
    topic: TopicImage, index: int, wanted: PartitionRegistration, *, new_epoch: bool = False
) -> PartitionRecord | None:
    """The record that makes a partition what is wanted, with its epochs; None when it is so already.

    `new_epoch` asks for a new leader epoch although the leader stays.
    """
    before = topic.partitions[index]
    wanted = wanted._replace(leader_epoch=before.leader_epoch, partition_epoch=before.partition_epoch)
    return None if wanted == before and not new_epoch else changed_record(topic, index, wanted, new_epoch)


def changed_record(
    topic: TopicImage, index: int, wanted: PartitionRegistration, new_epoch: bool = False
) -> PartitionRecord:
    """As `record_of`, with a new partition epoch in any case."""
    before = topic.partitions[index]
    leader_epoch = before.leader_epoch + (new_epoch or wanted.leader != before.leader)
    wanted = wanted._replace(leader_epoch=leader_epoch, partition_epoch=before.partition_epoch + 1)
    return PartitionRecord(topic.id, index, *wanted)


def leadership_of(image: ClusterImage, except_for: int | None = None) -> Callable[[int], bool]:
    """Which brokers may lead, but for one that is about to be no more among them."""
    brokers = image.brokers

    def may_lead(broker_id: int) -> bool:
        broker = brokers.get(broker_id)
        return broker is not None and broker_id != except_for and broker.may_lead

    return may_lead


def partitions_with(image: ClusterImage, broker_id: int) -> Iterator[tuple[TopicImage, int]]:
    """Partitions that have a replica on a broker."""
    for topic in image.topics.values():
        for index, registration in enumerate(topic.partitions):
            if broker_id in registration.replicas:
                yield topic, index


def leave(
    image: ClusterImage, broker_id: int, unclean: Unclean = never, *, lead_on: bool = False
) -> list[MetadataRecord]:
    """A broker is to lead nothing any more, and to be in no ISR but where it is the last.

    With `lead_on` it is still there, and leads on where nobody else may.
    """
    may_lead = leadership_of(image, except_for=broker_id)
    records: list[MetadataRecord] = []
    for topic, index in partitions_with(image, broker_id):
        registration = topic.partitions[index]
        if broker_id not in registration.isr and registration.leader != broker_id:
            continue
        isr = without(registration.isr, broker_id)
        wanted = elected(
            registration._replace(isr=isr), may_lead, unclean=unclean(topic.name) and not lead_on
        )
        if lead_on and wanted.leader == NO_LEADER:
            continue
        if (record := record_of(topic, index, wanted)) is not None:
            records.append(record)
    return records


def begin_anew(image: ClusterImage, broker_id: int, unclean: Unclean = never) -> list[MetadataRecord]:
    """A broker's process is another one: what the last one had in memory may be lost.

    So it leaves every ISR and is a follower first. Where it is the last member it stays, and leads, under a new leader
    epoch: followers must be able to tell what it wrote before from what it writes now.
    """
    may_lead = leadership_of(image, except_for=broker_id)
    records: list[MetadataRecord] = []
    for topic, index in partitions_with(image, broker_id):
        registration = topic.partitions[index]
        if broker_id not in registration.isr and registration.leader != broker_id:
            continue
        isr = without(registration.isr, broker_id)
        wanted = elected(registration._replace(isr=isr), may_lead, unclean=unclean(topic.name))
        if wanted.leader == NO_LEADER and isr == (broker_id,):
            wanted = wanted._replace(leader=broker_id)
        record = record_of(topic, index, wanted, new_epoch=wanted.leader == broker_id)
        if record is not None:
            records.append(record)
    return records


def come_back(image: ClusterImage, broker_id: int, unclean: Unclean = never) -> list[MetadataRecord]:
    """A broker may lead again: it does where nobody leads and it may."""
    others = leadership_of(image)

    def may_lead(other: int) -> bool:
        return other == broker_id or others(other)

    records: list[MetadataRecord] = []
    for topic, index in partitions_with(image, broker_id):
        registration = topic.partitions[index]
        if registration.leader == NO_LEADER:
            wanted = elected(registration, may_lead, unclean=unclean(topic.name))
            if (record := record_of(topic, index, wanted)) is not None:
                records.append(record)
    return records


def elect_unclean(
    image: ClusterImage, topics: Iterable[TopicImage], unclean: Unclean
) -> list[MetadataRecord]:
    """Partitions without a leader, of topics that by now take any: their settings changed."""
    may_lead = leadership_of(image)
    records: list[MetadataRecord] = []
    for topic in topics:
        if not unclean(topic.name):
            continue
        for index, registration in enumerate(topic.partitions):
            if registration.leader == NO_LEADER:
                record = record_of(topic, index, elected(registration, may_lead, unclean=True))
                if record is not None:
                    records.append(record)
    return records


def preferred(image: ClusterImage, topic: TopicImage, index: int) -> PartitionRecord | None:
    """The record that lets the first replica lead; None when it does, or may not."""
    registration = topic.partitions[index]
    first = registration.replicas[0]
    if registration.leader == first or first not in registration.isr or not leadership_of(image)(first):
        return None
    return record_of(topic, index, registration._replace(leader=first))


def imbalance(image: ClusterImage) -> Mapping[int, tuple[int, int]]:
    """For each broker, how many partitions prefer it, and how many of those it does not lead."""
    counts: dict[int, tuple[int, int]] = {}
    for topic in image.topics.values():
        for registration in topic.partitions:
            first = registration.replicas[0]
            total, astray = counts.get(first, (0, 0))
            counts[first] = (total + 1, astray + (registration.leader != first))
    return counts


def rebalance_leaders(
    image: ClusterImage, percentage_max: int, records_max: int
) -> tuple[list[MetadataRecord], bool]:
    """Give leadership back to preferred replicas of brokers that lack more than a share; whether more are left."""
    crooked = {
        broker_id
        for broker_id, (total, astray) in imbalance(image).items()
        if astray * 100 > total * percentage_max
    }
    records: list[MetadataRecord] = []
    for topic in image.topics.values():
        for index, registration in enumerate(topic.partitions):
            if registration.replicas[0] in crooked and (record := preferred(image, topic, index)) is not None:
                if len(records) == records_max:
                    return records, True
                records.append(record)
    return records, False


def without(isr: tuple[int, ...], broker_id: int) -> tuple[int, ...]:
    """The ISR without a broker; the last member stays."""
    left = tuple([member for member in isr if member != broker_id])
    return left or isr
