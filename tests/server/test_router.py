"""What becomes of a request whose handler fails."""

import logging
from collections.abc import Coroutine
from typing import Any

import pytest

from headrace.base.errors import ErrorCode
from headrace.security.authorizer import ANONYMOUS, AllowAll
from headrace.server.context import Peer, RequestContext
from headrace.server.router import Router
from headrace.server.session import Exchange
from headrace.wire.apis import SUPPORTED, Api
from headrace.wire.messages import decode_response, encode_request


def _broken(*_: object) -> dict[str, Any]:
    raise ZeroDivisionError("what went wrong")


def _not_used(work: Coroutine[Any, Any, None]) -> None:
    raise AssertionError("no handler here waits")


class _Session:
    def flush(self) -> None: ...


def test_a_handler_that_fails_leaves_a_trace_of_where_it_did(caplog: pytest.LogCaptureFixture) -> None:
    router = Router(None, dict.fromkeys(SUPPORTED, _broken), {}, _not_used)
    context = RequestContext(Api.DESCRIBE_CLUSTER, 0, 7, "c", Peer(ANONYMOUS, "h", AllowAll(), 1), 0)
    exchange = Exchange(_Session(), context)  # type: ignore[arg-type]
    logging.getLogger("headrace").propagate = True
    with caplog.at_level(logging.ERROR):
        router.route(exchange, memoryview(encode_request(Api.DESCRIBE_CLUSTER, 0, {})), 0)
    assert exchange.parts is not None
    reply = decode_response(Api.DESCRIBE_CLUSTER, 0, bytes(exchange.parts[1]), 0)  # type: ignore[arg-type]
    assert reply.error_code == ErrorCode.UNKNOWN_SERVER_ERROR
    assert "ZeroDivisionError: what went wrong" in caplog.text
