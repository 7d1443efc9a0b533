"""What groups cost a broker: commits a second, heartbeats of many members, loading after a restart.

Requests come from connections of this process that send frames made beforehand and count what comes back, so that the
client costs little and is the same for every system. How groups change is measured in `group_changes`.
"""

import selectors
import socket
import struct
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from benchmarks.systems import System
from benchmarks.workloads import Numbers, Scale, topic
from headrace.wire.apis import Api
from headrace.wire.headers import encode_request_header, parse_response_header
from headrace.wire.messages import Message, decode_response, encode_request

COMMIT_CONNECTIONS = 20
COMMITS_AT_ONCE = 32
COMMIT_VERSION = 8
HEARTBEAT_GROUPS, GROUP_MEMBERS, HEARTBEAT_EVERY_S = 1000, 5, 3.0
LOADED_COMMITS, LOADED_PARTITIONS = 100_000, 1000
CREWS = 50
"""How many groups come together at once, on connections of their own."""
WAIT_S = 120.0
FIRST_DELAY_MS = "50"
HEARTBEAT_MS = "100"
SIZE = struct.Struct(">i")


def frame(api: Api, version: int, number: int, body: dict[str, object]) -> bytes:
    data = encode_request_header(api, version, number, "bench") + encode_request(api, version, body)
    return SIZE.pack(len(data)) + data


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
        came = self.socket.recv(1 << 16)
        if not came:
            raise ConnectionError("the broker closed the connection")
        received = self._received
        received += came
        at = last = count = 0
        end = len(received)
        while at + 4 <= end:
            (size,) = SIZE.unpack_from(received, at)
            if at + 4 + size > end:
                break
            last, at = at, at + 4 + size
            count += 1
        if count:
            self.last = bytes(received[last + 4 : at])
        del received[:at]
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


def commit_body(group: str, name: str, indexes: Iterable[int] = (0,), offset: int = 5) -> dict[str, object]:
    partitions = [
        {"partition_index": index, "committed_offset": offset, "committed_metadata": ""} for index in indexes
    ]
    return {
        "group_id": group,
        "generation_id_or_member_epoch": -1,
        "member_id": "",
        "topics": [{"name": name, "partitions": partitions}],
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
    groups = HEARTBEAT_GROUPS if scale.latency_s >= 10 else HEARTBEAT_GROUPS // 10
    probe = Connection(system.bootstrap)
    find_coordinator(probe, "bench")
    probe.socket.close()
    crews = [[Connection(system.bootstrap) for _ in range(GROUP_MEMBERS)] for _ in range(CREWS)]
    with ThreadPoolExecutor(CREWS) as pool:  # a group takes its time to come together: many at once
        made = list(pool.map(lambda crew: [_heartbeats_of(crew) for _ in range(groups // CREWS)], crews))
    rounds = [(crew, made[at][turn]) for turn in range(groups // CREWS) for at, crew in enumerate(crews)]
    before_s, begun_s, done = system.cpu_s(), time.monotonic(), 0
    while time.monotonic() < begun_s + scale.latency_s:
        for crew, frames in rounds:  # spread over the interval, as members of many processes are
            for connection, data in zip(crew, frames, strict=True):
                connection.socket.sendall(data)
            for connection in crew:
                done += connection.take()
            due_s = begun_s + HEARTBEAT_EVERY_S * (done // GROUP_MEMBERS + 1) / groups
            time.sleep(max(0.0, due_s - time.monotonic()))
    took_s = time.monotonic() - begun_s
    used_s = system.cpu_s() - before_s
    for crew in crews:
        for connection in crew:
            assert decode_response(Api.HEARTBEAT, 3, connection.last, 4).error_code == 0
            connection.socket.close()
    return {"heartbeats cores": used_s / took_s * HEARTBEAT_GROUPS / groups}


def _heartbeats_of(crew: list[Connection]) -> list[bytes]:
    """A new group with a member on each connection, and the heartbeat of each."""
    group = f"bench-heartbeats-{uuid.uuid4().hex[:8]}"
    return [
        frame(
            Api.HEARTBEAT,
            3,
            1,
            {"group_id": group, "generation_id": member.generation_id, "member_id": member.member_id},
        )
        for member in joined(crew, group)
    ]


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


def loading(system: System, scale: Scale) -> Numbers:
    """100 000 commits in one partition of the internal topic: from the restarted broker's port to the first answer."""
    group = f"bench-{uuid.uuid4().hex[:8]}"
    with topic(system, LOADED_PARTITIONS) as name:
        connection = Connection(system.bootstrap)
        find_coordinator(connection, group)
        for number in range(LOADED_COMMITS // LOADED_PARTITIONS):
            body = commit_body(group, name, range(LOADED_PARTITIONS), number)
            while connection.call(Api.OFFSET_COMMIT, COMMIT_VERSION, body).topics[0].partitions[0].error_code:
                time.sleep(0.1)
        connection.socket.close()
        system.stop()
        system.launch()
        connection = _connected(system.bootstrap)
        begun_s = time.monotonic()
        asked = {"group_id": group, "topics": [{"name": name, "partition_indexes": [0]}]}
        while (reply := connection.call(Api.OFFSET_FETCH, 7, asked)).error_code:
            assert time.monotonic() < begun_s + WAIT_S, f"not loaded: {reply.error_code}"
        took_s = time.monotonic() - begun_s
        connection.socket.close()
        committed = reply.topics[0].partitions[0].committed_offset
        assert committed == LOADED_COMMITS // LOADED_PARTITIONS - 1, committed
        system.wait()
    return {"100 000 commits loaded s": took_s}


def _connected(bootstrap: str) -> Connection:
    """A connection to a broker that is starting: made as soon as it takes one and answers on it."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        try:
            connection = Connection(bootstrap)
            connection.call(Api.API_VERSIONS, 0, {})
        except OSError:
            assert time.monotonic() < deadline_s, "the broker does not come back"
            time.sleep(0.002)
        else:
            return connection


def alone(work: Callable[[System, Scale], Numbers]) -> Callable[[type[System], Scale], Numbers]:
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
    "commits": alone(commits),
    "heartbeats": alone(heartbeats),
    "loading": alone(loading),
}
