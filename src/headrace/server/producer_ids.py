"""Producer ids: a fresh one for each who asks, none twice, also over restarts.

Ids are taken from blocks; a block is reserved by a metadata record before the first id of it is given, so a crash
wastes the rest of a block and repeats nothing. Invariant: every id given is below the committed `next_producer_id`.
Blocks come from the active controller, so no two brokers have one in common.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

BLOCK = 1000
Reserve: TypeAlias = Callable[[], Awaitable[tuple[int, int]]]
"""Has a block reserved: its first id, and how many they are."""


class ProducerIds:
    """The block this broker gives ids from."""

    def __init__(self, reserve: Reserve) -> None:
        self._reserve_block = reserve
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
            first, count = await self._reserve_block()
            self._next, self._end = first, first + count
        finally:
            self._reserving = None
