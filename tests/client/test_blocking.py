"""The blocking twins do what the asynchronous clients do, from ordinary threads."""

import subprocess
import sys
import threading
import uuid
from collections.abc import Callable

import pyarrow as pa
import pytest

import headrace
from headrace import KafkaError, NewTopic, TopicPartition
from headrace.blocking import Admin, Consumer, Producer
from headrace.client.fetched import ConsumerRecord
from headrace.testing import Broker


def test_records_go_around_without_asyncio(cluster_bootstrap: str, new_topic: Callable[..., str]) -> None:
    topic = new_topic()
    where = TopicPartition(topic, 0)
    with Producer(bootstrap_servers=cluster_bootstrap) as producer:
        pending = [producer.send(topic, b"%d" % number, key=b"k") for number in range(1_000)]
        producer.send(topic, b"last", headers=[("h", b"1")]).result(60)
        assert [one.result(60).offset for one in pending] == list(range(1_000))
        assert producer.waits_for == ""
    group = f"group-{uuid.uuid4().hex[:12]}"
    config = {"bootstrap.servers": cluster_bootstrap, "group.id": group, "auto.offset.reset": "earliest"}
    with Consumer(config) as consumer:
        consumer.subscribe([topic])
        seen = [next(consumer).offset for _ in range(700)]
        assert seen == list(range(700))
    with Consumer(config) as consumer:
        assert consumer.committed([where])[where] == (700, "", -1), "what was not handed out is not committed"
        consumer.subscribe([topic])
        assert next(consumer).offset == 700
        consumer.seek(where, 1_000)
        assert next(consumer).headers == (("h", b"1"),)
        assert consumer.position(where) == 1_001


def test_many_threads_share_a_producer_and_no_record_is_lost(
    cluster_bootstrap: str, new_topic: Callable[..., str]
) -> None:
    topic, each, threads = new_topic(partitions=3), 3_000, 4
    with Producer(bootstrap_servers=cluster_bootstrap, batch_size=2_000) as producer:

        def work(who: int) -> None:
            for number in range(each):
                producer.send(topic, b"%d-%d" % (who, number), key=b"%d" % who)

        workers = [threading.Thread(target=work, args=(who,)) for who in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        producer.flush()
    found: dict[bytes, list[int]] = {}
    with Consumer(bootstrap_servers=cluster_bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.assign(consumer.partitions(topic))
        while sum(map(len, found.values())) < each * threads:
            for record in consumer.poll(5_000, 5_000):
                who, _, number = record.value.partition(b"-")
                found.setdefault(who, []).append(int(number))
    assert found == {b"%d" % who: list(range(each)) for who in range(threads)}


def test_records_that_come_alone_are_handed_out_one_by_one(
    cluster_bootstrap: str, new_topic: Callable[..., str]
) -> None:
    topic, count, threads = new_topic(partitions=2), 100, 3
    with (
        Producer(bootstrap_servers=cluster_bootstrap, linger_ms=0) as producer,
        Consumer(bootstrap_servers=cluster_bootstrap, auto_offset_reset="earliest") as consumer,
    ):
        consumer.assign(consumer.partitions(topic))

        def work(who: int) -> None:
            for number in range(count):
                producer.send(topic, b"%d-%d" % (who, number), key=b"%d" % who).result(60)

        workers = [threading.Thread(target=work, args=(who,)) for who in range(threads)]
        for worker in workers:
            worker.start()
        found: dict[bytes, list[int]] = {}
        for _ in range(count * threads):
            who, _, number = next(consumer).value.partition(b"-")
            found.setdefault(who, []).append(int(number))
        for worker in workers:
            worker.join()
        assert found == {b"%d" % who: list(range(count)) for who in range(threads)}
        producer.send(topic, b"after", partition=1)
        assert next(consumer).value == b"after"


def test_a_call_that_is_under_way_when_the_client_closes_says_so() -> None:
    with Broker() as broker:
        broker.create_topic("t")
        consumer = Consumer(bootstrap_servers=broker.bootstrap)
        consumer.assign([TopicPartition("t", 0)])
        outcome: list[BaseException] = []

        def read() -> None:
            try:
                next(consumer)
            except KafkaError as error:
                outcome.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        consumer.close()
        reader.join(60)
        assert not reader.is_alive()
        assert "closed" in str(outcome[0])


def test_listeners_may_commit_and_errors_arrive_where_the_call_was_made(
    cluster_bootstrap: str, new_topic: Callable[..., str]
) -> None:
    topic = new_topic()
    where = TopicPartition(topic, 0)
    group = f"group-{uuid.uuid4().hex[:12]}"
    config = {"bootstrap.servers": cluster_bootstrap, "group.id": group, "enable.auto.commit": False}
    consumer = Consumer(config)

    class Listener:
        def on_assigned(self, partitions: list[TopicPartition]) -> None:
            consumer.seek(where, 0)

        def on_revoked(self, partitions: list[TopicPartition]) -> None:
            consumer.commit({where: 0})

        def on_lost(self, partitions: list[TopicPartition]) -> None:
            raise AssertionError("nothing is lost here")

    with consumer:
        consumer.subscribe(topic, Listener())
        while consumer.assignment != [where]:
            consumer.poll(100)
        with pytest.raises(KafkaError, match="not assigned"):
            consumer.seek(TopicPartition("other", 0), 1)
    with pytest.raises(KafkaError, match="closed"):
        consumer.poll(1)
    with Consumer(config) as reader:
        assert reader.committed([where])[where] == (0, "", -1)


def test_tables_handlers_and_statistics_block_too(
    cluster_bootstrap: str, new_topic: Callable[..., str]
) -> None:
    topic, group = new_topic(), f"group-{uuid.uuid4().hex[:12]}"
    with Producer(bootstrap_servers=cluster_bootstrap) as producer:
        [sent] = producer.send_arrow(topic, pa.table({"value": [b"%d" % number for number in range(50)]}))
        assert sent.result(60).offset == 0
        assert producer.statistics()["records_acknowledged"] == 50
    handled: list[int] = []
    with Consumer(
        bootstrap_servers=cluster_bootstrap, group_id=group, auto_offset_reset="earliest"
    ) as consumer:
        assert consumer.read_range(topic, 0, 10, 12)["value"].to_pylist() == [b"10", b"11"]
        consumer.subscribe([topic])

        def handler(record: ConsumerRecord) -> None:
            assert threading.current_thread() is not threading.main_thread()
            handled.append(record.offset)
            if len(handled) == 50:
                consumer.stop_processing()

        consumer.process(handler)
        assert handled == list(range(50))
        assert consumer.statistics()["records_handed_out"] >= 50


def test_every_method_of_the_asynchronous_clients_has_a_blocking_twin() -> None:
    not_for_people = {"adopt", "discard", "gate", "short_way", "send_framed", "send_records", "poll_chunks"}
    not_for_people |= {"begun", "feed", "take_ready", "expectant"}
    not_for_people |= {"cluster", "config", "ready_records", "group_metadata", "subscription", "retried"}
    twins = ((Producer, headrace.Producer), (Consumer, headrace.Consumer), (Admin, headrace.Admin))
    for twin, original in twins:
        public = {name for name in dir(original) if not name.startswith("_")}
        assert public - not_for_people <= set(dir(twin))


def test_close_fails_what_it_cannot_deliver_in_time() -> None:
    with Broker() as broker:
        broker.create_topic("t")
        producer = Producer(bootstrap_servers=broker.bootstrap, linger_ms=0)
        producer.send("t", b"first").result(60)
        broker.pause()
        late = producer.send("t", b"second")
        told: list[KafkaError | None] = []
        late.add_done_callback(lambda pending: told.append(pending.exception()))
        producer.close(timeout_ms=50)
        broker.resume()
        with pytest.raises(KafkaError, match="closed before the record was acknowledged"):
            late.result()
        assert [str(error) for error in told] == [str(late.exception())]


def test_administration_blocks_too(cluster_bootstrap: str) -> None:
    name = f"admin-{uuid.uuid4().hex[:12]}"
    with Admin(bootstrap_servers=cluster_bootstrap) as admin:
        admin.create_topic(NewTopic(name, 2, 1))
        assert [len(topic.partitions) for topic in admin.describe_topics([name])] == [2]
        admin.delete_topics([name])
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            admin.nothing()


def test_importing_the_client_loads_no_extras_and_little_else() -> None:
    program = (
        "import sys, headrace\n"
        "assert 'asyncio' not in sys.modules, 'the package alone loads nothing'\n"
        "from headrace import Producer, Consumer, Admin\n"
        "heavy = {'rich', 'msgspec', 'pyarrow', 'pandas', 'fastavro', 'google.protobuf', 'msgpack', 'opentelemetry'}\n"
        "heavy |= {'json', 'uuid', 'difflib', 'pathlib', 'headrace.client.group', 'headrace.records._compaction'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[]\n"
