"""What a cleaning knows of transactions as it walks a log: which records are aborted, which markers decide nothing.

Owns the transactions that are open at the place where the walk is. All it meets is decided: the cleaner stays below the
first unstable offset, and the transaction indexes say what was aborted; the rest is committed. Invariants: a marker is
dispensable only when no batch of its transaction, be it an empty one, was met before it, because a replay of the log
would else leave the transaction open; an aborted transaction whose marker stays keeps its line in the index. Pure;
`Cleaning` is the caller, once for each of its two passes.
"""

from collections import deque
from collections.abc import Iterable

from headrace.storage.txn_index import AbortedTransaction


class OpenTransactions:
    """The transactions around one place of the log."""

    def __init__(self, aborted: Iterable[AbortedTransaction]) -> None:
        self._coming = deque(sorted(aborted, key=lambda each: each.first_offset))
        self._aborting: set[int] = set()
        self._met: set[int] = set()

    def _advance(self, offset: int) -> None:
        while self._coming and self._coming[0].first_offset <= offset:
            self._aborting.add(self._coming.popleft().producer_id)

    def is_aborted(self, producer_id: int, base_offset: int) -> bool:
        """The walk meets a batch of records: whether its transaction is aborted."""
        self._advance(base_offset)
        self._met.add(producer_id)
        return producer_id in self._aborting

    def is_dispensable(self, producer_id: int, offset: int, committed: bool) -> bool:
        """The walk meets a marker: whether nothing is left of the transaction that it ends."""
        self._advance(offset)
        if not committed:
            self._aborting.discard(producer_id)
        dispensable = producer_id not in self._met
        self._met.discard(producer_id)
        return dispensable
