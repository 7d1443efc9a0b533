"""Sessions by scripted bytes: order of replies, back-pressure, bad requests. No socket anywhere."""

from struct import pack

import pytest

from headrace.security.authorizer import ANONYMOUS, AllowAll
from headrace.security.quotas import Flow, NoQuotas
from headrace.server.context import Peer
from headrace.server.session import EXCHANGES_MAX, UNSENT_BYTES_MAX, Exchange, Session
from headrace.wire.apis import Api
from headrace.wire.frames import BufferPool, FrameCutter
from headrace.wire.headers import encode_request_header


class Wire:
    """A transport that writes down what it is told."""

    def __init__(self) -> None:
        self.sends: list[bytes] = []
        self.reading = True
        self.open = True

    def send(self, parts) -> None:
        self.sends.append(b"".join(bytes(p) for p in parts))

    def close(self) -> None:
        self.open = False

    def set_reading(self, reading: bool) -> None:
        self.reading = reading


class Harness:
    """A session whose requests are collected instead of served."""

    def __init__(self, quotas=None) -> None:
        self.wire = Wire()
        self.exchanges: list[Exchange] = []
        peer = Peer(ANONYMOUS, "127.0.0.1", AllowAll(), 1)
        cutter = FrameCutter(memoryview(bytearray(65536)), BufferPool(), 1_000_000)
        self.session = Session(self.wire, peer, cutter, self.route, quotas or NoQuotas())

    def route(self, exchange: Exchange, frame: memoryview, body: int) -> None:
        self.exchanges.append(exchange)

    def receive(self, data: bytes) -> None:
        while data:
            target = self.session.target()
            count = min(len(target), len(data))
            target[:count] = data[:count]
            data = data[count:]
            self.session.received(count)


def request(correlation_id: int) -> bytes:
    head = encode_request_header(Api.METADATA, 1, correlation_id, "test")
    return pack(">i", len(head)) + head


def reply(correlation_id: int, body: bytes) -> bytes:
    return pack(">ii", 4 + len(body), correlation_id) + body


def test_replies_leave_in_the_order_of_their_requests():
    h = Harness()
    h.receive(request(1) + request(2) + request(3))
    h.exchanges[2].reply(b"three")
    h.exchanges[1].reply(b"two")
    assert h.wire.sends == []
    h.exchanges[0].reply(b"one")
    assert h.wire.sends == [reply(1, b"one") + reply(2, b"two") + reply(3, b"three")]


def test_an_exchange_that_waits_for_news_does_not_hold_up_the_next_request():
    h = Harness()
    h.receive(request(1))
    h.exchanges[0].wait_for_next(lambda: h.exchanges[0].reply(b"nothing new"))
    assert h.wire.sends == []
    h.receive(request(2))
    h.exchanges[1].reply(b"two")
    assert h.wire.sends == [reply(1, b"nothing new"), reply(2, b"two")]
    h.receive(request(3))
    assert len(h.wire.sends) == 2, "told once"


def test_replies_ready_in_one_chunk_of_input_leave_in_one_send():
    h = Harness()
    h.session._route = lambda exchange, frame, body: exchange.reply(b"x")
    h.receive(request(1) + request(2))
    assert h.wire.sends == [reply(1, b"x") + reply(2, b"x")]


def test_a_request_without_an_answer_does_not_hold_up_the_next():
    h = Harness()
    h.receive(request(1) + request(2))
    h.exchanges[1].reply(b"two")
    h.exchanges[0].reply_nothing()
    assert h.wire.sends == [reply(2, b"two")]


def test_reading_stops_while_too_many_requests_are_open():
    h = Harness()
    h.receive(b"".join(request(i) for i in range(EXCHANGES_MAX)))
    assert not h.wire.reading
    for exchange in h.exchanges[: EXCHANGES_MAX // 2]:
        exchange.reply(b"")
    assert h.wire.reading


def test_reading_stops_while_too_much_waits_to_leave():
    h = Harness()
    h.receive(request(1))
    h.exchanges[0].reply(bytes(UNSENT_BYTES_MAX))
    assert not h.wire.reading
    h.session.sent(UNSENT_BYTES_MAX)
    assert h.wire.reading


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(pack(">i", 2_000_000), id="longer than the limit"),
        pytest.param(pack(">i", -5), id="negative length"),
        pytest.param(pack(">i", 3) + b"abc", id="shorter than a header"),
        pytest.param(pack(">ihhih", 10, 3, 1, 7, 500), id="client id past the end"),
        pytest.param(pack(">ihhih", 13, 3, 1, 7, 3) + b"\xff\xfe\xfd", id="client id that is not text"),
        pytest.param(pack(">ihhihB", 11, 3, 12, 7, -1, 200), id="tagged fields cut short"),
    ],
)
def test_a_broken_frame_closes_the_connection(data):
    h = Harness()
    h.receive(data)
    assert not h.wire.open
    assert h.exchanges == []


def test_who_waits_is_told_when_the_connection_goes():
    h = Harness()
    h.receive(request(1))
    gone = []
    h.exchanges[0].on_gone = lambda: gone.append(True)
    h.session.closed()
    assert gone == [True]
    h.exchanges[0].reply(b"late")
    assert h.wire.sends == []


def test_every_byte_in_and_out_is_charged():
    charged = []

    class Meter:
        def charge(self, flow, principal, client_id, size):
            charged.append((flow, principal, client_id, size))
            return 7

    h = Harness(Meter())
    h.receive(request(1))
    assert h.exchanges[0].context.throttle_ms == 7
    h.exchanges[0].reply(b"abc")
    sent = len(h.wire.sends[0])
    assert charged == [
        (Flow.IN, ANONYMOUS, "test", len(request(1))),
        (Flow.OUT, ANONYMOUS, "test", sent),
    ]
