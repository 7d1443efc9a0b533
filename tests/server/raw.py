"""A client that sends exactly what a test says, and reads exactly what comes back. Blocking, one connection."""

import socket
from struct import pack, unpack
from typing import Any, Self

from headrace.records.builder import build_batch
from headrace.wire.apis import Api
from headrace.wire.headers import encode_request_header, parse_response_header
from headrace.wire.messages import Message, decode_response, encode_request

TIMEOUT_S = 60.0


class RawClient:
    """One connection to a broker."""

    def __init__(self, host: str, port: int) -> None:
        self._sock = socket.create_connection((host, port), timeout=TIMEOUT_S)
        self._sent: list[tuple[int, int, int]] = []
        self._number = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._sock.close()

    def send_bytes(self, data: bytes) -> None:
        self._sock.sendall(data)

    def send(self, api: Api, version: int, body: dict[str, Any], *, answered: bool = True) -> int:
        """Send a request without waiting; its correlation id."""
        self._number += 1
        frame = encode_request_header(api, version, self._number, "raw") + encode_request(api, version, body)
        self._sock.sendall(pack(">i", len(frame)) + frame)
        if answered:
            self._sent.append((self._number, api, version))
        return self._number

    def receive_bytes(self) -> bytes:
        """One frame; EOFError when the broker has closed the connection."""
        return self._exactly(*unpack(">i", self._exactly(4)))

    def receive(self) -> Message:
        """The reply to the oldest request that has none yet."""
        number, api, version = self._sent.pop(0)
        frame = self.receive_bytes()
        correlation_id, at = parse_response_header(api, version, frame)
        assert correlation_id == number, "replies come in the order of their requests"
        return decode_response(api, version, frame, at)

    def call(self, api: Api, version: int, body: dict[str, Any]) -> Message:
        self.send(api, version, body)
        return self.receive()

    def closed(self) -> bool:
        """Whether the broker closes the connection before it sends anything more."""
        try:
            return self._sock.recv(1) == b""
        except ConnectionResetError:
            return True

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self._sock.recv(count - len(data))
            if not more:
                raise EOFError("the broker closed the connection")
            data += more
        return data

    # -- what tests ask most -----------------------------------------------------------------------------------------

    def create(self, name: str, partitions: int = 1, **config: str) -> None:
        settings = [{"name": key.replace("_", "."), "value": value} for key, value in config.items()]
        topic = {"name": name, "num_partitions": partitions, "replication_factor": 1, "configs": settings}
        reply = self.call(Api.CREATE_TOPICS, 5, {"topics": [topic], "timeout_ms": 10_000})
        assert [t.error_code for t in reply.topics] == [0], reply

    def produce(self, topic: str, records: bytes | None, partition: int = 0, acks: int = -1) -> Message:
        """Produce to one partition; the answer for it."""
        reply = self.call(Api.PRODUCE, 8, produce_body(topic, records, partition, acks))
        return reply.responses[0].partition_responses[0]

    def fetch(self, body: dict[str, Any], version: int = 11) -> Message:
        return self.call(Api.FETCH, version, body)


def produce_body(topic: str, records: bytes | None, partition: int = 0, acks: int = -1) -> dict[str, Any]:
    data = [{"name": topic, "partition_data": [{"index": partition, "records": records}]}]
    return {"acks": acks, "timeout_ms": 10_000, "topic_data": data}


def fetch_body(topic: str, offsets: dict[int, int], **fields: Any) -> dict[str, Any]:
    """A fetch of partitions by their offsets; further fields are the request's, `partition_max_bytes` each one's."""
    limit = fields.pop("partition_max_bytes", 1 << 20)
    partitions = [
        {"partition": index, "fetch_offset": offset, "partition_max_bytes": limit}
        for index, offset in offsets.items()
    ]
    body = {"replica_id": -1, "max_wait_ms": 0, "min_bytes": 1, "max_bytes": 1 << 20, "session_epoch": -1}
    return body | {"topics": [{"topic": topic, "partitions": partitions}]} | fields


def batch(*values: bytes, timestamp: int = 1_000_000, **fields: Any) -> bytes:
    return build_batch([(timestamp, b"key", value, ()) for value in values], **fields)
