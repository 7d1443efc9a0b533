"""The options and rows of the Spark sink: what is taken, what is refused, and in which words."""

import pickle

import pytest

from headrace.base.errors import KafkaError
from headrace.testing import Broker
from headrace.testing.ports import free_ports

pytest.importorskip("pyspark")

from pyspark.sql.types import ArrayType, LongType, StringType, StructField, StructType

from headrace.pipeline.options import OptionError
from headrace.pipeline.sink import StreamWriter, check_sink_schema, parse_sink_options

BASE = {"kafka.bootstrap.servers": "h:9092", "topic": "t"}


def test_a_stream_is_exactly_once_and_a_batch_at_least_once() -> None:
    stream, batch = (parse_sink_options(BASE, streaming=s) for s in (True, False))
    assert stream.exactly_once and not batch.exactly_once
    assert stream.ledger_topic == "t"
    assert stream.producer == {"bootstrap.servers": "h:9092"}


def test_what_spark_adds_to_the_options_is_no_mistake() -> None:
    given = {**BASE, "queryName": "q", "checkpointLocation": "/tmp/c", "path": "p"}
    assert parse_sink_options(given, streaming=True).topic == "t"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"topik": "x"}, "Did you mean 'topic'?"),
        ({"delivery": "twice"}, "exactly_once, at_least_once"),
        ({"kafka.acks": "1"}, "must be all"),
        ({"kafka.transactional.id": "x"}, "transactionalIdPrefix"),
        ({"kafka.key.serializer": "x"}, "Cast them"),
        ({"kafka.transaction.timeout.ms": "long"}, "milliseconds"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, str], words: str) -> None:
    with pytest.raises(OptionError) as refused:
        parse_sink_options({**BASE, **options}, streaming=True)
    assert words in str(refused.value)


def columns(**kinds: object) -> StructType:
    return StructType([StructField(name, kind) for name, kind in kinds.items()])


def test_rows_that_cannot_be_written_are_refused_with_sparks_words() -> None:
    check_sink_schema(columns(value=StringType(), extra=LongType()), "t")
    with pytest.raises(OptionError, match="Required attribute 'value' not found"):
        check_sink_schema(columns(key=StringType()), "t")
    with pytest.raises(OptionError, match="topic option required"):
        check_sink_schema(columns(value=StringType()), None)
    with pytest.raises(OptionError, match="value attribute unsupported type bigint"):
        check_sink_schema(columns(value=LongType()), "t")
    with pytest.raises(OptionError, match="headers attribute unsupported type"):
        check_sink_schema(columns(value=StringType(), headers=ArrayType(StringType())), "t")


def test_a_broker_that_cannot_be_reached_is_named_on_the_driver_before_tasks_are_sent() -> None:
    (port,) = free_ports(1)
    options = {**BASE, "kafka.bootstrap.servers": f"127.0.0.1:{port}", "kafka.max.block.ms": "500"}
    writer = StreamWriter(
        parse_sink_options(options, streaming=True), StructType([StructField("value", StringType())])
    )
    with pytest.raises(KafkaError, match=str(port)):
        pickle.dumps(writer)


def test_a_topic_that_cannot_be_created_is_named_on_the_driver_before_tasks_are_sent() -> None:
    with Broker(settings={"auto.create.topics.enable": False}) as broker:
        options = {"kafka.bootstrap.servers": broker.bootstrap, "topic": "nowhere"}
        writer = StreamWriter(
            parse_sink_options(options, streaming=True), StructType([StructField("value", StringType())])
        )
        with pytest.raises(KafkaError, match="nowhere"):
            pickle.dumps(writer)
        broker.create_topic("nowhere")
        assert pickle.loads(pickle.dumps(writer))
