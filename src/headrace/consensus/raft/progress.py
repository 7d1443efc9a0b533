"""What a leader knows of one follower or observer, and how much it may have under way to it.

Three modes. PROBE: where the logs agree is not known; one append at a time until one is accepted. REPLICATE: it is
known; appends are sent ahead of their replies, bounded in number and bytes. SNAPSHOT: the entries it needs are gone;
the snapshot is sent piece by piece. Invariants: `match <= next`; everything below `match` is on the follower's disk and
as here; what is under way never exceeds the bounds. Owned by `Leadership`.
"""

from collections import deque
from enum import Enum

from headrace.consensus.raft.settings import RaftSettings


class Mode(Enum):
    """How a follower is being sent to."""

    PROBE = "probe"
    REPLICATE = "replicate"
    SNAPSHOT = "snapshot"


class Progress:
    """One follower, as its leader sees it."""

    __slots__ = (
        "_inflight",
        "_inflight_bytes",
        "_settings",
        "active",
        "attempt",
        "caught_up_tick",
        "commit_sent",
        "heard_tick",
        "match",
        "mode",
        "moved",
        "next",
        "round",
        "snapshot_end",
        "snapshot_position",
        "waiting",
    )

    def __init__(self, settings: RaftSettings, next_index: int, tick: int) -> None:
        self._settings = settings
        self._inflight: deque[tuple[int, int]] = deque()
        self._inflight_bytes = 0
        self.mode = Mode.PROBE
        self.attempt = 1
        """Counts the probings: a reply to an append from before the last one does not tell how that went."""
        self.match = 0
        self.next = next_index
        self.waiting = False
        """A probe or a piece of the snapshot is under way: nothing else until its reply, or a heartbeat's."""
        self.moved = True
        """Something was acknowledged since the last reply to a heartbeat."""
        self.active = True
        """Heard of since the last look at the quorum."""
        self.round = 0
        """The last heartbeat it answered."""
        self.commit_sent = 0
        self.heard_tick = tick
        self.caught_up_tick = -1
        """When it last had all of the log; -1 for never."""
        self.snapshot_end = 0
        self.snapshot_position = 0

    @property
    def may_send(self) -> bool:
        """Whether another append may go under way."""
        if self.mode is Mode.REPLICATE:
            settings = self._settings
            return (
                len(self._inflight) < settings.inflight_appends_max
                and self._inflight_bytes < settings.inflight_bytes_max
            )
        return not self.waiting

    @property
    def has_inflight(self) -> bool:
        return bool(self._inflight)

    @property
    def inflight(self) -> tuple[int, int]:
        """Appends and bytes under way."""
        return len(self._inflight), self._inflight_bytes

    def sent(self, end: int, size: int) -> None:
        """An append that reaches `end` is under way."""
        if self.mode is Mode.REPLICATE:
            self._inflight.append((end, size))
            self._inflight_bytes += size
            self.next = end
        else:
            self.waiting = True

    def accepted(self, end: int, attempt: int) -> bool:
        """It has everything below `end`; whether that is news."""
        news = end > self.match
        self.moved = True
        self.match = max(self.match, end)
        self.next = max(self.next, self.match)
        while self._inflight and self._inflight[0][0] <= self.match:
            self._inflight_bytes -= self._inflight.popleft()[1]
        if (self.mode is Mode.PROBE and attempt == self.attempt) or (
            self.mode is Mode.SNAPSHOT and self.match >= self.snapshot_end
        ):
            self.mode = Mode.REPLICATE
            self.waiting = False
        return news

    def probe(self, next_index: int) -> None:
        """Find out anew where the logs agree, from `next_index` on."""
        self.mode = Mode.PROBE
        self.attempt += 1
        self.next = max(next_index, self.match)
        self.waiting = False
        self._inflight.clear()
        self._inflight_bytes = 0

    def forget(self, end: int) -> None:
        """It has lost what it had from `end` on."""
        self.match = min(self.match, end)

    def send_snapshot(self, end: int) -> None:
        """It needs the snapshot that reaches `end`, from its beginning."""
        self.probe(self.match)
        self.mode = Mode.SNAPSHOT
        self.snapshot_end = end
        self.snapshot_position = 0
