"""The key hash is Java's, bit for bit; records without a key stick and then move on."""

import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.partitioner.default import murmur2 as kafka_python_murmur2

from headrace.base.errors import ErrorCode
from headrace.client.cluster import NO_NODE, PartitionInfo, TopicInfo
from headrace.client.partitioner import StickyPartitioner, murmur2, positive_hash


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


def test_a_key_always_goes_to_the_partition_of_its_hash_also_without_a_leader() -> None:
    partitioner = StickyPartitioner(100, random.Random(1))
    info = topic([1, NO_NODE, 1])
    for number in range(100):
        key = b"%d" % number
        assert partitioner(info, key, 10) == positive_hash(key) % 3


def test_records_without_a_key_stay_until_a_batch_is_full_then_move() -> None:
    partitioner = StickyPartitioner(100, random.Random(1))
    info = topic([1, 1, 1])
    chosen = [partitioner(info, None, 10) for _ in range(40)]
    runs = [chosen[at : at + 10] for at in range(0, 40, 10)]
    assert all(len(set(run)) == 1 for run in runs)
    assert all(one[0] != next_one[0] for one, next_one in pairwise(runs))


def test_records_without_a_key_spread_evenly_over_partitions_that_have_a_leader() -> None:
    partitioner = StickyPartitioner(100, random.Random(1))
    info = topic([1, NO_NODE, 1, 1])
    counts = Counter(partitioner(info, None, 50) for _ in range(6_000))
    assert set(counts) == {0, 2, 3}
    assert min(counts.values()) > 1_500


def test_a_topic_without_any_leader_still_gets_a_partition() -> None:
    assert StickyPartitioner(100, random.Random(1))(topic([NO_NODE]), None, 1) == 0
