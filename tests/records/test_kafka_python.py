"""Byte for byte against kafka-python: its builder makes the same batches, and each reads the other's."""

from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.record.default_records import DefaultRecordBatchBuilder
from kafka.record.memory_records import MemoryRecords

from headrace.records.batch import HEADER_SIZE, crc_ok, parse_header
from headrace.records.builder import build_batch, iter_records
from headrace.records.compression import decompress
from tests.records.strategies import headers, nullable_bytes
from tests.records.test_codec import RecordInput

# kafka-python refuses timestamps that are negative.
record_lists = st.lists(
    st.tuples(st.integers(0, 2**45), nullable_bytes, nullable_bytes, headers), min_size=1, max_size=30
)
producers = st.sampled_from([(-1, -1, -1, False), (0, 0, 0, False), (2**40, 2**15 - 1, 2**31 - 1, True)])


def build_theirs(
    records: list[RecordInput], compression: int, producer: tuple[int, int, int, bool] = (-1, -1, -1, False)
) -> bytes:
    producer_id, producer_epoch, base_sequence, transactional = producer
    builder = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=compression,
        is_transactional=transactional,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        batch_size=1 << 30,
    )
    for offset, (timestamp, key, value, record_headers) in enumerate(records):
        assert builder.append(offset, timestamp, key, value, list(record_headers)) is not None
    return bytes(builder.build())


@given(record_lists, producers)
def test_the_same_records_make_the_same_bytes(
    codec: ModuleType, records: list[RecordInput], producer: tuple[int, int, int, bool]
) -> None:
    producer_id, producer_epoch, base_sequence, transactional = producer
    theirs = build_theirs(records, 0, producer)
    ours = build_batch(
        records,
        partition_leader_epoch=parse_header(theirs).partition_leader_epoch,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        transactional=transactional,
    )
    assert ours == theirs


@pytest.mark.parametrize("compression", range(5))
@settings(max_examples=25)
@given(records=record_lists)
def test_their_batches_are_read(codec: ModuleType, compression: int, records: list[RecordInput]) -> None:
    records = [*records, (5, b"key", b"squeezable " * 500, (("h", b"1"),))]
    theirs = build_theirs(records, compression)
    header = parse_header(theirs)
    assert header.compression == compression
    assert crc_ok(theirs, 0, len(theirs))
    assert [record[1:] for record in iter_records(theirs)] == records
    inflated = decompress(compression, memoryview(theirs)[HEADER_SIZE:])
    assert inflated == build_batch(records)[HEADER_SIZE:]


@pytest.mark.parametrize("compression", range(5))
@settings(max_examples=25)
@given(records=record_lists)
def test_they_read_our_batches(codec: ModuleType, compression: int, records: list[RecordInput]) -> None:
    ours = build_batch(records, base_offset=40, compression=compression)
    (batch,) = MemoryRecords(ours + ours[:50])
    assert batch.validate_crc()
    assert batch.compression_type == compression
    found = [(one.offset, one.timestamp, one.key, one.value, tuple(one.headers)) for one in batch]
    assert found == [(40 + index, *record) for index, record in enumerate(records)]


@pytest.mark.parametrize("compression", range(5))
def test_many_blocks_of_a_large_batch_are_read_both_ways(codec: ModuleType, compression: int) -> None:
    records: list[RecordInput] = [
        (1_700_000_000_000 + index, b"%d" % index, b"value %d " % (index * 7919) * 20, ())
        for index in range(3_000)
    ]
    assert [record[1:] for record in iter_records(build_theirs(records, compression))] == records
    (batch,) = MemoryRecords(build_batch(records, compression=compression))
    assert [(one.timestamp, one.key, one.value, tuple(one.headers)) for one in batch] == records
