"""Handle records sixteen at a time, in order per key; what fails goes to a dead-letter topic.

python examples/client/process_parallel.py 127.0.0.1:9092 orders orders-dead 9
"""

import asyncio
import sys

from headrace import Consumer, ConsumerRecord, DeadLetter, Producer


async def main(bootstrap: str, topic: str, dead_topic: str, count: int) -> None:
    left = count

    async def handle(record: ConsumerRecord) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            consumer.stop_processing()
        if b'"id":5' in (record.value or b""):
            raise ValueError("five is right out")

    async with (
        Producer(bootstrap_servers=bootstrap) as producer,
        Consumer(
            bootstrap_servers=bootstrap,
            group_id="example-parallel",
            auto_offset_reset="earliest",
            on_error=DeadLetter(producer, dead_topic),
        ) as consumer,
    ):
        consumer.subscribe([topic])
        await consumer.process(handle, mode="parallel", workers=16)
    print(f"{count} records handled")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
