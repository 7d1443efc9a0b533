"""The loops of compaction, interpreted and compiled: digests, the map of keys, and what is left of a batch."""

from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import KafkaError
from headrace.records.builder import build_batch
from headrace.records.codec import decode_records
from tests.records.conftest import load

NOW_MS = 1_700_000_000_000
EVERYTHING = 2**62
Put = tuple[bytes | None, bytes | None]


@pytest.fixture(scope="module", params=["interpreted", "compiled"])
def compaction(request: pytest.FixtureRequest) -> ModuleType:
    return load(request.param, "_compaction")


def enter(compaction: ModuleType, keys: Any, payload: bytes, base_offset: int) -> int:
    full_at: int = compaction.map_keys(keys, payload, 0, len(payload), base_offset, 0)
    return full_at


def payload_of(puts: list[Put]) -> bytes:
    return build_batch([(NOW_MS + n * 7, key, value, ()) for n, (key, value) in enumerate(puts)])[61:]


def test_digests_are_siphash_of_128_bits(compaction: ModuleType) -> None:
    keys = compaction.KeyMap(2, 1)
    # The first two of the reference implementation's vectors, whose messages are the bytes 0, 1, 2...
    assert keys.digest_of(b"").hex() == "a3817f04ba25a8e66df67214c7550293"
    assert keys.digest_of(b"\x00").hex() == "da87c1d86b99af44347659119b22fc45"


def test_both_digests_are_the_same_for_any_key() -> None:
    interpreted, compiled = load("interpreted", "_compaction"), load("compiled", "_compaction")
    one, other = interpreted.KeyMap(2, 1), compiled.KeyMap(2, 1)
    for length in range(70):
        key = bytes((length * 31 + at * 7) & 0xFF for at in range(length))
        assert one.digest_of(key) == other.digest_of(key)


@given(st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=6), max_size=12), st.integers(1, 14))
def test_the_map_is_a_dict_that_stops_when_it_is_full(
    compaction: ModuleType, batches: list[list[int]], entries_max: int
) -> None:
    keys = compaction.KeyMap(15, entries_max)
    model: dict[bytes, int] = {}
    offset = 0
    for batch in batches:
        puts: list[Put] = [(b"k%d" % key, b"v") for key in batch]
        full_at = enter(compaction, keys, payload_of(puts), offset)
        expected = -1
        for number, (key, _) in enumerate(puts):
            assert key is not None
            if key not in model and len(model) == entries_max:
                expected = offset + number
                break
            model[key] = offset + number
        assert full_at == expected
        if expected >= 0:
            break
        offset += len(batch)
    assert keys.count == len(model)
    for number in range(13):
        assert keys.get(b"k%d" % number) == model.get(b"k%d" % number, -1)


@given(
    st.lists(st.tuples(st.sampled_from([None, b"", b"a", b"b", b"c"]), st.sampled_from([None, b"", b"v"]))),
    st.dictionaries(st.sampled_from([b"", b"a", b"b"]), st.integers(95, 115)),
    st.integers(95, 115),
    st.booleans(),
)
def test_what_stays_of_a_batch_is_the_latest_of_each_key(
    compaction: ModuleType, puts: list[Put], later: dict[bytes, int], map_end: int, keep_tombstones: bool
) -> None:
    if not puts:
        return
    keys = compaction.KeyMap(20, 10)
    for key, offset in later.items():
        enter(compaction, keys, payload_of([(key, b"")]), offset)
    payload = payload_of(puts)
    around = b"before" + payload + b"after"
    last_offset = 100 + len(puts) - 1
    kept, dropped, tombstones, latest, out = compaction.filter_records(
        keys, around, 6, 6 + len(payload), len(puts), 100, last_offset, map_end, keep_tombstones, 5
    )
    expected = []
    for record in decode_records(payload, len(puts), 100, NOW_MS):
        superseded = record.key is None or later.get(record.key, -1) > record.offset
        dead = record.value is None and not keep_tombstones
        if record.offset >= map_end or not (superseded or dead):
            expected.append(record)
    assert (kept, dropped) == (len(expected), len(puts) - len(expected))
    assert (out is None) == (dropped == 0)
    assert decode_records(payload if out is None else out[5:], kept, 100, NOW_MS) == expected
    if expected:
        assert NOW_MS + latest == max(record.timestamp for record in expected)
    nulls = [record.offset for record in expected if record.value is None]
    assert tombstones == (len(nulls) if not nulls or nulls[-1] < map_end else 0)


@given(
    st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=80), min_size=1, max_size=6),
    st.integers(0, 150),
    st.integers(0, 150),
)
def test_bits_and_the_table_tell_the_same_records_from_those_replaced(
    compaction: ModuleType, batches: list[list[int]], first_offset: int, mark_count: int
) -> None:
    keys = compaction.KeyMap(60, 50, first_offset, mark_count)
    latest: dict[int, int] = {}
    offset = 0
    for batch in batches:
        assert enter(compaction, keys, payload_of([(b"%d" % key, b"v") for key in batch]), offset) == -1
        latest.update({key: offset + number for number, key in enumerate(batch)})
        offset += len(batch)
    offset = 0
    for batch in batches:
        payload = payload_of([(b"%d" % key, b"v") for key in batch])
        last_offset = offset + len(batch) - 1
        kept, _, _, _, out = compaction.filter_records(
            keys, payload, 0, len(payload), len(batch), offset, last_offset, EVERYTHING, True, 0
        )
        found = decode_records(payload if out is None else out, kept, offset, NOW_MS)
        expected = [offset + number for number, key in enumerate(batch) if latest[key] == offset + number]
        assert [record.offset for record in found] == expected
        offset += len(batch)


def test_a_record_past_the_last_offset_of_its_header_is_damage(compaction: ModuleType) -> None:
    keys = compaction.KeyMap(20, 10, 0, 2)
    payload = payload_of([(b"a", b""), (b"b", b""), (b"c", b"")])
    with pytest.raises(KafkaError):
        compaction.filter_records(keys, payload, 0, len(payload), 3, 0, 1, EVERYTHING, True, 61)


@pytest.mark.parametrize(("start", "end"), [(-1, 3), (3, 2), (0, 5)])
def test_a_range_outside_its_bytes_is_never_read(compaction: ModuleType, start: int, end: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        compaction.map_keys(compaction.KeyMap(20, 10), b"abcd", start, end, 0, 0)


@given(
    st.lists(st.tuples(st.binary(max_size=3), st.binary(max_size=3)), min_size=1),
    st.integers(-(2**62), 2**62),
)
def test_a_moved_base_moves_no_timestamp(compaction: ModuleType, puts: list[Put], shift: int) -> None:
    payload = payload_of(puts)
    moved = compaction.rebase_records(payload, 0, len(payload), shift)
    before = decode_records(payload, len(puts), 0, NOW_MS)
    assert decode_records(moved, len(puts), 0, NOW_MS - shift) == before


@given(st.binary(max_size=80), st.integers(-2, 12), st.integers(0, 20))
def test_any_bytes_are_refused_or_walked_to_their_end(
    compaction: ModuleType, payload: bytes, count: int, marks: int
) -> None:
    keys = compaction.KeyMap(20, 10, 0, marks)
    for call in (
        lambda: enter(compaction, keys, payload, 0),
        lambda: compaction.filter_records(
            keys, payload, 0, len(payload), count, 0, count, EVERYTHING, True, 0
        ),
        lambda: compaction.rebase_records(payload, 0, len(payload), -5),
    ):
        try:
            call()
        except KafkaError:
            pass


@given(st.data())
def test_damaged_records_never_break_the_walk(compaction: ModuleType, data: st.DataObject) -> None:
    payload = bytearray(payload_of([(b"key%d" % number, b"value") for number in range(4)]))
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    keys = compaction.KeyMap(20, 10)
    try:
        enter(compaction, keys, bytes(payload), 0)
        kept, dropped, *_ = compaction.filter_records(
            keys, bytes(payload), 0, len(payload), 4, 0, 3, EVERYTHING, True, 0
        )
        assert kept + dropped == 4
    except KafkaError:
        pass
