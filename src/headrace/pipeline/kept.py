"""Connections that a worker process of Spark keeps from one micro-batch to the next.

Spark uses its Python workers again, batch after batch, and a batch that is small takes no longer than connecting and
asking for metadata and coordinators. Owns, for each configuration, an event loop with a client on it. Invariants: only
connections and what brokers said about themselves are kept, nothing of a batch; after an error, in another process, or
when they were not used for a while, they are made anew; there are never more than a few. Called by the sink, all of
whose calls are tried again where a connection turns out to be lost. One thread at a time, as Spark's workers have it.
"""

import asyncio
import atexit
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

from headrace.client.arrow_txn import Coordination
from headrace.client.cluster import Cluster
from headrace.client.config import producer_config

T = TypeVar("T")
Key: TypeAlias = tuple[tuple[str, str], ...]

KEPT_MAX: Final = 4
IDLE_S_MAX: Final = 30.0  # far below what brokers and what is between allow


@dataclass
class Kept:
    """A client of one process, used by one task after the other."""

    runner: asyncio.Runner
    calls: Coordination
    process: int
    used_s: float

    @property
    def fits(self) -> bool:
        return self.process == os.getpid() and time.monotonic() - self.used_s < IDLE_S_MAX

    def close(self) -> None:
        """Close the connections; those of the process that this one was forked from are not ours to close."""
        if self.process == os.getpid():
            self.runner.run(self.calls.cluster.close())
            self.runner.close()


_kept: dict[Key, Kept] = {}


def run(config: Mapping[str, str], work: Callable[[Coordination], Awaitable[T]]) -> T:
    """Do some work with a client that may have been used before. Raises what the work raises."""
    key = tuple(sorted(config.items()))
    kept = _kept.pop(key, None)
    if kept is not None and not kept.fits:
        kept.close()
        kept = None
    if kept is None:
        read = producer_config(config)
        calls = Coordination(Cluster(read), read.max_block_ms)
        calls.cluster.first_contact_timeout_ms = read.max_block_ms  # the driver has reached the brokers
        kept = Kept(asyncio.Runner(), calls, os.getpid(), time.monotonic())
    client = kept

    async def worked() -> T:
        # A connection that was closed meanwhile is found to be so in these turns of the loop, not by a request.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return await work(client.calls)

    try:
        result = client.runner.run(worked())
    except BaseException:
        client.close()
        raise
    client.used_s = time.monotonic()
    _kept[key] = client
    while len(_kept) > KEPT_MAX:
        _kept.pop(next(iter(_kept))).close()
    return result


@atexit.register
def close_all() -> None:
    """Close what this process keeps."""
    while _kept:
        _kept.popitem()[1].close()
