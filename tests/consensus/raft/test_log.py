"""The log's view over storage: whatever is appended, cut, taken, synced and compacted, it is one log with its cursors.

A model keeps every entry in a list; the log is held against it after each step of an arbitrary history.
"""

import random

from hypothesis import given
from hypothesis import strategies as st

from headrace.consensus.raft.effects import Effects
from headrace.consensus.raft.log import RaftLog
from headrace.consensus.raft.messages import Entry, HardState, SnapshotMeta
from headrace.consensus.raft.storage import MemoryStorage

STEPS = ("append", "append", "cut", "take", "take", "persist", "commit", "apply", "compact", "restore")


class Model:
    """A log, and what a careful observer knows of it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.storage = MemoryStorage()
        self.log = RaftLog(self.storage)
        self.effects = Effects(HardState())
        self.entries: list[Entry] = []
        self.term = 1
        self.outstanding: list[tuple[int, int]] = []

    def append(self) -> None:
        self.term += self.random.choice((0, 0, 1))
        new = [
            Entry(self.term, b"%d" % self.random.randrange(10**6)) for _ in range(self.random.randrange(1, 4))
        ]
        self.log.append(new)
        self.entries += new

    def cut(self) -> None:
        if self.log.commit < self.log.end:
            end = self.random.randrange(self.log.commit, self.log.end)
            self.log.truncate(end)
            del self.entries[end:]
            self.outstanding = [(number, min(until, end)) for number, until in self.outstanding]
            self.append()  # what is cut is always replaced

    def take(self) -> None:
        ready = self.effects.bundle(0, None, self.log, 1)
        if ready is not None:
            self.storage.write(ready)
            self.outstanding.append((ready.number, self.log.end))

    def persist(self) -> None:
        if self.outstanding:
            number, end = self.outstanding.pop(self.random.randrange(len(self.outstanding)))
            self.outstanding = [one for one in self.outstanding if one[0] > number]
            self.log.persisted(number)
            assert self.log.durable_end == end

    def commit(self) -> None:
        self.log.commit_to(self.random.randrange(self.log.end + 1))

    def apply(self) -> None:
        applied = self.log.applied
        first, taken = self.log.take_committed(self.random.choice((1, 1 << 20)))
        assert first == applied
        assert taken == self.entries[first : first + len(taken)]
        assert bool(taken) == (applied < min(self.log.commit, self.log.durable_end))

    def compact(self) -> None:
        if self.log.applied > self.log.snapshot.end:
            end = self.random.randrange(self.log.snapshot.end + 1, self.log.applied + 1)
            meta = SnapshotMeta(end, self.entries[end - 1].term)
            self.storage.save_snapshot(meta, b"", max(self.storage.start, end - self.random.choice((0, 2))))
            self.log.compacted()

    def restore(self) -> None:
        if self.random.random() < 0.2 and not self.log.has_pending:
            end = self.log.end + 5
            self.entries = [Entry(self.term, b"") for _ in range(end)]
            self.log.restore(SnapshotMeta(end, self.term))
            self.storage.install(SnapshotMeta(end, self.term), b"")
            self.outstanding.clear()

    def check(self) -> None:
        log = self.log
        assert log.end == len(self.entries)
        assert log.applied <= min(log.commit, log.durable_end) <= log.end
        if log.start < log.end:
            start = self.random.randrange(log.start, log.end)
            end = self.random.randrange(start, log.end) + 1
            assert log.entries(start, end, 1 << 20) == self.entries[start:end]
            assert log.entries(start, end, 1) == self.entries[start : start + 1]
        for index in range(log.start + 1, log.end + 1):
            assert log.term_before(index) == self.entries[index - 1].term
        assert log.term_before(log.end + 1) is None
        if self.entries:
            assert log.last_term == self.entries[-1].term
        self.check_end_of_term()

    def check_end_of_term(self) -> None:
        log = self.log
        term, limit = self.random.randrange(self.term + 2), self.random.randrange(log.end + 1)
        ends = [end for end in range(log.start, limit + 1) if end == 0 or self.entries[end - 1].term <= term]
        found = log.end_of_term(term, limit)
        if ends and limit >= log.start:
            assert found == max(ends)
        else:
            assert found <= log.start  # among entries that are gone, where only a snapshot helps


@given(st.lists(st.sampled_from(STEPS), max_size=60), st.integers(0, 2**32))
def test_the_log_is_one_log_whatever_happens_to_it(steps: list[str], seed: int) -> None:
    model = Model(seed)
    for step in steps:
        getattr(model, step)()
        model.check()


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=12))
def test_two_logs_find_where_they_agree_in_one_step_a_term(mine: list[int], others: list[int]) -> None:
    logs = []
    for rises in (mine, others):
        storage = MemoryStorage()
        term = 1
        for rise in rises:
            term += rise
            storage.log.append(Entry(term, b"%d" % len(storage.log)))
        logs.append(RaftLog(storage))
    leader, follower = logs
    agreed = 0
    while agreed < min(leader.end, follower.end):
        if leader.term_before(agreed + 1) != follower.term_before(agreed + 1):
            break
        agreed += 1
    start, steps = leader.end, 0
    while (prev_term := leader.term_before(start)) != follower.term_before(start):
        assert prev_term is not None
        last_term, end = follower.divergence(start, prev_term)
        further = min(leader.end_of_term(last_term, end), start - 1)
        assert further >= agreed, "a common prefix is never skipped"
        start, steps = further, steps + 1
    assert steps <= 1 + len({entry.term for entry in follower._storage.entries(0, follower.end, 1 << 20)})
