"""Copy a topic to another, each record exactly once, whatever is killed on the way.

python examples/client/copy_exactly_once.py 127.0.0.1:9092 orders copies 9
"""

import asyncio
import sys

from headrace import Consumer, Producer


async def main(bootstrap: str, source: str, target: str, count: int) -> None:
    async with (
        Consumer(
            bootstrap_servers=bootstrap,
            group_id="example-copy",
            auto_offset_reset="earliest",
            delivery="exactly_once",
        ) as consumer,
        Producer(bootstrap_servers=bootstrap, transactional_id="example-copy") as producer,
    ):
        consumer.subscribe([source])
        while count > 0:
            records = await consumer.poll(timeout_ms=1_000)
            if not records:
                continue
            async with producer.transaction() as tx:
                for record in records:
                    await tx.send(target, record.value, key=record.key)
                await tx.commit_offsets(consumer)
            count -= len(records)
    print("copied")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
