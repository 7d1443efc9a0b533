"""The hand-written codec of OffsetCommit agrees with the schema-driven one in every version, and is as wary."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.wire.apis import SUPPORTED, Api
from headrace.wire.messages import decode_response, encode_request
from headrace.wire.offset_commit import (
    FLEXIBLE_FROM,
    HEAD_BYTES_MAX,
    TAIL_BYTES,
    read_commit_head,
    read_offset_commit,
    split_commit,
    write_offset_commit_reply,
    write_one_commit_reply,
)
from headrace.wire.primitives import Malformed

FIRST, LAST = SUPPORTED[Api.OFFSET_COMMIT]
VERSIONS = range(FIRST, LAST + 1)
texts = st.text(max_size=150)
int32s = st.integers(-(2**31), 2**31 - 1)
partitions = st.lists(st.tuples(int32s, st.integers(-1, 2**60), int32s, st.none() | texts), max_size=3)
ids = st.binary(min_size=16, max_size=16)
one_bare = st.tuples(int32s, st.integers(-1, 2**60), int32s, st.sampled_from((None, ""))).map(
    lambda one: [one]
)
topics = st.lists(st.tuples(texts, ids, partitions), max_size=3) | st.tuples(texts, ids, one_bare).map(
    lambda one: [one]  # what most commits are, and what is read in one go
)


@pytest.mark.parametrize("version", VERSIONS)
@given(group=texts, member=texts, instance=st.none() | texts, generation=int32s, wanted=topics)
def test_a_request_is_read_as_the_schema_writes_it(
    version: int,
    group: str,
    member: str,
    instance: str | None,
    generation: int,
    wanted: list[tuple[str, bytes, list[tuple[int, int, int, str | None]]]],
) -> None:
    body = {
        "group_id": group,
        "generation_id_or_member_epoch": generation,
        "member_id": member,
        "group_instance_id": instance if version >= 7 else None,
        "retention_time_ms": 7 if version <= 4 else -1,
        "topics": [
            {
                "name": name,
                "topic_id": topic_id,
                "partitions": [
                    {
                        "partition_index": index,
                        "committed_offset": offset,
                        "committed_leader_epoch": epoch if version >= 6 else -1,
                        "committed_metadata": metadata,
                    }
                    for index, offset, epoch, metadata in parts
                ],
            }
            for name, topic_id, parts in wanted
        ],
    }
    data = encode_request(Api.OFFSET_COMMIT, version, body)
    read = read_offset_commit(version, data)
    assert read[:4] == (group, generation, member, instance if version >= 7 else None)
    assert read.retention_ms == (7 if version <= 4 else -1)
    assert read.topics == [
        (
            topic_id if version >= 10 else name,
            [(i, o, e if version >= 6 else -1, m or "") for i, o, e, m in parts],
        )
        for name, topic_id, parts in wanted
    ]
    if (split := split_commit(version, data)) is not None and (head := read_commit_head(version, split[0])):
        key, parts = read.topics[0]
        assert len(read.topics) == len(parts) == 1
        assert head == (*read[:4], key, parts[0][0])
        assert (*split[1:], "") == parts[0][1:]
    else:
        bare = len(wanted) == 1 and len(wanted[0][2]) == 1 and not wanted[0][2][0][3]
        assert not bare or version < FLEXIBLE_FROM or len(data) > HEAD_BYTES_MAX + TAIL_BYTES
    for end in (len(data) // 3, len(data) // 2, len(data) - 1):
        with pytest.raises(Malformed):
            read_offset_commit(version, data[:end])


@given(
    version=st.integers(FLEXIBLE_FROM, LAST),
    data=st.binary(max_size=60).map(lambda head: head + bytes(TAIL_BYTES)),
)
def test_a_head_is_read_of_nothing_that_is_malformed(version: int, data: bytes) -> None:
    split = split_commit(version, data)
    if split is None or (head := read_commit_head(version, split[0])) is None:
        return
    assert read_offset_commit(version, data).topics == [(head.topic, [(head.partition, 0, 0, "")])]


@pytest.mark.parametrize("version", VERSIONS)
@given(name=texts, index=int32s, error=st.integers(0, 130))
def test_the_reply_to_one_partition_is_the_reply_to_many(
    version: int, name: str, index: int, error: int
) -> None:
    key = name.encode().ljust(16, b"\0")[:16] if version >= 10 else name
    many = write_offset_commit_reply(version, 5, [(key, [(index, error)])])
    assert write_one_commit_reply(version, 5, key, index, error) == many


@pytest.mark.parametrize("version", VERSIONS)
@given(results=st.lists(st.tuples(texts, st.lists(st.tuples(int32s, st.integers(0, 130)))), max_size=3))
def test_a_reply_is_what_the_schema_reads(
    version: int, results: list[tuple[str, list[tuple[int, int]]]]
) -> None:
    by_id = version >= 10
    told = [(name.encode().ljust(16, b"\0")[:16] if by_id else name, parts) for name, parts in results]
    reply = decode_response(Api.OFFSET_COMMIT, version, write_offset_commit_reply(version, 3, told))
    assert reply.throttle_time_ms == (3 if version >= 3 else 0)
    assert [
        (
            bytes(topic.topic_id) if by_id else topic.name,
            [(each.partition_index, each.error_code) for each in topic.partitions],
        )
        for topic in reply.topics
    ] == told


@pytest.mark.parametrize(
    "data", [b"\0\1\xff\0\0\0\0\0\0", b"\xff\xff", b"\0\0" + b"\0" * 4 + b"\0\0" + b"\x7f" * 30]
)
def test_what_is_no_request_is_malformed(data: bytes) -> None:
    with pytest.raises(Malformed):
        read_offset_commit(2, data)
