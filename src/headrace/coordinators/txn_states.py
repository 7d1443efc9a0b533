"""The states of a transactional id, which follows which, and what a request finds in each: tables, nothing else.

    Empty ──► Ongoing ──► PrepareCommit ──► CompleteCommit ─┐
      ▲          │  └───► PrepareAbort ───► CompleteAbort ──┤
      └──────────┴──────────────────────────────────────────┘ (a new epoch, or the next transaction)

Prepare is the point of no return: once its record is committed the outcome is decided, the client is told, and markers
go to every partition until all have them; then Complete is written. PrepareEpochFence is only ever a step on the way
from Ongoing to PrepareAbort, never stored: the epoch is raised first, so that the producer that is being timed out or
replaced is shut out while its transaction is aborted. Dead is only ever a step on the way to a tombstone.
`TransactionMetadata` asserts the table at every step.
"""

from enum import IntEnum
from typing import Final

from headrace.base.errors import ErrorCode


class TxnState(IntEnum):
    """States by the numbers that records of `__transaction_state` hold."""

    EMPTY = 0
    ONGOING = 1
    PREPARE_COMMIT = 2
    PREPARE_ABORT = 3
    COMPLETE_COMMIT = 4
    COMPLETE_ABORT = 5
    DEAD = 6
    PREPARE_EPOCH_FENCE = 7


EMPTY, ONGOING, PREPARE_COMMIT, PREPARE_ABORT, COMPLETE_COMMIT, COMPLETE_ABORT, DEAD, EPOCH_FENCE = TxnState

NAMES: Final = {
    EMPTY: "Empty",
    ONGOING: "Ongoing",
    PREPARE_COMMIT: "PrepareCommit",
    PREPARE_ABORT: "PrepareAbort",
    COMPLETE_COMMIT: "CompleteCommit",
    COMPLETE_ABORT: "CompleteAbort",
    DEAD: "Dead",
    EPOCH_FENCE: "PrepareEpochFence",
}
BY_NAME: Final = {name: state for state, name in NAMES.items()}

COMPLETE: Final = frozenset({COMPLETE_COMMIT, COMPLETE_ABORT})
PREPARED: Final = frozenset({PREPARE_COMMIT, PREPARE_ABORT})
IDLE: Final = frozenset({EMPTY, COMPLETE_COMMIT, COMPLETE_ABORT})

PREDECESSORS: Final[dict[TxnState, frozenset[TxnState]]] = {
    EMPTY: IDLE,
    ONGOING: IDLE | {ONGOING},
    PREPARE_COMMIT: frozenset({ONGOING}),
    # From the idle states too: with transaction.version 2 a client may abort what it never began, to raise its epoch.
    PREPARE_ABORT: IDLE | {ONGOING},
    COMPLETE_COMMIT: frozenset({PREPARE_COMMIT}),
    COMPLETE_ABORT: frozenset({PREPARE_ABORT}),
    DEAD: IDLE,
    EPOCH_FENCE: frozenset({ONGOING}),
}

_APPEND_ERRORS: Final = {
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_ENOUGH_REPLICAS: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.REQUEST_TIMED_OUT: ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_LEADER_OR_FOLLOWER: ErrorCode.NOT_COORDINATOR,
    ErrorCode.FENCED_LEADER_EPOCH: ErrorCode.NOT_COORDINATOR,
    ErrorCode.KAFKA_STORAGE_ERROR: ErrorCode.NOT_COORDINATOR,
}


def stored_error(error: ErrorCode) -> ErrorCode:
    """What a client is told when a step of its transaction could not be stored: to try again, here or elsewhere."""
    if error in (ErrorCode.MESSAGE_TOO_LARGE, ErrorCode.RECORD_LIST_TOO_LARGE):
        return ErrorCode.UNKNOWN_SERVER_ERROR
    return _APPEND_ERRORS.get(error, error)
