"""The balancer moves what helps, says why, and otherwise leaves things alone."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.cluster.balance import burdens, next_move
from headrace.cluster.control_messages import BrokerLoad
from headrace.cluster.image import EMPTY, ClusterImage, apply
from headrace.cluster.reassignment import is_moving
from headrace.cluster.records import BrokerRecord, MetadataRecord, PartitionRecord, TopicRecord

TOPIC = b"topic-id-16bytes"
TOLERANCE = 0.2


def cluster(*partitions: tuple[int, ...], racks: str = "abc", isr: int | None = None) -> ClusterImage:
    records: list[MetadataRecord] = [
        BrokerRecord(number, "host", 9000 + number, rack, number) for number, rack in enumerate(racks, 1)
    ]
    records.append(TopicRecord("t", TOPIC))
    records += [
        PartitionRecord(TOPIC, i, each, each[:isr], each[0], 0, 0) for i, each in enumerate(partitions)
    ]
    return apply(EMPTY, records)


def network(rate: float, leaders: int = 1, partitions: int = 2) -> BrokerLoad:
    return BrokerLoad(bytes_in=rate, partitions=partitions, leaders=leaders)


def disk(size: int, partitions: int) -> BrokerLoad:
    return BrokerLoad(disk_bytes=size, partitions=partitions, leaders=partitions)


def test_leadership_goes_to_a_follower_that_has_less_to_do() -> None:
    image = cluster((1, 2), (1, 3), (2, 1))
    move = next_move(image, {1: network(9e6, 2), 2: network(3e6), 3: network(0.0, 0)}, TOLERANCE)
    assert move is not None
    after = apply(image, move.records).topics["t"].partitions
    assert (after[1].leader, after[1].replicas, after[1].leader_epoch) == (3, (3, 1), 1)
    assert "t-1 is led by 3" in move.why
    assert "2.2 times the average of network" in move.why


def test_a_replica_goes_where_there_is_room_when_the_disk_is_what_is_short() -> None:
    image = cluster((1, 2), (1, 2))
    move = next_move(image, {1: disk(10**9, 2), 2: disk(10**9, 2), 3: disk(0, 0)}, TOLERANCE)
    assert move is not None
    now = apply(image, move.records).topics["t"].partitions[0]
    assert is_moving(now)
    assert (now.adding, now.removing) == ((3,), (1,))
    assert "goes from 1 to 3" in move.why
    assert "disk" in move.why


def test_nothing_is_moved_within_the_tolerance_or_for_next_to_nothing() -> None:
    image = cluster((1, 2), (2, 3), (3, 1))
    assert next_move(image, {1: network(5.5e6), 2: network(5e6), 3: network(5e6)}, TOLERANCE) is None
    assert next_move(image, {1: network(900.0), 2: network(0.0), 3: network(0.0)}, TOLERANCE) is None


def test_nothing_is_decided_while_a_broker_has_not_reported_or_replicas_move() -> None:
    image = cluster((1, 2), (1, 3))
    loads = {1: network(9e6, 2), 2: network(0.0, 0), 3: None}
    assert next_move(image, loads, TOLERANCE) is None
    full = {1: disk(10**9, 2), 2: disk(10**9, 2), 3: disk(0, 0)}
    move = next_move(cluster((1, 2), (1, 2)), full, TOLERANCE)
    assert move is not None
    assert next_move(apply(cluster((1, 2), (1, 2)), move.records), full, TOLERANCE) is None


def test_one_hot_partition_is_not_passed_around() -> None:
    """Whoever has it is the worst; handing it on would only make another so."""
    image = cluster((1, 2, 3))
    assert next_move(image, {1: network(9e6, 1), 2: network(0.0, 0), 3: network(0.0, 0)}, TOLERANCE) is None


def test_racks_stay_apart() -> None:
    image = cluster((1, 2), (1, 2), racks="abbc")
    loads = {1: disk(10**9, 2), 2: disk(10**8, 2), 3: disk(0, 0), 4: disk(10, 0)}
    move = next_move(image, loads, TOLERANCE)
    assert move is not None
    assert apply(image, move.records).topics["t"].partitions[0].adding == (4,), "3 is on the rack of 2"


def test_a_broker_out_of_sync_is_not_made_leader() -> None:
    image = cluster((1, 2, 3), (1, 2, 3), isr=1)
    assert next_move(image, {1: network(9e6, 2), 2: network(0.0, 0), 3: network(0.0, 0)}, TOLERANCE) is None


@given(st.lists(st.floats(0, 1e8), min_size=2, max_size=5))
def test_whoever_has_most_comes_first(rates: list[float]) -> None:
    ranked = burdens({number: network(rate) for number, rate in enumerate(rates, 1)})
    assert [each.broker for each in ranked] == [
        each.broker for each in sorted(ranked, key=lambda each: (-each.share, each.broker))
    ]
    assert len(ranked) == len(rates)
