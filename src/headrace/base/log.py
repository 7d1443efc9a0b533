"""Structured logs: one event a line, as text for people or JSON for programs, on standard error.

A line holds an event and named fields, never a payload, a key or a secret. Callers write
`logger.info("partition recovered", extra={"fields": {"topic": topic, "cut_bytes": n}})`; the correlation id of the
request being served is added by itself.
"""

import json
import logging
import sys
from contextvars import ContextVar
from typing import TextIO

correlation: ContextVar[object | None] = ContextVar("correlation", default=None)
"""The request being served; it is turned into text only when a line is written."""


def get_logger(name: str) -> logging.Logger:
    """The logger of one module; `name` is its dotted path."""
    return logging.getLogger(name)


def configure(level: str = "WARNING", *, as_json: bool = False, stream: TextIO | None = None) -> None:
    """Send all of Headrace's logs to one stream. Quiet unless `level` asks for more."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_JsonFormatter() if as_json else _TextFormatter())
    root = logging.getLogger("headrace")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields: dict[str, object] = dict(getattr(record, "fields", {}))
    if (request := correlation.get()) is not None:
        fields.setdefault("request", str(request))
    return fields


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
        return json.dumps(line, default=str)
