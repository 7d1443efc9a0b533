"""The clock, as an argument. Only the edges hold a `SystemClock`; state machines are given `now_ms`."""

import time
from typing import Protocol


class Clock(Protocol):
    """Wall time for what is stored, monotonic time for what is measured."""

    def now_ms(self) -> int:
        """Milliseconds since the epoch."""
        ...

    def monotonic_ms(self) -> float:
        """Milliseconds from an arbitrary origin, never going back."""
        ...


class Timer(Protocol):
    """Something set to happen later."""

    def cancel(self) -> None:
        """Make it not happen; nothing when it has."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> float:
        return time.monotonic() * 1000.0


class ManualClock:
    """A clock that moves only when told to, for tests and the simulator."""

    def __init__(self, start_ms: int = 0) -> None:
        self._now_ms = float(start_ms)

    def now_ms(self) -> int:
        return int(self._now_ms)

    def monotonic_ms(self) -> float:
        return self._now_ms

    def advance(self, ms: float) -> None:
        assert ms >= 0, "time does not go back"
        self._now_ms += ms
