"""Every assignor gives each partition to one member that wants it; sticky ones are balanced and move little."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import KafkaError
from headrace.client.assignors import PROTOCOLS, assign
from headrace.client.config_keys import ASSIGNORS
from headrace.client.group_protocol import (
    Subscription,
    decode_assignment,
    decode_sticky_data,
    decode_subscription,
    encode_assignment,
    encode_sticky_data,
    encode_subscription,
)
from headrace.client.topics import TopicPartition

TOPICS = st.dictionaries(st.sampled_from(["a", "b", "c"]), st.integers(1, 7), min_size=1)
MEMBERS = st.dictionaries(
    st.text("mnop", min_size=1, max_size=3),
    st.sets(st.sampled_from(["a", "b", "c"]), min_size=1),
    min_size=1,
    max_size=5,
)


def everything(counts: dict[str, int], members: dict[str, set[str]]) -> set[TopicPartition]:
    wanted = set().union(*members.values())
    return {TopicPartition(t, n) for t, count in counts.items() if t in wanted for n in range(count)}


def test_every_configurable_assignor_is_there() -> None:
    assert set(PROTOCOLS) == set(ASSIGNORS)


@given(st.sampled_from(ASSIGNORS), TOPICS, MEMBERS)
def test_each_partition_goes_to_one_member_that_subscribed_to_it(
    name: str, counts: dict[str, int], members: dict[str, set[str]]
) -> None:
    subscriptions = {member: Subscription(tuple(sorted(topics))) for member, topics in members.items()}
    assignment = assign(name, subscriptions, counts, {})
    given_out = [partition for partitions in assignment.values() for partition in partitions]
    assert len(given_out) == len(set(given_out))
    assert set(given_out) == everything(counts, members)
    for member, partitions in assignment.items():
        assert {partition.topic for partition in partitions} <= members[member]
    again = assign(name, dict(reversed(subscriptions.items())), counts, {})
    assert again == assignment, "the order of members does not matter"


@given(st.sampled_from(["sticky", "cooperative-sticky"]), TOPICS, MEMBERS, st.data())
def test_sticky_assignments_balance_and_keep_what_they_can(
    name: str, counts: dict[str, int], members: dict[str, set[str]], data: st.DataObject
) -> None:
    same = {member: set(counts) for member in members}
    subscriptions = {member: Subscription(tuple(counts)) for member in same}
    before = assign(name, subscriptions, counts, {})
    sizes = [len(partitions) for partitions in before.values()]
    assert max(sizes) - min(sizes) <= 1
    gone = data.draw(st.sampled_from(sorted(members)))
    left = {
        member: Subscription(tuple(counts), frozenset(before[member]), 1)
        for member in members
        if member != gone
    }
    if not left:
        return
    after = assign(name, left, counts, {})
    assert all(before[member] <= after[member] for member in left), "nobody loses anything when one leaves"
    joined = left | {"newcomer": Subscription(tuple(counts))}
    joined = {m: s._replace(owned=frozenset(after.get(m, ())), generation=2) for m, s in joined.items()}
    final = assign(name, joined, counts, {})
    for member in left:
        assert final[member] <= after[member], "a newcomer only takes"
    if name == "cooperative-sticky":
        assert not final["newcomer"], "what others have is given up first"


def test_of_two_that_claim_a_partition_the_later_generation_is_right() -> None:
    claimed = frozenset({TopicPartition("a", 0)})
    members = {
        "old": Subscription(("a",), claimed, 3),
        "new": Subscription(("a",), claimed, 4),
    }
    assert assign("sticky", members, {"a": 1}, {}) == {"old": set(), "new": {TopicPartition("a", 0)}}


def test_static_members_are_ordered_by_instance_so_that_restarts_move_nothing() -> None:
    members = {"zzz": Subscription(("a",)), "aaa": Subscription(("a",))}
    instances = {"zzz": "one", "aaa": "two"}
    assert assign("range", members, {"a": 1}, instances)["zzz"] == {TopicPartition("a", 0)}


PARTITIONS = st.frozensets(st.builds(TopicPartition, st.sampled_from(["a", "ü"]), st.integers(0, 9)))


@given(PARTITIONS, st.integers(-1, 9), st.none() | st.just("rack"), st.none() | st.binary(max_size=9))
def test_what_members_say_is_read_as_it_was_written(
    owned: frozenset[TopicPartition], generation: int, rack: str | None, user_data: bytes | None
) -> None:
    said = Subscription(("a", "ü"), owned, generation, rack, user_data)
    encoded = encode_subscription(said)
    assert decode_subscription(encoded) == said
    assert decode_assignment(encode_assignment(owned)) == owned
    assert decode_sticky_data(encode_sticky_data(owned, generation)) == (owned, generation)
    older = b"\x00\x00" + encoded[2:]
    assert decode_subscription(older).owned == frozenset(), "version 0 has no owned partitions"
    for size in range(len(encoded)):
        try:
            decode_subscription(encoded[:size])
        except KafkaError:
            continue


def test_members_of_other_clients_are_understood() -> None:
    from aiokafka.coordinator.protocol import ConsumerProtocolMemberMetadata

    theirs = ConsumerProtocolMemberMetadata(0, ["b", "a"], b"").encode()
    assert decode_subscription(theirs).topics == ("b", "a")
    ours = ConsumerProtocolMemberMetadata.decode(encode_subscription(Subscription(("a", "b"))))
    assert ours.subscription == ["a", "b"]
    with pytest.raises(KafkaError, match="cannot be read"):
        decode_assignment(b"\x00\x00\x00\x00\x00\x09")
