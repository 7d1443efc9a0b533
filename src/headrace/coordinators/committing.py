"""What a commit of offsets is, and who makes it: the words that groups, their shard and the handlers share."""

from typing import NamedTuple, TypeAlias

from headrace.base.errors import ErrorCode


class Commit(NamedTuple):
    """One offset that a client wants to commit."""

    topic: str
    partition: int
    offset: int
    leader_epoch: int
    metadata: str


class Committer(NamedTuple):
    """Who commits. The generation is a member's epoch in groups of the consumer protocol."""

    group_id: str
    member_id: str
    instance_id: str | None
    generation: int
    retention_ms: int
    version: int
    producer: tuple[int, int] | None = None
    """Id and epoch of who commits as part of a transaction."""


CommitResult: TypeAlias = list[tuple[str, int, ErrorCode]]
