"""The header of a batch: its fields, what is refused, and what may be patched in place."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import ErrorCode, KafkaError
from headrace.records import batch
from headrace.records.batch import BatchHeader, assign, crc_ok, parse_header, set_log_append_time
from headrace.records.builder import build_batch, iter_records

RECORDS = [(1_000, b"k", b"v", ()), (3_000, None, None, ()), (2_000, b"", b"", (("h", b"1"),))]


def test_header_is_read_in_wire_order() -> None:
    fields = (7, 100, 3, 2, 0xFFFFFFFE, 0x14, 9, 11, 12, 13, 14, 15, 10)
    raw = struct.pack(">qiibIhiqqqhii", *fields)
    header = parse_header(b"junk" + raw, 4)
    assert header == BatchHeader(*fields)
    assert header.size == 112
    assert header.last_offset == 16
    assert header.next_offset == 17
    assert header.compression == 4
    assert header.is_transactional
    assert not header.is_control
    assert not header.is_log_append_time
    assert header.has_producer_id


@pytest.mark.parametrize(
    "bit, name",
    [
        (batch.TIMESTAMP_TYPE_BIT, "is_log_append_time"),
        (batch.TRANSACTIONAL_BIT, "is_transactional"),
        (batch.CONTROL_BIT, "is_control"),
        (batch.DELETE_HORIZON_BIT, "has_delete_horizon"),
    ],
)
def test_each_attribute_bit_has_its_property(bit: int, name: str) -> None:
    header = parse_header(build_batch(RECORDS))
    assert not getattr(header, name)
    assert getattr(header._replace(attributes=bit), name)


@pytest.mark.parametrize(
    "base_sequence, last_offset_delta, expected",
    [(-1, 4, -1), (0, 0, 0), (5, 4, 9), (2**31 - 1, 0, 2**31 - 1), (2**31 - 1, 1, 0), (2**31 - 3, 5, 2)],
)
def test_last_sequence_wraps_after_the_largest_int(
    base_sequence: int, last_offset_delta: int, expected: int
) -> None:
    header = parse_header(build_batch(RECORDS))
    header = header._replace(base_sequence=base_sequence, last_offset_delta=last_offset_delta)
    assert header.last_sequence == expected


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("size", [17, 60, 200])
def test_older_formats_are_refused_by_name(magic: int, size: int) -> None:
    raw = bytearray(size)
    raw[batch.MAGIC_POSITION] = magic
    raw[8:12] = (size - 12).to_bytes(4, "big")
    with pytest.raises(KafkaError) as caught:
        parse_header(raw)
    assert caught.value.code is ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT


@pytest.mark.parametrize("magic", [-1, 3, 127])
def test_unknown_magic_is_corruption(magic: int) -> None:
    raw = bytearray(build_batch(RECORDS))
    raw[batch.MAGIC_POSITION] = magic & 0xFF
    with pytest.raises(KafkaError) as caught:
        parse_header(raw)
    assert caught.value.code is ErrorCode.CORRUPT_MESSAGE


@pytest.mark.parametrize("length", [-(2**31), -1, 0, 48])
def test_a_length_below_an_empty_batch_is_corruption(length: int) -> None:
    raw = bytearray(build_batch(RECORDS))
    raw[8:12] = length.to_bytes(4, "big", signed=True)
    with pytest.raises(KafkaError) as caught:
        parse_header(raw)
    assert caught.value.code is ErrorCode.CORRUPT_MESSAGE


@given(st.binary(max_size=80), st.integers(-5, 90))
def test_any_bytes_are_a_header_or_an_error_of_kafka(raw: bytes, pos: int) -> None:
    code = None
    try:
        assert parse_header(raw, pos).magic == 2
    except KafkaError as error:
        code = error.code
    assert code in (None, ErrorCode.CORRUPT_MESSAGE, ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT)


def test_assigning_a_place_leaves_the_crc_right() -> None:
    raw = bytearray(b"before") + build_batch(RECORDS) + b"after"
    assign(raw, 6, 2**40, 77)
    header = parse_header(raw, 6)
    assert (header.base_offset, header.partition_leader_epoch) == (2**40, 77)
    assert crc_ok(raw, 6, header.size)
    assert raw[:6] == b"before"
    assert raw[-5:] == b"after"
    assert [record.offset for record in iter_records(raw[6:])] == [2**40, 2**40 + 1, 2**40 + 2]


def test_log_append_time_is_the_time_of_every_record() -> None:
    raw = bytearray(build_batch(RECORDS))
    set_log_append_time(memoryview(raw), 0, len(raw), 99_000)
    header = parse_header(raw)
    assert header.is_log_append_time
    assert header.max_timestamp == 99_000
    assert header.base_timestamp == 1_000
    assert crc_ok(raw, 0, len(raw))
    assert {record.timestamp for record in iter_records(raw)} == {99_000}


@given(st.data())
def test_every_flipped_bit_behind_the_crc_field_is_noticed(data: st.DataObject) -> None:
    raw = bytearray(build_batch(RECORDS, compression=1))
    assert crc_ok(raw, 0, len(raw))
    bit = data.draw(st.integers(batch.CRC_POSITION * 8, len(raw) * 8 - 1))
    raw[bit // 8] ^= 1 << (bit % 8)
    assert not crc_ok(raw, 0, len(raw))


@pytest.mark.parametrize("pos, size", [(0, 60), (0, 10_000), (-1, 80), (1, 80)])
def test_crc_of_bytes_that_are_not_all_there_is_wrong(pos: int, size: int) -> None:
    raw = build_batch(RECORDS)[:80]
    assert not crc_ok(raw, pos, size)
