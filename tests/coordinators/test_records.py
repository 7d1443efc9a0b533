"""The records of `__consumer_offsets` are Kafka's: known bytes, every version that was ever written, and no others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import KafkaError
from headrace.coordinators.group_hash import java_hash, partition_for
from headrace.coordinators.records import (
    GroupKey,
    GroupValue,
    MemberValue,
    OffsetKey,
    OffsetValue,
    decode_group,
    decode_key,
    decode_offset,
    group_key,
    group_value,
    offset_key,
    offset_value,
    subscribed_topics,
)
from tests.coordinators.stage import subscription

texts = st.text(max_size=40)
optional_texts = st.none() | texts
int32s = st.integers(0, 2**31 - 1)
int64s = st.integers(0, 2**63 - 1)
members = st.builds(
    MemberValue,
    texts,
    optional_texts,
    texts,
    texts,
    int32s,
    int32s,
    st.binary(max_size=30),
    st.binary(max_size=30),
)
groups = st.builds(
    GroupValue,
    texts,
    int32s,
    optional_texts,
    optional_texts,
    int64s,
    st.lists(members, max_size=4).map(tuple),
)


def test_keys_and_values_have_the_bytes_that_kafka_writes() -> None:
    assert offset_key("g", "t", 3) == bytes.fromhex("0001 0001 67 0001 74 00000003")
    assert group_key("g") == bytes.fromhex("0002 0001 67")
    assert offset_value(OffsetValue(5, 2, "m", 7)) == bytes.fromhex(
        "0003 0000000000000005 00000002 0001 6d 0000000000000007"
    )
    assert offset_value(OffsetValue(5, 2, "", 7, 9)) == bytes.fromhex(
        "0001 0000000000000005 0000 0000000000000007 0000000000000009"
    )
    assert group_value(GroupValue("consumer", 4, None, None, 8, ())) == bytes.fromhex(
        "0003 0008 636f6e73756d6572 00000004 ffff ffff 0000000000000008 00000000"
    )


@given(groups)
def test_a_group_decodes_to_what_was_encoded(value: GroupValue) -> None:
    assert decode_group(group_value(value)) == value


@given(texts, texts, int32s, int64s, int32s, texts, int64s)
def test_an_offset_decodes_to_what_was_encoded(
    group: str, topic: str, partition: int, offset: int, epoch: int, metadata: str, at_ms: int
) -> None:
    assert decode_key(offset_key(group, topic, partition)) == OffsetKey(group, topic, partition)
    assert decode_key(group_key(group)) == GroupKey(group)
    value = OffsetValue(offset, epoch, metadata, at_ms)
    assert decode_offset(offset_value(value)) == value


def test_flexible_values_are_read() -> None:
    offset = bytes.fromhex("0004 0000000000000005 00000002 02 6d 0000000000000007 00")
    assert decode_offset(offset) == OffsetValue(5, 2, "m", 7)
    group = bytes.fromhex(
        "0004 09 636f6e73756d6572 00000004 06 72616e6765 02 61 0000000000000008 02"
        "02 61 00 02 63 02 68 00000064 000000c8 03 0102 02 03 00 00"
    )
    member = MemberValue("a", None, "c", "h", 100, 200, b"\x01\x02", b"\x03")
    assert decode_group(group) == GroupValue("consumer", 4, "range", "a", 8, (member,))


@given(st.binary(max_size=60))
def test_bytes_that_are_no_record_are_refused_or_read_but_never_crash(data: bytes) -> None:
    for decode in (decode_key, decode_offset, decode_group):
        try:
            decode(data)
        except KafkaError:
            continue


def test_keys_of_other_kinds_are_told_apart() -> None:
    assert decode_key(bytes.fromhex("0003 0001 67")) is None


def test_subscriptions_are_read_for_their_topics() -> None:
    assert subscribed_topics(subscription("a", "b")) == {"a", "b"}
    assert subscribed_topics(b"\0") is None
    assert subscribed_topics(b"\0\0\x7f\xff\xff\xff") is None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("", 0),
        ("a", 97),
        ("hello", 99162322),
        ("polygenelubricants", -(2**31)),
        ("console-consumer-1", None),
        ("😀", 1772899),
    ],
)
def test_hashes_are_those_of_java(text: str, number: int | None) -> None:
    if number is not None:
        assert java_hash(text) == number
    assert 0 <= partition_for(text, 50) < 50
