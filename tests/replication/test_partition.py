"""What may be read and who is told, as the log grows and reaches the disk."""

import pytest

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.settings import topic_config
from headrace.records.builder import build_batch
from headrace.replication.partition import Partition
from headrace.storage.log import PartitionLog
from headrace.storage.memory import MemoryFileSystem


def partition(**overrides: str) -> Partition:
    fs = MemoryFileSystem()
    fs.makedirs("t-0")
    config = topic_config({name.replace("_", "."): value for name, value in overrides.items()})
    return Partition("t", bytes(16), 0, 3, PartitionLog(fs, "t-0", "t", 0, config))


def batch(count: int = 1, **kwargs: int) -> memoryview:
    return memoryview(bytearray(build_batch([(1000, b"k", b"v", ())] * count, **kwargs)))


def flush(p: Partition) -> None:
    ticket = p.log.begin_flush()
    ticket.run()
    p.log.finish_flush(ticket, None)
    p.on_flushed()


def test_an_append_is_readable_at_once_where_no_flush_is_asked_for():
    p = partition()
    appended = p.append(batch(3), 1000)
    assert (appended.first_offset, appended.last_offset) == (0, 2)
    assert p.high_watermark == 3
    assert p.is_safe(3, flushed=False, replicated=True)


def test_nothing_unflushed_is_readable_where_a_flush_comes_before_the_acknowledgement():
    p = partition(flush_messages="1")
    appended = p.append(batch(), 1000)
    assert appended.flush_due
    assert p.high_watermark == 0
    assert p.read(0, 1000, 0, True).size == 0
    flush(p)
    assert p.high_watermark == 1
    assert p.read(0, 1000, 0, True).size > 0


def test_producers_are_told_in_order_once_their_records_are_flushed():
    p = partition(flush_messages="1")
    told = []
    for number in range(3):
        p.append(batch(), 1000)
        p.when_safe(number + 1, True, number == 2, lambda error, n=number: told.append((n, error)))
    assert told == []
    flush(p)
    assert told == [(0, ErrorCode.NONE), (1, ErrorCode.NONE), (2, ErrorCode.NONE)]


def test_a_producer_that_came_after_a_flush_began_waits_for_the_next():
    p = partition(flush_messages="1")
    told = []
    p.append(batch(), 1000)
    p.when_safe(1, True, True, lambda error: told.append("first"))
    ticket = p.log.begin_flush()
    ticket.run()
    p.append(batch(), 1000)
    p.when_safe(2, True, True, lambda error: told.append("second"))
    p.log.finish_flush(ticket, None)
    p.on_flushed()
    assert told == ["first"]
    flush(p)
    assert told == ["first", "second"]


def test_a_failed_flush_tells_everybody_that_waits():
    p = partition(flush_messages="1")
    told = []
    p.append(batch(), 1000)
    p.when_safe(1, True, True, told.append)
    ticket = p.log.begin_flush()
    ticket.lost = True
    p.log.finish_flush(ticket, OSError(5, "Input/output error"))
    p.on_flushed()
    assert told == [ErrorCode.KAFKA_STORAGE_ERROR]
    assert p.high_watermark == 0
    with pytest.raises(KafkaError) as refused:
        p.append(batch(), 1000)
    assert refused.value.code is ErrorCode.KAFKA_STORAGE_ERROR


def test_a_reader_is_woken_once_by_new_data():
    p = partition()
    woken = []
    wake = lambda: woken.append(True)  # noqa: E731
    p.add_reader(wake)
    p.append(batch(), 1000)
    p.append(batch(), 1000)
    assert woken == [True]


def test_a_reader_that_left_is_not_woken():
    p = partition()
    wake = pytest.fail
    p.add_reader(wake)
    p.remove_reader(wake)
    p.append(batch(), 1000)


def test_a_duplicate_is_answered_with_its_first_offsets_and_moves_nothing():
    p = partition()
    first = p.append(batch(producer_id=7, producer_epoch=0, base_sequence=0), 1000)
    again = p.append(batch(producer_id=7, producer_epoch=0, base_sequence=0), 1000)
    assert again.duplicate
    assert again.first_offset == first.first_offset
    assert p.high_watermark == 1


@pytest.mark.parametrize(
    ("epoch", "code"), [(2, ErrorCode.FENCED_LEADER_EPOCH), (4, ErrorCode.UNKNOWN_LEADER_EPOCH)]
)
def test_a_client_with_another_leader_epoch_is_refused(epoch, code):
    with pytest.raises(KafkaError) as refused:
        partition().check_epoch(epoch)
    assert refused.value.code is code


@pytest.mark.parametrize("epoch", [-1, 3])
def test_a_client_with_the_same_leader_epoch_or_none_is_served(epoch):
    partition().check_epoch(epoch)
