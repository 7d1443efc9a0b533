"""What must hold of a whole cluster: its metadata, its logs, and what clients were told.

Owns the one true history. Of the metadata: Raft's own properties (`RaftOracle`), and one image for each offset of the
log. Of each partition: which record is at which offset, from the first time that a client may rely on it; from then on
it is there, for everyone, for ever. Invariant: everything is checked when it is told, so that a run ends at the first
contradiction. Told by the nodes and by the simulator's clients.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from headrace.cluster.image import ClusterImage
from headrace.consensus.raft.messages import Voters
from headrace.records.builder import iter_batches, iter_records
from headrace.storage.log import PartitionLog
from tests.sim.raft_oracle import RaftOracle, Violation

Key = tuple[str, int]


class _NoDisk:
    def holds(self, index: int, term: int) -> None:
        return None


class Excused(Exception):
    """The last machine in sync lost its power, or has a damaged disk: what it alone had may be gone."""


class Settled(NamedTuple):
    """A record that a client may rely on, and why."""

    value: bytes
    why: str


class ClusterOracle:
    """See the module."""

    def __init__(self, voters: Voters) -> None:
        self.raft = RaftOracle(voters)
        self.raft.disks = dict.fromkeys(voters, _NoDisk())  # type: ignore[arg-type]
        self.images: dict[int, ClusterImage] = {}
        self.newest_end = 0
        self.settled: dict[Key, dict[int, Settled]] = {}
        self.settled_end: dict[Key, int] = {}
        self.acked: dict[Key, dict[int, bytes]] = {}
        self.acked_count = 0
        self.on_image: Callable[[ClusterImage | None, ClusterImage, int], None] = lambda old, new, end: None
        """Called with each newest image."""
        self.failure: Exception | None = None
        """What was found. The code under test may handle whatever is raised in it; the run ends all the same."""
        self.damaged: int | None = None
        """The machine whose disk gives back something else than was written."""
        self.powerless: dict[int, int] = {}
        """Machines that lost their power, and what they had was not synced, with the epochs they were registered by."""

    def told(self, tell: Callable[..., None], *args: object) -> None:
        """Tell one of the methods of this or of Raft's oracle; what it finds is kept, whoever handles it."""
        try:
            tell(*args)
        except (Violation, Excused) as found:
            self.failure = self.failure or found
            raise

    # -- metadata ------------------------------------------------------------------------------------------------------

    def image(self, node_id: int, image: ClusterImage, end: int) -> None:
        """A node has this image at an offset."""
        known = self.images.get(end)
        if known is None:
            before = self.images.get(self.newest_end)
            self.images[end] = image
            if end > self.newest_end:
                self.on_image(before, image, end)
                self.newest_end = end
                if self.powerless or self.damaged is not None:
                    self._excuse(image)
        elif known is not image and known != image:
            raise Violation(
                f"state-machine safety: node {node_id} has another image at {end}: {_difference(known, image)}"
            )

    def lost_power(self, node_id: int) -> None:
        """A machine lost its power, and with it what it had not synced."""
        image = self.newest
        broker = None if image is None else image.brokers.get(node_id)
        if image is not None and broker is not None:
            self.powerless[node_id] = broker.epoch
            self._excuse(image)

    def damage(self, node_id: int) -> None:
        """Something that a machine has stored is not what was written, perhaps for good."""
        self.damaged = node_id
        if self.newest is not None:
            self._excuse(self.newest)

    def is_last(self, node_id: int) -> bool:
        """Whether a machine is the last in sync of anything, by the newest image: if it fails, the run is excused."""
        return self.newest is not None and _is_last(node_id, self.newest)

    def _excuse(self, image: ClusterImage) -> None:
        if self.damaged is not None and _is_last(self.damaged, image):
            raise Excused
        for node_id, epoch in list(self.powerless.items()):
            broker = image.brokers.get(node_id)
            if broker is None or broker.epoch != epoch:
                del self.powerless[node_id]
            if _is_last(node_id, image):
                raise Excused

    @property
    def newest(self) -> ClusterImage | None:
        """The newest committed image that any node has."""
        return self.images.get(self.newest_end)

    # -- partitions ----------------------------------------------------------------------------------------------------

    def acknowledged(self, key: Key, base_offset: int, values: list[bytes], who: str) -> None:
        """A producer was told that its records are safe."""
        acked = self.acked.setdefault(key, {})
        for offset, value in enumerate(values, base_offset):
            self._settle(key, offset, value, f"acknowledged to {who}")
            acked[offset] = value
            self.acked_count += 1

    def was_read(self, key: Key, offset: int, value: bytes, who: str) -> None:
        """A reader got a record."""
        self._settle(key, offset, value, f"read by {who}")

    def _settle(self, key: Key, offset: int, value: bytes, why: str) -> None:
        settled = self.settled.setdefault(key, {})
        known = settled.get(offset)
        if known is None:
            settled[offset] = Settled(value, why)
            self.settled_end[key] = max(offset + 1, self.settled_end.get(key, 0))
        elif known.value != value:
            raise Violation(
                f"one order: {key[0]}-{key[1]} has {value!r} at {offset} ({why}), "
                f"and had {known.value!r} ({known.why})"
            )

    def check_replica(self, node_id: int, key: Key, log: PartitionLog, end: int, why: str) -> None:
        """A replica that is to have every settled record below `end` has it."""
        settled = self.settled.get(key, {})
        content = records_in(log)
        for offset, (value, reason) in settled.items():
            if offset < end and content.get(offset) != value:
                raise Violation(
                    f"{why}: node {node_id} has {content.get(offset)!r} at {offset} of {key[0]}-{key[1]}, "
                    f"and {value!r} was {reason}; its log is {log.log_start_offset}..{log.log_end_offset}"
                )


def records_in(log: PartitionLog) -> dict[int, bytes]:
    """What a log holds, by offset."""
    found: dict[int, bytes] = {}
    offset = log.log_start_offset
    while offset < log.log_end_offset:
        data = log.read(offset, 1 << 30, max_offset=log.log_end_offset).read()
        if not data:
            break
        for header, batch in iter_batches(data):
            for record in iter_records(batch):
                found[record.offset] = record.value or b""
            offset = header.next_offset
    return found


def changes(old: ClusterImage | None, new: ClusterImage) -> Iterator[str]:
    """What is another in a new image, for who reads a trace."""
    for name, topic in new.topics.items():
        before = old.topics.get(name) if old is not None else None
        for index, partition in enumerate(topic.partitions):
            if before is None or len(before.partitions) <= index or before.partitions[index] != partition:
                yield f"{name}-{index} {partition}"
    for node, broker in new.brokers.items():
        if old is None or old.brokers.get(node) != broker:
            state = "fenced" if broker.fenced else "stopping" if broker.controlled_shutdown else "active"
            yield f"broker {node} epoch {broker.epoch} {state}"
    if old is not None and old.configs != new.configs:
        yield f"{new.configs}"


def _is_last(node_id: int, image: ClusterImage) -> bool:
    return any(p.isr == (node_id,) for t in image.topics.values() for p in t.partitions)


def _difference(one: ClusterImage, other: ClusterImage) -> str:
    return "; ".join(
        [
            f"{field}: {getattr(one, field)} and {getattr(other, field)}"
            for field in ("topics", "configs", "brokers", "next_producer_id", "cluster_id")
            if getattr(one, field) != getattr(other, field)
        ]
    )
