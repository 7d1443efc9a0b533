"""What real clients do to topics and settings stays done, whatever happens to the broker."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ConfigSource,
    NewPartitions,
    NewTopic,
    ResourceType,
)

from headrace.testing.broker import Broker

TIMEOUT_S = 30.0


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    settings = {"metadata.log.max.record.bytes.between.snapshots": 20_000}
    with Broker(data_dir=tmp_path / "data", settings=settings) as running:
        yield running


def admin_of(broker: Broker) -> AdminClient:
    return AdminClient({"bootstrap.servers": broker.bootstrap})


def create(admin: AdminClient, *topics: NewTopic) -> None:
    for future in admin.create_topics(list(topics)).values():
        future.result(TIMEOUT_S)


def described(admin: AdminClient) -> dict[str, tuple[str, int]]:
    """Every topic's id and number of partitions."""
    names = list(admin.list_topics(timeout=TIMEOUT_S).topics)
    if not names:
        return {}
    from confluent_kafka import TopicCollection

    futures = admin.describe_topics(TopicCollection(names))
    topics = {name: future.result(TIMEOUT_S) for name, future in futures.items()}
    return {name: (str(topic.topic_id), len(topic.partitions)) for name, topic in topics.items()}


def settings_of(admin: AdminClient, kind: ResourceType, name: str) -> dict[str, ConfigEntry]:
    resource = ConfigResource(kind, name)
    return dict(admin.describe_configs([resource])[resource].result(TIMEOUT_S))


def set_one(admin: AdminClient, kind: ResourceType, name: str, key: str, value: str) -> None:
    entry = ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(kind, name, incremental_configs=[entry])
    admin.incremental_alter_configs([resource])[resource].result(TIMEOUT_S)


def test_what_was_acknowledged_is_there_after_a_kill(broker: Broker) -> None:
    admin = admin_of(broker)
    create(
        admin, NewTopic("kept", 3, config={"retention.ms": "77"}), NewTopic("gone", 1), NewTopic("grown", 1)
    )
    set_one(admin, ResourceType.TOPIC, "kept", "segment.ms", "99")
    set_one(admin, ResourceType.BROKER, "1", "log.roll.ms", "123456")
    admin.create_partitions([NewPartitions("grown", 4)])["grown"].result(TIMEOUT_S)
    admin.delete_topics(["gone"])["gone"].result(TIMEOUT_S)
    before = described(admin)
    assert {name: size for name, (_, size) in before.items()} == {"kept": 3, "grown": 4}
    broker.restart(clean=False)
    admin = admin_of(broker)
    assert described(admin) == before
    kept = settings_of(admin, ResourceType.TOPIC, "kept")
    assert (kept["retention.ms"].value, kept["segment.ms"].value) == ("77", "99")
    grown = settings_of(admin, ResourceType.TOPIC, "grown")["segment.ms"]
    assert (grown.value, grown.source) == ("123456", ConfigSource.DYNAMIC_BROKER_CONFIG.value)


def test_the_metadata_log_stays_small_however_often_topics_come_and_go(broker: Broker) -> None:
    admin = admin_of(broker)
    for turn in range(12):
        names = [f"turn-{turn}-{number}" for number in range(8)]
        create(admin, *[NewTopic(name, 10) for name in names])
        if turn < 11:
            for future in admin.delete_topics(names).values():
                future.result(TIMEOUT_S)
    assert broker.data_dir is not None
    directory = Path(broker.data_dir) / "__cluster_metadata-0"
    snapshots = [name for name in os.listdir(directory) if name.endswith(".checkpoint")]
    assert snapshots
    logged = sum(path.stat().st_size for path in directory.glob("*.log"))
    assert logged < 60_000
    before = described(admin)
    broker.restart(clean=False)
    assert described(admin_of(broker)) == before
    assert len(before) == 8


def test_a_topic_deleted_and_created_again_is_empty_and_another(broker: Broker) -> None:
    admin = admin_of(broker)
    create(admin, NewTopic("t", 1))
    first_id = described(admin)["t"][0]
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    producer.produce("t", b"old")
    assert producer.flush(TIMEOUT_S) == 0
    admin.delete_topics(["t"])["t"].result(TIMEOUT_S)
    create(admin, NewTopic("t", 1))
    assert described(admin)["t"][0] != first_id
    again = Producer({"bootstrap.servers": broker.bootstrap})
    offsets: list[int] = []
    again.produce("t", b"new", on_delivery=lambda error, message: offsets.append(message.offset()))
    assert again.flush(TIMEOUT_S) == 0
    assert offsets == [0]


def test_a_limit_set_for_the_broker_holds_at_once(broker: Broker) -> None:
    admin = admin_of(broker)
    create(admin, NewTopic("t", 1))
    set_one(admin, ResourceType.BROKER, "1", "message.max.bytes", "1000")
    producer = Producer({"bootstrap.servers": broker.bootstrap, "message.max.bytes": 1_000_000})
    errors: list[str | None] = []
    for size in (100, 5000):
        producer.produce("t", b"x" * size, on_delivery=lambda error, _: errors.append(error and error.name()))
        assert producer.flush(TIMEOUT_S) == 0
    assert errors == [None, "MSG_SIZE_TOO_LARGE"]


def test_a_refused_topic_is_refused_with_kafkas_words(broker: Broker) -> None:
    admin = admin_of(broker)
    with pytest.raises(KafkaException) as raised:
        admin.create_topics([NewTopic("t", 1, config={"retention.ms": "soon"})])["t"].result(TIMEOUT_S)
    error = raised.value.args[0]
    assert error.name() == "INVALID_CONFIG"
    assert error.str() == "Invalid value soon for configuration retention.ms: Not a number of type LONG"
