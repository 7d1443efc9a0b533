"""Following one leader broker: all partitions that it leads and this broker has a replica of, in one fetch session.

Owns, for each of these partitions, what the leader has been told of it. A partition is *due* when its position is to be
told (it is new, records were appended, it was cut), and *named* from the fetch that tells it until the leader sends
something of it. Invariants: what comes back is applied only if the partition was not told anew meanwhile, so a reply
that an election has overtaken changes nothing; records are appended in the order of replies, at the end of the log; the
next offset is asked for only after the records before it are in the log and, where the topic wants a flush before
acknowledgement, on disk, because to the leader the question is the acknowledgement.

Divergence. Every fetch carries the epoch of the last record here. A leader that has another history answers with the
largest epoch both may share and where it ends there; the log is cut to what both have, and the next fetch tells the
rest. The cut is never a guess from the high watermark, which may be too low here.

One fetch is under way as a rule, and waits at the leader. When something becomes due meanwhile, a second one tells it,
and ends the wait of the first. A loss of the connection or the session begins a new session with everything due.

Pure: time is given, requests are taken with `request` and sent by someone else. Called by `Replicas`.
"""

from collections.abc import Callable
from typing import TypeAlias

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.log import get_logger
from headrace.records.batch import parse_header
from headrace.replication.partition import Partition
from headrace.replication.serving import EPOCH_MAX, FetchReply
from headrace.storage.epochs import UNDEFINED_EPOCH
from headrace.wire.fetch import FetchPartition, FetchRequest, FetchResult, FetchTopic, ForgottenTopic

Key: TypeAlias = tuple[bytes, int]

UNDER_WAY_MAX = 2
MIN_BYTES = 1  # whatever there is: a producer may be waiting for it
BACKOFF_MS = 50
"""After an error of one partition; most are an image that has not reached the other side yet."""
STORAGE_BACKOFF_MS = 1_000
"""After a write that the disk would not take."""
LOST_BACKOFF_MS = 100

logger = get_logger(__name__)


class FetchLimits:
    """How much a fetch asks for, and how long it waits."""

    __slots__ = ("max_bytes", "max_wait_ms", "partition_max_bytes")

    def __init__(self, max_wait_ms: int, max_bytes: int, partition_max_bytes: int) -> None:
        self.max_wait_ms = max_wait_ms
        self.max_bytes = max_bytes
        self.partition_max_bytes = partition_max_bytes


class _Followed:
    """One partition, and what the leader knows of it."""

    __slots__ = ("failures", "leader_epoch", "named_in", "partition")

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.leader_epoch = partition.leader_epoch
        self.named_in = -1  # the number of the fetch that named it last
        self.failures = 0


class Fetcher:
    """The fetch session with one leader broker."""

    def __init__(
        self,
        leader: int,
        limits: FetchLimits,
        flush: Callable[[Partition], None],
        truncated: Callable[[Partition], None],
        *,
        holds_back: Callable[[Partition], bool] = lambda partition: False,
        received: Callable[[Partition, int], None] = lambda partition, size: None,
    ) -> None:
        """`flush` is asked for what the topic wants flushed, `truncated` is told before the log grows again;
        `holds_back` and `received` serve a throttle."""
        self.leader = leader
        self.limits = limits
        self._flush = flush
        self._truncated = truncated
        self._holds_back = holds_back
        self._received = received
        self._followed: dict[Key, _Followed] = {}
        self._due: dict[Key, None] = {}
        self._later: dict[Key, float] = {}
        self._flushing: dict[Key, int] = {}
        self._forgotten: list[Key] = []
        self._session_id = 0
        self._session_epoch = 0
        self._sent = 0
        self._under_way: list[int] = []
        self._not_before_ms = 0.0

    def __len__(self) -> int:
        return len(self._followed)

    # -- which partitions ----------------------------------------------------------------------------------------------

    def add(self, partition: Partition) -> None:
        """Follow a partition, from its log's end on; anew if it is followed already."""
        key = (partition.topic_id, partition.index)
        self._followed[key] = _Followed(partition)
        self._flushing.pop(key, None)
        self._later.pop(key, None)
        self._tell_when_safe(key, partition)

    def remove(self, topic_id: bytes, index: int) -> None:
        """Follow it no longer."""
        key = (topic_id, index)
        if self._followed.pop(key, None) is not None:
            self._due.pop(key, None)
            self._later.pop(key, None)
            self._flushing.pop(key, None)
            if self._session_epoch:
                self._forgotten.append(key)

    def flushed(self, partition: Partition) -> None:
        """More of a partition's log is on disk: perhaps all that was waited for."""
        key = (partition.topic_id, partition.index)
        wanted = self._flushing.get(key)
        if wanted is not None and partition.log.flushed_offset >= wanted:
            del self._flushing[key]
            self._due[key] = None

    # -- asking --------------------------------------------------------------------------------------------------------

    def wake_ms(self) -> float | None:
        """When `request` should be asked again though nothing happened; None: not before something does."""
        if self._not_before_ms:
            return self._not_before_ms if self._followed else None
        return min(self._later.values()) if self._later else None

    def request(self, now_ms: float, broker_id: int, broker_epoch: int) -> tuple[int, FetchRequest] | None:
        """The next fetch to send, with its number; None when there is nothing to say now."""
        if now_ms < self._not_before_ms or not self._followed:
            return None
        for key in [key for key, at_ms in self._later.items() if at_ms <= now_ms]:
            del self._later[key]
            self._due[key] = None
        if self._under_way and (
            not self._due or not self._session_epoch or len(self._under_way) >= UNDER_WAY_MAX
        ):
            return None
        self._not_before_ms = 0.0
        number = self._sent = self._sent + 1
        topics: dict[bytes, list[FetchPartition]] = {}
        held_back: list[Key] = []
        for key in self._due:
            followed = self._followed[key]
            if self._holds_back(followed.partition):
                held_back.append(key)
                continue
            followed.named_in = number
            topics.setdefault(key[0], []).append(self._position(followed))
        self._due = {}
        for key in held_back:
            self._later[key] = now_ms + BACKOFF_MS
        forgotten: dict[bytes, list[int]] = {}
        for topic_id, index in self._forgotten:
            if (topic_id, index) not in self._followed:
                forgotten.setdefault(topic_id, []).append(index)
        self._forgotten = []
        self._under_way.append(number)
        limits = self.limits
        request = FetchRequest(
            broker_id,
            broker_epoch,
            limits.max_wait_ms,
            MIN_BYTES,
            limits.max_bytes,
            0,
            self._session_id,
            self._session_epoch,
            [FetchTopic("", topic_id, partitions) for topic_id, partitions in topics.items()],
            [ForgottenTopic("", topic_id, indexes) for topic_id, indexes in forgotten.items()],
            "",
        )
        if self._session_epoch:
            self._session_epoch = 1 if self._session_epoch == EPOCH_MAX else self._session_epoch + 1
        return number, request

    def _position(self, followed: _Followed) -> FetchPartition:
        log = followed.partition.log
        return FetchPartition(
            followed.partition.index,
            followed.leader_epoch,
            log.log_end_offset,
            log.epochs.latest_epoch,
            log.log_start_offset,
            self.limits.partition_max_bytes,
        )

    # -- being answered ------------------------------------------------------------------------------------------------

    def lost(self, number: int, now_ms: float) -> None:
        """A fetch will not be answered: the connection is gone."""
        if number in self._under_way:
            self._begin_anew(now_ms + LOST_BACKOFF_MS)

    def replied(self, number: int, reply: FetchReply, now_ms: float, wall_ms: int) -> None:
        """The answer to a fetch. Replies come in the order of the requests; one of an older session is nothing."""
        if number not in self._under_way:
            return
        if reply.error is not ErrorCode.NONE:
            self._begin_anew(now_ms + BACKOFF_MS)
            return
        self._under_way.remove(number)
        if self._session_epoch == 0:
            self._session_id, self._session_epoch = reply.session_id, 1
        for topic_id, results in reply.topics:
            for result in results:
                key = (topic_id, result.partition)
                followed = self._followed.get(key)
                if followed is None or key in self._due or key in self._later or followed.named_in > number:
                    continue
                if key not in self._flushing:
                    self._apply(key, followed, result, now_ms, wall_ms)

    def _begin_anew(self, not_before_ms: float) -> None:
        self._session_id = self._session_epoch = 0
        self._under_way = []
        self._forgotten = []
        self._not_before_ms = not_before_ms
        for key in self._followed:
            if key not in self._flushing and key not in self._later:
                self._due[key] = None

    def _apply(self, key: Key, followed: _Followed, result: FetchResult, now_ms: float, wall_ms: int) -> None:
        partition = followed.partition
        if partition.is_leader or partition.leader_epoch != followed.leader_epoch:
            return  # an image came in between: whoever takes it up adds the partition where it belongs
        try:
            self._take(key, followed, result, wall_ms)
            followed.failures = 0
        except KafkaError as error:
            followed.failures += 1
            backoff_ms = BACKOFF_MS
            if error.code in (ErrorCode.KAFKA_STORAGE_ERROR, ErrorCode.CORRUPT_MESSAGE):
                backoff_ms = STORAGE_BACKOFF_MS
                if followed.failures == 1:
                    logger.error(
                        "what the leader sent cannot be appended",
                        extra={
                            "fields": {
                                "partition": partition.log.name,
                                "leader": self.leader,
                                "why": str(error),
                            }
                        },
                    )
            self._later[key] = now_ms + backoff_ms

    def _take(self, key: Key, followed: _Followed, result: FetchResult, wall_ms: int) -> None:
        partition = followed.partition
        log = partition.log
        if result.error == ErrorCode.OFFSET_OUT_OF_RANGE and result.log_start_offset > log.log_end_offset:
            partition.start_over(result.log_start_offset)
            self._truncated(partition)
            self._due[key] = None
            return
        if result.error != ErrorCode.NONE:
            raise KafkaError(ErrorCode(result.error), "the leader refused the fetch")
        if result.diverging is not None:
            partition.truncate(self._common_end(partition, *result.diverging))
            self._truncated(partition)
            self._due[key] = None
            return
        start = log.log_start_offset
        if result.size:
            for piece in result.ranges:
                self._append(partition, piece, wall_ms)  # type: ignore[arg-type]
            self._received(partition, result.size)
        partition.hear_of(result.high_watermark, result.log_start_offset)
        if not result.size and log.log_start_offset == start:
            return
        self._tell_when_safe(key, partition)

    def _tell_when_safe(self, key: Key, partition: Partition) -> None:
        """The position here is to be told: at once, or after the flush that the topic wants."""
        if partition.wants_flush:
            self._due.pop(key, None)
            self._flushing[key] = partition.log.log_end_offset
            self._flush(partition)
        else:
            self._due[key] = None

    def _append(self, partition: Partition, records: memoryview, wall_ms: int) -> None:
        log = partition.log
        if log.log_start_offset == log.log_end_offset:
            first = parse_header(records, 0)
            if first.base_offset < log.log_end_offset <= first.last_offset:
                # The leader's log begins inside a batch, and a batch comes whole.
                start = log.log_start_offset
                partition.start_over(first.base_offset)
                self._truncated(partition)
                appended = partition.append_from_leader(records, wall_ms)
                partition.hear_of(start, start)
                if appended.flush_due:
                    self._flush(partition)
                return
        if partition.append_from_leader(records, wall_ms).flush_due:
            self._flush(partition)

    def _common_end(self, partition: Partition, epoch: int, end_offset: int) -> int:
        """Where to cut, when the leader says that `epoch` is the last one both may have and ends at `end_offset`."""
        log = partition.log
        here = log.epoch_end_offset(epoch)
        if here.epoch == UNDEFINED_EPOCH:
            return min(end_offset, log.log_end_offset)
        if here.epoch != epoch:
            return min(here.start_offset, log.log_end_offset)  # an older one yet: the next fetch tells it
        return min(here.start_offset, end_offset, log.log_end_offset)
