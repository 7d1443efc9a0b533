"""Filters on offset, partition, topic and timestamp, turned into smaller ranges of offsets.

Owns the translation. Invariant: what is cut away can hold no row that the filters let through; Spark applies them all
again, so a filter that is not understood costs time and never a wrong row. Called by the source.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from headrace.client.topics import TopicPartition
from headrace.pipeline.ranges import OffsetRange

AtTimes = Callable[[Mapping[TopicPartition, int]], dict[TopicPartition, int | None]]


def narrow(ranges: Iterable[OffsetRange], filters: Sequence[Filter], at_times: AtTimes) -> list[OffsetRange]:
    """The ranges without what the filters exclude."""
    kept = list(ranges)
    from_ms = None
    for one in filters:
        column = ".".join(getattr(one, "attribute", ()))
        if column == "offset":
            kept = [_cut(r, one) for r in kept]
        elif column in ("topic", "partition"):
            kept = [r for r in kept if _matches(r.topic if column == "topic" else r.partition, one)]
        elif column == "timestamp" and isinstance(one, GreaterThan | GreaterThanOrEqual | EqualTo):
            from_ms = max(_ms(one.value), from_ms or 0)
    kept = [r for r in kept if r.size > 0]
    if from_ms is not None and kept:
        found = at_times({TopicPartition(r.topic, r.partition): from_ms for r in kept})
        kept = [_from(r, found[TopicPartition(r.topic, r.partition)]) for r in kept]
    return kept


def _cut(r: OffsetRange, one: Filter) -> OffsetRange:
    start, end = r.start, r.end
    if isinstance(one, EqualTo):
        start, end = max(start, one.value), min(end, one.value + 1)
    elif isinstance(one, In):
        values = [value for value in one.value if value is not None]
        start, end = (max(start, min(values)), min(end, max(values) + 1)) if values else (start, start)
    elif isinstance(one, GreaterThan):
        start = max(start, one.value + 1)
    elif isinstance(one, GreaterThanOrEqual):
        start = max(start, one.value)
    elif isinstance(one, LessThan):
        end = min(end, one.value)
    elif isinstance(one, LessThanOrEqual):
        end = min(end, one.value + 1)
    return OffsetRange(r.topic, r.partition, start, max(start, end))


def _matches(value: Any, one: Filter) -> bool:
    if isinstance(one, EqualTo):
        return bool(value == one.value)
    if isinstance(one, In):
        return value in one.value
    return True


def _from(r: OffsetRange, offset: int | None) -> OffsetRange:
    """Everything before the first record at or after a time is older; without such a record all of it is."""
    start = r.end if offset is None else max(r.start, offset)
    return OffsetRange(r.topic, r.partition, start, r.end)


def _ms(value: Any) -> int:
    if isinstance(value, datetime):
        aware = value if value.tzinfo is not None else value.astimezone(UTC)
        return int(aware.timestamp() * 1000)
    return int(value)
