"""What a handler knows of the request it serves: its header, who asks, and the question whether they may."""

from dataclasses import dataclass

from headrace.security.authorizer import CLUSTER_NAME, Authorizer, Operation, Principal, ResourceType

NO_CONNECTION = 0  # of a client; connections are counted from 1


@dataclass(slots=True)
class Peer:
    """The other end of a connection."""

    principal: Principal
    host: str
    authorizer: Authorizer
    connection: int
    software: str = ""
    """Name and version of the client, as it said with ApiVersions; empty when it did not."""


class RequestContext:
    """One request's header and peer."""

    __slots__ = ("api", "client_id", "correlation_id", "peer", "throttle_ms", "version")

    def __init__(
        self, api: int, version: int, correlation_id: int, client_id: str | None, peer: Peer, throttle_ms: int
    ) -> None:
        self.api = api
        self.version = version
        self.correlation_id = correlation_id
        self.client_id = client_id
        self.peer = peer
        self.throttle_ms = throttle_ms

    @property
    def principal(self) -> Principal:
        return self.peer.principal

    @property
    def client_host(self) -> str:
        return self.peer.host

    def authorize(self, operation: Operation, resource: ResourceType, name: str = CLUSTER_NAME) -> bool:
        """Whether whoever asks may do `operation` on the named resource."""
        peer = self.peer
        return peer.authorizer.allows(peer.principal, peer.host, operation, resource, name)

    def __str__(self) -> str:
        """The correlation id as logs carry it: connection, client and request."""
        return f"{self.peer.connection}/{self.client_id or '-'}/{self.correlation_id}"
