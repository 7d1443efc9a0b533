"""The consumer protocol's records: what is written is read back, known bytes stay, and damage is told as such."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import KafkaError
from headrace.coordinators.consumer_records import (
    ClassicValue,
    ConsumerKey,
    CurrentValue,
    Kind,
    MemberValue,
    RegexValue,
    TopicValue,
    consumer_key,
    current_value,
    decode_assignment,
    decode_consumer_key,
    decode_current,
    decode_epoch,
    decode_member,
    decode_regex,
    decode_subscription,
    decode_target,
    decode_topics,
    encode_assignment,
    epoch_value,
    member_value,
    regex_value,
    target_value,
    topics_value,
)
from headrace.coordinators.records import decode_key, group_key

texts = st.text(max_size=30)
optional = st.none() | texts
int32s = st.integers(-(2**31), 2**31 - 1)
ids = st.binary(min_size=16, max_size=16)
assignments = st.dictionaries(ids, st.frozensets(st.integers(0, 200), min_size=1), max_size=3)
classics = st.builds(ClassicValue, int32s, st.lists(st.tuples(texts, st.binary(max_size=200))).map(tuple))
names = st.lists(texts, max_size=4).map(tuple)
members = st.builds(
    MemberValue, optional, optional, texts, texts, names, optional, int32s, optional, st.none() | classics
)
VALUES: list[tuple[st.SearchStrategy[Any], Callable[[Any], bytes], Callable[[bytes], Any]]] = [
    (int32s, epoch_value, decode_epoch),
    (
        st.dictionaries(texts, st.builds(TopicValue, ids, st.integers(0, 9)), max_size=3),
        topics_value,
        decode_topics,
    ),
    (members, member_value, decode_member),
    (assignments, target_value, decode_target),
    (
        st.builds(CurrentValue, int32s, int32s, st.integers(0, 127), assignments, assignments),
        current_value,
        decode_current,
    ),
    (st.builds(RegexValue, names, st.integers(0, 9), st.integers(0, 2**62)), regex_value, decode_regex),
]


@pytest.mark.parametrize(("values", "encode", "decode"), VALUES)
@given(st.data())
def test_a_value_is_read_as_it_was_written_and_not_when_it_is_cut(
    values: st.SearchStrategy[Any],
    encode: Callable[[Any], bytes],
    decode: Callable[[bytes], Any],
    data: st.DataObject,
) -> None:
    value = data.draw(values)
    encoded = encode(value)
    assert decode(encoded) == value
    cut = encoded[: data.draw(st.integers(0, len(encoded) - 1))]
    try:
        decode(cut)
    except KafkaError:
        pass


@given(st.sampled_from(Kind), texts, texts)
def test_a_key_says_what_its_record_is(kind: Kind, group: str, name: str) -> None:
    named = kind in (Kind.MEMBER, Kind.TARGET, Kind.CURRENT, Kind.REGEX)
    data = consumer_key(kind, group, name)
    assert decode_consumer_key(data) == ConsumerKey(kind, group, name if named else "")
    assert decode_key(data) is None


def test_other_keys_are_not_the_consumer_protocols() -> None:
    assert decode_consumer_key(group_key("g")) is None


def test_values_have_the_bytes_that_kafka_writes() -> None:
    assert consumer_key(Kind.MEMBER, "g", "m") == bytes.fromhex("0005 0001 67 0001 6d")
    assert epoch_value(7) == bytes.fromhex("0000 00000007 00")
    assert target_value({b"t" * 16: frozenset({1, 3})}) == bytes.fromhex(
        "0000 02" + "74" * 16 + "03 00000001 00000003 00 00"
    )
    member = MemberValue(None, "r", "c", "h", ("t",), None, 5, "uniform")
    assert member_value(member) == bytes.fromhex(
        "0000 00 0272 0263 0268 02 0274 00 00000005 08756e69666f726d 00"
    )


def test_the_embedded_protocol_is_read_in_each_version() -> None:
    assert encode_assignment(0, {"t": frozenset({2, 0})}) == bytes.fromhex(
        "0000 00000001 0001 74 00000002 00000000 00000002 ffffffff"
    )
    assert decode_assignment(encode_assignment(1, {"t": frozenset({2, 0})})) == {"t": frozenset({0, 2})}
    old = decode_subscription(bytes.fromhex("0000 00000001 0001 74 ffffffff"))
    assert old is not None
    assert (old.topics, old.owned, old.rack_id) == (("t",), (), None)
    new = decode_subscription(
        bytes.fromhex("0003 00000001 0001 74 ffffffff 00000001 0001 74 00000001 00000004 00000007 0001 72")
    )
    assert new is not None
    assert (new.version, new.owned, new.rack_id) == (3, (("t", (4,)),), "r")
    assert decode_subscription(b"\0") is None
    assert decode_assignment(b"\0") is None
