"""`headrace txn`: what it shows of transactions, and how it ends those that are in the way."""

import json
import uuid

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from headrace.testing import Broker
from tests.cli.command import fails, succeeds

WAIT_S = 60.0


@pytest.fixture(scope="module")
def broker(headrace_session: Broker) -> Broker:
    return headrace_session


def open_transaction(broker: Broker, topic: str) -> tuple[str, Producer]:
    """A producer that has written and not ended its transaction."""
    name = f"open-{uuid.uuid4().hex[:8]}"
    producer = Producer({"log_level": 0, "bootstrap.servers": broker.bootstrap, "transactional.id": name})
    producer.init_transactions(WAIT_S)
    producer.begin_transaction()
    producer.produce(topic, b"open", partition=0)
    producer.flush(WAIT_S)
    return name, producer


def end_offset(broker: Broker, topic: str) -> int:
    """How far a read_committed reader gets."""
    consumer = Consumer(
        {
            "log_level": 0,
            "bootstrap.servers": broker.bootstrap,
            "group.id": "unused",
            "isolation.level": "read_committed",
        }
    )
    end: int = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=WAIT_S)[1]
    consumer.close()
    return end


def test_an_open_transaction_is_listed_with_its_age_and_partitions(broker: Broker) -> None:
    broker.create_topic("shown", 1)
    name, producer = open_transaction(broker, "shown")
    [listed] = [
        each
        for each in json.loads(succeeds("txn", "list", "--json", "-b", broker.bootstrap))
        if each["transactional_id"] == name
    ]
    assert listed["state"] == "Ongoing" and listed["age_s"] >= 0
    assert b"oldest open transaction" in succeeds("txn", "list", "--state", "Ongoing", "-b", broker.bootstrap)
    [described] = json.loads(succeeds("txn", "describe", name, "--json", "-b", broker.bootstrap))
    assert described["partitions"] == [{"topic": "shown", "partition": 0}]
    producer.abort_transaction(WAIT_S)


def test_aborting_an_id_shuts_its_producer_out(broker: Broker) -> None:
    broker.create_topic("freed", 1)
    name, producer = open_transaction(broker, "freed")
    assert end_offset(broker, "freed") == 0
    assert name.encode() in succeeds("txn", "abort", name, "-b", broker.bootstrap)
    assert end_offset(broker, "freed") == 2
    with pytest.raises(KafkaException):
        producer.commit_transaction(WAIT_S)


def test_what_hangs_in_a_partition_is_aborted_by_where_it_began(broker: Broker) -> None:
    broker.create_topic("hung", 1)
    _, producer = open_transaction(broker, "hung")
    assert b"START OFFSET" in succeeds("txn", "abort", "--partition", "hung:0", "-b", broker.bootstrap)
    succeeds("txn", "abort", "--partition", "hung:0", "--start-offset", "0", "-b", broker.bootstrap)
    assert end_offset(broker, "hung") == 2
    told = fails(1, "txn", "abort", "--partition", "hung:0", "--start-offset", "0", "-b", broker.bootstrap)
    assert "none is open" in told
    producer.abort_transaction(WAIT_S)


def test_wrong_words_are_told_what_would_be_right(broker: Broker) -> None:
    assert "txn list" in fails(1, "txn", "describe", "nobody", "-b", broker.bootstrap)
    assert "Ongoing" in fails(1, "txn", "list", "--state", "Odd", "-b", broker.bootstrap)
    assert "one of the two" in fails(2, "txn", "abort", "-b", broker.bootstrap)
