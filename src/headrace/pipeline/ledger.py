"""The one decision of a batch: which prepared transactions are to be committed.

Tasks write their rows in transactions of their own and leave them open. The driver then writes a decision, which names
them all, and commits them one by one; whoever finds the decision later commits what is left of it. This module owns the
decision: its form, where it is kept, and who may write it.

It is kept as the committed offset of a group without members, because every Kafka has those and they can be written in
a transaction: the offset is the batch's number plus one, the metadata holds the rest, in as many groups as it takes.
Each task's transaction also leaves a mark in a group of its slot, so that what became of it can be read long after its
transactional id has moved on. A decision is written in a transaction of the query's own transactional id. Taking that
id over fences whoever had it, so of two drivers at most one decides, and reading the ledger after taking the id sees
everything decided before. A run of the query writes its name there before its first row, which fences the run before.
Invariant: a ledger holds the decision of the latest batch, whole; a run that another has taken over from never writes
again. Called by `committer` and by the sink's tasks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec

from headrace.base.errors import KafkaError
from headrace.client.arrow_txn import FENCED, CommittedOffset, Coordination, TransactionalProducer

CHUNK_CHARACTERS: Final = 3_500  # below offset.metadata.max.bytes, whose default is 4096
CHUNKS_MAX: Final = 64
RUNS_REMEMBERED_MAX: Final = 16
REGISTRATIONS_MAX: Final = 1_000
READS_MAX: Final = 100
NO_BATCH: Final = -1
RUN_CHARACTERS: Final = 8
PARTITION: Final = 0  # the one that every topic has

Step = Callable[[str], None]


def no_step(name: str) -> None:
    """What happens at a numbered step, unless a test wants something to happen there."""


class LedgerError(Exception):
    """The ledger does not allow what is asked; the text says why, and what to do."""


class Fenced(LedgerError):
    """Another run of the query has taken over."""


@dataclass(frozen=True)
class Entry:
    """One prepared transaction: who wrote it, and what, so that a replay can be told from something else."""

    slot: int
    producer: TransactionalProducer
    rows: int
    digest: int


@dataclass(frozen=True)
class Decision:
    """What is in the ledger: for the latest batch, the transactions to commit."""

    batch: int
    run: str
    fenced: tuple[str, ...] = ()
    entries: tuple[Entry, ...] = ()

    def entry_of(self, slot: int) -> Entry | None:
        """The transaction of a task's slot."""
        return next((entry for entry in self.entries if entry.slot == slot), None)

    def succeeded_by(self, run: str) -> tuple[str, ...]:
        """The runs that are fenced when `run` writes next."""
        before = [one for one in (*self.fenced, self.run) if one != run]
        return tuple(dict.fromkeys(before))[-RUNS_REMEMBERED_MAX:]

    def owned_by(self, run: str) -> "Decision":
        """The same decision in the hands of another run."""
        return replace(self, run=run, fenced=self.succeeded_by(run))

    def check_run(self, run: str) -> None:
        """Raise Fenced when this run has been taken over from."""
        if run in self.fenced:
            raise Fenced(
                f"another run of this query ({self.run}) has taken over and decided batch {self.batch}: this one "
                "must stop. Two drivers on one checkpoint are a mistake."
            )


@dataclass
class Ledger:
    """The ledger of one sink."""

    calls: Coordination
    sink: str
    topic: str
    timeout_ms: int
    step: Step = field(default=no_step)

    def group(self, chunk: int = 0) -> str:
        """The group that holds a part of the decision."""
        return f"headrace-sink-{self.sink}" + (f"-part-{chunk}" if chunk else "")

    async def read(self, *, stable: bool = False) -> Decision | None:
        """The latest decision; `stable` waits for one that is just being written, which may never end."""
        for _ in range(READS_MAX):
            chunks = [await self._fetch(self.group(), stable)]
            if chunks[0] is None:
                return None
            more = range(1, chunk_count(chunks[0]))
            chunks += [await self._fetch(self.group(number), stable) for number in more]
            decision = decode(chunks)
            if decision is not None:
                return decision
        raise LedgerError(f"the ledger of sink {self.sink} changes faster than it can be read")

    async def _fetch(self, group: str, stable: bool) -> CommittedOffset | None:
        return (await self.calls.fetch_offsets(group, self.topic, [PARTITION], stable=stable)).get(PARTITION)

    async def take(self) -> tuple[TransactionalProducer, Decision | None]:
        """The right to decide: from here on no other driver does, unless it takes it away again."""
        who = await self.calls.init(f"headrace-sink-{self.sink}", self.timeout_ms)
        self.step("taken")
        return who, await self.read(stable=True)

    async def register(self, run: str) -> tuple[Decision, bool]:
        """Make `run` the one that may write, and every other fenced; whether that was new. Raises Fenced."""
        for _ in range(REGISTRATIONS_MAX):
            decision = await self.read()
            if decision is not None and decision.run == run:
                return decision, False
            if decision is not None:
                decision.check_run(run)
            try:
                who, decision = await self.take()
                if decision is None or decision.run != run:
                    if decision is not None:
                        decision.check_run(run)
                    decision = decision.owned_by(run) if decision is not None else Decision(NO_BATCH, run)
                    await self.write(who, decision)
                    return decision, True
            except KafkaError as error:
                if error.code not in FENCED:  # another task of this run, or another driver, was faster
                    raise
        raise Fenced(
            f"run {run} could not take the ledger of sink {self.sink}: others take it again and again"
        )

    async def write(self, who: TransactionalProducer, decision: Decision) -> None:
        """Decide. Raises a KafkaError when somebody else has taken the right to."""
        self.step("deciding")
        for number, chunk in enumerate(encode(decision, who)):
            await self.calls.commit_offsets(who, self.group(number), self.topic, {PARTITION: chunk})
        self.step("decision written")
        await self.calls.end(who, commit=True)
        self.step("decided")

    async def mark(self, who: TransactionalProducer, batch: int, slot: int) -> None:
        """Leave a mark in a task's transaction: it is there if, and only if, the transaction was committed."""
        mark = CommittedOffset(batch + 1, _mark(who))
        await self.calls.commit_offsets(who, self._slot_group(slot), self.topic, {PARTITION: mark})

    async def is_marked(self, batch: int, entry: Entry) -> bool:
        """Whether a transaction that is no longer open was committed."""
        found = await self._fetch(self._slot_group(entry.slot), stable=False)
        return found == CommittedOffset(batch + 1, _mark(entry.producer))

    def _slot_group(self, slot: int) -> str:
        return f"headrace-sink-{self.sink}-slot-{slot}"


def _mark(who: TransactionalProducer) -> str:
    return f"{who.transactional_id} {who.producer_id} {who.epoch}"


def encode(decision: Decision, who: TransactionalProducer) -> list[CommittedOffset]:
    """A decision as offsets with metadata. Raises LedgerError when it has too many tasks."""
    entries = [
        [
            e.slot,
            e.producer.transactional_id,
            e.producer.producer_id,
            e.producer.epoch,
            e.rows,
            f"{e.digest:x}",
        ]
        for e in decision.entries
    ]
    text = msgspec.json.encode([decision.batch, decision.run, decision.fenced, entries]).decode()
    chunks = [text[at : at + CHUNK_CHARACTERS] for at in range(0, len(text), CHUNK_CHARACTERS)]
    if len(chunks) > CHUNKS_MAX:
        raise LedgerError(
            f"batch {decision.batch} has {len(entries)} tasks with rows, more than a decision can name: coalesce() it"
        )
    written = f"{len(chunks)}/{who.producer_id}/{who.epoch}"
    return [CommittedOffset(decision.batch + 1, f"{written} {chunk}") for chunk in chunks]


def chunk_count(first: CommittedOffset) -> int:
    """In how many parts a decision is, by its first. Raises LedgerError when it is something else."""
    count = first.metadata.split("/", 1)[0]
    if not count.isdigit() or not 1 <= int(count) <= CHUNKS_MAX:
        raise LedgerError(
            "the offset of the sink's group is no ledger: somebody else uses that group; set another "
            "transactionalIdPrefix"
        )
    return int(count)


def decode(chunks: Sequence[CommittedOffset | None]) -> Decision | None:
    """The decision of what `encode` made; None when the parts are of different ones."""
    parts = []
    for chunk in chunks:
        mark, _, part = chunk.metadata.partition(" ") if chunk is not None else ("", "", "")
        parts.append((mark, part))
    if len({mark for mark, _ in parts}) != 1:
        return None
    try:
        batch, run, fenced, entries = msgspec.json.decode("".join(part for _, part in parts))
        read = tuple(
            Entry(slot, TransactionalProducer(name, producer, epoch), rows, int(digest, 16))
            for slot, name, producer, epoch, rows, digest in entries
        )
    except (ValueError, TypeError) as error:
        raise LedgerError(f"the offset of the sink's group is no ledger ({error})") from None
    return Decision(batch, run, tuple(fenced), read)


def amended(decision: Decision, run: str, replaced: Mapping[int, Entry]) -> Decision:
    """The same decision, with other transactions for the slots whose own were lost."""
    entries = tuple(replaced.get(entry.slot, entry) for entry in decision.entries)
    return replace(decision, run=run, fenced=decision.succeeded_by(run), entries=entries)
