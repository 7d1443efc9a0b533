"""A broker that reads requests, answers them and stores nothing: how fast the client alone can be on this machine.

`python -m benchmarks.sink PORT` serves ApiVersions, Metadata (every topic exists, with one partition) and Produce, a
thread a connection, one receive a frame. Whatever a real broker does comes on top of this, on the same processors, so
no broker can be faster than the figure a client reaches here.
"""

import socket
import struct
import sys
import threading
from typing import Any

from benchmarks.systems import Headrace
from headrace.wire.apis import SUPPORTED, Api
from headrace.wire.headers import encode_response_header, parse_request_header
from headrace.wire.messages import decode_request, encode_response
from headrace.wire.produce import ProduceResult, decode_produce, encode_produce_reply

FRAME_BYTES_MAX = 16 * 1024 * 1024
NODE = 1
TOPIC_ID = b"\x01" * 16
_SIZE = struct.Struct(">i")


class Sink(Headrace):
    """The process, as a system to be measured beside the real ones. No topics are made in it."""

    name = "Sink"
    keeps_topics = False
    workloads = frozenset({"produce", "produce-java"})

    def arguments(self) -> list[str]:
        return [sys.executable, "-m", "benchmarks.sink", str(self.port)]


def answer(port: int, frame: memoryview) -> bytes:
    """The reply to one request, with its size before it."""
    header = parse_request_header(frame)
    api, version = header.api, header.version
    if api == Api.PRODUCE:
        request = decode_produce(version, frame, header.body)
        results = [
            (t, [ProduceResult(p.partition, 0, 0, -1, 0) for p in t.partitions]) for t in request.topics
        ]
        body = encode_produce_reply(version, results, 0)
    elif api == Api.API_VERSIONS:
        keys = [{"api_key": k, "min_version": v[0], "max_version": v[1]} for k, v in SUPPORTED.items()]
        body = encode_response(api, version, {"api_keys": keys})
    elif api == Api.METADATA:
        asked = decode_request(api, version, bytes(frame[header.body :])).topics or []
        body = encode_response(api, version, metadata(port, [topic.name for topic in asked]))
    else:
        raise ConnectionError(f"API {api} is not served here")
    head = encode_response_header(api, version, header.correlation_id)
    return _SIZE.pack(len(head) + len(body)) + head + body


def metadata(port: int, names: list[str]) -> dict[str, Any]:
    partition = {"partition_index": 0, "leader_id": NODE, "replica_nodes": [NODE], "isr_nodes": [NODE]}
    return {
        "brokers": [{"node_id": NODE, "host": "127.0.0.1", "port": port}],
        "cluster_id": "sink",
        "controller_id": NODE,
        "topics": [{"name": n, "topic_id": TOPIC_ID, "partitions": [partition]} for n in names],
    }


def serve(sock: socket.socket, port: int) -> None:
    memory = memoryview(bytearray(FRAME_BYTES_MAX))

    def receive(size: int) -> None:
        if sock.recv_into(memory, size, socket.MSG_WAITALL) < size:
            raise ConnectionError("closed")

    with sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while True:
                receive(_SIZE.size)
                (size,) = _SIZE.unpack_from(memory)
                receive(size)
                sock.sendall(answer(port, memory[:size]))
        except OSError:
            return


def main() -> None:
    port = int(sys.argv[1])
    with socket.create_server(("127.0.0.1", port)) as listening:
        while True:
            sock, _ = listening.accept()
            threading.Thread(target=serve, args=(sock, port), daemon=True).start()


if __name__ == "__main__":
    main()
