"""What the leader of a partition knows of one of its followers.

Owns the follower's position, when it had last caught up, and whether it waits for news of this partition. Invariant:
`end_offset` is what the follower itself said to have, under the leader epoch of now; a change of leader or epoch
forgets it. A follower *watches* from the fetch that names the partition until something of it is sent back; then it
names it again, with its next position, because only that says what became of what was sent.

Held by `Partition`, filled by `serving`.
"""

from typing import Protocol

UNKNOWN_OFFSET = -1
STUCK_AFTER = 2
"""How often a follower may ask again for what it was sent before it counts as out of sync."""


class Watcher(Protocol):
    """The session through which a follower fetches, as far as a partition knows it."""

    used_ms: float
    """When the follower last sent anything."""

    replica_epoch: int
    """The registration under which it fetches."""

    def ready(self, follower: "Follower") -> None:
        """There is something of this partition that the follower has to hear of."""
        ...

    def stale(self, follower: "Follower") -> None:
        """There is something it may hear of with the next reply."""
        ...


class Follower:
    """One follower of one partition."""

    __slots__ = (
        "asked_again",
        "caught_up_ms",
        "end_at_fetch",
        "end_offset",
        "fetched_ms",
        "log_start_offset",
        "max_bytes",
        "node_id",
        "offset",
        "partition_index",
        "refused",
        "sent_high_watermark",
        "sent_log_start",
        "session",
        "topic_id",
        "watching",
    )

    def __init__(self, node_id: int, topic_id: bytes, partition_index: int, now_ms: float) -> None:
        self.node_id = node_id
        self.topic_id = topic_id
        self.partition_index = partition_index
        self.session: Watcher | None = None
        self.watching = False
        self.refused = False
        """What it waits for will not come under the leader epoch that it named."""
        self.forget(now_ms)

    def forget(self, now_ms: float) -> None:
        """Nothing is known of it under the leader epoch that begins now; it has the usual time to be heard of."""
        self.end_offset = UNKNOWN_OFFSET
        self.log_start_offset = UNKNOWN_OFFSET
        self.caught_up_ms = now_ms
        self.fetched_ms = now_ms
        self.end_at_fetch = UNKNOWN_OFFSET
        self.offset = UNKNOWN_OFFSET
        self.max_bytes = 0
        self.sent_high_watermark = UNKNOWN_OFFSET
        self.sent_log_start = UNKNOWN_OFFSET
        self.asked_again = 0

    def unheard(self) -> None:
        """It waits no more until it names the partition again, and is then told everything: it may know none of it."""
        self.watching = False
        self.sent_high_watermark = UNKNOWN_OFFSET
        self.sent_log_start = UNKNOWN_OFFSET

    @property
    def is_stuck(self) -> bool:
        """Whether it gets records and does not get on with them."""
        return self.asked_again >= STUCK_AFTER

    def fetched(self, offset: int, log_start_offset: int, log_end_offset: int, now_ms: float) -> None:
        """It asks for `offset`, so it has all before it."""
        if offset >= log_end_offset:
            self.caught_up_ms = now_ms
        elif offset >= self.end_at_fetch:
            # All that was there when it asked the last time, it has now: as of then it was caught up.
            self.caught_up_ms = max(self.caught_up_ms, self.fetched_ms)
        self.end_at_fetch = log_end_offset
        self.fetched_ms = now_ms
        self.end_offset = offset
        self.log_start_offset = log_start_offset

    def was_caught_up(self) -> None:
        """Something is appended behind its end: until now it had all, as of the last that it sent for any partition."""
        if self.session is not None:
            self.caught_up_ms = max(self.caught_up_ms, self.session.used_ms)

    def lag_ms(self, log_end_offset: int, now_ms: float) -> float:
        """For how long it has not had all of the log. One that has it is as current as its session is.

        Time is not waited for where a follower is stuck: its disk is full, and producers wait for it.
        """
        if self.is_stuck and self.end_offset < log_end_offset:
            return float("inf")
        caught_up_ms = self.caught_up_ms
        if self.end_offset >= log_end_offset and self.session is not None:
            caught_up_ms = max(caught_up_ms, self.session.used_ms)
        return now_ms - caught_up_ms

    @property
    def broker_epoch(self) -> int:
        """The registration under which it fetches, -1 when it does not."""
        return -1 if self.session is None else self.session.replica_epoch
