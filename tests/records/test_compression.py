"""Compression as other clients write it, and the bound on what comes out."""

import gzip
import subprocess
import sys
import textwrap

import lz4.frame
import pytest
import snappy
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import ErrorCode, KafkaError
from headrace.records.compression import NAMES, Compression, compress, decompress

CODECS = [Compression.GZIP, Compression.SNAPPY, Compression.LZ4, Compression.ZSTD]
LIMIT = 1_000_000
TEXT = b"".join(b"line %d of a text that repeats itself\n" % number for number in range(5_000))


@pytest.mark.parametrize("codec", [Compression.NONE, *CODECS])
@given(data=st.binary(max_size=2_000), repeat=st.integers(1, 60))
def test_what_is_compressed_inflates_to_itself(codec: Compression, data: bytes, repeat: int) -> None:
    data *= repeat
    packed = compress(codec, data)
    assert decompress(codec, packed, LIMIT) == data
    assert decompress(codec, memoryview(bytearray(packed)), LIMIT) == data
    assert decompress(codec, packed, len(data)) == data


@pytest.mark.parametrize("codec", [Compression.GZIP, Compression.LZ4, Compression.ZSTD])
def test_levels_are_passed_on(codec: Compression) -> None:
    fast, small = compress(codec, TEXT, 1), compress(codec, TEXT, 9)
    assert fast != small
    assert decompress(codec, fast, LIMIT) == decompress(codec, small, LIMIT) == TEXT


# -- what others write ---------------------------------------------------------------------------------------------


def xerial(*blocks: bytes) -> bytes:
    out = b"\x82SNAPPY\x00" + (1).to_bytes(4, "big") * 2
    for block in blocks:
        packed = snappy.compress(block)
        out += len(packed).to_bytes(4, "big") + packed
    return out


def lz4_without_size(data: bytes, **options: object) -> bytes:
    return bytes(lz4.frame.compress(data, store_size=False, **options))


def zstd_stream(data: bytes) -> bytes:
    """A frame that does not state its content size, as a streaming writer leaves it."""
    stream = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    return bytes(stream.compress(data[:100]) + stream.compress(data[100:]) + stream.flush())


FOREIGN = {
    "gzip": (Compression.GZIP, gzip.compress(TEXT)),
    "gzip of two members": (Compression.GZIP, gzip.compress(TEXT[:999]) + gzip.compress(TEXT[999:])),
    "snappy blocks": (Compression.SNAPPY, xerial(TEXT[:32_768], TEXT[32_768:60_000], TEXT[60_000:])),
    "snappy blocks of two streams": (Compression.SNAPPY, xerial(TEXT[:100]) + xerial(TEXT[100:])),
    "snappy raw": (Compression.SNAPPY, snappy.compress(TEXT)),
    "lz4 with its size": (Compression.LZ4, lz4.frame.compress(TEXT)),
    "lz4 without its size": (Compression.LZ4, lz4_without_size(TEXT)),
    "lz4 with linked blocks": (Compression.LZ4, lz4_without_size(TEXT, block_linked=True, block_size=4)),
    "lz4 with every checksum": (
        Compression.LZ4,
        lz4_without_size(TEXT, block_linked=False, content_checksum=True, block_checksum=True),
    ),
    "lz4 of two frames": (Compression.LZ4, lz4_without_size(TEXT[:50]) + lz4_without_size(TEXT[50:])),
    "zstd with its size": (
        Compression.ZSTD,
        zstandard.ZstdCompressor(write_content_size=True).compress(TEXT),
    ),
    "zstd without its size": (Compression.ZSTD, zstd_stream(TEXT)),
    "zstd with checksum": (Compression.ZSTD, zstandard.ZstdCompressor(write_checksum=True).compress(TEXT)),
    "zstd of two frames": (Compression.ZSTD, zstd_stream(TEXT[:5_000]) + zstd_stream(TEXT[5_000:])),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_others_compressed_is_read(name: str) -> None:
    codec, packed = FOREIGN[name]
    assert decompress(codec, packed, LIMIT) == TEXT
    assert decompress(codec, packed, len(TEXT)) == TEXT
    with pytest.raises(KafkaError) as caught:
        decompress(codec, packed, len(TEXT) - 1)
    assert caught.value.code is ErrorCode.CORRUPT_MESSAGE


def test_others_read_what_is_compressed_here() -> None:
    assert gzip.decompress(compress(1, TEXT)) == TEXT
    assert lz4.frame.decompress(compress(3, TEXT)) == TEXT
    assert zstandard.ZstdDecompressor().decompressobj().decompress(compress(4, TEXT)) == TEXT
    packed = compress(2, TEXT)
    assert packed[:16] == b"\x82SNAPPY\x00" + (1).to_bytes(4, "big") * 2
    out, pos = b"", 16
    while pos < len(packed):
        length = int.from_bytes(packed[pos : pos + 4], "big")
        block = snappy.decompress(packed[pos + 4 : pos + 4 + length])
        assert len(block) <= 32 * 1024
        out += block
        pos += 4 + length
    assert out == TEXT


def test_lz4_blocks_stand_alone_because_java_reads_no_others() -> None:
    frame = compress(Compression.LZ4, TEXT)
    assert frame[:4] == b"\x04\x22\x4d\x18"
    assert frame[4] >> 6 == 1, "frame version"
    assert frame[4] & 0x20, "block independence"


# -- what is hostile -----------------------------------------------------------------------------------------------


def inflated_size(codec: Compression, raw: bytes, limit: int) -> int:
    """How long it became, or -1 when it was refused the way it should be."""
    try:
        return len(decompress(codec, raw, limit))
    except KafkaError as error:
        if error.code is ErrorCode.CORRUPT_MESSAGE:
            return -1
        raise


@pytest.mark.parametrize("codec", CODECS)
@given(data=st.data())
def test_damaged_bytes_inflate_within_the_limit_or_are_refused(
    codec: Compression, data: st.DataObject
) -> None:
    packed = bytearray(compress(codec, TEXT[:3_000]))
    for _ in range(data.draw(st.integers(0, 3))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    packed = packed[: data.draw(st.integers(0, len(packed)))]
    assert inflated_size(codec, bytes(packed), 5_000) <= 5_000


@pytest.mark.parametrize("codec", CODECS)
@given(raw=st.binary(max_size=100))
def test_any_bytes_are_inflated_or_refused(codec: Compression, raw: bytes) -> None:
    assert inflated_size(codec, raw, 5_000) <= 5_000


@pytest.mark.parametrize("codec", CODECS)
def test_nothing_is_not_compressed_data(codec: Compression) -> None:
    with pytest.raises(KafkaError):
        decompress(codec, b"", LIMIT)


SNAPPY_HEADER = b"\x82SNAPPY\x00" + bytes(8)
SNAPPY_LIES = {
    "raw snappy that claims 4 GB": (b"\xff\xff\xff\xff\x0f" + b"\x00" * 10, "claims"),
    "a header cut short": (SNAPPY_HEADER[:-4], "cut short"),
    "a block past the end": (SNAPPY_HEADER + b"\x7f\xff\xff\xff" + b"x" * 20, "does not fit"),
    "a block of nothing": (SNAPPY_HEADER + b"\x00\x00\x00\x00", "does not fit"),
    "a block that claims 1 GB": (SNAPPY_HEADER + b"\x00\x00\x00\x06\x80\x80\x80\x80\x04x", "claims"),
    "an empty block with bytes behind it": (SNAPPY_HEADER + b"\x00\x00\x00\x05\x00junk", "damaged"),
}


@pytest.mark.parametrize("name", SNAPPY_LIES)
def test_snappy_that_lies_about_its_sizes_is_refused(name: str) -> None:
    raw, complaint = SNAPPY_LIES[name]
    with pytest.raises(KafkaError, match=complaint) as caught:
        decompress(Compression.SNAPPY, raw, 2**40)
    assert caught.value.code is ErrorCode.CORRUPT_MESSAGE


@pytest.mark.parametrize("codec", [5, 6, 7, -1])
def test_an_unknown_codec_is_named_as_such(codec: int) -> None:
    for call in (lambda: compress(codec, b"x"), lambda: decompress(codec, b"x", 10)):
        with pytest.raises(KafkaError) as caught:
            call()
        assert caught.value.code is ErrorCode.UNSUPPORTED_COMPRESSION_TYPE


def test_uncompressed_bytes_are_bounded_too() -> None:
    assert decompress(0, b"12345", 5) == b"12345"
    with pytest.raises(KafkaError):
        decompress(0, b"123456", 5)


def test_names_are_kafkas() -> None:
    assert NAMES == {"none": 0, "uncompressed": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}


BOMB = """
import resource
from headrace.base.errors import ErrorCode, KafkaError
from headrace.records.compression import compress, decompress

def address_space():
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()

codec, limit = {codec}, 16 << 20
bomb = compress(codec, bytes(64 << 20)) * (1 if codec == 2 else 8)
if codec == 2:
    bomb = bomb[:16] + bomb[16:] * 8
assert len(bomb) < (64 << 20)
# From here on there is room for the limit and some slack, but for nothing like the 512 MB inside.
room = address_space() + 3 * limit
resource.setrlimit(resource.RLIMIT_AS, (room, room))
try:
    decompress(codec, bomb, limit)
except KafkaError as error:
    assert error.code is ErrorCode.CORRUPT_MESSAGE, error
    print("refused")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the test reads /proc/self/statm")
@pytest.mark.parametrize("codec", CODECS)
def test_a_bomb_is_refused_without_taking_the_memory_it_asks_for(codec: Compression) -> None:
    script = textwrap.dedent(BOMB).format(codec=int(codec))
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout.strip(), done.stderr) == ("refused", "")
