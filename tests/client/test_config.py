"""A configuration key is used or refused, never ignored."""

import pytest

from headrace.client.config import (
    ACKS_ALL,
    KEYS,
    admin_config,
    consumer_config,
    foreign_keys,
    parse_address,
    producer_config,
    settings,
)
from headrace.client.errors import ConfigError


def test_defaults_are_kafkas() -> None:
    producer, consumer = producer_config({}), consumer_config({})
    assert (producer.acks, producer.enable_idempotence, producer.linger_ms) == (ACKS_ALL, True, 5)
    assert (producer.batch_size, producer.delivery_timeout_ms) == (16_384, 120_000)
    assert (consumer.auto_offset_reset, consumer.read_committed) == ("latest", False)
    assert admin_config({}).bootstrap_servers == (("127.0.0.1", 9092),)


def test_every_key_has_a_default_that_is_valid_and_a_description() -> None:
    for name, key in KEYS.items():
        key.parse(key.default)
        assert key.doc, name


def test_an_unknown_key_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"linger\.mss") as caught:
        producer_config({"linger.mss": 1})
    assert "linger.ms" in caught.value.hint


@pytest.mark.parametrize(
    "name, value, says",
    [
        ("security.protocol", "SASL_SSL", "not supported by this client yet"),
        ("sasl.mechanism", "PLAIN", "security is not supported"),
        ("ssl.ca.location", "x", "security is not supported"),
        ("key.serializer", "x", "given to the constructor"),
        ("metric.reporters", "x", "Java"),
        ("partitioner", "random", "expected default, sticky"),
        ("partition.assignment.strategy", "fair", "expected range, roundrobin"),
        ("acks", "2", "expected 0, 1 or all"),
        ("linger.ms", "soon", "expected a whole number"),
        ("linger.ms", "-1", "expected 0 to"),
        ("enable.idempotence", "perhaps", "expected true or false"),
        ("compression.type", "rar", "expected none, gzip, snappy, lz4 or zstd"),
        ("bootstrap.servers", "", "expected HOST:PORT"),
        ("bootstrap.servers", "localhost", "expected HOST:PORT"),
        ("bootstrap.servers", "localhost:0", "expected HOST:PORT"),
        ("bootstrap.servers", "a:1,b:70000", "expected HOST:PORT"),
    ],
)
def test_a_key_or_value_that_cannot_be_used_is_refused(name: str, value: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        producer_config({name: value})


def test_idempotence_gives_way_unless_it_was_asked_for() -> None:
    assert not producer_config({"acks": "1"}).enable_idempotence
    assert not producer_config({"max.in.flight.requests.per.connection": 6}).enable_idempotence
    with pytest.raises(ConfigError, match=r"enable\.idempotence needs acks=all"):
        producer_config({"acks": "1", "enable.idempotence": "true"})


def test_the_delivery_timeout_covers_at_least_one_request() -> None:
    assert producer_config({"delivery.timeout.ms": 5_000}).request_timeout_ms == 4_995
    assert producer_config({"request.timeout.ms": 200_000}).delivery_timeout_ms == 200_005
    with pytest.raises(ConfigError, match=r"at least linger\.ms"):
        producer_config({"delivery.timeout.ms": 1_000, "request.timeout.ms": 2_000})


def test_keys_of_other_clients_are_allowed_and_named() -> None:
    values = {"acks": "all", "fetch.min.bytes": "1", "client.id": "x"}
    producer_config(values)
    assert foreign_keys(values, "producer") == ["fetch.min.bytes"]
    assert foreign_keys(values, "consumer") == ["acks"]
    assert foreign_keys(values, "producer", "consumer") == []


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"transactional\.id needs enable\.idempotence"):
        producer_config({"transactional.id": "t", "enable.idempotence": False})
    with pytest.raises(ConfigError, match="needs acks=all"):
        producer_config({"transactional.id": "t", "acks": 1})
    with pytest.raises(ConfigError, match=r"below session\.timeout\.ms"):
        consumer_config({"heartbeat.interval.ms": 50_000})
    with pytest.raises(ConfigError, match=r"needs a group\.id"):
        consumer_config({"group.instance.id": "i"})
    with pytest.raises(ConfigError, match="the broker decides"):
        consumer_config({"group.protocol": "consumer", "session.timeout.ms": 6_000})
    with pytest.raises(ConfigError, match=r"needs group\.protocol=consumer"):
        consumer_config({"group.remote.assignor": "uniform"})


def test_keys_may_be_written_as_keywords() -> None:
    assert producer_config(settings({"acks": 1}, {"linger_ms": 7})).linger_ms == 7
    with pytest.raises(ConfigError, match="given twice"):
        settings({"linger.ms": 5}, {"linger_ms": 7})


def test_javas_names_of_assignors_are_understood() -> None:
    java = "org.apache.kafka.clients.consumer.CooperativeStickyAssignor, range"
    assert consumer_config({"partition.assignment.strategy": java}).partition_assignment_strategy == (
        "cooperative-sticky",
        "range",
    )


@pytest.mark.parametrize(
    "text, address",
    [
        ("localhost:9092", ("localhost", 9092)),
        ("[::1]:9092", ("::1", 9092)),
        ("PLAINTEXT://h:1", ("h", 1)),
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address
