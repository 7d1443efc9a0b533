"""Who asks, and whether they may. Every handler asks one authorizer, by Kafka's operations and resource types.

Until rules can be set, everybody may do everything; the question is asked all the same, so that rules need no new
calls.
"""

from enum import IntEnum
from typing import NamedTuple, Protocol

CLUSTER_NAME = "kafka-cluster"


class Operation(IntEnum):
    """What is done, with the numbers of Kafka's ACL operations."""

    READ = 3
    WRITE = 4
    CREATE = 5
    DELETE = 6
    ALTER = 7
    DESCRIBE = 8
    CLUSTER_ACTION = 9
    DESCRIBE_CONFIGS = 10
    ALTER_CONFIGS = 11
    IDEMPOTENT_WRITE = 12


class ResourceType(IntEnum):
    """What it is done to, with the numbers of Kafka's resource types."""

    TOPIC = 2
    GROUP = 3
    CLUSTER = 4
    TRANSACTIONAL_ID = 5


class Principal(NamedTuple):
    """Who asks, as Kafka spells it: `User:alice`."""

    kind: str
    name: str


ANONYMOUS = Principal("User", "ANONYMOUS")


class Authorizer(Protocol):
    """Decides whether a principal on a host may do an operation on a resource."""

    def allows(
        self, principal: Principal, host: str, operation: Operation, resource: ResourceType, name: str
    ) -> bool: ...


class AllowAll:
    """The authorizer of a broker without rules."""

    def allows(
        self, principal: Principal, host: str, operation: Operation, resource: ResourceType, name: str
    ) -> bool:
        return True
