"""The Spark source: what Spark asks of a reader, answered by the catalog and by ranges of partitions.

Owns the row schema, the offsets in the checkpoint, and what is done about lost data. Invariants: a micro-batch is the
offsets between two checkpoints and nothing else, so a replay reads the same records; a task reads its range and yields
Arrow record batches that hold exactly the columns of the schema it was given; a topic that was created anew is never
taken for the one that the checkpoint is about. Called by Spark through `pyspark_headrace`. Of a streaming reader, the
thread of `ahead` and the caller's take turns: whoever asks the catalog from here first waits until that thread is idle.
"""

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, Filter, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from headrace.base.errors import KafkaError
from headrace.base.log import get_logger
from headrace.client.arrow_read import OffsetsGone, read_range
from headrace.client.topics import TopicPartition
from headrace.pipeline.ahead import BYTES_MAX, CAN_HAND_OVER, RANGES_MAX, Ahead, HandsOverRows
from headrace.pipeline.catalog import Catalog
from headrace.pipeline.filters import narrow
from headrace.pipeline.options import OptionError, SourceOptions
from headrace.pipeline.ranges import OffsetRange, Offsets, limit_rows, split

CHECKPOINT_VERSION = 1
SAMPLE_ROWS = 500

SCHEMA = "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, timestampType int"
SCHEMA_WITH_HEADERS = SCHEMA + ", headers array<struct<key: string, value: binary>>"
_TYPES = {
    "key": "binary",
    "value": "binary",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp",
    "timestampType": "int",
    "headers": "array<struct<key:string,value:binary>>",
}

_log = get_logger(__name__)


Planned: TypeAlias = tuple[list[InputPartition], list[Any] | None]


class DataLoss(Exception):
    """Records that the query should have read are gone; the text is Spark's own, with the exact ranges."""


class RangePartition(InputPartition):
    """One task: a range of one partition, or of several that are small."""

    def __init__(self, *read: OffsetRange) -> None:
        self.value = read


def _ranges(task: InputPartition) -> tuple[OffsetRange, ...]:
    return task.value if isinstance(task, RangePartition) else ()


def check_schema(schema: StructType) -> list[str]:
    """The columns of a schema, which must be a choice of those that there are. Raises OptionError."""
    for field in schema.fields:
        kind = _TYPES.get(field.name)
        if kind is None:
            raise OptionError(f"Column '{field.name}' is not one of {', '.join(_TYPES)}.")
        if field.dataType.simpleString() != kind:
            raise OptionError(
                f"Column '{field.name}' is {kind}, not {field.dataType.simpleString()}: cast it after reading."
            )
    return [field.name for field in schema.fields]


def lose(policy: str, what: str) -> None:
    """Data was lost: fail, say so, or go on, as the options have it. Raises DataLoss."""
    if policy == "fail":
        raise DataLoss(
            f"{what}. Some data may have been lost because they are not available in Kafka any more; either the data "
            "was aged out by Kafka or the topic may have been deleted before all the data in the topic was processed. "
            "If you don't want your streaming query to fail on such cases, set the source option 'failOnDataLoss' to "
            "'false', or 'onDataLoss' to 'skip' or 'report'."
        )
    if policy == "report":
        _log.warning("data lost", extra={"fields": {"what": what}})


def read_task(options: SourceOptions, columns: Sequence[str], part: OffsetRange) -> Iterator[Any]:
    """The record batches of one task; records that are gone are passed over where that is allowed."""
    position = part.start
    while position < part.end:
        try:
            yield from read_range(
                options.consumer,
                part.topic,
                part.partition,
                position,
                part.end,
                columns,
                no_progress_timeout_ms=options.poll_timeout_ms,
            )
            return
        except OffsetsGone as gone:
            catalog = Catalog(options)
            where = TopicPartition(part.topic, part.partition)
            begin = catalog.earliest([where])[where]
            catalog.close()
            after = min(max(begin, gone.first + 1), part.end) if begin > gone.first else part.end
            lose(
                options.on_data_loss,
                f"Offsets {gone.first} to {after - 1} of {part.topic}-{part.partition} are gone",
            )
            position = after


def _check_order(start: Offsets, end: Offsets) -> None:
    """A batch that would end before it begins is a mistake of the options'. Raises OptionError."""
    for partition, first in start.items():
        if first > end[partition]:
            raise OptionError(
                f"The start offset {first} is greater than the end offset {end[partition]} for topic "
                f"{partition.topic} partition {partition.partition}. Check 'startingOffsets', "
                "'startingTimestamp' and 'startingOffsetsByTimestamp' against the ending ones, or, without those, "
                "against the end of the partition."
            )


class BatchReader(DataSourceReader):
    """`spark.read.format("headrace")`."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._columns = check_schema(schema)
        self._filters: list[Filter] = []

    def partitions(self) -> Sequence[InputPartition]:
        catalog = Catalog(self._options)
        try:
            found = catalog.partitions()
            start = catalog.resolve_start(found, streaming=False)
            end = catalog.resolve_end(found)
            self._check_available(catalog, start, end)
            _check_order(start, end)
            ranges = [OffsetRange(p.topic, p.partition, start[p], end[p]) for p in found]
            ranges = narrow(ranges, self._filters, catalog.at_times)
        finally:
            catalog.close()
        tasks = split(ranges, self._options.min_partitions, self._options.max_records_per_partition)
        return [RangePartition(task) for task in tasks]

    def _check_available(self, catalog: Catalog, start: Offsets, end: Offsets) -> None:
        """Begin where there is something left; whether that may be so is the option's to say."""
        earliest, latest = catalog.earliest(start), catalog.latest(start)
        for partition in start:
            first, last = start[partition], min(earliest[partition], end[partition])
            if first < last:
                lose(
                    self._options.on_data_loss,
                    f"Offsets {first} to {last - 1} of {_name(partition)} are gone",
                )
                start[partition] = last
            if end[partition] > latest[partition]:
                lose(
                    self._options.on_data_loss,
                    f"Offsets {latest[partition]} to {end[partition] - 1} of {_name(partition)} are not there",
                )
                end[partition] = latest[partition]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        for part in _ranges(partition):
            yield from read_task(self._options, self._columns, part)


class FilteringBatchReader(BatchReader):
    """The same with filters pushed down, for sessions that allow it (Spark refuses such a reader where they do not)."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 (Spark's name)
        """Narrow the offsets by what filters say; Spark still applies all of them."""
        self._filters = list(filters)
        return filters


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """`spark.readStream.format("headrace")`."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._columns = check_schema(schema)
        self._catalog = Catalog(options)
        self._target: Offsets | None = None
        self._waiting_since_s: float | None = None
        self._reported: dict[str, Any] | None = None
        self._ahead: Ahead[Planned] = Ahead()
        self._rows: list[Any] = []

    # -- offsets ----------------------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 (Spark's name)
        self._ahead.settle()
        found = self._catalog.partitions()
        return self._checkpoint(self._catalog.resolve_start(found, streaming=True))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 (Spark's name)
        options = self._options
        if options.max_offsets_per_trigger is not None:
            return ReadMaxRows(options.max_offsets_per_trigger)
        if options.max_bytes_per_trigger is not None:
            return ReadMaxBytes(options.max_bytes_per_trigger)
        if options.min_offsets_per_trigger is not None:
            return ReadMinRows(options.min_offsets_per_trigger)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 (Spark's name)
        self._ahead.settle()
        self._target = self._catalog.latest(self._catalog.partitions())

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802 (Spark's name)
        return self._reported

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 (Spark's name)
        self._ahead.settle()
        found = self._catalog.partitions()
        begin = self._restore(start)
        end = self._catalog.latest(found)
        if self._target is not None:
            end = {p: min(offset, self._target[p]) for p, offset in end.items() if p in self._target}
        known = set(begin)
        begin |= self._catalog.earliest([p for p in end if p not in known])
        end = self._check_ends(begin, end)
        self._reported = self._checkpoint(end)
        if not isinstance(limit, ReadAllAvailable):
            end = self._limit(begin, end)
        if {p: end[p] for p in end if p in known} == {p: begin[p] for p in known} and set(end) <= known:
            return start  # the same text, because Spark takes any other for news
        until = self._checkpoint(end)
        self._ahead.begin((start, until), lambda: self._plan(start, until))
        return until

    def _limit(self, begin: Offsets, end: Offsets) -> Offsets:
        options = self._options
        available = sum(max(0, end[p] - begin[p]) for p in end)
        least = options.min_offsets_per_trigger
        if least is not None and self._target is None and 0 < available < least:
            now_s = time.monotonic()
            if self._waiting_since_s is None:
                self._waiting_since_s = now_s
            if (now_s - self._waiting_since_s) * 1000 < options.max_trigger_delay_ms:
                return dict(begin)
        if available:
            self._waiting_since_s = None
        if options.max_offsets_per_trigger is not None:
            end = limit_rows(begin, end, options.max_offsets_per_trigger)
        if options.max_bytes_per_trigger is not None:
            end = limit_rows(begin, end, self._rows_in(options.max_bytes_per_trigger, begin, end))
        return end

    def _rows_in(self, bytes_max: int, begin: Offsets, end: Offsets) -> int:
        """About how many rows make so many bytes, by a look at the first ones of the largest partition."""
        where = max(end, key=lambda p: end[p] - begin[p])
        last = min(end[where], begin[where] + SAMPLE_ROWS)
        rows = size = 0
        for batch in read_range(
            self._options.consumer, where.topic, where.partition, begin[where], last, ("key", "value")
        ):
            rows += batch.num_rows
            size += batch.nbytes
        return max(1, bytes_max * rows // size) if size else 1

    def _check_ends(self, begin: Offsets, end: Offsets) -> Offsets:
        """A partition that is gone, or ends before where the query is, has lost data."""
        for partition, offset in begin.items():
            if partition not in end:
                if self._target is None:
                    lose(
                        self._options.on_data_loss,
                        f"{_name(partition)} is gone; the query was at offset {offset}",
                    )
                continue
            if end[partition] < offset:
                if self._target is None:
                    what = f"{_name(partition)} ends at offset {end[partition]}; the query was at offset {offset}"
                    lose(self._options.on_data_loss, what)
                end[partition] = offset
        return end

    # -- reading ----------------------------------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        planned = self._ahead.take((start, end))
        if planned is None:  # a replay
            self._ahead.settle()
            planned = self._plan(start, end)
        tasks, rows = planned
        if rows is not None:
            self._rows = rows
            self.__class__ = StreamReaderWithRows
        return tasks

    def _plan(self, start: dict[str, Any], end: dict[str, Any]) -> "Planned":
        """The tasks between two offsets, and the rows of it where they are few and in one task."""
        ranges = self._ranges_between(start, end)
        options = self._options
        tasks = split(ranges, options.min_partitions, options.max_records_per_partition)
        rows = None
        if self._is_small(tasks):
            rows = self._catalog.read(tasks, self._columns, BYTES_MAX)
        if rows is not None:
            return [RangePartition(*tasks)], rows
        return [RangePartition(task) for task in tasks], None

    def _is_small(self, tasks: Sequence[OffsetRange]) -> bool:
        options = self._options
        if not CAN_HAND_OVER or options.min_partitions or options.max_records_per_partition:
            return False
        return 0 < len(tasks) <= RANGES_MAX and sum(task.size for task in tasks) <= options.small_batch_rows

    def _ranges_between(self, start: dict[str, Any], end: dict[str, Any]) -> list[OffsetRange]:
        self._catalog.partitions()  # topics may be others by now
        begin, until = self._restore(start), self._restore(end)
        earliest = self._catalog.earliest(until)
        ranges = []
        for partition in sorted(until):
            first = begin.get(partition, earliest[partition])
            available = min(earliest[partition], until[partition])
            if first < available:
                lose(
                    self._options.on_data_loss,
                    f"Offsets {first} to {available - 1} of {_name(partition)} are gone",
                )
                first = available
            ranges.append(OffsetRange(partition.topic, partition.partition, first, until[partition]))
        return ranges

    def read(self, partition: InputPartition) -> Iterator[Any]:
        for part in _ranges(partition):
            yield from read_task(self._options, self._columns, part)

    def commit(self, end: dict[str, Any]) -> None:
        """Show progress in a group. It is for people to look at: the checkpoint is what counts."""
        if self._options.progress_group:
            self._ahead.after(lambda: self._publish(end))  # the batch that is being planned goes first

    def _publish(self, end: dict[str, Any]) -> None:
        try:
            self._catalog.publish(self._options.progress_group, self._restore(end))
        except KafkaError as error:
            _log.warning("progress not published", extra={"fields": {"reason": error.message}})

    def stop(self) -> None:
        self._ahead.close()
        self._catalog.close()

    # -- the checkpoint ---------------------------------------------------------------------------------------------

    def _checkpoint(self, offsets: Offsets) -> dict[str, Any]:
        """Offsets as Spark keeps them: with the topics' ids, and the leader epoch of each where it is known."""
        ids = self._catalog.topic_ids({p.topic for p in offsets})
        epochs = self._catalog.epochs
        topics: dict[str, Any] = {}
        for p in sorted(offsets):
            topic = topics.setdefault(p.topic, {"id": ids[p.topic], "offsets": {}, "epochs": {}})
            topic["offsets"][str(p.partition)] = offsets[p]
            topic["epochs"][str(p.partition)] = epochs.get(p, -1)
        return {"version": CHECKPOINT_VERSION, "topics": topics}

    def _restore(self, saved: dict[str, Any]) -> Offsets:
        """The offsets of a checkpoint; those of a topic that is another one now begin again, if that is allowed.

        What is now is what the catalog was told last.
        """
        if saved.get("version") != CHECKPOINT_VERSION or not isinstance(saved.get("topics"), dict):
            raise OptionError(
                f"The checkpoint holds offsets that this source did not write: {json.dumps(saved)[:200]}. Offsets of "
                "Spark's own 'kafka' format can be given as 'startingOffsets' to a query with a new checkpoint."
            )
        ids = self._catalog.topic_ids(saved["topics"])
        found: Offsets = {}
        for name, topic in saved["topics"].items():
            was, now = topic["id"], ids[name]
            if was and now and was != now:
                lose(
                    self._options.on_data_loss,
                    f"Topic '{name}' was deleted and created again since the checkpoint (its id was {was}, now {now}); "
                    f"the query was at {topic['offsets']}",
                )
                continue
            for number, offset in topic["offsets"].items():
                found[TopicPartition(name, int(number))] = int(offset)
        return found


class StreamReaderWithRows(StreamReader, HandsOverRows):
    """A reader that has just given a task whose rows it has as well.

    Spark tells such a reader by its class, but asks less of all readers of that class: they have no latest offset to
    report. So a reader is one only from its answer until it is asked for the rows, which comes next.
    """

    def getCache(self, start: dict[str, Any], end: dict[str, Any]) -> Iterator[Any]:  # noqa: N802 (Spark's name)
        rows, self._rows = self._rows, []
        self.__class__ = StreamReader
        return iter(rows)


def _name(partition: TopicPartition) -> str:
    return f"{partition.topic}-{partition.partition}"
