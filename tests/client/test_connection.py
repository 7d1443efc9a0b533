"""One connection: answers matched in order, every request ended, wrong peers named."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from headrace.client.connection import Connection
from headrace.client.errors import Disconnected, NotKafka, RequestTimedOut, Unsupported
from headrace.client.transport import socket_connector
from headrace.wire.apis import Api
from headrace.wire.headers import encode_response_header, parse_request_header
from headrace.wire.messages import encode_response

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def connected_to(
    serve: Serve, body: Callable[[Connection], Awaitable[None]], timeout_ms: int = 5_000
) -> None:
    """Run `body` with a connection (not opened) to a server that does what `serve` does."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    connection = Connection(
        "127.0.0.1",
        port,
        client_id="test",
        connector=socket_connector(timeout_ms=5_000),
        timeout_ms=timeout_ms,
    )
    try:
        await body(connection)
    finally:
        connection.close()
        server.close()
        await server.wait_closed()


async def read_request(reader: asyncio.StreamReader) -> tuple[int, int, int]:
    """The API, version and correlation id of the next request."""
    frame = await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
    head = parse_request_header(frame)
    return head.api, head.version, head.correlation_id


def answer(api: int, version: int, correlation_id: int, body: dict[str, object]) -> bytes:
    payload = encode_response_header(api, version, correlation_id) + encode_response(api, version, body)
    return len(payload).to_bytes(4, "big") + payload


VERSIONS = {
    "error_code": 0,
    "api_keys": [
        {"api_key": 18, "min_version": 0, "max_version": 3},
        {"api_key": 3, "min_version": 0, "max_version": 9},
        {"api_key": 0, "min_version": 90, "max_version": 99},
    ],
}


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(answer(*await read_request(reader), VERSIONS))


def test_versions_are_negotiated_and_a_missing_one_is_named() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greet(reader, writer)
        await reader.read()

    async def body(connection: Connection) -> None:
        await connection.open()
        assert connection.version(Api.METADATA) == 9
        assert connection.version(Api.METADATA, highest=4) == 4
        with pytest.raises(Unsupported, match="offers PRODUCE in versions 90 to 99, this client speaks"):
            connection.version(Api.PRODUCE)
        with pytest.raises(Unsupported, match="does not offer FETCH"):
            connection.request(Api.FETCH, {})

    asyncio.run(connected_to(serve, body))


def test_a_broker_that_knows_only_old_apiversions_is_asked_again() -> None:
    asked: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        api, version, correlation_id = await read_request(reader)
        asked.append(version)
        refusal = {"error_code": 35, "api_keys": [{"api_key": 18, "min_version": 0, "max_version": 2}]}
        writer.write(answer(api, 0, correlation_id, refusal))
        api, version, correlation_id = await read_request(reader)
        asked.append(version)
        writer.write(answer(api, version, correlation_id, VERSIONS))
        await reader.read()

    async def body(connection: Connection) -> None:
        await connection.open()
        assert connection.usable

    asyncio.run(connected_to(serve, body))
    assert asked == [3, 2]


def test_requests_are_pipelined_and_answered_in_order() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greet(reader, writer)
        requests = [await read_request(reader) for _ in range(20)]  # all of them before the first answer
        for number, request in enumerate(requests):
            writer.write(answer(*request, {"brokers": [], "topics": [], "cluster_id": str(number)}))
        await reader.read()

    async def body(connection: Connection) -> None:
        await connection.open()
        replies = [connection.request(Api.METADATA, {"topics": []}) for _ in range(20)]
        assert [(await reply).cluster_id for reply in replies] == [str(number) for number in range(20)]

    asyncio.run(connected_to(serve, body))


def test_a_lost_connection_fails_everything_that_waits() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greet(reader, writer)
        await read_request(reader)

    async def body(connection: Connection) -> None:
        await connection.open()
        waiting = [connection.request(Api.METADATA, {"topics": []}) for _ in range(3)]
        for future in waiting:
            with pytest.raises(Disconnected, match="was lost"):
                await future
        with pytest.raises(Disconnected):
            connection.request(Api.METADATA, {"topics": []})

    asyncio.run(connected_to(serve, body))


def test_a_request_that_times_out_drops_the_connection_and_those_behind_it() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greet(reader, writer)
        await reader.read()

    async def body(connection: Connection) -> None:
        await connection.open()
        first = connection.request(Api.METADATA, {"topics": []}, timeout_ms=50)
        second = connection.request(Api.METADATA, {"topics": []})
        with pytest.raises(RequestTimedOut, match="did not answer METADATA within 50 ms"):
            await first
        with pytest.raises(Disconnected):
            await second
        assert not connection.usable

    asyncio.run(connected_to(serve, body))


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\x00\x00\x00\x04\x00\x00\x00\x63",  # a frame, but of another request
        b"\x00\x00\x00\x02\x00\x01",  # too short for a header
        b"\x00\x00\x00\x06\x00\x00\x00\x01\x00\x00",  # cut short in the body
    ],
)
def test_what_is_not_kafka_is_called_so(reply: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(reply)
        await reader.read()

    async def body(connection: Connection) -> None:
        with pytest.raises(NotKafka):
            await connection.open()

    asyncio.run(connected_to(serve, body))


def test_a_silent_server_is_not_waited_for_longer_than_the_timeout() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def body(connection: Connection) -> None:
        with pytest.raises(RequestTimedOut, match="did not answer within 100 ms"):
            await connection.open()

    asyncio.run(connected_to(serve, body, timeout_ms=100))


def test_whoever_asks_hears_once_and_a_fault_of_theirs_keeps_nobody_from_an_answer() -> None:
    async def body(connection: Connection) -> None:
        faults: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context["message"]))
        await connection.open()
        heard: list[tuple[object, BaseException | None]] = []

        def hear(reply: object, error: BaseException | None) -> None:
            heard.append((reply, error))
            if len(heard) == 1:
                raise RuntimeError("a fault of whoever asked")

        connection.ask(Api.METADATA, {"topics": []}, hear, timeout_ms=50)
        connection.ask(Api.METADATA, {"topics": []}, hear, timeout_ms=60_000)
        await connection.closed.wait()
        assert [reply for reply, _ in heard] == [None, None]
        assert [type(error) for _, error in heard] == [RequestTimedOut, Disconnected]
        assert faults == ["an answer to METADATA could not be dealt with"]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greet(reader, writer)
        await reader.read()

    asyncio.run(connected_to(serve, body))


def test_an_answer_nobody_asked_for_ends_the_connection() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greet(reader, writer)
        writer.write(b"\x00\x00\x00\x04\x00\x00\x00\x09")
        await reader.read()

    async def body(connection: Connection) -> None:
        await connection.open()
        async with asyncio.timeout(30):
            await connection.closed.wait()
        assert not connection.usable

    asyncio.run(connected_to(serve, body))


def test_a_refused_connection_says_where_and_why() -> None:
    async def body() -> None:
        connection = Connection(
            "127.0.0.1", 1, client_id="x", connector=socket_connector(timeout_ms=5_000), timeout_ms=5_000
        )
        with pytest.raises(
            Disconnected, match=r"cannot connect to 127\.0\.0\.1:1: connection refused"
        ) as caught:
            await connection.open()
        assert "headrace serve" in caught.value.hint

    asyncio.run(body())
