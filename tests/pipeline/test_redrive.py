"""Dead letters are sent again once, to where they came from."""

import asyncio

import pyarrow as pa

from headrace.client.arrow import HEADER_TYPE
from headrace.client.arrow_write import ArrowWriter
from headrace.pipeline.redrive import redrive
from headrace.testing import Broker
from tests.pipeline.spark_like import committed_values


async def letters(broker: Broker, *origins: tuple[bytes, bytes | None]) -> None:
    table = pa.table(
        {
            "value": pa.array([value for value, _ in origins], pa.binary()),
            "headers": pa.array(
                [[("headrace.origin.topic", origin)] if origin else None for _, origin in origins],
                HEADER_TYPE,
            ),
        }
    )
    async with ArrowWriter({"bootstrap.servers": broker.bootstrap}) as writer:
        await writer.send_arrow("dead", table)


def test_letters_are_sent_again_once_each(broker: Broker) -> None:
    for name, partitions in (("dead", 2), ("one", 1), ("two", 1)):
        broker.create_topic(name, partitions)
    config = {"bootstrap.servers": broker.bootstrap}

    async def story() -> None:
        await letters(broker, (b"a", b"one"), (b"b", b"two"), (b"c", None), (b"d", b"one"))
        assert await redrive(config, "dead") == {"one": 2, "two": 1}
        assert await redrive(config, "dead") == {}
        await letters(broker, (b"e", b"two"))
        assert await redrive(config, "dead") == {"two": 1}
        assert await committed_values(broker.bootstrap, "one", 1) == [b"a", b"d"]
        assert await committed_values(broker.bootstrap, "two", 1) == [b"b", b"e"]

    asyncio.run(story())
