"""Writers and readers of a chaos run that use the project's own client, its blocking twin.

They write down the same as those of `clients`, which say what must hold. Called by the chaos run, beside those.
"""

import threading

from headrace.base.errors import KafkaError
from headrace.blocking import Consumer, Pending, Producer
from headrace.client.errors import Closed
from headrace.client.topics import TopicPartition
from tests.chaos.checker import OFFSET_UNKNOWN, History, Record
from tests.chaos.clients import FLUSH_S, Notes, Writer, decode, encode

POLL_MS = 200
POLL_RECORDS = 1000
COMMON: dict[str, object] = {
    "reconnect.backoff.ms": 20,
    "reconnect.backoff.max.ms": 500,
    "retry.backoff.ms": 50,
    "retry.backoff.max.ms": 500,
    "request.timeout.ms": 8_000,
    "metadata.max.age.ms": 10_000,
}
# So long that no record is given up for its age in any run.
DELIVERY_MS = 24 * 3600 * 1000


class OwnWriter(Writer):
    """Sends numbered records at a steady rate, to all partitions in turn; idempotent, as the client is by default."""

    def _write(self, writer: str) -> int:
        config = {**COMMON, "bootstrap.servers": self.bootstrap, "linger.ms": 5}
        producer = Producer({**config, "delivery.timeout.ms": DELIVERY_MS})
        self.unanswered = 0
        try:
            for record in self._due(writer, self.stopping.wait):
                self._hand_over(producer, record)
        finally:
            if waits_for := producer.waits_for:
                self.notes.add(f"{writer} ends while it waits for {waits_for}")
            producer.close(timeout_ms=FLUSH_S * 1000)
        return self.unanswered

    def _hand_over(self, producer: Producer, record: Record) -> None:
        def told(pending: Pending) -> None:
            self.unanswered -= 1
            error = pending.exception()
            if error is None:
                offset = pending.result().offset
                self._acknowledged(record, OFFSET_UNKNOWN if offset < 0 else offset)
            elif isinstance(error, Closed):
                self.unanswered += 1  # nobody knows what became of it
            else:
                self._refused(record, error.code.name)

        partition = record.number % self.partitions
        self.history.sent[record] = partition
        try:
            sent = producer.send(self.topic, encode(record), partition=partition)
        except KafkaError as error:
            self._refused(record, error.code.name)
        else:
            self.unanswered += 1
            sent.add_done_callback(told)


class OwnReader:
    """Reads along from the first offset of every partition."""

    def __init__(
        self, name: str, bootstrap: str, topic: str, partitions: int, history: History, notes: Notes
    ) -> None:
        self.name, self.history, self.notes = name, history, notes
        self.config = {**COMMON, "bootstrap.servers": bootstrap, "auto.offset.reset": "earliest"}
        self.wanted = [TopicPartition(topic, partition) for partition in range(partitions)]
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def stop(self) -> None:
        self.stopping.set()
        self.thread.join(30)

    def _run(self) -> None:
        with Consumer(self.config) as consumer:
            consumer.assign(self.wanted)
            for partition in self.wanted:
                consumer.seek(partition, 0)
            while not self.stopping.is_set():
                try:
                    for record in consumer.poll(POLL_MS, POLL_RECORDS):
                        place = (self.name, record.partition, record.offset)
                        self.history.reads.append((*place, decode(record.value)))
                except KafkaError as error:
                    self.notes.add(f"{self.name}: {error.code.name}")
