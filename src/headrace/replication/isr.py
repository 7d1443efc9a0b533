"""Changes of in-sync replicas, from the leaders of this broker to the controller.

Owns which partitions want another ISR and what is under way. Invariants: one request is under way at a time, and no
partition is in two; an answer changes nothing here but when to ask again. What the ISR *is*, a leader learns from the
image alone: an answer may be of a controller that was deposed, or overtaken by a later change, and a leader that
counted on it would call records safe that are not. While a proposal may still come true, the partition waits for the
old and the new replicas alike (`Partition.propose`).

Pure: the time is given, sending is the `Controller`'s. Called by `Replicas`.
"""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple, Protocol, TypeAlias

from headrace.base.errors import ErrorCode
from headrace.cluster.partition_control import IsrProposal
from headrace.replication.partition import Partition

BATCH_MAX = 2_000
"""Partitions in one request: what a restarted broker with very many of them is brought back with, in turns."""
ANSWER_MS = 2_000
"""After this long without an answer, or without the image that should follow one, it is asked again."""
BACKOFF_MS = 100

Answered: TypeAlias = Callable[[Sequence[ErrorCode] | None], None]


class Controller(Protocol):
    """The way to the active controller."""

    def alter_partitions(self, proposals: Sequence[IsrProposal], answered: Answered) -> None:
        """Have these ISRs decided; `answered` gets an error code for each, or None when there was no answer.

        The controller takes a proposal only under the leader epoch and the partition epoch it names, and writes a new
        partition epoch with each that it takes, also when the ISR is the one it has. A proposal that leaves out its
        own leader is a resignation: another of it is elected.
        """
        ...


class _UnderWay(NamedTuple):
    partitions: list[Partition]
    since_ms: float


class IsrChanges:
    """The queue to the controller."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._wanted: dict[Partition, None] = {}
        self._under_way: _UnderWay | None = None
        self._not_before_ms = 0.0

    def want(self, partition: Partition) -> None:
        """The partition's ISR should change: it is asked what to when its turn comes."""
        self._wanted[partition] = None

    @property
    def waiting(self) -> bool:
        """Whether `send` has something to do."""
        return bool(self._wanted)

    def send(self, now_ms: float, lag_max_ms: float, eligible: Callable[[int, int], bool]) -> None:
        """Send what is wanted, unless a request is under way or the last one failed just now."""
        if self._under_way is not None and now_ms - self._under_way.since_ms > ANSWER_MS:
            self._finish(None, now_ms)
        if self._under_way is not None or now_ms < self._not_before_ms or not self._wanted:
            return
        proposals: list[IsrProposal] = []
        partitions: list[Partition] = []
        for partition in list(islice(self._wanted, BATCH_MAX)):
            del self._wanted[partition]
            proposal = partition.propose(now_ms, lag_max_ms, eligible)
            if proposal is not None:
                proposals.append(proposal)
                partitions.append(partition)
        if not proposals:
            return
        under_way = self._under_way = _UnderWay(partitions, now_ms)

        def answered(errors: Sequence[ErrorCode] | None) -> None:
            if self._under_way is under_way:
                self._finish(errors, now_ms)

        self._controller.alter_partitions(proposals, answered)

    def _finish(self, errors: Sequence[ErrorCode] | None, now_ms: float) -> None:
        assert self._under_way is not None
        partitions = self._under_way.partitions
        self._under_way = None
        for partition, error in zip(partitions, errors or (), strict=False):
            if error is not ErrorCode.NONE:
                partition.proposal_refused()
                self._wanted[partition] = None
                self._not_before_ms = now_ms + BACKOFF_MS
        if errors is None:
            for partition in partitions:
                partition.proposal_refused()
                self._wanted[partition] = None
            self._not_before_ms = now_ms + BACKOFF_MS
