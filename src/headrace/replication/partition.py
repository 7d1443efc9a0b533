"""A partition as this broker holds it: leader or follower, what may be read, and who waits for what.

Owns the role, the high watermark, what the leader knows of its followers, and three kinds of waiters: producers that
wait until an offset is safe, readers that wait until there is more to read, and deletions that wait for the followers.
Called by the handlers, by `serving` and `fetcher`, by the flusher's completions and with every image, all on the one
loop that owns it. Pure: the time is given, and who waits is told by a callback.

**What is safe.** The high watermark is the smallest log end of the *maximal ISR*: the leader, the ISR of the image, and
every replica that a proposal still under way would add. A controller may take such a proposal at any moment, and from
then on it may elect what it added; so a record counts only once that replica has it too. A proposal stops counting when
the partition epoch of the image moves on, because the controller takes none of an older epoch, and never by an answer:
a request that was sent twice may be refused the second time and taken the first. Where a topic wants a flush before
acknowledgement, an end counts as far as it is flushed; a follower with such a topic asks for the next offset only after
its own flush. The high watermark never goes back while the leader is in sync, and an election outside the ISR, which
the topic must allow, is the one thing that can undo it.

**Why a leader that was paused does no harm.** It wakes with a role that may be another's by now. With acks=all it
acknowledges what every replica of its ISR fetched from it under its own epoch. Either one of those has moved to a later
epoch, and fetches from it no more; or its ISR is itself alone, and then the controller elected nobody else, because
nobody else was in the ISR that the controller knows: a shrink counts only once it is in the image, so the leader's ISR
is never smaller than the controller's. What it serves to readers is below its high watermark, which the new leader has
as well. So there is no lease to expire, and reads and writes go on while no controller can be reached. With acks=1 a
record may be lost this way, which is what acks=1 means.

**The end that clients see.** A new leader knows the high watermark of its predecessor only as far as it was told. All
that was acknowledged lies below its own log end at the time it was elected, so until the high watermark has reached
that offset (`epoch_start`) it tells nobody where the log ends, as KIP-207 has it.
"""

from collections import deque
from collections.abc import Callable

from headrace.base.errors import ErrorCode, KafkaError
from headrace.cluster.image import PartitionRegistration
from headrace.cluster.partition_control import ANY_EPOCH, IsrProposal
from headrace.replication.follower import Follower
from headrace.replication.waiters import Done, Wake, after_both, fail, release
from headrace.storage.epochs import EpochEntry
from headrace.storage.log import Appended, LogSlice, PartitionLog
from headrace.storage.origin import Origin

READ_COMMITTED = 1
FLUSH_EVERY_BATCH = 1  # flush.messages at which nothing unflushed may be read
PROPOSAL_MS = 2_000
"""How long a proposal may be under way before it is made again."""
NO_FOLLOWERS: dict[int, Follower] = {}  # shared by all partitions without any: never changed
NOWHERE = -2
"""The node of a partition that no image was taken up for yet."""


class Partition:
    """One partition on this broker. As made, it leads alone; `take` says otherwise."""

    __slots__ = (
        "_acks",
        "_asked_ms",
        "_flushes",
        "_hoped",
        "_low_waiters",
        "_needed",
        "_readers",
        "bytes_out",
        "cut_off",
        "damaged_at",
        "epoch_start",
        "followers",
        "high_watermark",
        "index",
        "is_leader",
        "isr",
        "leader",
        "leader_epoch",
        "log",
        "node_id",
        "on_trouble",
        "partition_epoch",
        "replicas",
        "resigning",
        "topic",
        "topic_id",
    )

    def __init__(
        self,
        topic: str,
        topic_id: bytes,
        index: int,
        leader_epoch: int,
        log: PartitionLog,
        *,
        high_watermark: int | None = None,
    ) -> None:
        self.topic = topic
        self.topic_id = topic_id
        self.index = index
        self.log = log
        self.node_id = self.leader = NOWHERE
        self.is_leader = True
        self.leader_epoch = leader_epoch
        self.partition_epoch = -1
        self.replicas: tuple[int, ...] = (NOWHERE,)
        self.isr: tuple[int, ...] = (NOWHERE,)
        end = log.log_end_offset
        self.high_watermark = end if high_watermark is None else min(high_watermark, end)
        self.epoch_start = self.high_watermark
        """The log's end when this broker began to lead; the high watermark is not told before it reached this."""
        self.followers = NO_FOLLOWERS
        self.bytes_out = 0  # to consumers and followers
        self.resigning = False
        """This leader wants another to lead: its disk does not take what it should."""
        self.cut_off = False
        """Neither the controller nor a replica in sync is heard of: another may lead, so clients are sent to look."""
        self.damaged_at: int | None = None
        """An offset that the disk does not give back as it was: a leader resigns, a follower fetches it anew."""
        self.on_trouble: Callable[[Partition], None] = _ignore
        self._needed: tuple[Follower, ...] = ()  # of the maximal ISR, without the leader
        self._hoped: frozenset[int] = frozenset()  # replicas of proposals that may still come true
        self._asked_ms: float | None = None
        self._acks: deque[tuple[int, Done]] | None = None
        self._flushes: deque[tuple[int, Done]] | None = None
        self._readers: dict[Wake, None] | None = None
        self._low_waiters: list[Wake] | None = None

    # -- the role ------------------------------------------------------------------------------------------------------

    def take(self, registration: PartitionRegistration, node_id: int, now_ms: float) -> bool:
        """Be what the image says; whether the leader or its epoch changed."""
        before = (self.leader, self.leader_epoch, self.node_id)
        self.node_id = node_id
        self.replicas, self.isr = registration.replicas, registration.isr
        if registration.partition_epoch != self.partition_epoch:
            self.partition_epoch = registration.partition_epoch
            self._hoped = frozenset()
            self._asked_ms = None
        self.leader, self.leader_epoch = registration.leader, registration.leader_epoch
        if self.isr == (node_id,):
            self.resigning = False  # there is nobody to resign to; the next write that is refused tells again
        changed = before != (self.leader, self.leader_epoch, node_id)
        if self.leader == node_id:
            if changed:
                self._lead(now_ms, led_before=self.is_leader and before[2] != NOWHERE)
            self._know_followers(now_ms)
            self.advance()
        elif changed:
            self._step_back()
        return changed

    def _lead(self, now_ms: float, led_before: bool) -> None:
        self.is_leader = True
        self.resigning = self.cut_off = False
        end = self.log.log_end_offset
        if not led_before:
            self.epoch_start = end
        for follower in self.followers.values():
            self._refuse_follower(follower)
            follower.forget(now_ms)

    def _step_back(self) -> None:
        self.is_leader = False
        self.resigning = False
        self._needed = ()
        # An epoch in which this broker led and wrote nothing would look like records that no other has.
        self.log.epochs.truncate_from_end(self.log.log_end_offset)
        for follower in self.followers.values():
            self._refuse_follower(follower)
        self.followers = NO_FOLLOWERS
        self.fail_waiters(ErrorCode.NOT_LEADER_OR_FOLLOWER)

    def leave(self, error: ErrorCode) -> None:
        """The partition is no longer held here: nobody waits for it any more, and who did is told why."""
        self.is_leader = False
        self.leader = NOWHERE
        for follower in self.followers.values():
            self._refuse_follower(follower)
        self.followers, self._needed = NO_FOLLOWERS, ()
        self.fail_waiters(error)

    def _know_followers(self, now_ms: float) -> None:
        """Followers are the other replicas; those of the maximal ISR hold the high watermark."""
        if len(self.replicas) == 1 and not self.followers:
            self._needed = ()
            return
        if self.leader_epoch > self.log.epochs.latest_epoch:
            self.log.epochs.assign(self.leader_epoch, self.log.log_end_offset)
        for node_id in self.followers.keys() - set(self.replicas):
            self._refuse_follower(self.followers.pop(node_id))
        if self.followers is NO_FOLLOWERS:
            self.followers = {}
        for node_id in self.replicas:
            if node_id != self.node_id and node_id not in self.followers:
                self.followers[node_id] = Follower(node_id, self.topic_id, self.index, now_ms)
        self._count_needed()
        self._wake_low_waiters()

    def _count_needed(self) -> None:
        needed = self._hoped.union(self.isr)
        self._needed = tuple([f for f in self.followers.values() if f.node_id in needed])

    def _refuse_follower(self, follower: Follower) -> None:
        """What a follower waits for will not come as it asked: it hears why with the next reply."""
        if follower.watching and follower.session is not None:
            follower.refused = True
            follower.session.ready(follower)

    def check_leader(self) -> None:
        """Refuse what only the leader does."""
        if not self.is_leader:
            raise KafkaError(ErrorCode.NOT_LEADER_OR_FOLLOWER, f"the leader is node {self.leader}")

    def check_epoch(self, epoch: int) -> None:
        """Refuse a client whose idea of the leader is older or newer than ours; -1 asks for no check."""
        if epoch == -1 or epoch == self.leader_epoch:
            return
        if epoch < self.leader_epoch:
            raise KafkaError(
                ErrorCode.FENCED_LEADER_EPOCH, f"the leader epoch is {self.leader_epoch}, not {epoch}"
            )
        raise KafkaError(
            ErrorCode.UNKNOWN_LEADER_EPOCH, f"the leader epoch is {self.leader_epoch}, not yet {epoch}"
        )

    # -- the leader: appending -----------------------------------------------------------------------------------------

    def append(self, records: memoryview, now_ms: int) -> Appended:
        """Append what a producer sent. The caller then waits with `when_safe` or not, by its acks."""
        if not self.is_leader:
            self.check_leader()
        try:
            appended = self.log.append(records, leader_epoch=self.leader_epoch, now_ms=now_ms)
        except KafkaError as error:
            self.note_trouble(error)
            raise
        self.resigning = False  # there is room
        if not appended.duplicate:
            if self.followers:
                self._wake_followers(appended.first_offset)
            self.advance()
        return appended

    def append_from_coordinator(self, batches: bytes, now_ms: int) -> Appended:
        """Append what a coordinator of this broker wants stored. It waits with `when_safe`, always."""
        self.check_leader()
        try:
            appended = self.log.append(
                memoryview(batches), leader_epoch=self.leader_epoch, now_ms=now_ms, origin=Origin.COORDINATOR
            )
        except KafkaError as error:
            self.note_trouble(error)
            raise
        self._wake_followers(appended.first_offset)
        self.advance()
        return appended

    def note_trouble(self, error: KafkaError) -> None:
        """A write or a read that the disk refused: with others in sync, one of them should lead."""
        if error.code is ErrorCode.KAFKA_STORAGE_ERROR:
            self._resign()

    def _resign(self) -> None:
        if self.is_leader and not self.resigning and len(self.isr) > 1:
            self.resigning = True
            self.on_trouble(self)

    def note_damage(self, offset: int) -> None:
        """What lies at `offset` is not what was written."""
        if self.damaged_at is None and len(self.replicas) > 1:
            self.damaged_at = offset
            self.on_trouble(self)

    def _wake_followers(self, end_before: int) -> None:
        for follower in self.followers.values():
            if follower.watching:
                if follower.end_offset >= end_before:
                    follower.was_caught_up()
                follower.session.ready(follower)  # type: ignore[union-attr] # who watches has a session

    @property
    def min_insync(self) -> int:
        """How many replicas must be in sync for acks=all: what the topic asks for, or all it has."""
        return min(self.log.config.min_insync_replicas, len(self.replicas))

    def check_min_insync(self) -> None:
        """Refuse a produce with acks=all that fewer replicas would hold than the topic asks for, or that cannot end."""
        if self.cut_off:
            raise KafkaError(ErrorCode.NOT_LEADER_OR_FOLLOWER, "cut off from the cluster; another may lead")
        if len(self.isr) < self.min_insync:
            raise KafkaError(
                ErrorCode.NOT_ENOUGH_REPLICAS,
                f"{len(self.isr)} replicas are in sync and min.insync.replicas is {self.min_insync}",
            )

    def is_safe(self, offset: int, flushed: bool, replicated: bool) -> bool:
        """Whether all below `offset` is flushed and replicated, as far as each is asked for."""
        return (not flushed or self.log.flushed_offset >= offset) and (
            not replicated or self.high_watermark >= offset
        )

    def when_safe(self, offset: int, flushed: bool, replicated: bool, done: Done) -> None:
        """Call `done` once `is_safe` holds, or with an error when it never will."""
        assert not self.is_safe(offset, flushed, replicated), "nothing to wait for"
        if replicated and self.high_watermark < offset:
            if self._acks is None:
                self._acks = deque()
            if flushed and self.log.flushed_offset < offset:
                done = after_both(done)
            self._acks.append((offset, done))
        if flushed and self.log.flushed_offset < offset:
            if self._flushes is None:
                self._flushes = deque()
            self._flushes.append((offset, done))

    def advance(self) -> None:
        """Move the high watermark as far as it may go, and tell those who wait for it."""
        if not self.is_leader:
            return
        log = self.log
        flush_first = log.config.flush_messages == FLUSH_EVERY_BATCH
        limit = log.flushed_offset if flush_first else log.log_end_offset
        for follower in self._needed:
            if follower.end_offset < limit:
                limit = follower.end_offset
        if limit <= self.high_watermark:
            return
        self.high_watermark = limit
        if self._acks:
            error = ErrorCode.NONE
            if len(self.isr) < self.min_insync:
                error = ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND
            release(self._acks, limit, error)
        if self._readers:
            self.wake_readers()
        for follower in self.followers.values():
            if follower.watching:
                follower.session.stale(follower)  # type: ignore[union-attr]

    @property
    def wants_flush(self) -> bool:
        """Whether the high watermark waits for a flush: one that nobody asked for, as after a recovery."""
        log = self.log
        return log.config.flush_messages == FLUSH_EVERY_BATCH and log.flushed_offset < log.log_end_offset

    def on_flushed(self) -> None:
        """The log reports more on disk, or that it can no longer be trusted."""
        if self.log.failed:
            self.fail_waiters(ErrorCode.KAFKA_STORAGE_ERROR)
            self._resign()
            return
        release(self._flushes, self.log.flushed_offset, ErrorCode.NONE)
        self.advance()

    def fail_waiters(self, error: ErrorCode) -> None:
        """Answer all who wait: what they wait for will not come here."""
        fail(self._acks, error)
        fail(self._flushes, error)
        self._wake_low_waiters()
        self.wake_readers()

    def set_cut_off(self, alone: bool, now_ms: float, silence_ms: float) -> None:
        """`alone`: the controller is not heard of. If a replica in sync is not either, nothing can become safe here."""
        self.cut_off = alone and any(
            f.session is None or now_ms - f.session.used_ms > silence_ms for f in self._needed
        )
        if self.cut_off:
            fail(self._acks, ErrorCode.NOT_LEADER_OR_FOLLOWER)
            fail(self._flushes, ErrorCode.NOT_LEADER_OR_FOLLOWER)

    # -- the leader: its followers -------------------------------------------------------------------------------------

    def diverging(self, offset: int, last_epoch: int) -> EpochEntry | None:
        """Where a follower that ends at `offset`, written in `last_epoch`, has what this log does not; None if not."""
        if last_epoch < 0:  # an empty log; after an unclean election it may begin past this one's end
            end = self.log.log_end_offset
            return EpochEntry(self.log.epochs.latest_epoch, end) if offset > end else None
        epoch, end = self.log.epoch_end_offset(last_epoch)
        if epoch == -1 or end == -1:
            raise KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE, f"epoch {last_epoch} is not known here")
        return EpochEntry(epoch, end) if epoch < last_epoch or end < offset else None

    def follower_fetched(self, follower: Follower, offset: int, log_start: int, now_ms: float) -> None:
        """A follower asks for `offset`: it has all before it."""
        moved = log_start != follower.log_start_offset
        follower.fetched(offset, log_start, self.log.log_end_offset, now_ms)
        self.advance()
        if moved:
            self._wake_low_waiters()

    def may_join(self, follower: Follower, eligible: Callable[[int, int], bool]) -> bool:
        """Whether a follower outside the ISR has what it takes to be in it."""
        return (
            follower.node_id not in self.isr
            and follower.end_offset >= max(self.high_watermark, self.epoch_start)
            and eligible(follower.node_id, follower.broker_epoch)
        )

    def wants_change(self, now_ms: float, lag_max_ms: float, eligible: Callable[[int, int], bool]) -> bool:
        """Whether the ISR should be another than it is, or a proposal is left that should be settled."""
        if not self.is_leader or (self._asked_ms is not None and now_ms - self._asked_ms < PROPOSAL_MS):
            return False
        wanted = self._wanted_isr(now_ms, lag_max_ms, eligible)
        return set(wanted) != set(self.isr) or not self._hoped.issubset(self.isr)

    def propose(
        self, now_ms: float, lag_max_ms: float, eligible: Callable[[int, int], bool]
    ) -> IsrProposal | None:
        """What to ask the controller for; from here on the high watermark waits for it as if it were so."""
        if not self.wants_change(now_ms, lag_max_ms, eligible):
            return None
        wanted = self._wanted_isr(now_ms, lag_max_ms, eligible)
        self._hoped = self._hoped.union(wanted)
        self._count_needed()
        self._asked_ms = now_ms
        followers = self.followers
        isr = tuple(
            [(node, ANY_EPOCH if node in self.isr else followers[node].broker_epoch) for node in wanted]
        )
        return IsrProposal(self.topic_id, self.index, self.leader_epoch, self.partition_epoch, isr)

    def proposal_refused(self) -> None:
        """The controller did not take it, or did not answer: ask again. What it would add still counts."""
        self._asked_ms = None

    def _wanted_isr(
        self, now_ms: float, lag_max_ms: float, eligible: Callable[[int, int], bool]
    ) -> list[int]:
        end = self.log.log_end_offset if self.damaged_at is None else self.high_watermark  # nobody gets more
        wanted = []
        for node_id in self.replicas:
            if node_id == self.node_id:
                wanted.append(node_id)
                continue
            follower = self.followers[node_id]
            if node_id in self.isr:
                if follower.lag_ms(end, now_ms) <= lag_max_ms:
                    wanted.append(node_id)
            elif self.may_join(follower, eligible):
                wanted.append(node_id)
        if (self.resigning or self.damaged_at is not None) and set(wanted) & set(self.isr) - {self.node_id}:
            wanted.remove(self.node_id)  # who only joins by its word is none to lead yet
        return wanted

    # -- the follower --------------------------------------------------------------------------------------------------

    def append_from_leader(self, records: memoryview, now_ms: int) -> Appended:
        """Append what the leader sent, offsets and epochs as they are."""
        assert not self.is_leader, "a leader follows nobody"
        return self.log.append(records, leader_epoch=self.leader_epoch, now_ms=now_ms, origin=Origin.REPLICA)

    def hear_of(self, high_watermark: int, log_start: int) -> None:
        """The leader tells how far records are safe, and where its log begins."""
        log = self.log
        known = min(high_watermark, log.log_end_offset)
        if known > self.high_watermark:
            self.high_watermark = known
            if self._readers:
                self.wake_readers()
        start = min(log_start, self.high_watermark)
        if start > log.log_start_offset:
            log.delete_records(start)

    def truncate(self, offset: int) -> int:
        """Cut off what the leader does not have; the new log end."""
        end = self.log.truncate_to(offset)
        self.high_watermark = min(self.high_watermark, end)
        return end

    def start_over(self, offset: int) -> None:
        """Drop everything: the leader's log begins past the end of this one."""
        self.log.truncate_fully(offset)
        self.high_watermark = offset

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def end_is_known(self) -> bool:
        """Whether the high watermark is as high as any that a client may have seen."""
        return self.high_watermark >= self.epoch_start or not self.is_leader

    def last_stable_offset(self) -> int:
        """The end of what a read_committed reader may see."""
        first_unstable = self.log.producer_state.first_unstable_offset(self.high_watermark)
        if first_unstable is None:
            return self.high_watermark
        return min(max(first_unstable, self.log.log_start_offset), self.high_watermark)

    def read(self, offset: int, max_bytes: int, isolation: int, min_one_batch: bool) -> LogSlice:
        """Byte ranges from `offset` to the end of what the reader may see."""
        limit = self.last_stable_offset() if isolation == READ_COMMITTED else self.high_watermark
        try:
            return self.log.read(offset, max_bytes, max_offset=limit, min_one_batch=min_one_batch)
        except KafkaError as error:
            self.note_trouble(error)
            if error.code is ErrorCode.CORRUPT_MESSAGE:
                self.note_damage(offset)
            raise

    def aborted_in(self, offset: int, found: LogSlice) -> list[tuple[int, int]]:
        """(producer id, first offset) of the aborted transactions with records in what `read` gave from `offset` on."""
        return self.log.aborted_transactions(offset, found, self.last_stable_offset())

    def add_reader(self, wake: Wake) -> None:
        """Have `wake` called once when there may be more to read."""
        if self._readers is None:
            self._readers = {}
        self._readers[wake] = None

    def remove_reader(self, wake: Wake) -> None:
        if self._readers is not None:
            self._readers.pop(wake, None)

    def wake_readers(self) -> None:
        readers, self._readers = self._readers, None
        for wake in readers or ():
            wake()

    # -- deleting ------------------------------------------------------------------------------------------------------

    def delete_before(self, offset: int) -> int:
        """Move the log's start up to `offset`, which lies at or below the high watermark; the new start."""
        start = self.log.delete_records(offset)
        self.tell_log_start()
        return start

    def tell_log_start(self) -> None:
        """Followers that have not heard where the log begins are told."""
        for follower in self.followers.values():
            if follower.watching and follower.sent_log_start != self.log.log_start_offset:
                follower.session.ready(follower)  # type: ignore[union-attr]

    def low_watermark(self, alive: Callable[[int], bool]) -> int:
        """Where the log begins on the replica that keeps most, of those that are alive."""
        starts = [f.log_start_offset for f in self.followers.values() if alive(f.node_id)]
        return min([self.log.log_start_offset, *starts])

    def when_deleted(self, wake: Wake) -> None:
        """Have `wake` called whenever the low watermark may have moved, until `not_waiting`."""
        if self._low_waiters is None:
            self._low_waiters = []
        self._low_waiters.append(wake)

    def not_waiting(self, wake: Wake) -> None:
        """`wake` need not be called any more."""
        self._low_waiters = [waiter for waiter in self._low_waiters or () if waiter != wake] or None

    def _wake_low_waiters(self) -> None:
        for wake in list(self._low_waiters or ()):
            wake()


def _ignore(partition: Partition) -> None:
    """Trouble of a partition that nobody looks after."""
