"""aiokafka takes the broker for Kafka: what its users do beyond writing and reading back."""

import asyncio
from collections.abc import Callable

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import MessageSizeTooLargeError

from tests.compat.clients import produce_aiokafka
from tests.compat.samples import WAIT_S, Sample

MakeTopic = Callable[..., str]


def test_a_waiting_reader_gets_a_record_that_is_written_later(bootstrap: str, make_topic: MakeTopic) -> None:
    topic = make_topic()

    async def write_while_another_waits() -> bytes | None:
        consumer = AIOKafkaConsumer(
            bootstrap_servers=bootstrap, fetch_max_wait_ms=10_000, auto_offset_reset="earliest"
        )
        producer = AIOKafkaProducer(bootstrap_servers=bootstrap)
        await consumer.start()
        await producer.start()
        try:
            consumer.assign([TopicPartition(topic, 0)])
            waiting = asyncio.create_task(consumer.getone())
            assert await consumer.end_offsets([TopicPartition(topic, 0)]) == {TopicPartition(topic, 0): 0}
            assert not waiting.done()
            await producer.send_and_wait(topic, b"at last")
            return (await asyncio.wait_for(waiting, WAIT_S)).value
        finally:
            await producer.stop()
            await consumer.stop()

    assert asyncio.run(write_while_another_waits()) == b"at last"


def test_an_idempotent_producer_keeps_order(bootstrap: str, make_topic: MakeTopic, now_ms: int) -> None:
    topic = make_topic()
    samples = [Sample(b"%d" % i, b"x" * 500, age_ms=5) for i in range(200)]
    offsets = produce_aiokafka(
        bootstrap, topic, samples, now_ms, enable_idempotence=True, max_batch_size=4000
    )
    assert offsets == list(range(200))


def test_a_record_over_the_topic_limit_is_refused(bootstrap: str, make_topic: MakeTopic, now_ms: int) -> None:
    topic = make_topic(max_message_bytes=2000)
    with pytest.raises(MessageSizeTooLargeError):
        produce_aiokafka(bootstrap, topic, [Sample(None, b"x" * 5000)], now_ms)


def test_positions_move_by_seek_and_by_time(bootstrap: str, make_topic: MakeTopic, now_ms: int) -> None:
    topic = make_topic()
    produce_aiokafka(bootstrap, topic, [Sample(None, b"%d" % i, age_ms=100 - i) for i in range(10)], now_ms)

    async def seek_around() -> list[object]:
        consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest")
        await consumer.start()
        try:
            where = TopicPartition(topic, 0)
            consumer.assign([where])
            found: list[object] = [(await consumer.getone()).offset]
            consumer.seek(where, 7)
            found.append((await consumer.getone()).offset)
            await consumer.seek_to_beginning(where)
            found.append((await consumer.getone()).offset)
            await consumer.seek_to_end(where)
            found.append(await consumer.position(where))
            at = (await consumer.offsets_for_times({where: now_ms - 96}))[where]
            found.append((at.offset, at.timestamp))
            return found
        finally:
            await consumer.stop()

    assert asyncio.run(seek_around()) == [0, 7, 0, 10, (4, now_ms - 96)]
