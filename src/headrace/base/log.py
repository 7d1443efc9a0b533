"""Structured logs: one event a line, as text for people or JSON for programs, on standard error.

A line holds an event and named fields, never a payload, a key or a secret. Callers write
`logger.info("partition recovered", extra={"fields": {"topic": topic, "cut_bytes": n}})`; the correlation id of the
request being served is added by itself.

A warning or an error that repeats is written LINES_MAX times in a window and counted from then on: a client that tries
again and again on a full disk must not fill it with lines. The next one that is written says how many were not.
"""

import logging
import sys
from contextvars import ContextVar
from typing import TextIO

LINES_MAX = 10
WINDOW_S = 60.0
EVENTS_MAX = 1000
"""Events whose repetitions are counted at a time; when there are more, counting starts again."""

correlation: ContextVar[object | None] = ContextVar("correlation", default=None)
"""The request being served; it is turned into text only when a line is written."""


def get_logger(name: str) -> logging.Logger:
    """The logger of one module; `name` is its dotted path."""
    return logging.getLogger(name)


def configure(level: str = "WARNING", *, as_json: bool = False, stream: TextIO | None = None) -> None:
    """Send all of Headrace's logs to one stream. Quiet unless `level` asks for more."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_JsonFormatter() if as_json else _TextFormatter())
    handler.addFilter(_Repetitions())
    root = logging.getLogger("headrace")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields: dict[str, object] = dict(getattr(record, "fields", {}))
    if (request := correlation.get()) is not None:
        fields.setdefault("request", str(request))
    if unwritten := getattr(record, "unwritten", 0):
        fields["unwritten"] = unwritten
    return fields


class _Repetitions(logging.Filter):
    """Lets the first few of a repeated event through.

    What is written while a request is served repeats as often as clients like, for whatever partition: there the event
    alone counts. Elsewhere, as in a recovery of many partitions, lines that differ in their fields are different.
    """

    def __init__(self) -> None:
        super().__init__()
        self._windows: dict[object, list[float]] = {}  # event -> begin of its window, lines seen in it

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        event: object = record.name, record.msg
        if correlation.get() is None:
            event = event, str(getattr(record, "fields", ""))
        window = self._windows.get(event)
        if window is None or record.created - window[0] >= WINDOW_S:
            if window is not None:
                record.unwritten = max(0, int(window[1]) - LINES_MAX)
            elif len(self._windows) >= EVENTS_MAX:
                self._windows.clear()
            window = self._windows[event] = [record.created, 0]
        window[1] += 1
        return window[1] <= LINES_MAX


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        name = record.name.removeprefix("headrace.")
        head = f"{self.formatTime(record)} {record.levelname:<7} {name}: {record.getMessage()}"
        tail = "".join(f" {name}={value}" for name, value in _fields(record).items())
        trace = "\n" + self.formatException(record.exc_info) if record.exc_info else ""
        return head + tail + trace


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "event": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        import json  # not needed by clients, whose start it would slow down

        return json.dumps(line, default=str)
