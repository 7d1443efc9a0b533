"""From a request to the handler of its API, and from what that returns to a reply.

Two kinds of handler. A *direct* one (Produce, Fetch) takes the frame as it is and answers the exchange itself, at
once or later. The others take a decoded `Message` and return the reply's body, or an awaitable of it; their message
is decoded from a copy, because the frame's memory is used again as soon as the router returns.

Requests that cannot be served: an unknown version of ApiVersions is answered with UNSUPPORTED_VERSION in a body of
version 0, with the versions of ApiVersions alone; any other unknown API or version closes the connection. As in Kafka.

While the broker starts, requests of clients wait for it: one that is turned away comes back after a second or more, and
a start takes less. They are few and small, or their connections are closed.
"""

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeAlias

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.log import correlation, get_logger
from headrace.security.authorizer import Operation, ResourceType
from headrace.server.context import RequestContext
from headrace.server.forwarding import Forwarding, refusal
from headrace.server.session import Exchange
from headrace.wire.apis import BETWEEN_BROKERS, SUPPORTED, Api, is_supported
from headrace.wire.messages import Message, decode_request, encode_response
from headrace.wire.primitives import Malformed

Body: TypeAlias = Mapping[str, Any]
Handler: TypeAlias = Callable[[Any, RequestContext, Message], "Body | Awaitable[Body]"]
DirectHandler: TypeAlias = Callable[[Any, Exchange, memoryview, int], None]
Spawn: TypeAlias = Callable[[Coroutine[Any, Any, None]], None]

NOT_READY = "this broker is not ready yet"
HELD_BYTES_MAX = 1 << 20
"""Of requests that wait for the broker to start; a connection without its first answer has sent a few hundred bytes."""

logger = get_logger(__name__)


class Router:
    """The table of handlers of one broker."""

    def __init__(
        self,
        broker: object,
        handlers: Mapping[Api, Handler],
        direct: Mapping[Api, DirectHandler],
        spawn: Spawn,
        private: Mapping[int, DirectHandler] | None = None,
        forwarding: Forwarding | None = None,
    ) -> None:
        """`private` are the APIs between nodes: known by their key alone, refused to those who may not act for one."""
        missing = SUPPORTED.keys() - handlers.keys() - direct.keys()
        assert not missing, f"advertised but not served: {sorted(api.name for api in missing)}"
        self._broker = broker
        self._handlers = handlers
        self._direct = {api: handler for api, handler in direct.items() if api not in BETWEEN_BROKERS}
        self._spawn = spawn
        self._private = private or {}
        self._forwarding = forwarding
        self._ready = True
        self._holding = False
        self._held: list[tuple[Exchange, bytes, int]] = []
        self._held_bytes = 0

    def hold(self) -> None:
        """Let clients wait: the broker is about to start. Other nodes are always served."""
        self._ready, self._holding = False, True

    def open(self) -> None:
        """Serve clients from now on, those first who wait."""
        self._ready, self._holding = True, False
        for exchange, frame, body in self._take_held():
            try:
                self.route(exchange, memoryview(frame), body)
            except Malformed as error:
                exchange.drop(str(error))

    def give_up(self) -> None:
        """Turn clients away from now on, if the broker has not started by now: they may find another."""
        self._holding = False
        for exchange, _, _ in self._take_held():
            exchange.drop(NOT_READY)

    def _take_held(self) -> list[tuple[Exchange, bytes, int]]:
        held, self._held, self._held_bytes = self._held, [], 0
        return held

    def _not_ready(self, exchange: Exchange, frame: memoryview, body: int) -> None:
        if not self._holding or self._held_bytes + len(frame) > HELD_BYTES_MAX:
            exchange.drop(NOT_READY)
            return
        self._held_bytes += len(frame)
        self._held.append((exchange, bytes(frame), body))

    def route(self, exchange: Exchange, frame: memoryview, body: int) -> None:
        """Serve one request. Raises Malformed when its bytes are not what they claim."""
        context = exchange.context
        api, version = context.api, context.version
        correlation.set(context)
        direct = self._direct.get(api) if self._ready else None  # type: ignore[call-overload]
        if direct is None or not is_supported(api, version):
            if private := self._private.get(api):
                if context.authorize(Operation.CLUSTER_ACTION, ResourceType.CLUSTER):
                    private(self._broker, exchange, frame, body)
                else:
                    exchange.drop(f"{context.principal} may not act as a node of the cluster")
                return
            if not self._ready and api not in BETWEEN_BROKERS:
                self._not_ready(exchange, frame, body)
                return
            if api not in self._handlers or not is_supported(api, version):
                self._refuse(exchange)
                return
        try:
            if direct is not None:
                direct(self._broker, exchange, frame, body)
                return
            request = decode_request(api, version, bytes(frame[body:]))
            if (forwarding := self._forwarding) is not None and forwarding.takes(api, request):
                self._spawn(self._forward(exchange, request, bytes(frame)))
                return
            result = self._handlers[api](self._broker, context, request)  # type: ignore[index]
            if isinstance(result, Mapping):
                exchange.reply(encode_response(api, version, result))
            else:
                self._spawn(self._finish(exchange, result))
        except Malformed:
            raise
        except KafkaError as error:
            self._fail(exchange, error)
        except Exception as error:
            self._crash(exchange, error)

    async def _forward(self, exchange: Exchange, request: Message, frame: bytes) -> None:
        assert self._forwarding is not None
        correlation.set(exchange.context)
        try:
            exchange.reply(await self._forwarding.forward(exchange.context, request, frame))
        except KafkaError as error:
            self._fail(exchange, error)
        except Exception as error:
            self._crash(exchange, error)

    async def _finish(self, exchange: Exchange, result: Awaitable[Body]) -> None:
        correlation.set(exchange.context)
        try:
            exchange.reply(encode_response(exchange.context.api, exchange.context.version, await result))
        except KafkaError as error:
            self._fail(exchange, error)
        except Exception as error:
            self._crash(exchange, error)

    def _refuse(self, exchange: Exchange) -> None:
        context = exchange.context
        if context.api == Api.API_VERSIONS:
            context.version = 0
            first, last = SUPPORTED[Api.API_VERSIONS]
            keys = [{"api_key": Api.API_VERSIONS, "min_version": first, "max_version": last}]
            body = {"error_code": ErrorCode.UNSUPPORTED_VERSION, "api_keys": keys}
            exchange.reply(encode_response(Api.API_VERSIONS, 0, body))
            return
        exchange.drop(f"API {context.api} version {context.version} is not served")

    def _fail(self, exchange: Exchange, error: KafkaError) -> None:
        """Answer a whole request with one error, where its reply has a place for one."""
        context = exchange.context
        body = refusal(context.api, error)
        if body is None or exchange.done:
            exchange.drop(f"{error.code.name}: {error.message}")
            return
        exchange.reply(encode_response(context.api, context.version, body))

    def _crash(self, exchange: Exchange, error: Exception) -> None:
        """A handler raised what it should not: log all of it, tell the client, serve on."""
        context = exchange.context
        logger.error(
            "request failed",
            exc_info=error,
            extra={"fields": {"api": context.api, "version": context.version, "request": context}},
        )
        self._fail(
            exchange,
            KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, "the broker failed on this request; see its log"),
        )
