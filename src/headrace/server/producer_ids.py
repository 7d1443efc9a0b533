"""Producer ids: a fresh one for each who asks, none twice, also over restarts.

Ids are taken from blocks; a block is reserved by a metadata record before the first id of it is given, so a crash
wastes the rest of a block and repeats nothing. Invariant: every id given is below the committed `next_producer_id`.
"""

import asyncio

from headrace.cluster.records import ProducerIdsRecord
from headrace.server.metadata import MetadataStore

BLOCK = 1000


class ProducerIds:
    """The block this broker gives ids from."""

    def __init__(self, metadata: MetadataStore) -> None:
        self._metadata = metadata
        self._next = 0
        self._end = 0
        self._reserving: asyncio.Future[None] | None = None

    async def next(self) -> int:
        """An id that nobody had before."""
        while self._next == self._end:
            if self._reserving is None:
                self._reserving = asyncio.ensure_future(self._reserve())
            await asyncio.shield(self._reserving)
        given = self._next
        self._next += 1
        return given

    async def _reserve(self) -> None:
        try:
            first = self._metadata.pending.next_producer_id
            await self._metadata.commit([ProducerIdsRecord(first + BLOCK)])
            self._next, self._end = first, first + BLOCK
        finally:
            self._reserving = None
