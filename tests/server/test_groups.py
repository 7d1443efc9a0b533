"""OffsetFetch before there are groups: nothing is committed, in the form of every version."""

import pytest

from headrace.base.errors import ErrorCode
from headrace.wire.apis import SUPPORTED, Api
from tests.server.desk import Desk

FIRST, LAST = SUPPORTED[Api.OFFSET_FETCH]


@pytest.mark.parametrize("version", range(FIRST, 8))
def test_a_version_of_one_group_tells_by_name_that_nothing_is_committed(version: int) -> None:
    desk = Desk()
    desk.create("t", 2)
    asked = [{"name": "t", "partition_indexes": [0, 1]}]
    reply = desk.ask(Api.OFFSET_FETCH, version, {"group_id": "g", "topics": asked})
    [topic] = reply.topics
    assert topic.name == "t"
    assert [(p.partition_index, p.committed_offset, p.error_code) for p in topic.partitions] == [
        (0, -1, 0),
        (1, -1, 0),
    ]


@pytest.mark.parametrize("version", range(8, LAST + 1))
def test_a_version_of_many_groups_tells_it_of_each(version: int) -> None:
    desk = Desk()
    desk.create("t")
    topic_id = desk.image.topics["t"].id
    asked = [{"name": "t", "topic_id": topic_id, "partition_indexes": [0]}]
    groups = [{"group_id": name, "topics": asked} for name in ("g1", "g2")]
    reply = desk.ask(Api.OFFSET_FETCH, version, {"groups": groups})
    assert [group.group_id for group in reply.groups] == ["g1", "g2"]
    for group in reply.groups:
        [topic] = group.topics
        assert (topic.topic_id == topic_id) if version >= 10 else (topic.name == "t")
        assert [(p.committed_offset, p.error_code) for p in topic.partitions] == [(-1, 0)]


def test_a_topic_id_that_is_not_there_is_told_so() -> None:
    asked = [{"topic_id": b"\x07" * 16, "partition_indexes": [0]}]
    reply = Desk().ask(Api.OFFSET_FETCH, 10, {"groups": [{"group_id": "g", "topics": asked}]})
    [partition] = reply.groups[0].topics[0].partitions
    assert partition.error_code == ErrorCode.UNKNOWN_TOPIC_ID
