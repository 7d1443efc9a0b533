"""A batch filled record by record is the batch that would be built of the same records, compiled or not."""

from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import KafkaError
from headrace.records.builder import build_batch, close_batch
from tests.records.conftest import load

TEXTS = st.text(st.characters(codec="utf-8"), max_size=5)
RECORDS = st.lists(
    st.tuples(
        st.integers(0, 2**45),
        st.none() | st.binary(max_size=200),
        st.none() | st.binary(max_size=200),
        st.lists(st.tuples(TEXTS, st.none() | st.binary(max_size=5)), max_size=3),
    ),
    min_size=1,
    max_size=80,
)


@pytest.fixture(params=["interpreted", "compiled"])
def sending(request: pytest.FixtureRequest) -> ModuleType:
    return load(request.param, "_sending")


@given(records=RECORDS)
def test_a_filled_buffer_is_the_batch_of_its_records(records: list[Any]) -> None:
    for kind in ("interpreted", "compiled"):
        buffer = load(kind, "_sending").RecordBuffer(10**6)
        sizes = [buffer.append(*record) for record in records]
        assert buffer.size_bytes == 61 + sum(sizes)
        assert [buffer.timestamp_at(at) for at in range(len(records))] == [record[0] for record in records]
        assert close_batch(buffer, producer_id=7, producer_epoch=1, base_sequence=3) == build_batch(
            records, producer_id=7, producer_epoch=1, base_sequence=3
        )


@given(data=st.binary(max_size=70))
def test_both_hashes_are_the_same(data: bytes) -> None:
    assert load("interpreted", "_sending").murmur2(data) == load("compiled", "_sending").murmur2(data)


def test_a_full_buffer_refuses_and_stays_as_it_was(sending: ModuleType) -> None:
    buffer = sending.RecordBuffer(300)
    assert buffer.append(1, None, bytes(1_000), ()) > 1_000, "the first record always has room"
    buffer = sending.RecordBuffer(300)
    assert buffer.append(1, None, bytes(100), ()) > 0
    before = buffer.size_bytes
    assert buffer.append(1, None, bytes(200), ()) == 0
    assert (buffer.size_bytes, buffer.record_count) == (before, 1)


def test_what_is_no_bytes_is_refused_before_anything_is_written(sending: ModuleType) -> None:
    buffer = sending.RecordBuffer(300)
    for key, value, headers in (("k", b"v", ()), (b"k", 5, ()), (b"k", b"v", [("h", "text")])):
        with pytest.raises(KafkaError, match="not bytes"):
            buffer.append(1, key, value, headers)
    assert (buffer.size_bytes, buffer.record_count) == (61, 0)


def test_the_short_way_is_taken_only_when_nothing_stands_in_it(sending: ModuleType) -> None:
    path = sending.SendPath(lambda: 5_000_000, 1_000)
    assert path.append("t", b"v", None, (), None, None) is None, "no route"
    route = path.routes["t"] = sending.Route(2, True)
    assert path.append("t", b"v", None, (), None, None) is None, "no partition was chosen"
    route.stick(0, 100)
    assert path.append("t", b"v", None, (), None, None) is None, "no batch is open"
    route.open_batches[0] = sending.RecordBuffer(500)
    first = path.append("t", b"v", None, (), None, None)
    assert (first.batch, first.place) == (route.open_batches[0], 0)
    assert route.open_batches[0].timestamp_at(0) == 5
    assert path.held_bytes == route.open_batches[0].size_bytes - 61
    assert path.append("t", b"v", None, (), 1, None) is None, "no batch is open there"
    assert path.append("t", b"v", None, (), 2, None) is None, "no such partition"
    assert path.append("t", bytes(100), None, (), None, None) is not None
    assert path.append("t", b"v", None, (), None, None) is None, "the partition has had its share"
    key = next(b"%d" % n for n in range(99) if sending.key_partition(b"%d" % n, 2) == 0)
    assert path.append("t", b"v", key, (), None, None).place == 2
    assert path.append("t", bytes(2_000), key, (), None, None) is None, "the buffer has no room"
    path.shut = True
    assert path.append("t", b"v", key, (), None, None) is None
