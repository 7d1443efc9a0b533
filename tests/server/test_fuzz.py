"""Broken frames at a live broker: it neither falls nor grows nor lets others feel it."""

import contextlib
import os
import random
import socket
import threading
from pathlib import Path
from struct import pack, unpack_from

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
)
from kafka import KafkaConsumer, KafkaProducer

from headrace.testing import Broker
from tests.server.frames import RecordingProxy, impatient, mutate

BROKEN_FRAMES = int(os.environ.get("HEADRACE_FUZZ_FRAMES", "200000"))
SEED = int(os.environ.get("HEADRACE_FUZZ_SEED", "20260101"))
GROWTH_MB_MAX = 150
CANARY_EVERY = 10_000
REPLY_WAIT_S = 0.05
SEND_WAIT_S = 10.0
CONNECTIONS = 16


def record_real_frames() -> list[bytes]:
    """What confluent-kafka and kafka-python send when they produce, consume and administer."""
    proxy = RecordingProxy()
    settings = {"advertised.listeners": f"PLAINTEXT://127.0.0.1:{proxy.port}"}
    with contextlib.closing(proxy), Broker(settings=settings) as broker:
        proxy.start(broker.host, broker.port)
        bootstrap = f"127.0.0.1:{proxy.port}"
        admin = AdminClient({"bootstrap.servers": bootstrap})
        for future in admin.create_topics([NewTopic("recorded", 2, 1)]).values():
            future.result(30)
        change = ConfigEntry("retention.ms", "1000000", incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ConfigResource.Type.TOPIC, "recorded", incremental_configs=[change])
        for future in [
            *admin.describe_configs([ConfigResource(ConfigResource.Type.TOPIC, "recorded")]).values(),
            *admin.incremental_alter_configs([resource]).values(),
            *admin.create_partitions([NewPartitions("recorded", 3)]).values(),
        ]:
            future.result(30)
        for compression in ("none", "gzip", "snappy", "lz4", "zstd"):
            producer = Producer(
                {"bootstrap.servers": bootstrap, "compression.type": compression, "enable.idempotence": True}
            )
            for number in range(20):
                producer.produce(
                    "recorded", b"value %d" % number, key=b"key", headers={"h": b"1"}, partition=0
                )
            assert producer.flush(30) == 0
        consumer = Consumer(
            {"bootstrap.servers": bootstrap, "group.id": "unused", "enable.auto.commit": False}
        )
        consumer.assign([TopicPartition("recorded", 0, 0)])
        assert consumer.consume(50, 30)
        consumer.offsets_for_times([TopicPartition("recorded", 0, 1)], timeout=30)
        consumer.close()
        python_producer = KafkaProducer(bootstrap_servers=bootstrap)
        python_producer.send("recorded", b"x").get(30)
        python_producer.close()
        python_consumer = KafkaConsumer(
            "recorded", bootstrap_servers=bootstrap, auto_offset_reset="earliest", group_id=None
        )
        assert python_consumer.poll(10_000)
        python_consumer.close()
        for future in admin.delete_topics(["recorded"]).values():
            future.result(30)
    return sorted({impatient(frame) for frame in proxy.frames})


class Canary:
    """A well-behaved client that must not notice anything."""

    def __init__(self, broker: Broker) -> None:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        admin.create_topics([NewTopic("canary", 1, 1)])["canary"].result(30)
        self._errors: list[object] = []
        conf = {"bootstrap.servers": broker.bootstrap, "error_cb": self._errors.append}
        self._producer = Producer(conf | {"enable.idempotence": True, "retries": 1})
        self._consumer = Consumer(conf | {"group.id": "unused", "enable.auto.commit": False})
        self._consumer.assign([TopicPartition("canary", 0, 0)])
        self._sent = 0

    def sing(self) -> None:
        failed = []
        payload = b"%d" % self._sent
        self._producer.produce(
            "canary", payload, partition=0, on_delivery=lambda e, _: failed.append(e) if e else None
        )
        assert self._producer.flush(30) == 0
        assert failed == []
        message = self._consumer.poll(30)
        assert message is not None
        assert message.error() is None
        assert message.value() == payload
        assert self._errors == [], "the canary's connections were disturbed"
        self._sent += 1


def resident_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmRSS")


class Attacker:
    """Sends broken frames, each followed by a sound request: what is counted was read and answered, or closed upon.

    The answer to the sound request shows that the broker got past the broken one. It can stay out, because the broken
    one claims more bytes than it has or became a fetch that waits; then the connection is left for a new one.
    """

    def __init__(self, broker: Broker, corpus: list[bytes], seed: int) -> None:
        self._address = (broker.host, broker.port)
        self._corpus = corpus
        self._chance = random.Random(seed)
        self._socks: list[socket.socket | None] = [None] * CONNECTIONS
        self._number = 0
        self.answered = 0
        self.closed_upon = 0

    def close(self) -> None:
        for place in range(CONNECTIONS):
            self._drop(place)

    def _drop(self, place: int) -> None:
        sock, self._socks[place] = self._socks[place], None
        if sock is not None:
            sock.close()

    def attack(self, count: int) -> None:
        """Rounds of one frame on each of several connections: the broker works on one while others are on the way."""
        for _ in range(0, count, CONNECTIONS):
            self._number += 1
            sent = [self._send(place) for place in range(CONNECTIONS)]
            for place, honest in enumerate(sent):
                try:
                    passed = self._answered(place, REPLY_WAIT_S if honest else 0.000_001)
                    self.answered += passed
                except OSError:
                    passed = False
                    self.closed_upon += 1
                if not passed:
                    self._drop(place)

    def _send(self, place: int) -> bool:
        frame, honest = mutate(self._chance.choice(self._corpus), self._chance)
        sock = self._socks[place]
        if sock is None:
            sock = self._socks[place] = socket.create_connection(self._address)
        sock.settimeout(SEND_WAIT_S)
        with contextlib.suppress(OSError):
            sock.sendall(frame + pack(">ihhih", 10, 18, 0, self._number, -1))
        return honest

    def _answered(self, place: int, wait_s: float) -> bool:
        """Whether the sound request was answered; OSError when the broker closed the connection."""
        sock = self._socks[place]
        sock.settimeout(wait_s)
        held = b""
        try:
            while data := sock.recv(1 << 20):
                held += data
                while len(held) >= 8:
                    size, number = unpack_from(">ii", held)
                    if len(held) < 4 + size:
                        break
                    held = held[4 + size :]
                    if number == self._number:
                        return True
        except (TimeoutError, BlockingIOError):
            return False
        raise ConnectionResetError("closed by the broker")


@pytest.mark.timeout(300)
def test_broken_frames_neither_stop_the_broker_nor_grow_it_nor_disturb_others():
    corpus = record_real_frames()
    assert len({frame[:2] for frame in corpus}) >= 10, "the recording holds too few kinds of request"
    settings = {"auto.create.topics.enable": "false"}
    with Broker(settings=settings) as broker:
        canary = Canary(broker)
        canary.sing()
        attackers = [Attacker(broker, corpus, SEED + n) for n in range(2)]
        for attacker in attackers:
            attacker.attack(1000)
        before_mb = resident_mb(broker.pid)
        for _ in range(max(1, BROKEN_FRAMES // CANARY_EVERY)):
            threads = [
                threading.Thread(target=a.attack, args=(CANARY_EVERY // len(attackers),)) for a in attackers
            ]
            for thread in threads:
                thread.start()
            canary.sing()
            for thread in threads:
                thread.join()
            assert broker.running, f"seed {SEED}: the broker fell"
        for attacker in attackers:
            attacker.close()
            assert attacker.answered and attacker.closed_upon, "the frames were all of one kind"
        assert sum(a.answered + a.closed_upon for a in attackers) > 0.9 * BROKEN_FRAMES
        canary.sing()
        grown_mb = resident_mb(broker.pid) - before_mb
        assert grown_mb < GROWTH_MB_MAX, f"seed {SEED}: the broker grew by {grown_mb:.0f} MB"
