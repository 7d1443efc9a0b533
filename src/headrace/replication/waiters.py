"""Those who wait for a partition, in the order of the offsets they wait for. Used by `Partition` alone."""

from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from headrace.base.errors import ErrorCode

Done: TypeAlias = Callable[[ErrorCode], None]
Wake: TypeAlias = Callable[[], None]


def release(waiters: deque[tuple[int, Done]] | None, reached: int, error: ErrorCode) -> None:
    """Tell those who waited for an offset that is reached. They stand in the order of their offsets."""
    while waiters and waiters[0][0] <= reached:
        waiters.popleft()[1](error)


def fail(waiters: deque[tuple[int, Done]] | None, error: ErrorCode) -> None:
    """Tell all of them that what they wait for will not come."""
    while waiters:
        waiters.popleft()[1](error)


def after_both(done: Done) -> Done:
    """A callback for two waits: passes on the second success or the first failure, once."""
    left = 2

    def either(error: ErrorCode) -> None:
        nonlocal left
        if left == 0:
            return
        left = 0 if error is not ErrorCode.NONE else left - 1
        if left == 0:
            done(error)

    return either
