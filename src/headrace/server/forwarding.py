"""Changes that a client asks of this broker and only the active controller may make: sent on, answered when seen.

Owns the way to the active controller, whoever that is by the time. Invariants: a client is answered only when the image
of the broker it asked has what the answer is about, so that it reads its own writes there; a change that finds no
controller in time is decided here, where nothing can be committed, so that each of its parts is refused in its own
place of the reply. A request is sent again when it may have been lost, so the second of two may find it done; one that
the controller failed on is not, and whatever that was, it answers: requests of others wait behind this one.
Used by the router and by whoever in a broker needs a change made.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

import msgspec

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.log import get_logger
from headrace.security.authorizer import ANONYMOUS, AllowAll, Principal
from headrace.server.context import NO_CONNECTION, Peer, RequestContext
from headrace.server.metadata import MetadataStore
from headrace.server.peers import Lane, Peers
from headrace.server.session import Exchange
from headrace.wire.apis import PRIVATE_FORWARD, Api
from headrace.wire.headers import encode_request_header, parse_request_header
from headrace.wire.messages import (
    Message,
    decode_request,
    decode_response,
    encode_request,
    encode_response,
)
from headrace.wire.primitives import Malformed
from headrace.wire.schema import message_schema

if TYPE_CHECKING:
    from headrace.server.router import Handler

TIMEOUT_MS: Final = 20_000
TIMEOUT_MIN_MS: Final = 100
PAUSE_S: Final = 0.05
BROKER_LOGGER: Final = 8
FAILED: Final = "the active controller failed on this request; see its log"

FORWARDED: Final = frozenset(
    {
        Api.CREATE_TOPICS,
        Api.DELETE_TOPICS,
        Api.CREATE_PARTITIONS,
        Api.ALTER_CONFIGS,
        Api.INCREMENTAL_ALTER_CONFIGS,
        Api.ELECT_LEADERS,
        Api.ALTER_PARTITION_REASSIGNMENTS,
        Api.LIST_PARTITION_REASSIGNMENTS,
        Api.UNREGISTER_BROKER,
        Api.UPDATE_FEATURES,
        Api.DESCRIBE_QUORUM,
        Api.ADD_RAFT_VOTER,
        Api.REMOVE_RAFT_VOTER,
        Api.ALLOCATE_PRODUCER_IDS,
    }
)

_HEAD = Struct(">hq")
logger = get_logger(__name__)


class Forwarded(msgspec.Struct, frozen=True, array_like=True):
    """A client's request on its way to the active controller, with who asked for it."""

    kind: str
    name: str
    host: str
    frame: bytes


_decoder = msgspec.msgpack.Decoder(Forwarded)
_encode = msgspec.msgpack.Encoder().encode


def refusal(api: int, error: KafkaError) -> dict[str, object] | None:
    """The reply that is nothing but an error; None where the replies of an API have no place for one."""
    fields = {field.name for field in message_schema(api, "response").fields}
    if "error_code" not in fields:
        return None
    body: dict[str, object] = {"error_code": error.code}
    if "error_message" in fields:
        body["error_message"] = error.message
    return body


def _is_own(resource: Message) -> bool:
    """Whether a resource is configured on each broker for itself: the levels of its loggers are."""
    return bool(resource.resource_type == BROKER_LOGGER)


def _plain(value: Any) -> Any:
    """A decoded message, as one that can be encoded."""
    if isinstance(value, Message):
        return {name: _plain(each) for name, each in vars(value).items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value


class Forwarding:
    """See the module."""

    def __init__(
        self,
        metadata: MetadataStore,
        peers: Peers,
        handlers: "Mapping[Api, Handler]",
        broker: object,
    ) -> None:
        self._metadata = metadata
        self._peers = peers
        self._handlers = handlers
        self._broker = broker

    # -- on the broker that was asked ----------------------------------------------------------------------------------

    def takes(self, api: int, request: Message) -> bool:
        """Whether a request is to be decided elsewhere."""
        if api not in FORWARDED or self._metadata.is_active:
            return False
        return api != Api.INCREMENTAL_ALTER_CONFIGS or not all(map(_is_own, request.resources))

    async def forward(self, context: RequestContext, request: Message, frame: bytes) -> bytes:
        """The body of the reply to a client's request."""
        if context.api == Api.INCREMENTAL_ALTER_CONFIGS and any(map(_is_own, request.resources)):
            return await self._forward_the_rest(context, request)
        return await self._forward(context, request, frame)

    async def _forward_the_rest(self, context: RequestContext, request: Message) -> bytes:
        """Change what is this broker's own here, have the rest changed, and answer for both in the order asked."""
        api, version = context.api, context.version

        def part(own: bool) -> bytes:
            resources = [_plain(each) for each in request.resources if _is_own(each) is own]
            return encode_request(api, version, {**vars(request), "resources": resources})

        own, rest = part(True), part(False)
        here = await self._decide_here(context, decode_request(api, version, own))
        frame = encode_request_header(api, version, context.correlation_id, context.client_id) + rest
        there = await self._forward(context, decode_request(api, version, rest), frame)
        told_here, told_there = (
            iter(decode_response(api, version, each).responses) for each in (here, there)
        )
        told = [_plain(next(told_here if _is_own(each) else told_there)) for each in request.resources]
        body = {"throttle_time_ms": context.throttle_ms, "responses": told}
        return encode_response(api, version, body)

    async def _forward(self, context: RequestContext, request: Message, frame: bytes) -> bytes:
        timeout_ms = request.__dict__.get("timeout_ms", TIMEOUT_MS)
        timeout_ms = min(max(timeout_ms, TIMEOUT_MIN_MS), TIMEOUT_MS)
        asked = Forwarded(*context.principal, context.client_host, frame)
        try:
            return await self._send(asked, timeout_ms)
        except KafkaError as error:
            if error.code is ErrorCode.UNKNOWN_SERVER_ERROR:
                raise
            logger.warning(
                "a change found no controller",
                extra={"fields": {"api": context.api, "why": error.message}},
            )
        return await self._decide_here(context, request)

    async def _decide_here(self, context: RequestContext, request: Message) -> bytes:
        result = self._handlers[Api(context.api)](self._broker, context, request)
        if not isinstance(result, Mapping):
            result = await result
        return encode_response(context.api, context.version, result)

    async def ask(
        self, api: Api, version: int, body: Mapping[str, Any], timeout_ms: int = TIMEOUT_MS
    ) -> Message:
        """Have a change made that this broker itself needs, here or by the active controller. KafkaError if not."""
        encoded = encode_request(api, version, body)
        if self._metadata.is_active:
            peer = Peer(ANONYMOUS, "", AllowAll(), NO_CONNECTION)
            context = RequestContext(api, version, 0, None, peer, 0)
            result = self._handlers[api](self._broker, context, decode_request(api, version, encoded))
            if not isinstance(result, Mapping):
                result = await result
            return decode_response(api, version, encode_response(api, version, result))
        frame = encode_request_header(api, version, 0, None) + encoded
        reply = await self._send(Forwarded(*ANONYMOUS, "", frame), timeout_ms)
        return decode_response(api, version, reply)

    async def _send(self, asked: Forwarded, timeout_ms: float) -> bytes:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_ms / 1000
        payload = _encode(asked)
        why = "no controller is active"
        while (left_s := deadline - loop.time()) > 0:
            leader = self._metadata.quorum.leader
            if leader is not None and leader != self._peers.node_id:
                link = self._peers.link(leader, Lane.FORWARD)
                try:
                    reply = await link.request_raw(PRIVATE_FORWARD, 0, payload, left_s * 1000)
                    code, offset = _HEAD.unpack_from(reply)
                    if code == ErrorCode.NONE:
                        await asyncio.wait_for(self._metadata.until(offset), max(0.1, deadline - loop.time()))
                        return bytes(reply[_HEAD.size :])
                    if code == ErrorCode.UNKNOWN_SERVER_ERROR:
                        raise KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, FAILED)
                    why = f"node {leader} is not the active controller"
                except KafkaError as error:
                    if error.code is ErrorCode.UNKNOWN_SERVER_ERROR:
                        raise
                    why = error.message
                except TimeoutError:
                    why = "the change was made, and is not known here yet"
                    break
            await asyncio.sleep(PAUSE_S)
        raise KafkaError(
            ErrorCode.REQUEST_TIMED_OUT, f"The active controller could not be reached in time: {why}."
        )

    # -- on the active controller --------------------------------------------------------------------------------------

    def serve(self, exchange: Exchange, frame: memoryview, body: int) -> "Coroutine[Any, Any, None] | None":
        """Decide a request that another broker has sent on."""
        if not self._metadata.is_active:
            exchange.reply(_HEAD.pack(ErrorCode.NOT_CONTROLLER, -1))
            return None
        try:
            asked = _decoder.decode(bytes(frame[body:]))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Malformed(str(error)) from None
        header = parse_request_header(asked.frame)
        peer = Peer(
            Principal(asked.kind, asked.name), asked.host, exchange.context.peer.authorizer, NO_CONNECTION
        )
        context = RequestContext(
            header.api,
            header.version,
            header.correlation_id,
            header.client_id,
            peer,
            exchange.context.throttle_ms,
        )
        request = decode_request(header.api, header.version, asked.frame, header.body)
        return self._decide(exchange, context, request)

    async def _decide(self, exchange: Exchange, context: RequestContext, request: Message) -> None:
        handle: Callable[..., Any] = self._handlers[Api(context.api)]
        try:
            result = handle(self._broker, context, request)
            if not isinstance(result, Mapping):
                result = await result
            body = encode_response(context.api, context.version, result)
        except Exception as error:
            if not isinstance(error, KafkaError):
                logger.exception("a change that was sent on failed", extra={"fields": {"api": context.api}})
                error = KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, FAILED)
            refused = refusal(context.api, error)
            if refused is None or error.code is ErrorCode.NOT_CONTROLLER:
                # Whether it was made is not known: unless it failed here, it is asked for again, of whoever is active.
                exchange.reply(_HEAD.pack(error.code, -1))
                return
            body = encode_response(context.api, context.version, refused)
        head = _HEAD.pack(ErrorCode.NONE, self._metadata.applied_offset)
        exchange.reply(head + body)
