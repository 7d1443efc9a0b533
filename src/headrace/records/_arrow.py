# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, binding=True, cdivision=True
# cython: annotation_typing=False
"""The loops from records to Arrow's columns: `Columns` takes inflated batches and keeps what Arrow calls buffers.

One source, two lives, as `_codec` (the C types are in `_arrow.pxd`): offsets, bytes and validity bits, in growing
memory. Knows nothing of pyarrow. Invariant: whatever the bytes are, a function returns or raises KafkaError, and
nothing outside them is read: `measure` walks a batch with every check there is before `fill` copies from it. The
interpreter lock is not held meanwhile. Callers: `columns`.
"""

from headrace.base.errors import ErrorCode, KafkaError

# Cython reads the import below when it compiles; nothing ever runs it, because Cython need not be installed.
_NEVER = False
if _NEVER:
    import cython
else:
    from headrace.records import without_cython as cython

_RECORD_BYTES_MIN = 7
_HEADER_BYTES_MIN = 2
_I32_MAX = 0x7FFFFFFF
_I64_MAX = 0x7FFFFFFFFFFFFFFF
_I64_MIN = -_I64_MAX - 1
_OFFSET_MAX = 0x7FFFFFFF00000000

_ROWS_FIRST = 1024
_BYTES_FIRST = 64 * 1024


def _invalid() -> KafkaError:
    return KafkaError(ErrorCode.INVALID_RECORD, "the records of a batch are malformed")


def _longs(count: int) -> memoryview:
    return memoryview(bytearray(8 * count)).cast("q")


def _ints(count: int) -> memoryview:
    return memoryview(bytearray(4 * count)).cast("i")


class _Binary:
    """One column of bytes while it grows: data, 32-bit offsets, validity bits."""

    def __init__(self, rows: int, size: int) -> None:
        self.count = 0
        self.nulls = 0
        self.used = 0
        self.rows_max = rows
        self.bytes_max = size
        self.store = bytearray(size)
        self.data = self.store
        self.offsets = _ints(rows + 1)
        self.valid_store = bytearray((rows + 7) // 8)
        self.valid = self.valid_store

    def reserve(self, rows: int, size: int) -> None:
        """Make room for so many more entries and bytes. Raises KafkaError beyond what 32-bit offsets can reach."""
        if self.used + size > _I32_MAX or self.count + rows > _I32_MAX:
            raise KafkaError(ErrorCode.RECORD_LIST_TOO_LARGE, "more bytes than one Arrow column holds")
        if self.used + size > self.bytes_max:
            self.bytes_max = max(2 * self.bytes_max, self.used + size)
            grown = bytearray(self.bytes_max)
            grown[: self.used] = memoryview(self.store)[: self.used]
            self.store = grown
            self.data = grown
        if self.count + rows > self.rows_max:
            self.rows_max = max(2 * self.rows_max, self.count + rows)
            offsets = _ints(self.rows_max + 1)
            offsets[: self.count + 1] = memoryview(self.offsets)[: self.count + 1]
            self.offsets = offsets
            bits = bytearray((self.rows_max + 7) // 8)
            bits[: len(self.valid_store)] = self.valid_store
            self.valid_store = bits
            self.valid = bits

    def put(self, source: bytes, begin: int, length: int) -> None:
        """One entry; length -1 is null. Room was reserved."""
        if length < 0:
            self.nulls += 1
        else:
            if length > 0:
                if cython.compiled:
                    memcpy(self.data + self.used, source + begin, length)  # type: ignore[name-defined, operator] # noqa: F821
                else:
                    self.data[self.used : self.used + length] = source[begin : begin + length]
            self.used += length
            self.valid[self.count >> 3] |= 1 << (self.count & 7)
        self.count += 1
        self.offsets[self.count] = self.used

    def put_list(self, end: int, length: int) -> None:
        """One list of `length` entries that end at `end` in another column; no entries are null."""
        if length > 0:
            self.valid[self.count >> 3] |= 1 << (self.count & 7)
        else:
            self.nulls += 1
        self.count += 1
        self.offsets[self.count] = end

    def buffers(self) -> tuple[int, int, memoryview, memoryview, memoryview]:
        """Entries, nulls, validity, offsets and data, each cut to what is used."""
        return (
            self.count,
            self.nulls,
            memoryview(self.valid_store)[: (self.count + 7) // 8],
            memoryview(self.offsets).cast("B")[: 4 * (self.count + 1)],
            memoryview(self.store)[: self.used],
        )


class Columns:
    """Records of one partition as Arrow buffers; `add` an inflated batch after the other, then read the buffers."""

    def __init__(
        self,
        with_keys: bool = True,
        with_values: bool = True,
        with_headers: bool = False,
        value_bytes: int = 0,
    ) -> None:
        self.with_keys = with_keys
        self.with_values = with_values
        self.with_headers = with_headers
        self.rows = 0
        self.rows_max = _ROWS_FIRST
        self.offsets = _longs(_ROWS_FIRST)
        self.timestamps = _longs(_ROWS_FIRST)
        self.keys = _Binary(_ROWS_FIRST, _BYTES_FIRST if with_keys else 0)
        self.values = _Binary(_ROWS_FIRST, max(value_bytes, _BYTES_FIRST) if with_values else 0)
        self.header_lists = _Binary(_ROWS_FIRST if with_headers else 0, 0)
        self.header_keys = _Binary(0, 0)
        self.header_values = _Binary(0, 0)
        self.pos = 0
        self.end = 0
        self.size = 0
        self.bad = 0
        self.key_bytes = 0
        self.value_bytes = 0
        self.header_count = 0
        self.header_key_bytes = 0
        self.header_value_bytes = 0

    @property
    def row_count(self) -> int:
        return self.rows

    @property
    def byte_count(self) -> int:
        """Bytes of keys, values and headers held."""
        return self.keys.used + self.values.used + self.header_keys.used + self.header_values.used

    def number_buffers(self) -> tuple[memoryview, memoryview]:
        """Offsets and timestamps, 64 bits each."""
        return (
            memoryview(self.offsets).cast("B")[: 8 * self.rows],
            memoryview(self.timestamps).cast("B")[: 8 * self.rows],
        )

    def microsecond_buffers(self) -> tuple[memoryview, memoryview]:
        """As `number_buffers`, with timestamps in microseconds; once, and nothing is added after it."""
        with cython.nogil:
            fits = self.to_microseconds()
        if not fits:
            raise KafkaError(
                ErrorCode.INVALID_TIMESTAMP, "a timestamp is farther away than microseconds of 64 bits reach"
            )
        return self.number_buffers()

    def to_microseconds(self) -> bool:
        for row in range(self.rows):
            if self.timestamps[row] > _I64_MAX // 1000 or self.timestamps[row] < -(_I64_MAX // 1000):
                return False
        for row in range(self.rows):
            self.timestamps[row] = self.timestamps[row] * 1000
        return True

    def add(
        self,
        payload: bytes | bytearray | memoryview,
        count: int,
        base_offset: int,
        base_timestamp: int,
        append_time: int,
        first_offset: int,
        end_offset: int,
    ) -> int:
        """Take the records of an inflated batch from `first_offset` to before `end_offset`; how many they were."""
        view = memoryview(payload)
        self.size = len(view)
        if count < 0 or count > self.size // _RECORD_BYTES_MIN or not 0 <= base_offset <= _OFFSET_MAX:
            raise _invalid()
        if count == 0:
            return 0
        self.view = view
        if cython.compiled:
            self.data = cython.address(self.view[0])
        else:
            self.data = self.view
        with cython.nogil:
            self.measure(count, base_timestamp, append_time)
        if self.bad:
            raise _invalid()
        self.reserve(count)
        before = self.rows
        with cython.nogil:
            self.fill(count, base_offset, base_timestamp, append_time, first_offset, end_offset)
        return self.rows - before

    def varint(self, shift_max: int) -> int:
        """One zigzag number of 32 bits (shift_max 28) or 64 bits (63). Sets `bad` when it is none."""
        pos = self.pos
        if pos >= self.end:
            self.bad = 1
            return 0
        byte = self.data[pos]
        pos += 1
        raw = byte & 0x7F
        shift = 7
        while byte >= 0x80:
            if pos >= self.end:
                self.bad = 1
                return 0
            byte = self.data[pos]
            pos += 1
            if shift == shift_max and byte > (0x0F if shift == 28 else 0x01):
                self.bad = 1
                return 0
            raw |= (byte & 0x7F) << shift
            shift += 7
        self.pos = pos
        return (raw >> 1) ^ -(raw & 1)  # type: ignore[no-any-return]

    def length(self) -> int:
        """A nullable field's length, which is really there, or -1; moves past its bytes."""
        length = self.varint(28)
        if length < -1 or length > self.end - self.pos:
            self.bad = 1
            return -1
        if length > 0:
            self.pos += length
        return length

    def measure(self, count: int, base_timestamp: int, append_time: int) -> None:
        """Check every number of the batch, and add up what its columns will take."""
        self.pos = 0
        self.end = self.size
        self.bad = 0
        self.key_bytes = 0
        self.value_bytes = 0
        self.header_count = 0
        self.header_key_bytes = 0
        self.header_value_bytes = 0
        for _ in range(count):
            length = self.varint(28)
            if self.bad or length < _RECORD_BYTES_MIN - 1 or length > self.end - self.pos:
                self.bad = 1
                return
            self.end = self.pos + length
            self.pos += 1
            delta = self.varint(63)
            if append_time == -1 and (
                (delta > 0 and base_timestamp > _I64_MAX - delta)
                or (delta < 0 and base_timestamp < _I64_MIN - delta)
            ):
                self.bad = 1
            if self.varint(28) < 0:
                self.bad = 1
            length = self.length()
            if length > 0:
                self.key_bytes += length
            length = self.length()
            if length > 0:
                self.value_bytes += length
            headers = self.varint(28)
            if headers < 0 or headers * _HEADER_BYTES_MIN > self.end - self.pos or self.bad:
                self.bad = 1
                return
            self.header_count += headers
            for _h in range(headers):
                length = self.length()
                if length < 0:
                    self.bad = 1
                    return
                self.header_key_bytes += length
                length = self.length()
                if length > 0:
                    self.header_value_bytes += length
            if self.pos != self.end or self.bad:
                self.bad = 1
                return
            self.end = self.size
        if self.pos != self.size:
            self.bad = 1

    def reserve(self, count: int) -> None:
        """Make room for the batch that was measured."""
        if self.rows + count > self.rows_max:
            self.rows_max = max(2 * self.rows_max, self.rows + count)
            for name in ("offsets", "timestamps"):
                grown = _longs(self.rows_max)
                if name == "offsets":
                    grown[: self.rows] = memoryview(self.offsets)[: self.rows]
                    self.offsets = grown
                else:
                    grown[: self.rows] = memoryview(self.timestamps)[: self.rows]
                    self.timestamps = grown
        self.keys.reserve(count, self.key_bytes if self.with_keys else 0)
        self.values.reserve(count, self.value_bytes if self.with_values else 0)
        if self.with_headers:
            self.header_lists.reserve(count, 0)
            self.header_keys.reserve(self.header_count, self.header_key_bytes)
            self.header_values.reserve(self.header_count, self.header_value_bytes)

    def fill(
        self,
        count: int,
        base_offset: int,
        base_timestamp: int,
        append_time: int,
        first_offset: int,
        end_offset: int,
    ) -> None:
        """Copy the batch that was measured; what lies outside the offsets wanted is passed over."""
        self.pos = 0
        self.end = self.size
        for _ in range(count):
            length = self.varint(28)
            next_record = self.pos + length
            self.pos += 1
            delta = self.varint(63)
            offset = base_offset + self.varint(28)
            if offset < first_offset or offset >= end_offset:
                self.pos = next_record
                continue
            self.offsets[self.rows] = offset
            self.timestamps[self.rows] = append_time if append_time != -1 else base_timestamp + delta
            length = self.length()
            if self.with_keys:
                self.keys.put(self.data, self.pos - (length if length > 0 else 0), length)
            length = self.length()
            if self.with_values:
                self.values.put(self.data, self.pos - (length if length > 0 else 0), length)
            if self.with_headers:
                headers = self.varint(28)
                for _h in range(headers):
                    length = self.length()
                    self.header_keys.put(self.data, self.pos - length, length)
                    length = self.length()
                    self.header_values.put(self.data, self.pos - (length if length > 0 else 0), length)
                # A list column is one of offsets alone; no headers at all are null, as Spark's own source has it.
                self.header_lists.put_list(self.header_keys.count, headers)
            self.pos = next_record
            self.rows += 1
