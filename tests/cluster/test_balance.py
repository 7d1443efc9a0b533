"""The balancer moves what helps, says why, settles, and otherwise leaves things alone."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from headrace.cluster.balance import BACK_LOOKS, REST_LOOKS, Balancer, Move, burdens, next_move
from headrace.cluster.control_messages import BrokerLoad, PartitionLoad
from headrace.cluster.elections import changed_record, elected, leadership_of
from headrace.cluster.image import EMPTY, ClusterImage, apply
from headrace.cluster.reassignment import completed, is_moving
from headrace.cluster.records import BrokerRecord, MetadataRecord, PartitionRecord, TopicRecord

TOPIC = b"topic-id-16bytes"
TOLERANCE = 0.2
GB = 10**9


class Part(NamedTuple):
    """What a partition carries, wherever it is: as it is produced, consumed and stored."""

    bytes_in: float = 0.0
    consumed: float = 0.0
    size_bytes: int = 0


def cluster(*partitions: tuple[int, ...], racks: str = "abc", isr: int | None = None) -> ClusterImage:
    records: list[MetadataRecord] = [
        BrokerRecord(number, "host", 9000 + number, rack, number) for number, rack in enumerate(racks, 1)
    ]
    records.append(TopicRecord("t", TOPIC))
    records += [
        PartitionRecord(TOPIC, i, each, each[:isr], each[0], 0, 0) for i, each in enumerate(partitions)
    ]
    return apply(EMPTY, records)


def measured(
    image: ClusterImage, parts: list[Part], besides: Mapping[int, BrokerLoad] | None = None
) -> dict[int, BrokerLoad | None]:
    """What brokers report when partitions carry this; `besides` is CPU and memory that goes with no partition."""
    loads: dict[int, BrokerLoad | None] = {}
    for broker in image.brokers:
        led: list[PartitionLoad] = []
        received = 0.0
        for index, (now, part) in enumerate(zip(image.topics["t"].partitions, parts, strict=True)):
            if broker not in now.replicas:
                continue
            received += part.bytes_in
            bytes_out = part.bytes_in * (len(now.replicas) - 1) + part.consumed
            if now.leader == broker:
                rates = (part.bytes_in, bytes_out, part.bytes_in / 100)
                led.append(PartitionLoad("t", index, part.size_bytes, *rates))
            else:
                led.append(PartitionLoad("t", index, part.size_bytes))
        sent = sum(each.bytes_out for each in led)
        own = (besides or {}).get(broker, BrokerLoad())
        loads[broker] = BrokerLoad(
            cpu=own.cpu + (received + sent) / 1e8,
            memory_bytes=own.memory_bytes,
            disk_bytes=sum(each.size_bytes for each in led),
            disk_free_bytes=own.disk_free_bytes,
            bytes_in=received,
            bytes_out=sent,
            messages_in=sum(each.messages_in for each in led),
            partitions=len(led),
            leaders=sum(each.leader == broker for each in image.topics["t"].partitions),
            heaviest=tuple(led),
        )
    return loads


def finished(image: ClusterImage) -> ClusterImage:
    """The image when what moves has arrived."""
    topic = image.topics["t"]
    records: list[MetadataRecord] = []
    for index, now in enumerate(topic.partitions):
        done = completed(now._replace(isr=now.replicas))
        if done is not None:
            records.append(changed_record(topic, index, elected(done, leadership_of(image))))
    return apply(image, records)


def settled(
    image: ClusterImage,
    report: Callable[[ClusterImage], dict[int, BrokerLoad | None]],
    looks: int = 300,
    excluded: tuple[int, ...] = (),
) -> tuple[ClusterImage, list[Move]]:
    """The cluster after many looks of the balancer, and all its moves."""
    balancer, moves = Balancer(), []
    for _ in range(looks):
        move = balancer.look(image, report(image), TOLERANCE, excluded)
        if move is not None:
            moves.append(move)
            image = finished(apply(image, move.records))
    return image, moves


def placed(image: ClusterImage) -> tuple[tuple[tuple[int, ...], int], ...]:
    return tuple((each.replicas, each.leader) for each in image.topics["t"].partitions)


def test_leadership_goes_to_a_follower_that_has_less_to_do_and_the_figures_say_why() -> None:
    image = cluster((1, 2), (1, 3), (2, 1))
    move = next_move(image, measured(image, [Part(3e6), Part(2e6), Part(1e6)]), TOLERANCE)
    assert move is not None
    after = apply(image, move.records).topics["t"].partitions
    assert (after[1].leader, after[1].replicas, after[1].leader_epoch) == (3, (3, 1), 1)
    assert move.why == (
        "t-1 is led by 3: broker 1 has 2.5 times the average of message rate (50,000 against 20,000 messages a "
        "second), broker 3 has 0; this takes 20,000, which leaves them with about 30,000 and 20,000"
    )


def test_a_replica_goes_where_there_is_room_when_the_disk_is_what_is_short() -> None:
    image = cluster((1, 2), (1, 2))
    move = next_move(image, measured(image, [Part(size_bytes=GB)] * 2), TOLERANCE)
    assert move is not None
    now = apply(image, move.records).topics["t"].partitions[0]
    assert is_moving(now)
    assert (now.adding, now.removing) == ((3,), (1,))
    assert "goes from 1 to 3" in move.why
    assert "1.5 times the average of disk (2,000,000,000 against 1,333,333,333 bytes)" in move.why
    small = {3: BrokerLoad(disk_free_bytes=GB)}
    assert next_move(image, measured(image, [Part(size_bytes=GB)] * 2, small), TOLERANCE) is None, "no room"


def test_what_led_leads_where_its_replica_goes() -> None:
    image = cluster((1, 2), (1, 2), isr=1)
    move = next_move(image, measured(image, [Part(5e6)] * 2), TOLERANCE)
    assert move is not None
    assert (move.giver, move.receiver) == (1, 3)
    after = finished(apply(image, move.records)).topics["t"].partitions[move.key[1]]
    assert (after.leader, after.replicas) == (3, (3, 2))


def test_nothing_is_moved_within_the_tolerance_or_for_next_to_nothing() -> None:
    image = cluster((1, 2), (2, 3), (3, 1))
    assert next_move(image, measured(image, [Part(5.5e6), Part(5e6), Part(5e6)]), TOLERANCE) is None
    assert next_move(image, measured(image, [Part(900.0), Part(), Part()]), TOLERANCE) is None


def test_nothing_is_decided_while_a_broker_has_not_reported() -> None:
    image = cluster((1, 2), (1, 3))
    loads = measured(image, [Part(5e6)] * 2)
    assert next_move(image, loads, TOLERANCE) is not None
    assert next_move(image, {**loads, 3: None}, TOLERANCE) is None


def test_nothing_is_decided_while_replicas_move_and_at_the_look_after_that() -> None:
    image = cluster((1, 2), (1, 2), (1, 2), (1, 2))
    loads = measured(image, [Part(size_bytes=GB)] * 4)
    balancer = Balancer()
    move = balancer.look(image, loads, TOLERANCE)
    assert move is not None
    image = apply(image, move.records)
    assert balancer.look(image, loads, TOLERANCE) is None
    image = finished(image)
    assert balancer.look(image, loads, TOLERANCE) is None, "what was measured may be of before"
    assert balancer.look(image, loads, TOLERANCE) is not None


def test_one_hot_partition_is_not_passed_around() -> None:
    """Whoever has it is the worst; handing it on would only make another so."""
    image = cluster((1, 2, 3), (1, 2, 3), (2, 3, 1), (3, 1, 2))
    parts = [Part(5e6), Part(1e3), Part(1e3), Part(1e3)]
    after, moves = settled(image, lambda image: measured(image, parts))
    assert after.topics["t"].partitions[0].leader == 1
    assert len(moves) <= 1, "a small one may make room"


def test_one_large_partition_is_not_copied_to_and_fro() -> None:
    image = cluster((1,), (1,), (2,), (3,), (1,), (2,), (3,))
    parts = [Part(size_bytes=100 * GB)] + [Part(size_bytes=10**6)] * 6
    assert settled(image, lambda image: measured(image, parts))[1] == []


def test_what_stands_beside_a_large_partition_makes_room_for_it() -> None:
    image = cluster((1,), (1,), (1,), (2,), (3,))
    parts = [Part(size_bytes=100 * GB), *[Part(size_bytes=20 * GB)] * 4]
    after, moves = settled(image, lambda image: measured(image, parts))
    assert [move.key for move in moves] == [("t", 1), ("t", 2)]
    assert [each.leader for each in after.topics["t"].partitions] == [1, 2, 3, 2, 3]


def test_memory_and_cpu_that_go_with_no_partition_move_nothing() -> None:
    replicas = [(i % 3 + 1, (i + 1) % 3 + 1) for i in range(30)]
    image = cluster(*replicas, racks="abc")
    own = {1: BrokerLoad(cpu=0.9, memory_bytes=300 * 10**6), 2: BrokerLoad(memory_bytes=10**6)}
    assert settled(image, lambda image: measured(image, [Part(1e5)] * 30, own))[1] == []


def test_someone_is_helped_also_when_the_worst_off_cannot_be() -> None:
    image = cluster((1,), (2,), (2,), racks="abc")
    parts = [Part(9e6), Part(size_bytes=GB), Part(size_bytes=GB)]
    _, moves = settled(image, lambda image: measured(image, parts))
    assert [(move.giver, move.receiver) for move in moves] == [(2, 3)]
    assert "of disk" in moves[0].why


def test_a_broker_that_is_excluded_gets_nothing_and_does_not_count() -> None:
    image = cluster(*[(1, 2), (2, 3), (3, 1), (1, 2), (1, 3), (2, 1)], racks="abcd")

    def report(image: ClusterImage) -> dict[int, BrokerLoad | None]:
        return measured(image, [Part(size_bytes=10 * GB)] * 6)

    new, _ = settled(image, report)
    assert any(4 in each.replicas for each in new.topics["t"].partitions), "one that is new is filled"
    drained, moves = settled(image, report, excluded=(4,))
    assert not any(4 in each.replicas for each in drained.topics["t"].partitions)
    assert [(move.giver, move.receiver) for move in moves] == [(1, 3)]


def test_a_partition_that_was_moved_rests_and_does_not_go_back_soon() -> None:
    image = cluster((1, 2, 3), (1, 2, 3), (1, 2, 3))
    balancer = Balancer()
    idle = {number: BrokerLoad() for number in (1, 2, 3)}

    def busy(image: ClusterImage) -> dict[int, BrokerLoad | None]:
        """Whatever leads t-0 has too much, and t-0 would fit anywhere: as by measurements that always deceive."""
        leader = image.topics["t"].partitions[0].leader
        heaviest = (PartitionLoad("t", 0, 0, 1e6, 2e6, 1e3),)
        return {**idle, leader: BrokerLoad(bytes_in=5e6, bytes_out=4e6, heaviest=heaviest)}

    led = []
    for _ in range(BACK_LOOKS):
        if (move := balancer.look(image, busy(image), TOLERANCE)) is not None:
            image = apply(image, move.records)
            led.append((balancer._look, move.receiver))
    assert led == [(1, 2), (2 + REST_LOOKS, 3)]


def test_racks_stay_apart() -> None:
    image = cluster((1, 2), (1, 2), (1, 2), racks="abbc")
    parts = [Part(size_bytes=GB)] * 3
    loads = {**measured(image, parts), 2: BrokerLoad(disk_bytes=10**8), 4: BrokerLoad(disk_bytes=10)}
    move = next_move(image, loads, TOLERANCE)
    assert move is not None
    assert apply(image, move.records).topics["t"].partitions[0].adding == (4,), "3 is on the rack of 2"


def test_a_broker_out_of_sync_is_not_made_leader() -> None:
    image = cluster((1, 2, 3), (1, 2, 3), isr=1)
    assert next_move(image, measured(image, [Part(5e6)] * 2), TOLERANCE) is None


def test_a_report_of_partitions_that_are_gone_is_passed_over() -> None:
    image = cluster((1, 2), (1, 3))
    loads = measured(cluster((1, 2), (1, 3), (1, 2), (1, 2)), [Part(1e3), Part(1e3), Part(5e6), Part(5e6)])
    assert next_move(image, loads, TOLERANCE) is None
    assert next_move(EMPTY_OF_TOPICS, loads, TOLERANCE) is None


EMPTY_OF_TOPICS = apply(EMPTY, [BrokerRecord(number, "host", 9000, None, number) for number in (1, 2, 3)])


@st.composite
def clusters(draw: st.DrawFn) -> tuple[ClusterImage, list[Part]]:
    """A cluster in any arrangement, under any load that stays as it is."""
    brokers = draw(st.integers(2, 5))
    count = draw(st.integers(1, 12))
    some = st.lists(st.integers(1, brokers), min_size=1, max_size=min(3, brokers), unique=True).map(tuple)
    amounts = st.sampled_from([0.0, 1e3, 1e5, 5e5, 1e6, 5e6, 3e7])
    part = st.builds(Part, amounts, amounts, st.sampled_from([0, 10**6, 10**8, GB, 2 * GB, 50 * GB]))
    image = cluster(*draw(st.lists(some, min_size=count, max_size=count)), racks="abaca"[:brokers])
    return image, draw(st.lists(part, min_size=count, max_size=count))


@given(clusters())
def test_the_balancer_settles_and_no_arrangement_comes_twice(made: tuple[ClusterImage, list[Part]]) -> None:
    """Also without its memory of what it moved."""
    image, parts = made
    seen = {placed(image)}
    while (move := next_move(image, measured(image, parts), TOLERANCE)) is not None:
        image = finished(apply(image, move.records))
        assert placed(image) not in seen
        seen.add(placed(image))


@given(clusters())
def test_the_worst_off_is_never_worse_off_by_a_move(made: tuple[ClusterImage, list[Part]]) -> None:
    image, parts = made

    def worst(image: ClusterImage) -> float:
        return max(
            (each.share for each in burdens({b: load for b, load in measured(image, parts).items() if load})),
            default=0.0,
        )

    before = worst(image)
    after, _ = settled(image, lambda image: measured(image, parts), looks=20)
    assert worst(after) <= before * 1.0001


@given(st.lists(st.floats(0, 1e8), min_size=2, max_size=5))
def test_whoever_has_most_comes_first(rates: list[float]) -> None:
    ranked = burdens({number: BrokerLoad(bytes_in=rate) for number, rate in enumerate(rates, 1)})
    assert [each.value for each in ranked] == sorted([each.value for each in ranked], reverse=True)
    assert len(ranked) in (0, len(rates)), "too little on average to matter, or all of them"
