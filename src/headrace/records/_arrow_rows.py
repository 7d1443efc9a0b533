# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, binding=True, cdivision=True
# cython: annotation_typing=False
"""The loops from Arrow's columns to records: `Rows` reads Arrow's buffers and writes records, and says where they go.

One source, two lives, as `_codec` (the C types are in `_arrow_rows.pxd`). Knows nothing of pyarrow: buffers are bytes.
Invariant: nothing outside the buffers is read, because `Source` checks the offsets it is given once, when it is made,
and every row number is checked before it is used. The interpreter lock is not held meanwhile. Callers: `columns`.
"""

from headrace.base.errors import ErrorCode, KafkaError

# Cython reads the import below when it compiles; nothing ever runs it, because Cython need not be installed.
_NEVER = False
if _NEVER:
    import cython
else:
    from headrace.records import without_cython as cython

_M64 = 0xFFFFFFFFFFFFFFFF
_M32 = 0xFFFFFFFF
_I32_MAX = 0x7FFFFFFF
_I64_MAX = 0x7FFFFFFFFFFFFFFF
_I64_MIN = -_I64_MAX - 1
_DIGEST_START = 0xCBF29CE484222325
_DIGEST_FACTOR = 0x9E3779B97F4A7C15
_MURMUR_SEED = 0x9747B28C
_MURMUR_FACTOR = 0x5BD1E995


def _longs(count: int) -> memoryview:
    return memoryview(bytearray(8 * count)).cast("q")


def _ints(count: int) -> memoryview:
    return memoryview(bytearray(4 * count)).cast("i")


class Source:
    """A column of bytes to read from: Arrow's buffers, with offsets checked against the data."""

    def __init__(
        self,
        rows: int,
        first: int,
        valid: memoryview | None,
        offsets: memoryview,
        data: memoryview | None,
    ) -> None:
        self.rows = rows
        self.first = first
        self.has_nulls = valid is not None
        self.valid = valid.cast("B") if valid is not None else memoryview(b"\xff")
        self.offsets = offsets.cast("B").cast("i") if len(offsets) else _ints(1)
        self.bytes = data.cast("B") if data is not None and len(data) else memoryview(b"\x00")
        size = 0 if data is None else len(data)
        if cython.compiled:
            self.data = cython.address(self.bytes[0])
        else:
            self.data = self.bytes
        if rows < 0 or first < 0 or (rows > 0 and len(memoryview(self.offsets)) < first + rows + 1):
            raise ValueError("a column is shorter than its rows")
        if valid is not None and len(valid) * 8 < first + rows:
            raise ValueError("a column's validity is shorter than its rows")
        with cython.nogil:
            fits = self.check(size)
        if not fits:
            raise ValueError("a column's offsets do not fit its data")

    def check(self, size: int) -> bool:
        if self.rows == 0:
            return True
        last = self.offsets[self.first]
        if last < 0:
            return False
        for row in range(self.first, self.first + self.rows):
            if self.offsets[row + 1] < last:
                return False
            last = self.offsets[row + 1]
        return last <= size

    def length(self, row: int) -> int:
        """Bytes of an entry, or -1 for null."""
        at = self.first + row
        if self.has_nulls and not (self.valid[at >> 3] >> (at & 7)) & 1:
            return -1
        return self.offsets[at + 1] - self.offsets[at]

    def begin(self, row: int) -> int:
        return self.offsets[self.first + row]


class Rows:
    """Arrow columns as records to write, in an order of the caller's choice.

    `digests` says whether the content is summed up on the way, which costs about as much as the writing.
    """

    def __init__(
        self,
        rows: int,
        keys: Source | None,
        values: Source | None,
        timestamps: memoryview | None,
        header_lists: memoryview | None,
        header_keys: Source | None,
        header_values: Source | None,
    ) -> None:
        empty = Source(0, 0, None, _ints(1), None)
        self.rows = rows
        self.has_keys = keys is not None
        self.has_values = values is not None
        self.keys = keys if keys is not None else empty
        self.values = values if values is not None else empty
        self.has_timestamps = timestamps is not None
        self.timestamps = timestamps.cast("B").cast("q") if timestamps is not None else _longs(1)
        self.has_headers = header_lists is not None
        self.header_lists = header_lists.cast("B").cast("i") if header_lists is not None else _ints(1)
        self.header_keys = header_keys if header_keys is not None else empty
        self.header_values = header_values if header_values is not None else empty
        self.digests = True
        self.digest = 0
        self.pos = 0
        self.max_timestamp = -1
        for column in (keys, values):
            if column is not None and column.rows < rows:
                raise ValueError("a column is shorter than the others")
        if timestamps is not None and len(memoryview(self.timestamps)) < rows:
            raise ValueError("the timestamps are fewer than the rows")
        if header_lists is not None:
            count = min(self.header_keys.rows, self.header_values.rows)
            if len(memoryview(self.header_lists)) < rows + 1 or not self.lists_fit(count):
                raise ValueError("the headers do not fit the rows")

    def lists_fit(self, count: int) -> bool:
        last = self.header_lists[0]
        if last < 0:
            return False
        for row in range(self.rows):
            if self.header_lists[row + 1] < last:
                return False
            last = self.header_lists[row + 1]
        return last <= count

    @property
    def latest_timestamp(self) -> int:
        """The latest timestamp of what `encode` wrote last."""
        return self.max_timestamp

    @property
    def position(self) -> int:
        """Where the bytes that `encode` wrote last end."""
        return self.pos

    @property
    def content_digest(self) -> int:
        """A sum over the keys and values of all rows written so far, the same in whatever order they came."""
        return self.digest

    def first_timestamp(self, row: int, default: int) -> int:
        return self.timestamps[row] if self.has_timestamps else default

    def encode(
        self, order: memoryview | None, first: int, last: int, out: bytearray, at: int, now_ms: int
    ) -> int:
        """Write the rows order[first:last] (all in turn when None) into `out` from `at` on, as far as they fit.

        Returns the index after the last row written; offsets deltas are 0, 1, 2...; the base timestamp is that of the
        first row. `position` and `latest_timestamp` tell the rest.
        """
        if first < 0 or at < 0 or (order is None and last > self.rows):
            raise ValueError("rows outside the columns")
        self.has_order = order is not None
        self.order = order.cast("B").cast("i") if order is not None else _ints(1)
        if order is not None and len(memoryview(self.order)) < last:
            raise ValueError("rows outside the order")
        self.store = out
        self.out = out
        self.limit = len(out)
        self.pos = at
        self.max_timestamp = -1
        self.bad = 0
        with cython.nogil:
            done = self.write(first, last, now_ms)
        if self.bad == 1:
            raise KafkaError(ErrorCode.INVALID_TIMESTAMP, "timestamps of one batch are too far apart")
        if self.bad:
            raise ValueError("a row that is not there, or a header without a key")
        return done

    def write(self, first: int, last: int, now_ms: int) -> int:
        base = now_ms
        index = first
        while index < last:
            row = self.order[index] if self.has_order else index
            if row < 0 or row >= self.rows:
                self.bad = 2
                return index
            timestamp = self.timestamps[row] if self.has_timestamps else now_ms
            if index == first:
                base = timestamp
            if (base >= 0 and timestamp < _I64_MIN + base) or (base < 0 and timestamp > _I64_MAX + base):
                self.bad = 1
                return index
            key_length = self.keys.length(row) if self.has_keys else -1
            value_length = self.values.length(row) if self.has_values else -1
            size = 1 + self.varint_size(timestamp - base) + self.varint_size(index - first)
            size += self.varint_size(key_length) + self.varint_size(value_length)
            if key_length > 0:
                size += key_length
            if value_length > 0:
                size += value_length
            headers = 0
            if self.has_headers:
                header_first = self.header_lists[row]
                headers = self.header_lists[row + 1] - header_first
                for header in range(header_first, header_first + headers):
                    length = self.header_keys.length(header)
                    if length < 0:
                        self.bad = 2
                        return index
                    size += self.varint_size(length) + length
                    length = self.header_values.length(header)
                    size += self.varint_size(length) + (length if length > 0 else 0)
            size += self.varint_size(headers)
            if size > _I32_MAX or self.pos + self.varint_size(size) + size > self.limit:
                return index
            self.put_varint(size)
            self.out[self.pos] = 0
            self.pos += 1
            self.put_varint(timestamp - base)
            self.put_varint(index - first)
            self.put_bytes(self.keys, row, key_length)
            self.put_bytes(self.values, row, value_length)
            self.put_varint(headers)
            if headers > 0:
                for header in range(header_first, header_first + headers):
                    self.put_bytes(self.header_keys, header, self.header_keys.length(header))
                    self.put_bytes(self.header_values, header, self.header_values.length(header))
            if timestamp > self.max_timestamp:
                self.max_timestamp = timestamp
            if self.digests:
                self.digest = (self.digest + self.hash_row(row, key_length, value_length)) & _M64
            index += 1
        return index

    def put_bytes(self, column: Source, row: int, length: int) -> None:
        self.put_varint(length)
        if length > 0:
            begin = column.begin(row)
            if cython.compiled:
                memcpy(self.out + self.pos, column.data + begin, length)  # type: ignore[name-defined, operator] # noqa: F821
            else:
                self.out[self.pos : self.pos + length] = column.data[begin : begin + length]
            self.pos += length

    def put_varint(self, value: int) -> None:
        raw = value << 1 if value >= 0 else (value << 1) ^ -1
        while raw >= 0x80:
            self.out[self.pos] = (raw & 0x7F) | 0x80
            self.pos += 1
            raw >>= 7
        self.out[self.pos] = raw
        self.pos += 1

    def varint_size(self, value: int) -> int:
        raw = value << 1 if value >= 0 else (value << 1) ^ -1
        size = 1
        while raw >= 0x80:
            raw >>= 7
            size += 1
        return size

    def hash_row(self, row: int, key_length: int, value_length: int) -> int:
        found = _DIGEST_START
        found = self.hash_bytes(found, self.keys, row, key_length)
        return self.hash_bytes(found, self.values, row, value_length)

    def hash_bytes(self, found: int, column: Source, row: int, length: int) -> int:
        """Mix eight bytes at a time; the length keeps "a", "b" and "ab", "" apart."""
        found = ((found ^ (length + 1)) * _DIGEST_FACTOR) & _M64
        found ^= found >> 29
        at = 0
        begin = 0
        if length > 0:
            begin = column.begin(row)
        while at < length:
            size = length - at
            word = 0
            if not cython.compiled:
                size = min(size, 8)
                word = int.from_bytes(column.data[begin + at : begin + at + size], "little")
            elif size >= 8:
                size = 8  # known to the compiler: one load instead of a call
                memcpy(cython.address(word), column.data + begin + at, 8)  # type: ignore[name-defined] # noqa: F821
            else:
                memcpy(cython.address(word), column.data + begin + at, size)  # type: ignore[name-defined] # noqa: F821
            found = ((found ^ word) * _DIGEST_FACTOR) & _M64
            found ^= found >> 29
            at += size
        return found

    def assign(self, given: memoryview | None, partitions: int, turn: int) -> tuple[memoryview, memoryview]:
        """Which rows go to which partition: their order, partition after partition, and where each begins.

        `given` names the partition of a row, -1 for none; then the key's murmur2 hash decides, as in Java's
        producer, and rows without a key go in even runs, beginning with partition `turn`.
        """
        if partitions <= 0:
            raise ValueError("a topic has partitions")
        self.has_order = given is not None
        self.order = given.cast("B").cast("i") if given is not None else _ints(1)
        if given is not None and len(memoryview(self.order)) < self.rows:
            raise ValueError("fewer partitions than rows")
        chosen = _ints(self.rows + 1)
        starts = _ints(partitions + 1)
        order = _ints(self.rows + 1)
        self.chosen = chosen
        self.starts = starts
        self.sorted = order
        self.bad = 0
        with cython.nogil:
            self.choose(partitions, turn)
        if self.bad:
            raise KafkaError(
                ErrorCode.INVALID_PARTITIONS, f"a row names a partition that is not 0 to {partitions - 1}"
            )
        return order, starts

    def choose(self, partitions: int, turn: int) -> None:
        for row in range(self.rows):
            partition = self.order[row] if self.has_order else -1
            if partition >= partitions or partition < -1:
                self.bad = 3
                return
            if partition < 0:
                length = self.keys.length(row) if self.has_keys else -1
                if length >= 0:
                    partition = (self.murmur2(row, length) & 0x7FFFFFFF) % partitions
                else:
                    partition = (row * partitions // self.rows + turn) % partitions
            self.chosen[row] = partition
            self.starts[partition + 1] += 1
        for number in range(partitions):
            self.starts[number + 1] += self.starts[number]
        for row in range(self.rows):
            partition = self.chosen[row]
            self.sorted[self.starts[partition]] = row
            self.starts[partition] += 1
        number = partitions
        while number > 0:
            self.starts[number] = self.starts[number - 1]
            number -= 1
        self.starts[0] = 0

    def murmur2(self, row: int, length: int) -> int:
        begin = self.keys.begin(row) if length > 0 else 0
        found = (_MURMUR_SEED ^ length) & _M32
        at = 0
        while length - at >= 4:
            word = self.keys.data[begin + at]
            word |= self.keys.data[begin + at + 1] << 8
            word |= self.keys.data[begin + at + 2] << 16
            word |= self.keys.data[begin + at + 3] << 24
            word = (word * _MURMUR_FACTOR) & _M32
            word ^= word >> 24
            word = (word * _MURMUR_FACTOR) & _M32
            found = ((found * _MURMUR_FACTOR) & _M32) ^ word
            at += 4
        if length - at >= 3:
            found ^= self.keys.data[begin + at + 2] << 16
        if length - at >= 2:
            found ^= self.keys.data[begin + at + 1] << 8
        if length - at >= 1:
            found ^= self.keys.data[begin + at]
            found = (found * _MURMUR_FACTOR) & _M32
        found ^= found >> 13
        found = (found * _MURMUR_FACTOR) & _M32
        return found ^ (found >> 15)
