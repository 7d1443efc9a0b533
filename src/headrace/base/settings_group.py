"""The settings of groups and of client-metrics subscriptions: the smaller kinds of resource that can be configured.

Declared like those of topics and brokers. A group inherits from the broker's `group.consumer.*`; limits on what a group
may be given are broker settings too. Keys of group kinds that Headrace does not serve are not declared.
"""

from headrace.base.settings_types import (
    AtLeast,
    ConfigType,
    Configuration,
    Setting,
    configuration,
    declared,
    setting,
)

TELEMETRY = "client telemetry"


@configuration
class GroupConfig(Configuration):
    """The effective settings of one group of the consumer protocol."""

    consumer_heartbeat_interval_ms: int = setting(
        5000,
        ConfigType.INT,
        "How often members of the group report.",
        bound=AtLeast(1),
        synonyms=("group.consumer.heartbeat.interval.ms",),
    )
    consumer_session_timeout_ms: int = setting(
        45_000,
        ConfigType.INT,
        "How long a member of the group may be silent before it is taken out.",
        bound=AtLeast(1),
        synonyms=("group.consumer.session.timeout.ms",),
    )


@configuration
class ClientMetricsConfig(Configuration):
    """The settings of one subscription to the metrics of clients."""

    interval_ms: int = setting(
        300_000, ConfigType.INT, "How often the clients that match push their metrics.", needs=TELEMETRY
    )
    match: tuple[str, ...] = setting(
        (),
        ConfigType.LIST,
        "Which clients are asked: key=pattern pairs that must all match; none asks every client.",
        needs=TELEMETRY,
    )
    metrics: tuple[str, ...] = setting(
        (),
        ConfigType.LIST,
        "The prefixes of the metrics that are asked for; an empty list asks for none, * for all.",
        needs=TELEMETRY,
    )


GROUP_SETTINGS: dict[str, Setting] = declared(GroupConfig)
CLIENT_METRICS_SETTINGS: dict[str, Setting] = declared(ClientMetricsConfig)
