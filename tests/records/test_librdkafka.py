"""Against librdkafka: batches made by its producer, for every compression.

The producer writes to the mock cluster that librdkafka carries within itself; a Fetch request made by hand reads the
batches back as the mock stored them. No broker of ours is involved, so what is read is librdkafka's work alone.
"""

import socket
import struct
from types import ModuleType

import pytest
from confluent_kafka import Producer

from headrace.records.batch import HEADER_SIZE, NO_PARTITION_LEADER_EPOCH, assign, crc_ok, parse_header
from headrace.records.builder import build_batch, iter_batches, iter_records
from headrace.records.compression import NAMES, decompress
from tests.records.test_codec import RecordInput

DEADLINE_S = 30
TOPIC = b"records"
FETCH, FETCH_VERSION = 1, 4

RECORDS: list[RecordInput] = [
    (1_700_000_000_000, b"key", b"value", ()),
    (1_700_000_000_005, None, b"no key", ()),
    (1_699_999_999_000, b"earlier", b"x" * 70_000, ()),
    (1_700_000_000_006, b"tombstone", None, ()),
    (
        1_700_000_000_007,
        b"",
        b"",
        (("name", b"value"), ("name", b""), ("null", None), ("\u00fc", b"\xff\x00")),
    ),
    *((1_700_000_000_100 + index, b"k%d" % index, b"text %d " % index * 50, ()) for index in range(500)),
]


def receive(connection: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        assert part, "the mock broker closed the connection"
        parts += part
    return parts


def fetch(host: str, port: int) -> bytes:
    """The records of partition 0, by one Fetch request of version 4 and nothing but struct."""
    body = struct.pack(">iiiib", -1, 1_000, 1, 1 << 28, 0)
    body += struct.pack(">ih", 1, len(TOPIC)) + TOPIC + struct.pack(">iiqi", 1, 0, 0, 1 << 28)
    request = struct.pack(">hhih", FETCH, FETCH_VERSION, 1, -1) + body
    with socket.create_connection((host, port), timeout=DEADLINE_S) as connection:
        connection.sendall(struct.pack(">i", len(request)) + request)
        (size,) = struct.unpack(">i", receive(connection, 4))
        reply = receive(connection, size)
    # correlation id, throttle time, one topic and its name, one partition: its number and error
    pos = 4 + 4 + 4 + 2 + len(TOPIC) + 4
    partition, error, _, _, aborted = struct.unpack_from(">ihqqi", reply, pos)
    assert (partition, error) == (0, 0)
    pos += 26 + 16 * max(aborted, 0)
    (length,) = struct.unpack_from(">i", reply, pos)
    return reply[pos + 4 : pos + 4 + length]


def produce(compression: str, *, idempotent: bool = False) -> bytes:
    """What librdkafka's producer made of RECORDS."""
    producer = Producer(
        {
            "bootstrap.servers": "ignored",
            "test.mock.num.brokers": 1,
            "compression.type": compression,
            "enable.idempotence": idempotent,
            "linger.ms": 100,
            "log_level": 0,
        }
    )
    for timestamp, key, value, headers in RECORDS:
        producer.produce(
            TOPIC.decode(), value, key, partition=0, timestamp=timestamp, headers=list(headers) or None
        )
    assert producer.flush(DEADLINE_S) == 0
    (broker,) = producer.list_topics(timeout=DEADLINE_S).brokers.values()
    return fetch(broker.host, broker.port)


@pytest.mark.parametrize("compression", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_batches_of_librdkafka_are_read_and_made_again(codec: ModuleType, compression: str) -> None:
    stored = produce(compression)
    found: list[RecordInput] = []
    for header, batch in iter_batches(stored):
        assert crc_ok(batch, 0, len(batch))
        records = iter_records(batch)
        found += [record[1:] for record in records]
        made = build_batch(
            [record[1:] for record in records],
            base_offset=header.base_offset,
            partition_leader_epoch=header.partition_leader_epoch,
        )
        inflated = decompress(header.compression, batch[HEADER_SIZE:])
        assert made[HEADER_SIZE:] == inflated
        if header.compression == 0:
            assert made == batch
        unlike = {"batch_length": 0, "crc": 0, "attributes": 0}
        assert parse_header(made)._replace(**unlike) == header._replace(**unlike)
        assert codec.check_records(inflated, header.record_count) in range(4)
    assert found == RECORDS
    assert {header.compression for header, _ in iter_batches(stored)} == {NAMES[compression]}
    assert codec.scan(stored, 0, len(stored)).position == len(stored)


def test_an_idempotent_batch_of_librdkafka_is_made_again(codec: ModuleType) -> None:
    stored = produce("none", idempotent=True)
    for header, batch in iter_batches(stored):
        assert header.has_producer_id
        made = bytearray(
            build_batch(
                [record[1:] for record in iter_records(batch)],
                producer_id=header.producer_id,
                producer_epoch=header.producer_epoch,
                base_sequence=header.base_sequence,
            )
        )
        assert parse_header(made).partition_leader_epoch == NO_PARTITION_LEADER_EPOCH
        assign(made, 0, header.base_offset, header.partition_leader_epoch)
        assert made == batch
        assert header.last_sequence == header.base_sequence + header.record_count - 1
