"""Consume, transform, produce: copiers that carry every record of one topic into another, exactly once.

Each is a process of its own, a member of one group and a transactional producer; what it read, what it wrote and how
far it has come are one transaction. Whatever goes wrong, it aborts and goes back to what the group has committed; when
its producer gives up for good, a new one takes the same transactional id. A `Copier` runs such a process, kills it
with SIGKILL every few seconds until it is told to spare it, and starts it again under the same names, so that the heir
takes over the partitions and ends what the dead one left open. Called by the chaos run, when it is asked for copiers.
"""

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import FrameType

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from tests.chaos.clients import COMMON, Notes

GROUP = "copiers"
BATCH = 200
TRANSACTION_S = 30.0
JOIN_S = 90.0
LIFE_S = (3.0, 15.0)
ASK_S = 10.0


class Copier:
    """One member of the group, the life of its processes watched by a thread."""

    def __init__(self, name: str, bootstrap: str, source: str, target: str, notes: Notes) -> None:
        self.name = name
        self.notes = notes
        self._command = [sys.executable, "-m", "tests.chaos.copiers", name, bootstrap, source, target]
        self._chance = random.Random(name)
        self._spared = threading.Event()
        self._stopping = threading.Event()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def spare(self) -> None:
        """Kill it no more."""
        self._spared.set()

    def stop(self) -> None:
        """Let it end its transaction, and end."""
        self._stopping.set()
        self.thread.join(JOIN_S)

    def _run(self) -> None:
        while not self._stopping.is_set():
            with subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True) as process:
                listener = threading.Thread(target=self._listen, args=(process,), daemon=True)
                listener.start()
                self._watch(process)
                listener.join(JOIN_S)

    def _watch(self, process: "subprocess.Popen[str]") -> None:
        """Return when the process has ended, by itself or by a kill."""
        if not self._spared.wait(self._chance.uniform(*LIFE_S)):
            process.kill()
            self.notes.add("copier killed")
        while process.poll() is None:
            if self._stopping.wait(0.1):
                process.terminate()
                try:
                    process.wait(JOIN_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                return

    def _listen(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.notes.add(line.strip())


def lag(bootstrap: str, source: str, partitions: int) -> int:
    """How many records of the source the group has not copied yet, as its committed offsets say. KafkaException."""
    asker = Consumer({**COMMON, "bootstrap.servers": bootstrap, "group.id": GROUP})
    try:
        behind = 0
        for where in asker.committed([TopicPartition(source, n) for n in range(partitions)], timeout=ASK_S):
            _, end = asker.get_watermark_offsets(where, timeout=ASK_S)
            behind += end - max(where.offset, 0)
        return behind
    finally:
        asker.close()


# -- in the process ----------------------------------------------------------------------------------------------------


class Copying:
    """What one process does."""

    def __init__(self, name: str, bootstrap: str, source: str, target: str) -> None:
        self.name, self.bootstrap, self.source, self.target = name, bootstrap, source, target
        self.stopping = threading.Event()
        self._parent = os.getppid()

    @property
    def goes_on(self) -> bool:
        """Whether it was not told to end, and whoever would tell it is alive."""
        return not self.stopping.is_set() and os.getppid() == self._parent

    def run(self) -> None:
        while self.goes_on:
            consumer = self._consumer()
            try:
                self._session(consumer, self._producer())
            except KafkaException as error:
                print(f"copier starts anew: {error.args[0].name()}", flush=True)
                self.stopping.wait(0.2)
            finally:
                consumer.close()

    def _consumer(self) -> Consumer:
        consumer = Consumer(
            {
                **COMMON,
                "bootstrap.servers": self.bootstrap,
                "group.id": GROUP,
                "group.instance.id": self.name,
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
        while self.goes_on:
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
            except KafkaException as error:
                if error.args[0].fatal():
                    raise
                # Aborted or never begun: either way the group's offsets say where to go on, and a new member asks.
                print(f"copier aborts: {error.args[0].name()}", flush=True)
                producer.abort_transaction(TRANSACTION_S)
                raise


def main(arguments: Sequence[str]) -> None:
    copying = Copying(*arguments)

    def stop(number: int, frame: FrameType | None) -> None:
        copying.stopping.set()

    signal.signal(signal.SIGTERM, stop)
    copying.run()


if __name__ == "__main__":
    main(sys.argv[1:])
