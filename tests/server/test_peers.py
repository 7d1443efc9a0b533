"""Links between nodes: replies in order, loss told apart from death, connected again by themselves."""

import asyncio
from collections.abc import Awaitable, Callable
from struct import Struct

import pytest

from headrace.base.clock import SystemClock
from headrace.base.errors import ErrorCode, KafkaError
from headrace.server import peer_link
from headrace.server.peers import Lane, Peers
from headrace.testing.ports import free_ports
from headrace.wire.apis import PRIVATE_RAFT, Api
from headrace.wire.headers import encode_response_header, parse_request_header
from headrace.wire.messages import encode_response

DEADLINE_S = 60.0
SIZE = Struct(">i")


class Node:
    """A listening socket that answers ApiVersions, echoes private requests, and notes posts."""

    def __init__(self) -> None:
        self.server: asyncio.Server | None = None
        self.port = 0
        self.writers: list[asyncio.StreamWriter] = []
        self.posted: list[bytes] = []
        self.answers = True

    async def start(self) -> None:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self.server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self.server is not None
        self.server.close()
        for writer in self.writers:
            writer.close()
        self.writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        while True:
            try:
                (size,) = SIZE.unpack(await reader.readexactly(4))
                frame = await reader.readexactly(size)
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            header = parse_request_header(frame)
            if header.correlation_id == 0:
                self.posted.append(frame[header.body :])
                continue
            if not self.answers:
                continue
            body = frame[header.body :]
            if header.api == Api.API_VERSIONS:
                body = encode_response(header.api, header.version, {"error_code": 0})
            head = encode_response_header(header.api, header.version, header.correlation_id)
            writer.write(SIZE.pack(len(head) + len(body)) + head + body)


async def until(condition: Callable[[], bool]) -> None:
    async def wait() -> None:
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)

    await asyncio.wait_for(wait(), DEADLINE_S)


def with_node(scenario: Callable[[Node, Peers], Awaitable[None]]) -> None:
    async def run() -> None:
        node = Node()
        await node.start()
        peers = Peers(asyncio.get_running_loop(), SystemClock(), 1, {2: ("127.0.0.1", node.port)})
        try:
            await asyncio.wait_for(scenario(node, peers), DEADLINE_S)
        finally:
            peers.close()
            await node.stop()

    asyncio.run(run())


def test_requests_are_answered_in_order_small_and_large() -> None:
    async def scenario(node: Node, peers: Peers) -> None:
        link = peers.link(2)
        bodies = [b"a", bytes(range(256)) * 20_000, b"", b"b" * 70_000]
        replies = [link.request_raw(PRIVATE_RAFT, 0, [body[:100], body[100:]]) for body in bodies]
        versions = link.request(Api.API_VERSIONS, 3, {})
        assert [bytes(await reply) for reply in replies] == bodies
        assert (await versions).error_code == 0

    with_node(scenario)


def test_posts_have_no_reply_and_are_dropped_while_the_link_is_down() -> None:
    async def scenario(node: Node, peers: Peers) -> None:
        link = peers.link(2, Lane.RAFT)
        assert not link.post(PRIVATE_RAFT, 0, b"lost")
        await until(lambda: link.up)
        assert link.post(PRIVATE_RAFT, 0, b"first")
        assert link.post(PRIVATE_RAFT, 0, b"second")
        await until(lambda: len(node.posted) == 2)
        assert node.posted == [b"first", b"second"]

    with_node(scenario)


def test_a_node_that_stopped_listening_is_told_as_gone_and_found_again_when_it_is_back() -> None:
    async def scenario(node: Node, peers: Peers) -> None:
        seen: list[str] = []
        peers.on_up.append(lambda node_id: seen.append(f"up {node_id}"))
        peers.on_down.append(lambda node_id, gone: seen.append(f"{'gone' if gone else 'down'} {node_id}"))
        link = peers.link(2)
        await until(lambda: link.up)
        node.answers = False
        unanswered = link.request_raw(PRIVATE_RAFT, 0, b"x")
        await until(lambda: bool(node.writers))
        await node.stop()
        with pytest.raises(KafkaError) as failed:
            await unanswered
        assert failed.value.code is ErrorCode.NETWORK_EXCEPTION
        await until(lambda: "gone 2" in seen)
        node.answers = True
        await node.start()
        await until(lambda: link.up)
        assert bytes(await link.request_raw(PRIVATE_RAFT, 0, b"again")) == b"again"
        assert seen.count("up 2") == 2

    with_node(scenario)


def test_a_connection_that_is_only_closed_is_not_told_as_gone() -> None:
    async def scenario(node: Node, peers: Peers) -> None:
        seen: list[bool] = []
        ups: list[int] = []
        peers.on_down.append(lambda node_id, gone: seen.append(gone))
        peers.on_up.append(ups.append)
        peers.link(2)
        await until(lambda: len(ups) == 1 and bool(node.writers))
        node.writers.pop().close()
        await until(lambda: len(ups) == 2)
        assert seen == [False]

    with_node(scenario)


def test_a_request_that_is_never_answered_times_out_and_the_link_is_made_anew() -> None:
    async def scenario(node: Node, peers: Peers) -> None:
        node.answers = False
        ups: list[int] = []
        peers.on_up.append(ups.append)
        with pytest.raises(KafkaError) as failed:
            await peers.link(2).request_raw(PRIVATE_RAFT, 0, b"x", timeout_ms=1)
        assert failed.value.code is ErrorCode.REQUEST_TIMED_OUT
        node.answers = True
        assert bytes(await peers.link(2).request_raw(PRIVATE_RAFT, 0, b"y")) == b"y"

    with_node(scenario)


def test_a_broker_that_moved_is_reached_where_the_image_says() -> None:
    async def scenario(node: Node, peers: Peers) -> None:
        other = Node()
        await other.start()
        try:
            await until(lambda: peers.link(2).up)
            peers.set_brokers({2: ("127.0.0.1", other.port)}, newer=[2])
            assert bytes(await peers.link(2).request_raw(PRIVATE_RAFT, 0, b"x")) == b"x"
            assert len(other.writers) == 1
            peers.set_brokers({3: ("127.0.0.1", other.port)})
            assert peers.address(2) == ("127.0.0.1", node.port)
        finally:
            await other.stop()

    with_node(scenario)


def test_a_voter_that_moved_while_all_were_down_is_found_where_the_setting_says() -> None:
    async def scenario(node: Node, peers: Peers) -> None:
        other = Node()  # whoever has the port now under which the voter was registered
        await other.start()
        try:
            peers.set_brokers({2: ("127.0.0.1", other.port)})
            for lane in (Lane.RAFT, Lane.CONTROL):
                assert bytes(await peers.link(2, lane).request_raw(PRIVATE_RAFT, 0, b"x")) == b"x"
            assert (len(node.writers), len(other.writers)) == (2, 0)
            peers.set_brokers({2: ("127.0.0.1", node.port)}, newer=[2])
            assert peers.link(2, Lane.RAFT).up, "it is where the link is already"
            assert bytes(await peers.link(2, Lane.FETCH).request_raw(PRIVATE_RAFT, 0, b"x")) == b"x"
        finally:
            await other.stop()

    with_node(scenario)


def test_a_voter_that_is_not_where_the_setting_says_is_found_where_it_registered_and_not_told_as_gone() -> (
    None
):
    async def scenario(node: Node, _: Peers) -> None:
        seen: list[bool] = []
        setting = {2: ("127.0.0.1", free_ports(1)[0])}
        peers = Peers(asyncio.get_running_loop(), SystemClock(), 1, setting)
        peers.on_down.append(lambda node_id, gone: seen.append(gone))
        try:
            link = peers.link(2, Lane.RAFT)
            await until(lambda: True in seen)
            peers.set_brokers({2: ("127.0.0.1", node.port)})
            seen.clear()
            await until(lambda: link.up and bool(node.writers))
            assert True not in seen
            await node.stop()
            await until(lambda: True in seen)
            await node.start()
            await until(lambda: link.up)
        finally:
            peers.close()

    with_node(scenario)


def test_a_stranger_where_a_voter_was_is_left_when_the_voter_answers_where_the_setting_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(stranger: Node, _: Peers) -> None:
        late = Node()
        (late.port,) = free_ports(1)
        peers = Peers(asyncio.get_running_loop(), SystemClock(), 1, {2: ("127.0.0.1", late.port)})
        peers.set_brokers({2: ("127.0.0.1", stranger.port)})
        try:
            link = peers.link(2, Lane.RAFT)
            await until(lambda: link.up and bool(stranger.writers))
            await late.start()
            await until(lambda: bool(late.writers) and link.up)
            await until(lambda: link.post(PRIVATE_RAFT, 0, b"x") and bool(late.posted))
        finally:
            peers.close()
            await late.stop()

    monkeypatch.setattr(peer_link, "LOOK_S", 0.01)
    with_node(scenario)


def test_voters_of_the_log_are_found_though_no_setting_tells_of_them() -> None:
    async def scenario(node: Node, peers: Peers) -> None:
        link = peers.link(4, Lane.RAFT)
        peers.set_voters({4: ("127.0.0.1", node.port)})
        peers.set_brokers({})
        assert bytes(await link.request_raw(PRIVATE_RAFT, 0, b"x")) == b"x"

    with_node(scenario)


def test_a_node_without_an_address_cannot_be_asked() -> None:
    async def scenario(node: Node, peers: Peers) -> None:
        with pytest.raises(KafkaError) as failed:
            await peers.link(9).request(Api.API_VERSIONS, 3, {})
        assert failed.value.code is ErrorCode.NETWORK_EXCEPTION

    with_node(scenario)
