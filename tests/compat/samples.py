"""Records that every client must carry to every other client unharmed, and how a record that was read looks.

`SAMPLES` holds each shape a record can take: with and without key, value and headers, empty and absent told apart,
repeated header names, text beyond ASCII, times in the past, and a value larger than a socket buffer.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

Headers = list[tuple[str, bytes | None]]

COMPRESSIONS = ("none", "gzip", "snappy", "lz4", "zstd")
# Old enough to tell CreateTime from the broker's clock, young enough for default retention not to delete it.
AGE_MS = 3_600_000
WAIT_S = 60.0
# librdkafka writes to standard error, past pytest, when a broker goes away at the end of a test.
QUIET = {"log_level": 0}


@dataclass(frozen=True, slots=True)
class Sample:
    """One record to send; `age_ms` before now is its timestamp."""

    key: bytes | None
    value: bytes | None
    headers: Headers = field(default_factory=list)
    age_ms: int = AGE_MS


@dataclass(frozen=True, slots=True)
class Seen:
    """One record as a consumer saw it."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Headers


SAMPLES = (
    Sample(b"key", b"value"),
    Sample(None, b"no key", age_ms=AGE_MS - 1),
    Sample(b"no value", None, age_ms=AGE_MS - 2),
    Sample(None, None, age_ms=AGE_MS - 3),
    Sample(b"", b"", age_ms=AGE_MS - 4),
    Sample(b"headers", b"v", [("a", b"1"), ("a", b"2"), ("empty", b""), ("absent", None)], AGE_MS - 5),
    Sample("schlüssel".encode(), "値\U0001f30a".encode(), [("größe", "ß".encode())], AGE_MS - 6),
    Sample(bytes(range(256)), bytes(range(255, -1, -1)), [("bytes", bytes(range(256)))], AGE_MS - 7),
    Sample(b"large", b"0123456789abcdef" * 16_384, age_ms=AGE_MS - 8),
    Sample(b"out of order", b"in time", age_ms=AGE_MS + 60_000),
)


def seen_of(samples: tuple[Sample, ...], first_offset: int, now_ms: int) -> list[Seen]:
    """What a consumer should see of the samples when the first one got `first_offset`."""
    return [
        Seen(first_offset + i, now_ms - sample.age_ms, sample.key, sample.value, sample.headers)
        for i, sample in enumerate(samples)
    ]


def eventually(probe: Callable[[], object], expected: object) -> None:
    """Asks again until the answer is the expected one: a cluster of several processes agrees a moment later."""
    deadline_s = time.monotonic() + WAIT_S
    while (found := probe()) != expected and time.monotonic() < deadline_s:
        pass
    assert found == expected
