"""Whole batches: built, read back, recompressed, and rebuilt with fewer records as compaction does."""

from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import ErrorCode, KafkaError
from headrace.records.batch import (
    NO_TIMESTAMP,
    BatchHeader,
    TimestampType,
    assign,
    crc_ok,
    parse_header,
    seal,
)
from headrace.records.builder import build_batch, iter_batches, iter_records, rebuild_batch, recompress
from tests.records.strategies import record_lists
from tests.records.test_codec import RecordInput

RECORDS: list[RecordInput] = [
    (1_000 + index, b"key-%d" % (index % 7), b"value" * index, (("n", b"%d" % index),)) for index in range(50)
]


@given(record_lists, st.sampled_from(range(5)), st.integers(0, 2**60), st.integers(-1, 2**31 - 1))
def test_a_batch_holds_what_was_put_into_it(
    codec: ModuleType, records: list[RecordInput], compression: int, base_offset: int, epoch: int
) -> None:
    raw = build_batch(records, base_offset=base_offset, partition_leader_epoch=epoch, compression=compression)
    header = parse_header(raw)
    assert header.size == len(raw)
    assert crc_ok(raw, 0, len(raw))
    assert header._replace(batch_length=0, crc=0) == BatchHeader(
        base_offset=base_offset,
        batch_length=0,
        partition_leader_epoch=epoch,
        magic=2,
        crc=0,
        attributes=compression,
        last_offset_delta=len(records) - 1,
        base_timestamp=records[0][0],
        max_timestamp=max(NO_TIMESTAMP, *(timestamp for timestamp, _, _, _ in records)),
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        record_count=len(records),
    )
    assert [one[1:] for one in iter_records(raw)] == records
    assert [one.offset for one in iter_records(raw)] == list(range(base_offset, base_offset + len(records)))


def test_producer_fields_and_attributes_are_written(codec: ModuleType) -> None:
    raw = build_batch(
        RECORDS,
        compression=1,
        timestamp_type=TimestampType.LOG_APPEND_TIME,
        producer_id=2**40,
        producer_epoch=7,
        base_sequence=2**31 - 10,
        transactional=True,
        control=True,
    )
    header = parse_header(raw)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (2**40, 7, 2**31 - 10)
    assert header.last_sequence == 39
    assert header.attributes == 0x01 | 0x08 | 0x10 | 0x20
    assert {one.timestamp for one in iter_records(raw)} == {1_049}


def test_a_batch_without_records_is_not_built(codec: ModuleType) -> None:
    with pytest.raises(ValueError):
        build_batch([])


@pytest.mark.parametrize("before", range(5))
@pytest.mark.parametrize("after", range(5))
def test_recompressing_changes_the_codec_and_nothing_else(codec: ModuleType, before: int, after: int) -> None:
    raw = build_batch(
        RECORDS, base_offset=9, compression=before, producer_id=4, producer_epoch=1, base_sequence=0
    )
    other = recompress(raw, after)
    assert crc_ok(other, 0, len(other))
    unlike = {"batch_length": 0, "crc": 0, "attributes": after}
    assert parse_header(other)._replace(**unlike) == parse_header(raw)._replace(**unlike)
    assert parse_header(other).compression == after
    assert iter_records(other) == iter_records(raw)
    assert recompress(other, 0) == recompress(raw, 0)


@given(st.data(), st.sampled_from(range(5)))
def test_a_rebuilt_batch_keeps_its_range_and_the_records_left(
    codec: ModuleType, data: st.DataObject, compression: int
) -> None:
    raw = build_batch(
        RECORDS, base_offset=500, compression=compression, producer_id=4, producer_epoch=1, base_sequence=3
    )
    header = parse_header(raw)
    records = iter_records(raw)
    left = [one for one in records if data.draw(st.booleans())]
    rebuilt = rebuild_batch(header, left)
    again = parse_header(rebuilt)
    assert crc_ok(rebuilt, 0, len(rebuilt))
    assert iter_records(rebuilt) == left
    assert (again.base_offset, again.last_offset) == (header.base_offset, header.last_offset)
    assert (again.producer_id, again.producer_epoch, again.last_sequence) == (4, 1, header.last_sequence)
    assert again.record_count == len(left)
    assert again.max_timestamp == (left[-1].timestamp if left else header.max_timestamp)
    if len(left) == len(records):
        assert rebuilt == raw


def test_a_batch_that_lost_its_last_record_is_a_bare_header(codec: ModuleType) -> None:
    raw = rebuild_batch(parse_header(build_batch(RECORDS, compression=4)), [])
    assert len(raw) == 61
    assert parse_header(raw).compression == 0
    assert iter_records(raw) == []
    assert iter_records(recompress(raw, 3)) == []
    marked = bytearray(raw)
    marked[22] |= 4  # an empty batch of another writer may still name the codec its records had
    seal(marked, 0, len(marked))
    assert iter_records(marked) == []


def test_rebuilding_under_log_append_time_keeps_that_time(codec: ModuleType) -> None:
    raw = build_batch(RECORDS, timestamp_type=TimestampType.LOG_APPEND_TIME)
    records = iter_records(raw)
    rebuilt = rebuild_batch(parse_header(raw), records[:3])
    assert iter_records(rebuilt) == records[:3]
    assert parse_header(rebuilt).max_timestamp == 1_049


def test_a_record_of_another_batch_is_not_taken_in(codec: ModuleType) -> None:
    raw = build_batch(RECORDS)
    foreign = iter_records(build_batch(RECORDS, base_offset=50))
    with pytest.raises(ValueError):
        rebuild_batch(parse_header(raw), foreign)


def test_batches_of_a_reply_are_read_up_to_the_one_cut_short(codec: ModuleType) -> None:
    batches = [build_batch(RECORDS[:3], base_offset=offset) for offset in (0, 3, 6)]
    whole = b"".join(batches)
    for cut in range(len(whole) + 1):
        found = list(iter_batches(whole[:cut]))
        assert len(found) == cut // len(batches[0])
        assert [bytes(view) for _, view in found] == batches[: len(found)]
        assert [header.base_offset for header, _ in found] == [0, 3, 6][: len(found)]


def test_a_batch_with_a_wrong_crc_is_not_handed_out(codec: ModuleType) -> None:
    raw = bytearray(build_batch(RECORDS[:3]) * 2)
    raw[-1] ^= 1
    found = iter_batches(raw)
    next(found)
    with pytest.raises(KafkaError) as caught:
        next(found)
    assert caught.value.code is ErrorCode.CORRUPT_MESSAGE
    assert len(list(iter_batches(raw, check_crc=False))) == 2


def test_inflation_is_bounded_when_records_are_read(codec: ModuleType) -> None:
    raw = build_batch([(0, None, bytes(1_000_000), ())], compression=4)
    assert len(raw) < 1_000
    assert len(iter_records(raw)) == 1
    with pytest.raises(KafkaError) as caught:
        iter_records(raw, limit=999_999)
    assert caught.value.code is ErrorCode.CORRUPT_MESSAGE


def test_a_batch_cut_short_is_refused(codec: ModuleType) -> None:
    raw = build_batch(RECORDS)
    with pytest.raises(KafkaError) as caught:
        iter_records(raw[:-1])
    assert caught.value.code is ErrorCode.CORRUPT_MESSAGE


def test_a_view_into_a_larger_buffer_is_enough(codec: ModuleType) -> None:
    raw = build_batch(RECORDS)
    buffer = bytearray(7) + raw + raw
    assign(buffer, 7, 1_000, 0)
    assert iter_records(memoryview(buffer)[7:])[0].offset == 1_000
