"""The protocol's primitive types, read from and written to bytes. Every read is checked against the end of the
buffer.

A reader takes (buffer, position, budget) and returns (value, next position); a writer appends to a bytearray. The
budget bounds how many array elements one message may hold, however small they are on the wire: a frame of a few
megabytes must not become gigabytes of objects.
"""

from collections.abc import Callable
from struct import Struct
from typing import Any, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview
Reader: TypeAlias = Callable[[Buffer, int, "Budget"], tuple[Any, int]]
Writer: TypeAlias = Callable[[bytearray, Any], None]

ARRAY_ELEMENTS_MAX = 1_000_000
_VARINT_SHIFT_MAX = 28

INT16 = Struct(">h")
INT32 = Struct(">i")
INT64 = Struct(">q")


class Malformed(ValueError):
    """Bytes that are not the message they claim to be."""


class Budget:
    """How many more array elements the message being read may hold."""

    __slots__ = ("elements",)

    def __init__(self, elements: int = ARRAY_ELEMENTS_MAX) -> None:
        self.elements = elements

    def spend(self, count: int, element_size_min: int, room: int) -> None:
        if count < 0 or count * element_size_min > room:
            raise Malformed(f"an array of {count} elements does not fit in {room} bytes")
        self.elements -= count
        if self.elements < 0:
            raise Malformed(f"more than {ARRAY_ELEMENTS_MAX} array elements in one message")


def read_uvarint(buf: Buffer, pos: int) -> tuple[int, int]:
    """An unsigned varint of at most 32 bits."""
    try:
        byte = buf[pos]
        pos += 1
        if byte < 0x80:
            return byte, pos
        value, shift = byte & 0x7F, 7
        while True:
            byte = buf[pos]
            pos += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if value > 0xFFFFFFFF:
                    raise Malformed("varint over 32 bits")
                return value, pos
            shift += 7
            if shift > _VARINT_SHIFT_MAX:
                raise Malformed("varint longer than five bytes")
    except IndexError:
        raise Malformed("varint cut short") from None


def write_uvarint(out: bytearray, value: int) -> None:
    while value > 0x7F:
        out.append((value & 0x7F) | 0x80)
        value >>= 7
    out.append(value)


def take(buf: Buffer, pos: int, length: int) -> tuple[Buffer, int]:
    """`length` bytes from `pos`, as a slice of the buffer's own kind."""
    end = pos + length
    if length < 0 or end > len(buf):
        raise Malformed(f"{length} bytes wanted, {len(buf) - pos} left")
    return buf[pos:end], end


def part(buf: Buffer, pos: int, length: int) -> Buffer:
    """`length` bytes from `pos`, where the caller keeps the position."""
    if length < 0 or pos + length > len(buf):
        raise Malformed(f"{length} bytes wanted, {len(buf) - pos} left")
    return buf[pos : pos + length]


def write_count(out: bytearray, count: int, flexible: bool) -> None:
    """The length of an array that is not null."""
    if flexible:
        write_uvarint(out, count + 1)
    else:
        out += INT32.pack(count)


def text(raw: Buffer) -> str:
    try:
        return str(raw, "utf-8")
    except UnicodeDecodeError as error:
        raise Malformed(f"text that is not UTF-8: {error.reason}") from None


def _length16(buf: Buffer, pos: int, budget: Budget) -> tuple[int, int]:
    if pos + 2 > len(buf):
        raise Malformed("length cut short")
    return INT16.unpack_from(buf, pos)[0], pos + 2


def _length32(buf: Buffer, pos: int, budget: Budget) -> tuple[int, int]:
    if pos + 4 > len(buf):
        raise Malformed("length cut short")
    return INT32.unpack_from(buf, pos)[0], pos + 4


def _length_compact(buf: Buffer, pos: int, budget: Budget) -> tuple[int, int]:
    value, pos = read_uvarint(buf, pos)
    return value - 1, pos


def length_reader(flexible: bool, *, wide: bool) -> Callable[[Buffer, int, Budget], tuple[int, int]]:
    """Reads a length; -1 means null. `wide` is 32 bits before the compact encodings came."""
    if flexible:
        return _length_compact
    return _length32 if wide else _length16


def length_writer(flexible: bool, *, wide: bool) -> Callable[[bytearray, int], None]:
    """Writes a length, -1 for null."""
    if flexible:
        return lambda out, length: write_uvarint(out, length + 1)
    pack = INT32.pack if wide else INT16.pack

    def write_fixed(out: bytearray, length: int) -> None:
        out += pack(length)

    return write_fixed


def skip_tags(buf: Buffer, pos: int) -> int:
    """The position after a section of tagged fields nobody here knows."""
    count, pos = read_uvarint(buf, pos)
    if count > len(buf) - pos:
        raise Malformed(f"{count} tagged fields do not fit in {len(buf) - pos} bytes")
    for _ in range(count):
        _, pos = read_uvarint(buf, pos)
        size, pos = read_uvarint(buf, pos)
        pos += size
        if pos > len(buf):
            raise Malformed("tagged field longer than its message")
    return pos
