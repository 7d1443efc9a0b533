"""An image is what its records say, however they arrive, and never changes."""

from copy import deepcopy

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.cluster.image import EMPTY, ClusterImage, apply, records_of
from headrace.cluster.records import (
    BrokerRecord,
    BrokerStateRecord,
    ConfigRecord,
    MetadataRecord,
    PartitionRecord,
    ProducerIdsRecord,
    RemoveTopicRecord,
    TopicRecord,
    UnregisterBrokerRecord,
    decode_record,
    encode_record,
)


@st.composite
def histories(draw: st.DrawFn) -> list[MetadataRecord]:
    """Records in an order that a controller could have written."""
    records: list[MetadataRecord] = []
    topics: dict[bytes, tuple[str, int]] = {}
    for number in range(draw(st.integers(0, 25))):
        kind = draw(
            st.sampled_from(["topic", "partition", "change", "remove", "config", "broker", "producers"])
        )
        replicas = tuple(draw(st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True)))
        if kind == "topic":
            name = f"t{draw(st.integers(0, 5))}"
            if all(name != taken for taken, _ in topics.values()):
                topic_id = number.to_bytes(16, "big")
                topics[topic_id] = (name, 0)
                records.append(TopicRecord(name, topic_id))
        elif kind == "partition" and topics:
            topic_id = draw(st.sampled_from(sorted(topics)))
            name, size = topics[topic_id]
            topics[topic_id] = (name, size + 1)
            records.append(PartitionRecord(topic_id, size, replicas, replicas, replicas[0], 0, 0))
        elif kind == "change" and any(size for _, size in topics.values()):
            topic_id = draw(st.sampled_from(sorted(each for each, (_, size) in topics.items() if size)))
            index = draw(st.integers(0, topics[topic_id][1] - 1))
            epoch = draw(st.integers(0, 9))
            records.append(
                PartitionRecord(topic_id, index, replicas, replicas[:1], replicas[0], epoch, epoch)
            )
        elif kind == "remove" and topics:
            topic_id = draw(st.sampled_from(sorted(topics)))
            del topics[topic_id]
            records.append(RemoveTopicRecord(topic_id))
        elif kind == "config":
            name = f"t{draw(st.integers(0, 5))}"
            value = draw(st.none() | st.sampled_from(["1", "2"]))
            records.append(
                ConfigRecord(2, name, draw(st.sampled_from(["retention.ms", "segment.ms"])), value)
            )
        elif kind == "broker":
            node = draw(st.integers(0, 4))
            records.append(BrokerRecord(node, "host", 9092 + node, draw(st.none() | st.just("a")), number))
            if draw(st.booleans()):
                records.append(BrokerStateRecord(node, number, draw(st.booleans()), draw(st.booleans())))
            elif draw(st.booleans()):
                records.append(UnregisterBrokerRecord(node, number))
        elif kind == "producers":
            records.append(ProducerIdsRecord(number * 1000))
    return records


@given(histories(), st.data())
def test_replay_gives_the_same_image_as_one_step_at_a_time(
    records: list[MetadataRecord], data: st.DataObject
) -> None:
    whole = apply(EMPTY, records)
    stepwise = EMPTY
    left = list(records)
    while left:
        size = data.draw(st.integers(1, len(left)))
        stepwise = apply(stepwise, left[:size])
        left = left[size:]
    assert stepwise == whole


@given(histories())
def test_a_snapshot_equals_the_replay(records: list[MetadataRecord]) -> None:
    image = apply(EMPTY, records)
    assert apply(EMPTY, records_of(image)) == image


@given(histories())
def test_records_survive_their_encoding(records: list[MetadataRecord]) -> None:
    assert [decode_record(encode_record(record)) for record in records] == records


@given(histories(), histories())
def test_an_image_does_not_change_when_the_next_is_made(
    first: list[MetadataRecord], second: list[MetadataRecord]
) -> None:
    image = apply(EMPTY, first)
    before = deepcopy(image)
    fresh = [
        record for record in second if isinstance(record, ConfigRecord | BrokerRecord | ProducerIdsRecord)
    ]
    apply(image, [*fresh, *[RemoveTopicRecord(topic.id) for topic in image.topics.values()]])
    assert image == before


@given(histories())
def test_names_and_ids_always_agree(records: list[MetadataRecord]) -> None:
    image = apply(EMPTY, records)
    assert {topic.id: name for name, topic in image.topics.items()} == image.names


def image_of(topics: int) -> ClusterImage:
    records: list[MetadataRecord] = []
    for number in range(topics):
        topic_id = number.to_bytes(16, "big")
        records += [TopicRecord(f"t{number}", topic_id), PartitionRecord(topic_id, 0, (1,), (1,), 1, 0, 0)]
    return apply(EMPTY, records)


def test_what_did_not_change_is_shared_between_images() -> None:
    image = image_of(3)
    after = apply(image, [ConfigRecord(2, "t1", "retention.ms", "5")])
    assert after.topics is image.topics
    grown = apply(image, [PartitionRecord((1).to_bytes(16, "big"), 1, (1,), (1,), 1, 0, 0)])
    assert grown.topics["t0"] is image.topics["t0"]
    assert len(grown.topics["t1"].partitions) == 2


def test_replicas_in_sync_are_held_once() -> None:
    record = decode_record(encode_record(PartitionRecord(bytes(16), 0, (1, 2), (1, 2), 1, 0, 0)))
    image = apply(EMPTY, [TopicRecord("t", bytes(16)), record])
    [partition] = image.topics["t"].partitions
    assert partition.isr is partition.replicas


def test_a_record_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="from_the_future"):
        decode_record(encode_record(TopicRecord("t", b"x")).replace(b"\xa5topic", b"\xaffrom_the_future"))


def test_a_log_from_before_reassignment_and_fencing_is_read() -> None:
    """Fields that came later are missing at the end of older records."""
    old_partition = msgspec.msgpack.encode(["partition", bytes(16), 0, [1, 2], [1], 1, 7, 8])
    old_broker = msgspec.msgpack.encode(["broker", 1, "host", 9092, None, 3])
    assert decode_record(old_partition) == PartitionRecord(bytes(16), 0, (1, 2), (1,), 1, 7, 8)
    image = apply(EMPTY, [decode_record(old_broker)])
    assert image.brokers[1].may_lead


def test_a_broker_is_fenced_and_unfenced_and_goes() -> None:
    image = apply(EMPTY, [BrokerRecord(1, "host", 9092, None, 3, bytes(range(16)), fenced=True)])
    assert not image.brokers[1].may_lead
    image = apply(image, [BrokerStateRecord(1, 3, fenced=False)])
    assert image.brokers[1].may_lead
    assert image.brokers[1].incarnation == bytes(range(16))
    image = apply(image, [BrokerStateRecord(1, 3, fenced=False, controlled_shutdown=True)])
    assert not image.brokers[1].may_lead
    assert apply(image, [UnregisterBrokerRecord(1, 3)]).brokers == {}
