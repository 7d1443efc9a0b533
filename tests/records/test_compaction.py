"""The loops of compaction, interpreted and compiled: digests, the map of keys, and what is left of a batch."""

from types import ModuleType

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
        full_at = compaction.map_keys(keys, payload_of(puts), offset, 0)
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
        compaction.map_keys(keys, payload_of([(key, b"")]), offset, 0)
    payload = payload_of(puts)
    kept, dropped, tombstones, latest, body = compaction.filter_records(
        keys, payload, len(puts), 100, map_end, keep_tombstones
    )
    expected = []
    for record in decode_records(payload, len(puts), 100, NOW_MS):
        superseded = record.key is None or later.get(record.key, -1) > record.offset
        dead = record.value is None and not keep_tombstones
        if record.offset >= map_end or not (superseded or dead):
            expected.append(record)
    assert (kept, dropped) == (len(expected), len(puts) - len(expected))
    assert decode_records(body, kept, 100, NOW_MS) == expected
    assert (body is payload) == (dropped == 0)
    if expected:
        assert NOW_MS + latest == max(record.timestamp for record in expected)
    nulls = [record.offset for record in expected if record.value is None]
    assert tombstones == (len(nulls) if not nulls or nulls[-1] < map_end else 0)


@given(
    st.lists(st.tuples(st.binary(max_size=3), st.binary(max_size=3)), min_size=1),
    st.integers(-(2**62), 2**62),
)
def test_a_moved_base_moves_no_timestamp(compaction: ModuleType, puts: list[Put], shift: int) -> None:
    payload = payload_of(puts)
    moved = compaction.rebase_records(payload, shift)
    before = decode_records(payload, len(puts), 0, NOW_MS)
    assert decode_records(moved, len(puts), 0, NOW_MS - shift) == before


@given(st.binary(max_size=80), st.integers(-2, 12))
def test_any_bytes_are_refused_or_walked_to_their_end(
    compaction: ModuleType, payload: bytes, count: int
) -> None:
    keys = compaction.KeyMap(20, 10)
    for call in (
        lambda: compaction.map_keys(keys, payload, 0, 0),
        lambda: compaction.filter_records(keys, payload, count, 0, EVERYTHING, True),
        lambda: compaction.rebase_records(payload, -5),
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
        compaction.map_keys(keys, bytes(payload), 0, 0)
        kept, dropped, *_ = compaction.filter_records(keys, bytes(payload), 4, 0, EVERYTHING, True)
        assert kept + dropped == 4
    except KafkaError:
        pass
