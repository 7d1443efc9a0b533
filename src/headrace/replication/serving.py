"""What followers fetch from the leaders of this broker: one session for each follower, and a fetch that waits in it.

Owns the sessions. A follower *names* partitions in its fetches, with its position in each; what it named is watched
until something of it is sent, and then only after it was named again. So a fetch costs what moved, not what is
followed: neither side looks at a partition where nothing happened. Partitions tell their session of appends (`ready`,
which ends a wait) and of a high watermark that moved (`stale`, which goes along with the next reply). A wait ends at
the end of the loop's turn, so that a produce to many partitions is answered to a follower as one.

Invariants: one session for a follower, its newest; a reply of a session leaves before the next of it is served; a fetch
that comes while another waits ends that wait, so that a follower can always say something new at once. Sessions are
those of the protocol (KIP-227) seen from outside. Pure: time and the deferral to the end of the turn are given. Called
by `Replicas` for the Fetch handler.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol, TypeAlias

from headrace.base.errors import ErrorCode, KafkaError
from headrace.replication.follower import UNKNOWN_OFFSET, Follower
from headrace.replication.partition import Partition
from headrace.wire.fetch import FetchPartition, FetchRequest, FetchResult

INITIAL_EPOCH = 0
EPOCH_MAX = 2**31 - 1

Key: TypeAlias = tuple[bytes, int]


class FetchReply(NamedTuple):
    """A whole reply: an error of the session, or results by topic id."""

    error: ErrorCode
    session_id: int
    topics: list[tuple[bytes, list[FetchResult]]]


Reply: TypeAlias = Callable[[FetchReply], None]


class Host(Protocol):
    """What sessions ask of the broker's replicas."""

    def find(self, topic_id: bytes, index: int) -> Partition:
        """The partition, whatever its role, or KafkaError."""
        ...

    def follower_moved(self, partition: Partition, follower: Follower) -> None:
        """A follower that is not in sync asked for more."""
        ...

    def registered_epoch(self, node_id: int) -> int:
        """The epoch of a broker's registration, -1 when there is none."""
        ...

    def holds_back(self, partition: Partition, follower: Follower) -> bool:
        """Whether a follower has to wait, because others need the network more. `tick` looks again."""
        ...

    def sent(self, partition: Partition, follower: Follower, size: int) -> None:
        """Records went to a follower."""
        ...

    def suspect(self, partition: Partition, follower: Follower) -> None:
        """A follower asks again for what it was sent: that may be damaged, or the follower's disk not take it."""
        ...


class Session:
    """What one follower follows here."""

    __slots__ = (
        "_defer",
        "_deferred",
        "_errors",
        "_held",
        "_host",
        "_ready",
        "_stale",
        "_waiting",
        "eager",
        "epoch",
        "id",
        "keys",
        "max_bytes",
        "replica_epoch",
        "replica_id",
        "used_ms",
    )

    def __init__(
        self, session_id: int, replica_id: int, host: Host, defer: Callable[[Callable[[], None]], None]
    ) -> None:
        self.id = session_id
        self.epoch = INITIAL_EPOCH
        self.replica_id = replica_id
        self.replica_epoch = -1
        self.used_ms = 0.0
        self.max_bytes = 0
        self.eager = False
        """Whether a high watermark that moved is worth a reply of its own: consumers read from followers."""
        self.keys: dict[Key, Partition] = {}
        self._host = host
        self._defer = defer
        self._deferred = False
        self._ready: dict[Follower, None] = {}
        self._stale: dict[Follower, None] = {}
        self._errors: dict[Key, FetchResult] = {}
        self._held: dict[Follower, None] = {}
        self._waiting: Reply | None = None

    # -- what partitions tell ------------------------------------------------------------------------------------------

    def ready(self, follower: Follower) -> None:
        """See `follower.Watcher`."""
        self._ready[follower] = None
        if self._waiting is not None and not self._deferred:
            self._deferred = True
            self._defer(self._answer_deferred)

    def stale(self, follower: Follower) -> None:
        """See `follower.Watcher`."""
        if self.eager:
            self.ready(follower)
        else:
            self._stale[follower] = None

    def release_held(self) -> None:
        """Followers that a rate held back may be served by now."""
        held, self._held = self._held, {}
        for follower in held:
            self.ready(follower)

    def _answer_deferred(self) -> None:
        self._deferred = False
        if self._waiting is not None and (self._ready or self._errors):
            self.answer()

    # -- what the follower asks ----------------------------------------------------------------------------------------

    def take(self, request: FetchRequest, now_ms: float) -> None:
        """Take up what a fetch names and forgets."""
        self.used_ms = now_ms
        self.replica_epoch = request.replica_epoch
        self.max_bytes = request.max_bytes
        for topic in request.topics:
            for wanted in topic.partitions:
                self._name(topic.topic_id, wanted, now_ms)
        for forgotten in request.forgotten:
            for index in forgotten.partitions:
                self._forget((forgotten.topic_id, index))

    def _name(self, topic_id: bytes, wanted: FetchPartition, now_ms: float) -> None:
        key = (topic_id, wanted.partition)
        self._errors.pop(key, None)
        partition: Partition | None = None
        try:
            partition = self._host.find(topic_id, wanted.partition)
            partition.check_leader()
            partition.check_epoch(wanted.leader_epoch)
            follower = partition.followers.get(self.replica_id)
            if follower is None:
                raise KafkaError(ErrorCode.NOT_LEADER_OR_FOLLOWER, "it has no replica there")
            self.keys[key] = partition
            diverging = partition.diverging(wanted.offset, wanted.last_fetched_epoch)
            if diverging is not None:
                follower.unheard()
                self._errors[key] = FetchResult(
                    wanted.partition, ErrorCode.NONE, *_ends(partition), diverging=diverging
                )
                return
            log = partition.log
            if not log.log_start_offset <= wanted.offset <= log.log_end_offset:
                raise KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE)
        except KafkaError as error:
            ends = (-1, -1, -1) if partition is None else _ends(partition)
            self._errors[key] = FetchResult(wanted.partition, error.code, *ends)
            known = None if partition is None else partition.followers.get(self.replica_id)
            if known is not None and known.session is self:
                known.unheard()
            return
        asked_again = follower.session is self and not follower.watching and follower.offset == wanted.offset
        if asked_again and wanted.offset < log.log_end_offset:
            follower.asked_again += 1
            self._host.suspect(partition, follower)
        else:
            follower.asked_again = 0
        if follower.session is not self:  # whatever it was told in another session, it may never have heard
            follower.session = self
            follower.unheard()
        follower.watching = True
        follower.refused = False
        follower.offset = wanted.offset
        follower.max_bytes = wanted.max_bytes
        partition.follower_fetched(follower, wanted.offset, wanted.log_start_offset, now_ms)
        if follower.node_id not in partition.isr:
            self._host.follower_moved(partition, follower)
        if wanted.offset < log.log_end_offset or follower.sent_log_start != log.log_start_offset:
            self._ready[follower] = None
        elif follower.sent_high_watermark != partition.high_watermark:
            self._stale[follower] = None  # it moved while the follower was not watching

    def _forget(self, key: Key) -> None:
        self._errors.pop(key, None)
        partition = self.keys.pop(key, None)
        follower = None if partition is None else partition.followers.get(self.replica_id)
        if follower is not None and follower.session is self:
            follower.session, follower.watching = None, False
            self._ready.pop(follower, None)
            self._stale.pop(follower, None)
            self._held.pop(follower, None)

    @property
    def has_news(self) -> bool:
        """Whether there is something that a fetch does not wait for."""
        return bool(self._ready or self._errors)

    def wait(self, reply: Reply) -> None:
        """Answer through `reply` when there is something, or when `answer` is called."""
        assert self._waiting is None, "a follower waits once"
        self._waiting = reply

    def is_waiting(self, reply: Reply) -> bool:
        """Whether this very fetch still waits."""
        return self._waiting == reply

    def leave(self) -> None:
        """Whoever waits is gone."""
        self._waiting = None

    def answer(self) -> None:
        """Answer the fetch that waits, with what there is."""
        reply, self._waiting = self._waiting, None
        if reply is not None:
            reply(self.gather())

    def close(self) -> None:
        """The follower began another session."""
        for key in list(self.keys):
            self._forget(key)
        reply, self._waiting = self._waiting, None
        if reply is not None:
            reply(FetchReply(ErrorCode.FETCH_SESSION_ID_NOT_FOUND, 0, []))

    # -- what it is told -----------------------------------------------------------------------------------------------

    def gather(self) -> FetchReply:
        """All there is to tell now, within the limits; the rest stays for the next."""
        topics: dict[bytes, list[FetchResult]] = {}
        for (topic_id, _), result in self._errors.items():
            topics.setdefault(topic_id, []).append(result)
        self._errors = {}
        ready, self._ready = self._ready, {}
        left = self.max_bytes
        empty = True
        for follower in ready:
            self._stale.pop(follower, None)
            if not follower.watching or follower.session is not self:
                continue
            if left <= 0:
                self._ready[follower] = None
                continue
            found = self._read(follower, left, empty)
            if found is None:
                continue
            if found.size:
                left -= found.size
                empty = False
            topics.setdefault(follower.topic_id, []).append(found)
        stale, self._stale = self._stale, {}
        for follower in stale:
            if follower.watching and follower.session is self and follower not in self._ready:
                told = self._tell(follower)
                if told is not None:
                    topics.setdefault(follower.topic_id, []).append(told)
        return FetchReply(ErrorCode.NONE, self.id, list(topics.items()))

    def _read(self, follower: Follower, left: int, first: bool) -> FetchResult | None:
        """Records for a follower, or why there are none; None when there is nothing to say, or no room for it."""
        partition = self.keys.get((follower.topic_id, follower.partition_index))
        if partition is None:
            return None  # of an earlier leadership, and forgotten since
        if follower.refused:
            follower.watching = False
            now = partition.followers.get(self.replica_id)
            if now is not None and now.session is self and now is not follower:
                return None  # it has named the partition under the next epoch since
            code = ErrorCode.FENCED_LEADER_EPOCH if partition.is_leader else ErrorCode.NOT_LEADER_OR_FOLLOWER
            return FetchResult(follower.partition_index, code)
        log = partition.log
        if follower.offset < log.log_end_offset and self._host.holds_back(partition, follower):
            self._held[follower] = None
            return self._tell(follower)
        try:
            piece = log.read(
                follower.offset,
                min(left, follower.max_bytes),
                max_offset=log.log_end_offset,
                min_one_batch=first,
            )
        except KafkaError as error:
            partition.note_trouble(error)
            follower.watching = False
            follower.offset = UNKNOWN_OFFSET  # it was sent nothing: to ask again is no sign of trouble there
            return FetchResult(follower.partition_index, error.code, *_ends(partition))
        if not piece.size:
            if follower.offset < log.log_end_offset and not first:
                self._ready[follower] = None
                return None
            return self._tell(follower)
        follower.watching = False
        partition.bytes_out += piece.size
        self._host.sent(partition, follower, piece.size)
        ends = _note(partition, follower)
        return FetchResult(
            follower.partition_index, ErrorCode.NONE, *ends, ranges=piece.ranges, size=piece.size
        )

    def _tell(self, follower: Follower) -> FetchResult | None:
        """Offsets alone; the follower need not name the partition again for that."""
        partition = self.keys.get((follower.topic_id, follower.partition_index))
        if partition is None:
            return None
        log = partition.log
        if (
            follower.sent_high_watermark == partition.high_watermark
            and follower.sent_log_start == log.log_start_offset
        ):
            return None
        return FetchResult(follower.partition_index, ErrorCode.NONE, *_note(partition, follower))


class Sessions:
    """The sessions of all followers."""

    def __init__(self, host: Host, defer: Callable[[Callable[[], None]], None]) -> None:
        self._host = host
        self._defer = defer
        self._sessions: dict[int, Session] = {}  # one for each follower
        self._last_id = 0
        self.eager = False

    def fetch(self, request: FetchRequest, now_ms: float, reply: Reply) -> Session | None:
        """Serve a follower's fetch; the session in which it waits, None when it was answered."""
        error = ErrorCode.NONE
        session = self._sessions.get(request.replica_id)
        if request.replica_epoch < self._host.registered_epoch(request.replica_id):
            error = ErrorCode.STALE_BROKER_EPOCH
        elif request.session_epoch <= INITIAL_EPOCH:
            session = self._begin(request)
        elif session is None or session.id != request.session_id:
            error = ErrorCode.FETCH_SESSION_ID_NOT_FOUND
        elif session.epoch != request.session_epoch:
            error = ErrorCode.INVALID_FETCH_SESSION_EPOCH
        if error is not ErrorCode.NONE or session is None:
            reply(FetchReply(error, 0, []))
            return None
        session.epoch = 1 if session.epoch == EPOCH_MAX else session.epoch + 1
        session.eager = self.eager
        session.answer()  # to the fetch before this one, if it still waits
        session.take(request, now_ms)
        if session.has_news or request.max_wait_ms <= 0:
            reply(session.gather())
            return None
        session.wait(reply)
        return session

    def _begin(self, request: FetchRequest) -> Session:
        before = self._sessions.pop(request.replica_id, None)
        if before is not None:
            before.close()
        self._last_id = self._last_id % EPOCH_MAX + 1
        session = Session(self._last_id, request.replica_id, self._host, self._defer)
        self._sessions[request.replica_id] = session
        return session

    def release_held(self) -> None:
        """Time has passed for followers that a rate held back."""
        for session in self._sessions.values():
            session.release_held()

    def keep_only(self, node_ids: Iterable[int]) -> None:
        """Brokers that are not registered any more follow nothing."""
        for node_id in self._sessions.keys() - set(node_ids):
            self._sessions.pop(node_id).close()


def _ends(partition: Partition) -> tuple[int, int, int]:
    return partition.high_watermark, partition.high_watermark, partition.log.log_start_offset


def _note(partition: Partition, follower: Follower) -> tuple[int, int, int]:
    ends = _ends(partition)
    follower.sent_high_watermark, follower.sent_log_start = ends[0], ends[2]
    return ends
