"""Fetch, as followers ask it: served by the session that replication keeps for each of them.

Behaviour. Known by its replica id; needs topic ids (version 13 on) and the right to act for the cluster. Answered when
something of what the follower named is there, when it says something new, or when `max_wait_ms` is over; `min_bytes` is
not waited for, because a producer may be waiting for the follower. Sessions and what they hold: `replication.serving`.
"""

from headrace.base.clock import Timer
from headrace.base.errors import ErrorCode
from headrace.replication.serving import FetchReply, Session
from headrace.security.authorizer import Operation, ResourceType
from headrace.server.broker import Broker
from headrace.server.session import Exchange
from headrace.wire.fetch import TOPIC_IDS_FROM, FetchRequest, encode_fetch_reply


def serve_follower(broker: Broker, exchange: Exchange, request: FetchRequest) -> None:
    """Answer a follower now, or when there is something for it."""
    fetch = _FollowerFetch(broker, exchange)
    if not exchange.context.authorize(Operation.CLUSTER_ACTION, ResourceType.CLUSTER):
        fetch.reply(FetchReply(ErrorCode.CLUSTER_AUTHORIZATION_FAILED, 0, []))
    elif exchange.context.version < TOPIC_IDS_FROM:
        fetch.reply(FetchReply(ErrorCode.UNSUPPORTED_VERSION, 0, []))
    else:
        fetch.start(request)


class _FollowerFetch:
    """One fetch of a follower, as long as it waits."""

    __slots__ = ("_broker", "_exchange", "_session", "_timer")

    def __init__(self, broker: Broker, exchange: Exchange) -> None:
        self._broker = broker
        self._exchange = exchange
        self._session: Session | None = None
        self._timer: Timer | None = None

    def start(self, request: FetchRequest) -> None:
        session = self._session = self._broker.replicas.fetch(request, self.reply)
        if session is not None:
            self._timer = self._broker.call_later(request.max_wait_ms, session.answer)
            self._exchange.on_gone = self._gone

    def reply(self, answer: FetchReply) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._exchange.done:
            return
        context = self._exchange.context
        parts, size = encode_fetch_reply(
            context.version,
            [("", topic_id, results) for topic_id, results in answer.topics],
            throttle_time_ms=context.throttle_ms,
            error=answer.error,
            session_id=answer.session_id,
        )
        self._exchange.reply_parts(parts, size)  # type: ignore[arg-type]

    def _gone(self) -> None:
        """The connection is lost; another fetch may wait in the session by now."""
        if self._timer is not None:
            self._timer.cancel()
        if self._session is not None and self._session.is_waiting(self.reply):
            self._session.leave()
