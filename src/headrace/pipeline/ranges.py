"""Offset ranges: how much a micro-batch takes of what there is, and how it is cut into tasks.

Owns the arithmetic, which is that of Spark's own connector, so that the same options give batches and tasks of the same
size. Pure. Called by the source.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from headrace.client.topics import TopicPartition

Offsets: TypeAlias = dict[TopicPartition, int]


@dataclass(frozen=True)
class OffsetRange:
    """Records [start, end) of a partition."""

    topic: str
    partition: int
    start: int
    end: int

    @property
    def size(self) -> int:
        return max(0, self.end - self.start)


def limit_rows(
    start: Mapping[TopicPartition, int], end: Mapping[TopicPartition, int], rows_max: int
) -> Offsets:
    """Where a batch of about `rows_max` offsets ends: each partition gives in proportion to what it has."""
    sizes = {p: end[p] - start.get(p, end[p]) for p in end}
    sizes = {p: size for p, size in sizes.items() if size > 0}
    total = sum(sizes.values())
    if total < 1 or rows_max >= total:
        return dict(end)
    limited = {}
    for partition, until in end.items():
        size = sizes.get(partition)
        if size is None:
            limited[partition] = until
            continue
        share = rows_max * (size / total)
        # At least one of each partition, or small ones would starve.
        begin = start[partition]
        limited[partition] = min(until, begin + math.ceil(share) if share < 1 else begin + math.floor(share))
    return limited


def split(
    ranges: Iterable[OffsetRange], min_partitions: int | None, max_records: int | None
) -> list[OffsetRange]:
    """The ranges as tasks: none larger than `max_records`, and at least `min_partitions` of them."""
    wanted = [r for r in ranges if r.size > 0]
    if max_records is not None:
        wanted = [piece for r in wanted for piece in _cut(r, math.ceil(r.size / max_records))]
    if min_partitions is None or len(wanted) >= min_partitions:
        return wanted
    total = sum(r.size for r in wanted)
    found: list[OffsetRange] = []
    for r in wanted:
        found += _cut(r, max(round(r.size / total * min_partitions), 1))
    return found


def _cut(whole: OffsetRange, parts: int) -> list[OffsetRange]:
    """A range in `parts` pieces whose sizes differ by one at most."""
    parts = min(max(1, parts), whole.size)
    pieces, start, left = [], whole.start, whole.size
    for number in range(parts):
        size = left // (parts - number)
        pieces.append(OffsetRange(whole.topic, whole.partition, start, start + size))
        start += size
        left -= size
    return pieces
