"""What a producer does over time: traffic moves away from slow leaders, memory does not grow, hooks are called."""

import random
import tracemalloc
from typing import Any

import pytest

from headrace.base.errors import KafkaError
from headrace.client.blocking import Portal
from headrace.client.errors import SerializationFailed
from headrace.client.outgoing import ProducerRecord
from headrace.client.producer import Delivery, Producer, RecordMetadata
from headrace.client.statistics import prometheus_text
from tests.client.scripted_cluster import TOPIC, Fate, ScriptedCluster
from tests.client.virtual_time import pass_time, run_virtual

MEMORY_GROWTH_BYTES_MAX = 200_000


def producer_of(cluster: ScriptedCluster, **options: Any) -> Producer:
    return Producer(
        bootstrap_servers=cluster.bootstrap,
        connector=cluster.connect,
        random_source=random.Random(7),
        **options,
    )


def share_of_slow_leader(partitioner: str) -> float:
    async def scenario() -> float:
        cluster = ScriptedCluster(brokers=2, partitions=2)
        cluster.produce_delays_s = {2: 0.05}
        async with producer_of(cluster, partitioner=partitioner, linger_ms=0, batch_size=300) as producer:
            for _ in range(600):
                await producer.send(TOPIC, bytes(100))
                await pass_time(0.005)
        slow, fast = len(cluster.logs[1].values), len(cluster.logs[0].values)
        assert slow + fast == 600
        return slow / 600

    return run_virtual(scenario())


def test_load_aware_moves_traffic_away_from_a_leader_that_answers_slowly() -> None:
    assert 0.4 < share_of_slow_leader("default") < 0.6
    assert share_of_slow_leader("load_aware") < 0.2


def test_an_hour_of_sends_does_not_grow_the_producer() -> None:
    async def scenario() -> int:
        cluster = ScriptedCluster(partitions=2)
        sizes = []
        async with producer_of(cluster, linger_ms=5) as producer:
            for round_number in range(6):
                for _ in range(100):  # ten minutes, six seconds at a time
                    for number in range(5):
                        delivery = await producer.send(TOPIC, bytes(50), key=b"%d" % number)
                    await pass_time(6.0)
                await delivery
                for log in cluster.logs:  # the cluster keeps what it is given; that is not what is measured
                    log.batches.clear()
                    log.raw.clear()
                if round_number >= 1:
                    sizes.append(tracemalloc.get_traced_memory()[0])
            assert producer.buffered_bytes == 0
        return max(sizes) - sizes[0]

    tracemalloc.start()
    try:
        assert run_virtual(scenario()) < MEMORY_GROWTH_BYTES_MAX
    finally:
        tracemalloc.stop()


class Witness:
    def __init__(self) -> None:
        self.fates: list[RecordMetadata | KafkaError | None] = []

    def on_send(self, record: ProducerRecord) -> ProducerRecord:
        return record._replace(headers=[*record.headers, ("seen", b"1")])

    def on_acknowledgement(self, metadata: RecordMetadata | None, error: KafkaError | None) -> None:
        self.fates.append(metadata or error)


def test_interceptors_see_every_record_and_its_fate() -> None:
    async def scenario() -> None:
        witness = Witness()
        cluster = ScriptedCluster(partitions=1, fates=[Fate.FINE, Fate.FATAL])
        async with producer_of(cluster, interceptors=[witness], value_serializer="string") as producer:
            await (await producer.send(TOPIC, "one"))
            with pytest.raises(KafkaError):
                await (await producer.send(TOPIC, "two"))
            with pytest.raises(SerializationFailed):
                await producer.send(TOPIC, 3)
            statistics = producer.statistics()
        assert [type(fate).__name__ for fate in witness.fates] == [
            "RecordMetadata",
            "KafkaError",
            "SerializationFailed",
        ]
        assert (statistics["records_acknowledged"], statistics["records_failed"]) == (1, 1)
        assert "headrace_producer_records_failed 1" in prometheus_text(statistics, "producer")

    run_virtual(scenario())


def test_a_span_follows_each_record_and_its_context_is_in_the_headers() -> None:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)

    async def scenario() -> None:
        from headrace.client.tracing import Tracing
        from headrace.records.builder import iter_records

        cluster = ScriptedCluster(partitions=1)
        async with producer_of(cluster, tracing=True) as producer:
            await (await producer.send(TOPIC, b"x", headers=[("traceparent", b"old"), ("kept", b"1")]))
        (stored,) = iter_records(cluster.logs[0].raw[0])
        headers = dict(stored.headers)
        (sent,) = exporter.get_finished_spans()
        assert headers["kept"] == b"1"
        trace_id, span_id = sent.context.trace_id, sent.context.span_id
        traceparent = headers["traceparent"] or b""
        assert traceparent.startswith(f"00-{trace_id:032x}-{span_id:016x}-".encode())
        from headrace.client.fetched import ConsumerRecord

        record = ConsumerRecord(TOPIC, 0, 0, 0, None, b"x", stored.headers, 0)
        with Tracing().processing(record):
            pass
        processed = exporter.get_finished_spans()[-1]
        assert processed.context.trace_id == trace_id
        assert processed.parent is not None and processed.parent.span_id == span_id

    run_virtual(scenario())


def test_a_key_or_value_that_is_no_bytes_is_refused_and_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        cluster = ScriptedCluster(partitions=1)
        async with producer_of(cluster, linger_ms=50) as producer:
            await producer.send(TOPIC, b"one")
            before = producer.buffered_bytes
            for bad in ({"value": "text"}, {"value": 5}, {"value": b"v", "key": "k"}):
                with pytest.raises(SerializationFailed, match="not bytes"):
                    await producer.send(TOPIC, **bad)
            assert producer.buffered_bytes == before
            await producer.send(TOPIC, bytearray(b"two"), key=memoryview(b"k"))
        assert cluster.logs[0].values == [b"one", b"two"]

    run_virtual(scenario())


def test_custom_partitioners_choose_and_are_held_to_the_partitions_there_are() -> None:
    async def scenario() -> None:
        cluster = ScriptedCluster(partitions=2)
        chosen = 1
        async with producer_of(cluster, partitioner=lambda topic, key, value: chosen) as producer:
            await (await producer.send(TOPIC, b"x", key=b"k"))
            chosen = 7
            with pytest.raises(KafkaError, match="chose partition 7"):
                await producer.send(TOPIC, b"y")
        assert [log.values for log in cluster.logs] == [[], [b"x"]]
        async with producer_of(cluster, partitioner="round_robin") as producer:
            for _ in range(4):
                await producer.send(TOPIC, b"r", key=b"same")
            await producer.flush()
        assert [len(log.values) for log in cluster.logs] == [2, 3]

    run_virtual(scenario())


def test_a_callback_that_raises_does_not_keep_the_rest_from_being_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> list[int]:
        told: list[int] = []
        async with producer_of(ScriptedCluster(), linger_ms=5) as producer:

            def tell(delivery: Delivery) -> None:
                told.append(delivery.result().offset)
                if len(told) == 1:
                    raise RuntimeError("a fault of the callback")

            for _ in range(3):
                (await producer.send(TOPIC, b"value", partition=0)).add_done_callback(tell)
            await producer.flush()
            assert producer.buffered_bytes == 0
        return told

    assert run_virtual(scenario()) == [0, 1, 2]
    assert "a callback of a delivery failed" in caplog.text


def test_a_batch_that_was_opened_ahead_is_sent_when_it_has_begun_even_if_nobody_was_told() -> None:
    async def scenario() -> list[bytes]:
        cluster = ScriptedCluster(partitions=1)
        async with producer_of(cluster, linger_ms=0) as producer:
            producer.short_way(Portal.__new__(Portal))
            await (await producer.send(TOPIC, b"first"))
            second = await producer.send(TOPIC, b"second")
            await producer.send(TOPIC, b"third")
            await pass_time(1.0)
            assert not second.done(), "nobody was told"
            await producer.flush()
        return list(cluster.logs[0].values)

    assert run_virtual(scenario()) == [b"first", b"second", b"third"]


def test_encoded_batches_go_out_as_they_are() -> None:
    async def scenario() -> None:
        from headrace.records.codec import encode_records

        cluster = ScriptedCluster(partitions=1)
        records = bytearray()
        encode_records(records, [(5, None, b"a", ()), (7, b"k", b"b", ())], 5)
        async with producer_of(cluster) as producer:
            delivery = await producer.send_records(
                TOPIC, 0, records, 2, base_timestamp_ms=5, max_timestamp_ms=7
            )
            assert (await delivery).offset == 0
            await (await producer.send(TOPIC, b"c"))
        assert cluster.logs[0].values == [b"a", b"b", b"c"]

    run_virtual(scenario())
