"""The settings of a broker: Kafka 4.3's keys, types, defaults and bounds, declared once as fields of `BrokerConfig`.

Only keys that Headrace reads are here, or that a coming capability reads (`needs` names it). Those of its
coordinators are inherited.
"""

from collections.abc import Mapping
from dataclasses import field

from headrace.base.settings_coordinators import CoordinatorConfig
from headrace.base.settings_topic import (
    CLEANUP_POLICIES,
    COMPRESSION_TYPES,
    DAY_MS,
    HOUR_MS,
    MESSAGE_BYTES_DEFAULT,
    SEGMENT_BYTES_MIN,
    TIERING,
    TIMESTAMP_TYPES,
    TopicConfig,
)
from headrace.base.settings_types import (
    INT_MAX,
    LONG_MAX,
    AtLeast,
    Between,
    ConfigType,
    EachOf,
    LevelOrDefault,
    OneOf,
    Reload,
    Setting,
    configuration,
    declared,
    setting,
)

_BOOLEAN, _STRING, _INT, _SHORT = ConfigType.BOOLEAN, ConfigType.STRING, ConfigType.INT, ConfigType.SHORT
_LONG, _DOUBLE, _LIST = ConfigType.LONG, ConfigType.DOUBLE, ConfigType.LIST
_LIVE = Reload.CLUSTER_WIDE

DATA_DIRECTORY_DEFAULT = ".headrace"


@configuration
class BrokerConfig(CoordinatorConfig):
    """The effective settings of one broker."""

    # Who it is and where it listens.
    node_id: int = setting(1, _INT, "The number of this node in the cluster.", bound=AtLeast(0))
    broker_id: int = setting(1, _INT, "The older name of node.id; always the same number.", bound=AtLeast(0))
    broker_rack: str | None = setting(
        None,
        _STRING,
        "Where this broker stands. Replicas are spread over racks, and clients may read from their own.",
    )
    listeners: tuple[str, ...] = setting(
        ("PLAINTEXT://:9092",),
        _LIST,
        "The addresses this broker listens on, as name://host:port, port 0 for any free one.",
    )
    advertised_listeners: tuple[str, ...] | None = setting(
        None, _LIST, "The addresses clients are told to connect to; without it, those the broker listens on."
    )
    log_dirs: tuple[str, ...] = setting(
        (DATA_DIRECTORY_DEFAULT,),
        _LIST,
        "The directory that holds the logs. One, for now: further ones are refused.",
    )

    # Topics.
    auto_create_topics_enable: bool = setting(
        True, _BOOLEAN, "Whether asking for the metadata of a topic that does not exist creates it."
    )
    default_replication_factor: int = setting(
        1, _INT, "How many replicas a topic gets when its creator does not say.", bound=AtLeast(1)
    )
    delete_topic_enable: bool = setting(True, _BOOLEAN, "Whether topics can be deleted.")
    min_insync_replicas: int = setting(
        1,
        _INT,
        "How many replicas must be in sync for a produce with acks=all to be taken, for topics that do not say.",
        bound=AtLeast(1),
        reload=_LIVE,
    )
    num_partitions: int = setting(
        1, _INT, "How many partitions a topic gets when its creator does not say.", bound=AtLeast(1)
    )
    unclean_leader_election_enable: bool = setting(
        False,
        _BOOLEAN,
        "Whether a replica that is not in sync may lead when no other is left, for topics that do not say.",
        reload=_LIVE,
    )

    # Replicas.
    follower_replication_throttled_rate: int = setting(
        LONG_MAX,
        _LONG,
        "The most bytes a second that this broker fetches for the replicas named by "
        "follower.replication.throttled.replicas, while they are not in sync.",
        bound=AtLeast(0),
        reload=Reload.PER_BROKER,
    )
    leader_replication_throttled_rate: int = setting(
        LONG_MAX,
        _LONG,
        "The most bytes a second that this broker serves to the replicas named by "
        "leader.replication.throttled.replicas, while they are not in sync.",
        bound=AtLeast(0),
        reload=Reload.PER_BROKER,
    )
    replica_fetch_max_bytes: int = setting(
        1024 * 1024,
        _INT,
        "The most bytes of one partition that a follower asks its leader for at a time; a larger batch comes whole.",
        bound=AtLeast(0),
    )
    replica_fetch_response_max_bytes: int = setting(
        10 * 1024 * 1024,
        _INT,
        "The most bytes of all partitions that a follower asks a leader for at a time.",
        bound=AtLeast(0),
    )
    replica_fetch_wait_max_ms: int = setting(
        500, _INT, "How long a follower's fetch waits for records at the leader.", bound=AtLeast(1)
    )
    replica_high_watermark_checkpoint_interval_ms: int = setting(
        5_000, _LONG, "How often high watermarks are written down.", bound=AtLeast(100)
    )
    replica_lag_time_max_ms: int = setting(
        30_000,
        _LONG,
        "How long a follower may be without the end of its leader's log before it counts as out of sync.",
        bound=AtLeast(100),
    )
    replica_selector_class: str | None = setting(
        None,
        _STRING,
        "Which replica a consumer is sent to: with RackAwareReplicaSelector at the end of the name, one in the rack "
        "that it says it is in; without, the leader.",
        reload=_LIVE,
    )

    # Connections and requests.
    connections_max_idle_ms: int = setting(
        600_000,
        _LONG,
        "How long a connection may be silent before it is closed; a negative time never closes one.",
    )
    fetch_max_bytes: int = setting(
        55 * 1024 * 1024,
        _INT,
        "The most bytes of records that one fetch is answered with.",
        bound=AtLeast(1024),
    )
    max_connections: int = setting(
        INT_MAX, _INT, "How many connections the broker holds at once.", bound=AtLeast(0), reload=_LIVE
    )
    max_connections_per_ip: int = setting(
        INT_MAX,
        _INT,
        "How many connections the broker holds from one address.",
        bound=AtLeast(1),
        reload=_LIVE,
    )
    max_incremental_fetch_session_cache_slots: int = setting(
        1000, _INT, "How many incremental fetch sessions are remembered.", bound=AtLeast(0)
    )
    max_request_partition_size_limit: int = setting(
        2000, _INT, "The most partitions that one page of DescribeTopicPartitions holds.", bound=AtLeast(1)
    )
    queued_max_request_bytes: int = setting(
        -1,
        _LONG,
        "The most bytes of requests that are held unanswered before reading stops; -1 sets no limit.",
    )
    socket_request_max_bytes: int = setting(
        100 * 1024 * 1024,
        _INT,
        "The largest request that is read; a larger one closes its connection.",
        bound=AtLeast(1),
    )

    # Logs: what topics inherit, and the upkeep of all of them.
    compression_gzip_level: int = setting(
        -1,
        _INT,
        "The level used when compression.type is gzip; -1 leaves it to the codec.",
        bound=LevelOrDefault(1, 9, -1),
        reload=_LIVE,
    )
    compression_lz4_level: int = setting(
        9, _INT, "The level used when compression.type is lz4.", bound=Between(1, 17), reload=_LIVE
    )
    compression_type: str = setting(
        "producer",
        _STRING,
        "The codec batches are stored with, for topics that do not say; producer stores a batch as it came.",
        bound=OneOf(COMPRESSION_TYPES),
        reload=_LIVE,
    )
    compression_zstd_level: int = setting(
        3, _INT, "The level used when compression.type is zstd.", bound=Between(-131072, 22), reload=_LIVE
    )
    log_cleaner_backoff_ms: int = setting(
        15_000,
        _LONG,
        "How long the compactor rests when there is nothing to do.",
        bound=AtLeast(0),
        reload=_LIVE,
    )
    log_cleaner_dedupe_buffer_size: int = setting(
        128 * 1024 * 1024,
        _LONG,
        "The memory the compactor's table of keys may take.",
        reload=_LIVE,
    )
    log_cleaner_delete_retention_ms: int = setting(
        DAY_MS,
        _LONG,
        "How long compacted topics keep tombstones.",
        bound=AtLeast(0),
        reload=_LIVE,
    )
    log_cleaner_enable: bool = setting(True, _BOOLEAN, "Whether the compactor runs.")
    log_cleaner_io_buffer_load_factor: float = setting(
        0.9,
        _DOUBLE,
        "How full the compactor's table of keys may get; the fuller, the more keys it holds and the slower it is.",
        bound=Between(0, 1),
        reload=_LIVE,
    )
    log_cleaner_io_max_bytes_per_second: float = setting(
        1.7976931348623157e308,
        _DOUBLE,
        "How fast the compactor may read and write.",
        reload=_LIVE,
    )
    log_cleaner_max_compaction_lag_ms: int = setting(
        LONG_MAX,
        _LONG,
        "The longest time a record may go without being considered for compaction.",
        bound=AtLeast(1),
        reload=_LIVE,
    )
    log_cleaner_min_cleanable_ratio: float = setting(
        0.5,
        _DOUBLE,
        "The share of a log that must be uncompacted before the compactor takes it up.",
        bound=Between(0, 1),
        reload=_LIVE,
    )
    log_cleaner_min_compaction_lag_ms: int = setting(
        0,
        _LONG,
        "The shortest time a record stays uncompacted.",
        bound=AtLeast(0),
        reload=_LIVE,
    )
    log_cleanup_policy: tuple[str, ...] = setting(
        ("delete",),
        _LIST,
        "What happens to old segments of topics that do not say: delete, compact, both or nothing.",
        bound=EachOf(CLEANUP_POLICIES),
        reload=_LIVE,
    )
    log_flush_interval_messages: int = setting(
        LONG_MAX,
        _LONG,
        "How many records a partition may take before it is forced to disk; with 1, before each acknowledgement.",
        bound=AtLeast(1),
        reload=_LIVE,
    )
    log_flush_interval_ms: int | None = setting(
        None,
        _LONG,
        "How long a record may wait before it is forced to disk. Without it, log.flush.scheduler.interval.ms.",
        reload=_LIVE,
        synonyms=("log.flush.scheduler.interval.ms",),
    )
    log_flush_offset_checkpoint_interval_ms: int = setting(
        60_000,
        _INT,
        "How often the first offset of every log and the point from which its recovery starts are written down.",
        bound=AtLeast(0),
    )
    log_flush_scheduler_interval_ms: int = setting(
        LONG_MAX, _LONG, "The time of log.flush.interval.ms when that is not set."
    )
    log_index_interval_bytes: int = setting(
        4096,
        _INT,
        "How many bytes of log lie between two entries of the offset index.",
        bound=AtLeast(0),
        reload=_LIVE,
    )
    log_index_size_max_bytes: int = setting(
        10 * 1024 * 1024, _INT, "The size at which an index is full.", bound=AtLeast(4), reload=_LIVE
    )
    log_local_retention_bytes: int = setting(
        -2,
        _LONG,
        "How many bytes of a tiered partition stay on the broker's own disk.",
        bound=AtLeast(-2),
        reload=_LIVE,
        needs=TIERING,
    )
    log_local_retention_ms: int = setting(
        -2,
        _LONG,
        "How long records of a tiered partition stay on the broker's own disk.",
        bound=AtLeast(-2),
        reload=_LIVE,
        needs=TIERING,
    )
    log_message_timestamp_after_max_ms: int = setting(
        HOUR_MS,
        _LONG,
        "How far a record's timestamp may lie ahead of the broker's clock.",
        bound=AtLeast(0),
        reload=_LIVE,
    )
    log_message_timestamp_before_max_ms: int = setting(
        LONG_MAX,
        _LONG,
        "How far a record's timestamp may lie behind the broker's clock.",
        bound=AtLeast(0),
        reload=_LIVE,
    )
    log_message_timestamp_type: str = setting(
        "CreateTime",
        _STRING,
        "Whether records keep their producer's time (CreateTime) or get the time of their append (LogAppendTime).",
        bound=OneOf(TIMESTAMP_TYPES),
        reload=_LIVE,
    )
    log_preallocate: bool = setting(
        False,
        _BOOLEAN,
        "Shown for Kafka's tools: segments grow as they are written, whatever is said here.",
        reload=_LIVE,
    )
    log_retention_bytes: int = setting(
        -1,
        _LONG,
        "How large a partition may grow before its oldest segments are deleted; -1 sets no limit.",
        reload=_LIVE,
    )
    log_retention_check_interval_ms: int = setting(
        300_000, _LONG, "How often segments past their retention are looked for.", bound=AtLeast(1)
    )
    log_retention_hours: int = setting(
        168,
        _INT,
        "How many hours records are kept, when neither log.retention.ms nor log.retention.minutes is set.",
    )
    log_retention_minutes: int | None = setting(
        None,
        _INT,
        "How many minutes records are kept, when log.retention.ms is not set.",
        synonyms=("log.retention.hours",),
    )
    log_retention_ms: int | None = setting(
        None,
        _LONG,
        "How long records are kept; -1 sets no limit. Without it, log.retention.minutes or log.retention.hours.",
        reload=_LIVE,
        synonyms=("log.retention.minutes", "log.retention.hours"),
    )
    log_roll_hours: int = setting(
        168,
        _INT,
        "The age in hours at which a segment is closed, when log.roll.ms is not set.",
        bound=AtLeast(1),
    )
    log_roll_jitter_hours: int = setting(
        0,
        _INT,
        "The most hours taken off a segment's age, when log.roll.jitter.ms is not set.",
        bound=AtLeast(0),
    )
    log_roll_jitter_ms: int | None = setting(
        None,
        _LONG,
        "The most that is taken off a segment's age, at random. Without it, log.roll.jitter.hours.",
        reload=_LIVE,
        synonyms=("log.roll.jitter.hours",),
    )
    log_roll_ms: int | None = setting(
        None,
        _LONG,
        "The age at which a segment is closed though it is not full. Without it, log.roll.hours.",
        reload=_LIVE,
        synonyms=("log.roll.hours",),
    )
    log_segment_bytes: int = setting(
        1 << 30,
        _INT,
        "The size at which a segment is closed and the next begun.",
        bound=AtLeast(SEGMENT_BYTES_MIN),
        reload=_LIVE,
    )
    log_segment_delete_delay_ms: int = setting(
        60_000,
        _LONG,
        "Shown for Kafka's tools: files of removed segments go at once, and readers keep what they hold open.",
        bound=AtLeast(0),
        reload=_LIVE,
    )
    message_max_bytes: int = setting(
        MESSAGE_BYTES_DEFAULT,
        _INT,
        "The largest batch that is taken, after compression, for topics that do not say.",
        bound=AtLeast(0),
        reload=_LIVE,
    )
    metadata_log_max_record_bytes_between_snapshots: int = setting(
        20 * 1024 * 1024,
        _LONG,
        "How many bytes the metadata log grows before its state is written as a snapshot and the log is cut.",
        bound=AtLeast(1),
    )
    producer_id_expiration_ms: int = setting(
        86_400_000,
        _INT,
        "How long the sequence numbers of a silent idempotent producer are remembered.",
        bound=AtLeast(1),
        reload=_LIVE,
    )

    # What the values above were made from, for DescribeConfigs; and the defaults that topics inherit, made once.
    static_values: Mapping[str, str] = field(default_factory=dict, compare=False)
    topic_defaults: TopicConfig = field(default=TopicConfig(), compare=False)


BROKER_SETTINGS: dict[str, Setting] = declared(BrokerConfig)
