"""Arrow as the bulk interface of the client: record batches in, Arrow columns out, and back.

Owns the shape of the tables (names and types of columns) and the step between Arrow arrays and the buffers of
`records.columns`. Invariant: no Python step per record, and no copy of keys and values but the one that puts them
together. Needs pyarrow (`pip install headrace[arrow]`), which nothing else of the client imports. Used by
`arrow_read` and `arrow_write`, which have the requests.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from headrace.client.errors import ClientError
from headrace.records.columns import Columns, Rows, Source

try:
    import pyarrow as pa
except ImportError as error:  # pragma: no cover - depends on the installation
    raise ClientError("pyarrow is not installed", "pip install 'headrace[arrow]'") from error

HEADER_TYPE: Final = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))
COLUMN_TYPES: Final[dict[str, Any]] = {
    "key": pa.binary(),
    "value": pa.binary(),
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestampType": pa.int32(),
    "headers": HEADER_TYPE,
}
DEFAULT_COLUMNS: Final = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType")


def schema_of(columns: Sequence[str]) -> Any:
    """The Arrow schema of these columns."""
    return pa.schema([pa.field(name, COLUMN_TYPES[name]) for name in columns])


class TableMaker:
    """Makes record batches of one partition's columns; what is the same in every row is made once and sliced."""

    def __init__(self, topic: str, partition: int, columns: Sequence[str]) -> None:
        unknown = [name for name in columns if name not in COLUMN_TYPES]
        if unknown:
            raise ClientError(f"no such column: {unknown[0]}", f"columns are {', '.join(COLUMN_TYPES)}")
        self.columns = tuple(columns)
        self.schema = schema_of(columns)
        self._topic, self._partition = topic, partition
        self._same: dict[tuple[str, Any], Any] = {}

    def new_columns(self, value_bytes: int = 0) -> Columns:
        """Empty columns that take what is wanted of records and pass over the rest; with room for values."""
        return Columns("key" in self.columns, "value" in self.columns, "headers" in self.columns, value_bytes)

    def make(self, columns: Columns, timestamp_type: int) -> Any:
        """The columns as an Arrow record batch."""
        rows = columns.row_count
        offsets, timestamps = columns.microsecond_buffers()
        arrays = []
        for name in self.columns:
            if name == "key":
                arrays.append(_binary(columns.keys.buffers(), pa.binary()))
            elif name == "value":
                arrays.append(_binary(columns.values.buffers(), pa.binary()))
            elif name == "offset":
                arrays.append(pa.Array.from_buffers(pa.int64(), rows, [None, pa.py_buffer(offsets)]))
            elif name == "timestamp":
                arrays.append(
                    pa.Array.from_buffers(COLUMN_TYPES[name], rows, [None, pa.py_buffer(timestamps)])
                )
            elif name == "headers":
                arrays.append(_headers(columns))
            elif name == "topic":
                arrays.append(self._repeat(name, self._topic, rows))
            elif name == "partition":
                arrays.append(self._repeat(name, self._partition, rows))
            else:
                arrays.append(self._repeat(name, timestamp_type, rows))
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _repeat(self, name: str, value: Any, rows: int) -> Any:
        made = self._same.get((name, value))
        if made is None or len(made) < rows:
            made = pa.repeat(pa.scalar(value, COLUMN_TYPES[name]), rows)
            self._same[name, value] = made
        return made.slice(0, rows)


def _binary(buffers: tuple[int, int, memoryview, memoryview, memoryview], kind: Any) -> Any:
    count, nulls, valid, offsets, data = buffers
    validity = pa.py_buffer(valid) if nulls else None
    return pa.Array.from_buffers(
        kind, count, [validity, pa.py_buffer(offsets), pa.py_buffer(data)], null_count=nulls
    )


def _headers(columns: Columns) -> Any:
    count, nulls, valid, offsets, _ = columns.header_lists.buffers()
    keys = _binary(columns.header_keys.buffers(), pa.string())
    values = _binary(columns.header_values.buffers(), pa.binary())
    pairs = pa.StructArray.from_arrays([keys, values], fields=list(HEADER_TYPE.value_type))
    validity = pa.py_buffer(valid) if nulls else None
    return pa.Array.from_buffers(
        HEADER_TYPE, count, [validity, pa.py_buffer(offsets)], null_count=nulls, children=[pairs]
    )


# -- from Arrow to records ---------------------------------------------------------------------------------------------


def rows_of(
    batch: Any,
    *,
    key: str | None = "key",
    value: str | None = "value",
    timestamp: str | None = "timestamp",
    headers: str | None = "headers",
) -> Rows:
    """The rows of a record batch (or a table of one chunk a column) as records; columns it lacks are null."""
    names = set(batch.schema.names)

    def find(name: str | None) -> Any:
        return _single(batch.column(name)) if name is not None and name in names else None

    lists, header_keys, header_values = _header_sources(find(headers))
    return Rows(
        batch.num_rows,
        _bytes_source(find(key), key),
        _bytes_source(find(value), value),
        _timestamps(find(timestamp)),
        lists,
        header_keys,
        header_values,
    )


def partitions_of(batch: Any, name: str = "partition") -> memoryview | None:
    """The partition column as 32-bit numbers, -1 for null; None when there is no such column."""
    if name not in batch.schema.names:
        return None
    import pyarrow.compute as pc  # a third of a second of a new worker's start, and readers never need it

    array = pc.fill_null(_single(batch.column(name)).cast(pa.int32()), -1)
    # A negative number is a mistake, but -1 means "none" to the codec: keep the mistake apart.
    array = pc.if_else(
        pc.and_(pc.less(array, 0), pc.is_valid(_single(batch.column(name)))), pa.scalar(-2, pa.int32()), array
    )
    return _numbers(array, 4)


def _single(column: Any) -> Any:
    if isinstance(column, pa.ChunkedArray):
        return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    return column


def _bytes_source(array: Any, name: str | None) -> Source | None:
    if array is None or pa.types.is_null(array.type):
        return None
    if not (pa.types.is_binary(array.type) or pa.types.is_string(array.type)):
        try:
            array = array.cast(pa.binary()) if not _is_text(array.type) else array.cast(pa.string())
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            raise ClientError(
                f"column {name!r} is {array.type}", "give it as bytes or text: cast it first"
            ) from None
    valid, offsets, data = array.buffers()
    return Source(
        len(array),
        array.offset,
        memoryview(valid) if valid is not None and array.null_count else None,
        memoryview(offsets) if offsets is not None else memoryview(b""),
        memoryview(data) if data is not None else None,
    )


def _is_text(kind: Any) -> bool:
    return bool(pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _timestamps(array: Any) -> memoryview | None:
    """Milliseconds since 1970."""
    if array is None:
        return None
    if pa.types.is_timestamp(array.type):
        array = array.cast(pa.timestamp("ms", tz=array.type.tz), safe=False)
    array = array.cast(pa.int64())
    if array.null_count:
        raise ClientError("a timestamp is null", "fill it, or leave the column out")
    return _numbers(array, 8)


def _numbers(array: Any, width: int) -> memoryview:
    data = array.buffers()[1]
    if data is None:
        return memoryview(b"")
    return memoryview(data)[array.offset * width : (array.offset + len(array)) * width]


def _header_sources(array: Any) -> tuple[memoryview | None, Source | None, Source | None]:
    if array is None or pa.types.is_null(array.type):
        return None, None, None
    import pyarrow.compute as pc

    pairs = array.type.value_type if pa.types.is_list(array.type) else None
    if pairs is None or not pa.types.is_struct(pairs) or {f.name for f in pairs} != {"key", "value"}:
        raise ClientError(
            f"the headers are {array.type}", "make them array<struct<key string, value binary>>"
        )
    offsets = array.buffers()[1]
    lists = memoryview(offsets)[array.offset * 4 : (array.offset + len(array) + 1) * 4]
    if array.null_count:  # a null list may have a length: say that it has none
        array = pc.fill_null(array, pa.scalar([], array.type))
        offsets = array.buffers()[1]
        lists = memoryview(offsets)[array.offset * 4 : (array.offset + len(array) + 1) * 4]
    children = array.values
    keys = _bytes_source(pc.struct_field(children, "key"), "headers.key")
    values = _bytes_source(pc.struct_field(children, "value"), "headers.value")
    return lists, keys, values


def concat(batches: Iterable[Any], columns: Sequence[str]) -> Any:
    """One table of all these record batches."""
    return pa.Table.from_batches(list(batches), schema=schema_of(columns))
