"""What a step of a coordinator asks of the world: replies, timers, records to store.

A state machine writes into an `Effects`, the runtime carries it out. Invariants: replies go out as soon as the step is
over; what must not be told before it is durable is told by the `then` of a `Write`, which is called once, with NONE
when the records are committed or with the error that kept them from it. Nothing here knows a clock, a socket or a log.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from headrace.base.errors import ErrorCode

Body: TypeAlias = Mapping[str, Any]
Ticket: TypeAlias = Callable[[Body], None]
"""Who waits for a reply. Opaque to the state machine: taken with a request, handed back with its reply."""
Then: TypeAlias = Callable[[ErrorCode, int, "Effects"], None]
Record: TypeAlias = tuple[bytes, bytes | None]
TimerKey: TypeAlias = tuple[str, ...]

_new_tuple = tuple.__new__  # a named tuple's own takes three times as long


class Write(NamedTuple):
    """Records that belong together: in one batch of the log, perhaps with those of other steps."""

    records: Sequence[Record]
    then: Then | None
    replayed: bool
    """Whether the machine takes up the records, by the code that a restart runs, once they are committed."""
    ahead: bool = False
    """Whether the machine has taken them up already; when they cannot be stored, it is loaded anew without them."""
    producer: tuple[int, int] | None = None
    """Id and epoch of the producer whose open transaction they are part of."""


class Effects:
    """The outcome of one step."""

    __slots__ = ("replies", "timers", "writes")

    def __init__(self) -> None:
        self.replies: list[tuple[Ticket, Body]] = []
        self.timers: dict[TimerKey, int | None] = {}
        self.writes: list[Write] = []

    def reply(self, ticket: Ticket, body: Body) -> None:
        self.replies.append((ticket, body))

    def start(self, key: TimerKey, delay_ms: int) -> None:
        """Have the machine called back after `delay_ms`, in place of what the key was set to before."""
        self.timers[key] = delay_ms

    def stop(self, key: TimerKey) -> None:
        self.timers[key] = None

    def store(
        self,
        records: Sequence[Record],
        then: Then | None = None,
        replayed: bool = False,
        ahead: bool = False,
        producer: tuple[int, int] | None = None,
    ) -> None:
        self.writes.append(_new_tuple(Write, (records, then, replayed, ahead, producer)))
