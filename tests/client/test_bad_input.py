"""What cannot work is refused in words that name the cause and the next step, in bounded time, and nothing hangs."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest

from headrace import Admin, Consumer, ErrorCode, KafkaError, NewTopic, Producer, TopicPartition
from headrace.client.admin import UNKNOWN_TOPIC_TIMEOUT_MS
from headrace.client.errors import (
    BufferFull,
    ConfigError,
    DeliveryTimedOut,
    RecordTooLarge,
    RequestTimedOut,
    SerializationFailed,
)
from headrace.client.retry import with_retries
from headrace.serializers import Avro, JsonSchema
from headrace.testing import Broker
from tests.client.scripted_cluster import ScriptedCluster
from tests.client.virtual_time import run_virtual
from tests.testing.waiting import wait_until

Run = Callable[..., Any]
SHORT = {"max_block_ms": 6_000, "request_timeout_ms": 2_000, "delivery_timeout_ms": 6_000, "linger_ms": 0}


def said(error: pytest.ExceptionInfo[KafkaError]) -> str:
    """Message and hint of what was raised; neither may be missing."""
    assert error.value.message and error.value.hint
    return f"{error.value.message} | {error.value.hint}"


@pytest.mark.parametrize("client", [Producer, Consumer, Admin])
def test_an_unknown_key_is_refused_with_the_nearest_one(client: type) -> None:
    with pytest.raises(ConfigError) as caught:
        client({"bootstrap.servers": "h:1", "request.timout.ms": 5})
    assert "request.timout.ms" in said(caught) and "request.timeout.ms" in said(caught)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.6\r\n"])
def test_an_address_of_something_else_is_said_not_to_be_kafka(answer: bytes, run: Run) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(answer)
        await writer.drain()
        writer.close()

    async def body() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, Producer(bootstrap_servers=f"127.0.0.1:{port}", **SHORT) as producer:
            with pytest.raises(KafkaError) as caught:
                await producer.send("t", b"x")
        assert f"127.0.0.1:{port}" in said(caught) or "no Kafka broker sends" in said(caught)
        assert "Kafka" in said(caught)

    run(body())


def test_an_address_that_accepts_and_stays_silent_is_given_up(run: Run) -> None:
    async def body() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            at = f"127.0.0.1:{silent.getsockname()[1]}"
            async with Consumer(
                bootstrap_servers=at, request_timeout_ms=500, default_api_timeout_ms=1_500
            ) as consumer:
                with pytest.raises(KafkaError) as caught:
                    await consumer.partitions("t")
        assert at in said(caught)

    run(body())


def test_a_topic_that_is_deleted_under_its_clients_is_named_by_both(run: Run) -> None:
    async def body(at: str) -> None:
        async with (
            Admin(bootstrap_servers=at) as admin,
            Producer(bootstrap_servers=at, **SHORT) as producer,
            Consumer(bootstrap_servers=at, auto_offset_reset="earliest", metadata_max_age_ms=200) as consumer,
        ):
            await admin.create_topic(NewTopic("doomed", 1, 1))
            await (await producer.send("doomed", b"x"))
            consumer.assign([TopicPartition("doomed", 0)])
            assert (await anext(consumer)).value == b"x"
            await admin.delete_topics(["doomed"])
            with pytest.raises(KafkaError) as caught:
                await (await producer.send("doomed", b"y"))
            assert "doomed" in said(caught) and (
                "deleted?" in said(caught) or "does not exist" in said(caught)
            )
            async with asyncio.timeout(30):
                while "topic 'doomed' to be created" not in consumer.waits_for:
                    assert await consumer.poll(100) == []

    with Broker(settings={"auto.create.topics.enable": "false"}) as broker:
        run(body(broker.bootstrap))


def test_a_record_that_the_client_or_the_topic_cannot_take_is_refused_with_the_setting_to_raise(
    cluster_bootstrap: str, new_topic: Callable[..., str], run: Run
) -> None:
    topic = new_topic(max_message_bytes="2000")

    async def body() -> None:
        async with Producer(bootstrap_servers=cluster_bootstrap, max_request_size=10_000) as producer:
            with pytest.raises(RecordTooLarge) as local:
                await producer.send(topic, bytes(20_000))
            assert "max.request.size" in said(local)
            with pytest.raises(KafkaError) as remote:
                await (await producer.send(topic, bytes(5_000)))
            assert "max.message.bytes" in said(remote)
            assert (await (await producer.send(topic, b"small"))).offset == 0

    run(body())


def test_a_broker_that_stops_answering_fills_the_buffer_and_everything_says_why(run: Run) -> None:
    async def body(broker: Broker) -> None:
        async with Producer(
            bootstrap_servers=broker.bootstrap,
            **{**SHORT, "delivery_timeout_ms": 10_000},
            buffer_memory=20_000,
        ) as producer:
            await (await producer.send("t", b"first"))
            broker.pause()
            sent = [await producer.send("t", bytes(1_000)) for _ in range(15)]
            assert "acknowledgements of" in producer.waits_for and "t-0" in producer.waits_for
            with pytest.raises(BufferFull) as full:
                await producer.send("t", bytes(10_000))
            assert "buffer.memory" in said(full)
            with pytest.raises(DeliveryTimedOut) as late:
                await sent[0]
            assert "t-0" in said(late) and "did not answer" in said(late)
            broker.resume()
            await asyncio.to_thread(
                wait_until, lambda: producer.buffered_bytes == 0, "nothing is left in the buffer"
            )

    with Broker() as broker:
        broker.create_topic("t")
        run(body(broker))


@pytest.mark.parametrize(
    "form",
    [
        Avro({"type": "record", "name": "R", "fields": [{"name": "id", "type": "int"}]}),
        JsonSchema({"type": "object", "required": ["id"], "properties": {"id": {"type": "integer"}}}),
    ],
)
def test_a_value_that_does_not_fit_its_schema_is_refused_before_it_is_sent(
    form: Any, cluster_bootstrap: str, new_topic: Callable[..., str], run: Run
) -> None:
    topic = new_topic()

    async def body() -> None:
        async with Producer(bootstrap_servers=cluster_bootstrap, value_serializer=form) as producer:
            with pytest.raises(SerializationFailed) as caught:
                await producer.send(topic, {"id": "seven"})
            assert topic in said(caught)
            assert (await (await producer.send(topic, {"id": 7}))).offset == 0

    run(body())


def test_a_cluster_that_answers_and_is_not_ready_yet_is_given_all_of_the_time() -> None:
    """A new cluster creates the topic of its transactions first: three seconds, as for a wrong address, are too few."""

    async def scenario() -> None:
        loop, cluster = asyncio.get_running_loop(), ScriptedCluster()
        producer = Producer(bootstrap_servers=cluster.bootstrap, connector=cluster.connect)
        ready_s = loop.time() + 20

        async def attempt() -> str:
            if loop.time() < ready_s:
                raise KafkaError(ErrorCode.COORDINATOR_NOT_AVAILABLE, "not yet")
            return "ready"

        assert not producer.cluster.nodes, "nothing was asked before"
        assert await with_retries(producer.cluster, 60_000, attempt) == "ready"
        await producer.close()

    run_virtual(scenario())


def test_a_call_that_runs_out_of_time_says_what_its_last_attempt_met() -> None:
    """Without an active controller brokers say so after a while, and the time is up while the next attempt waits."""

    async def scenario() -> None:
        cluster = ScriptedCluster()
        admin = Admin(bootstrap_servers=cluster.bootstrap, connector=cluster.connect)
        attempts = 0

        async def attempt() -> None:
            nonlocal attempts
            attempts += 1
            if attempts > 2:
                await asyncio.Event().wait()
            raise KafkaError(ErrorCode.REQUEST_TIMED_OUT, "no controller is active")

        with pytest.raises(
            RequestTimedOut, match="within 60000 ms; the last error: no controller is active"
        ) as caught:
            await with_retries(admin.cluster, 60_000, attempt)
        assert caught.value.hint and attempts == 3
        await admin.close()

    run_virtual(scenario())


def test_the_admin_asks_for_a_topic_that_nobody_knows_for_seconds_not_for_a_minute() -> None:
    """`config alter` of a name that was mistyped hung for all of `default.api.timeout.ms`."""

    async def scenario() -> None:
        loop, cluster = asyncio.get_running_loop(), ScriptedCluster()
        admin = Admin(bootstrap_servers=cluster.bootstrap, connector=cluster.connect)
        created_s = loop.time() + 1

        async def attempt() -> str:
            if loop.time() < created_s:
                raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "no such topic")
            return "known"

        assert await admin.retried(attempt) == "known", "news of a topic may be on their way"
        started_s, created_s = loop.time(), float("inf")
        with pytest.raises(KafkaError, match="no such topic"):
            await admin.retried(attempt)
        assert loop.time() - started_s <= UNKNOWN_TOPIC_TIMEOUT_MS / 1000
        await admin.close()

    run_virtual(scenario())
