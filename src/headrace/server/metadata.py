"""The cluster's metadata on this broker: two images over one log.

`pending` has every record that was appended, `image` every record that is committed. Invariants: decisions are made
on `pending`, in the same turn of the loop in which their records are appended, so that two of them never contradict
each other; clients see `image` only, so nothing that a crash could still undo is ever shown. `on_change` is called
with the old and the new image after each commit, before those who wait for it go on.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from headrace.base.clock import Clock
from headrace.base.errors import KafkaError
from headrace.cluster.image import EMPTY, ClusterImage, apply, records_of
from headrace.cluster.records import MetadataRecord, decode_record, encode_record
from headrace.consensus.metadata_log import MetadataLog


class MetadataStore:
    """The metadata log and what it says."""

    def __init__(self, log: MetadataLog, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._appended: deque[tuple[int, Sequence[MetadataRecord]]] = deque()  # with the log's end after each
        self.image: ClusterImage = EMPTY
        self.pending: ClusterImage = EMPTY
        self.on_change: Callable[[ClusterImage, ClusterImage], None] = lambda old, new: None

    @property
    def end_offset(self) -> int:
        """The offset after the last appended record."""
        return self._log.end_offset

    @property
    def committed_offset(self) -> int:
        """The offset after the last committed record."""
        return self._log.committed_offset

    def load(self) -> None:
        """Read the log from its start. `on_change` is not called: nothing changed, it was so before."""
        self.image = self.pending = apply(EMPTY, (decode_record(entry) for entry in self._log.replay()))

    def commit(self, records: Sequence[MetadataRecord]) -> "asyncio.Future[None]":
        """Append records now; the future is done when they are committed and visible in `image`."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not records:
            future.set_result(None)
            return future

        def done(error: KafkaError | None) -> None:
            if error is None:
                self._publish()
            if not future.done():
                if error is None:
                    future.set_result(None)
                else:
                    future.set_exception(error)

        after = apply(self.pending, records)  # first: records that do not fit must not reach the log
        self._log.append([encode_record(record) for record in records], self._clock.now_ms(), done)
        self.pending = after
        self._appended.append((self._log.end_offset, records))
        return future

    def _publish(self) -> None:
        """Show all that is committed: also what an earlier flush failed to make durable and this one did."""
        old = self.image
        while self._appended and self._appended[0][0] <= self._log.committed_offset:
            self.image = apply(self.image, self._appended.popleft()[1])
        if self.image is old:
            return
        if self._log.snapshot_due:
            entries = [encode_record(record) for record in records_of(self.image)]
            self._log.write_snapshot(entries, self._clock.now_ms())
        self.on_change(old, self.image)
