"""A group consumer of each foreign client, behind one small face, for tests of sharing, leaving and resuming.

A member polls in a thread of its own from start to stop, because clients rebalance and commit only while they are
polled. It writes down which partitions it holds and which records it saw; tests wait for what it wrote.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, ClassVar, Self

from tests.compat.samples import QUIET, WAIT_S

SESSION_MS = 10_000
POLL_S = 0.1
# kafka-python 3.0.12 forgets an assignment when a poll times out between its JoinGroup and the reply to its SyncGroup:
# the next poll finds the rejoin done and never takes up what it brought. A long poll seldom ends in that moment; one of
# 100 ms does so regularly, because the retry of its metadata, which makes it join again, waits as long.
KAFKA_PYTHON_POLL_S = 1.7


class Member:
    """A consumer in a group. `held` is what it is assigned, `seen` (partition, offset) of what it read."""

    def __init__(self, bootstrap: str, group: str, topic: str, **config: Any) -> None:
        self.bootstrap, self.group, self.topic, self.config = bootstrap, group, topic, config
        self.held: set[int] = set()
        self.seen: list[tuple[int, int]] = []
        self.failure: BaseException | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """Commit, leave the group, and be gone."""
        self._stopping.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the consumer does not stop"
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            self.consume()
        except BaseException as error:
            self.failure = error

    def consume(self) -> None:
        raise NotImplementedError


class Confluent(Member):
    timing: ClassVar[dict[str, Any]] = {"session.timeout.ms": SESSION_MS, "heartbeat.interval.ms": 300}

    def consume(self) -> None:
        from confluent_kafka import Consumer, KafkaError, KafkaException

        # The client tells of these where it asked a broker that just ceased to coordinate, finds the next, and goes on.
        moving = {KafkaError.NOT_COORDINATOR, KafkaError.COORDINATOR_NOT_AVAILABLE}
        consumer = Consumer(
            {
                **QUIET,
                "bootstrap.servers": self.bootstrap,
                "group.id": self.group,
                "auto.offset.reset": "earliest",
                **self.timing,
                **self.config,
            }
        )
        try:
            consumer.subscribe([self.topic])
            while not self._stopping.is_set():
                message = consumer.poll(POLL_S)
                self.held = {each.partition for each in consumer.assignment()}
                if message is None:
                    continue
                if error := message.error():
                    if not error.retriable() and error.code() not in moving:
                        raise KafkaException(error)
                    continue
                self.seen.append((message.partition(), message.offset()))
                self.handled(consumer, message)
        finally:
            consumer.close()

    def handled(self, consumer: Any, message: Any) -> None:
        """A record is read. What it brought is committed by the client itself, now and then."""


class ConfluentConsumer(Confluent):
    """Speaks the consumer protocol, in which the broker says how often it is to report."""

    timing: ClassVar[dict[str, Any]] = {"group.protocol": "consumer"}


class KafkaPython(Member):
    def consume(self) -> None:
        from kafka import KafkaConsumer

        consumer = KafkaConsumer(
            self.topic,
            bootstrap_servers=self.bootstrap,
            group_id=self.group,
            auto_offset_reset="earliest",
            session_timeout_ms=SESSION_MS,
            heartbeat_interval_ms=300,
            # It may join before it has heard of the topic, as leader assign nothing, and ask again only then.
            metadata_max_age_ms=1000,
            **self.config,
        )
        try:
            while not self._stopping.is_set():
                for batch in consumer.poll(timeout_ms=int(KAFKA_PYTHON_POLL_S * 1000)).values():
                    self.seen += [(record.partition, record.offset) for record in batch]
                self.held = {each.partition for each in consumer.assignment()}
        finally:
            consumer.close()


class Aiokafka(Member):
    def consume(self) -> None:
        asyncio.run(self._consume())

    async def _consume(self) -> None:
        from aiokafka import AIOKafkaConsumer

        consumer = AIOKafkaConsumer(
            self.topic,
            bootstrap_servers=self.bootstrap,
            group_id=self.group,
            auto_offset_reset="earliest",
            session_timeout_ms=SESSION_MS,
            heartbeat_interval_ms=300,
            **self.config,
        )
        await consumer.start()
        try:
            while not self._stopping.is_set():
                for batch in (await consumer.getmany(timeout_ms=int(POLL_S * 1000))).values():
                    self.seen += [(record.partition, record.offset) for record in batch]
                self.held = {each.partition for each in consumer.assignment()}
        finally:
            await consumer.stop()


MEMBERS: dict[str, type[Member]] = {
    "confluent": Confluent,
    "kafka-python": KafkaPython,
    "aiokafka": Aiokafka,
}


def wait_until(holds: Callable[[], bool], what: str, *members: Member) -> None:
    """Wait until a condition holds; say what was hoped for when it does not."""
    deadline_s = time.monotonic() + WAIT_S
    pause = threading.Event()
    while not holds():
        for member in members:
            if member.failure is not None:
                raise member.failure
        states = [(sorted(member.held), len(member.seen)) for member in members]
        assert time.monotonic() < deadline_s, f"not in {WAIT_S} s: {what}; members hold and saw {states}"
        pause.wait(0.02)
