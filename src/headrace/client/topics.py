"""Names of things in topics, shared by producer, consumer and admin."""

from typing import NamedTuple


class TopicPartition(NamedTuple):
    """One partition of one topic."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class OffsetAndMetadata(NamedTuple):
    """A committed offset: the next record to read, and a note."""

    offset: int
    metadata: str = ""
    leader_epoch: int = -1
