"""Acknowledged records against kill -9, with a client nobody here wrote."""

import threading
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from headrace.testing import Broker

PARTITIONS = 3
KILLS = 3
ACKED_BETWEEN_KILLS = 2000
DEADLINE_S = 60


class Writer:
    """An idempotent producer with acks=all that writes numbered records until told to stop."""

    def __init__(self, bootstrap: str) -> None:
        self.acked: dict[int, list[tuple[int, int]]] = {p: [] for p in range(PARTITIONS)}  # (offset, number)
        self.failed: list[object] = []
        self._count = 0
        self._grown = threading.Condition()
        self._stop = threading.Event()
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "enable.idempotence": True,
                "linger.ms": 1,
                "batch.num.messages": 100,
                "reconnect.backoff.ms": 10,
                "reconnect.backoff.max.ms": 100,
                "log_level": 0,
            }
        )
        self._thread = threading.Thread(target=self._write)
        self._thread.start()

    def _write(self) -> None:
        number = 0
        while not self._stop.is_set():
            try:
                self._producer.produce(
                    "t", b"%d" % number, partition=number % PARTITIONS, on_delivery=self._delivered
                )
                number += 1
            except BufferError:
                self._producer.poll(0.1)
            # A short wait for acknowledgements paces it: what is read back in the end stays small.
            self._producer.poll(0 if number % 20 else 0.002)
        self._producer.flush(DEADLINE_S)

    def _delivered(self, error, message) -> None:
        if error is not None:
            self.failed.append(error)
            return
        self.acked[message.partition()].append((message.offset(), int(message.value())))
        with self._grown:
            self._count += 1
            self._grown.notify_all()

    def wait_for_more(self, count: int) -> None:
        with self._grown:
            target = self._count + count
            assert self._grown.wait_for(lambda: self._count >= target, DEADLINE_S), (
                "records are no longer taken"
            )

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def read_all(bootstrap: str, partition: int) -> list[tuple[int, int]]:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "unused", "enable.auto.commit": False})
    _, end = consumer.get_watermark_offsets(TopicPartition("t", partition), timeout=DEADLINE_S)
    consumer.assign([TopicPartition("t", partition, 0)])
    found: list[tuple[int, int]] = []
    while len(found) < end:
        messages = consumer.consume(min(1000, end - len(found)), DEADLINE_S)
        assert messages, f"{len(found)} of {end} records came"
        found += [(m.offset(), int(m.value())) for m in messages if m.error() is None]
    consumer.close()
    return found


@pytest.mark.timeout(240)
@pytest.mark.parametrize("flush_messages", ["9223372036854775807", "1"], ids=["page cache", "flushed"])
def test_no_acknowledged_record_is_lost_doubled_or_reordered_by_kills(tmp_path: Path, flush_messages: str):
    with Broker(data_dir=tmp_path / "data") as broker:
        broker.create_topic(
            "t", PARTITIONS, config={"flush.messages": flush_messages, "segment.bytes": "1048576"}
        )
        writer = Writer(broker.bootstrap)
        try:
            for _ in range(KILLS):
                writer.wait_for_more(ACKED_BETWEEN_KILLS)
                broker.restart(clean=False)
            writer.wait_for_more(ACKED_BETWEEN_KILLS)
        finally:
            writer.stop()
        assert writer.failed == []
        for partition, acked in writer.acked.items():
            found = read_all(broker.bootstrap, partition)
            assert set(acked) <= set(found), "an acknowledged record is not where it was acknowledged"
            numbers = [number for _, number in found]
            assert numbers == sorted(set(numbers)), "a record is doubled or out of order"
