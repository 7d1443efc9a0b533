"""The settings of a topic: Kafka 4.3's keys, types, defaults and bounds, declared once as the fields of `TopicConfig`.

`TopicConfig` holds parsed values and is what the log, the replicas and the compactor read. It is immutable and shared:
all topics without overrides hold the same instance. DescribeConfigs, the command line and the documentation derive from
`TOPIC_SETTINGS`.
"""

from headrace.base.settings_types import (
    LONG_MAX,
    AtLeast,
    Between,
    ConfigType,
    Configuration,
    EachOf,
    LevelOrDefault,
    OneOf,
    Setting,
    ThrottledReplicas,
    configuration,
    declared,
    setting,
)

_BOOLEAN, _STRING, _INT, _LONG = ConfigType.BOOLEAN, ConfigType.STRING, ConfigType.INT, ConfigType.LONG
_DOUBLE, _LIST = ConfigType.DOUBLE, ConfigType.LIST

SEGMENT_BYTES_MIN = 1024 * 1024
WEEK_MS = 7 * 24 * 60 * 60 * 1000
DAY_MS = 24 * 60 * 60 * 1000
HOUR_MS = 60 * 60 * 1000
MESSAGE_BYTES_DEFAULT = 1024 * 1024 + 12

COMPRESSION_TYPES = ("uncompressed", "zstd", "lz4", "snappy", "gzip", "producer")
TIMESTAMP_TYPES = ("CreateTime", "LogAppendTime")
CLEANUP_POLICIES = ("compact", "delete")

TIERING = "tiered storage"


@configuration
class TopicConfig(Configuration):
    """The effective settings of one topic."""

    cleanup_policy: frozenset[str] = setting(
        ("delete",),
        _LIST,
        "What happens to old segments: delete drops them when they pass the retention time or size, compact keeps the "
        "latest record of every key. Both may be given; an empty list keeps everything.",
        bound=EachOf(CLEANUP_POLICIES),
        synonyms=("log.cleanup.policy",),
        convert=frozenset,
    )
    compression_gzip_level: int = setting(
        -1,
        _INT,
        "The level used when the topic's compression.type is gzip; -1 leaves it to the codec.",
        bound=LevelOrDefault(1, 9, -1),
        synonyms=("compression.gzip.level",),
    )
    compression_lz4_level: int = setting(
        9,
        _INT,
        "The level used when the topic's compression.type is lz4.",
        bound=Between(1, 17),
        synonyms=("compression.lz4.level",),
    )
    compression_type: str = setting(
        "producer",
        _STRING,
        "The codec batches are stored with. With producer a batch is stored as it came; any other value has the broker "
        "compress again what comes with a different codec.",
        bound=OneOf(COMPRESSION_TYPES),
        synonyms=("compression.type",),
    )
    compression_zstd_level: int = setting(
        3,
        _INT,
        "The level used when the topic's compression.type is zstd.",
        bound=Between(-131072, 22),
        synonyms=("compression.zstd.level",),
    )
    delete_retention_ms: int = setting(
        DAY_MS,
        _LONG,
        "How long a compacted topic keeps the tombstone of a deleted key: the time a reader has to go from the "
        "beginning to the end and still see every deletion.",
        bound=AtLeast(0),
        synonyms=("log.cleaner.delete.retention.ms",),
    )
    file_delete_delay_ms: int = setting(
        60_000,
        _LONG,
        "Shown for Kafka's tools: files of removed segments go at once, and readers keep what they hold open.",
        bound=AtLeast(0),
        synonyms=("log.segment.delete.delay.ms",),
    )
    flush_messages: int = setting(
        LONG_MAX,
        _LONG,
        "How many records may be appended before the log is forced to disk. With 1, no produce is acknowledged before "
        "its records are on disk; produces that wait together share one flush.",
        bound=AtLeast(1),
        synonyms=("log.flush.interval.messages",),
    )
    flush_ms: int = setting(
        LONG_MAX,
        _LONG,
        "How long an appended record may wait before the log is forced to disk.",
        bound=AtLeast(0),
        synonyms=("log.flush.interval.ms",),
    )
    follower_replication_throttled_replicas: tuple[str, ...] = setting(
        (),
        _LIST,
        "The replicas (partition:broker pairs, or * for all) whose fetching from the leader is held to the follower's "
        "replication rate.",
        bound=ThrottledReplicas("follower.replication.throttled.replicas"),
    )
    index_interval_bytes: int = setting(
        4096,
        _INT,
        "How many bytes of log lie between two entries of the offset index.",
        bound=AtLeast(0),
        synonyms=("log.index.interval.bytes",),
    )
    leader_replication_throttled_replicas: tuple[str, ...] = setting(
        (),
        _LIST,
        "The replicas (partition:broker pairs, or * for all) that the leader serves at no more than its "
        "replication rate.",
        bound=ThrottledReplicas("leader.replication.throttled.replicas"),
    )
    local_retention_bytes: int = setting(
        -2,
        _LONG,
        "How many bytes of a tiered partition stay on the broker's own disk; -2 means as many as retention.bytes.",
        bound=AtLeast(-2),
        synonyms=("log.local.retention.bytes",),
        needs=TIERING,
    )
    local_retention_ms: int = setting(
        -2,
        _LONG,
        "How long records of a tiered partition stay on the broker's own disk; -2 means as long as retention.ms.",
        bound=AtLeast(-2),
        synonyms=("log.local.retention.ms",),
        needs=TIERING,
    )
    max_compaction_lag_ms: int = setting(
        LONG_MAX,
        _LONG,
        "The longest time a record of a compacted topic may go without being considered for compaction.",
        bound=AtLeast(1),
        synonyms=("log.cleaner.max.compaction.lag.ms",),
    )
    max_message_bytes: int = setting(
        MESSAGE_BYTES_DEFAULT,
        _INT,
        "The largest batch the topic takes, after compression, in bytes.",
        bound=AtLeast(0),
        synonyms=("message.max.bytes",),
    )
    message_timestamp_after_max_ms: int = setting(
        HOUR_MS,
        _LONG,
        "How far a record's timestamp may lie ahead of the broker's clock when message.timestamp.type is CreateTime; "
        "records beyond it are refused.",
        bound=AtLeast(0),
        synonyms=("log.message.timestamp.after.max.ms",),
    )
    message_timestamp_before_max_ms: int = setting(
        LONG_MAX,
        _LONG,
        "How far a record's timestamp may lie behind the broker's clock when message.timestamp.type is CreateTime; "
        "records beyond it are refused.",
        bound=AtLeast(0),
        synonyms=("log.message.timestamp.before.max.ms",),
    )
    message_timestamp_type: str = setting(
        "CreateTime",
        _STRING,
        "Whether a record keeps the time of its producer (CreateTime) or gets that of its append (LogAppendTime).",
        bound=OneOf(TIMESTAMP_TYPES),
        synonyms=("log.message.timestamp.type",),
    )
    min_cleanable_dirty_ratio: float = setting(
        0.5,
        _DOUBLE,
        "The share of a compacted log that must be uncompacted before the compactor takes it up.",
        bound=Between(0, 1),
        synonyms=("log.cleaner.min.cleanable.ratio",),
    )
    min_compaction_lag_ms: int = setting(
        0,
        _LONG,
        "The shortest time a record of a compacted topic stays as it is.",
        bound=AtLeast(0),
        synonyms=("log.cleaner.min.compaction.lag.ms",),
    )
    min_insync_replicas: int = setting(
        1,
        _INT,
        "How many replicas must be in sync for a produce with acks=all to be taken.",
        bound=AtLeast(1),
        synonyms=("min.insync.replicas",),
    )
    preallocate: bool = setting(
        False,
        _BOOLEAN,
        "Shown for Kafka's tools: segments grow as they are written, whatever is said here.",
        synonyms=("log.preallocate",),
    )
    remote_log_copy_disable: bool = setting(
        False, _BOOLEAN, "Whether a tiered topic stops copying segments to the remote store.", needs=TIERING
    )
    remote_log_delete_on_disable: bool = setting(
        False,
        _BOOLEAN,
        "Whether turning tiering off for a topic also deletes what it has in the remote store.",
        needs=TIERING,
    )
    remote_storage_enable: bool = setting(
        False, _BOOLEAN, "Whether segments of the topic are copied to the remote store.", needs=TIERING
    )
    retention_bytes: int = setting(
        -1,
        _LONG,
        "How large a partition may grow before its oldest segments are deleted; -1 sets no limit. Read when "
        "cleanup.policy has delete.",
        synonyms=("log.retention.bytes",),
    )
    retention_ms: int = setting(
        WEEK_MS,
        _LONG,
        "How long records are kept before their segment is deleted; -1 sets no limit. Read when cleanup.policy "
        "has delete.",
        bound=AtLeast(-1),
        synonyms=("log.retention.ms", "log.retention.minutes", "log.retention.hours"),
    )
    segment_bytes: int = setting(
        1 << 30,
        _INT,
        "The size at which a segment is closed and the next begun.",
        bound=AtLeast(SEGMENT_BYTES_MIN),
        synonyms=("log.segment.bytes",),
    )
    segment_index_bytes: int = setting(
        10 * 1024 * 1024,
        _INT,
        "The size at which an index is full and its segment is closed.",
        bound=AtLeast(4),
        synonyms=("log.index.size.max.bytes",),
    )
    segment_jitter_ms: int = setting(
        0,
        _LONG,
        "The most that is taken off segment.ms, at random for each segment, so that segments do not all close at once.",
        bound=AtLeast(0),
        synonyms=("log.roll.jitter.ms", "log.roll.jitter.hours"),
    )
    segment_ms: int = setting(
        WEEK_MS,
        _LONG,
        "The age at which a segment is closed though it is not full, so that retention can reach its records.",
        bound=AtLeast(1),
        synonyms=("log.roll.ms", "log.roll.hours"),
    )
    unclean_leader_election_enable: bool = setting(
        False,
        _BOOLEAN,
        "Whether a replica that is not in sync may lead when no other is left, at the price of losing records.",
        synonyms=("unclean.leader.election.enable",),
    )


TOPIC_SETTINGS: dict[str, Setting] = declared(TopicConfig)
