"""What may be appended: each broken record set is refused with the code that Kafka 4 answers to it."""

import struct
from collections.abc import Callable

import pytest

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.settings import TopicConfig
from headrace.records.batch import crc_ok, parse_header, seal
from headrace.records.builder import iter_records
from headrace.storage.validator import RecordsRefused, Validated, validate
from tests.storage.workbench import NOW_MS, make_batch

HOUR_MS = 3_600_000


def check(data: bytes | bytearray, **settings: object) -> Validated:
    return validate(memoryview(data), TopicConfig(**settings), NOW_MS)  # type: ignore[arg-type]


def refusal(data: bytes | bytearray, **settings: object) -> ErrorCode:
    with pytest.raises(KafkaError) as caught:
        check(data, **settings)
    return caught.value.code


def patched(form: str, position: int, value: int, batch: bytearray | None = None) -> bytearray:
    """A batch with one field changed and its CRC put right again."""
    batch = make_batch() if batch is None else batch
    struct.pack_into(form, batch, position, value)
    seal(batch, 0, len(batch))
    return batch


def old_message() -> bytes:
    """A message of format 1, as clients older than Kafka 0.11 sent it."""
    body = struct.pack(">IbbqiI", 0, 1, 0, NOW_MS, -1, 5) + b"hello"
    return struct.pack(">qi", 0, len(body)) + body


def test_a_sound_batch_is_returned_as_it_came() -> None:
    data = make_batch(3)
    before = bytes(data)
    validated = check(data)
    assert bytes(validated.data) == before
    assert validated.data.obj is data, "no copy"
    assert validated.header.record_count == 3
    assert validated.log_append_time_ms == -1


@pytest.mark.parametrize(
    ("name", "data", "code"),
    [
        ("nothing", lambda: b"", ErrorCode.INVALID_RECORD),
        ("one byte", lambda: b"x", ErrorCode.INVALID_RECORD),
        ("zeros", lambda: bytes(100), ErrorCode.CORRUPT_MESSAGE),
        ("cut in the header", lambda: make_batch()[:40], ErrorCode.INVALID_RECORD),
        ("cut in the records", lambda: make_batch()[:-1], ErrorCode.INVALID_RECORD),
        ("two batches", lambda: make_batch() + make_batch(), ErrorCode.INVALID_RECORD),
        ("a batch and zeros", lambda: make_batch() + bytes(100), ErrorCode.CORRUPT_MESSAGE),
        ("message of format 1", old_message, ErrorCode.INVALID_RECORD),
        ("magic 0", lambda: patched(">b", 16, 0), ErrorCode.INVALID_RECORD),
        ("magic 1", lambda: patched(">b", 16, 1), ErrorCode.INVALID_RECORD),
        ("magic 3", lambda: patched(">b", 16, 3), ErrorCode.CORRUPT_MESSAGE),
        ("magic -1", lambda: patched(">b", 16, -1), ErrorCode.CORRUPT_MESSAGE),
        ("base offset", lambda: patched(">q", 0, 5), ErrorCode.INVALID_RECORD),
        ("length too small", lambda: patched(">i", 8, 10), ErrorCode.CORRUPT_MESSAGE),
        ("length below a header", lambda: patched(">i", 8, 20), ErrorCode.CORRUPT_MESSAGE),
        ("negative length", lambda: patched(">i", 8, -1), ErrorCode.CORRUPT_MESSAGE),
        ("huge length", lambda: patched(">i", 8, 2**31 - 1), ErrorCode.INVALID_RECORD),
        ("no records", lambda: patched(">i", 57, 0), ErrorCode.INVALID_RECORD),
        ("negative count", lambda: patched(">i", 57, -1), ErrorCode.INVALID_RECORD),
        ("more records than offsets", lambda: patched(">i", 57, 2), ErrorCode.INVALID_RECORD),
        ("more offsets than records", lambda: patched(">i", 23, 1), ErrorCode.INVALID_RECORD),
        ("negative delta", lambda: patched(">i", 23, -1), ErrorCode.INVALID_RECORD),
        ("control batch", lambda: make_batch(control=True), ErrorCode.INVALID_RECORD),
        ("unknown codec", lambda: patched(">h", 21, 5), ErrorCode.UNSUPPORTED_COMPRESSION_TYPE),
        ("no sequence", lambda: make_batch(producer_id=5, sequence=-1), ErrorCode.INVALID_RECORD),
        ("two hours ahead", lambda: make_batch(timestamp=NOW_MS + 2 * HOUR_MS), ErrorCode.INVALID_TIMESTAMP),
    ],
)
def test_a_broken_record_set_is_refused_as_kafka_does(
    name: str, data: Callable[[], bytes | bytearray], code: ErrorCode
) -> None:
    assert refusal(data()) == code, name


def test_every_flipped_bit_that_the_crc_covers_is_found() -> None:
    for position in range(21, 100):
        data = make_batch(value_bytes=100)
        data[position] ^= 0x10
        assert refusal(data) == ErrorCode.CORRUPT_MESSAGE


def test_bytes_of_a_batch_cut_short_behind_the_first_are_dropped() -> None:
    data = make_batch()
    for tail in (b"\0", make_batch()[:50]):
        validated = check(data + tail)
        assert bytes(validated.data) == bytes(data)


def test_size_is_checked_against_the_topic_before_anything_is_read() -> None:
    data = make_batch(value_bytes=600)
    data[17] ^= 1
    assert refusal(data, max_message_bytes=500) == ErrorCode.MESSAGE_TOO_LARGE
    assert refusal(make_batch(value_bytes=600), segment_bytes=500) == ErrorCode.RECORD_LIST_TOO_LARGE
    check(make_batch(value_bytes=600), max_message_bytes=len(data), segment_bytes=len(data))


def test_log_append_time_is_stamped_and_sealed() -> None:
    validated = check(make_batch(timestamp=NOW_MS + 9 * HOUR_MS), message_timestamp_type="LogAppendTime")
    assert validated.log_append_time_ms == NOW_MS
    assert validated.header.max_timestamp == NOW_MS and validated.header.is_log_append_time
    assert crc_ok(validated.data, 0, len(validated.data))
    assert [record.timestamp for record in iter_records(validated.data)] == [NOW_MS]


def test_read_only_memory_is_copied_before_it_is_stamped() -> None:
    data = bytes(make_batch())
    validated = check(data, message_timestamp_type="LogAppendTime")
    assert parse_header(data).max_timestamp == parse_header(validated.data).max_timestamp == NOW_MS
    assert not parse_header(data).is_log_append_time


def test_a_producer_does_not_choose_the_timestamp_type() -> None:
    validated = check(patched(">h", 21, 0x08))
    assert not validated.header.is_log_append_time
    assert crc_ok(validated.data, 0, len(validated.data))


def test_records_too_old_are_named_one_by_one() -> None:
    batch = make_batch(3, timestamp=NOW_MS - 1001)  # 1001, 1000 and 999 ms old
    with pytest.raises(RecordsRefused) as caught:
        check(batch, message_timestamp_before_max_ms=1000)
    assert caught.value.code == ErrorCode.INVALID_TIMESTAMP
    assert [number for number, _ in caught.value.record_errors] == [0]
    check(make_batch(3, timestamp=NOW_MS - 1000), message_timestamp_before_max_ms=1000)
    check(make_batch(timestamp=-1), message_timestamp_before_max_ms=1000)


def test_records_too_far_ahead_are_named_one_by_one() -> None:
    with pytest.raises(RecordsRefused) as caught:
        check(make_batch(3, timestamp=NOW_MS + HOUR_MS - 1))
    [(number, reason)] = caught.value.record_errors
    assert number == 2
    assert reason.startswith(f"Timestamp {NOW_MS + HOUR_MS + 1} of message with offset 2 is out of range.")


def test_a_header_that_claims_a_later_time_than_its_records_is_put_right() -> None:
    validated = check(patched(">q", 35, NOW_MS + 10 * HOUR_MS))
    assert validated.header.max_timestamp == NOW_MS
    assert crc_ok(validated.data, 0, len(validated.data))


@pytest.mark.parametrize("compression", range(5))
def test_a_compacted_topic_takes_no_record_without_a_key(compression: int) -> None:
    compacted = {"cleanup_policy": frozenset({"compact"})}
    with pytest.raises(RecordsRefused) as caught:
        check(make_batch(2, key=None, compression=compression), **compacted)
    assert caught.value.code == ErrorCode.INVALID_RECORD
    assert [number for number, _ in caught.value.record_errors] == [0, 1]
    check(make_batch(2, compression=compression), **compacted)


def test_records_that_do_not_inflate_are_refused_where_they_are_looked_at() -> None:
    garbage = patched(">h", 21, 1)
    assert refusal(garbage, cleanup_policy=frozenset({"compact"})) in (
        ErrorCode.CORRUPT_MESSAGE,
        ErrorCode.INVALID_RECORD,
    )


@pytest.mark.parametrize(
    ("setting", "codec"), [("uncompressed", 0), ("gzip", 1), ("snappy", 2), ("lz4", 3), ("zstd", 4)]
)
def test_a_topic_with_a_codec_of_its_own_stores_every_batch_in_it(setting: str, codec: int) -> None:
    for sent in range(5):
        batch = make_batch(5, 200, compression=sent, producer_id=7, sequence=3)
        validated = check(batch, compression_type=setting)
        header = validated.header
        assert header.compression == codec
        assert crc_ok(validated.data, 0, header.size) and header.size == len(validated.data)
        assert iter_records(validated.data) == iter_records(batch)
        sent_header = parse_header(batch)
        assert header[6:] == sent_header[6:], "everything but length, CRC and codec is kept"
        if sent == codec:
            assert validated.data.obj is batch


def test_a_batch_that_recompression_makes_too_large_is_refused() -> None:
    batch = make_batch(5, 2000, compression=4)
    settings = {"compression_type": "uncompressed", "segment_bytes": 5000}
    assert refusal(batch, **settings) == ErrorCode.RECORD_LIST_TOO_LARGE
    settings = {"compression_type": "uncompressed", "max_message_bytes": 5000}
    assert refusal(batch, **settings) == ErrorCode.MESSAGE_TOO_LARGE
