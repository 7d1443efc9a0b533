"""The partitions of a broker follow the image, and its disk."""

import pytest

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.settings import TopicConfig
from headrace.cluster.image import EMPTY, apply
from headrace.cluster.records import PartitionRecord, RemoveTopicRecord, TopicRecord
from headrace.replication.table import PartitionTable
from headrace.storage.log import PartitionLog
from headrace.storage.memory import MemoryFileSystem

HERE, ELSEWHERE = 1, 2


class Disk:
    """Opens logs, unless it is full."""

    def __init__(self) -> None:
        self.full = False
        self.deleted: list[tuple[str, int]] = []
        self._fs = MemoryFileSystem()

    def open(self, topic: str, index: int, topic_id: bytes) -> PartitionLog:
        if self.full:
            raise OSError(28, "No space left on device")
        self._fs.makedirs(f"{topic}-{index}")
        return PartitionLog(self._fs, f"{topic}-{index}", topic, index, TopicConfig())

    def delete(self, topic: str, index: int) -> None:
        self.deleted.append((topic, index))


def topic(name: str, number: int, *replicas: int):
    topic_id = number.to_bytes(16, "big")
    records = [TopicRecord(name, topic_id)]
    return records + [PartitionRecord(topic_id, i, (r,), (r,), r, 0, 0) for i, r in enumerate(replicas)]


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def table(disk) -> PartitionTable:
    return PartitionTable(HERE, disk.open, disk.delete)


def code(table: PartitionTable, name: str, index: int) -> ErrorCode:
    with pytest.raises(KafkaError) as refused:
        table.get(name, index)
    return refused.value.code


def test_only_what_the_image_places_here_is_held(table):
    table.apply(EMPTY, apply(EMPTY, topic("t", 1, HERE, ELSEWHERE)))
    assert table.get("t", 0).topic == "t"
    assert code(table, "t", 1) is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert not table.open_some(10)
    assert len(list(table)) == 1


def test_partitions_are_opened_a_few_at_a_time_or_when_asked_for(table):
    table.apply(EMPTY, apply(EMPTY, topic("t", 1, *[HERE] * 5)))
    assert list(table) == []
    assert table.open_some(2)
    assert [p.index for p in table] == [0, 1]
    assert table.get("t", 4).index == 4
    assert not table.open_some(10)
    assert sorted(p.index for p in table) == [0, 1, 2, 3, 4]


def test_a_topic_that_goes_before_it_was_opened_is_never_opened(table):
    image = apply(EMPTY, topic("t", 1, HERE))
    table.apply(EMPTY, image)
    table.apply(image, apply(image, [RemoveTopicRecord((1).to_bytes(16, "big"))]))
    assert not table.open_some(10)
    assert list(table) == []


def test_a_topic_made_anew_under_its_name_gets_new_logs(table, disk):
    first = apply(EMPTY, topic("t", 1, HERE))
    table.apply(EMPTY, first)
    before = table.get("t", 0)
    second = apply(first, [RemoveTopicRecord((1).to_bytes(16, "big")), *topic("t", 2, HERE)])
    table.apply(first, second)
    assert table.get("t", 0) is not before
    assert disk.deleted == [("t", 0)], "before the new one was opened"
    assert not table.delete_some(10)
    assert disk.deleted == [("t", 0)], "the new one stays"


def test_logs_of_a_topic_that_is_gone_are_deleted_a_few_at_a_time(table, disk):
    image = apply(EMPTY, topic("t", 1, *[HERE] * 5))
    table.apply(EMPTY, image)
    assert not table.open_some(10)
    table.apply(image, apply(image, [RemoveTopicRecord((1).to_bytes(16, "big"))]))
    assert disk.deleted == [], "ten thousand of them would hold everyone up"
    assert code(table, "t", 0) is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert table.delete_some(2)
    assert disk.deleted == [("t", 0), ("t", 1)]
    assert not table.delete_some(10)
    assert disk.deleted == [("t", index) for index in range(5)]


def test_who_waits_on_a_deleted_topic_is_told(table):
    image = apply(EMPTY, topic("t", 1, HERE))
    table.apply(EMPTY, image)
    woken = []
    table.get("t", 0).add_reader(lambda: woken.append(True))
    table.apply(image, apply(image, [RemoveTopicRecord((1).to_bytes(16, "big"))]))
    assert woken == [True]
    assert code(table, "t", 0) is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_who_waits_on_a_partition_that_moves_away_is_sent_to_look_for_its_leader(table):
    image = apply(EMPTY, topic("t", 1, HERE))
    table.apply(EMPTY, image)
    told = []
    table.get("t", 0).when_safe(1, False, True, told.append)
    table.apply(image, apply(image, topic("t", 1, ELSEWHERE)))
    assert told == [ErrorCode.NOT_LEADER_OR_FOLLOWER]


def test_a_partition_that_had_no_room_is_opened_when_there_is(table, disk):
    disk.full = True
    image = apply(EMPTY, topic("t", 1, HERE))
    table.apply(EMPTY, image)
    assert code(table, "t", 0) is ErrorCode.KAFKA_STORAGE_ERROR
    table.retry(image)
    assert code(table, "t", 0) is ErrorCode.KAFKA_STORAGE_ERROR
    disk.full = False
    table.retry(image)
    assert table.get("t", 0).high_watermark == 0
