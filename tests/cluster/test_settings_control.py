"""What the controller decides about settings, and what is told of them afterwards."""

import pytest

from headrace.base.errors import ErrorCode
from headrace.base.settings import BrokerConfig, broker_config
from headrace.cluster.image import EMPTY, ClusterImage, apply
from headrace.cluster.records import BrokerRecord, ConfigRecord, TopicRecord
from headrace.cluster.settings_control import (
    Change,
    Operation,
    Resource,
    ResourceChange,
    alter_settings,
)
from headrace.cluster.settings_view import Entry, SettingsView, Source, Synonym

NODE = 1
BASE = apply(EMPTY, [BrokerRecord(NODE, "localhost", 9092, None, 1), TopicRecord("t", b"0123456789abcdef")])
SET, DELETE, APPEND, SUBTRACT = Operation.SET, Operation.DELETE, Operation.APPEND, Operation.SUBTRACT


def alter(
    image: ClusterImage,
    kind: int,
    name: str,
    *changes: tuple[str, int, str | None],
    replace: bool = False,
    config: BrokerConfig | None = None,
) -> ClusterImage:
    """The image after changes that must be accepted."""
    request = ResourceChange(kind, name, [Change(*change) for change in changes], replace)
    records, [result] = alter_settings(image, [request], config or broker_config({}))
    assert result.error is None, result.error
    return apply(image, records)


def refusal(
    kind: int, name: str, *changes: tuple[str, int, str | None], image: ClusterImage = BASE
) -> tuple[ErrorCode, str]:
    request = ResourceChange(kind, name, [Change(*change) for change in changes])
    records, [result] = alter_settings(image, [request], broker_config({}))
    assert records == []
    assert result.error is not None
    return result.error.code, result.error.message


def test_a_key_is_set_and_removed() -> None:
    image = alter(BASE, Resource.TOPIC, "t", ("retention.ms", SET, "5"), ("segment.ms", SET, "9"))
    assert image.config(Resource.TOPIC, "t") == {"retention.ms": "5", "segment.ms": "9"}
    image = alter(image, Resource.TOPIC, "t", ("retention.ms", DELETE, None))
    assert image.config(Resource.TOPIC, "t") == {"segment.ms": "9"}


def test_replacing_takes_away_what_is_not_named() -> None:
    image = alter(BASE, Resource.TOPIC, "t", ("retention.ms", SET, "5"), ("segment.ms", SET, "9"))
    image = alter(image, Resource.TOPIC, "t", ("segment.ms", SET, "7"), replace=True)
    assert image.config(Resource.TOPIC, "t") == {"segment.ms": "7"}
    assert alter(image, Resource.TOPIC, "t", replace=True).configs == {}


def test_a_change_to_the_same_value_makes_no_record() -> None:
    image = alter(BASE, Resource.TOPIC, "t", ("retention.ms", SET, "5"))
    request = ResourceChange(Resource.TOPIC, "t", [Change("retention.ms", SET, "5")])
    records, [result] = alter_settings(image, [request], broker_config({}))
    assert (records, result.error) == ([], None)


def test_lists_grow_from_their_default_and_shrink_to_nothing() -> None:
    image = alter(BASE, Resource.TOPIC, "t", ("cleanup.policy", APPEND, "compact"))
    assert image.config(Resource.TOPIC, "t") == {"cleanup.policy": "delete,compact"}
    image = alter(image, Resource.TOPIC, "t", ("cleanup.policy", APPEND, "compact"))
    assert image.config(Resource.TOPIC, "t") == {"cleanup.policy": "delete,compact"}
    image = alter(image, Resource.TOPIC, "t", ("cleanup.policy", SUBTRACT, "delete,other"))
    assert image.config(Resource.TOPIC, "t") == {"cleanup.policy": "compact"}
    image = alter(image, Resource.TOPIC, "t", ("cleanup.policy", SUBTRACT, "compact"))
    assert image.config(Resource.TOPIC, "t") == {"cleanup.policy": ""}


@pytest.mark.parametrize(
    ("kind", "name", "change", "code", "words"),
    [
        (2, "none", ("retention.ms", SET, "1"), 3, "The topic 'none' does not exist."),
        (2, "none", ("nope", SET, "1"), 40, "Unknown topic config name: nope"),
        (2, "", ("retention.ms", SET, "1"), 42, "Default topic resources are not allowed."),
        (2, "t", ("nope", SET, "1"), 40, "Unknown topic config name: nope"),
        (2, "t", ("retention.ms", SET, None), 42, "Null value not supported for : retention.ms"),
        (
            2,
            "t",
            ("retention.ms", SET, "x"),
            40,
            "Invalid value x for configuration retention.ms: Not a number of type LONG",
        ),
        (
            2,
            "t",
            ("retention.ms", APPEND, "5"),
            40,
            "Can't APPEND to key retention.ms because its type is not LIST.",
        ),
        (2, "t", ("retention.ms", 7, "5"), 42, "Unknown operation 7 on key retention.ms"),
        (
            4,
            "1",
            ("num.partitions", SET, "3"),
            42,
            "Cannot update these configs dynamically: [num.partitions]",
        ),
        (
            4,
            "1",
            ("log.retention.ms", SET, "x"),
            42,
            "Invalid value x for configuration log.retention.ms: Not a number of type LONG",
        ),
        (
            4,
            "",
            ("ssl.keystore.password", SET, "secret"),
            42,
            (
                "These security configs can be dynamically updated only per-listener using the listener prefix: "
                "[ssl.keystore.password]"
            ),
        ),
        (16, "", ("interval.ms", SET, "1000"), 42, "Subscription name can't be empty"),
        (
            16,
            "x",
            ("interval.ms", SET, "10"),
            42,
            "Invalid value 10 for interval.ms, interval must be between 100 and 3600000 (1 hour)",
        ),
        (16, "x", ("nope", SET, "10"), 42, "Unknown client metrics configuration: nope"),
        (16, "x", ("match", SET, "foo"), 40, "Illegal client matching pattern: foo"),
        (
            32,
            "",
            ("consumer.session.timeout.ms", SET, "50000"),
            42,
            "Default group resources are not allowed.",
        ),
        (32, "g", ("nope", SET, "1"), 40, "Unknown group config name: nope"),
        (
            32,
            "g",
            ("consumer.session.timeout.ms", SET, "1"),
            40,
            "consumer.session.timeout.ms must be greater than or equal to group.consumer.min.session.timeout.ms",
        ),
        (
            32,
            "g",
            ("consumer.heartbeat.interval.ms", SET, "60000"),
            40,
            "consumer.heartbeat.interval.ms must be less than or equal to group.consumer.max.heartbeat.interval.ms",
        ),
        (0, "g", ("a", SET, "b"), 42, "Unknown resource type 0"),
        (8, "1", ("root", SET, "INFO"), 42, "Unknown resource type 8"),
    ],
)
def test_changes_that_cannot_be(
    kind: int, name: str, change: tuple[str, int, str | None], code: int, words: str
) -> None:
    assert refusal(kind, name, change) == (ErrorCode(code), words)


MIN_LAG, MAX_LAG = "log.cleaner.min.compaction.lag.ms", "log.cleaner.max.compaction.lag.ms"


@pytest.mark.parametrize("broker", ["", "1"])
def test_a_default_that_contradicts_a_topics_own_setting_is_refused_with_its_name(broker: str) -> None:
    image = alter(BASE, Resource.TOPIC, "t", ("min.compaction.lag.ms", SET, "10000"))
    assert refusal(Resource.BROKER, broker, (MAX_LAG, SET, "5000"), image=image) == (
        ErrorCode.INVALID_CONFIG,
        (
            "The settings of topic 't' do not go with this default: conflict topic config setting "
            "min.compaction.lag.ms (10000) > max.compaction.lag.ms (5000)"
        ),
    )
    alter(image, Resource.BROKER, broker, (MAX_LAG, SET, "10000"))


def test_a_topic_and_a_default_of_one_request_may_not_contradict_each_other() -> None:
    requests = [
        ResourceChange(Resource.BROKER, "", [Change(MAX_LAG, SET, "5000")]),
        ResourceChange(Resource.TOPIC, "t", [Change("min.compaction.lag.ms", SET, "10000")]),
    ]
    records, results = alter_settings(BASE, requests, broker_config({}))
    assert [(each.type, each.error and each.error.code) for each in results] == [
        (Resource.BROKER, ErrorCode.INVALID_CONFIG),
        (Resource.TOPIC, None),
    ]
    assert records == [ConfigRecord(Resource.TOPIC, "t", "min.compaction.lag.ms", "10000")]


def test_a_topic_that_contradicts_the_defaults_already_keeps_no_other_default_from_changing() -> None:
    lag = ConfigRecord(Resource.TOPIC, "t", "min.compaction.lag.ms", "10000")
    image = apply(BASE, [lag, ConfigRecord(Resource.BROKER, "", MAX_LAG, "5000")])
    image = alter(image, Resource.BROKER, "", ("message.max.bytes", SET, "2000000"))
    assert MAX_LAG not in alter(image, Resource.BROKER, "", (MAX_LAG, DELETE, None)).config(4, "")


def test_a_default_that_contradicts_what_a_broker_has_of_its_own_is_refused_with_its_number() -> None:
    image = alter(BASE, Resource.BROKER, "2", (MAX_LAG, SET, "1000"))
    assert refusal(Resource.BROKER, "", (MIN_LAG, SET, "5000"), image=image) == (
        ErrorCode.INVALID_REQUEST,
        (
            "Broker 2 has settings of its own: conflict topic config setting "
            "min.compaction.lag.ms (5000) > max.compaction.lag.ms (1000)"
        ),
    )
    alter(image, Resource.BROKER, "", (MIN_LAG, SET, "1000"))


def test_two_brokers_settings_of_one_request_may_not_contradict_each_other() -> None:
    requests = [
        ResourceChange(Resource.BROKER, "2", [Change(MAX_LAG, SET, "1000")]),
        ResourceChange(Resource.BROKER, "", [Change(MIN_LAG, SET, "5000")]),
    ]
    _, results = alter_settings(BASE, requests, broker_config({}))
    assert [each.error is None for each in results] == [True, False]


def test_a_broker_that_contradicts_the_defaults_already_keeps_no_other_default_from_changing() -> None:
    own = ConfigRecord(Resource.BROKER, "2", MAX_LAG, "1000")
    image = apply(BASE, [own, ConfigRecord(Resource.BROKER, "", MIN_LAG, "5000")])
    image = alter(image, Resource.BROKER, "", ("message.max.bytes", SET, "2000000"))
    assert MIN_LAG not in alter(image, Resource.BROKER, "", (MIN_LAG, DELETE, None)).config(4, "")


def test_a_key_named_twice_is_refused() -> None:
    assert refusal(Resource.TOPIC, "t", ("retention.ms", SET, "5"), ("retention.ms", SET, "6")) == (
        ErrorCode.INVALID_REQUEST,
        "Error due to duplicate config keys",
    )


def test_a_resource_named_twice_is_refused_twice() -> None:
    request = ResourceChange(Resource.TOPIC, "t", [Change("retention.ms", SET, "5")])
    records, results = alter_settings(BASE, [request, request], broker_config({}))
    assert records == []
    assert [result.error and result.error.message for result in results] == [
        "Each resource must appear at most once."
    ] * 2


def test_one_wrong_key_keeps_the_others_of_its_resource_out_but_not_other_resources() -> None:
    requests = [
        ResourceChange(Resource.TOPIC, "t", [Change("retention.ms", SET, "5"), Change("nope", SET, "6")]),
        ResourceChange(Resource.BROKER, "", [Change("log.retention.ms", SET, "7")]),
    ]
    records, results = alter_settings(BASE, requests, broker_config({}))
    assert [result.error is None for result in results] == [False, True]
    assert apply(BASE, records).configs == {(Resource.BROKER, ""): {"log.retention.ms": "7"}}


def test_keys_of_plugins_are_kept_for_brokers_as_in_kafka() -> None:
    image = alter(BASE, Resource.BROKER, "1", ("my.plugin.size", SET, "3"))
    assert image.config(Resource.BROKER, "1") == {"my.plugin.size": "3"}
    [entry] = SettingsView(image, broker_config({}), NODE).broker(["my.plugin.size"])
    assert (entry.value, entry.sensitive, entry.source) == (None, True, Source.DYNAMIC_BROKER)


# -- what is told ------------------------------------------------------------------------------------------------------


def topic_entry(image: ClusterImage, config: BrokerConfig, key: str) -> Entry:
    [entry] = SettingsView(image, config, NODE).topic(image.config(Resource.TOPIC, "t"), [key])
    return entry


def test_a_topics_value_comes_from_the_nearest_place_that_has_one() -> None:
    config = broker_config({"log.retention.ms": "1000"})
    assert topic_entry(BASE, broker_config({}), "retention.ms").source is Source.DEFAULT
    image = BASE
    for kind, name, key, value, source in (
        (None, "", "", "1000", Source.STATIC_BROKER),
        (Resource.BROKER, "", "log.retention.ms", "2000", Source.DYNAMIC_DEFAULT_BROKER),
        (Resource.BROKER, "1", "log.retention.ms", "3000", Source.DYNAMIC_BROKER),
        (Resource.TOPIC, "t", "retention.ms", " 4000 ", Source.TOPIC),
    ):
        if kind is not None:
            image = alter(image, kind, name, (key, SET, value), config=config)
            config = broker_config(
                config.static_values,
                cluster=image.config(Resource.BROKER, ""),
                broker=image.config(Resource.BROKER, "1"),
            )
        entry = topic_entry(image, config, "retention.ms")
        assert (entry.value, entry.source) == (value.strip(), source)
    assert entry.synonyms == (
        Synonym("retention.ms", "4000", Source.TOPIC),
        Synonym("log.retention.ms", "3000", Source.DYNAMIC_BROKER),
        Synonym("log.retention.ms", "2000", Source.DYNAMIC_DEFAULT_BROKER),
        Synonym("log.retention.ms", "1000", Source.STATIC_BROKER),
        Synonym("log.retention.hours", "168", Source.DEFAULT),
    )


def test_a_coarser_unit_gives_the_value_without_being_listed() -> None:
    entry = topic_entry(BASE, broker_config({"log.retention.hours": "1"}), "retention.ms")
    assert (entry.value, entry.synonyms) == ("3600000", ())


def test_lists_are_told_in_the_order_they_were_given() -> None:
    image = alter(BASE, Resource.TOPIC, "t", ("cleanup.policy", SET, "compact, delete"))
    assert topic_entry(image, broker_config({}), "cleanup.policy").value == "compact,delete"
    assert (
        topic_entry(BASE, broker_config({"log.cleanup.policy": "compact"}), "cleanup.policy").value
        == "compact"
    )


def test_a_broker_tells_its_number_and_address_as_its_own_settings() -> None:
    view = SettingsView(BASE, broker_config({}), NODE)
    told = {entry.name: (entry.value, entry.source) for entry in view.broker()}
    assert told["node.id"] == told["broker.id"] == ("1", Source.STATIC_BROKER)
    assert told["advertised.listeners"] == ("PLAINTEXT://localhost:9092", Source.STATIC_BROKER)
    assert told["num.partitions"] == ("1", Source.DEFAULT)


def test_only_settings_that_take_effect_at_once_are_not_read_only() -> None:
    entries = {entry.name: entry.read_only for entry in SettingsView(BASE, broker_config({}), NODE).broker()}
    assert entries["num.partitions"]
    assert entries["listeners"]
    assert not entries["log.retention.ms"]
    assert not entries["max.connections"]
    assert not entries["message.max.bytes"]


def test_all_brokers_tell_only_what_was_set_for_them() -> None:
    image = alter(BASE, Resource.BROKER, "", ("log.retention.ms", SET, "5"))
    entries = SettingsView(image, broker_config({}), NODE).all_brokers()
    assert [(entry.name, entry.value, entry.source) for entry in entries] == [
        ("log.retention.ms", "5", Source.DYNAMIC_DEFAULT_BROKER)
    ]


def test_a_group_has_the_brokers_values_until_it_has_its_own() -> None:
    config = broker_config({"group.consumer.session.timeout.ms": "50000"})
    [entry] = SettingsView(BASE, config, NODE).group("g", ["consumer.session.timeout.ms"])
    assert (entry.value, entry.source) == ("50000", Source.STATIC_BROKER)
    image = alter(BASE, Resource.GROUP, "g", ("consumer.session.timeout.ms", SET, "55000"))
    [entry] = SettingsView(image, config, NODE).group("g", ["consumer.session.timeout.ms"])
    assert (entry.value, entry.source) == ("55000", Source.GROUP)
