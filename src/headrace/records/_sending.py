# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, binding=True
# cython: annotation_typing=False
"""What a producer does for every record: choose its partition and write it into the batch that is open there.

One source, two lives, as `_codec`. Owns the bytes of open batches, and the way of a record into one in the common
case: the topic is known, a batch with room is open, the buffer has room. Everything else returns None, and the
client does it the long way. Invariants: a record is in a batch whole or not at all; compiled, and without headers,
`SendPath.append` runs no Python code between its checks and its writes, so that a thread beside the event loop may
call it.

Callers: the client's accumulator and producer.
"""

from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable
from typing import Any, NamedTuple, Protocol

from headrace.base.errors import ErrorCode, KafkaError
from headrace.records.batch import Buffer

# Cython reads the import below when it compiles; nothing ever runs it, because Cython need not be installed.
_NEVER = False
if _NEVER:
    import cython
else:
    from headrace.records import without_cython as cython

Header = tuple[str, bytes | None]


class RecordMetadata(NamedTuple):
    """Where a record went. The offset is -1 when the broker was not asked to say (acks=0)."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int


class BatchPromise(Protocol):
    """A batch as the promises for its records see it."""

    def done_at(self, place: int) -> bool: ...
    def error_at(self, place: int) -> KafkaError | None: ...
    def result_at(self, place: int) -> RecordMetadata: ...
    def call_at(self, place: int, callback: "Callable[[Delivery], object]", delivery: "Delivery") -> None: ...
    def wait_at(self, place: int) -> Generator[Any, None, RecordMetadata]: ...


_M = 0x5BD1E995
_SEED = 0x9747B28C
_U32 = 0xFFFFFFFF
_POSITIVE = 0x7FFFFFFF
_HEADER_SIZE = 61
# More than the lengths, deltas and counts of one record can take.
_OVERHEAD_BYTES = 64
_FIRST_BYTES = 1024
_MILLISECOND_NS = 1000000
_NO_HEADERS = b"\x00"


def murmur2(data: bytes) -> int:
    """Kafka's murmur2 of some bytes, as an unsigned 32-bit number (Java's, seen as unsigned)."""
    length = len(data)
    h = (_SEED ^ length) & _U32
    at = 0
    while length - at >= 4:
        k = data[at] | (data[at + 1] << 8) | (data[at + 2] << 16) | (data[at + 3] << 24)
        k = (k * _M) & _U32
        k = ((k ^ (k >> 24)) * _M) & _U32
        h = ((h * _M) & _U32) ^ k
        at += 4
    rest = length - at
    if rest >= 3:
        h ^= data[at + 2] << 16
    if rest >= 2:
        h ^= data[at + 1] << 8
    if rest >= 1:
        h = ((h ^ data[at]) * _M) & _U32
    h = ((h ^ (h >> 13)) * _M) & _U32
    return h ^ (h >> 15)


def key_partition(key: bytes, count: int) -> int:
    """The partition of a key among `count`, the one that Kafka's own producer chooses."""
    return (murmur2(key) & _POSITIVE) % count


class RecordBuffer:
    """The records of one batch, encoded as they come behind room for its header.

    `time_places` and `times` hold place and timestamp wherever that is another one than the record's before. They are
    lists of numbers, because making a tuple could set off the garbage collector, and with it other code, in the
    middle of a record.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.record_count = 0
        self.last_added = 0
        self.base_timestamp = -1
        self.max_timestamp = -1
        self.last_timestamp = -1
        self.time_places: list[int] = []
        self.times: list[int] = []
        self.size_bytes = _HEADER_SIZE
        self.capacity = 0
        self.out = bytearray()
        self.data = self.out
        self.grow(_FIRST_BYTES)

    def append(
        self,
        timestamp: int,
        key: Buffer | None,
        value: Buffer | None,
        headers: Iterable[Header],
    ) -> int:
        """Write one more record; its bytes, or 0 when there is no room for it. The first always has room."""
        raw_key = key if key is None or type(key) is bytes else _as_bytes("key", key)
        raw_value = value if value is None or type(value) is bytes else _as_bytes("value", value)
        tail = _encode_headers(headers) if headers else _NO_HEADERS
        key_length = -1 if raw_key is None else len(raw_key)
        value_length = -1 if raw_value is None else len(raw_value)
        count = self.record_count
        base = self.base_timestamp if count else timestamp
        delta = timestamp - base
        body = 1 + _varint_size(delta) + _varint_size(count) + _varint_size(key_length)
        body += _varint_size(value_length) + len(tail)
        if key_length > 0:
            body += key_length
        if value_length > 0:
            body += value_length
        added = _varint_size(body) + body
        pos = self.size_bytes
        if count != 0 and pos + added > self.limit_bytes:
            return 0
        if pos + added > self.capacity:
            self.grow(pos + added)
        data = self.data
        pos = _store_varint(data, pos, body)
        data[pos] = 0
        pos = _store_varint(data, pos + 1, delta)
        pos = _store_varint(data, pos, count)
        pos = _store_varint(data, pos, key_length)
        if raw_key is not None:
            pos = _store_bytes(data, pos, raw_key)
        pos = _store_varint(data, pos, value_length)
        if raw_value is not None:
            pos = _store_bytes(data, pos, raw_value)
        self.size_bytes = _store_bytes(data, pos, tail)
        self.base_timestamp = base
        if timestamp > self.max_timestamp:
            self.max_timestamp = timestamp
        if count == 0 or timestamp != self.last_timestamp:
            self.last_timestamp = timestamp
            self.time_places.append(count)
            self.times.append(timestamp)
        self.record_count = count + 1
        self.last_added = added
        return added

    def promise(
        self,
        made: "Delivery",
        timestamp: int,
        key: Buffer | None,
        value: Buffer | None,
        headers: Iterable[Header],
    ) -> bool:
        """As `append`, and let `made` promise the record; False when there is no room for it."""
        if self.append(timestamp, key, value, headers) == 0:
            return False
        made.batch = self  # type: ignore[assignment]  # the client's batches keep promises
        made.place = self.record_count - 1
        return True

    def grow(self, needed: int) -> None:
        """Make room for so many bytes and for three times as many more, up to what the batch may hold."""
        room = max(needed, min(needed * 4, self.limit_bytes))
        self.out += bytes(room - len(self.out))
        self.data = self.out
        self.capacity = room

    def fill(self, framed: bytearray, count: int, base_timestamp: int, max_timestamp: int) -> None:
        """Take over records that were encoded elsewhere behind room for a header; only while it is empty."""
        assert self.record_count == 0 and count > 0
        self.out = framed
        self.data = self.out
        self.size_bytes = self.capacity = len(self.out)
        self.record_count = count
        self.base_timestamp = base_timestamp
        self.max_timestamp = max_timestamp
        self.time_places.append(0)
        self.times.append(base_timestamp)

    def timestamp_at(self, place: int) -> int:
        """The timestamp of one of its records."""
        return self.times[bisect_right(self.time_places, place) - 1]

    def whole(self) -> bytearray:
        """All bytes, with room for the header before them; no record is added after this."""
        if len(self.out) > self.size_bytes:  # else it may be on its way already, and its memory cannot move
            del self.out[self.size_bytes :]
        self.data = self.out
        self.capacity = len(self.out)
        return self.out

    def drop(self) -> None:
        """Free the bytes; what was counted stays."""
        self.out = bytearray()
        self.data = self.out
        self.capacity = 0


class Delivery:
    """The promise for one record: await it, or ask for its `result` when it is `done`.

    It is made for every record, so it is only a batch and a place in it; the batch knows the answers.
    """

    def __init__(self, batch: "BatchPromise", place: int) -> None:
        self.batch = batch
        self.place = place

    def done(self) -> bool:
        """Whether the record's fate is known."""
        return self.batch.done_at(self.place)

    def exception(self) -> KafkaError | None:
        """Why it failed, or None when it was acknowledged. Only when it is done."""
        return self.batch.error_at(self.place)

    def result(self) -> "RecordMetadata":
        """Where it went; raises what went wrong. Only when it is done."""
        return self.batch.result_at(self.place)

    def add_done_callback(self, callback: "Callable[[Delivery], object]") -> None:
        """Call `callback(delivery)` when it is done; at once if it is."""
        self.batch.call_at(self.place, callback, self)

    def __await__(self) -> "Generator[Any, None, RecordMetadata]":
        return self.batch.wait_at(self.place)


class Portal(Protocol):
    """The way from any thread to the event loop on which batches end."""

    def wait(self, delivery: "Delivery", timeout_s: float | None) -> "RecordMetadata": ...
    def soon(self, step: Callable[[], object]) -> None: ...


class Pending(Delivery):
    """The promise for one record, for threads without an event loop: `result` waits for it."""

    def __init__(self, batch: "BatchPromise", place: int, portal: Portal) -> None:
        self.batch = batch
        self.place = place
        self.portal = portal

    def result(self, timeout_s: float | None = None) -> "RecordMetadata":
        """Where the record went, once that is known; raises what went wrong, or TimeoutError."""
        if not self.batch.done_at(self.place):
            return self.portal.wait(self, timeout_s)
        return self.batch.result_at(self.place)

    def exception(self, timeout_s: float | None = None) -> KafkaError | None:
        """Why the record failed, once that is known; None when it was acknowledged."""
        try:
            self.result(timeout_s)
        except KafkaError as error:
            return error
        return None

    def add_done_callback(self, callback: "Callable[[Pending], object]") -> None:
        """Call `callback(pending)` in the client's thread when it is done; it must not block."""
        self.portal.soon(lambda: self.batch.call_at(self.place, callback, self))  # type: ignore[arg-type]


class Route:
    """A topic's open batches, and how records without a partition find theirs.

    `sticky` is the partition of records that are not placed by their key, -1 when one must be chosen; it is chosen
    anew after `sticky_left` more bytes. `by_key`: records with a key go to the key's partition.
    """

    def __init__(self, partition_count: int, by_key: bool) -> None:
        self.partition_count = partition_count
        self.by_key = by_key
        self.sticky = -1
        self.sticky_left = 0
        self.open_batches: list[RecordBuffer | None] = [None] * partition_count

    def stick(self, partition: int, size_bytes: int) -> None:
        """Send what is not placed by key to this partition for so many bytes."""
        self.sticky = partition
        self.sticky_left = size_bytes


class SendPath:
    """The short way into the buffer. With a `portal`, what it promises is for threads without an event loop."""

    def __init__(self, clock_ns: Callable[[], int], memory_bytes_max: int) -> None:
        self.portal: Portal | None = None
        self.clock_ns = clock_ns
        self.memory_bytes_max = memory_bytes_max
        self.held_bytes = 0
        self.shut = False
        self.routes: dict[str, Route] = {}

    def append(
        self,
        topic: str,
        value: Buffer | None,
        key: Buffer | None,
        headers: Iterable[Header],
        partition: int | None,
        timestamp_ms: int | None,
    ) -> Delivery | None:
        """Put a record into an open batch; its promise, or None when it must go the long way."""
        route = self.routes.get(topic)
        if route is None or self.shut:
            return None
        if (key is not None and type(key) is not bytes) or (value is not None and type(value) is not bytes):
            return None
        place = -1
        sticky = False
        if partition is not None:
            place = partition
        elif key is not None and route.by_key:
            place = key_partition(key, route.partition_count)
        else:
            place = route.sticky
            sticky = True
        if place < 0 or place >= route.partition_count:
            return None
        size = _OVERHEAD_BYTES
        if key is not None:
            size += len(key)
        if value is not None:
            size += len(value)
        if self.held_bytes + size > self.memory_bytes_max:
            return None
        if timestamp_ms is None:
            timestamp = self.clock_ns()
            timestamp //= _MILLISECOND_NS
        else:
            timestamp = timestamp_ms
        batch = route.open_batches[place]
        if batch is None:
            return None
        made = self.append_to(batch, timestamp, key, value, headers)
        if made is None:
            return None
        if sticky:
            route.sticky_left -= batch.last_added
            if route.sticky_left <= 0:
                route.sticky = -1
        return made

    def append_to(
        self,
        batch: RecordBuffer,
        timestamp: int,
        key: Buffer | None,
        value: Buffer | None,
        headers: Iterable[Header],
    ) -> Delivery | None:
        """Put a record into this batch; its promise, or None when there is no room for it."""
        # Made before anything is written: making an object could set off the garbage collector, and with it other code.
        made = self.blank()
        if not batch.promise(made, timestamp, key, value, headers):
            return None
        self.held_bytes += batch.last_added
        return made

    def blank(self) -> Delivery:
        """A promise that is not given yet."""
        if self.portal is None:
            return Delivery.__new__(Delivery)
        waiting = Pending.__new__(Pending)
        waiting.portal = self.portal
        return waiting

    def hold(self, size: int) -> None:
        """Count bytes that entered another way; fewer than none for bytes that left."""
        self.held_bytes += size


def _as_bytes(name: str, value: object) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise KafkaError(
        ErrorCode.INVALID_RECORD,
        f"the {name} is {type(value).__name__}, not bytes",
        f"encode it, or give the producer a {name}_serializer",
    )


def _encode_headers(headers: Iterable[Header]) -> bytes:
    body = bytearray()
    count = 0
    for name, content in headers:
        encoded = name.encode("utf-8", "surrogateescape")
        _put_varint(body, len(encoded))
        body += encoded
        if content is None:
            _put_varint(body, -1)
        else:
            raw = _as_bytes(f"header {name!r}", content)
            _put_varint(body, len(raw))
            body += raw
        count += 1
    out = bytearray()
    _put_varint(out, count)
    return bytes(out + body)


def _put_varint(out: bytearray, value: int) -> None:
    raw = value << 1 if value >= 0 else (value << 1) ^ -1
    while raw >= 0x80:
        out.append((raw & 0x7F) | 0x80)
        raw >>= 7
    out.append(raw)


def _store_varint(data: bytearray, pos: int, value: int) -> int:
    raw = value << 1 if value >= 0 else (value << 1) ^ -1
    while raw >= 0x80:
        data[pos] = (raw & 0x7F) | 0x80
        raw >>= 7
        pos += 1
    data[pos] = raw
    return pos + 1


def _store_bytes(data: bytearray, pos: int, raw: bytes) -> int:
    length = len(raw)
    if cython.compiled:
        source = raw
        memcpy(data + pos, source, length)  # type: ignore[name-defined, operator] # noqa: F821
    else:
        data[pos : pos + length] = raw
    return pos + length


def _varint_size(value: int) -> int:
    raw = value << 1 if value >= 0 else (value << 1) ^ -1
    size = 1
    while raw >= 0x80:
        raw >>= 7
        size += 1
    return size
