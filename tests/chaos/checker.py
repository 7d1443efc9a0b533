"""Holds what clients were told against what the log says in the end.

Owns the history of a run and the account of it. Pure: no clients, no clock. A record is known by who wrote it (one
session of one idempotent producer) and its number there, so that every record of a run is different. Called by the
chaos run with what its clients saw, and by tests with histories that have a violation planted.

What must hold, for records written with acks=all:

lost            an acknowledged record, or one that any reader was given, is in the log in the end
moved           ... at the offset that the acknowledgement named
duplicated      no record is in the log twice
reordered       records of one writer in one partition are in the order in which they were sent
two values      at one offset of one partition nobody ever sees two different records
phantom         nothing is in the log that nobody sent
went back       a reader's offsets only grow
end went down   the end offset that a client is told of a partition never gets smaller
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

SHOWN_MAX = 20
OFFSET_UNKNOWN = -1
"""Of a record that was acknowledged as one that the log has already: the broker no longer knows where."""


class Record(NamedTuple):
    """What tells one record from all others."""

    writer: str
    number: int


class Violation(NamedTuple):
    """Something that must not be."""

    kind: str
    text: str


@dataclass
class History:
    """What clients did and saw. Each list may be appended to from one thread at a time."""

    sent: dict[Record, int] = field(default_factory=dict)  # → partition
    acked: dict[Record, int] = field(default_factory=dict)  # → offset
    failed: dict[Record, str] = field(default_factory=dict)  # may or may not be in the log
    reads: list[tuple[str, int, int, Record]] = field(default_factory=list)  # reader, partition, offset
    ends: list[tuple[str, int, int]] = field(default_factory=list)  # who asked, partition, end offset
    final: dict[int, list[tuple[int, Record]]] = field(default_factory=dict)  # partition → offset, record


@dataclass
class Account:
    """The outcome: how much there was, and what is wrong."""

    sent: int
    acked: int
    failed: int
    unanswered: int
    read: int
    found: int
    violations: list[Violation]

    def counts(self) -> Counter[str]:
        return Counter(violation.kind for violation in self.violations)

    def lines(self) -> Iterable[str]:
        yield (
            f"{self.sent:,} sent, {self.acked:,} acknowledged, {self.failed:,} refused or timed out, "
            f"{self.unanswered:,} unanswered; {self.read:,} read along, {self.found:,} in the log in the end"
        )
        for kind, count in sorted(self.counts().items()):
            yield f"VIOLATION {kind}: {count}"
            for violation in [v for v in self.violations if v.kind == kind][:SHOWN_MAX]:
                yield f"  {violation.text}"
        if not self.violations:
            yield "lost 0, duplicated 0, reordered 0, two values at one offset 0, end offsets that went down 0"


def check(history: History) -> Account:
    """The account of a history whose final reading is complete."""
    violations = [
        *_final_log(history),
        *_acknowledged(history),
        *_readers(history),
        *_end_offsets(history),
    ]
    answered = history.acked.keys() | history.failed.keys()
    return Account(
        sent=len(history.sent),
        acked=len(history.acked),
        failed=len(history.failed),
        unanswered=len(history.sent.keys() - answered),
        read=len(history.reads),
        found=sum(map(len, history.final.values())),
        violations=violations,
    )


def check_copies(
    source: dict[int, list[tuple[int, Record]]], copies: dict[int, list[tuple[int, Record]]]
) -> list[Violation]:
    """What is wrong with a copy that should have each record of its source once, in its partition, in its order."""
    violations: list[Violation] = []
    for partition, log in sorted(source.items()):
        wanted = [record for _, record in log]
        found = [record for _, record in copies.get(partition, [])]
        counts = Counter(found)
        violations += [Violation("not copied", _name(r, partition)) for r in wanted if r not in counts]
        violations += [
            Violation("copied twice", f"{_name(r, partition)}, {count} times")
            for r, count in counts.items()
            if count > 1
        ]
        strangers = counts.keys() - set(wanted)
        violations += [Violation("phantom copy", _name(r, partition)) for r in sorted(strangers)]
        if not violations and found != wanted:
            at = next(i for i, (a, b) in enumerate(zip(wanted, found)) if a != b)
            violations.append(Violation("copied out of order", _name(found[at], partition, at)))
    return violations


def _name(record: Record, partition: int, offset: int | None = None) -> str:
    at = "" if offset is None else f" at offset {offset}"
    return f"{record.writer} no. {record.number}, partition {partition}{at}"


def _final_log(history: History) -> Iterable[Violation]:
    seen: dict[Record, tuple[int, int]] = {}
    for partition, log in sorted(history.final.items()):
        latest: dict[str, int] = {}
        before = -1
        for offset, record in log:
            if offset <= before:
                yield Violation(
                    "went back", f"the final reading of partition {partition}: {before}, {offset}"
                )
            before = offset
            if history.sent.get(record) != partition:
                yield Violation("phantom", _name(record, partition, offset))
            if record in seen:
                first = seen[record]
                yield Violation(
                    "duplicated",
                    f"{_name(record, partition, offset)}, and in {first[0]} at offset {first[1]}",
                )
                continue
            seen[record] = (partition, offset)
            if record.number < latest.get(record.writer, -1):
                after = f"after no. {latest[record.writer]}"
                yield Violation("reordered", f"{_name(record, partition, offset)} {after}")
            latest[record.writer] = max(record.number, latest.get(record.writer, -1))


def _acknowledged(history: History) -> Iterable[Violation]:
    places: dict[Record, set[int]] = {}
    at: dict[tuple[int, int], Record] = {}
    for partition, log in history.final.items():
        for offset, record in log:
            places.setdefault(record, set()).add(offset)
            at[partition, offset] = record
    for record, offset in sorted(history.acked.items()):
        partition = history.sent[record]
        found = places.get(record, set())
        if not found:
            instead = at.get((partition, offset))
            there = f"; there is {instead.writer} no. {instead.number} instead" if instead else ""
            yield Violation("lost", f"acknowledged: {_name(record, partition, offset)}{there}")
        elif offset != OFFSET_UNKNOWN and offset not in found:
            yield Violation("moved", f"{_name(record, partition, offset)} is at {sorted(found)}")


def _readers(history: History) -> Iterable[Violation]:
    final = {(p, offset): record for p, log in history.final.items() for offset, record in log}
    seen: dict[tuple[int, int], tuple[Record, str]] = {
        place: (record, "the final reading") for place, record in final.items()
    }
    in_log = set(final.values())
    latest: dict[tuple[str, int], int] = {}
    told_lost: set[Record] = set()
    for reader, partition, offset, record in history.reads:
        if offset <= latest.get((reader, partition), -1):
            before = latest[reader, partition]
            yield Violation("went back", f"{reader} in partition {partition}: {offset} after {before}")
        latest[reader, partition] = offset
        other = seen.setdefault((partition, offset), (record, reader))
        if other[0] != record:
            yield Violation(
                "two values",
                f"partition {partition} offset {offset}: {reader} saw {record.writer} no. {record.number}, "
                f"{other[1]} saw {other[0].writer} no. {other[0].number}",
            )
        if record not in in_log and record not in told_lost:
            told_lost.add(record)
            yield Violation("lost", f"read by {reader}: {_name(record, partition, offset)}")


def _end_offsets(history: History) -> Iterable[Violation]:
    latest: dict[tuple[str, int], int] = {}
    for who, partition, end in history.ends:
        if end < latest.get((who, partition), 0):
            before = latest[who, partition]
            yield Violation("end went down", f"{who} was told {before} of partition {partition}, then {end}")
        latest[who, partition] = max(end, latest.get((who, partition), 0))
