"""From fetched bytes to records: from the middle of a batch, without control records, without aborted ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import ErrorCode, KafkaError
from headrace.client.fetched import Chunk
from headrace.client.topics import TopicPartition
from headrace.records.builder import build_batch

WHERE = TopicPartition("t", 3)
COMMIT = b"\x00\x00\x00\x01"
ABORT = b"\x00\x00\x00\x00"


def batch(base_offset: int, values: list[bytes], **more: int | bool) -> bytes:
    records = [(1_000 + at, None, value, ()) for at, value in enumerate(values)]
    return build_batch(records, base_offset=base_offset, partition_leader_epoch=5, **more)  # type: ignore[arg-type]


def marker(base_offset: int, key: bytes, producer_id: int) -> bytes:
    return build_batch(
        [(0, key, b"\x00\x00\x00\x00\x00\x00", ())],
        base_offset=base_offset,
        producer_id=producer_id,
        producer_epoch=0,
        transactional=True,
        control=True,
    )


def chunk(data: bytes, start: int, aborted: list[tuple[int, int]] | None = None) -> Chunk:
    return Chunk(WHERE, memoryview(data), start, aborted, check_crcs=True)


def drain(of: Chunk, step: int = 1_000) -> list[tuple[int, bytes | None]]:
    out: list[tuple[int, bytes | None]] = []
    while records := of.take(step):
        out += [(record.offset, record.value) for record in records]
    return out


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.data(), st.sampled_from([0, 1, 2, 3, 4]))
def test_every_offset_from_the_start_on_comes_out_once(
    sizes: list[int], data: st.DataObject, codec: int
) -> None:
    stream, expected, offset = b"", [], 40
    for size in sizes:
        values = [b"%d" % (offset + at) for at in range(size)]
        stream += batch(offset, values, compression=codec)
        expected += [(offset + at, value) for at, value in enumerate(values)]
        offset += size
    start = data.draw(st.integers(40, offset))
    step = data.draw(st.integers(1, 7))
    cut = data.draw(st.integers(0, 60))  # the last batch of an answer may be cut short
    whole = chunk(stream + batch(offset, [b"cut"])[:cut], start)
    assert whole.end_offset == offset
    assert drain(whole, step) == [item for item in expected if item[0] >= start]
    assert whole.next_offset == offset


def test_control_records_are_passed_over_and_the_position_moves_past_them() -> None:
    data = batch(0, [b"a"]) + marker(1, COMMIT, 9) + batch(2, [b"b"]) + marker(3, COMMIT, 9)
    read = chunk(data, 0)
    assert drain(read) == [(0, b"a"), (2, b"b")]
    assert read.next_offset == 4


def test_aborted_records_stay_hidden_and_others_of_the_same_time_do_not() -> None:
    data = (
        batch(0, [b"aborted"], producer_id=1, producer_epoch=0, base_sequence=0, transactional=True)
        + batch(1, [b"committed"], producer_id=2, producer_epoch=0, base_sequence=0, transactional=True)
        + batch(2, [b"plain"])
        + marker(3, ABORT, 1)
        + marker(4, COMMIT, 2)
        + batch(5, [b"later"], producer_id=1, producer_epoch=0, base_sequence=1, transactional=True)
        + marker(6, COMMIT, 1)
    )
    assert drain(chunk(data, 0, aborted=[(1, 0)])) == [(1, b"committed"), (2, b"plain"), (5, b"later")]
    assert [value for _, value in drain(chunk(data, 0))] == [b"aborted", b"committed", b"plain", b"later"]


def test_a_producer_that_aborts_twice_is_hidden_twice() -> None:
    def part(base: int, value: bytes, end: bytes) -> bytes:
        written = batch(base, [value], producer_id=1, producer_epoch=0, base_sequence=0, transactional=True)
        return written + marker(base + 1, end, 1)

    data = part(0, b"x", ABORT) + part(2, b"kept", COMMIT) + part(4, b"y", ABORT)
    assert drain(chunk(data, 0, aborted=[(1, 4), (1, 0)])) == [(2, b"kept")]


def test_a_damaged_batch_is_refused() -> None:
    data = bytearray(batch(0, [b"value"]))
    data[-1] ^= 1
    with pytest.raises(KafkaError, match="CRC") as caught:
        chunk(bytes(data), 0).take(10)
    assert caught.value.code is ErrorCode.CORRUPT_MESSAGE


def test_records_carry_where_they_came_from() -> None:
    (record,) = chunk(batch(7, [b"v"]), 7).take(1)
    assert (record.topic, record.partition, record.offset, record.leader_epoch) == ("t", 3, 7, 5)
    assert record.timestamp_ms == 1_000
