"""What Spark's errors say, in a line or two for the person at the terminal.

Owns the way from Spark's texts, which hold plans, stacks of the JVM and tracebacks of Python, to their cause.
Invariant: the cause is a part of the text, never made up; what to do is added where it is known. Called by `plan` and
`runner`.
"""

import re

_LAST_LINE = re.compile(r"^([A-Za-z_][\w.]*): (.*)$")
_ENDS = ("JVM stacktrace:", "== ", "SQLSTATE:")
_SENDING = (
    "PicklingError: Could not serialize object: "  # around what is raised while a writer is sent to its tasks
)
_HINTS = {
    "Python worker failed to connect back": (
        "Spark waits ten seconds for a Python process to start, and this machine was too busy for that. "
        "Run it again: it goes on from its checkpoint."
    ),
}


def first_line(error: Exception) -> str:
    """What Spark says of a mistake, without its stack and plan."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].removesuffix(";") if lines else type(error).__name__


def failure(text: str) -> str:
    """Why a query failed: its first line and, when Python raised inside of it, what Python raised."""
    first, _, rest = text.strip().partition("\n")
    cause = ""
    for line in rest.splitlines() if "Traceback (most recent call last)" in text else ():
        found = _LAST_LINE.match(line)
        if found is not None and not line.startswith(_ENDS):
            cause = f"{found[1].rpartition('.')[2]}: {found[2]}".removeprefix(_SENDING)
    first = re.sub(r"\s+SQLSTATE: \w+$", "", first.strip())
    first = first.removesuffix("Traceback (most recent call last):").strip()
    cause = cause or next((hint for words, hint in _HINTS.items() if words in first), "")
    return f"{first}\n  {cause}" if cause else first
