"""What the end of a transaction meets: the answer that is known already, or that a decision is to be made.

Pure functions of what is stored and what is asked, one for the producers of transaction.version 0 and 1, one for those
of version 2. `TransactionShard` calls them and carries out the verdict.
"""

from headrace.base.errors import ErrorCode
from headrace.coordinators.txn_metadata import TransactionMetadata, is_exhausted
from headrace.coordinators.txn_states import COMPLETE, COMPLETE_COMMIT, ONGOING, PREPARE_COMMIT, PREPARED


def judge_version_1(
    metadata: TransactionMetadata, producer_id: int, epoch: int, committed: bool
) -> tuple[ErrorCode, bool]:
    """What an end of versions 0 and 1 meets: an answer, or True for a decision to be made."""
    state = metadata.state
    error = metadata.knows(producer_id, epoch)
    if error is not ErrorCode.NONE:
        return error, False
    if metadata.pending is not None:
        return ErrorCode.CONCURRENT_TRANSACTIONS, False
    if state is ONGOING:
        return ErrorCode.NONE, True
    if state in PREPARED:
        return _same(committed, state is PREPARE_COMMIT, ErrorCode.CONCURRENT_TRANSACTIONS), False
    if state in COMPLETE:
        return _same(committed, state is COMPLETE_COMMIT, ErrorCode.NONE), False
    return ErrorCode.INVALID_TXN_STATE, False


def _same(wanted: bool, was: bool, answer: ErrorCode) -> ErrorCode:
    return answer if wanted == was else ErrorCode.INVALID_TXN_STATE


def judge_version_2(
    metadata: TransactionMetadata, producer_id: int, epoch: int, committed: bool
) -> tuple[ErrorCode, bool]:
    """What an end of version 2 meets. Every transaction has its own epoch, so a retry is known by the epoch before."""
    value, state = metadata.value, metadata.state
    if metadata.is_busy:
        return ErrorCode.CONCURRENT_TRANSACTIONS, False
    overflowed = (
        value.previous_producer_id == producer_id and is_exhausted(epoch) and value.producer_epoch == 0
    )
    again = state in COMPLETE and (
        (value.producer_id == producer_id and epoch + 1 == value.producer_epoch) or overflowed
    )
    if value.producer_id != producer_id and not again:
        return ErrorCode.INVALID_PRODUCER_ID_MAPPING, False
    if epoch != value.producer_epoch and not again:
        return ErrorCode.PRODUCER_FENCED, False
    if state is ONGOING:
        return ErrorCode.NONE, True
    if again:
        return _same(committed, state is COMPLETE_COMMIT, ErrorCode.NONE), False
    if committed:
        return ErrorCode.INVALID_TXN_STATE, False
    return ErrorCode.NONE, True  # nothing to abort, but the epoch is to be raised
