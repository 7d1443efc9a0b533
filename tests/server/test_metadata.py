"""The two images of the metadata store: what is committed is shown, all of it and in order."""

import asyncio
import errno

import pytest

from headrace.base.clock import ManualClock
from headrace.base.errors import KafkaError
from headrace.base.settings import TopicConfig
from headrace.cluster.records import MetadataRecord, TopicRecord
from headrace.consensus.metadata_log import MetadataLog
from headrace.server.metadata import MetadataStore
from headrace.storage.flusher import Flusher
from headrace.storage.log import PartitionLog
from headrace.storage.memory import MemoryFileSystem


class FullOnce(MemoryFileSystem):
    """A disk without room for the first small file."""

    refuse = True

    def write_atomic(self, path: str, data: bytes, *, durable: bool = True) -> None:
        if self.refuse:
            self.refuse = False
            raise OSError(errno.ENOSPC, "No space left on device", path)
        super().write_atomic(path, data, durable=durable)


def topic(name: str) -> MetadataRecord:
    return TopicRecord(name, name.encode().ljust(16))


def test_a_commit_after_one_that_could_not_be_flushed_is_shown_at_once() -> None:
    """The records of the failed commit were published in the place of its successor's, and so on for ever."""

    async def run() -> None:
        fs = FullOnce()
        fs.makedirs("m-0")
        flusher: Flusher[PartitionLog] = Flusher(asyncio.get_running_loop())
        log = PartitionLog(fs, "m-0", "m", 0, TopicConfig())
        store = MetadataStore(MetadataLog(log, flusher), ManualClock(1_700_000_000_000))
        changes: list[set[str]] = []
        store.on_change = lambda old, new: changes.append(new.topics.keys() - old.topics.keys())
        with pytest.raises(KafkaError):
            await store.commit([topic("first")])
        assert not store.image.topics, "what is not durable is not shown"
        await store.commit([topic("second")])
        assert set(store.image.topics) == {"first", "second"}
        assert store.image == store.pending
        await asyncio.gather(store.commit([topic("third")]), store.commit([topic("fourth")]))
        assert store.image == store.pending
        assert set().union(*changes) == {"first", "second", "third", "fourth"}
        flusher.close()

    asyncio.run(run())
