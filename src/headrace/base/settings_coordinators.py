"""The broker settings that its coordinators read: groups and their committed offsets, transactions.

Part of `BrokerConfig`, in a module of their own because they are many and belong together.
"""

from headrace.base.settings_cluster import ClusterConfig
from headrace.base.settings_topic import WEEK_MS
from headrace.base.settings_types import (
    INT_MAX,
    AtLeast,
    ConfigType,
    EachOf,
    OneOf,
    Reload,
    configuration,
    setting,
)

_BOOLEAN, _STRING, _INT, _SHORT = ConfigType.BOOLEAN, ConfigType.STRING, ConfigType.INT, ConfigType.SHORT
_LONG, _LIST = ConfigType.LONG, ConfigType.LIST
_LIVE = Reload.CLUSTER_WIDE


@configuration
class CoordinatorConfig(ClusterConfig):
    """The effective settings of a broker's coordinators."""

    # Groups and their offsets.
    group_consumer_assignors: tuple[str, ...] = setting(
        ("uniform", "range"),
        _LIST,
        "The assignors a group of the consumer protocol may choose from; the first is the default.",
        bound=EachOf(("uniform", "range")),
    )
    group_consumer_heartbeat_interval_ms: int = setting(
        5000,
        _INT,
        "How often members of a consumer-protocol group report.",
        bound=AtLeast(1),
    )
    group_consumer_max_heartbeat_interval_ms: int = setting(
        15_000,
        _INT,
        "The longest heartbeat interval that a group may be given.",
        bound=AtLeast(1),
    )
    group_consumer_max_session_timeout_ms: int = setting(
        60_000,
        _INT,
        "The longest session timeout that a group may be given.",
        bound=AtLeast(1),
    )
    group_consumer_max_size: int = setting(
        INT_MAX,
        _INT,
        "How many members a group of the consumer protocol takes.",
        bound=AtLeast(1),
    )
    group_consumer_migration_policy: str = setting(
        "bidirectional",
        _STRING,
        "Whether groups may move between the classic and the consumer protocol while they are in use.",
        bound=OneOf(("bidirectional", "upgrade", "downgrade", "disabled")),
    )
    group_consumer_min_heartbeat_interval_ms: int = setting(
        5000,
        _INT,
        "The shortest heartbeat interval that a group may be given.",
        bound=AtLeast(1),
    )
    group_consumer_min_session_timeout_ms: int = setting(
        45_000,
        _INT,
        "The shortest session timeout that a group may be given.",
        bound=AtLeast(1),
    )
    group_consumer_session_timeout_ms: int = setting(
        45_000,
        _INT,
        "How long a member of a consumer-protocol group may be silent before it is taken out.",
        bound=AtLeast(1),
    )
    group_coordinator_rebalance_protocols: tuple[str, ...] = setting(
        ("classic", "consumer"),
        _LIST,
        "The group protocols that are served.",
        bound=EachOf(("consumer", "classic")),
    )
    group_initial_rebalance_delay_ms: int = setting(
        3000,
        _INT,
        "How long the first rebalance of an empty classic group waits for more members.",
    )
    group_max_session_timeout_ms: int = setting(
        1_800_000, _INT, "The longest session timeout that a classic member may ask for."
    )
    group_max_size: int = setting(INT_MAX, _INT, "How many members a classic group takes.", bound=AtLeast(1))
    group_min_session_timeout_ms: int = setting(
        6000, _INT, "The shortest session timeout that a classic member may ask for."
    )
    offset_metadata_max_bytes: int = setting(
        4096, _INT, "The longest text that may be committed with an offset."
    )
    offsets_commit_timeout_ms: int = setting(
        5000,
        _INT,
        "How long a commit waits for its replicas before it fails.",
        bound=AtLeast(1),
    )
    offsets_retention_check_interval_ms: int = setting(
        600_000,
        _LONG,
        "How often offsets past their retention are looked for.",
        bound=AtLeast(1),
    )
    offsets_retention_minutes: int = setting(
        10_080,
        _INT,
        "How long the offsets of a group without members are kept.",
        bound=AtLeast(1),
    )
    offsets_topic_compression_codec: int = setting(0, _INT, "The codec number that offsets are stored with.")
    offsets_topic_num_partitions: int = setting(
        50, _INT, "How many partitions the topic of offsets has.", bound=AtLeast(1)
    )
    offsets_topic_replication_factor: int = setting(
        3,
        _SHORT,
        "How many replicas the topic of offsets has, or all brokers if they are fewer.",
        bound=AtLeast(1),
    )
    offsets_topic_segment_bytes: int = setting(
        100 * 1024 * 1024, _INT, "The segment size of the topic of offsets.", bound=AtLeast(1)
    )

    # Transactions.
    transaction_abort_timed_out_transaction_cleanup_interval_ms: int = setting(
        10_000,
        _INT,
        "How often transactions past their timeout are looked for.",
        bound=AtLeast(1),
    )
    transaction_max_timeout_ms: int = setting(
        900_000,
        _INT,
        "The longest timeout that a producer may ask for its transactions.",
        bound=AtLeast(1),
    )
    transaction_partition_verification_enable: bool = setting(
        True,
        _BOOLEAN,
        "Whether a partition asks the coordinator before it takes the first records of a transaction.",
        reload=_LIVE,
    )
    transaction_remove_expired_transaction_cleanup_interval_ms: int = setting(
        3_600_000,
        _INT,
        "How often expired transactional ids are looked for.",
        bound=AtLeast(1),
    )
    transaction_state_log_min_isr: int = setting(
        2, _INT, "The min.insync.replicas of the topic of transactions.", bound=AtLeast(1)
    )
    transaction_state_log_num_partitions: int = setting(
        50, _INT, "How many partitions the topic of transactions has.", bound=AtLeast(1)
    )
    transaction_state_log_replication_factor: int = setting(
        3,
        _SHORT,
        "How many replicas the topic of transactions has, or all brokers if they are fewer.",
        bound=AtLeast(1),
    )
    transaction_state_log_segment_bytes: int = setting(
        100 * 1024 * 1024,
        _INT,
        "The segment size of the topic of transactions.",
        bound=AtLeast(1),
    )
    transactional_id_expiration_ms: int = setting(
        WEEK_MS,
        _INT,
        "How long an unused transactional id is remembered.",
        bound=AtLeast(1),
    )
