"""Whatever happens on the way, an idempotent producer delivers each record once and in order."""

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import ErrorCode, KafkaError
from headrace.client.batches import Delivery
from headrace.client.errors import BufferFull, DeliveryTimedOut, RecordTooLarge
from headrace.client.producer import Producer
from tests.client.scripted_cluster import TOPIC, Fate, ScriptedCluster
from tests.client.virtual_time import pass_time, run_virtual

TRANSIENT = [fate for fate in Fate if fate not in (Fate.FATAL, Fate.FORGOT_PRODUCER)]


def producer_of(cluster: ScriptedCluster, **config: Any) -> Producer:
    keys = {name.replace("_", "."): value for name, value in config.items()}
    return Producer(
        {"bootstrap.servers": cluster.bootstrap, **keys},
        connector=cluster.connect,
        random_source=random.Random(7),
    )


async def send_all(
    cluster: ScriptedCluster, count: int, pauses: list[float], **config: Any
) -> tuple[list[list[tuple[bytes, Delivery]]], Producer]:
    """Send numbered records round the partitions; returns the promises by partition."""
    producer = producer_of(cluster, **config)
    sent: list[list[tuple[bytes, Delivery]]] = [[] for _ in cluster.logs]
    async with producer:
        for number in range(count):
            at = number % len(cluster.logs)
            value = b"%d" % number
            sent[at].append((value, await producer.send(TOPIC, value, partition=at)))
            if pauses:
                await pass_time(pauses[number % len(pauses)])
        await producer.flush()
    return sent, producer


@given(
    fates=st.lists(st.sampled_from(TRANSIENT), max_size=25),
    count=st.integers(1, 80),
    pauses=st.lists(st.sampled_from([0.0, 0.001, 0.02, 0.3]), max_size=4),
    batch_size=st.sampled_from([80, 150, 400, 16384]),
    linger_ms=st.sampled_from([0, 5, 50]),
    in_flight=st.integers(1, 5),
    brokers=st.integers(1, 3),
)
def test_every_record_arrives_once_and_in_order_whatever_fails_on_the_way(
    fates: list[Fate],
    count: int,
    pauses: list[float],
    batch_size: int,
    linger_ms: int,
    in_flight: int,
    brokers: int,
) -> None:
    cluster = ScriptedCluster(brokers=brokers, fates=fates)
    sent, producer = run_virtual(
        send_all(
            cluster,
            count,
            pauses,
            batch_size=batch_size,
            linger_ms=linger_ms,
            max_in_flight_requests_per_connection=in_flight,
            request_timeout_ms=2_000,
            delivery_timeout_ms=600_000,
        )
    )
    for at, log in enumerate(cluster.logs):
        assert log.values == [value for value, _ in sent[at]]
        for position, (_, delivery) in enumerate(sent[at]):
            assert delivery.result().offset == position
    assert cluster.in_flight_max <= in_flight + 2  # and a metadata request and the handshake at most
    assert producer.buffered_bytes == 0


@given(
    fates=st.lists(st.sampled_from(list(Fate)), max_size=30),
    count=st.integers(1, 60),
    pauses=st.lists(st.sampled_from([0.0, 0.02, 1.0]), max_size=3),
    batch_size=st.sampled_from([80, 150, 16384]),
)
def test_what_is_given_up_never_repeats_or_reorders_what_is_kept(
    fates: list[Fate], count: int, pauses: list[float], batch_size: int
) -> None:
    # FORGOT_PRODUCER makes a broker forget what it has, so that even Kafka's own client may repeat a record: left out.
    fates = [fate for fate in fates if fate is not Fate.FORGOT_PRODUCER]
    cluster = ScriptedCluster(fates=fates)
    sent, producer = run_virtual(
        send_all(
            cluster, count, pauses, batch_size=batch_size, request_timeout_ms=1_000, delivery_timeout_ms=4_000
        )
    )
    for at, log in enumerate(cluster.logs):
        order = {value: position for position, (value, _) in enumerate(sent[at])}
        places = [order[value] for value in log.values]
        assert places == sorted(set(places)), "repeated or out of order"
        acknowledged = {value for value, delivery in sent[at] if delivery.exception() is None}
        assert acknowledged <= set(log.values), "acknowledged and not there"
        for value, delivery in sent[at]:
            error = delivery.exception()
            if value not in log.values:
                assert error is not None
    assert producer.buffered_bytes == 0


def test_a_broker_that_forgot_the_producer_is_given_a_new_epoch() -> None:
    fates = [Fate.FINE, Fate.FORGOT_PRODUCER]
    cluster = ScriptedCluster(partitions=1, fates=fates)
    sent, _ = run_virtual(
        send_all(cluster, 20, [0.01], batch_size=80, max_in_flight_requests_per_connection=1)
    )
    assert cluster.logs[0].values == [value for value, _ in sent[0]]
    assert {batch.epoch for batch in cluster.logs[0].batches} == {0, 1}


def test_a_fatal_refusal_fails_that_batch_alone_and_later_records_go_on() -> None:
    cluster = ScriptedCluster(partitions=1, fates=[Fate.FINE, Fate.FATAL])
    sent, _ = run_virtual(send_all(cluster, 10, [0.05], batch_size=80))
    failed = [value for value, delivery in sent[0] if delivery.exception() is not None]
    assert failed == [b"1"]
    error = sent[0][1][1].exception()
    assert error is not None and error.code is ErrorCode.INVALID_RECORD
    assert cluster.logs[0].values == [value for value, _ in sent[0] if value != b"1"]


def test_a_batch_too_large_for_the_broker_is_split_until_it_fits() -> None:
    cluster = ScriptedCluster(partitions=1, fates=[Fate.TOO_LARGE] * 3)
    sent, _ = run_virtual(send_all(cluster, 16, [], linger_ms=10))
    assert cluster.logs[0].values == [b"%d" % number for number in range(16)]
    assert len(cluster.logs[0].batches) > 1
    assert [delivery.result().offset for _, delivery in sent[0]] == list(range(16))


def test_records_for_a_cluster_that_is_gone_fail_by_the_delivery_timeout() -> None:
    async def scenario() -> None:
        cluster = ScriptedCluster(partitions=1)
        async with producer_of(cluster, request_timeout_ms=1_000, delivery_timeout_ms=5_000) as producer:
            await (await producer.send(TOPIC, b"first"))
            cluster.fates.extend([Fate.STUCK] * 100)
            begin_s = asyncio.get_running_loop().time()
            delivery = await producer.send(TOPIC, b"second")
            with pytest.raises(DeliveryTimedOut, match="not acknowledged within 5000 ms"):
                await delivery
            assert asyncio.get_running_loop().time() - begin_s == pytest.approx(5.0, abs=0.1)

    run_virtual(scenario())


def test_a_full_buffer_makes_send_wait_and_then_say_so() -> None:
    async def scenario() -> None:
        cluster = ScriptedCluster(partitions=1, fates=[Fate.STUCK] * 1000)
        async with producer_of(
            cluster,
            buffer_memory=1_000,
            max_block_ms=3_000,
            request_timeout_ms=60_000,
            delivery_timeout_ms=120_000,
        ) as producer:
            while producer.buffered_bytes < 900:
                await producer.send(TOPIC, bytes(100))
            with pytest.raises(BufferFull, match="had no room for 3000 ms") as caught:
                await producer.send(TOPIC, bytes(100))
            assert "buffer.memory" in caught.value.hint
            assert producer.buffered_bytes <= 1_000
            await producer.close(timeout_ms=0)

    run_virtual(scenario())


@given(senders=st.integers(2, 6), each=st.integers(1, 15), buffer_memory=st.integers(400, 2_000))
def test_many_senders_share_a_small_buffer_and_all_get_through(
    senders: int, each: int, buffer_memory: int
) -> None:
    async def scenario() -> None:
        cluster = ScriptedCluster(partitions=1)
        held_max = 0

        async with producer_of(cluster, buffer_memory=buffer_memory, linger_ms=1_000) as producer:

            async def sender(who: int) -> None:
                nonlocal held_max
                for number in range(each):
                    await producer.send(TOPIC, b"%d-%d" % (who, number) + bytes(100))
                    held_max = max(held_max, producer.buffered_bytes)

            await asyncio.gather(*(sender(who) for who in range(senders)))
            await producer.flush()
        assert held_max <= buffer_memory
        assert len(cluster.logs[0].values) == senders * each
        for who in range(senders):
            mine = [v.rstrip(b"\0") for v in cluster.logs[0].values if v.startswith(b"%d-" % who)]
            assert mine == [b"%d-%d" % (who, number) for number in range(each)]

    run_virtual(scenario())


def test_a_record_that_no_request_can_hold_is_refused_at_once() -> None:
    async def scenario() -> None:
        async with producer_of(ScriptedCluster(), max_request_size=1_000) as producer:
            with pytest.raises(RecordTooLarge, match=r"max\.request\.size=1000"):
                await producer.send(TOPIC, bytes(1_000))

    run_virtual(scenario())


def test_linger_gathers_records_into_one_batch_and_flush_does_not_wait_for_it() -> None:
    async def scenario() -> None:
        cluster = ScriptedCluster(partitions=1)
        async with producer_of(cluster, linger_ms=10_000) as producer:
            await producer.partitions(TOPIC)
            loop = asyncio.get_running_loop()
            for _ in range(5):
                await producer.send(TOPIC, b"x")
                await pass_time(0.1)
            assert cluster.produce_requests == 0
            begin_s = loop.time()
            await producer.flush()
            assert loop.time() - begin_s < 1
            assert len(cluster.logs[0].batches) == 1

    run_virtual(scenario())


def test_without_acknowledgement_records_are_done_once_sent() -> None:
    async def scenario() -> None:
        cluster = ScriptedCluster(partitions=1)
        async with producer_of(cluster, acks=0) as producer:
            metadata = await (await producer.send(TOPIC, b"x"))
            assert metadata.offset == -1
            await pass_time(0.01)
        assert cluster.logs[0].values == [b"x"]

    run_virtual(scenario())


def test_close_fails_what_it_cannot_deliver_in_time() -> None:
    async def scenario() -> None:
        cluster = ScriptedCluster(partitions=1, fates=[Fate.STUCK] * 10)
        producer = producer_of(cluster)
        delivery = await producer.send(TOPIC, b"x")
        await producer.close(timeout_ms=100)
        with pytest.raises(KafkaError, match="closed before the record was acknowledged"):
            delivery.result()
        with pytest.raises(KafkaError, match="closed"):
            await producer.send(TOPIC, b"y")

    run_virtual(scenario())


def test_a_partition_the_topic_does_not_have_is_named() -> None:
    async def scenario() -> None:
        async with producer_of(ScriptedCluster(partitions=2)) as producer:
            with pytest.raises(KafkaError, match="has 2 partitions, so there is no partition 7"):
                await producer.send(TOPIC, b"x", partition=7)

    run_virtual(scenario())
