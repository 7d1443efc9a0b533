"""Read a topic as a member of a group, with a listener, and stop after so many records.

python examples/client/consume_group.py 127.0.0.1:9092 orders 9
"""

import asyncio
import sys

from headrace import Consumer, TopicPartition


class Listener:
    def on_assigned(self, partitions: list[TopicPartition]) -> None:
        print("reading", ", ".join(map(str, partitions)))

    async def on_revoked(self, partitions: list[TopicPartition]) -> None:
        print("giving up", ", ".join(map(str, partitions)))

    def on_lost(self, partitions: list[TopicPartition]) -> None:
        print("lost", ", ".join(map(str, partitions)))


async def main(bootstrap: str, topic: str, count: int) -> None:
    async with Consumer(
        bootstrap_servers=bootstrap,
        group_id="example",
        auto_offset_reset="earliest",
        value_deserializer="json",
        delivery="at_least_once",
    ) as consumer:
        consumer.subscribe([topic], Listener())
        async for record in consumer:
            print(f"{record.topic}-{record.partition}@{record.offset}: {record.value}")
            count -= 1
            if count == 0:
                break


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
