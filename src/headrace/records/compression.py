"""Compression of a batch's records, with a bound on what may come out.

Owns the four codecs' framing as Kafka's clients write it: gzip members, snappy in xerial blocks (raw snappy
is read too, librdkafka writes it), lz4 frames, zstd frames; frames may lack their content size and may
follow one another. Invariant: `decompress` never writes past its limit, whatever the bytes claim, so a bomb
costs its limit at most. The codecs are imported on first use: a broker that stores batches as they come
never loads them.

Callers: the builder, storage (validation that must look inside, recompression, compaction) and the client.
"""

import mmap
from enum import IntEnum
from typing import Any, Final

from headrace.base.errors import ErrorCode, KafkaError
from headrace.records.batch import Buffer


class Compression(IntEnum):
    """The codecs, by their number in a batch's attributes."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4


NAMES: Final = {"none": 0, "uncompressed": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}

# The most that one batch may inflate to unless the caller says otherwise: above any request that a broker
# takes.
INFLATED_BYTES_MAX: Final = 128 * 1024 * 1024

# Kafka's own default levels; snappy has none. lz4's fast mode is level 1 in the reference implementation.
LEVEL_DEFAULT: Final = {Compression.GZIP: 6, Compression.LZ4: 1, Compression.ZSTD: 3}

# First attempt at inflating: this many times the input, within these sizes. Most batches fit, and the
# attempt that does not ends as soon as the buffer is full.
_GUESS_RATIO: Final = 6
_GUESS_BYTES_MIN: Final = 16 * 1024
_GUESS_BYTES_MAX: Final = 4 * 1024 * 1024

_XERIAL_MAGIC: Final = b"\x82SNAPPY\x00"
# Version 1, readable by version 1.
_XERIAL_HEADER: Final = _XERIAL_MAGIC + b"\x00\x00\x00\x01\x00\x00\x00\x01"
_XERIAL_BLOCK_BYTES: Final = 32 * 1024
# No snappy element makes more than 64 bytes of 3, so a longer claim is a lie: refused before memory is taken
# for it.
_SNAPPY_RATIO_MAX: Final = 22


def compress(codec: int, data: Buffer, level: int | None = None) -> bytes:
    """`data` as Kafka's clients expect it in a batch of this codec."""
    if codec == Compression.NONE:
        return bytes(data)
    cramjam = _cramjam()
    if codec == Compression.GZIP:
        return bytes(cramjam.gzip.compress(data, level=_level(codec, level)))
    if codec == Compression.ZSTD:
        return bytes(cramjam.zstd.compress(data, level=_level(codec, level)))
    if codec == Compression.LZ4:
        # Java's reader refuses frames whose blocks depend on one another.
        stream = cramjam.lz4.Compressor(_level(codec, level), content_checksum=False, block_linked=False)
        stream.compress(bytes(data))
        return bytes(stream.finish())
    if codec == Compression.SNAPPY:
        return _compress_xerial(cramjam.snappy, memoryview(data))
    raise _unknown(codec)


def decompress(codec: int, data: Buffer, limit: int = INFLATED_BYTES_MAX) -> memoryview:
    """What `data` inflates to; CORRUPT_MESSAGE when it is damaged or would be longer than `limit` bytes."""
    view = memoryview(data)
    if codec == Compression.NONE:
        if len(view) > limit:
            raise _too_large(limit)
        return view
    cramjam = _cramjam()
    if codec == Compression.SNAPPY:
        return _decompress_snappy(cramjam, view, limit)
    if codec == Compression.GZIP:
        inflate = cramjam.gzip.decompress_into
    elif codec == Compression.LZ4:
        inflate = cramjam.lz4.decompress_into
    elif codec == Compression.ZSTD:
        inflate = cramjam.zstd.decompress_into
    else:
        raise _unknown(codec)
    guess = min(max(len(view) * _GUESS_RATIO, _GUESS_BYTES_MIN), _GUESS_BYTES_MAX)
    if guess < limit:
        out: Any = bytearray(guess)
        try:
            return memoryview(out)[: inflate(view, out)]
        except cramjam.DecompressionError:
            pass  # too small, or damaged: the attempt with all the room there is tells which
    # Pages of an anonymous map cost nothing until they are written, so the bound itself is free.
    out = mmap.mmap(-1, limit) if limit > 0 else bytearray()
    try:
        return memoryview(out)[: inflate(view, out)]
    except cramjam.DecompressionError as error:
        raise KafkaError(
            ErrorCode.CORRUPT_MESSAGE,
            f"{Compression(codec).name.lower()} data is damaged or larger than {limit} bytes: {error}",
        ) from None


def _compress_xerial(snappy: Any, view: memoryview) -> bytes:
    parts = [_XERIAL_HEADER]
    for start in range(0, len(view), _XERIAL_BLOCK_BYTES):
        block = bytes(snappy.compress_raw(view[start : start + _XERIAL_BLOCK_BYTES]))
        parts.append(len(block).to_bytes(4, "big"))
        parts.append(block)
    return b"".join(parts)


def _decompress_snappy(cramjam: Any, view: memoryview, limit: int) -> memoryview:
    try:
        if bytes(view[: len(_XERIAL_MAGIC)]) != _XERIAL_MAGIC:
            return _inflate_blocks(cramjam.snappy, [view], limit)
        return _inflate_blocks(cramjam.snappy, _xerial_blocks(view), limit)
    except cramjam.DecompressionError as error:
        raise KafkaError(ErrorCode.CORRUPT_MESSAGE, f"snappy data is damaged: {error}") from None


def _xerial_blocks(view: memoryview) -> list[memoryview]:
    """The snappy blocks of one or more xerial streams, each block a view."""
    blocks = []
    pos = len(_XERIAL_HEADER)
    while pos < len(view):
        if bytes(view[pos : pos + len(_XERIAL_MAGIC)]) == _XERIAL_MAGIC:  # streams may be concatenated
            pos += len(_XERIAL_HEADER)
            continue
        length = int.from_bytes(view[pos : pos + 4], "big")
        pos += 4
        if length == 0 or pos + length > len(view):
            raise KafkaError(ErrorCode.CORRUPT_MESSAGE, f"snappy block of {length} bytes does not fit")
        blocks.append(view[pos : pos + length])
        pos += length
    if pos != len(view):
        raise KafkaError(ErrorCode.CORRUPT_MESSAGE, "snappy header is cut short")
    return blocks


def _inflate_blocks(snappy: Any, blocks: list[memoryview], limit: int) -> memoryview:
    """Raw snappy states its size first: add the sizes up, and only then take the memory."""
    sizes = []
    total = 0
    for block in blocks:
        size: int = snappy.decompress_raw_len(block)
        if size > len(block) * _SNAPPY_RATIO_MAX:
            raise KafkaError(ErrorCode.CORRUPT_MESSAGE, f"snappy block of {len(block)} bytes claims {size}")
        total += size
        if total > limit:
            raise _too_large(limit)
        sizes.append(size)
    out = memoryview(bytearray(total))
    pos = 0
    for block, size in zip(blocks, sizes, strict=True):
        snappy.decompress_raw_into(block, out[pos : pos + size])
        pos += size
    return out


def _level(codec: int, level: int | None) -> int:
    return LEVEL_DEFAULT[Compression(codec)] if level is None else level


def _too_large(limit: int) -> KafkaError:
    return KafkaError(ErrorCode.CORRUPT_MESSAGE, f"records are larger than {limit} bytes")


def _unknown(codec: int) -> KafkaError:
    return KafkaError(ErrorCode.UNSUPPORTED_COMPRESSION_TYPE, f"compression {codec} is no codec")


def _cramjam() -> Any:
    import cramjam  # on first use: 10 ms and several MB that an idle broker need not spend

    return cramjam
