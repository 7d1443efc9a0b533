"""Cables between brokers: who is cut off from whom, and what becomes of what was on its way."""

import gc
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from headrace.testing.ports import free_ports
from headrace.testing.proxy import CLIENTS, Cables

DEADLINE_S = 60.0


def frame(client_id: bytes, body: bytes = b"") -> bytes:
    head = struct.pack(">hhih", 18, 0, 1, len(client_id)) + client_id + body
    return struct.pack(">i", len(head)) + head


NODE_2 = frame(b"headrace-node-2")
CLIENT = frame(b"rdkafka")


@contextmanager
def broker_behind_cables() -> Iterator[tuple[socket.socket, Cables, int]]:
    port, target = free_ports(2)
    with socket.create_server(("127.0.0.1", target)) as broker:
        broker.settimeout(DEADLINE_S)
        cables = Cables({1: port}, {1: target})
        try:
            yield broker, cables, port
        finally:
            cables.close()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)


def received(sock: socket.socket, count: int) -> bytes:
    got = b""
    while len(got) < count:
        chunk = sock.recv(count - len(got))
        assert chunk, "the connection ended"
        got += chunk
    return got


def accepted(broker: socket.socket) -> socket.socket:
    sock, _ = broker.accept()
    sock.settimeout(DEADLINE_S)
    return sock


def test_bytes_go_both_ways_and_the_end_of_a_connection_too() -> None:
    with broker_behind_cables() as (broker, _, port):
        with connect(port) as client:
            client.sendall(CLIENT)
            served = accepted(broker)
            assert received(served, len(CLIENT)) == CLIENT
            served.sendall(b"reply")
            assert received(client, 5) == b"reply"
        with served, pytest.raises(ConnectionResetError):
            received(served, 1)


def test_a_cut_node_is_held_up_while_clients_pass_and_its_bytes_arrive_when_mended() -> None:
    with broker_behind_cables() as (broker, cables, port):
        cables.cut([(2, 1)])
        with connect(port) as node, connect(port) as client:
            node.sendall(NODE_2)
            client.sendall(CLIENT)
            with accepted(broker) as served:  # only the client comes through
                assert received(served, len(CLIENT)) == CLIENT
            cables.mend()
            with accepted(broker) as served:
                assert received(served, len(NODE_2)) == NODE_2


def test_one_direction_can_be_cut_alone() -> None:
    with broker_behind_cables() as (broker, cables, port), connect(port) as node:
        node.sendall(NODE_2)
        with accepted(broker) as served:
            received(served, len(NODE_2))
            cables.cut([(1, 2)])
            served.sendall(b"held")
            node.sendall(b"through")
            assert received(served, 7) == b"through"
            node.settimeout(0.1)
            with pytest.raises(TimeoutError):
                node.recv(1)
            node.settimeout(DEADLINE_S)
            cables.mend([(1, 2)])
            assert received(node, 4) == b"held"


def test_clients_can_be_cut_off_while_nodes_pass() -> None:
    with broker_behind_cables() as (broker, cables, port):
        cables.cut([(CLIENTS, 1)])
        with connect(port) as client, connect(port) as node:
            client.sendall(CLIENT)
            node.sendall(NODE_2)
            with accepted(broker) as served:
                assert received(served, len(NODE_2)) == NODE_2


def test_a_broker_that_is_gone_resets_connections() -> None:
    with broker_behind_cables() as (broker, _, port):
        broker.close()
        with connect(port) as client:
            client.sendall(CLIENT)
            with pytest.raises(ConnectionResetError):
                received(client, 1)


def test_connections_made_in_the_moment_of_closing_are_closed_too() -> None:
    for _ in range(30):
        with broker_behind_cables() as (_, cables, port):
            clients = [connect(port) for _ in range(4)]
            cables.close()
        for client in clients:
            with client:
                assert ended(client)
    gc.collect()  # a socket that was forgotten complains here, and fails the test


def ended(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True
