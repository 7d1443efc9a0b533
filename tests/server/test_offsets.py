"""What the offsets APIs tell of records that may not be read yet."""

from headrace.base.settings import broker_config, topic_config
from headrace.replication.partition import Partition
from headrace.server.handlers.offsets import LATEST, MAX_TIMESTAMP, UNKNOWN, offset_at
from headrace.storage.log import PartitionLog
from headrace.storage.memory import MemoryFileSystem
from tests.server.raw import batch


def test_a_record_that_is_not_flushed_is_not_found_by_its_timestamp() -> None:
    fs = MemoryFileSystem()
    fs.makedirs("t-0")
    config = topic_config({"flush.messages": "1"}, broker_config({}))
    partition = Partition("t", bytes(16), 0, 0, PartitionLog(fs, "t-0", "t", 0, config))
    partition.append(memoryview(bytearray(batch(b"x", timestamp=1000))), 2000)
    assert offset_at(partition, LATEST, 0)[0] == 0
    assert offset_at(partition, MAX_TIMESTAMP, 0) == UNKNOWN
    assert offset_at(partition, 1000, 0) == UNKNOWN
    partition.log.flush()
    partition.on_flushed()
    assert offset_at(partition, MAX_TIMESTAMP, 0)[:2] == (0, 1000)
