"""The small files beside the logs: Kafka's formats, replaced atomically, distrusted when damaged."""

import errno
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.storage.checkpoints import (
    CorruptIdentity,
    MetaProperties,
    OffsetCheckpoint,
    decode_meta_properties,
    decode_offsets,
    decode_partition_metadata,
    encode_meta_properties,
    encode_offsets,
    encode_partition_metadata,
    read_meta_properties,
    read_partition_metadata,
    write_meta_properties,
)
from headrace.storage.memory import MemoryFileSystem

TOPIC_ID = bytes(range(16))

names = st.text(st.sampled_from("abcXYZ019._-"), min_size=1, max_size=249)
offsets = st.dictionaries(st.tuples(names, st.integers(0, 2**31 - 1)), st.integers(0, 2**63 - 1), max_size=20)


def test_offsets_are_written_as_kafka_writes_them() -> None:
    assert encode_offsets({("orders", 3): 17, ("a.b_c-d", 0): 0}) == b"0\n2\norders 3 17\na.b_c-d 0 0\n"


@given(offsets)
def test_offsets_survive_the_file(table: dict[tuple[str, int], int]) -> None:
    assert decode_offsets(encode_offsets(table)) == table


@given(offsets, st.data())
def test_file_cut_short_is_never_taken_for_whole(
    table: dict[tuple[str, int], int], data: st.DataObject
) -> None:
    whole = encode_offsets(table)
    cut = data.draw(st.integers(1, len(whole) - 1))
    with pytest.raises(ValueError):
        decode_offsets(whole[:cut])


@pytest.mark.parametrize(
    "data",
    [
        b"1\n0\n",
        b"0\n2\na 0 0\n",
        b"0\n0\na 0 0\n",
        b"0\n1\na 0\n",
        b"0\n1\na x 0\n",
        b"0\n1\na 0 -5\n",
        b"\xff\n",
    ],
)
def test_damaged_checkpoint_counts_as_empty_and_is_logged(
    data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    fs = MemoryFileSystem()
    fs.write_atomic("recovery-point-offset-checkpoint", data)
    with caplog.at_level(logging.WARNING, "headrace"):
        assert OffsetCheckpoint(fs, "recovery-point-offset-checkpoint").read() == {}
    assert "checkpoint unreadable" in caplog.text


def test_missing_and_empty_checkpoints_are_empty_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    fs = MemoryFileSystem()
    checkpoint = OffsetCheckpoint(fs, "log-start-offset-checkpoint")
    assert checkpoint.read() == {}
    fs.write_atomic(checkpoint.name, b"")
    assert checkpoint.read() == {}
    assert caplog.text == ""


def test_unreadable_checkpoint_counts_as_empty(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(MemoryFileSystem):
        def read(self, path: str) -> bytes:
            raise OSError(errno.EIO, "Input/output error", path)

    assert OffsetCheckpoint(Broken(), "recovery-point-offset-checkpoint").read() == {}
    assert "checkpoint unreadable" in caplog.text


def test_checkpoint_is_replaced_as_a_whole() -> None:
    fs = MemoryFileSystem()
    checkpoint = OffsetCheckpoint(fs, "recovery-point-offset-checkpoint")
    checkpoint.write({("a", 0): 5, ("b", 1): 6})
    checkpoint.write({("a", 0): 7})
    assert checkpoint.read() == {("a", 0): 7}


def test_meta_properties_survive_the_file() -> None:
    meta = MetaProperties("4L6g3nShT-eMCtK--X86sw", 1, "e8uC0nXrQPOBLsUhDpBSLg")
    fs = MemoryFileSystem()
    assert read_meta_properties(fs) is None
    write_meta_properties(fs, meta)
    assert read_meta_properties(fs) == meta
    assert decode_meta_properties(encode_meta_properties(meta)) == meta


def test_meta_properties_as_kafka_writes_them_are_read() -> None:
    data = b"#\n#Sun Nov 15 21:33:00 UTC 2026\ncluster.id=a\\=b\nversion=1\ndirectory.id=d\nnode.id=3\n"
    assert decode_meta_properties(data) == MetaProperties("a=b", 3, "d")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"version=0\nbroker.id=1\ncluster.id=x\n",
        b"version=1\nnode.id=1\ndirectory.id=d\n",
        b"version=1\nnode.id=one\ndirectory.id=d\ncluster.id=x\n",
        b"version=1\nnode.id=1\ndirectory.id=\ncluster.id=x\n",
        b"\xff\xfe",
    ],
)
def test_damaged_meta_properties_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptIdentity):
        decode_meta_properties(data)


@given(st.binary(min_size=16, max_size=16).filter(any))
def test_partition_metadata_survives_the_file(topic_id: bytes) -> None:
    assert decode_partition_metadata(encode_partition_metadata(topic_id)) == topic_id


def test_partition_metadata_is_kafkas() -> None:
    assert encode_partition_metadata(bytes(15) + b"\x01") == b"version: 0\ntopic_id: AAAAAAAAAAAAAAAAAAAAAQ\n"
    without_last_newline = b"version: 0\ntopic_id: AAAAAAAAAAAAAAAAAAAAAQ"
    assert decode_partition_metadata(without_last_newline) == bytes(15) + b"\x01"


def test_partition_without_metadata_has_no_topic_id() -> None:
    fs = MemoryFileSystem()
    fs.makedirs("a-0")
    assert read_partition_metadata(fs, "a-0", TOPIC_ID) is None


def test_partition_metadata_that_came_through_in_part_counts_as_missing() -> None:
    fs = MemoryFileSystem()
    fs.makedirs("a-0")
    whole = encode_partition_metadata(TOPIC_ID)
    for data in (b"", bytes(10), whole[:25], whole[:-1] + b"\0"):
        fs.write_atomic("a-0/partition.metadata", data)
        assert read_partition_metadata(fs, "a-0", TOPIC_ID) is None, data
    fs.write_atomic("a-0/partition.metadata", whole)
    assert read_partition_metadata(fs, "a-0", TOPIC_ID) == TOPIC_ID
    assert read_partition_metadata(fs, "a-0", bytes(16)) == TOPIC_ID
    fs.write_atomic("a-0/partition.metadata", b"version: 7\n")
    with pytest.raises(CorruptIdentity):
        read_partition_metadata(fs, "a-0", TOPIC_ID)


@pytest.mark.parametrize(
    "data",
    [
        b"version: 1\ntopic_id: AAAAAAAAAAAAAAAAAAAAAQ",
        b"version: 0\n",
        b"topic_id: x",
        b"junk",
        b"version: 0\ntopic_id: AAAA",
    ],
)
def test_damaged_partition_metadata_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptIdentity):
        decode_partition_metadata(data)
