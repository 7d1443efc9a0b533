"""Ending what nobody else would: records of an older epoch that hold a transaction open in a partition.

A coordinator raises an epoch when all that was open is ended. What an epoch before has open all the same came in late,
on the word of a coordinator that was replaced, and the next marker would commit it. Invariant: it is aborted before
anything of the next epoch enters the log. `PartitionLog.append` and the writer of markers are the callers.
"""

from typing import TYPE_CHECKING

from headrace.base.log import get_logger
from headrace.storage.markers import EndTransactionMarker, marker_batch
from headrace.storage.origin import Origin

if TYPE_CHECKING:
    from headrace.storage.log import PartitionLog

logger = get_logger(__name__)


def abort_older(log: "PartitionLog", producer_id: int, epoch: int, leader_epoch: int, now_ms: int) -> None:
    """Abort what the producer has open in this log from an epoch before `epoch`."""
    entry = log.producer_state.get(producer_id)
    if entry is None or entry.transaction_first_offset < 0 or entry.epoch >= epoch:
        return
    logger.warning(
        "a transaction that nobody would end is aborted",
        extra={"fields": {"partition": log.name, "producer_id": producer_id, "epoch": entry.epoch}},
    )
    marker = EndTransactionMarker(False, max(entry.coordinator_epoch, 0))
    batch = marker_batch((producer_id, entry.epoch), marker, now_ms)
    log.append(bytearray(batch), leader_epoch=leader_epoch, now_ms=now_ms, origin=Origin.COORDINATOR)
