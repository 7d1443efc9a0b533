"""An event loop whose clock jumps to the next timer instead of waiting, for tests of what happens over minutes.

There must be no real I/O on it. When nothing is left to do and something is still awaited, it fails instead of hanging.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Stuck(AssertionError):
    """Nothing is scheduled, and yet the test waits."""


class _Selector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stuck("the loop has nothing to do and no timer to wait for")
        self.now_s += max(0.0, timeout)
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """asyncio with a simulated clock."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now_s


def run_virtual(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end on simulated time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)


async def pass_time(seconds: float) -> None:
    """Let simulated time go by, with everything that happens in it."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop), "real time would make this a sleep"
    moment: asyncio.Future[None] = loop.create_future()
    loop.call_later(seconds, moment.set_result, None)
    await moment
