"""Send records: with and without waiting for each, with keys, headers and a serializer.

python examples/client/produce.py 127.0.0.1:9092 orders
"""

import asyncio
import sys

from headrace import KafkaError, Producer


async def main(bootstrap: str, topic: str) -> None:
    async with Producer(
        bootstrap_servers=bootstrap, value_serializer="json", key_serializer="string"
    ) as producer:
        # Waits for room in the buffer, then for the acknowledgement.
        delivery = await producer.send(topic, {"id": 1, "what": "tea"}, key="customer-7")
        metadata = await delivery
        print(f"{metadata.topic}-{metadata.partition} at offset {metadata.offset}")

        # Many at once: promises are collected, and awaited together.
        deliveries = [
            await producer.send(
                topic, {"id": number}, key=f"customer-{number % 3}", headers=[("source", b"example")]
            )
            for number in range(2, 10)
        ]
        for delivery in deliveries:
            try:
                await delivery
            except KafkaError as error:
                print(f"failed: {error.message} ({error.hint})")
        print(f"{producer.statistics()['records_acknowledged']} records acknowledged")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
