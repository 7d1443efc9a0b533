"""One connection to one broker: version negotiation and pipelined requests.

Owns the correlation ids and the requests that wait for an answer. Invariants: requests leave in the order of
`request` calls (it never awaits), answers are matched to them in that order, and every request ends: with its
answer, or with an error when the connection ends or its time is up. A request that times out ends the
connection, because on an ordered stream everything behind it is stuck too. Called by `cluster`.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias

from headrace import __version__
from headrace.base.errors import ErrorCode
from headrace.client.errors import (
    NOT_KAFKA_HINT,
    ClientError,
    Closed,
    Disconnected,
    NotKafka,
    RequestTimedOut,
    Unsupported,
    error_code,
)
from headrace.client.transport import Connector, FrameStream
from headrace.wire.apis import PRIVATE_FROM, Api
from headrace.wire.client_hot import read_response, request_parts
from headrace.wire.headers import encode_request_header, parse_response_header
from headrace.wire.messages import Malformed, Message, decode_response
from headrace.wire.primitives import Buffer
from headrace.wire.schema import message_schema

IN_FLIGHT_MAX = 1_000
CORRELATION_ID_MAX = 2**31 - 1
HANDSHAKE_VERSION = 3
LOST_HINT = "is the broker still running? its log may say why"

# Who hears of the end of a request: its answer and None, or None and what went wrong.
Heard: TypeAlias = Callable[[Any, BaseException | None], object]


class _Waiting:
    """A request that was sent and waits for its answer."""

    __slots__ = ("api", "correlation_id", "deadline_s", "heard", "version", "wait_ms")

    def __init__(
        self, api: int, version: int, correlation_id: int, heard: Heard, now_s: float, wait_ms: int
    ) -> None:
        self.api = api
        self.version = version
        self.correlation_id = correlation_id
        self.heard = heard
        self.wait_ms = wait_ms
        self.deadline_s = now_s + wait_ms / 1000


class Connection:
    """A connection that is open from `open` until it fails or is closed; it is never reused after that."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        client_id: str,
        connector: Connector,
        timeout_ms: int,
        handshake_timeout_ms: int | None = None,
    ) -> None:
        self.host = host
        self.port = port
        self.versions: dict[int, tuple[int, int]] = {}
        self.finalized_features: dict[str, int] = {}
        self._client_id = client_id
        self._connector = connector
        self._timeout_ms = timeout_ms
        self._handshake_timeout_ms = min(timeout_ms, handshake_timeout_ms or timeout_ms)
        self._stream: FrameStream | None = None
        self._waiting: deque[_Waiting] = deque()
        self._alarm: asyncio.TimerHandle | None = (
            None  # one for all that wait, at or before the first deadline
        )
        self._alarm_s = 0.0
        self._chosen: dict[tuple[int, int | None], int] = {}  # versions by API and highest wanted
        self._correlation_id = 0
        self._error: Exception | None = None
        self.closed = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    @property
    def usable(self) -> bool:
        """Whether requests can be sent."""
        return self._stream is not None and self._error is None

    @property
    def in_flight(self) -> int:
        """Requests that wait for an answer."""
        return len(self._waiting)

    async def open(self) -> "Connection":
        """Connect and learn which versions the broker speaks. Raises ClientError."""
        try:
            self._stream = await self._connector(self.host, self.port, self)
            await self._handshake()
        except BaseException:
            self.close()
            raise
        return self

    async def _handshake(self) -> None:
        body = {"client_software_name": "headrace-python", "client_software_version": __version__}
        wait_ms = self._handshake_timeout_ms
        try:
            reply = await self.request(Api.API_VERSIONS, body, version=HANDSHAKE_VERSION, timeout_ms=wait_ms)
        except RequestTimedOut:
            raise RequestTimedOut(
                f"{self.host}:{self.port} accepted the connection and did not answer within {wait_ms} ms",
                f"{NOT_KAFKA_HINT} and that the broker is not stuck",
            ) from None
        except Disconnected as error:
            raise Disconnected(
                f"{self.host}:{self.port} accepted the connection and closed it without an answer",
                NOT_KAFKA_HINT,
            ) from error
        if reply.error_code == ErrorCode.UNSUPPORTED_VERSION:
            highest = next((k.max_version for k in reply.api_keys if k.api_key == Api.API_VERSIONS), 0)
            reply = await self.request(
                Api.API_VERSIONS, body, version=min(highest, HANDSHAKE_VERSION), timeout_ms=wait_ms
            )
        if reply.error_code:
            raise NotKafka(
                f"{self.host}:{self.port} refused ApiVersions: {error_code(reply.error_code).name}",
                NOT_KAFKA_HINT,
            )
        self.versions = {key.api_key: (key.min_version, key.max_version) for key in reply.api_keys}
        self.finalized_features = {f.name: f.max_version_level for f in reply.finalized_features or []}

    def version(self, api: Api, highest: int | None = None) -> int:
        """The newest version of an API that both sides speak. Raises Unsupported."""
        known = self._chosen.get((api, highest))
        if known is not None:
            return known
        schema = message_schema(api, "request")
        first, last = self.versions.get(api, (0, -1))
        best = min(last, schema.last if highest is None else min(schema.last, highest))
        if best < max(first, schema.first):
            raise Unsupported(
                f"the broker at {self.host}:{self.port} offers {api.name} in versions {first} to {last}, "
                f"this client speaks {schema.first} to {schema.last}"
                if api in self.versions
                else f"the broker at {self.host}:{self.port} does not offer {api.name}",
                "use a broker that has it",
            )
        self._chosen[api, highest] = best
        return best

    def request(
        self,
        api: Api,
        body: Mapping[str, Any],
        *,
        version: int | None = None,
        highest: int | None = None,
        timeout_ms: int | None = None,
    ) -> "asyncio.Future[Message]":
        """Send a request now; the future brings its answer. Raises ClientError when it cannot be sent."""
        if version is None:
            version = self.version(api, highest)
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        parts = request_parts(api, version, body)
        self._send(api, version, parts, timeout_ms, partial(_end, future))
        return future

    def ask(
        self,
        api: Api,
        body: Mapping[str, Any],
        heard: Heard,
        *,
        highest: int | None = None,
        timeout_ms: int | None = None,
    ) -> None:
        """As `request`; `heard` is called the moment the answer is there, where a future would cost another turn.

        It must not raise, and it may be called while the connection is being closed.
        """
        version = self.version(api, highest)
        self._send(api, version, request_parts(api, version, body), timeout_ms, heard)

    def request_private(self, key: int, payload: bytes = b"") -> "asyncio.Future[bytes]":
        """As `request`, in an API of Headrace's own, whose bodies this client does not read."""
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._send(key, 0, [payload], None, partial(_end, future))
        return future

    def _send(
        self, api: int, version: int, payload: Iterable[Buffer], timeout_ms: int | None, heard: Heard
    ) -> None:
        stream = self._live_stream()
        if len(self._waiting) >= IN_FLIGHT_MAX:
            raise ClientError(
                f"more than {IN_FLIGHT_MAX} requests wait for {self.host}:{self.port}", "await some first"
            )
        wait_ms = self._timeout_ms if timeout_ms is None else timeout_ms
        now_s = self._loop.time()
        waiting = _Waiting(api, version, self._next_correlation_id(), heard, now_s, wait_ms)
        header = encode_request_header(api, version, waiting.correlation_id, self._client_id)
        stream.send(header, *payload)
        self._waiting.append(waiting)
        if self._alarm is None or waiting.deadline_s < self._alarm_s:
            self._set_alarm(waiting.deadline_s)

    def send_only(self, api: Api, body: Mapping[str, Any], *, highest: int | None = None) -> None:
        """Send a request that has no answer (Produce with acks=0)."""
        version = self.version(api, highest)
        header = encode_request_header(api, version, self._next_correlation_id(), self._client_id)
        self._live_stream().send(header, *request_parts(api, version, body))

    async def drain(self) -> None:
        """Wait until the socket takes more. Raises Disconnected."""
        await self._live_stream().drain()

    def close(self, error: Exception | None = None) -> None:
        """End the connection; requests that wait fail with `error`, or as disconnected."""
        if self._error is None:
            self._error = error or Disconnected(f"the connection to {self.host}:{self.port} was closed")
            if self._stream is None:
                self.closed.set()
            else:
                self._stream.abort()
            self._fail_waiting()

    async def finish(self, timeout_ms: float) -> None:
        """End the connection after what was sent has left; at once when that takes too long."""
        if self._error is None and self._stream is not None:
            self._error = Closed("the client is closed")
            self._stream.close()
            try:
                async with asyncio.timeout(timeout_ms / 1000):
                    await self.closed.wait()
            except TimeoutError:
                pass
            finally:  # also when whoever closes the client is cancelled: no socket may be left behind
                if not self.closed.is_set():
                    self._stream.abort()
                self._fail_waiting()

    # -- the stream's side ------------------------------------------------------------------------------------------

    def on_frame(self, frame: memoryview) -> None:
        """Match one answer with the request it belongs to."""
        if self._error is not None:
            return
        if not self._waiting:
            self.close(NotKafka(f"{self.host}:{self.port} sent an answer to no request", NOT_KAFKA_HINT))
            return
        waiting = self._waiting.popleft()
        try:
            reply = _decode(waiting, frame)
        except (Malformed, ValueError) as error:
            failure = NotKafka(
                f"{self.host}:{self.port} sent an answer that cannot be read: {error}", NOT_KAFKA_HINT
            )
            self._tell(waiting, None, failure)
            self.close(failure)
            return
        self._tell(waiting, reply, None)

    def on_closed(self, error: Exception | None) -> None:
        """The stream ended: fail what waits."""
        if self._error is None:
            reason = f": {error}" if error is not None and str(error) else ""
            place = f"{self.host}:{self.port}"
            self._error = (
                type(error)(f"{place}: {error.message}", error.hint, error.code)
                if isinstance(error, ClientError)
                else Disconnected(f"the connection to {place} was lost{reason}", LOST_HINT)
            )
        self._fail_waiting()
        self.closed.set()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _live_stream(self) -> FrameStream:
        if self._error is not None or self._stream is None:
            raise (
                _again(self._error) if self._error is not None else Disconnected("the connection is not open")
            )
        return self._stream

    def _next_correlation_id(self) -> int:
        self._correlation_id = (self._correlation_id + 1) % CORRELATION_ID_MAX
        return self._correlation_id

    def _set_alarm(self, at_s: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_s = at_s
        self._alarm = self._loop.call_at(at_s, self._look_at_clock)

    def _look_at_clock(self) -> None:
        """End the first request whose time is up, or sleep until the next deadline: most have long been answered."""
        self._alarm = None
        if self._error is not None or not self._waiting:
            return
        first = min(self._waiting, key=lambda waiting: waiting.deadline_s)
        if first.deadline_s <= self._alarm_s:
            self._expire(first)
        else:
            self._set_alarm(first.deadline_s)

    def _expire(self, waiting: _Waiting) -> None:
        message = f"{self.host}:{self.port} did not answer {_name(waiting.api)} within {waiting.wait_ms} ms"
        self._waiting.remove(waiting)  # each is told once
        self._tell(waiting, None, RequestTimedOut(message, "the broker may be overloaded, paused or gone"))
        self.close(Disconnected(f"{message}; the connection was dropped", LOST_HINT))

    def _fail_waiting(self) -> None:
        assert self._error is not None
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        while self._waiting:
            self._tell(self._waiting.popleft(), None, _again(self._error))

    def _tell(self, waiting: _Waiting, reply: Any, error: Exception | None) -> None:
        try:
            waiting.heard(reply, error)
        except (
            Exception
        ) as bug:  # of whoever asked: it must not end the stream, nor keep others from their answers
            message = f"an answer to {_name(waiting.api)} could not be dealt with"
            self._loop.call_exception_handler({"message": message, "exception": bug})


def _name(api: int) -> str:
    return Api(api).name if api < PRIVATE_FROM else f"API {api}"


def _decode(waiting: _Waiting, frame: memoryview) -> Message | bytes:
    correlation_id, pos = parse_response_header(waiting.api, waiting.version, frame)
    if correlation_id != waiting.correlation_id:
        raise Malformed(f"correlation id {correlation_id} where {waiting.correlation_id} was expected")
    if waiting.api >= PRIVATE_FROM:
        return bytes(frame[pos:])
    if waiting.api == Api.API_VERSIONS and bytes(frame[pos : pos + 2]) == b"\x00\x23":
        # A broker that does not know our version of ApiVersions says so in a body of version 0.
        return decode_response(Api.API_VERSIONS, 0, frame, pos)
    return read_response(waiting.api, waiting.version, frame, pos)


def _end(future: "asyncio.Future[Any]", reply: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(reply)
    else:
        future.set_exception(error)
        # Whoever sent it may have gone (a cancelled call): then nobody reads the error, and that is no fault.
        future.exception()


def _again(error: Exception) -> Exception:
    """A fresh copy, because one exception object raised in several tasks gathers all their traces."""
    if isinstance(error, ClientError):
        return type(error)(error.message, error.hint, error.code)
    return Disconnected(str(error))
