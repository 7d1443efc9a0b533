"""The host of this node's Raft: its ticks, its messages, its disk, and what comes out committed.

Owns the driver and the metadata log's storage. Invariants: committed entries reach the application once each and in
order, also when the node had to be made anew; the application leads from the moment it has applied all that was in the
log when this node was elected, until the node leads no more; a proposal's `done` is called once.

A disk that refuses a write ends the node, not the process: another is made from what the disk has, a little later, as
after a restart. Only when the log itself can no longer be trusted, because a sync failed, the process must stop.
Called by the process, which passes messages in, and by the metadata store, which proposes.
"""

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

from headrace.base.clock import Clock, Timer
from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.log import get_logger
from headrace.consensus.raft.driver import Done, RaftDriver
from headrace.consensus.raft.durable import DurableStorage, DurableTicket
from headrace.consensus.raft.messages import (
    AnyMessage,
    Entry,
    EntryKind,
    Malformed,
    SnapshotMeta,
    VoteRequest,
    Voters,
    decode_message,
)
from headrace.consensus.raft.node import RaftNode
from headrace.consensus.raft.refusal import Refused
from headrace.consensus.raft.settings import RaftSettings
from headrace.consensus.raft.storage import SyncTicket
from headrace.consensus.snapshots import decode_snapshot, encode_snapshot
from headrace.storage.flusher import Flusher
from headrace.storage.log import PartitionLog

TICK_MS: Final = 50
HEARTBEATS_A_TIMEOUT: Final = 5
KEEP_ENTRIES: Final = 1_000
"""Entries kept below a snapshot, for followers that are a little behind."""
REOPEN_AFTER_S: Final = 1.0

logger = get_logger(__name__)


class Application(Protocol):
    """Whose log this is."""

    def applied(self, end: int, entries: list[bytes]) -> None:
        """Entries are committed; the log is applied up to `end`."""
        ...

    def restored(self, end: int, entries: Iterator[bytes]) -> None:
        """These entries make the state at `end`, in place of everything applied."""
        ...

    def leads(self, leading: bool) -> None:
        """This node may propose from now on, or may no more."""
        ...

    def snapshot(self) -> list[bytes]:
        """Entries that make the state as of now."""
        ...


def raft_settings(election_timeout_ms: int) -> RaftSettings:
    """Times in ticks. A follower waits between one and two timeouts; a leader is heard several times in each."""
    election_ticks = max(3, election_timeout_ms // TICK_MS)
    return RaftSettings(
        election_ticks=election_ticks,
        heartbeat_ticks=max(1, election_ticks // HEARTBEATS_A_TIMEOUT),
        observer_ticks=max(100, 4 * election_ticks),
    )


class Quorum:
    """See the module. Everything happens on the one loop."""

    def __init__(
        self,
        node_id: int,
        voters: Voters,
        log: PartitionLog,
        flusher: Flusher[PartitionLog],
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        settings: RaftSettings,
        snapshot_bytes: int,
        post: Callable[[AnyMessage], None],
    ) -> None:
        """`post` tries to get a message to its node; `snapshot_bytes` is how far the log grows between snapshots."""
        self.node_id = node_id
        self._voters = voters
        self._log = log
        self._flusher = flusher
        self._clock = clock
        self._loop = loop
        self._settings = settings
        self._snapshot_bytes = snapshot_bytes
        self._post = post
        self._application: Application | None = None
        self._driver: RaftDriver | None = None
        self._storage: DurableStorage | None = None
        self._ticker: Timer | None = None
        self._applied_end = 0
        self._active_term: int | None = None
        self._elected_term: int | None = None
        self._bytes_since_snapshot = 0
        self._last_snapshot_bytes = 0
        self._snapshotting = False
        self._syncing = False
        self._closed = False
        self._leader_heard: tuple[int, float] | None = None
        self.may_have_voted = False
        """The directory is new, and this node may have voted before, on a disk that it lost."""
        self._told_voters: Voters = {}
        self.on_voters: Callable[[Voters], None] = lambda voters: None
        """Others vote, or are elsewhere, by the log, committed or not."""
        self.on_fatal: Callable[[str], None] = lambda why: None
        """The process cannot go on."""

    # -- life ----------------------------------------------------------------------------------------------------------

    def start(self, application: Application) -> None:
        """Open the storage and begin. KafkaError when the files are damaged."""
        self._application = application
        self._open()
        self._tick_later()
        self._run(lambda: None)

    def _open(self) -> None:
        storage = DurableStorage(self._log, self._clock, flushes_log=False)
        node = RaftNode(self.node_id, self._voters, storage, random.Random(), self._settings)
        self._storage = storage
        self._driver = RaftDriver(node, storage, self)
        if storage.snapshot.end > self._applied_end:
            self.restore(storage.snapshot)

    def close(self) -> None:
        """Take part no more. What was proposed and is not committed fails."""
        self._closed = True
        if self._ticker is not None:
            self._ticker.cancel()

    def _tick_later(self) -> None:
        self._ticker = self._loop.call_later(TICK_MS / 1000, self._tick)

    def _tick(self) -> None:
        self._tick_later()
        if self._driver is not None:
            self._run(self._driver.node.tick)

    def _run(self, step: Callable[[], object]) -> None:
        """Give the node an input and have its effects happen."""
        driver = self._driver
        if driver is None or self._closed:
            return
        try:
            step()
            driver.pump()
        except Exception as error:
            self._broke(error)
        self._note_voters()
        self._note_role()

    def _broke(self, error: Exception) -> None:
        """This node is done for; another is made from the disk, if that can still be trusted."""
        logger.error(
            "the metadata log cannot be written",
            exc_info=None if isinstance(error, KafkaError | OSError) else error,
            extra={"fields": {"why": str(error), "log_end_offset": self._log.log_end_offset}},
        )
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.abandon()
        if self._log.failed or not isinstance(error, KafkaError | OSError):
            self.on_fatal(f"the metadata log in {self._log.directory} cannot be trusted any more: {error}")
            return
        self._loop.call_later(REOPEN_AFTER_S, self._reopen)

    def _reopen(self) -> None:
        if self._closed or self._driver is not None:
            return
        # Opening flushes the log too, and must not do so at the same time; and a vote that is being written, which no
        # message told of, must be found by whoever comes next, and not take the place of a newer one.
        if self._syncing or self._flusher.is_flushing(self._log):
            self._loop.call_later(TICK_MS / 1000, self._reopen)
            return
        try:
            self._open()
        except (KafkaError, OSError) as error:
            self._broke(error)
        else:
            self._run(lambda: None)

    # -- inputs --------------------------------------------------------------------------------------------------------

    def receive(self, payload: bytes | memoryview) -> None:
        """A message came from another node."""
        try:
            message = decode_message(payload)
        except Malformed as error:
            logger.warning("no message of Raft's", extra={"fields": {"why": str(error)}})
            return
        if self._is_promised(message):
            return
        if self._driver is not None and message.to == self.node_id:
            node = self._driver.node
            self._run(lambda: node.step(message))
            if message.sender == node.leader:
                self._leader_heard = message.sender, self._clock.monotonic_ms()

    def _is_promised(self, message: AnyMessage) -> bool:
        """Whether this asks for a vote that may have been given away already, and forgotten with the disk.

        Candidates without a log are of a cluster that just begins; so is then this node.
        """
        new = self.may_have_voted and self._log.log_end_offset == 0
        return new and isinstance(message, VoteRequest) and message.end > 0

    def propose(self, entries: Sequence[bytes], done: Done) -> int:
        """Append entries, if this node leads; see `RaftDriver.propose`."""
        driver = self._driver
        if driver is None or self._closed or not self.is_active:
            raise Refused(ErrorCode.NOT_CONTROLLER, f"node {self.node_id} does not lead", self.leader)
        end = driver.propose(entries, done)
        self._run(lambda: None)
        return end

    def add_voter(self, node_id: int, address: str) -> "asyncio.Future[None]":
        """Let an observer vote; done when that is committed. Refused when this node does not lead, or too soon."""
        return self._change_voters(lambda node: node.add_voter(node_id, address))

    def remove_voter(self, node_id: int) -> "asyncio.Future[None]":
        """Let a voter vote no more; done when that is committed."""
        return self._change_voters(lambda node: node.remove_voter(node_id))

    def can_spare(self, node_id: int) -> bool:
        """Whether this node leads, and a majority of the voters but for one is there."""
        leadership = None if self._driver is None else self._driver.node.leadership
        return leadership is not None and leadership.can_spare(node_id)

    def _change_voters(self, change: Callable[[RaftNode], int]) -> "asyncio.Future[None]":
        future: asyncio.Future[None] = self._loop.create_future()
        driver = self._driver
        if driver is None or not self.is_active:
            raise Refused(ErrorCode.NOT_CONTROLLER, f"node {self.node_id} does not lead", self.leader)

        def done(error: Refused | None) -> None:
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        driver.await_commit(change(driver.node), done)
        self._run(lambda: None)
        return future

    def gone(self, node_id: int) -> None:
        """No process listens at a node's address any more: if it led, another has to."""
        if self._driver is not None:
            node = self._driver.node
            self._run(lambda: node.leader_gone(node_id))

    def reached(self, node_id: int) -> None:
        """A node can be reached, as it could not before, and what was sent to it meanwhile is lost.

        A leader sends it the log from where they agree; if nobody leads, there may be a majority now.
        """
        if self._driver is None:
            return
        node = self._driver.node
        if (leadership := node.leadership) is not None:
            if node_id in leadership.progress:
                self._run(lambda: leadership.follow(node_id))
        elif node_id in node.voters:
            self._run(node.hasten)

    @property
    def silence_ms(self) -> float:
        """For how long this node, which leads, has heard of no majority: another may have been elected since."""
        leadership = None if self._driver is None else self._driver.node.leadership
        return 0.0 if leadership is None else float(leadership.silence_ticks * TICK_MS)

    def leader_before(self) -> tuple[int, float] | None:
        """Another node that led before this one, and when it was last heard of, at the most two elections ago.

        No longer, because this node may have been held up itself: what is known is that a majority heard nothing.
        """
        if self._leader_heard is None:
            return None
        node_id, heard_ms = self._leader_heard
        elections_ms = 2 * self._settings.election_ticks * TICK_MS
        return node_id, max(heard_ms, self._clock.monotonic_ms() - elections_ms)

    @property
    def voters(self) -> Voters:
        """Who votes now, with addresses."""
        return {} if self._driver is None else self._driver.node.voters

    @property
    def votes(self) -> bool:
        """Whether this node may come to lead."""
        return self._driver is not None and self._driver.node.is_voter

    def follow(self, node_ids: Sequence[int]) -> None:
        """Nodes that are to be sent the log: they need not ask a new leader for it."""
        driver = self._driver
        if driver is not None and (leadership := driver.node.leadership) is not None:

            def begin() -> None:
                for node_id in node_ids:
                    if node_id not in leadership.progress:
                        leadership.follow(node_id)

            self._run(begin)

    def resign(self) -> bool:
        """Hand leadership to the voter that has most of the log; False when this node does not lead, or votes alone."""
        driver = self._driver
        if driver is None or (leadership := driver.node.leadership) is None:
            return False
        others = [voter for voter in leadership.voters if voter != self.node_id]
        if others:
            best = max(others, key=lambda voter: leadership.progress[voter].match)
            self._run(lambda: leadership.transfer(best))
        return bool(others)

    # -- what is known -------------------------------------------------------------------------------------------------

    @property
    def node(self) -> RaftNode | None:
        """The state machine, to look at; None while there is none."""
        return None if self._driver is None else self._driver.node

    @property
    def is_active(self) -> bool:
        """Whether this node leads, and has applied all that was in the log when it was elected."""
        return self._active_term is not None

    @property
    def leader(self) -> int | None:
        return None if self._driver is None else self._driver.node.leader

    @property
    def term(self) -> int:
        return 0 if self._driver is None else self._driver.node.term

    @property
    def end_offset(self) -> int:
        return self._log.log_end_offset

    @property
    def committed_offset(self) -> int:
        return self._applied_end if self._driver is None else self._driver.node.log.commit

    # -- the world, as the driver sees it ------------------------------------------------------------------------------

    def send(self, message: AnyMessage) -> None:
        self._post(message)

    def sync(self, ticket: SyncTicket) -> None:
        assert isinstance(ticket, DurableTicket)
        if self._driver is not None:  # else it broke in this very turn, and nobody waits for it
            assert not self._syncing, "one sync at a time"
            self._syncing = True
            self._sync(ticket, self._driver)

    def _sync(self, ticket: DurableTicket, driver: RaftDriver) -> None:
        """Run a ticket of a driver, which may be abandoned meanwhile: then no one is told, and the next may be made."""

        def synced(error: Exception | None) -> None:
            self._syncing = False
            if driver is self._driver:
                self._run(lambda: driver.synced(error))

        def written(error: Exception | None) -> None:
            if error is not None or driver is not self._driver:
                synced(error)
            else:
                self._flusher.request(self._log, synced)

        if driver is not self._driver:
            synced(None)
        elif not ticket.writes_state:
            self._flusher.request(self._log, synced)
        elif not self._flusher.submit(ticket.run, written):
            self._loop.call_later(TICK_MS / 1000, lambda: self._sync(ticket, driver))

    def apply(self, first: int, entries: list[Entry]) -> None:
        assert self._application is not None and self._driver is not None
        end = first + len(entries)
        fresh = entries[max(0, self._applied_end - first) :]  # a node made anew begins at its snapshot
        if not fresh:
            return
        self._applied_end = end
        self._bytes_since_snapshot += sum([entry.size for entry in fresh])
        data = [entry.data for entry in fresh if entry.kind == EntryKind.DATA]
        self._application.applied(end, data)
        node = self._driver.node
        if any(entry.kind == EntryKind.LEADER and entry.term == node.term for entry in fresh):
            self._elected_term = node.term
        if self._bytes_since_snapshot >= max(self._snapshot_bytes, self._last_snapshot_bytes):
            self._make_snapshot()

    def restore(self, meta: SnapshotMeta) -> None:
        assert self._application is not None and self._storage is not None
        if meta.end > self._applied_end:
            self._applied_end = meta.end
            body = self._storage.read_snapshot()
            self._last_snapshot_bytes = len(body)
            self._application.restored(meta.end, decode_snapshot(body, f"at {meta.end}"))

    def read_done(self, token: object, end: int | None) -> None:
        raise AssertionError("no reads are asked for")

    def _note_voters(self) -> None:
        voters = self.voters
        if voters and voters != self._told_voters:
            self._told_voters = voters
            self.on_voters(voters)

    def _note_role(self) -> None:
        """Tell the application whether it leads, when that changed."""
        node = self.node
        leading = (
            not self._closed
            and node is not None
            and node.leadership is not None
            and node.term == self._elected_term
        )
        term = node.term if leading and node is not None else None
        if term != self._active_term:
            was, self._active_term = self._active_term, term
            assert self._application is not None
            if was is not None:
                self._application.leads(False)
            if term is not None and self._active_term == term:
                self._application.leads(True)

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def _make_snapshot(self) -> None:
        """Write the state as of now, in the background; then drop the log below it."""
        driver, storage = self._driver, self._storage
        if (
            self._snapshotting
            or driver is None
            or storage is None
            or driver.node.log.applied != self._applied_end
        ):
            return
        assert self._application is not None
        body = encode_snapshot(self._application.snapshot(), self._clock.now_ms())
        ticket = storage.begin_snapshot(driver.node.snapshot_meta(self._applied_end), body)
        grown = self._bytes_since_snapshot

        def written(error: Exception | None) -> None:
            self._snapshotting = False
            if error is not None:  # the log still has everything; a later commit tries again
                logger.error("metadata snapshot failed", extra={"fields": {"why": str(error)}})
                return
            self._last_snapshot_bytes = len(body)
            self._bytes_since_snapshot -= grown
            if self._driver is driver and storage.finish_snapshot(ticket, KEEP_ENTRIES):
                driver.node.compacted()

        self._snapshotting = self._flusher.submit(ticket.run, written)
