"""One node's time as leader of one term: replication, commitment, heartbeats, reads, transfer.

Owns the progress of every follower and observer, and ends with the term or when the node steps down. Invariants: an
entry counts as committed only when a majority of the voters *in force* has it on disk and it is of this very term (the
ones before it are committed with it); the leader counts itself only for what is on its own disk, and not at all once it
is no voter; a read is released only after a majority has confirmed this leader since the read came. Everything sent
here may leave before the leader's own disk has it, because no promise of the leader's is in it. Owned by `RaftNode`.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from headrace.base.errors import ErrorCode
from headrace.consensus.raft.log import RaftLog
from headrace.consensus.raft.membership import Membership
from headrace.consensus.raft.messages import (
    AnyMessage,
    Append,
    AppendReply,
    Entry,
    EntryKind,
    Heartbeat,
    HeartbeatReply,
    SnapshotChunk,
    SnapshotReply,
    TransferNow,
    Voters,
    encode_voters,
)
from headrace.consensus.raft.progress import Mode, Progress
from headrace.consensus.raft.quorum import agreed_end, reached
from headrace.consensus.raft.ready import Read
from headrace.consensus.raft.refusal import Refused
from headrace.consensus.raft.settings import RaftSettings


class _WaitingRead(Struct):
    """A read that waits for heartbeat `round` to be answered by a majority; `end` is what it will see."""

    token: object
    end: int
    round: int


class Leadership:
    """See the module."""

    def __init__(
        self,
        node_id: int,
        term: int,
        log: RaftLog,
        membership: Membership,
        settings: RaftSettings,
        outbox: list[AnyMessage],
        tick: int,
    ) -> None:
        self.id: Final = node_id
        self.term: Final = term
        self._log = log
        self._membership = membership
        self._settings = settings
        self._outbox = outbox
        self._now = tick
        self._heartbeat_elapsed = 0
        self._quorum_elapsed = 0
        self._round = 0
        self._round_due = False
        self.progress: dict[int, Progress] = {}
        self.transferee: int | None = None
        self._transfer_elapsed = 0
        self._early_reads: list[object] = []  # came before this term had committed anything
        self._waiting_reads: deque[_WaitingRead] = deque()
        self._reads: list[Read] = []  # decided, to be taken
        self.members_changed()

    # -- who is sent to --------------------------------------------------------------------------------------

    @property
    def voters(self) -> Voters:
        return self._membership.voters

    def members_changed(self) -> None:
        """Other voters are in force. Those who vote no more are sent to as observers, and learn of it that way."""
        for voter in self.voters:
            if voter != self.id and voter not in self.progress:
                self.progress[voter] = Progress(self._settings, self._log.end, self._now)

    def follow(self, node: int) -> None:
        """A node asks to be sent the log."""
        if node == self.id:
            return  # it asked before it was elected
        progress = self.progress.get(node)
        if progress is None:
            if len(self.progress) >= self._settings.replicas_max:
                return  # it asks again; those that went silent are forgotten by then
            progress = self.progress[node] = Progress(self._settings, self._log.end, self._now)
        else:
            progress.probe(progress.match)  # it heard nothing for long: what was under way is lost
        self._heard(progress)
        self.replicate(node)

    # -- time ------------------------------------------------------------------------------------------------

    def tick(self, tick: int) -> bool:
        """Time passes. False when a majority has not been heard of for an election timeout: this leader is none."""
        self._now = tick
        self._quorum_elapsed += 1
        self._heartbeat_elapsed += 1
        if self.transferee is not None:
            self._transfer_elapsed += 1
            if self._transfer_elapsed >= self._settings.election_ticks:
                self.transferee = None  # it did not happen; go on
        if self._quorum_elapsed >= self._settings.election_ticks:
            self._quorum_elapsed = 0
            if not self._quorum_is_active():
                return False
            self._forget_silent_observers()
        if self._heartbeat_elapsed >= self._settings.heartbeat_ticks:
            self.send_heartbeats()
        return True

    def _quorum_is_active(self) -> bool:
        heard = [self.id]
        for node, progress in self.progress.items():
            if progress.active:
                heard.append(node)
                progress.active = False
        return reached(self.voters, heard)

    @property
    def silence_ticks(self) -> int:
        """For how long no majority of the voters was heard of; 0 as long as their heartbeats come as they should."""
        heard = [self._now if voter == self.id else self.progress[voter].heard_tick for voter in self.voters]
        silence = self._now - sorted(heard, reverse=True)[len(heard) // 2]
        return silence if silence > 2 * self._settings.heartbeat_ticks else 0

    def _forget_silent_observers(self) -> None:
        limit = self._now - self._settings.observer_ticks
        for node in [node for node, progress in self.progress.items() if progress.heard_tick < limit]:
            if node not in self.voters:
                del self.progress[node]

    def _heard(self, progress: Progress) -> None:
        progress.active = True
        progress.heard_tick = self._now

    def send_heartbeats(self) -> None:
        """Tell everyone that this leader is there, and ask them to say the same."""
        self._heartbeat_elapsed = 0
        self._round += 1
        self._round_due = False
        commit, term = self._log.commit, self.term
        for node, progress in self.progress.items():
            progress.commit_sent = min(progress.match, commit)
            self._outbox.append(Heartbeat(node, self.id, term, progress.commit_sent, self._round))
        self._release_reads()

    def on_heartbeat_reply(self, message: HeartbeatReply) -> None:
        progress = self.progress.get(message.sender)
        if progress is None:
            return
        self._heard(progress)
        progress.round = max(progress.round, message.round)
        if progress.mode is not Mode.REPLICATE:
            progress.waiting = False  # whatever was under way had its time: once more
        elif progress.has_inflight and not progress.moved:
            # Appends may be lost, or their replies. This one carries nothing; the reply tells which.
            self._send_append(message.sender, progress, [])
        progress.moved = False
        self.replicate(message.sender)
        self._release_reads()

    # -- the log ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Append the first entry of the term."""
        self._append(EntryKind.LEADER, [encode_voters(self.voters)])

    def propose(self, entries: Sequence[bytes]) -> int:
        """See `RaftNode.propose`."""
        settings, log = self._settings, self._log
        if any(len(data) > settings.entry_bytes_max for data in entries):
            raise Refused(
                ErrorCode.MESSAGE_TOO_LARGE, f"an entry is larger than {settings.entry_bytes_max} bytes"
            )
        if log.end - log.commit + len(entries) > settings.uncommitted_entries_max:
            raise Refused(
                ErrorCode.THROTTLING_QUOTA_EXCEEDED,
                f"{log.end - log.commit} entries wait to be committed, {settings.uncommitted_entries_max} may",
            )
        return self._append(EntryKind.DATA, entries)

    def add_voter(self, voter: int, address: str) -> int:
        """See `RaftNode.add_voter`."""
        if voter in self.voters:
            raise Refused(ErrorCode.DUPLICATE_VOTER, f"node {voter} votes already")
        self._check_change()
        progress = self.progress.get(voter)
        if progress is None or progress.match < self._log.commit:
            raise Refused(ErrorCode.REQUEST_TIMED_OUT, f"node {voter} does not have the log yet")
        return self._append(EntryKind.VOTERS, [encode_voters({**self.voters, voter: address})])

    def remove_voter(self, voter: int) -> int:
        """See `RaftNode.remove_voter`."""
        if voter not in self.voters:
            raise Refused(ErrorCode.VOTER_NOT_FOUND, f"node {voter} does not vote")
        self._check_change()
        if len(self.voters) == 1:
            raise Refused(ErrorCode.INVALID_REQUEST, f"node {voter} is the only voter")
        left = {node: address for node, address in self.voters.items() if node != voter}
        return self._append(EntryKind.VOTERS, [encode_voters(left)])

    def can_spare(self, voter: int) -> bool:
        """Whether a majority of the other voters answered a heartbeat of the last election timeout."""
        left = [node for node in self.voters if node != voter]
        rounds = self._settings.election_ticks // self._settings.heartbeat_ticks
        since = max(1, self._round - rounds)
        heard = [node for node, progress in self.progress.items() if progress.round >= since]
        return reached(left, [self.id, *heard])

    def _check_change(self) -> None:
        if self._membership.changed_end > self._log.commit or not self.has_committed:
            raise Refused(
                ErrorCode.REQUEST_TIMED_OUT, "the change of voters before this one is not committed yet"
            )

    def _append(self, kind: EntryKind, entries: Sequence[bytes]) -> int:
        index = self._log.end
        made = [Entry(self.term, data, kind) for data in entries]
        self._log.append(made)
        if kind is not EntryKind.DATA:
            self._membership.follow(index, made[0])
            self.members_changed()
        self.broadcast()
        return self._log.end

    # -- replication -----------------------------------------------------------------------------------------

    def broadcast(self) -> None:
        """Send everyone what they lack, as far as the bounds allow."""
        for node in self.progress:
            self.replicate(node)

    def replicate(self, node: int) -> None:
        """Send one node what it lacks, as far as the bounds allow."""
        progress = self.progress[node]
        log, settings = self._log, self._settings
        while progress.may_send:
            if progress.mode is Mode.SNAPSHOT or not self._has_entries_from(progress.next):
                self._send_chunk(node, progress)
                return
            entries = log.entries(progress.next, log.end, settings.append_bytes_max)
            if not entries and (progress.mode is Mode.REPLICATE):
                return
            self._send_append(node, progress, entries)

    def _has_entries_from(self, index: int) -> bool:
        return index >= self._log.start and self._log.term_before(index) is not None

    def _send_append(self, node: int, progress: Progress, entries: list[Entry]) -> None:
        log, start = self._log, progress.next
        prev_term = log.term_before(start)
        if prev_term is None:  # compacted since it was sent
            progress.probe(progress.match)
            return
        end = start + len(entries)
        self._outbox.append(
            Append(node, self.id, self.term, start, prev_term, log.commit, entries, progress.attempt)
        )
        progress.commit_sent = max(progress.commit_sent, min(log.commit, end))
        if entries or progress.mode is Mode.PROBE:
            progress.sent(end, sum([entry.size for entry in entries]))

    def _send_chunk(self, node: int, progress: Progress) -> None:
        meta = self._log.snapshot
        if progress.mode is not Mode.SNAPSHOT or progress.snapshot_end != meta.end:
            progress.send_snapshot(meta.end)
        position = progress.snapshot_position
        data, last = self._log.read_chunk(position, self._settings.chunk_bytes_max)
        self._outbox.append(
            SnapshotChunk(node, self.id, self.term, meta.end, meta.term, meta.voters, position, data, last)
        )
        progress.waiting = True

    def on_append_reply(self, message: AppendReply) -> bool:
        """Whether more is committed by this reply."""
        progress = self.progress.get(message.sender)
        if progress is None:
            return False
        self._heard(progress)
        if not message.accepted:
            self._backtrack(message, progress)
            self.replicate(message.sender)
            return False
        news = progress.accepted(message.end, message.attempt)
        if progress.match >= self._log.end:
            progress.caught_up_tick = self._now
        committed = news and self.advance_commit()
        self.replicate(message.sender)
        if committed:
            self.tell_commit()
        else:
            self._tell_commit(message.sender, progress)
        if message.sender == self.transferee:
            self._transfer_if_caught_up()
        return committed

    def _backtrack(self, message: AppendReply, progress: Progress) -> None:
        """An append did not fit: go back to where the two logs may agree, a term at a time."""
        if message.attempt != progress.attempt:
            return  # one of many that were under way when the first refusal came
        if progress.mode is Mode.REPLICATE:
            progress.probe(progress.match)
        elif progress.mode is Mode.PROBE:
            if progress.next == progress.match and message.end < progress.match:
                # It lacks what it had acknowledged: its disk was replaced by an empty one. It cannot be believed about
                # the past, but it can be sent the log, which serves the cluster better than to leave it without.
                progress.forget(message.end)
            end = self._log.end_of_term(message.last_term, message.end)
            progress.probe(min(end, progress.next - 1))

    def on_snapshot_reply(self, message: SnapshotReply) -> None:
        progress = self.progress.get(message.sender)
        if progress is None:
            return
        self._heard(progress)
        if progress.mode is not Mode.SNAPSHOT or message.end != progress.snapshot_end:
            return
        # Only what moves on is answered at once: a reply that came twice must not bring forth two chunks, those four.
        # One that lost what it had is sent the beginning when it has answered a heartbeat.
        further = message.position > progress.snapshot_position
        progress.snapshot_position = message.position
        if further:
            progress.waiting = False
            self.replicate(message.sender)

    # -- commitment ------------------------------------------------------------------------------------------

    def advance_commit(self) -> bool:
        """Commit what a majority has; whether that is more than before."""
        log = self._log
        end = agreed_end([self._stored_end(voter) for voter in self.voters])
        if end <= log.commit or not self._counts(end):
            return False
        log.commit_to(end)
        for token in self._early_reads:
            self._enqueue_read(token)
        self._early_reads.clear()
        return True

    def tell_commit(self) -> None:
        """Let everyone know how far the log is committed, who has not been told with an append."""
        for node, progress in self.progress.items():
            self._tell_commit(node, progress)

    def _counts(self, end: int) -> bool:
        """Whether a majority that has the log to `end` commits it: an older leader's entry may yet be replaced."""
        return self._log.term_before(end) == self.term

    def _stored_end(self, voter: int) -> int:
        """How far a voter has the log on its disk."""
        return self._log.durable_end if voter == self.id else self.progress[voter].match

    def _tell_commit(self, node: int, progress: Progress) -> None:
        """Let a follower apply at once what it has and does not know to be committed."""
        commit = min(progress.match, self._log.commit)
        if commit > progress.commit_sent:
            progress.commit_sent = commit
            self._outbox.append(Heartbeat(node, self.id, self.term, commit, 0))

    @property
    def has_committed(self) -> bool:
        """Whether an entry of this term is committed, and so everything that any leader before may have committed."""
        return self._log.term_before(self._log.commit) == self.term

    # -- reads -----------------------------------------------------------------------------------------------

    def read(self, token: object) -> None:
        """Release `token` with the end that a linearizable read must see, once a majority confirms this leader."""
        if len(self._early_reads) + len(self._waiting_reads) >= self._settings.reads_max:
            raise Refused(ErrorCode.THROTTLING_QUOTA_EXCEEDED, "too many reads wait for a majority")
        if not self.has_committed:
            self._early_reads.append(token)
            return
        self._enqueue_read(token)

    def _enqueue_read(self, token: object) -> None:
        # An answer to the round before may be older than this read, though it has not come yet.
        self._waiting_reads.append(_WaitingRead(token, self._log.commit, self._round + 1))
        self._round_due = True

    def _release_reads(self) -> None:
        waiting = self._waiting_reads
        while waiting:
            heard = [node for node, progress in self.progress.items() if progress.round >= waiting[0].round]
            if not reached(self.voters, [self.id, *heard]):
                return
            read = waiting.popleft()
            self._reads.append(Read(read.token, read.end))

    def take_reads(self) -> list[Read]:
        """Reads that are decided. Begins the round of heartbeats that others wait for: one for all of a turn."""
        if self._round_due:
            self.send_heartbeats()
        reads, self._reads = self._reads, []
        return reads

    def drop_reads(self) -> list[Read]:
        """This leadership is over: what it has decided, and the rest as lost."""
        lost = [*self._early_reads, *[read.token for read in self._waiting_reads]]
        return self._reads + [Read(token, None) for token in lost]

    # -- transfer --------------------------------------------------------------------------------------------

    def transfer(self, to: int) -> None:
        """Hand over to a voter: let it catch up, then ask it to stand for election. Proposals wait meanwhile."""
        if to not in self.voters:
            raise Refused(ErrorCode.VOTER_NOT_FOUND, f"node {to} does not vote")
        if to == self.id:
            return
        self.transferee = to
        self._transfer_elapsed = 0
        self._transfer_if_caught_up()
        self.replicate(to)

    def _transfer_if_caught_up(self) -> None:
        to = self.transferee
        if to is not None and self.progress[to].match >= self._log.end:
            self._outbox.append(TransferNow(to, self.id, self.term))

    def hand_over(self) -> None:
        """This leader is no voter any more: ask the one that has most of the log to be elected at once."""
        best = max(self.voters, key=lambda voter: (self.progress[voter].match, -voter))
        self._outbox.append(TransferNow(best, self.id, self.term))
