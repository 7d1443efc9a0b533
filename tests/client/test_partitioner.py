"""The key hash is Java's, bit for bit; records without a key stick and then move on."""

import random
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.partitioner.default import murmur2 as kafka_python_murmur2

from headrace.base.errors import ErrorCode
from headrace.client.cluster import NO_NODE, PartitionInfo, TopicInfo
from headrace.client.partitioner import (
    LoadAware,
    NodeLoad,
    RangePartitioner,
    RoundRobin,
    Sticky,
    murmur2,
    named_partitioner,
)


def topic(leaders: list[int]) -> TopicInfo:
    partitions = {
        at: PartitionInfo(at, leader, 0, (1,), (1,), (), ErrorCode.NONE) for at, leader in enumerate(leaders)
    }
    return TopicInfo("t", bytes(16), False, partitions, ErrorCode.NONE)


def signed(number: int) -> int:
    return number - 2**32 if number >= 2**31 else number


# From Apache Kafka's own test of its hash.
JAVA_HASHES = [
    (b"21", -973932308),
    (b"foobar", -790332482),
    (b"a-little-bit-long-string", -985981536),
    (b"a-little-bit-longer-string", -1486304829),
    (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
    (b"abc", 479470107),
]


@pytest.mark.parametrize("data, expected", JAVA_HASHES)
def test_the_hash_equals_javas(data: bytes, expected: int) -> None:
    assert signed(murmur2(data)) == expected


@given(st.binary(max_size=70))
def test_the_hash_equals_kafka_pythons(data: bytes) -> None:
    assert murmur2(data) == kafka_python_murmur2(data) & 0xFFFFFFFF


def test_a_named_partitioner_places_keys_by_their_hash_unless_told_not_to() -> None:
    def named(name: str, ignore_keys: bool = False) -> Any:
        return named_partitioner(
            name, ignore_keys=ignore_keys, source=random.Random(1), loads={}, clock_s=lambda: 0.0
        )

    assert named("default").by_key
    assert named("load_aware").by_key
    assert not named("default", ignore_keys=True).by_key
    assert not named("sticky").by_key


def test_batches_without_a_key_move_and_spread_evenly_over_partitions_that_have_a_leader() -> None:
    partitioner = Sticky(random.Random(1))
    info = topic([1, NO_NODE, 1, 1])
    chosen = [NO_NODE]
    for _ in range(6_000):
        chosen.append(partitioner.choose(info, chosen[-1]))
    assert all(one != other for one, other in pairwise(chosen))
    counts = Counter(chosen[1:])
    assert set(counts) == {0, 2, 3}
    assert min(counts.values()) > 1_500


def test_a_topic_without_any_leader_still_gets_a_partition() -> None:
    assert Sticky(random.Random(1)).choose(topic([NO_NODE]), NO_NODE) == 0


def test_round_robin_gives_each_partition_with_a_leader_its_turn() -> None:
    partitioner = RoundRobin()
    info = topic([1, NO_NODE, 1, 1])
    assert [partitioner(info, b"same", None) for _ in range(6)] == [0, 2, 3, 0, 2, 3]


def test_range_keeps_the_order_of_keys() -> None:
    info = topic([1, 1, 1, 1])
    keys = sorted(bytes([number]) for number in range(256))
    places = [RangePartitioner()(info, key, None) for key in keys]
    assert places == sorted(places)
    assert Counter(places) == {0: 64, 1: 64, 2: 64, 3: 64}
    cut = RangePartitioner([b"g", b"p"])
    assert [cut(info, key, None) for key in (b"a", b"g", b"o", b"p", b"z")] == [0, 1, 1, 2, 2]
    with pytest.raises(ValueError, match="ascending"):
        RangePartitioner([b"p", b"g"])


def test_load_aware_prefers_leaders_that_answer_soon_and_do_not_throttle() -> None:
    loads = {1: NodeLoad(), 2: NodeLoad(), 3: NodeLoad()}
    for _ in range(50):
        loads[1].answered(1.0)
        loads[2].answered(9.0)
        loads[3].answered(1.0)
    loads[3].throttled_until_s = 10.0
    now_s = 0.0
    partitioner = LoadAware(random.Random(1), loads, lambda: now_s)
    info = topic([1, 2, 3])
    counts = Counter(partitioner.choose(info, NO_NODE) for _ in range(2_000))
    assert counts[0] > 5 * counts[1] > 0, "the slow leader gets about a ninth"
    assert counts[2] < counts[1], "the throttling leader gets next to nothing"
    now_s = 11.0
    counts = Counter(partitioner.choose(info, NO_NODE) for _ in range(2_000))
    assert counts[2] > 5 * counts[1], "and its share again when it stops"
