"""Spark's side of a streaming sink, played without Spark: batches, tasks, attempts, replays, and kills.

`Query` has the checkpoint: which batch is next. `run_batch` does what Spark does with one, in the same order; a kill is
an exception out of any step, after which a new run of the query replays the batch, as a restarted driver does.
"""

import asyncio
import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from headrace.client.arrow_read import ArrowReader
from headrace.client.arrow_txn import Coordination
from headrace.client.cluster import Cluster
from headrace.client.config import producer_config
from headrace.pipeline.committer import Committer
from headrace.pipeline.ledger import Entry, Ledger, no_step
from headrace.pipeline.sink_task import SinkTask, TaskIdentity

TIMEOUT_MS = 60_000


class Killed(BaseException):
    """The process is gone: nothing may catch this and clean up."""


@dataclass
class Query:
    """A streaming query with its checkpoint."""

    bootstrap: str
    topic: str
    sink: str = field(default_factory=lambda: uuid.uuid4().hex)
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    step: Callable[[str], None] = no_step
    transaction_timeout_ms: int = TIMEOUT_MS

    @property
    def config(self) -> dict[str, str]:
        return {"bootstrap.servers": self.bootstrap}

    def restarted(self) -> "Query":
        """The same query from its checkpoint, in a new driver."""
        return Query(
            self.bootstrap,
            self.topic,
            self.sink,
            step=no_step,
            transaction_timeout_ms=self.transaction_timeout_ms,
        )

    async def prepare(
        self, batch: int, slot: int, rows: Sequence[bytes], attempt: str = "0.0"
    ) -> Entry | None:
        """One attempt of one task."""
        task = SinkTask(self.config, self.topic, self.topic, self.transaction_timeout_ms, self.step)
        who = TaskIdentity(self.sink, self.run, batch, slot, attempt)
        return await task.write_once(
            who, [pa.record_batch({"value": pa.array(rows, pa.binary())})] if rows else []
        )

    async def commit(self, batch: int, entries: Sequence[Entry | None]) -> None:
        """What the driver does when all tasks have answered."""
        cluster = Cluster(producer_config(self.config))
        try:
            calls = Coordination(cluster, TIMEOUT_MS)
            ledger = Ledger(calls, self.sink, self.topic, self.transaction_timeout_ms, self.step)
            committer = Committer(calls, ledger, self.run, self.step)
            await committer.commit(batch, [entry for entry in entries if entry is not None])
        finally:
            await cluster.close()

    async def run_batch(self, batch: int, slots: Sequence[Sequence[bytes]]) -> None:
        """A whole batch: its tasks, then the commit."""
        prepared = [await self.prepare(batch, slot, rows) for slot, rows in enumerate(slots)]
        await self.commit(batch, prepared)


async def committed_values(bootstrap: str, topic: str, partitions: int) -> list[bytes]:
    """Everything that a reader of committed records sees."""
    config = {"bootstrap.servers": bootstrap, "isolation.level": "read_committed"}
    async with ArrowReader(config) as reader:
        found: list[bytes] = []
        for partition in range(partitions):
            found += (await reader.table(topic, partition, columns=["value"])).column("value").to_pylist()
        return sorted(found)


def shuffled(rows: Sequence[bytes], slots: int, source: random.Random) -> list[list[bytes]]:
    """The same rows in other tasks, in another order: what a replay may look like."""
    found: list[list[bytes]] = [[] for _ in range(slots)]
    for row in source.sample(list(rows), len(rows)):
        found[source.randrange(slots)].append(row)
    return found


async def until_killed(work: "asyncio.Task[None]", turns: int) -> bool:
    """Let it run for so many turns of the loop, then kill it; whether it was still running."""
    for _ in range(turns):
        if work.done():
            break
        await asyncio.sleep(0)
    if work.done():
        await work
        return False
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    return True
