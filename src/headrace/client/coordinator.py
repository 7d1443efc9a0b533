"""The broker that keeps a group or a transaction: found, connected to, and looked for again when it moves.

Owns the address of one coordinator. Invariants: requests to it have a connection of their own, because some wait
there for minutes; an answer that says "not here" makes the next call look again; waits are bounded by the caller's
time. Called by group members, commits and transactions.
"""

from collections.abc import Awaitable, Callable, Mapping
from enum import IntEnum
from typing import Any, TypeVar

from headrace.base.errors import ErrorCode, KafkaError
from headrace.client.cluster import Cluster
from headrace.client.config_keys import Address
from headrace.client.connection import Connection
from headrace.client.errors import error_code
from headrace.client.retry import with_retries
from headrace.wire.apis import Api
from headrace.wire.messages import Message

T = TypeVar("T")

BATCHED_FROM = 4

# The coordinator is another broker, or not ready: look for it again.
MOVED = frozenset(
    {
        ErrorCode.NOT_COORDINATOR,
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.NETWORK_EXCEPTION,
        ErrorCode.REQUEST_TIMED_OUT,
    }
)


class CoordinatorKind(IntEnum):
    """What a coordinator keeps."""

    GROUP = 0
    TRANSACTION = 1


class Coordinator:
    """The coordinator of one group or transactional id."""

    def __init__(self, cluster: Cluster, kind: CoordinatorKind, key: str) -> None:
        self.cluster = cluster
        self.kind = kind
        self.key = key
        self._address: Address | None = None

    def __str__(self) -> str:
        return f"the coordinator of {self.kind.name.lower()} {self.key!r}"

    def forget(self) -> None:
        """Look for it again before the next request."""
        self._address = None

    async def connection(self, purpose: str = "coordinator") -> Connection:
        """A connection to it, found first if need be. Raises KafkaError."""
        if self._address is None:
            self._address = await self._find()
        try:
            return await self.cluster.own_connection(self._address, purpose)
        except KafkaError:
            self.forget()
            raise

    async def request(
        self,
        api: Api,
        body: Mapping[str, Any],
        *,
        highest: int | None = None,
        timeout_ms: int | None = None,
        purpose: str = "coordinator",
    ) -> Message:
        """Its answer, whatever that says. Raises KafkaError when none comes."""
        connection = await self.connection(purpose)
        try:
            return await connection.request(api, body, highest=highest, timeout_ms=timeout_ms)
        except KafkaError as error:
            self.note(error.code)
            raise

    def note(self, code: ErrorCode) -> None:
        """Take in what an answer said about the coordinator."""
        if code in MOVED:
            self.forget()

    async def retried(self, timeout_ms: int, attempt: Callable[[], Awaitable[T]]) -> T:
        """The result of `attempt`, tried again while that may help, wherever the coordinator goes meanwhile."""

        async def noted() -> T:
            try:
                return await attempt()
            except KafkaError as error:
                self.note(error.code)
                raise

        return await with_retries(self.cluster, timeout_ms, noted)

    async def _find(self) -> Address:
        connection = await self.cluster.any_connection()
        body: dict[str, Any] = {"key_type": int(self.kind)}
        if connection.version(Api.FIND_COORDINATOR) >= BATCHED_FROM:
            body["coordinator_keys"] = [self.key]
        else:
            body["key"] = self.key
        reply = await connection.request(Api.FIND_COORDINATOR, body)
        found = reply.coordinators[0] if reply.coordinators else reply
        if found.error_code:
            code = error_code(found.error_code)
            raise KafkaError(code, f"{self} is not known: {found.error_message or code.name}")
        return found.host, found.port
