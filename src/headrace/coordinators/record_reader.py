"""A cursor over one key or value of an internal topic.

Owns nothing but its position. Invariant: whatever does not fit its own lengths is a corrupt record, never an error of
another kind and never memory for what is not there. The record formats of groups are written with it.
"""

import struct

from headrace.base.errors import ErrorCode, KafkaError

_SHORT = struct.Struct(">h")
_INT = struct.Struct(">i")
_LONG = struct.Struct(">q")


class RecordReader:
    """Reads fields one after the other."""

    __slots__ = ("_compact", "_data", "_pos")

    def __init__(self, data: bytes, compact: bool = False) -> None:
        self._data = data
        self._pos = 0
        self._compact = compact

    def version(self, last: int, flexible_from: int) -> int:
        """The version a value begins with; from `flexible_from` on, lengths and tags are compact."""
        version = self.int16()
        if not 0 <= version <= last:
            raise KafkaError(ErrorCode.CORRUPT_MESSAGE, f"a value of unknown version {version}")
        self._compact = version >= flexible_from
        return version

    def int8(self) -> int:
        return int.from_bytes(self._take(1), "big", signed=True)

    def int16(self) -> int:
        return int(_SHORT.unpack(self._take(2))[0])

    def int32(self) -> int:
        return int(_INT.unpack(self._take(4))[0])

    def int64(self) -> int:
        return int(_LONG.unpack(self._take(8))[0])

    def text(self) -> str:
        found = self.optional_text()
        if found is None:
            raise KafkaError(ErrorCode.CORRUPT_MESSAGE, "a string is missing")
        return found

    def optional_text(self) -> str | None:
        size = self._varint() - 1 if self._compact else self.int16()
        if size < 0:
            return None
        try:
            return str(self._take(size), "utf-8")
        except UnicodeDecodeError:
            raise KafkaError(ErrorCode.CORRUPT_MESSAGE, "a string is not UTF-8") from None

    def texts(self) -> list[str]:
        return [self.text() for _ in range(self.count())]

    def blob(self) -> bytes:
        size = self._varint() - 1 if self._compact else self.int32()
        return self._take(max(size, 0))

    def count(self) -> int:
        count = self._varint() - 1 if self._compact else self.int32()
        if count > len(self._data) - self._pos:
            raise KafkaError(ErrorCode.CORRUPT_MESSAGE, "an array is longer than its record")
        return max(count, 0)

    def skip_tags(self) -> None:
        self.tags()

    def tags(self) -> dict[int, bytes]:
        """The tagged fields that follow, by number."""
        if not self._compact:
            return {}
        return {self._varint(): self._take(self._varint()) for _ in range(self._varint())}

    def raw(self, size: int) -> bytes:
        return self._take(size)

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
            if shift > 28:
                raise KafkaError(ErrorCode.CORRUPT_MESSAGE, "a number is too long")

    def _take(self, size: int) -> bytes:
        start = self._pos
        end = start + size
        if end > len(self._data):
            raise KafkaError(ErrorCode.CORRUPT_MESSAGE, "a record is cut short")
        self._pos = end
        return self._data[start:end]
