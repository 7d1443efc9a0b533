"""Holding replication to a rate, so that moving replicas leaves room for clients.

Owns how much may be moved now. Only replicas that are named in the topic's setting and are not in sync are held: one
that is in sync must stay so, or producers would wait. Invariant: over any stretch of time no more than the rate times
its length goes, but for one burst of a second's worth and the last piece that began within it. Pure: time is given.
Used by `Replicas`, once for what it serves and once for what it fetches.
"""

from headrace.base.settings_types import LONG_MAX

EVERY_REPLICA = "*"
BURST_MS = 1_000


class Throttle:
    """A bucket that fills with time."""

    __slots__ = ("_filled_ms", "_left", "rate")

    def __init__(self) -> None:
        self.rate = LONG_MAX
        """Bytes a second; LONG_MAX for no limit."""
        self._left = 0.0
        self._filled_ms = 0.0

    def set_rate(self, rate: int, now_ms: float) -> None:
        if rate != self.rate:
            self.rate = rate
            self._left = float(rate)
            self._filled_ms = now_ms

    @property
    def limited(self) -> bool:
        return self.rate != LONG_MAX

    def exceeded(self, now_ms: float) -> bool:
        """Whether nothing more may go now."""
        burst = self.rate * BURST_MS / 1000
        self._left = min(burst, self._left + (now_ms - self._filled_ms) * self.rate / 1000)
        self._filled_ms = now_ms
        return self._left <= 0

    def spend(self, size: int) -> None:
        self._left -= size


def is_named(replicas: tuple[str, ...], index: int, node_id: int) -> bool:
    """Whether a topic's setting names this replica."""
    return replicas == (EVERY_REPLICA,) or f"{index}:{node_id}" in replicas
