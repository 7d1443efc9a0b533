"""A follower's fetch survives the way to its leader and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.wire.fetch import (
    FetchPartition,
    FetchRequest,
    FetchResult,
    FetchTopic,
    ForgottenTopic,
    decode_fetch,
    encode_fetch_reply,
)
from headrace.wire.fetch_replica import VERSION, decode_fetch_reply, encode_fetch
from headrace.wire.primitives import Malformed

INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
IDS = st.binary(min_size=16, max_size=16)
PARTITIONS = st.builds(FetchPartition, INT32, INT32, INT64, INT32, INT64, INT32)
REQUESTS = st.builds(
    FetchRequest,
    st.integers(0, 100),
    INT64,
    INT32,
    INT32,
    INT32,
    st.just(0),
    INT32,
    INT32,
    st.lists(st.builds(FetchTopic, st.just(""), IDS, st.lists(PARTITIONS, max_size=3)), max_size=3),
    st.lists(st.builds(ForgottenTopic, st.just(""), IDS, st.lists(INT32, max_size=3)), max_size=3),
    st.just(""),
)
RECORDS = st.binary(max_size=20).map(lambda data: (data, len(data)))
RESULTS = st.builds(
    lambda index, error, ends, records, diverging: FetchResult(
        index,
        error,
        *ends,
        ranges=(records[0],) if records[1] else (),
        size=records[1],
        diverging=diverging,
    ),
    INT32,
    st.integers(-1, 100),
    st.tuples(INT64, INT64, INT64),
    RECORDS,
    st.none() | st.tuples(INT32, INT64),
)


@given(REQUESTS)
def test_a_request_is_read_as_it_was_written(request):
    assert decode_fetch(VERSION, encode_fetch(request), 0) == request


def reply_of(topics):
    parts, size = encode_fetch_reply(VERSION, [("", *topic) for topic in topics], error=7, session_id=9)
    data = b"".join([bytes(part) for part in parts])
    assert len(data) == size
    return data


@given(st.lists(st.tuples(IDS, st.lists(RESULTS, max_size=3)), max_size=3))
def test_a_reply_is_read_as_it_was_written(topics):
    error, session_id, read = decode_fetch_reply(memoryview(reply_of(topics)))
    assert (error, session_id) == (7, 9)
    assert [(topic_id, list(map(plain, results))) for topic_id, results in read] == [
        (topic_id, list(map(plain, results))) for topic_id, results in topics
    ]


def plain(result):
    return result._replace(ranges=tuple([bytes(part) for part in result.ranges]))


@given(st.lists(st.tuples(IDS, st.lists(RESULTS, min_size=1, max_size=2)), min_size=1, max_size=2), st.data())
def test_a_reply_cut_short_is_refused(topics, data):
    whole = reply_of(topics)
    end = data.draw(st.integers(0, len(whole) - 2))
    with pytest.raises(Malformed):
        decode_fetch_reply(memoryview(whole[:end]))
