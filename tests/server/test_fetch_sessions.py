"""Incremental fetch sessions as KIP-227 describes them."""

import itertools

import pytest

from headrace.base.errors import ErrorCode, KafkaError
from headrace.server.fetch_sessions import EVICTION_MS, FetchSessions
from headrace.wire.fetch import FetchPartition, FetchRequest, FetchResult, FetchTopic, ForgottenTopic


def fetch(session_id=0, epoch=0, partitions=(), forget=()) -> FetchRequest:
    topics = [FetchTopic("t", b"", [FetchPartition(i, -1, 0, -1, -1, 1000) for i in partitions])]
    return FetchRequest(
        -1, -1, 500, 1, 1000, 0, session_id, epoch, topics, [ForgottenTopic("t", b"", list(forget))], ""
    )


def sessions(slots=2) -> FetchSessions:
    numbers = itertools.count(10)
    return FetchSessions(slots, lambda: next(numbers))


def indexes(session) -> list[int]:
    return [key[2] for key in session.partitions]


def test_a_session_remembers_its_partitions():
    table = sessions()
    session = table.open(fetch(partitions=[0, 1]), False, 0)
    assert session.id == 10
    again = table.open(fetch(10, 1, partitions=[2], forget=[0]), False, 1)
    assert again is session
    assert indexes(again) == [1, 2]


@pytest.mark.parametrize(
    ("request_", "uses_ids", "code"),
    [
        (fetch(99, 1), False, ErrorCode.FETCH_SESSION_ID_NOT_FOUND),
        (fetch(10, 5), False, ErrorCode.INVALID_FETCH_SESSION_EPOCH),
        (fetch(10, 1), True, ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR),
    ],
)
def test_a_request_that_does_not_fit_its_session_is_refused(request_, uses_ids, code):
    table = sessions()
    table.open(fetch(partitions=[0]), False, 0)
    with pytest.raises(KafkaError) as refused:
        table.open(request_, uses_ids, 0)
    assert refused.value.code == code


def test_a_final_epoch_ends_the_session():
    table = sessions()
    table.open(fetch(partitions=[0]), False, 0)
    assert table.open(fetch(10, -1), False, 0) is None
    assert len(table) == 0


def test_a_session_ends_with_its_last_partition():
    table = sessions()
    table.open(fetch(partitions=[0, 1]), False, 0)
    assert table.open(fetch(10, 1, forget=[0]), False, 0) is not None
    assert table.open(fetch(10, 2, forget=[1]), False, 0) is None
    assert len(table) == 0


def test_a_full_table_gives_no_session_until_one_is_old():
    table = sessions(slots=1)
    assert table.open(fetch(partitions=[0]), False, 0) is not None
    assert table.open(fetch(partitions=[0]), False, EVICTION_MS - 1) is None
    assert table.open(fetch(partitions=[0]), False, EVICTION_MS).id == 11
    assert len(table) == 1


def test_only_what_changed_is_told():
    session = sessions().open(fetch(partitions=[0]), False, 0)
    key = ("t", b"", 0)
    idle = FetchResult(0, ErrorCode.NONE, 5, 5, 0)
    assert session.changed(key, idle)
    session.sent(key, idle)
    assert not session.changed(key, idle)
    assert session.changed(key, idle._replace(high_watermark=6))
    assert session.changed(key, idle._replace(log_start_offset=1))
    assert session.changed(key, idle._replace(size=1))
    session.sent(key, FetchResult(0, ErrorCode.NOT_LEADER_OR_FOLLOWER))
    assert session.changed(key, idle), "after an error the client hears that it is over"


def test_a_partition_that_got_records_goes_to_the_end():
    session = sessions().open(fetch(partitions=[0, 1, 2]), False, 0)
    session.sent(("t", b"", 0), FetchResult(0, ErrorCode.NONE, 5, 5, 0, size=10))
    assert indexes(session) == [1, 2, 0]
