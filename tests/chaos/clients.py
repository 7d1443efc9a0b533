"""The clients of a chaos run: writers, readers and askers, each in a thread of its own.

These are confluent-kafka's; those of the project's own client, in `own_clients`, take turns with them. They write down
what they were told in a `History` and judge nothing. A writer is idempotent, with acks=all and no end to its retries:
whatever it sent is acknowledged sooner or later, unless the producer gives up for good, in which case a new session
under a new name goes on. Called by the chaos run.
"""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from tests.chaos.checker import OFFSET_UNKNOWN, History, Record

PADDING = b"~" * 60
ASK_EVERY_S = 0.2
ASK_TIMEOUT_S = 2.0
FLUSH_S = 120.0
FINAL_S = 180.0
COMMON = {
    "log_level": 0,
    "reconnect.backoff.ms": 20,
    "reconnect.backoff.max.ms": 500,
    "socket.connection.setup.timeout.ms": 3000,
    "topic.metadata.refresh.interval.ms": 10_000,
}


def encode(record: Record) -> bytes:
    return b"%s|%d|" % (record.writer.encode(), record.number) + PADDING


def decode(value: bytes | None) -> Record:
    writer, number, padding = (value or b"damaged|-1|").split(b"|", 2)
    if padding != PADDING:
        return Record("damaged", -1)
    return Record(writer.decode(), int(number))


class Notes:
    """Remarks of all clients, counted, with the first of each kind in full."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.lock = threading.Lock()

    def add(self, kind: str) -> None:
        with self.lock:
            self.counts[kind] += 1


class Writer:
    """Sends numbered records at a steady rate, to all partitions in turn."""

    def __init__(
        self,
        name: str,
        bootstrap: str,
        topic: str,
        partitions: int,
        rate: float,
        history: History,
        notes: Notes,
    ) -> None:
        self.name, self.bootstrap, self.topic = name, bootstrap, topic
        self.partitions, self.rate = partitions, rate
        self.history, self.notes = history, notes
        self.session = 0
        self.begun_s, self.total = 0.0, 0
        self.last_ack_s: dict[int, float] = {}
        self.gap_s: dict[int, float] = {}
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def stop(self) -> None:
        self.stopping.set()
        self.thread.join(FLUSH_S + 30)

    def _run(self) -> None:
        self.begun_s, self.total = time.monotonic(), 0
        while not self.stopping.is_set():
            self.session += 1
            writer = f"{self.name}.{self.session}"
            if left := self._write(writer):
                self.notes.add(f"{writer}: {left} records without an answer when its session ended")

    def _write(self, writer: str) -> int:
        """One session: until told to stop, or its producer can do no more. Returns how many had no answer then."""
        producer = self._producer()
        try:
            for record in self._due(writer, producer.poll):
                self._send(producer, record)
            return producer.flush(FLUSH_S)
        except KafkaException as error:
            self.notes.add(f"producer gave up: {error.args[0].name()}: {error.args[0].str()}")
            return len(producer)

    def _due(self, writer: str, idle: Callable[[float], object]) -> Iterator[Record]:
        """The records of one session, each when its time has come; `idle` passes the time between them."""
        number = 0
        while not self.stopping.is_set():
            wait_s = self.begun_s + self.total / self.rate - time.monotonic()
            idle(max(0.0, min(wait_s, 0.1)))
            if wait_s <= 0.1:
                yield Record(writer, number)
                number, self.total = number + 1, self.total + 1

    def _producer(self) -> Producer:
        return Producer(
            {
                **COMMON,
                "bootstrap.servers": self.bootstrap,
                "acks": "all",
                "enable.idempotence": True,
                "message.timeout.ms": 0,
                "linger.ms": 5,
                "retry.backoff.ms": 50,
                "retry.backoff.max.ms": 500,
                "socket.timeout.ms": 10_000,
                "request.timeout.ms": 8_000,
            }
        )

    def _send(self, producer: Producer, record: Record) -> None:
        partition = record.number % self.partitions
        self.history.sent[record] = partition
        try:
            producer.produce(
                self.topic,
                encode(record),
                partition=partition,
                on_delivery=lambda e, m: self._told(record, e, m),
            )
        except BufferError:
            self.history.failed[record] = "not sent: the queue is full"
            producer.poll(0.2)
        except KafkaException as error:
            self.history.failed[record] = str(error)
            raise

    def _told(self, record: Record, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self._refused(record, error.name())
        else:
            offset = message.offset()
            self._acknowledged(record, OFFSET_UNKNOWN if offset is None else offset)

    def _refused(self, record: Record, why: str) -> None:
        self.history.failed[record] = why
        self.notes.add(f"not delivered: {why}")

    def _acknowledged(self, record: Record, offset: int) -> None:
        self.history.acked[record] = offset
        now_s, partition = time.monotonic(), self.history.sent[record]
        gap_s = now_s - self.last_ack_s.get(partition, now_s)
        self.gap_s[partition] = max(gap_s, self.gap_s.get(partition, 0.0))
        self.last_ack_s[partition] = now_s


class Reader:
    """Reads along from the first offset of every partition."""

    def __init__(
        self,
        name: str,
        bootstrap: str,
        topic: str,
        partitions: int,
        history: History,
        notes: Notes,
        **config: str,
    ) -> None:
        self.name, self.history, self.notes = name, history, notes
        self.config = {
            **COMMON,
            "bootstrap.servers": bootstrap,
            "group.id": name,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "check.crcs": True,
            **config,
        }
        self.wanted = [TopicPartition(topic, partition, 0) for partition in range(partitions)]
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def stop(self) -> None:
        self.stopping.set()
        self.thread.join(30)

    def _run(self) -> None:
        consumer = Consumer(self.config)
        consumer.assign(self.wanted)
        while not self.stopping.is_set():
            for message in consumer.consume(1000, 0.2):
                if (error := message.error()) is not None:
                    self.notes.add(f"{self.name}: {error.name()}")
                    continue
                place = (self.name, message.partition(), message.offset())
                self.history.reads.append((*place, decode(message.value())))
        consumer.close()


class Asker:
    """Asks for the end offset of every partition, again and again."""

    def __init__(self, name: str, bootstrap: str, topic: str, partitions: int, history: History) -> None:
        self.name, self.history = name, history
        self.config = {**COMMON, "bootstrap.servers": bootstrap, "group.id": name}
        self.wanted = [TopicPartition(topic, partition) for partition in range(partitions)]
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def stop(self) -> None:
        self.stopping.set()
        self.thread.join(30)

    def _run(self) -> None:
        consumer = Consumer(self.config)
        while not self.stopping.wait(ASK_EVERY_S):
            for place in self.wanted:
                with contextlib.suppress(KafkaException):
                    _, end = consumer.get_watermark_offsets(place, timeout=ASK_TIMEOUT_S)
                    self.history.ends.append((self.name, place.partition, end))
        consumer.close()


Logs = dict[int, list[tuple[int, Record]]]


def read_everything(bootstrap: str, topic: str, partitions: int) -> Logs:
    """Every committed record from the first to the end that the cluster tells, by partition. Raises TimeoutError."""
    consumer = Consumer(
        {
            **COMMON,
            "bootstrap.servers": bootstrap,
            "group.id": "final",
            "auto.offset.reset": "error",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
        }
    )
    deadline_s = time.monotonic() + FINAL_S
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(partitions)])
    logs: Logs = {partition: [] for partition in range(partitions)}
    ended: set[int] = set()
    while len(ended) < partitions:
        for message in consumer.consume(5000, 0.5):
            error = message.error()
            if error is None:
                logs[message.partition()].append((message.offset(), decode(message.value())))
            elif error.code() == KafkaError._PARTITION_EOF:
                ended.add(message.partition())
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"read to the end only in partitions {sorted(ended)}")
    consumer.close()
    return logs
