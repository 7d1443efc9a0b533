"""The cluster's metadata on this node: two images over one replicated log.

`image` has every record that is committed here; `pending`, while this node is the active controller, also those that it
has proposed. Invariants: decisions are made on `pending`, in the same turn of the loop in which their records are
proposed, so that two of them never contradict each other; clients see `image` only, so nothing that a crash could still
undo is ever shown. Records that are committed together are shown together. `on_change` is called with the old and the
new image after each step, before those who wait for it go on.
"""

import asyncio
import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.log import get_logger
from headrace.cluster.image import EMPTY, ClusterImage, apply, records_of
from headrace.cluster.records import MetadataRecord, decode_entry, encode_entries, encode_record
from headrace.consensus.raft.messages import EntryKind
from headrace.consensus.raft.refusal import Refused
from headrace.server.quorum import Quorum

ALL_BYTES: Final = 1 << 62

logger = get_logger(__name__)


class MetadataStore:
    """What the metadata log says."""

    def __init__(self, quorum: Quorum) -> None:
        self.quorum = quorum
        self.image: ClusterImage = EMPTY
        self.pending: ClusterImage = EMPTY
        self.applied_offset = 0
        """`image` has everything below it."""
        self.is_active = False
        """Whether this node is the active controller: it alone may commit."""
        self.on_change: Callable[[ClusterImage, ClusterImage], None] = lambda old, new: None
        self.watchers: list[Callable[[ClusterImage, ClusterImage], None]] = []
        """Called as `on_change` is, before it."""
        self.on_applied: Callable[[], None] = lambda: None
        """Called when `applied_offset` has moved on, whether or not the image changed."""
        self.on_active: Callable[[bool], None] = lambda active: None
        self._proposed_end = 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._waited = 0

    @property
    def end_offset(self) -> int:
        """The offset after the last record here, committed or not."""
        return self.quorum.end_offset

    @property
    def committed_offset(self) -> int:
        """The offset after the last committed record."""
        return self.quorum.committed_offset

    def start(self) -> None:
        """Begin to follow the log, and to take part in its quorum."""
        self.quorum.start(self)

    # -- changes -------------------------------------------------------------------------------------------------------

    def commit(self, records: Sequence[MetadataRecord]) -> "asyncio.Future[None]":
        """Propose records now; the future is done when they are committed and visible in `image`.

        NOT_CONTROLLER when this node is not the active controller, or ceased to be before it knew them committed.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not records:
            future.set_result(None)
            return future

        def done(error: Refused | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        if not self.is_active:
            future.set_exception(no_controller(self.quorum.leader))
            return future
        before = self.pending
        after = apply(before, records)  # first: records that do not fit must not reach the log
        # A lone voter may have them committed within the call, and image and pending be one again.
        self.pending = after
        entries = encode_entries(records)
        expected = self._proposed_end = self.quorum.end_offset + len(entries)
        try:
            end = self.quorum.propose(entries, done)
            assert end == expected, "someone else wrote to the log"
        except KafkaError as error:
            self.pending = before
            future.set_exception(error)
        return future

    def image_of_all(self) -> ClusterImage:
        """What all of the log here makes, committed or not."""
        node = self.quorum.node
        if node is None:
            return self.image
        entries = node.log.entries(self.applied_offset, node.log.end, ALL_BYTES)
        data = [entry.data for entry in entries if entry.kind == EntryKind.DATA]
        return apply(self.image, (record for each in data for record in decode_entry(each)))

    def until(self, offset: int) -> "asyncio.Future[None]":
        """Done when `image` has everything below `offset`."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.applied_offset >= offset:
            future.set_result(None)
        else:
            self._waited += 1
            heapq.heappush(self._waiting, (offset, self._waited, future))
        return future

    # -- the log's application -----------------------------------------------------------------------------------------

    def applied(self, end: int, entries: list[bytes]) -> None:
        if not entries:
            image = self.image  # only entries of Raft's own
        elif self.is_active and end >= self._proposed_end:
            image = self.pending  # of the same records: one image instead of two that are equal
        else:
            # In one step: each costs a copy of the outer maps, and a node that starts reads many.
            image = apply(self.image, (record for entry in entries for record in decode_entry(entry)))
        self._show(image, end)

    def restored(self, end: int, entries: Iterator[bytes]) -> None:
        self._show(apply(EMPTY, (record for entry in entries for record in decode_entry(entry))), end)

    def leads(self, leading: bool) -> None:
        self.pending = self.image
        self._proposed_end = 0
        self.is_active = leading
        self.on_active(leading)

    def snapshot(self) -> list[bytes]:
        return [encode_record(record) for record in records_of(self.image)]

    def _show(self, image: ClusterImage, end: int) -> None:
        old, self.image = self.image, image
        self.applied_offset = end
        if not self.is_active:
            self.pending = image
        if image is not old:
            for watch in (*self.watchers, self.on_change):
                try:
                    watch(old, image)
                except Exception:
                    # What the log says holds, whatever this broker makes of it.
                    logger.exception("a change of the metadata could not be taken up")
        self.on_applied()
        while self._waiting and self._waiting[0][0] <= end:
            future = heapq.heappop(self._waiting)[2]
            if not future.done():
                future.set_result(None)


def no_controller(leader: int | None) -> KafkaError:
    """Why a change cannot be made here."""
    who = "no controller is active" if leader is None else f"node {leader} is the active controller"
    return KafkaError(ErrorCode.NOT_CONTROLLER, f"This node is not the active controller; {who}.")
