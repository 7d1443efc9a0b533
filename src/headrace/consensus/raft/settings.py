"""The settings of a Raft node: its times, in ticks, and its bounds. Checked once, at the door.

Who drives the node says how long a tick is. Invariant: a leader that is alive is heard several times within the
shortest election timeout, or elections would never end. Given to `RaftNode` by whoever builds it.
"""

from msgspec import Struct


class RaftSettings(Struct, frozen=True):
    """Times in ticks; sizes in bytes, by the data of entries and a little for each."""

    election_ticks: int = 10
    """A follower that hears nothing waits this long, and up to as long again by chance, before it stands for election.
    A leader that has not heard from a majority for this long steps down."""
    heartbeat_ticks: int = 2
    append_bytes_max: int = 256 * 1024
    """Entries in one message; a single larger one is sent alone."""
    inflight_appends_max: int = 32
    inflight_bytes_max: int = 4 * 1024 * 1024
    chunk_bytes_max: int = 256 * 1024
    apply_bytes_max: int = 1024 * 1024
    """Committed entries handed out at a time."""
    entry_bytes_max: int = 8 * 1024 * 1024
    uncommitted_entries_max: int = 50_000
    """Proposals a leader takes while it cannot commit."""
    replicas_max: int = 1_000
    """Followers and observers that a leader sends to."""
    reads_max: int = 10_000
    """Reads that wait for a majority to confirm the leader."""
    observer_ticks: int = 100
    """A leader forgets an observer that has been silent this long; it asks again when it is back."""

    def __post_init__(self) -> None:
        if self.heartbeat_ticks < 1:
            raise ValueError("heartbeat_ticks is at least 1")
        if self.election_ticks < 3 * self.heartbeat_ticks:
            raise ValueError(
                "election_ticks is at least three times heartbeat_ticks: one lost message elects nobody"
            )
        if self.observer_ticks < self.election_ticks:
            raise ValueError("observer_ticks is at least election_ticks")
        for name in self.__struct_fields__:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1")
