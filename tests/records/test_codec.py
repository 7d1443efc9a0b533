"""The record codec, interpreted and compiled by the same tests: exact bytes, round trips, hostile bytes."""

from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import ErrorCode, KafkaError
from headrace.records.batch import Record
from tests.records.strategies import record_lists

RecordInput = tuple[int, bytes | None, bytes | None, tuple[tuple[str, bytes | None], ...]]


def encode(codec: ModuleType, records: list[RecordInput]) -> bytes:
    out = bytearray()
    assert codec.encode_records(out, records, records[0][0])[0] == len(records)
    return bytes(out)


def varint(value: int) -> bytes:
    """Zigzag varint, written the plainest way, to hold the codec against."""
    raw = value * 2 if value >= 0 else -value * 2 - 1
    out = b""
    while raw > 0x7F:
        out += bytes([raw & 0x7F | 0x80])
        raw >>= 7
    return out + bytes([raw])


def record(body: bytes) -> bytes:
    return varint(len(body)) + body


def test_a_record_is_laid_out_as_the_format_says(codec: ModuleType) -> None:
    out = bytearray(b"head")
    count, newest = codec.encode_records(
        out,
        [(1_000, b"key", b"value", (("h", b"x"), ("ü", None))), (500, None, b"", ())],
        1_000,
    )
    assert (count, newest) == (2, 1_000)
    first = b"\x00" + varint(0) + varint(0) + varint(3) + b"key" + varint(5) + b"value"
    first += varint(2) + varint(1) + b"h" + varint(1) + b"x" + varint(2) + "ü".encode() + varint(-1)
    second = b"\x00" + varint(-500) + varint(1) + varint(-1) + varint(0) + varint(0)
    assert bytes(out) == b"head" + record(first) + record(second)


@given(record_lists, st.integers(0, 2**62))
def test_what_is_encoded_is_decoded(codec: ModuleType, records: list[RecordInput], base_offset: int) -> None:
    payload = encode(codec, records)
    expected = [
        Record(base_offset + index, timestamp, key, value, headers)
        for index, (timestamp, key, value, headers) in enumerate(records)
    ]
    for form in (payload, bytearray(payload), memoryview(payload)):
        decoded = codec.decode_records(form, len(records), base_offset, records[0][0])
        assert decoded == expected
        assert all(type(one) is Record for one in decoded)
    flags = codec.check_records(payload, len(records))
    assert bool(flags & codec.NULL_KEY) == any(key is None for _, key, _, _ in records)
    assert bool(flags & codec.NULL_VALUE) == any(value is None for _, _, value, _ in records)


@given(st.integers(-(2**63), 2**63 - 1))
def test_every_64_bit_timestamp_survives(codec: ModuleType, timestamp: int) -> None:
    payload = encode(codec, [(timestamp, None, None, ())])
    assert codec.decode_records(payload, 1, 0, timestamp)[0].timestamp == timestamp


def test_append_time_replaces_every_timestamp(codec: ModuleType) -> None:
    payload = encode(codec, [(5, None, None, ()), (9, None, None, ())])
    assert [one.timestamp for one in codec.decode_records(payload, 2, 0, 5, 1_234)] == [1_234, 1_234]


def test_large_fields_take_longer_lengths(codec: ModuleType) -> None:
    for size in (63, 64, 8191, 8192, 1_048_575, 1_048_576):
        payload = encode(codec, [(0, b"k" * size, b"v" * size, (("h" * size, b"x" * size),))])
        (decoded,) = codec.decode_records(payload, 1, 0, 0)
        assert decoded == (0, 0, b"k" * size, b"v" * size, (("h" * size, b"x" * size),))


def test_a_header_key_that_is_no_utf8_comes_through_unchanged(codec: ModuleType) -> None:
    body = b"\x00" + varint(0) * 2 + varint(-1) * 2 + varint(1) + varint(3) + b"\xff\xfea" + varint(-1)
    (decoded,) = codec.decode_records(record(body), 1, 0, 0)
    assert encode(codec, [(0, None, None, decoded.headers)]) == record(body)


def test_timestamps_too_far_apart_for_one_batch_are_refused(codec: ModuleType) -> None:
    with pytest.raises(KafkaError) as caught:
        codec.encode_records(bytearray(), [(2**63 - 1, None, None, ())], -(2**62))
    assert caught.value.code is ErrorCode.INVALID_TIMESTAMP


def test_a_key_that_is_text_is_refused(codec: ModuleType) -> None:
    with pytest.raises(TypeError):
        codec.encode_records(bytearray(), [(0, "text", None, ())], 0)


HEAD = b"\x00" + varint(0) + varint(0)
GOOD = record(HEAD + varint(-1) + varint(-1) + varint(0))
CUT = "cut short"
TOO_LARGE = "too large"
NO_FIT = "length does not fit its record"
COUNT = "record count does not fit"
HEADERS = "header count does not fit"
HOSTILE = {
    "nothing": (b"", 1, COUNT),
    "a negative count": (GOOD, -1, COUNT),
    "a count the bytes cannot hold": (GOOD, 2**31 - 1, COUNT),
    "a count of one too many": (GOOD, 2, COUNT),
    "a count the bytes could hold": (record(HEAD + varint(9) + b"k" * 9 + varint(-1) + varint(0)), 2, CUT),
    "bytes after the last record": (GOOD + b"\x00", 1, "batch is longer"),
    "a whole record too many": (GOOD + GOOD, 1, "batch is longer"),
    "a length past the end": (varint(2**31 - 1) + GOOD[1:] * 2, 1, "length does not fit its batch"),
    "a negative length": (varint(-1) + GOOD[1:], 1, "length does not fit its batch"),
    "a length of zero": (varint(0) + GOOD[1:], 1, "length does not fit its batch"),
    "a length shorter than its fields": (
        varint(6) + HEAD + varint(4) + b"key!" + varint(-1) + varint(0),
        1,
        NO_FIT,
    ),
    "a length longer than its fields": (varint(7) + GOOD[1:] + b"\x00", 1, "record is longer"),
    "a varint that never ends": (b"\xff" * 40, 1, TOO_LARGE),
    "a varint cut short": (GOOD[:-1] + b"\x80", 1, CUT),
    "a varint of six bytes": (b"\x8c\x80\x80\x80\x80\x00" + GOOD[1:], 1, TOO_LARGE),
    "a varint above 32 bits": (b"\xff\xff\xff\xff\x1f" + GOOD[1:], 1, TOO_LARGE),
    "a varlong of eleven bytes": (
        record(b"\x00" + b"\x80" * 10 + b"\x00" + b"\x00\x01\x01\x00"),
        1,
        TOO_LARGE,
    ),
    "a varlong above 64 bits": (record(b"\x00" + b"\xff" * 9 + b"\x02" + b"\x00\x01\x01\x00"), 1, TOO_LARGE),
    "a negative offset delta": (
        record(b"\x00" + varint(0) + varint(-1) + varint(-1) * 2 + varint(0)),
        1,
        "offset delta",
    ),
    "a key longer than its record": (
        record(HEAD + varint(1000) + varint(-1) + varint(0)) + b"k" * 1000,
        1,
        NO_FIT,
    ),
    "a key length of -2": (record(HEAD + varint(-2) + varint(-1) + varint(0)), 1, NO_FIT),
    "a value of 2 GB": (record(HEAD + varint(-1) + varint(2**31 - 1) + varint(0)), 1, NO_FIT),
    "a value length of -2": (record(HEAD + varint(-1) + varint(-2) + varint(0)), 1, NO_FIT),
    "a negative header count": (record(HEAD + varint(-1) * 2 + varint(-1)), 1, HEADERS),
    "two billion headers": (record(HEAD + varint(-1) * 2 + varint(2**31 - 1)), 1, HEADERS),
    "a header too many": (record(HEAD + varint(-1) * 2 + varint(2) + varint(0) + varint(2) + b"hi"), 1, CUT),
    "a header without a key": (
        record(HEAD + varint(-1) * 2 + varint(1) + varint(-1) + varint(-1)),
        1,
        "no key",
    ),
    "a header key past the end": (record(HEAD + varint(-1) * 2 + varint(1) + varint(9) + b"h"), 1, NO_FIT),
    "a header value past the end": (
        record(HEAD + varint(-1) * 2 + varint(1) + varint(1) + b"h" + varint(9)),
        1,
        NO_FIT,
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_are_refused(codec: ModuleType, name: str) -> None:
    payload, count, complaint = HOSTILE[name]
    for call in (
        lambda: codec.decode_records(payload, count, 0, 0),
        lambda: codec.check_records(payload, count),
    ):
        with pytest.raises(KafkaError, match=complaint) as caught:
            call()
        assert caught.value.code is ErrorCode.INVALID_RECORD


def test_the_record_the_hostile_ones_are_made_from_is_good(codec: ModuleType) -> None:
    assert codec.decode_records(GOOD, 1, 0, 0) == [(0, 0, None, None, ())]
    assert codec.check_records(GOOD, 1) == codec.NULL_KEY | codec.NULL_VALUE
    assert codec.check_records(b"", 0) == 0
    with pytest.raises(KafkaError, match="count"):
        codec.check_records(b"", -1)
    assert codec.decode_records(b"", 0, 0, 0) == []


def test_a_timestamp_beyond_64_bits_is_refused(codec: ModuleType) -> None:
    payload = record(b"\x00" + varint(1) + varint(0) + varint(-1) * 2 + varint(0))
    assert codec.decode_records(payload, 1, 0, 2**63 - 2)[0].timestamp == 2**63 - 1
    with pytest.raises(KafkaError):
        codec.decode_records(payload, 1, 0, 2**63 - 1)
    payload = record(b"\x00" + varint(-1) + varint(0) + varint(-1) * 2 + varint(0))
    with pytest.raises(KafkaError):
        codec.decode_records(payload, 1, 0, -(2**63))


def test_gaps_between_offsets_are_decoded_but_not_accepted_from_clients(codec: ModuleType) -> None:
    out = bytearray()
    codec.encode_record(out, 0, 10, 10, b"a", None, ())
    codec.encode_record(out, 7, 11, 10, b"b", None, ())
    assert [one.offset for one in codec.decode_records(out, 2, 100, 10)] == [100, 107]
    with pytest.raises(KafkaError) as caught:
        codec.check_records(out, 2)
    assert caught.value.code is ErrorCode.INVALID_RECORD


def outcome(codec: ModuleType, payload: bytes, count: int, base_timestamp: int) -> object:
    found: list[object] = []
    for call in (
        lambda: codec.decode_records(payload, count, 0, base_timestamp),
        lambda: codec.check_records(payload, count),
    ):
        try:
            found.append(call())
        except KafkaError as error:
            found.append((error.code, error.message))
    return found


@given(st.binary(max_size=60), st.integers(-2, 9), st.integers(-(2**63), 2**63 - 1))
def test_both_codecs_say_the_same_of_any_bytes(
    both_codecs: tuple[ModuleType, ModuleType], payload: bytes, count: int, base_timestamp: int
) -> None:
    interpreted, compiled = both_codecs
    assert outcome(interpreted, payload, count, base_timestamp) == outcome(
        compiled, payload, count, base_timestamp
    )


@given(record_lists, st.data())
def test_both_codecs_say_the_same_of_damaged_records(
    both_codecs: tuple[ModuleType, ModuleType], records: list[RecordInput], data: st.DataObject
) -> None:
    interpreted, compiled = both_codecs
    payload = bytearray(encode(interpreted, records))
    assert payload == encode(compiled, records)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(payload) - 1))
        payload[at] = data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]) | st.integers(0, 255))
    cut = data.draw(st.integers(0, len(payload)) | st.just(len(payload)))
    count = data.draw(st.just(len(records)) | st.integers(-1, 40))
    args = bytes(payload[:cut]), count, records[0][0]
    assert outcome(interpreted, *args) == outcome(compiled, *args)


ordinary = st.lists(
    st.tuples(
        st.just(0),
        st.none() | st.binary(max_size=80),
        st.none() | st.binary(max_size=80),
        st.just(()),
    ),
    min_size=1,
    max_size=4,
)


@given(ordinary, st.data())
def test_the_check_lets_through_what_can_be_decoded_and_nothing_else(
    codec: ModuleType, records: list[RecordInput], data: st.DataObject
) -> None:
    payload = bytearray(encode(codec, records))
    for _ in range(data.draw(st.integers(0, 2))):
        at = data.draw(st.integers(0, len(payload) - 1))
        payload[at] = data.draw(st.sampled_from([0, 1, 2, 0x7F, 0x80, 0xFF]) | st.integers(0, 255))
    try:
        decoded = codec.decode_records(payload, len(records), 0, 0, 0)
        sound = [one.offset for one in decoded] == list(range(len(records)))
    except KafkaError:
        sound = False
    if sound:
        flags = codec.check_records(payload, len(records))
        assert bool(flags & codec.NULL_KEY) == any(one.key is None for one in decoded)
        assert bool(flags & codec.NULL_VALUE) == any(one.value is None for one in decoded)
    else:
        with pytest.raises(KafkaError):
            codec.check_records(payload, len(records))


def test_the_check_counts_records_and_bytes_of_any_length(codec: ModuleType) -> None:
    for count, size in ((20_000, 3), (70, 100), (3, 9_000)):
        payload = encode(codec, [(index, b"k" * size, b"v" * size, ()) for index in range(count)])
        assert codec.check_records(payload, count) == 0
        for wrong in (payload + b"\x00", payload[:-1]):
            with pytest.raises(KafkaError):
                codec.check_records(wrong, count)
        with pytest.raises(KafkaError):
            codec.check_records(payload, count + 1)
