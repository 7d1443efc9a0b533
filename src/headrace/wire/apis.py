"""The APIs of the Kafka protocol and the versions of them that Headrace speaks.

`SUPPORTED` is what ApiVersions advertises. Produce is advertised from version 0, because librdkafka looks for that,
but its versions below 3 carry message formats that Kafka 4 no longer takes: they are answered as Kafka answers them.
"""

from enum import IntEnum
from functools import lru_cache
from typing import Final

from headrace.wire.schema import message_schema

VERSIONS_REMEMBERED_MAX: Final = 1024
"""How many pairs of API and version are known without looking: more than there are, less than can be asked for."""


class Api(IntEnum):
    """API keys, named as in Kafka's schemas."""

    PRODUCE = 0
    FETCH = 1
    LIST_OFFSETS = 2
    METADATA = 3
    OFFSET_COMMIT = 8
    OFFSET_FETCH = 9
    FIND_COORDINATOR = 10
    JOIN_GROUP = 11
    HEARTBEAT = 12
    LEAVE_GROUP = 13
    SYNC_GROUP = 14
    DESCRIBE_GROUPS = 15
    LIST_GROUPS = 16
    SASL_HANDSHAKE = 17
    API_VERSIONS = 18
    CREATE_TOPICS = 19
    DELETE_TOPICS = 20
    DELETE_RECORDS = 21
    INIT_PRODUCER_ID = 22
    OFFSET_FOR_LEADER_EPOCH = 23
    ADD_PARTITIONS_TO_TXN = 24
    ADD_OFFSETS_TO_TXN = 25
    END_TXN = 26
    WRITE_TXN_MARKERS = 27
    TXN_OFFSET_COMMIT = 28
    DESCRIBE_ACLS = 29
    CREATE_ACLS = 30
    DELETE_ACLS = 31
    DESCRIBE_CONFIGS = 32
    ALTER_CONFIGS = 33
    ALTER_REPLICA_LOG_DIRS = 34
    DESCRIBE_LOG_DIRS = 35
    SASL_AUTHENTICATE = 36
    CREATE_PARTITIONS = 37
    CREATE_DELEGATION_TOKEN = 38
    RENEW_DELEGATION_TOKEN = 39
    EXPIRE_DELEGATION_TOKEN = 40
    DESCRIBE_DELEGATION_TOKEN = 41
    DELETE_GROUPS = 42
    ELECT_LEADERS = 43
    INCREMENTAL_ALTER_CONFIGS = 44
    ALTER_PARTITION_REASSIGNMENTS = 45
    LIST_PARTITION_REASSIGNMENTS = 46
    OFFSET_DELETE = 47
    DESCRIBE_CLIENT_QUOTAS = 48
    ALTER_CLIENT_QUOTAS = 49
    DESCRIBE_USER_SCRAM_CREDENTIALS = 50
    ALTER_USER_SCRAM_CREDENTIALS = 51
    VOTE = 52
    BEGIN_QUORUM_EPOCH = 53
    END_QUORUM_EPOCH = 54
    DESCRIBE_QUORUM = 55
    ALTER_PARTITION = 56
    UPDATE_FEATURES = 57
    ENVELOPE = 58
    FETCH_SNAPSHOT = 59
    DESCRIBE_CLUSTER = 60
    DESCRIBE_PRODUCERS = 61
    BROKER_REGISTRATION = 62
    BROKER_HEARTBEAT = 63
    UNREGISTER_BROKER = 64
    DESCRIBE_TRANSACTIONS = 65
    LIST_TRANSACTIONS = 66
    ALLOCATE_PRODUCER_IDS = 67
    CONSUMER_GROUP_HEARTBEAT = 68
    CONSUMER_GROUP_DESCRIBE = 69
    CONTROLLER_REGISTRATION = 70
    GET_TELEMETRY_SUBSCRIPTIONS = 71
    PUSH_TELEMETRY = 72
    ASSIGN_REPLICAS_TO_DIRS = 73
    LIST_CONFIG_RESOURCES = 74
    DESCRIBE_TOPIC_PARTITIONS = 75
    SHARE_GROUP_HEARTBEAT = 76
    SHARE_GROUP_DESCRIBE = 77
    SHARE_FETCH = 78
    SHARE_ACKNOWLEDGE = 79
    ADD_RAFT_VOTER = 80
    REMOVE_RAFT_VOTER = 81
    UPDATE_RAFT_VOTER = 82
    INITIALIZE_SHARE_GROUP_STATE = 83
    READ_SHARE_GROUP_STATE = 84
    WRITE_SHARE_GROUP_STATE = 85
    DELETE_SHARE_GROUP_STATE = 86
    READ_SHARE_GROUP_STATE_SUMMARY = 87
    STREAMS_GROUP_HEARTBEAT = 88
    STREAMS_GROUP_DESCRIBE = 89
    DESCRIBE_SHARE_GROUP_OFFSETS = 90
    ALTER_SHARE_GROUP_OFFSETS = 91
    DELETE_SHARE_GROUP_OFFSETS = 92


SUPPORTED: dict[Api, tuple[int, int]] = {
    Api.PRODUCE: (0, 13),
    Api.FETCH: (4, 18),
    Api.LIST_OFFSETS: (1, 11),
    Api.METADATA: (0, 13),
    Api.OFFSET_COMMIT: (2, 10),
    Api.OFFSET_FETCH: (1, 10),
    Api.FIND_COORDINATOR: (0, 6),
    Api.JOIN_GROUP: (0, 9),
    Api.HEARTBEAT: (0, 4),
    Api.LEAVE_GROUP: (0, 5),
    Api.SYNC_GROUP: (0, 5),
    Api.DESCRIBE_GROUPS: (0, 6),
    Api.LIST_GROUPS: (0, 5),
    Api.SASL_HANDSHAKE: (0, 1),
    Api.API_VERSIONS: (0, 4),
    Api.CREATE_TOPICS: (2, 7),
    Api.DELETE_TOPICS: (1, 6),
    Api.DELETE_RECORDS: (0, 2),
    Api.INIT_PRODUCER_ID: (0, 5),
    Api.OFFSET_FOR_LEADER_EPOCH: (2, 4),
    Api.ADD_PARTITIONS_TO_TXN: (0, 5),
    Api.ADD_OFFSETS_TO_TXN: (0, 4),
    Api.END_TXN: (0, 5),
    Api.WRITE_TXN_MARKERS: (1, 2),
    Api.TXN_OFFSET_COMMIT: (0, 5),
    Api.DESCRIBE_ACLS: (1, 3),
    Api.CREATE_ACLS: (1, 3),
    Api.DELETE_ACLS: (1, 3),
    Api.DESCRIBE_CONFIGS: (1, 4),
    Api.ALTER_CONFIGS: (0, 2),
    Api.ALTER_REPLICA_LOG_DIRS: (1, 2),
    Api.DESCRIBE_LOG_DIRS: (1, 5),
    Api.SASL_AUTHENTICATE: (0, 2),
    Api.CREATE_PARTITIONS: (0, 3),
    Api.CREATE_DELEGATION_TOKEN: (1, 3),
    Api.RENEW_DELEGATION_TOKEN: (1, 2),
    Api.EXPIRE_DELEGATION_TOKEN: (1, 2),
    Api.DESCRIBE_DELEGATION_TOKEN: (1, 3),
    Api.DELETE_GROUPS: (0, 2),
    Api.INCREMENTAL_ALTER_CONFIGS: (0, 1),
    Api.ELECT_LEADERS: (0, 2),
    Api.ALTER_PARTITION_REASSIGNMENTS: (0, 1),
    Api.LIST_PARTITION_REASSIGNMENTS: (0, 0),
    Api.OFFSET_DELETE: (0, 0),
    Api.DESCRIBE_CLIENT_QUOTAS: (0, 1),
    Api.DESCRIBE_USER_SCRAM_CREDENTIALS: (0, 0),
    Api.DESCRIBE_QUORUM: (0, 2),
    Api.DESCRIBE_CLUSTER: (0, 2),
    Api.UNREGISTER_BROKER: (0, 0),
    Api.CONSUMER_GROUP_HEARTBEAT: (0, 1),
    Api.CONSUMER_GROUP_DESCRIBE: (0, 1),
    Api.UPDATE_FEATURES: (0, 2),
    Api.DESCRIBE_PRODUCERS: (0, 0),
    Api.DESCRIBE_TRANSACTIONS: (0, 0),
    Api.LIST_TRANSACTIONS: (0, 2),
    Api.LIST_CONFIG_RESOURCES: (0, 1),
    Api.DESCRIBE_TOPIC_PARTITIONS: (0, 0),
    Api.ADD_RAFT_VOTER: (0, 1),
    Api.REMOVE_RAFT_VOTER: (0, 0),
}


BETWEEN_BROKERS: dict[Api, tuple[int, int]] = {
    Api.ALTER_PARTITION: (2, 3),
    Api.ALLOCATE_PRODUCER_IDS: (0, 0),
}
"""What brokers ask of each other, in Kafka's own messages; ApiVersions does not tell clients of it."""

PRIVATE_FROM = 20_000
"""API keys from here on are Headrace's own, between its nodes: plain headers, bodies of their own kind."""
PRIVATE_RAFT = PRIVATE_FROM
PRIVATE_REGISTER = PRIVATE_FROM + 1
PRIVATE_HEARTBEAT = PRIVATE_FROM + 2
PRIVATE_FORWARD = PRIVATE_FROM + 3
PRIVATE_LOADS = PRIVATE_FROM + 4
"""Asked by `headrace status`, of the active controller."""


@lru_cache(maxsize=VERSIONS_REMEMBERED_MAX)
def is_supported(api: int, version: int) -> bool:
    """Whether a request of this API and version is served."""
    first, last = SUPPORTED.get(api) or BETWEEN_BROKERS.get(api, (0, -1))  # type: ignore[call-overload]
    return bool(first <= version <= last)


@lru_cache(maxsize=VERSIONS_REMEMBERED_MAX)
def is_flexible(api: int, version: int) -> bool:
    """Whether this version uses compact types and tagged fields."""
    return api < PRIVATE_FROM and message_schema(api, "request").flexible(version)
