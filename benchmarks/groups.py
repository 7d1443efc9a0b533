"""What groups cost: commits a second, heartbeats of many members, and how long a rebalance takes.

Commits and heartbeats come from connections of this process that send frames made beforehand and count what comes back,
so that the client costs little and is the same for every system. The rebalance is confluent-kafka's.
"""

import selectors
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable

from benchmarks.systems import System
from benchmarks.workloads import QUIET, Numbers, Scale, topic
from headrace.wire.apis import Api
from headrace.wire.headers import encode_request_header, parse_response_header
from headrace.wire.messages import Message, decode_response, encode_request

COMMIT_CONNECTIONS = 20
COMMITS_AT_ONCE = 32
COMMIT_VERSION = 8
HEARTBEAT_GROUPS, GROUP_MEMBERS, HEARTBEAT_EVERY_S = 1000, 5, 3.0
REBALANCE_MEMBERS, REBALANCE_PARTITIONS = 20, 100
WAIT_S = 120.0
FIRST_DELAY_MS = "50"
HEARTBEAT_MS = (
    "100"  # of the rebalance: with the usual seconds between them, they would be all that is measured
)


def frame(api: Api, version: int, number: int, body: dict[str, object]) -> bytes:
    data = encode_request_header(api, version, number, "bench") + encode_request(api, version, body)
    return struct.pack(">i", len(data)) + data


class Connection:
    """Counts replies; keeps the bytes of the last one."""

    def __init__(self, bootstrap: str) -> None:
        host, _, port = bootstrap.split(",", maxsplit=1)[0].rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=WAIT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = bytearray()
        self.last = b""

    def take(self) -> int:
        """Receive what there is; how many replies that made whole."""
        self._received += self.socket.recv(1 << 16)
        at = count = 0
        while at + 4 <= len(self._received):
            (size,) = struct.unpack_from(">i", self._received, at)
            if at + 4 + size > len(self._received):
                break
            self.last = bytes(self._received[at + 4 : at + 4 + size])
            at += 4 + size
            count += 1
        del self._received[:at]
        return count

    def call(self, api: Api, version: int, body: dict[str, object]) -> Message:
        self.socket.sendall(frame(api, version, 1, body))
        while not self.take():
            pass
        _, at = parse_response_header(api, version, self.last)
        return decode_response(api, version, self.last, at)


def find_coordinator(connection: Connection, group: str) -> None:
    """Wait until a group can be asked for."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        found = connection.call(Api.FIND_COORDINATOR, 3, {"key": group, "key_type": 0})
        if found.error_code == 0:
            return
        assert time.monotonic() < deadline_s, f"no coordinator: {found.error_code}"
        time.sleep(0.1)


def commits(system: System, scale: Scale) -> Numbers:
    """Commits of one offset each, by groups of simple consumers, each on a connection of its own."""
    with topic(system, 1) as name:
        connections = [Connection(system.bootstrap) for _ in range(COMMIT_CONNECTIONS)]
        blobs = []
        for connection in connections:
            group = f"bench-{uuid.uuid4().hex[:8]}"
            find_coordinator(connection, group)
            body = commit_body(group, name)
            while connection.call(Api.OFFSET_COMMIT, COMMIT_VERSION, body).topics[0].partitions[0].error_code:
                time.sleep(0.1)  # the coordinator is loading
            blobs.append(frame(Api.OFFSET_COMMIT, COMMIT_VERSION, 1, body) * COMMITS_AT_ONCE)
        before_s = system.cpu_s()
        done, took_s = pipelined(connections, blobs, scale.latency_s)
        used_s = system.cpu_s() - before_s
        reply = decode_response(Api.OFFSET_COMMIT, COMMIT_VERSION, connections[0].last, 5)
        assert reply.topics[0].partitions[0].error_code == 0
        for connection in connections:
            connection.socket.close()
    return {"commits /s": done / took_s, "commits cpu us": used_s / done * 1e6}


def commit_body(group: str, name: str) -> dict[str, object]:
    partition = {"partition_index": 0, "committed_offset": 5, "committed_metadata": ""}
    return {
        "group_id": group,
        "generation_id_or_member_epoch": -1,
        "member_id": "",
        "topics": [{"name": name, "partitions": [partition]}],
    }


def pipelined(connections: list[Connection], blobs: list[bytes], seconds: float) -> tuple[int, float]:
    """Keep each connection busy with its frames for a while; replies counted, and how long it took."""
    waiting = dict.fromkeys(connections, COMMITS_AT_ONCE)
    done = 0
    with selectors.DefaultSelector() as selector:
        begun_s = time.monotonic()
        for connection, blob in zip(connections, blobs, strict=True):
            selector.register(connection.socket, selectors.EVENT_READ, (connection, blob))
            connection.socket.sendall(blob)
        while (now_s := time.monotonic()) < begun_s + seconds:
            for key, _ in selector.select(1.0):
                connection, blob = key.data
                count = connection.take()
                done += count
                waiting[connection] -= count
                if not waiting[connection]:
                    waiting[connection] = COMMITS_AT_ONCE
                    connection.socket.sendall(blob)
    return done, now_s - begun_s


def heartbeats(system: System, scale: Scale) -> Numbers:
    """1 000 classic groups of 5 members that heartbeat every 3 s: the share of a core that the broker uses."""
    connections = [Connection(system.bootstrap) for _ in range(GROUP_MEMBERS)]
    groups = HEARTBEAT_GROUPS if scale.latency_s >= 10 else HEARTBEAT_GROUPS // 10
    find_coordinator(connections[0], "bench")
    rounds: list[list[bytes]] = [[] for _ in connections]
    for number in range(groups):
        group = f"bench-heartbeats-{number}-{uuid.uuid4().hex[:6]}"
        for at, member in enumerate(joined(connections, group)):
            body = {"group_id": group, "generation_id": member.generation_id, "member_id": member.member_id}
            rounds[at].append(frame(Api.HEARTBEAT, 3, 1, body))
    before_s, begun_s, done = system.cpu_s(), time.monotonic(), 0
    while time.monotonic() < begun_s + scale.latency_s:
        for at in range(groups):  # spread over the interval, as members of many processes are
            for connection, frames in zip(connections, rounds, strict=True):
                connection.socket.sendall(frames[at])
            for connection in connections:
                done += connection.take()
            due_s = begun_s + HEARTBEAT_EVERY_S * (done // len(connections) + 1) / groups
            time.sleep(max(0.0, due_s - time.monotonic()))
    took_s = time.monotonic() - begun_s
    used_s = system.cpu_s() - before_s
    for connection in connections:
        connection.socket.close()
    return {"heartbeats cores": used_s / took_s * HEARTBEAT_GROUPS / groups}


def joined(connections: list[Connection], group: str) -> list[Message]:
    """A stable group with a member on each connection."""
    timeouts = {"session_timeout_ms": 60_000, "rebalance_timeout_ms": 60_000}
    protocols = {"protocol_type": "consumer", "protocols": [{"name": "range", "metadata": b"\0\0\0\0\0\0"}]}
    body: dict[str, object] = {"group_id": group, "member_id": "", **timeouts, **protocols}
    for connection in connections:
        connection.socket.sendall(frame(Api.JOIN_GROUP, 3, 1, body))
    members = []
    for connection in connections:
        while not connection.take():
            pass
        _, at = parse_response_header(Api.JOIN_GROUP, 3, connection.last)
        members.append(decode_response(Api.JOIN_GROUP, 3, connection.last, at))
        assert members[-1].error_code == 0, members[-1].error_code
    for connection, member in sorted(
        zip(connections, members, strict=True), key=lambda pair: pair[1].member_id == pair[1].leader
    ):
        sync = {"group_id": group, "generation_id": member.generation_id, "member_id": member.member_id}
        connection.socket.sendall(frame(Api.SYNC_GROUP, 3, 1, {**sync, "assignments": []}))
    for connection in connections:
        while not connection.take():
            pass
    return members


def rebalance(system: System, scale: Scale) -> Numbers:
    """Twenty consumers over a hundred partitions: from the leaving of one until the others have all of it."""
    with topic(system, REBALANCE_PARTITIONS) as name:
        numbers: Numbers = {}
        for protocol in ("classic", "consumer"):
            numbers[f"rebalance {protocol} s"] = _rebalance(system, name, protocol)
        return numbers


def _rebalance(system: System, name: str, protocol: str) -> float:
    from confluent_kafka import Consumer

    group = f"bench-{uuid.uuid4().hex[:8]}"
    config = {"bootstrap.servers": system.bootstrap, "group.id": group, "group.protocol": protocol, **QUIET}
    if protocol == "classic":
        config |= {
            "heartbeat.interval.ms": int(HEARTBEAT_MS),
            "partition.assignment.strategy": "cooperative-sticky",
        }
    stopping = threading.Event()
    held: dict[int, int] = {}
    leaving = threading.Event()

    def member(number: int) -> None:
        consumer = Consumer(config)
        consumer.subscribe([name])
        while not stopping.is_set() and not (number == 0 and leaving.is_set()):
            consumer.poll(0.02)
            held[number] = len(consumer.assignment())
        held.pop(number, None)
        consumer.close()

    threads = [threading.Thread(target=member, args=(number,)) for number in range(REBALANCE_MEMBERS)]

    def settled(members: int) -> bool:
        counts = list(held.values())
        return len(counts) == members and sum(counts) == REBALANCE_PARTITIONS and min(counts) > 0

    try:
        for thread in threads:
            thread.start()
        _until(lambda: settled(REBALANCE_MEMBERS))
        begun_s = time.monotonic()
        leaving.set()
        _until(lambda: settled(REBALANCE_MEMBERS - 1))
        return time.monotonic() - begun_s
    finally:
        stopping.set()
        for thread in threads:
            thread.join(WAIT_S)


def _until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline_s, "the group does not settle"
        time.sleep(0.005)


def _alone(work: Callable[[System, Scale], Numbers]) -> Callable[[type[System], Scale], Numbers]:
    """On a broker of its own, whose first rebalances wait only as long as members that come together need."""

    def run(kind: type[System], scale: Scale) -> Numbers:
        system = kind(
            group_initial_rebalance_delay_ms=FIRST_DELAY_MS,
            group_consumer_min_heartbeat_interval_ms=HEARTBEAT_MS,
            group_consumer_heartbeat_interval_ms=HEARTBEAT_MS,
        )
        try:
            system.start()
            return work(system, scale)
        finally:
            system.remove()

    return run


GROUPS: dict[str, Callable[[type[System], Scale], Numbers]] = {
    "commits": _alone(commits),
    "heartbeats": _alone(heartbeats),
    "rebalance": _alone(rebalance),
}
