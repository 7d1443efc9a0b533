"""Settings are declared once, parsed as Kafka parses them, and shared."""

import dataclasses
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base import settings
from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.settings import (
    BROKER_SETTINGS,
    TOPIC_SETTINGS,
    BrokerConfig,
    ConfigType,
    Reload,
    TopicConfig,
    broker_config,
    check_topic_config,
    topic_config,
    usable_broker_config,
)
from headrace.base.settings_types import render

KAFKA_TOPIC_KEYS = [
    "cleanup.policy",
    "compression.gzip.level",
    "compression.lz4.level",
    "compression.type",
    "compression.zstd.level",
    "delete.retention.ms",
    "file.delete.delay.ms",
    "flush.messages",
    "flush.ms",
    "follower.replication.throttled.replicas",
    "index.interval.bytes",
    "leader.replication.throttled.replicas",
    "local.retention.bytes",
    "local.retention.ms",
    "max.compaction.lag.ms",
    "max.message.bytes",
    "message.timestamp.after.max.ms",
    "message.timestamp.before.max.ms",
    "message.timestamp.type",
    "min.cleanable.dirty.ratio",
    "min.compaction.lag.ms",
    "min.insync.replicas",
    "preallocate",
    "remote.log.copy.disable",
    "remote.log.delete.on.disable",
    "remote.storage.enable",
    "retention.bytes",
    "retention.ms",
    "segment.bytes",
    "segment.index.bytes",
    "segment.jitter.ms",
    "segment.ms",
    "unclean.leader.election.enable",
]


def refusal(overrides: dict[str, str]) -> str:
    with pytest.raises(KafkaError) as raised:
        check_topic_config(overrides)
    assert raised.value.code is ErrorCode.INVALID_CONFIG
    return raised.value.message


def test_every_topic_key_of_kafka_is_declared() -> None:
    assert sorted(TOPIC_SETTINGS) == KAFKA_TOPIC_KEYS


def test_every_setting_says_what_it_does_and_accepts_its_own_default() -> None:
    for entry in [*TOPIC_SETTINGS.values(), *BROKER_SETTINGS.values()]:
        assert entry.doc.endswith("."), entry.name
        if entry.default_text is not None:
            assert entry.parse(entry.default_text) == entry.default, entry.name


def test_a_topics_defaults_are_those_of_its_broker_synonyms() -> None:
    for entry in TOPIC_SETTINGS.values():
        for synonym in entry.synonyms[:1]:
            broker = BROKER_SETTINGS[synonym]
            assert broker.type is entry.type, entry.name
            assert broker.default in (None, entry.default), entry.name
    assert broker_config({}).topic_defaults == TopicConfig()


def test_topics_without_overrides_share_one_configuration() -> None:
    broker = broker_config({"log.retention.ms": "1000"})
    assert topic_config({}, broker) is topic_config({}, broker)
    assert topic_config({}, broker).retention_ms == 1000
    assert topic_config({}) is broker_config({}).topic_defaults


def test_topics_with_equal_overrides_share_one_configuration() -> None:
    first = topic_config({"retention.ms": "5", "segment.ms": "9"})
    second = topic_config({"segment.ms": "9", "retention.ms": "5"})
    assert first is second


def test_a_configuration_does_not_change() -> None:
    config = topic_config({"retention.ms": "5"})
    with pytest.raises(AttributeError):
        config.retention_ms = 6  # type: ignore[misc]
    assert dataclasses.replace(config, retention_ms=6).retention_ms == 6
    assert config.retention_ms == 5
    with pytest.raises(TypeError, match="no_such_field"):
        TopicConfig(no_such_field=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("retention.ms", " 5 ", 5),
        ("retention.ms", "+5", 5),
        ("retention.ms", "-1", -1),
        ("retention.bytes", "-7", -7),
        ("preallocate", " TRUE ", True),
        ("min.cleanable.dirty.ratio", "1", 1.0),
        ("min.cleanable.dirty.ratio", ".5f", 0.5),
        ("cleanup.policy", "compact, delete", frozenset({"compact", "delete"})),
        ("cleanup.policy", "", frozenset()),
        ("compression.gzip.level", "-1", -1),
        ("leader.replication.throttled.replicas", "*", ("*",)),
        ("leader.replication.throttled.replicas", "0:1,1:2", ("0:1", "1:2")),
    ],
)
def test_values_are_read_as_kafka_reads_them(key: str, text: str, value: object) -> None:
    assert getattr(topic_config({key: text}), TOPIC_SETTINGS[key].attribute) == value


@pytest.mark.parametrize(
    ("key", "text", "words"),
    [
        ("nope", "1", "Unknown topic config name: nope"),
        ("retention.ms", "x", "Invalid value x for configuration retention.ms: Not a number of type LONG"),
        ("retention.ms", "", "Invalid value  for configuration retention.ms: Not a number of type LONG"),
        (
            "retention.ms",
            "5.0",
            "Invalid value 5.0 for configuration retention.ms: Not a number of type LONG",
        ),
        (
            "retention.ms",
            "1_000",
            "Invalid value 1_000 for configuration retention.ms: Not a number of type LONG",
        ),
        ("retention.ms", "-2", "Invalid value -2 for configuration retention.ms: Value must be at least -1"),
        (
            "segment.bytes",
            "99999999999",
            "Invalid value 99999999999 for configuration segment.bytes: Not a number of type INT",
        ),
        (
            "segment.bytes",
            "10",
            "Invalid value 10 for configuration segment.bytes: Value must be at least 1048576",
        ),
        (
            "preallocate",
            "maybe",
            "Invalid value maybe for configuration preallocate: Expected value to be either true or false",
        ),
        (
            "min.cleanable.dirty.ratio",
            "1.5",
            "Invalid value 1.5 for configuration min.cleanable.dirty.ratio: Value must be no more than 1",
        ),
        (
            "min.cleanable.dirty.ratio",
            "x",
            "Invalid value x for configuration min.cleanable.dirty.ratio: Not a number of type DOUBLE",
        ),
        (
            "cleanup.policy",
            "delete,foo",
            "Invalid value foo for configuration cleanup.policy: String must be one of: compact, delete",
        ),
        (
            "compression.type",
            "foo",
            (
                "Invalid value foo for configuration compression.type: "
                "String must be one of: uncompressed, zstd, lz4, snappy, gzip, producer"
            ),
        ),
        (
            "compression.gzip.level",
            "0",
            (
                "Invalid value 0 for configuration compression.gzip.level: "
                "Value must be between 1 and 9 or equal to -1"
            ),
        ),
        (
            "leader.replication.throttled.replicas",
            "x",
            (
                "Invalid value [x] for configuration leader.replication.throttled.replicas: "
                "leader.replication.throttled.replicas must be the literal '*' or a list of replicas in the "
                "following format: [partitionId]:[brokerId],[partitionId]:[brokerId],..."
            ),
        ),
        (
            "remote.storage.enable",
            "true",
            (
                "Tiered Storage functionality is disabled in the broker. "
                "Topic cannot be configured with remote log storage."
            ),
        ),
    ],
)
def test_refusals_use_kafkas_words(key: str, text: str, words: str) -> None:
    assert refusal({key: text}) == words


def test_a_minimum_lag_above_the_maximum_is_refused() -> None:
    assert (
        refusal({"min.compaction.lag.ms": "1000", "max.compaction.lag.ms": "2"})
        == "conflict topic config setting min.compaction.lag.ms (1000) > max.compaction.lag.ms (2)"
    )


def test_a_topic_whose_settings_contradict_the_brokers_can_still_be_run() -> None:
    broker = broker_config({"log.cleaner.max.compaction.lag.ms": "2"})
    own = {"min.compaction.lag.ms": "1000", "unclean.leader.election.enable": "true"}
    config = topic_config(own, broker)
    assert (config.min_compaction_lag_ms, config.max_compaction_lag_ms) == (1000, 2)
    assert config.unclean_leader_election_enable
    with pytest.raises(KafkaError, match="conflict topic config"):
        check_topic_config(own, broker)


@pytest.mark.parametrize(
    ("static", "retention_ms", "segment_ms"),
    [
        ({}, 604_800_000, 604_800_000),
        ({"log.retention.hours": "1", "log.roll.hours": "2"}, 3_600_000, 7_200_000),
        ({"log.retention.hours": "1", "log.retention.minutes": "3"}, 180_000, 604_800_000),
        ({"log.retention.minutes": "3", "log.retention.ms": "7", "log.roll.ms": "9"}, 7, 9),
        ({"log.retention.hours": "-1"}, -1, 604_800_000),
    ],
)
def test_the_finer_unit_wins(static: dict[str, str], retention_ms: int, segment_ms: int) -> None:
    config = topic_config({}, broker_config(static))
    assert (config.retention_ms, config.segment_ms) == (retention_ms, segment_ms)


def test_flush_time_falls_back_to_the_scheduler_interval() -> None:
    assert topic_config({}, broker_config({"log.flush.scheduler.interval.ms": "5"})).flush_ms == 5
    both = {"log.flush.scheduler.interval.ms": "5", "log.flush.interval.ms": "3"}
    assert topic_config({}, broker_config(both)).flush_ms == 3


def test_values_set_while_running_win_by_scope() -> None:
    static = {"log.retention.ms": "1", "num.partitions": "4"}
    cluster = {"log.retention.ms": "2", "num.partitions": "8", "unknown.key": "x"}
    assert broker_config(static, cluster=cluster).log_retention_ms == 2
    config = broker_config(static, cluster=cluster, broker={"log.retention.ms": "3"})
    assert config.log_retention_ms == 3
    assert config.num_partitions == 4, "a read-only setting keeps its static value"
    assert config.static_values == static


MIN_LAG, MAX_LAG = "log.cleaner.min.compaction.lag.ms", "log.cleaner.max.compaction.lag.ms"


@pytest.mark.parametrize(
    ("static", "cluster", "broker", "lags"),
    [
        ({MAX_LAG: "9"}, {MIN_LAG: "50"}, {}, (0, 9)),
        ({}, {MIN_LAG: "50"}, {MAX_LAG: "9"}, (0, 9)),
        ({MAX_LAG: "9"}, {}, {MIN_LAG: "50"}, (0, 9)),
        ({}, {MIN_LAG: "50", MAX_LAG: "60"}, {MAX_LAG: "9"}, (0, 9)),
        ({MAX_LAG: "9"}, {"log.retention.ms": "x"}, {MIN_LAG: "50", MAX_LAG: "60"}, (50, 60)),
    ],
)
def test_what_cannot_be_applied_is_left_out_and_the_rest_holds(
    static: dict[str, str], cluster: dict[str, str], broker: dict[str, str], lags: tuple[int, int]
) -> None:
    cluster = {**cluster, "message.max.bytes": "2000000"}
    config, left_out = usable_broker_config(static, cluster=cluster, broker=broker)
    assert (config.log_cleaner_min_compaction_lag_ms, config.log_cleaner_max_compaction_lag_ms) == lags
    assert config.message_max_bytes == 2_000_000
    [(name, why)] = left_out
    assert name in (MIN_LAG, "log.retention.ms") and why


def test_what_goes_together_is_applied_as_it_is() -> None:
    cluster, broker = {MIN_LAG: "5"}, {MAX_LAG: "9"}
    assert usable_broker_config({}, cluster=cluster, broker=broker) == (
        broker_config({}, cluster=cluster, broker=broker),
        [],
    )


def test_one_number_for_node_and_broker() -> None:
    assert broker_config({"broker.id": "7"}).node_id == 7
    assert broker_config({"node.id": "7"}).broker_id == 7
    with pytest.raises(KafkaError, match="same value"):
        broker_config({"node.id": "1", "broker.id": "2"})


@pytest.mark.parametrize(
    "static",
    [
        {"no.such.key": "1"},
        {"log.dirs": "/a,/b"},
        {"max.connections.per.ip": "0"},
        {"num.partitions": "0"},
        {"balancer.excluded.brokers": "1,x"},
        {"balancer.excluded.brokers": "-1"},
        {"group.min.session.timeout.ms": "9999999"},
        {"log.cleaner.min.compaction.lag.ms": "5", "log.cleaner.max.compaction.lag.ms": "1"},
    ],
)
def test_a_broker_does_not_start_with_settings_it_cannot_keep(static: dict[str, str]) -> None:
    with pytest.raises(KafkaError) as raised:
        broker_config(static)
    assert raised.value.code is ErrorCode.INVALID_CONFIG


def test_identity_and_addresses_are_read_only() -> None:
    for name in ("node.id", "broker.id", "listeners", "advertised.listeners", "log.dirs", "num.partitions"):
        assert BROKER_SETTINGS[name].reload is Reload.READ_ONLY
    assert BrokerConfig().listeners == ("PLAINTEXT://:9092",)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.5, "0.5"),
        (1.0, "1.0"),
        (1.7976931348623157e308, "1.7976931348623157E308"),
        (1e7, "1.0E7"),
        (12345678.5, "1.23456785E7"),
        (0.0001, "1.0E-4"),
        (0.00015, "1.5E-4"),
    ],
)
def test_doubles_are_shown_as_java_shows_them(value: float, text: str) -> None:
    assert render(ConfigType.DOUBLE, value) == text


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_shown_double_reads_back_as_the_same_number(value: float) -> None:
    text = render(ConfigType.DOUBLE, value)
    assert text is not None
    assert float(text) == value


@given(st.text(max_size=30))
def test_any_text_is_either_a_value_or_a_refusal(text: str) -> None:
    for entry in TOPIC_SETTINGS.values():
        try:
            shown = entry.canonical(text)
        except KafkaError as refused:
            code = refused.code
        else:
            code = ErrorCode.NONE
            assert entry.canonical(str(shown)) == shown
        assert code in (ErrorCode.NONE, ErrorCode.INVALID_CONFIG)


# Keys that Kafka's tools expect of every topic, whose documentation says that nothing depends on them.
SHOWN_ONLY = {"file.delete.delay.ms", "preallocate", "log.segment.delete.delay.ms", "log.preallocate"}


def test_every_setting_is_read_or_says_what_it_waits_for() -> None:
    """An option that does nothing is a defect: its name must appear somewhere outside the tables."""
    package = Path(settings.__file__).parents[1]
    tables = set(Path(settings.__file__).parent.glob("settings_*.py"))
    sources = [path.read_text() for path in package.rglob("*.py") if path not in tables]
    words = {word for source in sources for word in re.findall(r"\w+", source)}
    inherited = {synonym for entry in TOPIC_SETTINGS.values() for synonym in entry.synonyms}
    idle = [
        entry.name
        for entry in [*TOPIC_SETTINGS.values(), *BROKER_SETTINGS.values()]
        if entry.attribute not in words and entry.name not in inherited and not entry.needs
    ]
    assert set(idle) <= SHOWN_ONLY
    for table in (TOPIC_SETTINGS, BROKER_SETTINGS):
        for name in SHOWN_ONLY & table.keys():
            assert table[name].doc.startswith("Shown for Kafka's tools")
