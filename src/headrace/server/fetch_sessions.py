"""Incremental fetch sessions (KIP-227): what a client follows is kept here, so that it need not say it each time.

Pure: ids and the time are given. A session is a list of partitions with what was last sent of each; a reply holds
only those with records, an error or changed offsets. Partitions that were served go to the end of the list, so that a
small `max_bytes` cannot starve the others. At most `slots` sessions are kept: a new one takes the place of one that
has not been used for EVICTION_MS, of nobody else's. One whose last partition was forgotten ends, as in Kafka, and the
reply says so with session 0.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

from headrace.base.errors import ErrorCode, KafkaError
from headrace.wire.fetch import FetchPartition, FetchRequest, FetchResult

EVICTION_MS = 120_000
EPOCH_MAX = 2**31 - 1
INITIAL_EPOCH, FINAL_EPOCH = 0, -1
NO_SESSION = 0

Key: TypeAlias = tuple[str, bytes, int]
"""Topic name, topic id, partition: the one of name and id that the client does not use is empty."""


class _Sent(NamedTuple):
    """What the client last heard of a partition."""

    high_watermark: int
    last_stable_offset: int
    log_start_offset: int


_NOTHING_SENT = _Sent(-1, -1, -1)


class FetchSession:
    """The partitions one client follows."""

    __slots__ = ("_sent", "epoch", "id", "partitions", "used_ms", "uses_ids")

    def __init__(self, session_id: int, uses_ids: bool, now_ms: float) -> None:
        self.id = session_id
        self.epoch = 1
        self.uses_ids = uses_ids
        self.used_ms = now_ms
        self.partitions: OrderedDict[Key, FetchPartition] = OrderedDict()
        self._sent: dict[Key, _Sent] = {}

    def update(self, request: FetchRequest) -> None:
        """Take up what the request adds, changes and forgets."""
        for topic in request.topics:
            for partition in topic.partitions:
                self.partitions[(topic.name, topic.topic_id, partition.partition)] = partition
        for forgotten in request.forgotten:
            for index in forgotten.partitions:
                key = (forgotten.name, forgotten.topic_id, index)
                self.partitions.pop(key, None)
                self._sent.pop(key, None)

    def changed(self, key: Key, result: FetchResult) -> bool:
        """Whether the client has to hear of this result."""
        last = self._sent.get(key, _NOTHING_SENT)
        now = _Sent(result.high_watermark, result.last_stable_offset, result.log_start_offset)
        return (
            result.size > 0
            or result.error != ErrorCode.NONE
            or now != last
            or result.diverging is not None
            or result.preferred_read_replica != -1
        )

    def sent(self, key: Key, result: FetchResult) -> None:
        """Remember what goes out; a partition that got records waits its turn."""
        if result.error != ErrorCode.NONE:
            self._sent.pop(key, None)  # when it works again, the client hears of it whatever the offsets
        else:
            self._sent[key] = _Sent(result.high_watermark, result.last_stable_offset, result.log_start_offset)
        if result.size:
            self.partitions.move_to_end(key)


class FetchSessions:
    """All sessions of one broker, oldest use first."""

    def __init__(self, slots: int, new_id: Callable[[], int]) -> None:
        self._slots = slots
        self._new_id = new_id
        self._sessions: OrderedDict[int, FetchSession] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[FetchSession]:
        return iter(self._sessions.values())

    def open(self, request: FetchRequest, uses_ids: bool, now_ms: float) -> FetchSession | None:
        """The session of a request: a new one, the one it names, or None for a fetch without. Raises KafkaError."""
        if request.session_epoch in (INITIAL_EPOCH, FINAL_EPOCH):
            self._sessions.pop(request.session_id, None)
            if request.session_epoch == FINAL_EPOCH:
                return None
            return self._create(request, uses_ids, now_ms)
        session = self._sessions.get(request.session_id)
        if session is None:
            raise KafkaError(ErrorCode.FETCH_SESSION_ID_NOT_FOUND)
        if session.epoch != request.session_epoch:
            raise KafkaError(ErrorCode.INVALID_FETCH_SESSION_EPOCH)
        if session.uses_ids != uses_ids:
            raise KafkaError(ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR)
        session.update(request)
        if not session.partitions:
            del self._sessions[session.id]
            return None
        session.epoch = 1 if session.epoch == EPOCH_MAX else session.epoch + 1
        session.used_ms = now_ms
        self._sessions.move_to_end(session.id)
        return session

    def _create(self, request: FetchRequest, uses_ids: bool, now_ms: float) -> FetchSession | None:
        if not any(topic.partitions for topic in request.topics):
            return None
        if len(self._sessions) >= self._slots and not self._evict(now_ms):
            return None
        session_id = self._new_id()
        while session_id == NO_SESSION or session_id in self._sessions:
            session_id = self._new_id()
        session = FetchSession(session_id, uses_ids, now_ms)
        session.update(request)
        self._sessions[session_id] = session
        return session

    def _evict(self, now_ms: float) -> bool:
        for session in self._sessions.values():
            if now_ms - session.used_ms < EVICTION_MS:
                return False
            del self._sessions[session.id]
            return True
        return False
