"""Consume, transform, produce: copiers that carry every record of one topic into another, exactly once.

Each is a member of one group and a transactional producer; what it read, what it wrote and how far it has come are
one transaction. Whatever goes wrong, it aborts and goes back to what the group has committed; when its producer gives
up for good, a new one takes the same transactional id. Called by the chaos run, when it is asked for copiers.
"""

import threading

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from tests.chaos.clients import COMMON, Notes

GROUP = "copiers"
BATCH = 200
TRANSACTION_S = 30.0
JOIN_S = 90.0


class Copier:
    """One member of the group, in a thread of its own."""

    def __init__(self, name: str, bootstrap: str, source: str, target: str, notes: Notes) -> None:
        self.name, self.bootstrap, self.source, self.target = name, bootstrap, source, target
        self.notes = notes
        self.copied = 0
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def stop(self) -> None:
        self.stopping.set()
        self.thread.join(JOIN_S)

    def _run(self) -> None:
        while not self.stopping.is_set():
            consumer = self._consumer()
            try:
                self._session(consumer, self._producer())
            except KafkaException as error:
                self.notes.add(f"copier starts anew: {error.args[0].name()}")
                self.stopping.wait(0.2)
            finally:
                consumer.close()

    def _consumer(self) -> Consumer:
        consumer = Consumer(
            {
                **COMMON,
                "bootstrap.servers": self.bootstrap,
                "group.id": GROUP,
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "isolation.level": "read_committed",
                "session.timeout.ms": 10_000,
            }
        )
        consumer.subscribe([self.source])
        return consumer

    def _producer(self) -> Producer:
        return Producer(
            {
                **COMMON,
                "bootstrap.servers": self.bootstrap,
                "transactional.id": self.name,
                "transaction.timeout.ms": 20_000,
                "linger.ms": 5,
            }
        )

    def _session(self, consumer: Consumer, producer: Producer) -> None:
        """Copy until told to stop. KafkaException when producer or consumer must be made anew."""
        producer.init_transactions(TRANSACTION_S)
        while not self.stopping.is_set():
            messages = [m for m in consumer.consume(BATCH, 0.5) if m.error() is None]
            if not messages:
                continue
            producer.begin_transaction()
            try:
                for message in messages:
                    producer.produce(self.target, message.value(), partition=message.partition())
                ends: dict[int, int] = {}
                for message in messages:
                    ends[message.partition()] = message.offset() + 1
                offsets = [TopicPartition(self.source, partition, at) for partition, at in ends.items()]
                producer.send_offsets_to_transaction(
                    offsets, consumer.consumer_group_metadata(), TRANSACTION_S
                )
                producer.commit_transaction(TRANSACTION_S)
                self.copied += len(messages)
            except KafkaException as error:
                if error.args[0].fatal():
                    raise
                # Aborted or never begun: either way the group's offsets say where to go on, and a new member asks.
                self.notes.add(f"copier aborts: {error.args[0].name()}")
                producer.abort_transaction(TRANSACTION_S)
                raise
