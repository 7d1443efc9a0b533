"""Where every byte in and out is charged to whoever moved it; the answer is how long the client should hold back.

The session charges each request as it comes and each reply as it leaves. Without limits nobody waits.
"""

from enum import Enum
from typing import Protocol

from headrace.security.authorizer import Principal


class Flow(Enum):
    """Which way the bytes went."""

    IN = "in"
    OUT = "out"


class Quotas(Protocol):
    """Charges bytes to a principal and client id; returns the throttle time in milliseconds."""

    def charge(self, flow: Flow, principal: Principal, client_id: str | None, size: int) -> int: ...


class NoQuotas:
    """The quotas of a broker without limits."""

    def charge(self, flow: Flow, principal: Principal, client_id: str | None, size: int) -> int:
        return 0
