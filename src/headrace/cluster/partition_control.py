"""The controller's answer to leaders that propose another ISR (AlterPartition). Pure: image in, records out.

Invariants: a proposal counts only from the leader of the newest leader epoch, under the epoch of its newest
registration, and for the partition epoch that the controller has, so that no two leaders, and no two proposals of one,
contradict each other; a replica comes into the ISR only under the broker epoch that its leader saw it fetch with, and
only while it may lead: a process that began anew since then has to catch up again. Each proposal that is taken brings
a new partition epoch. One that leaves out its own leader is a resignation: a member that was in sync before leads. A
reassignment whose new replicas are all in sync is completed in the same step. Called by the server's controller and by
the simulator's.
"""

from collections.abc import Sequence
from typing import NamedTuple

from headrace.base.errors import ErrorCode
from headrace.cluster.elections import Unclean, changed_record, elected, leadership_of, never
from headrace.cluster.image import ClusterImage, PartitionRegistration, TopicImage
from headrace.cluster.reassignment import completed
from headrace.cluster.records import MetadataRecord, PartitionRecord

ANY_EPOCH = -1  # of a member that is not said to be new: the partition epoch vouches for it


class IsrProposal(NamedTuple):
    """One partition's new ISR, as its leader wants it: members with the broker epochs that the leader knows them by."""

    topic_id: bytes
    index: int  # type: ignore[assignment]
    leader_epoch: int
    partition_epoch: int
    isr: tuple[tuple[int, int], ...]


class IsrAnswer(NamedTuple):
    """What became of a proposal. `registration` is the partition after it."""

    topic_id: bytes
    index: int  # type: ignore[assignment]
    error: ErrorCode
    registration: PartitionRegistration | None = None


def alter_partitions(
    image: ClusterImage,
    broker_id: int,
    broker_epoch: int,
    proposals: Sequence[IsrProposal],
    unclean: Unclean = never,
) -> tuple[list[MetadataRecord], ErrorCode, list[IsrAnswer]]:
    """Decide on proposals of one leader; an error for all of them when the leader itself is not who it says."""
    broker = image.brokers.get(broker_id)
    if broker is None or broker.epoch != broker_epoch:
        return [], ErrorCode.STALE_BROKER_EPOCH, []
    records: list[MetadataRecord] = []
    answers: list[IsrAnswer] = []
    seen: set[tuple[bytes, int]] = set()
    for proposal in proposals:
        key = (proposal.topic_id, proposal.index)
        topic = image.topic_by_id(proposal.topic_id)
        error = ErrorCode.INVALID_REQUEST if key in seen else _refusal(image, topic, broker_id, proposal)
        seen.add(key)
        if error is not ErrorCode.NONE:
            answers.append(IsrAnswer(*key, error))
            continue
        assert topic is not None
        record = _change(image, topic, proposal, unclean)
        records.append(record)
        registration = PartitionRegistration(
            record.replicas,
            record.isr,
            record.leader,
            record.leader_epoch,
            record.partition_epoch,
            record.adding,
            record.removing,
        )
        answers.append(IsrAnswer(*key, ErrorCode.NONE, registration))
    return records, ErrorCode.NONE, answers


def _refusal(
    image: ClusterImage, topic: TopicImage | None, broker_id: int, proposal: IsrProposal
) -> ErrorCode:
    if topic is None:
        return ErrorCode.UNKNOWN_TOPIC_ID
    if not 0 <= proposal.index < len(topic.partitions):
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    now = topic.partitions[proposal.index]
    if now.leader != broker_id:
        return ErrorCode.INVALID_REQUEST
    if proposal.leader_epoch > now.leader_epoch or proposal.partition_epoch > now.partition_epoch:
        return ErrorCode.NOT_CONTROLLER  # the leader has seen more than this controller
    if proposal.leader_epoch < now.leader_epoch:
        return ErrorCode.FENCED_LEADER_EPOCH
    if proposal.partition_epoch < now.partition_epoch:
        return ErrorCode.INVALID_UPDATE_VERSION
    members = [member for member, _ in proposal.isr]
    if not members or len(set(members)) != len(members) or not set(members) <= set(now.replicas):
        return ErrorCode.INVALID_REQUEST
    if broker_id not in members and not any(map(leadership_of(image), set(members) & set(now.isr))):
        return ErrorCode.INELIGIBLE_REPLICA  # a leader that resigns needs one that was in sync before
    for member, epoch in proposal.isr:
        broker = image.brokers.get(member)
        if broker is None or epoch not in (ANY_EPOCH, broker.epoch):
            return ErrorCode.INELIGIBLE_REPLICA
        if member not in now.isr and (epoch == ANY_EPOCH or not broker.may_lead):
            return ErrorCode.INELIGIBLE_REPLICA
    return ErrorCode.NONE


def _change(
    image: ClusterImage, topic: TopicImage, proposal: IsrProposal, unclean: Unclean
) -> PartitionRecord:
    now = topic.partitions[proposal.index]
    members = {member for member, _ in proposal.isr}
    isr = tuple([replica for replica in now.replicas if replica in members])
    wanted = now._replace(isr=isr)
    if now.leader not in isr:
        # Whoever comes into sync with this very proposal does so by the word of a leader that mistrusts its own log.
        was_in_sync = set(now.isr)
        wanted = elected(wanted, lambda broker: broker in was_in_sync and leadership_of(image)(broker))
    done = completed(wanted)
    if done is not None:
        wanted = elected(done, leadership_of(image), unclean=unclean(topic.name))
    # Replicas that go must not be taken for ones that stay by anyone who knows only the leader epoch.
    return changed_record(topic, proposal.index, wanted, new_epoch=done is not None)
