"""The states of a classic group, which follows which, and the replies that carry nothing but an error.

`TRANSITIONS` is the whole truth about how states change; `ClassicGroup` asserts it at every step.
"""

from enum import Enum
from typing import Any, Final

from headrace.base.errors import ErrorCode


class State(Enum):
    """The states of a classic group, by Kafka's names."""

    EMPTY = "Empty"
    PREPARING_REBALANCE = "PreparingRebalance"
    COMPLETING_REBALANCE = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"


EMPTY, PREPARING, COMPLETING, STABLE, DEAD = State
TRANSITIONS: Final[dict[State, frozenset[State]]] = {
    EMPTY: frozenset({PREPARING, DEAD}),
    PREPARING: frozenset({COMPLETING, EMPTY, DEAD}),
    COMPLETING: frozenset({STABLE, PREPARING, DEAD}),
    STABLE: frozenset({PREPARING, DEAD}),
    DEAD: frozenset(),
}

WATCH_MS_MAX: Final = 3000
WATCHES_A_SESSION: Final = 6
"""A heartbeat is left unanswered for so small a part of its session that no client takes the coordinator for dead."""

_APPEND_ERRORS: Final = {
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_ENOUGH_REPLICAS: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.REQUEST_TIMED_OUT: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_LEADER_OR_FOLLOWER: ErrorCode.NOT_COORDINATOR,
    ErrorCode.KAFKA_STORAGE_ERROR: ErrorCode.NOT_COORDINATOR,
    ErrorCode.MESSAGE_TOO_LARGE: ErrorCode.UNKNOWN_SERVER_ERROR,
    ErrorCode.RECORD_LIST_TOO_LARGE: ErrorCode.UNKNOWN_SERVER_ERROR,
}


def append_error(error: ErrorCode, too_large: ErrorCode = ErrorCode.UNKNOWN_SERVER_ERROR) -> ErrorCode:
    """What a client is told when the coordinator could not store its records."""
    if error in (ErrorCode.MESSAGE_TOO_LARGE, ErrorCode.RECORD_LIST_TOO_LARGE):
        return too_large
    return _APPEND_ERRORS.get(error, error)


def join_error(error: ErrorCode, member_id: str = "") -> dict[str, Any]:
    return {"error_code": error, "member_id": member_id, "generation_id": -1}


def sync_error(error: ErrorCode) -> dict[str, Any]:
    return {"error_code": error, "assignment": b""}
