"""What a node wants done: one bundle of effects at a time.

The node touches nothing; whoever drives it takes a `Ready` and, in this order, writes what is to be written, sends
`early` messages, applies what is committed, and when the write is *durable* sends `messages` and says so
(`RaftNode.persisted`). Bundles are numbered. A driver may take the next one while the last is still being synced, and
make several durable by one sync, but writes them, and releases their messages, in the order of their numbers.
`RaftDriver` does all of that.
"""

from msgspec import Struct

from headrace.consensus.raft.messages import AnyMessage, Entry, HardState, SnapshotChunk, SnapshotMeta


class Read(Struct, frozen=True):
    """A linearizable read that was asked for: good once everything below `end` is applied, lost when that is None."""

    token: object
    end: int | None


class Ready(Struct, frozen=True):
    """Effects, in the order in which they are to happen."""

    number: int
    hard_state: HardState | None
    """To be written over the old one."""
    chunks: list[SnapshotChunk]
    """To be written to the incoming snapshot at their positions; position 0 begins another."""
    installed: SnapshotMeta | None
    """The incoming snapshot is whole: it takes the place of the log and, before anything else is applied, of the
    application's state."""
    first: int
    entries: list[Entry]
    """To be written from index `first` on; what the log has there and after goes."""
    early: list[AnyMessage]
    """May leave at once, whatever the disk does."""
    messages: list[AnyMessage]
    """May leave only when this bundle, and all before it, are durable."""
    applied: int
    committed: list[Entry]
    """To be applied, from index `applied` on; they are durable here."""
    reads: list[Read]

    @property
    def must_sync(self) -> bool:
        """Whether something is to be written."""
        return self.hard_state is not None or bool(self.entries) or bool(self.chunks)
