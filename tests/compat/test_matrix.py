"""What one client writes, every other client reads back unharmed: all pairs, all compressions, all shapes of record."""

from collections.abc import Callable

import pytest

from tests.compat.clients import CONSUMERS, PRODUCERS, samples_for
from tests.compat.samples import COMPRESSIONS, SAMPLES, seen_of


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("writer", PRODUCERS)
def test_every_reader_sees_the_records_as_they_were_written(
    writer: str, compression: str, bootstrap: str, make_topic: Callable[..., str], now_ms: int
) -> None:
    topic = make_topic()
    samples = samples_for(writer)
    offsets = PRODUCERS[writer](bootstrap, topic, samples, now_ms, compression)
    assert offsets == list(range(len(samples)))
    expected = seen_of(samples, 0, now_ms)
    for name, consume in CONSUMERS.items():
        assert consume(bootstrap, topic, len(samples)) == expected, f"as read by {name}"


@pytest.mark.parametrize("reader", CONSUMERS)
def test_a_reader_may_start_in_the_middle_of_a_batch(
    reader: str, bootstrap: str, make_topic: Callable[..., str], now_ms: int
) -> None:
    topic = make_topic()
    PRODUCERS["confluent"](bootstrap, topic, SAMPLES, now_ms, "zstd")
    for start in (1, 5, len(SAMPLES) - 1):
        expected = seen_of(SAMPLES, 0, now_ms)[start:]
        assert CONSUMERS[reader](bootstrap, topic, len(expected), start) == expected


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_topic_that_stamps_records_on_append_gives_the_same_time_to_every_reader(
    compression: str, bootstrap: str, make_topic: Callable[..., str], now_ms: int
) -> None:
    topic = make_topic(message_timestamp_type="LogAppendTime")
    PRODUCERS["confluent"](bootstrap, topic, SAMPLES, now_ms, compression)
    stamps = set()
    for consume in CONSUMERS.values():
        seen = consume(bootstrap, topic, len(SAMPLES))
        assert [s.value for s in seen] == [s.value for s in SAMPLES]
        stamps.add(tuple(s.timestamp_ms for s in seen))
    assert len(stamps) == 1
    assert min(stamps.pop()) >= now_ms


@pytest.mark.parametrize("writer", PRODUCERS)
@pytest.mark.parametrize("acks", [0, 1, "all"])
def test_records_arrive_whatever_acknowledgement_is_asked_for(
    writer: str, acks: int | str, bootstrap: str, make_topic: Callable[..., str], now_ms: int
) -> None:
    topic = make_topic()
    more = {"enable_idempotence": False} if writer == "kafka-python" else {}
    samples = samples_for(writer)
    PRODUCERS[writer](bootstrap, topic, samples, now_ms, acks=acks, **more)
    assert CONSUMERS["confluent"](bootstrap, topic, len(samples)) == seen_of(samples, 0, now_ms)


@pytest.mark.parametrize("target", ["uncompressed", "gzip", "zstd"])
def test_a_topic_may_ask_for_a_compression_of_its_own(
    target: str, bootstrap: str, make_topic: Callable[..., str], now_ms: int
) -> None:
    topic = make_topic(compression_type=target)
    PRODUCERS["confluent"](bootstrap, topic, SAMPLES, now_ms, "lz4")
    for name, consume in CONSUMERS.items():
        assert consume(bootstrap, topic, len(SAMPLES)) == seen_of(SAMPLES, 0, now_ms), f"as read by {name}"
