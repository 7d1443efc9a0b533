"""The settings of topics and brokers: the tables, the parsed configurations, and how one is made from texts.

`TOPIC_SETTINGS` and `BROKER_SETTINGS` are the one declaration of every key; the broker, DescribeConfigs, the command
line and the documentation read them. A configuration is immutable: a change makes a new one; equal topics share one.
"""

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.settings_broker import BROKER_SETTINGS, BrokerConfig
from headrace.base.settings_topic import HOUR_MS, TOPIC_SETTINGS, TopicConfig
from headrace.base.settings_types import AtLeast, Bound, ConfigType, Reload, Setting, parsed, setting

__all__ = [
    "BROKER_SETTINGS",
    "TOPIC_SETTINGS",
    "AtLeast",
    "Bound",
    "BrokerConfig",
    "ConfigType",
    "Reload",
    "Setting",
    "TopicConfig",
    "broker_config",
    "check_topic_config",
    "setting",
    "topic_config",
    "topic_setting",
    "usable_broker_config",
]

TOPIC_CONFIGS_SHARED_MAX = 1024
BROKER_CONFIGS_SHARED_MAX = 16
MINUTE_MS = 60_000
_NONE: Mapping[str, str] = MappingProxyType({})


def topic_setting(name: str) -> Setting:
    """A topic's setting by its key; INVALID_CONFIG when there is none of that name."""
    found = TOPIC_SETTINGS.get(name)
    if found is None:
        raise KafkaError(ErrorCode.INVALID_CONFIG, f"Unknown topic config name: {name}")
    return found


def topic_config(overrides: Mapping[str, str], broker: BrokerConfig | None = None) -> TopicConfig:
    """The effective settings of a topic: its overrides over what the broker's settings give every topic.

    Topics with the same overrides share one instance, and those without any hold the broker's own. Values that
    contradict each other are given as they are: defaults differ from broker to broker, and whoever runs a topic must
    not fail because of one. `check_topic_config` is for who is about to set them.
    """
    defaults = _KAFKA_DEFAULTS if broker is None else broker.topic_defaults
    return _topic_config(tuple(sorted(overrides.items())), defaults) if overrides else defaults


def check_topic_config(overrides: Mapping[str, str], broker: BrokerConfig | None = None) -> None:
    """INVALID_CONFIG when a topic on that broker could not have these overrides."""
    config = topic_config(overrides, broker)
    _compaction_lags_agree(config.min_compaction_lag_ms, config.max_compaction_lag_ms)
    if config.remote_storage_enable:
        raise KafkaError(
            ErrorCode.INVALID_CONFIG,
            "Tiered Storage functionality is disabled in the broker. "
            "Topic cannot be configured with remote log storage.",
        )


def broker_config(
    static: Mapping[str, str], *, cluster: Mapping[str, str] = _NONE, broker: Mapping[str, str] = _NONE
) -> BrokerConfig:
    """A broker's effective settings: those set on it while running, over those set for all brokers, over its own file.

    Unknown keys in `static` are refused, so that a misspelt one does not pass in silence. Keys set while running may be
    unknown, as in Kafka, and a read-only one among them has no effect. The same texts give the same instance.
    """
    for name in static:
        if name not in BROKER_SETTINGS:
            raise KafkaError(ErrorCode.INVALID_CONFIG, f"Unknown broker config name: {name}")
    live = {
        name: text
        for name, text in {**cluster, **broker}.items()
        if name in BROKER_SETTINGS and BROKER_SETTINGS[name].reload is not Reload.READ_ONLY
    }
    return _broker_config(tuple(_one_node_id(static).items()), tuple(live.items()))


def usable_broker_config(
    static: Mapping[str, str], *, cluster: Mapping[str, str] = _NONE, broker: Mapping[str, str] = _NONE
) -> tuple[BrokerConfig, list[tuple[str, str]]]:
    """As `broker_config`, of as much as goes together; and which keys are left out, with the reason.

    What was set while running is decided without the files of all brokers, and one that it does not suit must run.
    The broker's own file stands, then what was set on it, then what was set for all.
    """
    try:
        return broker_config(static, cluster=cluster, broker=broker), []
    except KafkaError:
        config, kept = broker_config(static), dict[str, str]()
    left_out: list[tuple[str, str]] = []
    for place in (broker, cluster):
        left = {name: text for name, text in place.items() if name not in kept}
        reasons: dict[str, str] = {}
        while True:  # again as long as that helps: a key may need another one beside it
            for name, text in left.items():
                try:
                    config = broker_config(static, broker={**kept, name: text})
                except KafkaError as error:
                    reasons[name] = error.message
                else:
                    kept[name] = text
            if len(remaining := {name: text for name, text in left.items() if name not in kept}) == len(left):
                break
            left = remaining
        left_out += [(name, reasons[name]) for name in left]
    return config, left_out


@lru_cache(maxsize=BROKER_CONFIGS_SHARED_MAX)
def _broker_config(static: tuple[tuple[str, str], ...], live: tuple[tuple[str, str], ...]) -> BrokerConfig:
    values = parsed(BROKER_SETTINGS, dict(static + live))
    config = BrokerConfig(**values)
    _check_limits(config)
    return BrokerConfig(
        **values, static_values=MappingProxyType(dict(static)), topic_defaults=_topic_defaults(config)
    )


def _one_node_id(static: Mapping[str, str]) -> dict[str, str]:
    """Either name of the node's number stands for both."""
    given = {name: static[name].strip() for name in ("node.id", "broker.id") if name in static}
    if len(set(given.values())) > 1:
        raise KafkaError(
            ErrorCode.INVALID_CONFIG,
            f"You must set `node.id` to the same value as `broker.id`: {' and '.join(given.values())} differ.",
        )
    both = dict.fromkeys(("node.id", "broker.id"), next(iter(given.values()))) if given else {}
    return {**static, **both}


def _check_limits(config: BrokerConfig) -> None:
    """What no single key can say: how keys limit each other."""
    if len(config.log_dirs) != 1:
        raise KafkaError(ErrorCode.INVALID_CONFIG, "log.dirs must name exactly one directory.")
    for low, high in (
        ("group.min.session.timeout.ms", "group.max.session.timeout.ms"),
        ("group.consumer.min.session.timeout.ms", "group.consumer.max.session.timeout.ms"),
        ("group.consumer.min.heartbeat.interval.ms", "group.consumer.max.heartbeat.interval.ms"),
    ):
        least, most = (getattr(config, BROKER_SETTINGS[name].attribute) for name in (low, high))
        if least > most:
            raise KafkaError(ErrorCode.INVALID_CONFIG, f"{high} must be greater than or equal to {low}")
    _compaction_lags_agree(config.log_cleaner_min_compaction_lag_ms, config.log_cleaner_max_compaction_lag_ms)


def _topic_defaults(config: BrokerConfig) -> TopicConfig:
    """What a topic without overrides gets: each value from the first of its synonyms that is set."""
    values: dict[str, Any] = {}
    for entry in TOPIC_SETTINGS.values():
        for synonym in entry.synonyms:
            value = getattr(config, BROKER_SETTINGS[synonym].attribute)
            if value is not None:
                values[entry.attribute] = value * _unit_ms(synonym) if _unit_ms(synonym) > 1 else value
                break
    values["cleanup_policy"] = frozenset(config.log_cleanup_policy)
    values["retention_ms"] = max(-1, values["retention_ms"])
    values.setdefault("flush_ms", config.log_flush_scheduler_interval_ms)
    made = TopicConfig(**values)
    return _KAFKA_DEFAULTS if made == _KAFKA_DEFAULTS else made


def _unit_ms(name: str) -> int:
    return HOUR_MS if name.endswith(".hours") else MINUTE_MS if name.endswith(".minutes") else 1


@lru_cache(maxsize=TOPIC_CONFIGS_SHARED_MAX)
def _topic_config(overrides: tuple[tuple[str, str], ...], defaults: TopicConfig) -> TopicConfig:
    values = {entry.attribute: getattr(defaults, entry.attribute) for entry in TOPIC_SETTINGS.values()}
    for name, text in overrides:
        entry = topic_setting(name)
        values[entry.attribute] = entry.value(text)
    return TopicConfig(**values)


def _compaction_lags_agree(least_ms: int, most_ms: int) -> None:
    if least_ms > most_ms:
        raise KafkaError(
            ErrorCode.INVALID_CONFIG,
            f"conflict topic config setting min.compaction.lag.ms ({least_ms}) > max.compaction.lag.ms ({most_ms})",
        )


_KAFKA_DEFAULTS = TopicConfig()
