"""One partition that a consumer reads: where it is, what was fetched for it, and what keeps it from being read.

Invariant: after `move` nothing that was fetched, or is being fetched, for the old place is handed out. Pure. Called by
`fetcher`.
"""

from collections import deque

from headrace.client.cluster import NO_NODE
from headrace.client.fetched import Chunk
from headrace.client.offsets import UNKNOWN_OFFSET
from headrace.client.topics import TopicPartition


class Assigned:
    """One partition being read."""

    __slots__ = (
        "chunks",
        "failures",
        "fetch_offset",
        "fetching",
        "generation",
        "high_watermark",
        "last_stable_offset",
        "log_start_offset",
        "not_before_s",
        "partition",
        "paused",
        "position",
        "replica",
        "replica_until_s",
        "reset_to",
    )

    def __init__(self, partition: TopicPartition, reset_to: int | None) -> None:
        self.partition = partition
        self.position = UNKNOWN_OFFSET
        self.fetch_offset = UNKNOWN_OFFSET
        self.reset_to = reset_to  # a time (or EARLIEST, LATEST) whose offset must be found first
        self.generation = 0
        self.paused = False
        self.fetching = False
        self.chunks: deque[Chunk] = deque()
        self.failures = 0
        self.not_before_s = 0.0
        self.replica = NO_NODE  # a follower that the leader sent this reader to, and until when
        self.replica_until_s = 0.0
        self.high_watermark = UNKNOWN_OFFSET
        self.last_stable_offset = UNKNOWN_OFFSET
        self.log_start_offset = UNKNOWN_OFFSET

    def move(self, offset: int, reset_to: int | None = None) -> None:
        """Go on at another place; what was fetched for the old one is dropped."""
        self.generation += 1
        self.chunks.clear()
        self.position = self.fetch_offset = offset
        self.reset_to = reset_to
        self.failures, self.not_before_s = 0, 0.0
