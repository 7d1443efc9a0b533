"""What the driver does with a batch whose tasks have prepared their transactions: decide, then commit them all.

Steps, in order; a kill between any two leaves a state from which a replay of the batch goes on:
  1 take the right to decide (an older driver is fenced)      2 read the ledger
  3 write the decision, the point of no return              4 commit each transaction it names
Before 3 nothing of the batch is visible, and transactions that nobody decided are aborted by time or by the next
owner of their id. After 3 the batch counts as written: a replay writes nothing but commits what is left.

One thing can still go wrong after 3: the driver stays away for longer than a transaction may stay open, and a broker
aborts some of those decided. A replayed task then writes its rows again, and they take the place of the lost ones if
they are the same rows, by number and digest. Otherwise the query stops and says so; nothing is doubled in silence.
Called by the sink's writer on the driver, and by its tasks for their own slot.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from headrace.base.errors import KafkaError
from headrace.client.arrow_txn import FENCED, Coordination, TransactionalProducer
from headrace.pipeline.ledger import (
    RUN_CHARACTERS,
    Decision,
    Entry,
    Fenced,
    Ledger,
    LedgerError,
    Step,
    amended,
    no_step,
)

ENDS_AT_ONCE_MAX: Final = 16


class HalfWritten(LedgerError):
    """Transactions of a decided batch were lost, and its replay is not the same rows in the same tasks."""


@dataclass
class Committer:
    """Ends batches of one run of one sink."""

    calls: Coordination
    ledger: Ledger
    run: str
    step: Step = no_step

    async def commit(self, batch: int, prepared: Sequence[Entry]) -> None:
        """Make a batch visible, once, however often this is called for it. Raises Fenced, HalfWritten, KafkaError."""
        who, before = await self.ledger.take()
        self.step("ledger read")
        if before is not None:
            before.check_run(self.run)
            if before.run != self.run:
                raise Fenced(f"run {self.run} is not the one that may write: that is {before.run}")
            if before.batch > batch:
                raise Fenced(
                    f"batch {before.batch} is written already, and this run is only at batch {batch}: its checkpoint "
                    "is older than the sink. Go on with the checkpoint of the driver that wrote those batches"
                )
            if before.batch == batch:
                await self._settle(who, before, prepared)
                return
        if not prepared:
            return
        fenced = before.succeeded_by(self.run) if before is not None else ()
        decision = Decision(batch, self.run, fenced, tuple(prepared))
        await self.ledger.write(who, decision)
        lost = await self._end_all(batch, decision.entries)
        if lost:
            raise LedgerError(
                f"batch {batch} was decided, but {len(lost)} of its transactions had been aborted: "
                "its replay writes them again"
            )

    async def _settle(
        self, who: TransactionalProducer, decision: Decision, prepared: Sequence[Entry]
    ) -> None:
        """Finish a batch that was decided before; what the replay wrote replaces what was lost, or is dropped."""
        lost = await self._end_all(decision.batch, decision.entries)
        again = {entry.slot: entry for entry in prepared}
        replaced = {}
        for entry in lost:
            fresh = again.get(entry.slot)
            if fresh is None or (fresh.rows, fresh.digest) != (entry.rows, entry.digest):
                raise HalfWritten(
                    f"batch {decision.batch} is written in part: the transaction of task {entry.slot} with "
                    f"{entry.rows} rows was aborted by its time-out after the batch had been decided, and the replay "
                    "of that task has other rows. Look at what the batch wrote before you go on with a new checkpoint "
                    "and transactionalIdPrefix; a larger kafka.transaction.timeout.ms makes this rarer."
                )
            replaced[entry.slot] = fresh
        if replaced:
            await self.ledger.write(who, amended(decision, self.run, replaced))
            if await self._end_all(decision.batch, replaced.values()):
                raise LedgerError(
                    f"batch {decision.batch}: transactions were lost again; its replay tries once more"
                )
        decided = {entry.producer for entry in (*decision.entries, *replaced.values())}
        await self._abort_all(entry for entry in prepared if entry.producer not in decided)

    async def abort(self, batch: int, prepared: Iterable[Entry]) -> None:
        """Drop what was prepared, except what is decided: Spark asks for this also after a commit that failed."""
        decision = await self.ledger.read()
        if decision is not None and decision.run == self.run:
            # The commit that failed may still be on its way: taking the right to decide ends that, either way.
            _, decision = await self.ledger.take()
        decided: set[TransactionalProducer] = set()
        if decision is not None and decision.batch == batch:
            decided = {entry.producer for entry in decision.entries}
        await self._abort_all(entry for entry in prepared if entry.producer not in decided)

    async def _end_all(self, batch: int, entries: Iterable[Entry]) -> list[Entry]:
        """Commit; returns those that were aborted before."""
        room = asyncio.Semaphore(ENDS_AT_ONCE_MAX)

        async def end(entry: Entry) -> Entry | None:
            async with room:
                self.step("committing")
                committed = await ends(self.calls, self.ledger, batch, entry)
                self.step("committed")
                return None if committed else entry

        results = await asyncio.gather(*(end(entry) for entry in entries))
        return [entry for entry in results if entry is not None]

    async def _abort_all(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            try:
                await self.calls.end(entry.producer, commit=False)
            except KafkaError as error:
                if error.code not in FENCED:
                    raise


async def recover(calls: Coordination, ledger: Ledger, decision: Decision) -> None:
    """What a new run does first: commit what is decided, abort what an older run left open and nobody decided.

    Without the second, readers of committed records would wait for what was left open until it times out.
    """
    for entry in decision.entries:
        await ends(calls, ledger, decision.batch, entry)
    mine = f"headrace-sink-{ledger.sink}-{decision.run[:RUN_CHARACTERS]}-"
    for name in await calls.open_transactions(f"headrace-sink-{ledger.sink}-"):
        if not name.startswith(mine):
            await calls.init(name, ledger.timeout_ms)


async def ends(calls: Coordination, ledger: Ledger, batch: int, entry: Entry) -> bool:
    """Commit a decided transaction, or find it committed. False when it was aborted before it could be."""
    try:
        await calls.end(entry.producer, commit=True)
    except KafkaError as error:
        if error.code in FENCED:
            # It is not open any more. Its id may have moved on since, so only its mark says what became of it.
            return await ledger.is_marked(batch, entry)
        raise
    return True
