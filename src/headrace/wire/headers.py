"""Request and response headers.

A request header is read by hand: it comes first on every request, also on those whose API or version is unknown.
Versions: request 1 (client id) or 2 (plus tagged fields) when the API's version is flexible; response 0 or 1
likewise, except that the response to ApiVersions always has version 0, so that a client can read it before it knows
what the broker speaks.
"""

from functools import lru_cache
from struct import Struct
from typing import NamedTuple

from headrace.wire.apis import VERSIONS_REMEMBERED_MAX, Api, is_flexible, is_supported
from headrace.wire.primitives import Buffer, Malformed, skip_tags

_REQUEST = Struct(">hhih")
_CORRELATION = Struct(">i")
_FRAME, _FRAME_FLEXIBLE = Struct(">ii"), Struct(">iiB")
_NO_TAGS = b"\x00"
CLIENT_IDS_REMEMBERED_MAX = 256
_new_tuple = tuple.__new__  # a named tuple's own takes three times as long


class RequestHeader(NamedTuple):
    """What every request begins with, and where its body starts."""

    api: int
    version: int
    correlation_id: int
    client_id: str | None
    body: int


def parse_request_header(buf: Buffer, pos: int = 0) -> RequestHeader:
    """The header of the request that begins at `pos`. Raises Malformed.

    The tagged fields of a flexible header are skipped only for what is served: of the rest the body is never read.
    """
    if len(buf) - pos < _REQUEST.size:
        raise Malformed("request shorter than its header")
    api, version, correlation_id, length = _REQUEST.unpack_from(buf, pos)
    pos += _REQUEST.size
    client_id: str | None = None
    if length >= 0:
        if pos + length > len(buf):
            raise Malformed("client id longer than its request")
        try:
            client_id = str(buf[pos : pos + length], "utf-8")
        except UnicodeDecodeError as error:
            raise Malformed(f"a client id that is not UTF-8: {error.reason}") from None
        pos += length
    elif length < -1:
        raise Malformed("client id of negative length")
    if _has_tags(api, version):
        pos = pos + 1 if pos < len(buf) and buf[pos] == 0 else skip_tags(buf, pos)
    return _new_tuple(RequestHeader, (api, version, correlation_id, client_id, pos))


@lru_cache(maxsize=VERSIONS_REMEMBERED_MAX)
def _has_tags(api: int, version: int) -> bool:
    return is_supported(api, version) and is_flexible(api, version)


def encode_request_header(api: int, version: int, correlation_id: int, client_id: str | None) -> bytes:
    """The header of a request, as a client sends it."""
    length, rest = _name(client_id, is_flexible(api, version))
    return _REQUEST.pack(api, version, correlation_id, length) + rest


@lru_cache(maxsize=CLIENT_IDS_REMEMBERED_MAX)
def _name(client_id: str | None, flexible: bool) -> tuple[int, bytes]:
    """A client's name as it stands in a header: its length, and everything from there on."""
    tags = _NO_TAGS if flexible else b""
    if client_id is None:
        return -1, tags
    name = client_id.encode()
    return len(name), name + tags


def encode_response_header(api: int, version: int, correlation_id: int) -> bytes:
    """The header of a response."""
    head = _CORRELATION.pack(correlation_id)
    return head + _NO_TAGS if api != Api.API_VERSIONS and is_flexible(api, version) else head


def frame_response(api: int, version: int, correlation_id: int, body: bytes) -> bytes:
    """A whole response on the wire: its length, its header, its body."""
    if api != Api.API_VERSIONS and is_flexible(api, version):
        return _FRAME_FLEXIBLE.pack(len(body) + 5, correlation_id, 0) + body
    return _FRAME.pack(len(body) + 4, correlation_id) + body


def parse_response_header(api: int, version: int, buf: Buffer, pos: int = 0) -> tuple[int, int]:
    """The correlation id of a response and where its body starts. Raises Malformed."""
    if len(buf) - pos < _CORRELATION.size:
        raise Malformed("response shorter than its header")
    (correlation_id,) = _CORRELATION.unpack_from(buf, pos)
    pos += _CORRELATION.size
    if api != Api.API_VERSIONS and is_flexible(api, version):
        pos = skip_tags(buf, pos)
    return correlation_id, pos
