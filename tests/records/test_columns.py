"""Records to columns and back, by both codecs, held against the record codec and against hostile bytes."""

from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import ErrorCode, KafkaError
from headrace.client.partitioner import murmur2
from headrace.records import columns as chosen
from headrace.records.batch import Record, TimestampType, parse_header
from headrace.records.builder import build_batch, iter_records
from tests.records.conftest import load
from tests.records.strategies import record_lists

RecordInput = tuple[int, bytes | None, bytes | None, tuple[tuple[str, bytes | None], ...]]
END = 2**62


@pytest.fixture(scope="module", params=["interpreted", "compiled"])
def arrow_rows(request: pytest.FixtureRequest) -> ModuleType:
    """One of the two codecs of the other direction."""
    return load(request.param, "_arrow_rows")


@pytest.fixture(scope="module", params=["interpreted", "compiled"])
def arrow(request: pytest.FixtureRequest) -> ModuleType:
    """One of the two codecs."""
    return load(request.param, "_arrow")


def column(buffers: tuple[int, int, memoryview, memoryview, memoryview]) -> list[bytes | None]:
    count, nulls, valid, offsets, data = buffers
    ends = offsets.cast("i")
    found = [
        bytes(data[ends[i] : ends[i + 1]]) if valid[i >> 3] >> (i & 7) & 1 else None for i in range(count)
    ]
    assert found.count(None) == nulls
    return found


def records_of(columns: object) -> list[Record]:
    """What the columns hold, as records again."""
    assert isinstance(columns, object)
    offsets, timestamps = (buffer.cast("q") for buffer in columns.number_buffers())  # type: ignore[attr-defined]
    keys, values = column(columns.keys.buffers()), column(columns.values.buffers())  # type: ignore[attr-defined]
    names, contents = column(columns.header_keys.buffers()), column(columns.header_values.buffers())  # type: ignore[attr-defined]
    ends = columns.header_lists.buffers()[3].cast("i")  # type: ignore[attr-defined]
    found = []
    for i, offset in enumerate(offsets):
        pairs = zip(names[ends[i] : ends[i + 1]], contents[ends[i] : ends[i + 1]], strict=True)
        headers = tuple(
            ((name or b"").decode("utf-8", "surrogateescape"), content) for name, content in pairs
        )
        found.append(Record(offset, timestamps[i], keys[i], values[i], headers))
    return found


@given(
    batches=st.lists(st.tuples(record_lists, st.sampled_from([0, 1, 2, 3, 4])), min_size=1, max_size=4),
    base=st.integers(0, 2**40),
    window=st.tuples(st.integers(0, 60), st.integers(0, 120)),
    appended=st.booleans(),
)
def test_columns_hold_the_records_of_their_batches(
    arrow: ModuleType,
    batches: list[tuple[list[RecordInput], int]],
    base: int,
    window: tuple[int, int],
    appended: bool,
) -> None:
    columns = arrow.Columns(True, True, True)
    expected: list[Record] = []
    offset, first, end = base, base + window[0], base + window[1]
    for records, compression in batches:
        kind = TimestampType.LOG_APPEND_TIME if appended else TimestampType.CREATE_TIME
        batch = build_batch(records, base_offset=offset, compression=compression, timestamp_type=kind)
        wanted = [record for record in iter_records(batch) if first <= record.offset < end]
        assert chosen.add_batch(columns, parse_header(batch), batch, first, end) == len(wanted)
        expected += wanted
        offset += len(records)
    assert records_of(columns) == expected
    assert columns.row_count == len(expected)


@given(
    records=record_lists, damage=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=3)
)
def test_damaged_records_are_refused_as_the_record_codec_refuses_them(
    arrow: ModuleType, records: list[RecordInput], damage: list[tuple[int, int]]
) -> None:
    batch = bytearray(build_batch(records))
    for position, byte in damage:
        batch[61 + position % (len(batch) - 61)] = byte
    header = parse_header(batch)
    columns = arrow.Columns(True, True, True)
    try:
        expected = iter_records(bytes(batch))
    except KafkaError:
        with pytest.raises(KafkaError):
            chosen.add_batch(columns, header, bytes(batch), 0, END)
        assert columns.row_count == 0
    else:
        chosen.add_batch(columns, header, bytes(batch), 0, END)
        assert records_of(columns) == expected


def source(arrow_rows: ModuleType, cells: list[bytes | None], first: int = 0) -> object:
    """A column as Arrow lays it out, with `first` entries before it that do not belong to it."""
    cells = [b"zz"] * first + cells
    valid, ends, data = bytearray((len(cells) + 7) // 8 or 1), [0], b""
    for i, cell in enumerate(cells):
        data += cell or b""
        ends.append(len(data))
        valid[i >> 3] |= (cell is not None) << (i & 7)
    offsets = memoryview(bytearray(4 * len(ends))).cast("i")
    for i, end in enumerate(ends):
        offsets[i] = end
    return arrow_rows.Source(
        len(cells) - first, first, memoryview(valid), offsets.cast("B"), memoryview(data)
    )


def rows_of(arrow_rows: ModuleType, records: list[RecordInput], first: int = 0) -> object:
    timestamps = memoryview(bytearray(8 * len(records))).cast("q")
    lists = memoryview(bytearray(4 * (len(records) + 1))).cast("i")
    names: list[bytes | None] = []
    contents: list[bytes | None] = []
    for i, (timestamp, _, _, headers) in enumerate(records):
        timestamps[i] = timestamp
        names += [name.encode() for name, _ in headers]
        contents += [content for _, content in headers]
        lists[i + 1] = len(names)
    return arrow_rows.Rows(
        len(records),
        source(arrow_rows, [key for _, key, _, _ in records], first),
        source(arrow_rows, [value for _, _, value, _ in records], first),
        timestamps.cast("B"),
        lists.cast("B"),
        source(arrow_rows, names),
        source(arrow_rows, contents),
    )


@given(records=record_lists, first=st.integers(0, 9), compression=st.sampled_from([0, 1, 2, 3, 4]))
def test_rows_are_written_byte_for_byte_as_the_builder_writes_records(
    arrow_rows: ModuleType, records: list[RecordInput], first: int, compression: int
) -> None:
    rows = rows_of(arrow_rows, records, first)
    written, done = chosen.build_batch_of_rows(
        rows, None, 0, len(records), size_max=1 << 20, now_ms=0, compression=compression
    )
    assert done == len(records)
    assert written == build_batch(records, compression=compression)


@given(
    records=record_lists,
    partitions=st.integers(1, 5),
    size_max=st.integers(1500, 3000),
    turn=st.integers(0, 4),
)
def test_rows_reach_the_partition_of_their_key_in_order(
    arrow_rows: ModuleType, records: list[RecordInput], partitions: int, size_max: int, turn: int
) -> None:
    rows = rows_of(arrow_rows, records)
    order, starts = rows.assign(None, partitions, turn)  # type: ignore[attr-defined]
    seen = 0
    for partition in range(partitions):
        at, last = starts[partition], starts[partition + 1]
        wanted = [records[order[i]] for i in range(at, last)]
        assert [order[i] for i in range(at, last)] == sorted(order[i] for i in range(at, last))
        for _, key, _, _ in wanted:
            assert key is None or (murmur2(key) & 0x7FFFFFFF) % partitions == partition
        found = []
        while at < last:
            batch, at = chosen.build_batch_of_rows(rows, order, at, last, size_max=size_max, now_ms=0)
            assert len(batch) <= size_max
            found += [(r.timestamp, r.key, r.value, r.headers) for r in iter_records(batch)]
        assert found == wanted
        seen += len(wanted)
    assert seen == len(records)


YEAR_MS = 365 * 24 * 3600 * 1000


@given(records=record_lists)
def test_the_digest_depends_on_the_rows_and_not_on_their_order(
    arrow_rows: ModuleType, records: list[RecordInput]
) -> None:
    # In any order each timestamp must be within reach of the first one's.
    records = [(timestamp % YEAR_MS, *rest) for timestamp, *rest in records]

    def digest(rows: list[RecordInput]) -> int:
        made = rows_of(arrow_rows, rows)
        chosen.build_batch_of_rows(made, None, 0, len(rows), size_max=1 << 20, now_ms=0)
        return made.content_digest  # type: ignore[attr-defined, no-any-return]

    assert digest(records) == digest(records[::-1])
    timestamp, key, value, headers = records[0]
    assert digest(records) != digest([(timestamp, key, (value or b"") + b"!", headers), *records[1:]])


def test_both_codecs_agree_on_digests() -> None:
    records: list[RecordInput] = [(1, b"key", b"a value of some length", ()), (2, None, b"", ())]
    found = set()
    for kind in ("interpreted", "compiled"):
        rows = rows_of(load(kind, "_arrow_rows"), records)
        chosen.build_batch_of_rows(rows, None, 0, 2, size_max=1000, now_ms=0)
        found.add(rows.content_digest)  # type: ignore[attr-defined]
    assert len(found) == 1


def test_a_row_that_fits_no_batch_is_refused(arrow_rows: ModuleType) -> None:
    rows = rows_of(arrow_rows, [(0, None, b"x" * 2000, ())])
    with pytest.raises(KafkaError) as refused:
        chosen.build_batch_of_rows(rows, None, 0, 1, size_max=1000, now_ms=0)
    assert refused.value.code is ErrorCode.MESSAGE_TOO_LARGE


def test_a_partition_that_does_not_exist_is_refused(arrow_rows: ModuleType) -> None:
    rows = rows_of(arrow_rows, [(0, None, b"x", ())])
    given_partition = memoryview(bytearray(4)).cast("i")
    given_partition[0] = 3
    with pytest.raises(KafkaError, match="0 to 2"):
        rows.assign(given_partition.cast("B"), 3, 0)  # type: ignore[attr-defined]


def test_offsets_outside_the_data_are_refused(arrow_rows: ModuleType) -> None:
    offsets = memoryview(bytearray(8)).cast("i")
    offsets[1] = 5
    with pytest.raises(ValueError, match="do not fit"):
        arrow_rows.Source(1, 0, None, offsets.cast("B"), memoryview(b"abcd"))
