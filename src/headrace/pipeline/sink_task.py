"""What one task of the sink does: write the rows of its slot, in an open transaction when they must appear once.

Owns the steps of a task. Exactly once:
  1 register the run in the ledger, the first time, and clean up after the run before; when the batch is decided,
    commit this slot's transaction and write nothing, unless it was lost
  2 take a transactional id of this attempt    3 write the rows
  4 leave the mark, wait until everything is stored, and hand (id, epoch) to the driver
Nothing is visible before the driver decides. Attempts have ids of their own, so that a speculated or retried attempt
never ends another's transaction; ids are used again by later batches, so there are few of them. Called by the sink's
writer inside a Spark task; tests call it without Spark.
"""

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from headrace.base.errors import KafkaError
from headrace.client.arrow_txn import Coordination
from headrace.client.arrow_write import ArrowWriter
from headrace.pipeline.committer import ends, recover
from headrace.pipeline.ledger import (
    RUN_CHARACTERS,
    Decision,
    Entry,
    Ledger,
    LedgerError,
    Step,
    no_step,
)
from headrace.pipeline.options import OptionError

ABORT_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class TaskIdentity:
    """Which attempt of which task of which batch of which run this is."""

    sink: str
    run: str
    batch: int
    slot: int
    attempt: str

    @property
    def transactional_id(self) -> str:
        return f"{self._of_this_run}{self.slot}-{self.attempt}"

    @property
    def _of_this_run(self) -> str:
        return f"headrace-sink-{self.sink}-{self.run[:RUN_CHARACTERS]}-"

    def check_first(self, decision: Decision) -> None:
        """Refuse a second write of one run in one batch, which would be taken for a replay. Raises LedgerError."""
        if any(entry.producer.transactional_id.startswith(self._of_this_run) for entry in decision.entries):
            raise LedgerError(
                f"batch {self.batch} of sink '{self.sink}' was written by this run already. Two writes in one "
                "foreachBatch need a 'transactionalIdPrefix' of their own each, or they are taken for replays."
            )


@dataclass(frozen=True)
class SinkTask:
    """Writes the rows of one task."""

    config: Mapping[str, str]
    topic: str | None
    ledger_topic: str
    transaction_timeout_ms: int
    step: Step = no_step
    calls: Coordination | None = None  # over connections that outlive the task

    async def write_once(self, who: TaskIdentity, batches: Iterable[Any]) -> Entry | None:
        """Prepare the rows; None when there is nothing to commit for this task."""
        writer = ArrowWriter(
            self.config,
            transactional_id=who.transactional_id,
            transaction_timeout_ms=self.transaction_timeout_ms,
            coordination=self.calls,
        )
        # The driver has reached the brokers: one that does not answer now is restarting.
        writer.cluster.first_contact_timeout_ms = writer.config.max_block_ms
        try:
            ledger = Ledger(
                writer.coordination, who.sink, self.ledger_topic, self.transaction_timeout_ms, self.step
            )
            decision, is_new = await ledger.register(who.run)
            self.step("task: registered")
            if is_new:
                await recover(writer.coordination, ledger, decision)
                self.step("task: recovered")
            if decision.batch == who.batch:
                who.check_first(decision)
                entry = decision.entry_of(who.slot)
                if entry is None or await ends(writer.coordination, ledger, who.batch, entry):
                    return None
            await self._write(writer, batches)
            if writer.rows_written == 0:
                return None
            self.step("task: rows sent")
            await ledger.mark(writer.prepared, who.batch, who.slot)
            await writer.flush()
            self.step("task: prepared")
            return Entry(who.slot, writer.prepared, writer.rows_written, writer.digest)
        except Exception:
            if writer.prepared.producer_id >= 0:
                # The driver will not hear of it, and readers of committed records would wait for it until it times out.
                # Taking its id anew aborts it, and fences what may still be on its way.
                with suppress(KafkaError, TimeoutError):
                    async with asyncio.timeout(ABORT_TIMEOUT_S):
                        await writer.coordination.init(who.transactional_id, self.transaction_timeout_ms)
            raise
        finally:
            await writer.close()

    async def write_at_least_once(self, batches: Iterable[Any]) -> int:
        """Write the rows, visible at once; how many they were."""
        async with ArrowWriter(self.config, coordination=self.calls) as writer:
            writer.cluster.first_contact_timeout_ms = writer.config.max_block_ms
            await self._write(writer, batches)
        return writer.rows_written

    async def _write(self, writer: ArrowWriter, batches: Iterable[Any]) -> None:
        rows = iter(batches)
        # Spark's rows are waited for in a thread, one batch ahead, so that what came before is encoded and goes on to
        # the brokers meanwhile.
        coming = asyncio.create_task(asyncio.to_thread(next, rows, None))
        try:
            if self.topic is not None:
                await writer.warm_up(self.topic)
            while (batch := await coming) is not None:
                coming = asyncio.create_task(asyncio.to_thread(next, rows, None))
                if batch.num_rows == 0:
                    continue
                self.step("task: rows")
                for topic, part in self._by_topic(batch):
                    await writer.send_arrow(topic, part, timestamp=None)
        finally:
            await asyncio.gather(coming, return_exceptions=True)

    def _by_topic(self, batch: Any) -> list[tuple[str, Any]]:
        if self.topic is not None:
            return [(self.topic, batch)]
        column = batch.column("topic")
        if column.null_count:
            raise OptionError(
                "null topic present in the data. Use the topic option for setting a default topic."
            )
        import pyarrow.compute as pc

        names = pc.unique(column).to_pylist()
        if len(names) == 1:
            return [(names[0], batch)]
        return [(name, batch.filter(pc.equal(column, pa.scalar(name)))) for name in names]
