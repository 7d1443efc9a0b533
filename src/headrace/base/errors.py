"""Kafka's error codes and the one exception that carries them.

Expected failures travel as `KafkaError`; the handler that answers the request maps it to the code on the wire, once.
Anything else that escapes a handler is a bug and is answered as UNKNOWN_SERVER_ERROR.
"""

from enum import IntEnum


class ErrorCode(IntEnum):
    """The codes of the Kafka protocol, with Kafka's names and numbers."""

    UNKNOWN_SERVER_ERROR = -1
    NONE = 0
    OFFSET_OUT_OF_RANGE = 1
    CORRUPT_MESSAGE = 2
    UNKNOWN_TOPIC_OR_PARTITION = 3
    INVALID_FETCH_SIZE = 4
    LEADER_NOT_AVAILABLE = 5
    NOT_LEADER_OR_FOLLOWER = 6
    REQUEST_TIMED_OUT = 7
    BROKER_NOT_AVAILABLE = 8
    REPLICA_NOT_AVAILABLE = 9
    MESSAGE_TOO_LARGE = 10
    STALE_CONTROLLER_EPOCH = 11
    OFFSET_METADATA_TOO_LARGE = 12
    NETWORK_EXCEPTION = 13
    COORDINATOR_LOAD_IN_PROGRESS = 14
    COORDINATOR_NOT_AVAILABLE = 15
    NOT_COORDINATOR = 16
    INVALID_TOPIC_EXCEPTION = 17
    RECORD_LIST_TOO_LARGE = 18
    NOT_ENOUGH_REPLICAS = 19
    NOT_ENOUGH_REPLICAS_AFTER_APPEND = 20
    INVALID_REQUIRED_ACKS = 21
    ILLEGAL_GENERATION = 22
    INCONSISTENT_GROUP_PROTOCOL = 23
    INVALID_GROUP_ID = 24
    UNKNOWN_MEMBER_ID = 25
    INVALID_SESSION_TIMEOUT = 26
    REBALANCE_IN_PROGRESS = 27
    INVALID_COMMIT_OFFSET_SIZE = 28
    TOPIC_AUTHORIZATION_FAILED = 29
    GROUP_AUTHORIZATION_FAILED = 30
    CLUSTER_AUTHORIZATION_FAILED = 31
    INVALID_TIMESTAMP = 32
    UNSUPPORTED_SASL_MECHANISM = 33
    ILLEGAL_SASL_STATE = 34
    UNSUPPORTED_VERSION = 35
    TOPIC_ALREADY_EXISTS = 36
    INVALID_PARTITIONS = 37
    INVALID_REPLICATION_FACTOR = 38
    INVALID_REPLICA_ASSIGNMENT = 39
    INVALID_CONFIG = 40
    NOT_CONTROLLER = 41
    INVALID_REQUEST = 42
    UNSUPPORTED_FOR_MESSAGE_FORMAT = 43
    POLICY_VIOLATION = 44
    OUT_OF_ORDER_SEQUENCE_NUMBER = 45
    DUPLICATE_SEQUENCE_NUMBER = 46
    INVALID_PRODUCER_EPOCH = 47
    INVALID_TXN_STATE = 48
    INVALID_PRODUCER_ID_MAPPING = 49
    INVALID_TRANSACTION_TIMEOUT = 50
    CONCURRENT_TRANSACTIONS = 51
    TRANSACTION_COORDINATOR_FENCED = 52
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53
    SECURITY_DISABLED = 54
    OPERATION_NOT_ATTEMPTED = 55
    KAFKA_STORAGE_ERROR = 56
    LOG_DIR_NOT_FOUND = 57
    SASL_AUTHENTICATION_FAILED = 58
    UNKNOWN_PRODUCER_ID = 59
    REASSIGNMENT_IN_PROGRESS = 60
    DELEGATION_TOKEN_AUTH_DISABLED = 61
    DELEGATION_TOKEN_NOT_FOUND = 62
    DELEGATION_TOKEN_OWNER_MISMATCH = 63
    DELEGATION_TOKEN_REQUEST_NOT_ALLOWED = 64
    DELEGATION_TOKEN_AUTHORIZATION_FAILED = 65
    DELEGATION_TOKEN_EXPIRED = 66
    INVALID_PRINCIPAL_TYPE = 67
    NON_EMPTY_GROUP = 68
    GROUP_ID_NOT_FOUND = 69
    FETCH_SESSION_ID_NOT_FOUND = 70
    INVALID_FETCH_SESSION_EPOCH = 71
    LISTENER_NOT_FOUND = 72
    TOPIC_DELETION_DISABLED = 73
    FENCED_LEADER_EPOCH = 74
    UNKNOWN_LEADER_EPOCH = 75
    UNSUPPORTED_COMPRESSION_TYPE = 76
    STALE_BROKER_EPOCH = 77
    OFFSET_NOT_AVAILABLE = 78
    MEMBER_ID_REQUIRED = 79
    PREFERRED_LEADER_NOT_AVAILABLE = 80
    GROUP_MAX_SIZE_REACHED = 81
    FENCED_INSTANCE_ID = 82
    ELIGIBLE_LEADERS_NOT_AVAILABLE = 83
    ELECTION_NOT_NEEDED = 84
    NO_REASSIGNMENT_IN_PROGRESS = 85
    GROUP_SUBSCRIBED_TO_TOPIC = 86
    INVALID_RECORD = 87
    UNSTABLE_OFFSET_COMMIT = 88
    THROTTLING_QUOTA_EXCEEDED = 89
    PRODUCER_FENCED = 90
    RESOURCE_NOT_FOUND = 91
    DUPLICATE_RESOURCE = 92
    UNACCEPTABLE_CREDENTIAL = 93
    INCONSISTENT_VOTER_SET = 94
    INVALID_UPDATE_VERSION = 95
    FEATURE_UPDATE_FAILED = 96
    PRINCIPAL_DESERIALIZATION_FAILURE = 97
    SNAPSHOT_NOT_FOUND = 98
    POSITION_OUT_OF_RANGE = 99
    UNKNOWN_TOPIC_ID = 100
    DUPLICATE_BROKER_REGISTRATION = 101
    BROKER_ID_NOT_REGISTERED = 102
    INCONSISTENT_TOPIC_ID = 103
    INCONSISTENT_CLUSTER_ID = 104
    TRANSACTIONAL_ID_NOT_FOUND = 105
    FETCH_SESSION_TOPIC_ID_ERROR = 106
    INELIGIBLE_REPLICA = 107
    NEW_LEADER_ELECTED = 108
    OFFSET_MOVED_TO_TIERED_STORAGE = 109
    FENCED_MEMBER_EPOCH = 110
    UNRELEASED_INSTANCE_ID = 111
    UNSUPPORTED_ASSIGNOR = 112
    STALE_MEMBER_EPOCH = 113
    MISMATCHED_ENDPOINT_TYPE = 114
    UNSUPPORTED_ENDPOINT_TYPE = 115
    UNKNOWN_CONTROLLER_ID = 116
    UNKNOWN_SUBSCRIPTION_ID = 117
    TELEMETRY_TOO_LARGE = 118
    INVALID_REGISTRATION = 119
    TRANSACTION_ABORTABLE = 120
    INVALID_RECORD_STATE = 121
    SHARE_SESSION_NOT_FOUND = 122
    INVALID_SHARE_SESSION_EPOCH = 123
    FENCED_STATE_EPOCH = 124
    INVALID_VOTER_KEY = 125
    DUPLICATE_VOTER = 126
    VOTER_NOT_FOUND = 127
    INVALID_REGULAR_EXPRESSION = 128
    REBOOTSTRAP_REQUIRED = 129
    STREAMS_INVALID_TOPOLOGY = 130
    STREAMS_INVALID_TOPOLOGY_EPOCH = 131
    STREAMS_TOPOLOGY_FENCED = 132
    SHARE_SESSION_LIMIT_REACHED = 133


_RETRIABLE = frozenset(
    {
        ErrorCode.CORRUPT_MESSAGE,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.LEADER_NOT_AVAILABLE,
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.REQUEST_TIMED_OUT,
        ErrorCode.REPLICA_NOT_AVAILABLE,
        ErrorCode.NETWORK_EXCEPTION,
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.NOT_COORDINATOR,
        ErrorCode.NOT_ENOUGH_REPLICAS,
        ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        ErrorCode.NOT_CONTROLLER,
        ErrorCode.CONCURRENT_TRANSACTIONS,
        ErrorCode.KAFKA_STORAGE_ERROR,
        ErrorCode.FETCH_SESSION_ID_NOT_FOUND,
        ErrorCode.INVALID_FETCH_SESSION_EPOCH,
        ErrorCode.LISTENER_NOT_FOUND,
        ErrorCode.FENCED_LEADER_EPOCH,
        ErrorCode.UNKNOWN_LEADER_EPOCH,
        ErrorCode.OFFSET_NOT_AVAILABLE,
        ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE,
        ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE,
        ErrorCode.ELECTION_NOT_NEEDED,
        ErrorCode.UNSTABLE_OFFSET_COMMIT,
        ErrorCode.THROTTLING_QUOTA_EXCEEDED,
        ErrorCode.UNKNOWN_TOPIC_ID,
        ErrorCode.INCONSISTENT_TOPIC_ID,
        ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR,
        ErrorCode.SHARE_SESSION_NOT_FOUND,
        ErrorCode.INVALID_SHARE_SESSION_EPOCH,
        ErrorCode.SHARE_SESSION_LIMIT_REACHED,
    }
)


# After one of these the client that got it must be closed: it was replaced, or may not do what it is for.
_FATAL = frozenset(
    {
        ErrorCode.PRODUCER_FENCED,
        ErrorCode.FENCED_INSTANCE_ID,
        ErrorCode.TRANSACTION_COORDINATOR_FENCED,
        ErrorCode.INVALID_PRODUCER_ID_MAPPING,
        ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
        ErrorCode.SASL_AUTHENTICATION_FAILED,
        ErrorCode.UNSUPPORTED_SASL_MECHANISM,
        ErrorCode.UNSUPPORTED_VERSION,
        ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT,
    }
)

_HINTS = {
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: "create the topic first, or check its name",
    ErrorCode.UNKNOWN_TOPIC_ID: "the topic was deleted, perhaps created anew under the same name",
    ErrorCode.INVALID_TOPIC_EXCEPTION: (
        "a topic's name has 1 to 249 letters, digits, '.', '_' and '-', and is neither '.' nor '..'"
    ),
    ErrorCode.TOPIC_ALREADY_EXISTS: "choose another name, or use the topic as it is",
    ErrorCode.MESSAGE_TOO_LARGE: "send smaller records, or raise max.message.bytes of the topic",
    ErrorCode.RECORD_LIST_TOO_LARGE: "raise segment.bytes of the topic, or send smaller batches",
    ErrorCode.OFFSET_OUT_OF_RANGE: "seek, or set auto.offset.reset to earliest or latest",
    ErrorCode.NOT_ENOUGH_REPLICAS: "fewer replicas are in sync than min.insync.replicas asks for",
    ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND: "written, but on fewer replicas than min.insync.replicas",
    ErrorCode.KAFKA_STORAGE_ERROR: "the broker's disk is full or failing; its log says which",
    ErrorCode.PRODUCER_FENCED: "another producer has this transactional.id now; close this one",
    ErrorCode.INVALID_PRODUCER_EPOCH: "another producer has this transactional.id now; close this one",
    ErrorCode.FENCED_INSTANCE_ID: "another member has this group.instance.id now; close this one",
    ErrorCode.INVALID_TXN_STATE: "the transaction ended meanwhile, perhaps by transaction.timeout.ms",
    ErrorCode.INVALID_TRANSACTION_TIMEOUT: "lower transaction.timeout.ms to the broker's maximum or less",
    ErrorCode.TRANSACTION_ABORTABLE: "abort the transaction and do it again",
    ErrorCode.UNKNOWN_MEMBER_ID: "the group removed this member, perhaps because it polled too rarely",
    ErrorCode.ILLEGAL_GENERATION: "the group was rebalanced meanwhile; what was committed belongs to others now",
    ErrorCode.REBALANCE_IN_PROGRESS: "poll again, so that the member can rejoin, then commit",
    ErrorCode.INVALID_SESSION_TIMEOUT: (
        "use a session.timeout.ms between the broker's group.min.session.timeout.ms and its maximum"
    ),
    ErrorCode.INCONSISTENT_GROUP_PROTOCOL: (
        "all members of a group need a common partition.assignment.strategy and the same group.protocol"
    ),
    ErrorCode.GROUP_MAX_SIZE_REACHED: "the broker's group.max.size is reached; use fewer members",
    ErrorCode.INVALID_GROUP_ID: "give a group.id that is not empty",
    ErrorCode.NON_EMPTY_GROUP: "stop the group's members first",
    ErrorCode.GROUP_ID_NOT_FOUND: "check the group's name; a group without members and offsets is gone",
    ErrorCode.UNSUPPORTED_ASSIGNOR: "the broker has no such group.remote.assignor",
    ErrorCode.INVALID_REPLICATION_FACTOR: "use a replication factor of at most the number of brokers",
    ErrorCode.INVALID_PARTITIONS: "the number of partitions can only grow",
    ErrorCode.INVALID_CONFIG: "check the setting's name and value",
    ErrorCode.POLICY_VIOLATION: "the cluster has a rule against it; its log may name it",
    ErrorCode.TOPIC_AUTHORIZATION_FAILED: "the cluster does not let this client use the topic",
    ErrorCode.GROUP_AUTHORIZATION_FAILED: "the cluster does not let this client use the group",
    ErrorCode.CLUSTER_AUTHORIZATION_FAILED: "the cluster does not let this client do that",
    ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "the cluster does not let this client use the transactional.id",
    ErrorCode.UNSUPPORTED_VERSION: "the broker does not offer this; is it older?",
}


class KafkaError(Exception):
    """An expected failure that a client is told about by its Kafka error code.

    `retriable`: the same call may succeed later. `abortable`: the transaction it happened in must be aborted and may
    then be done again. `fatal`: the client must be closed. `hint`: the next step, in words.
    """

    def __init__(self, code: ErrorCode, message: str = "", hint: str | None = None) -> None:
        super().__init__(message or code.name)
        self.code = code
        self.message = message or code.name
        self.hint = _HINTS.get(code, "") if hint is None else hint

    @property
    def retriable(self) -> bool:
        """Whether Kafka's clients would try the same request again."""
        return self.code in _RETRIABLE

    @property
    def fatal(self) -> bool:
        """Whether the client that got it can do nothing more."""
        return self.code in _FATAL

    @property
    def abortable(self) -> bool:
        """Whether a transaction that met it can be aborted and done again."""
        return not self.fatal

    def __repr__(self) -> str:
        return f"KafkaError({self.code.name}, {self.message!r})"
