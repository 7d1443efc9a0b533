"""Dead letters sent again to where they came from.

Owns the redrive of a topic of dead letters. Invariant: each letter is sent again once: the records and the position up
to which letters have been sent are committed in one transaction. Called by the command line.
"""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from headrace.client.arrow_read import ArrowReader
from headrace.client.arrow_txn import CommittedOffset
from headrace.client.arrow_write import ArrowWriter
from headrace.client.offsets import EARLIEST, LATEST
from headrace.client.topics import TopicPartition

ORIGIN_TOPIC = "headrace.origin.topic"
COLUMNS = ("key", "value", "headers", "offset")


def group_of(topic: str) -> str:
    """The group that holds how far a topic of dead letters was redriven."""
    return f"headrace-redrive-{topic}"


async def redrive(config: Mapping[str, object], topic: str) -> dict[str, int]:
    """Send every letter that was not sent before; how many went to which topic."""
    group = group_of(topic)
    sent: dict[str, int] = {}
    writer = ArrowWriter(config, transactional_id=group)
    reader = ArrowReader({**config, "isolation.level": "read_committed"})
    try:
        reader.cluster.track(topic)
        await reader.cluster.refresh()
        partitions = [TopicPartition(topic, n) for n in sorted(reader.cluster.topics[topic].partitions)]
        begin = await reader.list_offsets(dict.fromkeys(partitions, EARLIEST))
        end = await reader.list_offsets(dict.fromkeys(partitions, LATEST))
        done = await writer.coordination.fetch_offsets(
            group, topic, [p.partition for p in partitions], stable=False
        )
        after: dict[int, CommittedOffset] = {}
        for where in partitions:
            first = max(done[where.partition].offset if where.partition in done else 0, begin[where].offset)
            async for batch in reader.read_range(topic, where.partition, first, end[where].offset, COLUMNS):
                for name, letters in _by_origin(batch).items():
                    await writer.send_arrow(name, letters)
                    sent[name] = sent.get(name, 0) + letters.num_rows
            if end[where].offset > first:
                after[where.partition] = CommittedOffset(end[where].offset, "")
        if sent:
            await writer.coordination.commit_offsets(writer.prepared, group, topic, after)
            await writer.flush()
            await writer.coordination.end(writer.prepared, commit=True)
    finally:
        await writer.close()
        await reader.close()
    return sent


def _by_origin(batch: Any) -> dict[str, Any]:
    """Letters by the topic they came from; one that does not say stays where it is."""
    origins: dict[str, list[int]] = {}
    for row, headers in enumerate(batch.column("headers").to_pylist()):
        for header in headers or []:
            if header["key"] == ORIGIN_TOPIC and header["value"] is not None:
                origins.setdefault(header["value"].decode(), []).append(row)
    letters = batch.select(["key", "value"])
    return {name: letters.take(pa.array(rows)) for name, rows in origins.items()}
