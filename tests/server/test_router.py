"""What becomes of a request whose handler fails, and of one that comes before the broker has started."""

import logging
from collections.abc import Coroutine
from typing import Any

import pytest

from headrace.base.errors import ErrorCode
from headrace.security.authorizer import ANONYMOUS, AllowAll
from headrace.server.context import Peer, RequestContext
from headrace.server.router import HELD_BYTES_MAX, NOT_READY, Router
from headrace.server.session import Exchange
from headrace.wire.apis import SUPPORTED, Api
from headrace.wire.messages import decode_response, encode_request


def _broken(*_: object) -> dict[str, Any]:
    raise ZeroDivisionError("what went wrong")


def _not_used(work: Coroutine[Any, Any, None]) -> None:
    raise AssertionError("no handler here waits")


class _Session:
    def __init__(self) -> None:
        self.aborted: list[str] = []

    def flush(self) -> None: ...

    def abort(self, why: str, context: RequestContext) -> None:
        self.aborted.append(why)


REQUEST = encode_request(Api.DESCRIBE_CLUSTER, 0, {})


def _answer(*_: object) -> dict[str, Any]:
    return {"controller_id": 7}


def _exchange(session: _Session) -> Exchange:
    context = RequestContext(Api.DESCRIBE_CLUSTER, 0, 7, "c", Peer(ANONYMOUS, "h", AllowAll(), 1), 0)
    return Exchange(session, context)  # type: ignore[arg-type]


def _starting() -> Router:
    router = Router(None, dict.fromkeys(SUPPORTED, _answer), {}, _not_used)
    router.hold()
    return router


def test_who_comes_before_the_broker_has_started_is_served_once_it_has() -> None:
    router, session = _starting(), _Session()
    frame = bytearray(REQUEST)
    early = _exchange(session)
    router.route(early, memoryview(frame), 0)
    frame[:] = b"\xff" * len(frame)  # the memory of a frame is used again
    assert not early.done and not session.aborted
    router.open()
    assert early.parts is not None
    reply = decode_response(Api.DESCRIBE_CLUSTER, 0, bytes(early.parts[1]), 0)  # type: ignore[arg-type]
    assert reply.controller_id == 7
    router.give_up()
    late = _exchange(session)
    router.route(late, memoryview(REQUEST), 0)
    assert late.done and not session.aborted


def test_who_has_waited_long_for_the_broker_to_start_is_turned_away() -> None:
    router, waiting, coming = _starting(), _Session(), _Session()
    router.route(_exchange(waiting), memoryview(REQUEST), 0)
    router.give_up()
    router.route(_exchange(coming), memoryview(REQUEST), 0)
    assert waiting.aborted == coming.aborted == [NOT_READY]


def test_what_waits_for_the_broker_to_start_is_bounded() -> None:
    router, small, large = _starting(), _Session(), _Session()
    router.route(_exchange(small), memoryview(REQUEST), 0)
    router.route(_exchange(large), memoryview(bytes(HELD_BYTES_MAX)), 0)
    assert not small.aborted
    assert large.aborted == [NOT_READY]


def test_a_handler_that_fails_leaves_a_trace_of_where_it_did(caplog: pytest.LogCaptureFixture) -> None:
    router = Router(None, dict.fromkeys(SUPPORTED, _broken), {}, _not_used)
    exchange = _exchange(_Session())
    logging.getLogger("headrace").propagate = True
    with caplog.at_level(logging.ERROR):
        router.route(exchange, memoryview(REQUEST), 0)
    assert exchange.parts is not None
    reply = decode_response(Api.DESCRIBE_CLUSTER, 0, bytes(exchange.parts[1]), 0)  # type: ignore[arg-type]
    assert reply.error_code == ErrorCode.UNKNOWN_SERVER_ERROR
    assert "ZeroDivisionError: what went wrong" in caplog.text
