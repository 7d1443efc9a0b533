"""A Raft node as a process of the simulator: the production driver, core and storage on a simulated machine.

Its application keeps a digest of everything applied, and makes and takes snapshots of that. Nothing of Raft is decided
here; what it does is told to the oracle. Made by the scenario, once for each life of its machine.
"""

from typing import Any

from headrace.consensus.raft.driver import RaftDriver
from headrace.consensus.raft.messages import AnyMessage, Entry, SnapshotMeta, VoteReply, VoteRequest, Voters
from headrace.consensus.raft.node import RaftNode
from headrace.consensus.raft.ready import Ready
from headrace.consensus.raft.refusal import Refused
from headrace.consensus.raft.settings import RaftSettings
from headrace.consensus.raft.storage import SyncTicket
from headrace.records.builder import build_batch, iter_records
from tests.sim.kernel import MS, Machine
from tests.sim.raft_disk import RaftDisk
from tests.sim.raft_oracle import RaftOracle, Violation, digest_after

TICK = 10 * MS


class RaftProcess:
    """One life of one node."""

    def __init__(
        self,
        machine: Machine,
        disk: RaftDisk,
        voters: Voters,
        settings: RaftSettings,
        oracle: RaftOracle,
    ) -> None:
        self.machine = machine
        self.disk = disk
        self.oracle = oracle
        self.sync_delay = MS
        self.sync_fails = 0.0
        self.snapshot_entries = 0
        """A snapshot is made whenever this many entries are applied since the last; 0 for never."""
        self.keep_entries = 0
        self._tick = TICK + machine.random.randrange(-TICK // 20, TICK // 20)
        self.storage: Any = disk.open()
        self.node = RaftNode(machine.id, voters, self.storage, machine.random, settings)
        self.driver = RaftDriver(self.node, self, self)
        self._digest = 0
        self._snapshotting = False
        meta = self.storage.snapshot
        if meta.end:
            self.restore(meta)
        machine.after(machine.random.randrange(self._tick), self._on_tick)

    # -- events ----------------------------------------------------------------------------------------------

    def _on_tick(self) -> None:
        self.machine.after(self._tick, self._on_tick)
        self.node.tick()
        self.driver.pump()

    def receive(self, sender: int, message: AnyMessage) -> None:
        self.node.step(message)
        self.driver.pump()

    def crashed(self, power_lost: bool) -> None:
        self.disk.crash(power_lost)

    # -- storage, as the driver sees it: every write is told to the oracle ------------------------------------

    def write(self, ready: Ready) -> None:
        first = ready.first
        self.storage.write(ready)
        if ready.entries:
            storage = self.storage
            if first == storage.snapshot.end:
                prev_term = storage.snapshot.term
            elif first == 0:
                prev_term = 0
            else:
                prev_term = storage.entries(first - 1, first, 1)[0].term
            self.oracle.wrote(self.machine.id, first, prev_term, ready.entries)

    def begin_sync(self) -> SyncTicket:
        ticket: SyncTicket = self.storage.begin_sync()
        return ticket

    def finish_sync(self, ticket: SyncTicket, error: BaseException | None) -> None:
        self.storage.finish_sync(ticket, error)

    # -- the world, as the driver sees it --------------------------------------------------------------------

    def send(self, message: AnyMessage) -> None:
        if type(message) is VoteReply:
            if message.granted and not message.pre:
                self.oracle.voted(message.sender, message.term, message.to)
        elif type(message) is VoteRequest and not message.pre:
            self.oracle.voted(message.sender, message.term, message.sender)
        self.machine.send(message.to, message)

    def sync(self, ticket: SyncTicket) -> None:
        delay = 1 + int(self.machine.random.random() * self.sync_delay)
        self.machine.after(delay, self._synced, ticket)

    def _synced(self, ticket: SyncTicket) -> None:
        if self.sync_fails and self.machine.random.random() < self.sync_fails:
            self.machine.crash(
                power_lost=True
            )  # a node whose disk fails stops, and what it had written is in doubt
            return
        ticket.run()
        self.driver.synced(None)

    def apply(self, first: int, entries: list[Entry]) -> None:
        digest = self._digest
        for entry in entries:
            digest = digest_after(digest, entry)
        self._digest = digest
        self.oracle.check(self.node)  # it learns of commitment, then of what came of it
        if self.oracle.applied(self.machine.id, first, entries) != digest:
            raise Violation(
                f"state-machine safety: node {self.machine.id} applied something twice, or not at all"
            )
        if (
            self.snapshot_entries
            and first + len(entries) - self.storage.snapshot.end >= self.snapshot_entries
        ):
            self.make_snapshot()

    def restore(self, meta: SnapshotMeta) -> None:
        self._digest = int(iter_records(self.storage.read_snapshot())[0].value or b"0")
        self.oracle.restored(self.machine.id, meta, self._digest)

    def read_done(self, token: Any, end: int | None) -> None:
        if end is not None and end < token:
            raise Violation(
                f"a read at {self.machine.id} sees {end}, {token} was acknowledged before it began"
            )

    # -- the application -------------------------------------------------------------------------------------

    def make_snapshot(self) -> None:
        """Write the state as of now, in the background, and drop the log below it."""
        end = self.node.log.applied
        if self._snapshotting or end <= self.storage.snapshot.end:
            return
        self._snapshotting = True
        ticket = self.storage.begin_snapshot(
            self.node.snapshot_meta(end), build_batch([(0, None, b"%d" % self._digest, ())])
        )
        self.machine.after(
            1 + int(self.machine.random.random() * self.sync_delay), self._snapshot_made, ticket
        )

    def _snapshot_made(self, ticket: Any) -> None:
        self._snapshotting = False
        ticket.run()
        if self.storage.finish_snapshot(ticket, self.keep_entries):
            self.machine.kernel.trace(f"{self.machine.id}: snapshot to {ticket.meta.end}")
            self.node.compacted()

    def propose(self, entries: list[bytes], acknowledged: Any) -> bool:
        """Propose; False when this node does not lead."""
        end = 0

        def done(error: Refused | None) -> None:
            if error is None:
                self.oracle.acknowledged(self.machine.id, end, entries[-1])
                acknowledged(end)

        try:
            end = self.driver.propose(entries, done)
        except Refused:
            return False
        self.driver.pump()
        return True
