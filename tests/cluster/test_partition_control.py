"""What the controller makes of the ISRs that leaders propose, and of reassignments."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import ErrorCode, KafkaError
from headrace.cluster.elections import preferred, rebalance_leaders
from headrace.cluster.image import EMPTY, ClusterImage, PartitionRegistration, apply
from headrace.cluster.partition_control import IsrProposal, alter_partitions
from headrace.cluster.reassignment import is_moving, reassign
from headrace.cluster.records import (
    BrokerRecord,
    BrokerStateRecord,
    MetadataRecord,
    PartitionRecord,
    TopicRecord,
)

TOPIC = b"topic-id-16bytes"


def cluster(
    replicas: tuple[int, ...] = (1, 2, 3), isr: tuple[int, ...] | None = None, brokers: int = 5
) -> ClusterImage:
    records: list[MetadataRecord] = [
        BrokerRecord(number, "host", 9000 + number, None, 10 * number) for number in range(1, brokers + 1)
    ]
    isr = replicas if isr is None else isr
    records += [TopicRecord("t", TOPIC), PartitionRecord(TOPIC, 0, replicas, isr, isr[0], 4, 7)]
    return apply(EMPTY, records)


def partition(image: ClusterImage) -> PartitionRegistration:
    return image.topics["t"].partitions[0]


def propose(
    image: ClusterImage,
    *isr: tuple[int, int],
    leader: int = 1,
    leader_epoch: int = 4,
    partition_epoch: int = 7,
    broker_epoch: int | None = None,
) -> tuple[ErrorCode, ClusterImage]:
    proposal = IsrProposal(TOPIC, 0, leader_epoch, partition_epoch, isr)
    epoch = 10 * leader if broker_epoch is None else broker_epoch
    records, error, answers = alter_partitions(image, leader, epoch, [proposal])
    return (answers[0].error if answers else error), apply(image, records)


def test_a_follower_that_caught_up_comes_into_the_isr() -> None:
    error, after = propose(cluster(isr=(1,)), (1, -1), (2, 20))
    assert error is ErrorCode.NONE
    assert (partition(after).isr, partition(after).partition_epoch) == ((1, 2), 8)
    assert partition(after).leader_epoch == 4


@pytest.mark.parametrize(
    ("expected", "options", "isr"),
    [
        (ErrorCode.STALE_BROKER_EPOCH, {"broker_epoch": 9}, [(1, -1)]),
        (ErrorCode.FENCED_LEADER_EPOCH, {"leader_epoch": 3}, [(1, -1)]),
        (ErrorCode.NOT_CONTROLLER, {"leader_epoch": 5}, [(1, -1)]),
        (ErrorCode.INVALID_UPDATE_VERSION, {"partition_epoch": 6}, [(1, -1)]),
        (ErrorCode.NOT_CONTROLLER, {"partition_epoch": 8}, [(1, -1)]),
        (ErrorCode.INVALID_REQUEST, {"leader": 2}, [(2, -1)]),
        (ErrorCode.INVALID_REQUEST, {}, []),
        (ErrorCode.INVALID_REQUEST, {}, [(1, -1), (5, 50)]),
        (ErrorCode.INVALID_REQUEST, {}, [(1, -1), (1, -1)]),
        (ErrorCode.INELIGIBLE_REPLICA, {}, [(1, -1), (3, 29)]),
        (ErrorCode.INELIGIBLE_REPLICA, {}, [(1, -1), (3, -1)]),
    ],
)
def test_a_proposal_counts_only_from_who_leads_now_and_for_processes_that_are_now(
    expected: ErrorCode, options: dict[str, int], isr: list[tuple[int, int]]
) -> None:
    before = cluster(isr=(1, 2))
    error, after = propose(before, *isr, **options)
    assert error is expected
    assert after == before


def test_a_fenced_broker_does_not_come_into_sync_but_leaves() -> None:
    before = apply(
        cluster(isr=(1, 2)), [BrokerStateRecord(3, 30, fenced=True), BrokerStateRecord(2, 20, fenced=True)]
    )
    assert propose(before, (1, -1), (2, 20), (3, 30))[0] is ErrorCode.INELIGIBLE_REPLICA
    error, after = propose(before, (1, -1))
    assert (error, partition(after).isr) == (ErrorCode.NONE, (1,))


def test_the_same_isr_again_has_a_partition_epoch_of_its_own() -> None:
    error, after = propose(cluster(isr=(1, 2)), (1, -1), (2, 20))
    assert (error, partition(after).partition_epoch) == (ErrorCode.NONE, 8)


def test_a_leader_that_resigns_is_followed_by_one_that_was_in_sync() -> None:
    error, after = propose(cluster(isr=(1, 2)), (2, 20))
    assert error is ErrorCode.NONE
    assert (partition(after).leader, partition(after).isr, partition(after).leader_epoch) == (2, (2,), 5)
    assert propose(cluster(isr=(1,)), (2, 20))[0] is ErrorCode.INELIGIBLE_REPLICA


def test_a_partition_that_is_not_there_is_refused_by_itself() -> None:
    unknown = [IsrProposal(TOPIC, index, 4, 7, ((1, -1),)) for index in (9, -1)]
    unknown.insert(0, IsrProposal(bytes(16), 0, 0, 0, ((1, -1),)))
    records, error, answers = alter_partitions(cluster(), 1, 10, unknown)
    assert (records, error) == ([], ErrorCode.NONE)
    assert [each.error for each in answers] == [
        ErrorCode.UNKNOWN_TOPIC_ID,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    ]


def moved(image: ClusterImage, target: list[int] | None) -> ClusterImage:
    record = reassign(image, image.topics["t"], 0, target)
    return image if record is None else apply(image, [record])


def test_a_reassignment_is_done_when_all_that_is_new_is_in_sync() -> None:
    image = moved(cluster(), [4, 5, 1])
    now = partition(image)
    assert (now.replicas, now.adding, now.removing) == ((4, 5, 1, 2, 3), (4, 5), (2, 3))
    assert now.leader == 1
    epoch = now.partition_epoch
    _, image = propose(image, (1, -1), (2, -1), (3, -1), (4, 40), partition_epoch=epoch)
    assert is_moving(partition(image))
    _, image = propose(image, (1, -1), (2, -1), (3, -1), (4, 40), (5, 50), partition_epoch=epoch + 1)
    now = partition(image)
    assert (now.replicas, now.isr, now.adding, now.removing, now.leader) == ((4, 5, 1), (4, 5, 1), (), (), 1)
    assert now.leader_epoch == 5


def test_a_leader_that_is_moved_away_is_replaced_in_the_step_that_removes_it() -> None:
    image = moved(cluster((1, 2)), [3, 4])
    epoch = partition(image).partition_epoch
    _, image = propose(image, (1, -1), (2, -1), (3, 30), (4, 40), partition_epoch=epoch)
    now = partition(image)
    assert (now.replicas, now.isr, now.leader) == ((3, 4), (3, 4), 3)


def test_replicas_are_only_taken_away_at_once() -> None:
    now = partition(moved(cluster(), [2]))
    assert (now.replicas, now.isr, now.leader, now.adding, now.removing) == ((2,), (2,), 2, (), ())


def test_the_only_one_in_sync_is_not_taken_away() -> None:
    now = partition(moved(cluster(isr=(1,)), [2, 3]))
    assert (now.replicas, now.isr, now.leader) == ((2, 3, 1), (1,), 1)
    assert now.removing == (1,)


def test_a_cancelled_reassignment_leaves_what_was_there() -> None:
    image = moved(cluster(), [4, 5, 1])
    epoch = partition(image).partition_epoch
    _, image = propose(image, (1, -1), (2, -1), (3, -1), (4, 40), partition_epoch=epoch)
    now = partition(moved(image, None))
    assert (set(now.replicas), set(now.isr), now.adding, now.removing) == ({1, 2, 3}, {1, 2, 3}, (), ())
    with pytest.raises(KafkaError) as refused:
        moved(cluster(), None)
    assert refused.value.code is ErrorCode.NO_REASSIGNMENT_IN_PROGRESS


def test_another_reassignment_replaces_the_one_under_way() -> None:
    now = partition(moved(moved(cluster(), [4, 5, 1]), [5, 2, 1]))
    assert (now.replicas, now.adding, now.removing) == ((5, 2, 1, 3), (5,), (3,))


def test_the_only_replica_in_sync_stays_though_only_a_replaced_reassignment_wanted_it() -> None:
    begun = PartitionRecord(TOPIC, 0, (3, 5, 4, 1), (3,), 3, 5, 8, adding=(3, 5), removing=(4, 1))
    image = moved(apply(cluster((4, 1)), [begun]), [2, 1])
    now = partition(image)
    assert (now.replicas, now.isr, now.leader) == ((2, 1, 4, 3), (3,), 3)
    assert (now.adding, now.removing) == ((2,), (4, 3))
    error, image = propose(
        image, (3, -1), (2, 20), leader=3, leader_epoch=now.leader_epoch, partition_epoch=now.partition_epoch
    )
    now = partition(image)
    assert (error, now.replicas, now.isr, now.leader) == (ErrorCode.NONE, (2, 1), (2,), 2)


@pytest.mark.parametrize("target", [[], [1, 1], [1, 9]])
def test_an_impossible_target_is_refused(target: list[int]) -> None:
    with pytest.raises(KafkaError) as refused:
        moved(cluster(), target)
    assert refused.value.code is ErrorCode.INVALID_REPLICA_ASSIGNMENT


@given(
    st.lists(st.one_of(st.none(), st.permutations(range(1, 6)).map(lambda p: p[:3])), max_size=8), st.data()
)
def test_no_reassignment_empties_an_isr_or_forgets_its_leader(
    targets: list[list[int] | None], data: st.DataObject
) -> None:
    image = cluster()
    for target in targets:
        try:
            image = moved(image, target)
        except KafkaError:
            continue
        now = partition(image)
        chosen = data.draw(st.sets(st.sampled_from(now.replicas))) | {now.leader}
        others = [member for member in now.isr if member != now.leader]
        if others and data.draw(st.booleans()):  # the leader resigns
            chosen = {data.draw(st.sampled_from(others))}
        members = [(each, -1 if each in now.isr else 10 * each) for each in now.replicas if each in chosen]
        error, image = propose(
            image,
            *members,
            leader=now.leader,
            leader_epoch=now.leader_epoch,
            partition_epoch=now.partition_epoch,
        )
        assert error is ErrorCode.NONE
        now = partition(image)
        assert now.isr
        assert now.leader in now.isr
        assert set(now.isr) <= set(now.replicas)
        assert set(now.adding) | set(now.removing) <= set(now.replicas)


def test_leadership_goes_back_to_the_preferred_replica_when_it_is_in_sync() -> None:
    image = cluster((1, 2, 3), isr=(2, 3))
    topic = image.topics["t"]
    assert preferred(image, topic, 0) is None
    image = apply(image, [PartitionRecord(TOPIC, 0, (1, 2, 3), (1, 2, 3), 2, 5, 9)])
    records, more = rebalance_leaders(image, 10, 100)
    assert not more
    after = partition(apply(image, records))
    assert (after.leader, after.leader_epoch, after.partition_epoch) == (1, 6, 10)
    assert rebalance_leaders(apply(image, records), 10, 100) == ([], False)
