"""A Raft cluster on the workbench: nodes with the production driver, driven by hand, one message at a time.

Nothing happens by itself: messages wait until they are delivered or dropped, syncs run at once unless held, time is
`tick`. Chance is fixed (node N waits N - 1 ticks longer than the least), so that a script always plays the same. Used
by the script tests and by the tests that follow the Raft paper.
"""

from collections import deque

from headrace.consensus.raft.driver import RaftDriver
from headrace.consensus.raft.messages import (
    AnyMessage,
    Append,
    AppendReply,
    Entry,
    EntryKind,
    HardState,
    Heartbeat,
    HeartbeatReply,
    SnapshotChunk,
    SnapshotMeta,
    SnapshotReply,
    VoteReply,
    VoteRequest,
    Voters,
    decode_voters,
)
from headrace.consensus.raft.node import RaftNode
from headrace.consensus.raft.refusal import Refused
from headrace.consensus.raft.settings import RaftSettings
from headrace.consensus.raft.storage import MemoryStorage, SyncTicket
from tests.sim.raft_disk import LightDisk

DELIVERIES_MAX = 10_000


class FixedChance:
    """Chance that always has it the same way."""

    def __init__(self, value: int) -> None:
        self.value = value

    def randrange(self, stop: int, /) -> int:
        return self.value % stop

    def random(self) -> float:
        return 0.0


class Host:
    """One node, and what it did."""

    def __init__(self, bench: "Bench", node_id: int, voters: Voters, settings: RaftSettings) -> None:
        self.bench = bench
        self.id = node_id
        self.voters = voters
        self.settings = settings
        self.disk = LightDisk(FixedChance(0))  # type: ignore[arg-type]
        self.holds_syncs = False
        self.up = False
        self.start()

    def start(self) -> None:
        self.storage = self.disk.open()
        self.node = RaftNode(self.id, self.voters, self.storage, FixedChance(self.id - 1), self.settings)
        self.driver = RaftDriver(self.node, self.storage, self)
        self.ticket: SyncTicket | None = None
        self.applied: list[bytes] = []
        self.told: list[str] = []
        self.up = True
        if self.storage.snapshot.end:
            self.restore(self.storage.snapshot)

    def crash(self) -> None:
        """Lose power: with this chance, nothing that was not synced survives."""
        self.disk.crash(power_lost=True)
        self.up = False

    # -- the driver's host -----------------------------------------------------------------------------------

    def send(self, message: AnyMessage) -> None:
        if (self.id, message.to) not in self.bench.cut:
            self.bench.messages.append(message)

    def sync(self, ticket: SyncTicket) -> None:
        self.ticket = ticket
        if not self.holds_syncs:
            self.bench.due_syncs.append(self)

    def run_sync(self) -> bool:
        """Let the sync that is under way finish; False when none is."""
        if self.ticket is None:
            return False
        ticket, self.ticket = self.ticket, None
        ticket.run()
        self.driver.synced(None)
        return True

    def restore(self, meta: SnapshotMeta) -> None:
        self.applied = [data for data in self.storage.read_snapshot().split(b",") if data]

    def apply(self, first: int, entries: list[Entry]) -> None:
        self.applied += [entry.data for entry in entries if entry.kind == EntryKind.DATA]

    def read_done(self, token: object, end: int | None) -> None:
        self.told.append(f"read {token} sees {end}")

    def propose(self, *entries: bytes) -> None:
        names = ",".join(entry.decode() for entry in entries)

        def done(error: Refused | None) -> None:
            self.told.append(f"{names} committed" if error is None else f"{names}: {error.code.name}")

        self.driver.propose(entries, done)
        self.bench.pump(self)

    def snapshot(self, keep: int = 0) -> None:
        ticket = self.storage.begin_snapshot(
            self.node.snapshot_meta(self.node.log.applied), b",".join(self.applied)
        )
        ticket.run()
        if self.storage.finish_snapshot(ticket, keep):
            self.node.compacted()


class Bench:
    """A cluster, the messages between its nodes, and the links that are cut."""

    def __init__(
        self,
        voters: int | tuple[int, ...] = 3,
        observers: tuple[int, ...] = (),
        settings: RaftSettings | None = None,
    ) -> None:
        ids = tuple(range(1, voters + 1)) if isinstance(voters, int) else voters
        self.voters: Voters = {node: f"node-{node}" for node in ids}
        self.settings = settings or RaftSettings()
        self.messages: deque[AnyMessage] = deque()
        self.cut: set[tuple[int, int]] = set()
        self.due_syncs: list[Host] = []
        self.hosts: dict[int, Host] = {}
        for node in (*ids, *observers):
            self.hosts[node] = Host(self, node, self.voters, self.settings)

    def __getitem__(self, node_id: int) -> RaftNode:
        return self.hosts[node_id].node

    def pump(self, host: Host) -> None:
        """Let effects happen, and the syncs that nobody holds."""
        host.driver.pump()
        while self.due_syncs:
            self.due_syncs.pop().run_sync()

    def tick(self, node_id: int, count: int = 1) -> None:
        host = self.hosts[node_id]
        for _ in range(count):
            host.node.tick()
            self.pump(host)

    def tick_all(self, count: int = 1) -> None:
        """Time passes everywhere, and messages take less than a tick."""
        for _ in range(count):
            for host in self.hosts.values():
                if host.up:
                    host.node.tick()
                    self.pump(host)
            self.deliver()

    def step(self, message: AnyMessage) -> None:
        """Deliver one message."""
        host = self.hosts[message.to]
        if host.up and (message.sender, message.to) not in self.cut:
            host.node.step(message)
            self.pump(host)

    def deliver(
        self, sender: int | None = None, to: int | None = None, count: int = DELIVERIES_MAX
    ) -> list[AnyMessage]:
        """Deliver what is under way, and what comes of it, on the links asked for; what that was, in order."""
        delivered = []
        while len(delivered) < count:
            message = next(
                (m for m in self.messages if sender in (None, m.sender) and to in (None, m.to)), None
            )
            if message is None:
                return delivered
            self.messages.remove(message)
            delivered.append(message)
            self.step(message)
        raise AssertionError("messages without end")

    def elect(self, node_id: int) -> None:
        """Make a node leader, with all its first entry brings."""
        for other in self.hosts.values():
            if other.up and other.id != node_id:
                other.node._elapsed = self.settings.election_ticks  # they have not heard a leader for long
        self[node_id].campaign()
        self.pump(self.hosts[node_id])
        self.deliver()

    def isolate(self, node_id: int) -> None:
        for other in self.hosts:
            if other != node_id:
                self.cut |= {(node_id, other), (other, node_id)}
        self.messages = deque([m for m in self.messages if (m.sender, m.to) not in self.cut])

    def propose(self, node_id: int, *entries: bytes) -> None:
        self.hosts[node_id].propose(*entries)

    def data(self, node_id: int) -> list[bytes]:
        """The application's entries in a node's log."""
        log = self[node_id].log
        entries = log.entries(log.start, log.end, 1 << 40)
        return [entry.data for entry in entries if entry.kind == EntryKind.DATA]


# -- one node by itself ----------------------------------------------------------------------------------------

THREE = {1: "", 2: "", 3: ""}


def make_node(
    entries: list[int] | None = None,
    term: int = 0,
    vote: int | None = None,
    voters: dict[int, str] | None = None,
) -> RaftNode:
    """Node 1 with a log of entries of these terms, and a term and a vote from before."""
    storage = MemoryStorage()
    storage.hard_state = HardState(term, vote)
    storage.log = [Entry(entry_term, b"%d" % entry_term) for entry_term in entries or []]
    return RaftNode(1, voters or THREE, storage, FixedChance(0))


def effects_of(node: RaftNode) -> list:
    """Everything a node wants sent, when its disk is quick."""
    sent = []
    while (ready := node.ready()) is not None:
        node._storage.write(ready)
        sent += ready.early + ready.messages
        node.persisted(ready.number)
    return sent


def only(messages: list, kind: type):
    [found] = [message for message in messages if type(message) is kind]
    return found


def terms_of(node: RaftNode) -> list[int]:
    return [entry.term for entry in node.log.entries(0, node.log.end, 1 << 30)]


# -- words for scripts ----------------------------------------------------------------------------------------


def describe_node(host: Host) -> str:
    """One line that says what a node is."""
    if not host.up:
        return f"{host.id} is down"
    node, log = host.node, host.node.log
    voters = ",".join(str(voter) for voter in sorted(node.voters))
    return (
        f"{host.id} {node.role.value} term={node.term} vote={node.vote or '-'} leader={node.leader or '-'} "
        f"log={log.start}..{log.end} commit={log.commit} applied={log.applied} voters={voters}"
    )


def describe_entry(entry: Entry) -> str:
    """An entry in a few letters."""
    if entry.kind == EntryKind.DATA:
        return f"{entry.term}:{entry.data.decode()}"
    voters = ",".join(str(voter) for voter in sorted(decode_voters(entry.data)))
    return f"{entry.term}:{EntryKind(entry.kind).name.lower()}({voters})"


def describe_message(message: AnyMessage) -> str:
    """A message in one line."""
    head = f"{message.sender}->{message.to} {type(message).__name__} term={message.term}"
    if isinstance(message, VoteRequest):
        kind = " pre" if message.pre else " transfer" if message.transfer else ""
        return f"{head}{kind} end={message.end} last_term={message.last_term}"
    if isinstance(message, VoteReply):
        return f"{head}{' pre' if message.pre else ''} {'granted' if message.granted else 'refused'}"
    if isinstance(message, Append):
        entries = " ".join(describe_entry(entry) for entry in message.entries)
        return (
            f"{head} start={message.start} prev_term={message.prev_term} commit={message.commit} [{entries}]"
        )
    if isinstance(message, AppendReply):
        if message.accepted:
            return f"{head} accepted end={message.end}"
        return f"{head} refused end={message.end} last_term={message.last_term}"
    if isinstance(message, Heartbeat):
        return f"{head} commit={message.commit} round={message.round}"
    if isinstance(message, HeartbeatReply):
        return f"{head} round={message.round}"
    if isinstance(message, SnapshotChunk):
        return f"{head} end={message.end} position={message.position} {message.data!r}{' last' if message.last else ''}"
    if isinstance(message, SnapshotReply):
        return f"{head} end={message.end} position={message.position}"
    return head
