"""How the demo speaks: lines with the seconds since it began, and waiting that ends."""

import sys
import time
from collections.abc import Callable

from rich.console import Console

DEADLINE_S = 120.0

console = Console(highlight=False)
started_s = time.monotonic()


def say(text: str) -> None:
    console.print(f"[dim]{time.monotonic() - started_s:7.2f} s[/]  {text}", soft_wrap=True)


def wait_for(
    condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S, every_s: float = 0.002
) -> None:
    """Return when the condition holds; end the demo when it does not in time."""
    until_s = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > until_s:
            sys.exit(f"demo: gave up after {deadline_s:.0f} s waiting for {what}")
        time.sleep(every_s)
