"""Transactions as real clients see them: commit, abort, fencing, offsets in a transaction, read_committed readers."""

import asyncio
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from tests.compat.samples import QUIET, WAIT_S, eventually

MakeTopic = Callable[..., str]


def new_id(what: str = "txn") -> str:
    return f"{what}-{uuid.uuid4().hex[:10]}"


def transactional(bootstrap: str, transactional_id: str, **config: Any) -> Producer:
    producer = Producer(
        {
            **QUIET,
            "bootstrap.servers": bootstrap,
            "transactional.id": transactional_id,
            "linger.ms": 0,
            **config,
        }
    )
    producer.init_transactions(WAIT_S)
    return producer


def committed(
    bootstrap: str, topic: str, partitions: int = 1, isolation: str = "read_committed"
) -> list[bytes]:
    """The values that a reader sees up to the end, partition by partition."""
    consumer = Consumer(
        {
            **QUIET,
            "bootstrap.servers": bootstrap,
            "group.id": "unused",
            "isolation.level": isolation,
            "enable.partition.eof": True,
        }
    )
    values: list[bytes] = []
    try:
        for index in range(partitions):
            consumer.assign([TopicPartition(topic, index, 0)])
            while True:
                message = consumer.poll(WAIT_S)
                assert message is not None, "no end of the partition"
                if message.error():
                    break
                values.append(message.value())
    finally:
        consumer.close()
    return values


def test_committed_records_are_seen_and_aborted_ones_are_not(bootstrap: str, make_topic: MakeTopic) -> None:
    topic = make_topic(2)
    producer = transactional(bootstrap, new_id())
    for number in range(6):
        producer.begin_transaction()
        for partition in (0, 1):
            producer.produce(topic, b"%d" % number, partition=partition)
        if number % 2:
            producer.flush(WAIT_S)
            producer.abort_transaction(WAIT_S)
        else:
            producer.commit_transaction(WAIT_S)
    assert committed(bootstrap, topic, 2) == [b"0", b"2", b"4"] * 2
    every = committed(bootstrap, topic, 2, "read_uncommitted")
    assert every == [b"0", b"1", b"2", b"3", b"4", b"5"] * 2


def test_an_open_transaction_holds_readers_back_and_its_end_lets_them_go(
    bootstrap: str, make_topic: MakeTopic
) -> None:
    topic = make_topic()
    first, second = transactional(bootstrap, new_id()), transactional(bootstrap, new_id())
    first.begin_transaction()
    first.produce(topic, b"open")
    first.flush(WAIT_S)
    second.begin_transaction()
    second.produce(topic, b"closed")
    second.commit_transaction(WAIT_S)
    assert committed(bootstrap, topic) == []
    assert committed(bootstrap, topic, isolation="read_uncommitted") == [b"open", b"closed"]
    first.commit_transaction(WAIT_S)
    eventually(lambda: committed(bootstrap, topic), [b"open", b"closed"])


def test_a_second_producer_of_the_id_shuts_the_first_out(bootstrap: str, make_topic: MakeTopic) -> None:
    topic, name = make_topic(), new_id()
    zombie = transactional(bootstrap, name)
    zombie.begin_transaction()
    zombie.produce(topic, b"of the zombie")
    zombie.flush(WAIT_S)
    heir = transactional(bootstrap, name)
    heir.begin_transaction()
    heir.produce(topic, b"of the heir")
    heir.commit_transaction(WAIT_S)
    with pytest.raises(KafkaException) as told:
        zombie.commit_transaction(WAIT_S)
    assert told.value.args[0].fatal()
    assert committed(bootstrap, topic) == [b"of the heir"]


def test_a_transaction_past_its_time_is_aborted(bootstrap: str, make_topic: MakeTopic) -> None:
    topic = make_topic()
    producer = transactional(bootstrap, new_id(), **{"transaction.timeout.ms": 1000})
    producer.begin_transaction()
    producer.produce(topic, b"too slow")
    producer.flush(WAIT_S)
    plain = Producer({**QUIET, "bootstrap.servers": bootstrap})
    plain.produce(topic, b"behind it")
    plain.flush(WAIT_S)
    eventually(lambda: committed(bootstrap, topic), [b"behind it"])
    with pytest.raises(KafkaException):
        producer.commit_transaction(WAIT_S)


def test_a_timeout_beyond_the_brokers_bound_is_refused(bootstrap: str) -> None:
    with pytest.raises(KafkaException) as told:
        transactional(bootstrap, new_id(), **{"transaction.timeout.ms": 900_001})
    assert told.value.args[0].name() == "INVALID_TRANSACTION_TIMEOUT"


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_offsets_are_committed_with_the_transaction_or_not_at_all(
    bootstrap: str, make_topic: MakeTopic, protocol: str
) -> None:
    source, target, group = make_topic(), make_topic(), new_id("group")
    plain = Producer({**QUIET, "bootstrap.servers": bootstrap})
    for number in range(10):
        plain.produce(source, b"%d" % number)
    plain.flush(WAIT_S)
    consumer = Consumer(
        {
            **QUIET,
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "group.protocol": protocol,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
        }
    )
    consumer.subscribe([source])
    producer = transactional(bootstrap, new_id())

    def copy(count: int) -> None:
        producer.begin_transaction()
        for _ in range(count):
            message = consumer.poll(WAIT_S)
            assert message is not None and not message.error(), message and message.error()
            producer.produce(target, message.value())
        position = consumer.position(consumer.assignment())
        producer.send_offsets_to_transaction(position, consumer.consumer_group_metadata(), WAIT_S)

    copy(4)
    producer.commit_transaction(WAIT_S)
    [where] = consumer.committed([TopicPartition(source, 0)], timeout=WAIT_S)
    assert where.offset == 4
    copy(3)
    producer.abort_transaction(WAIT_S)
    [where] = consumer.committed([TopicPartition(source, 0)], timeout=WAIT_S)
    assert where.offset == 4
    consumer.close()
    assert committed(bootstrap, target) == [b"0", b"1", b"2", b"3"]


def committed_offset(bootstrap: str, group: str, topic: str) -> int:
    consumer = Consumer({**QUIET, "bootstrap.servers": bootstrap, "group.id": group})
    [where] = consumer.committed([TopicPartition(topic, 0)], timeout=WAIT_S)
    consumer.close()
    return int(where.offset)


def test_kafka_python_commits_offsets_with_the_transaction(bootstrap: str, make_topic: MakeTopic) -> None:
    from kafka import KafkaProducer
    from kafka import TopicPartition as Where
    from kafka.structs import OffsetAndMetadata

    source, target, group = make_topic(), make_topic(), new_id("group")
    producer = KafkaProducer(bootstrap_servers=bootstrap, transactional_id=new_id())
    producer.init_transactions()
    for offset, value in ((3, b"kept"), (5, b"dropped")):
        producer.begin_transaction()
        producer.send(target, value).get(WAIT_S)
        producer.send_offsets_to_transaction({Where(source, 0): OffsetAndMetadata(offset, "", -1)}, group)
        if offset == 3:
            producer.commit_transaction()
        else:
            producer.abort_transaction()
    producer.close()
    assert committed_offset(bootstrap, group, source) == 3
    assert committed(bootstrap, target) == [b"kept"]


def test_aiokafka_commits_offsets_with_the_transaction(bootstrap: str, make_topic: MakeTopic) -> None:
    from aiokafka import AIOKafkaProducer
    from aiokafka import TopicPartition as Where

    source, target, group = make_topic(), make_topic(), new_id("group")

    async def run() -> None:
        producer = AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id=new_id())
        await producer.start()
        for offset, value in ((3, b"kept"), (5, b"dropped")):
            await producer.begin_transaction()
            await producer.send_and_wait(target, value)
            await producer.send_offsets_to_transaction({Where(source, 0): offset}, group)
            if offset == 3:
                await producer.commit_transaction()
            else:
                await producer.abort_transaction()
        await producer.stop()

    asyncio.run(run())
    assert committed_offset(bootstrap, group, source) == 3
    assert committed(bootstrap, target) == [b"kept"]


def test_kafka_python_commits_and_aborts(bootstrap: str, make_topic: MakeTopic) -> None:
    from kafka import KafkaProducer

    topic = make_topic()
    producer = KafkaProducer(bootstrap_servers=bootstrap, transactional_id=new_id())
    producer.init_transactions()
    producer.begin_transaction()
    producer.send(topic, b"kept").get(WAIT_S)
    producer.commit_transaction()
    producer.begin_transaction()
    producer.send(topic, b"dropped").get(WAIT_S)
    producer.abort_transaction()
    producer.close()
    assert committed(bootstrap, topic) == [b"kept"]


def test_aiokafka_commits_and_aborts(bootstrap: str, make_topic: MakeTopic) -> None:
    from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
    from aiokafka import TopicPartition as Where

    topic = make_topic()

    async def run() -> list[bytes]:
        producer = AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id=new_id())
        await producer.start()
        async with producer.transaction():
            await producer.send_and_wait(topic, b"kept")
        await producer.begin_transaction()
        await producer.send_and_wait(topic, b"dropped")
        await producer.abort_transaction()
        async with producer.transaction():
            await producer.send_and_wait(topic, b"kept too")
        await producer.stop()
        consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, isolation_level="read_committed")
        await consumer.start()
        consumer.assign([Where(topic, 0)])
        await consumer.seek_to_beginning()
        seen = [(await asyncio.wait_for(consumer.getone(), WAIT_S)).value for _ in range(2)]
        await consumer.stop()
        return seen

    assert asyncio.run(run()) == [b"kept", b"kept too"]
