"""What a run tells of itself: one batch of one query in a few numbers, and the same as Prometheus reads it.

Owns the names of those numbers. Invariant: pure; what Spark reports goes in, an event comes out. Called by `runner`,
and by the command line that shows it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

OBSERVED: Final = "headrace_out"
DEAD_QUERY: Final = "dead"

Event = dict[str, Any]

_GAUGES: Final = {
    "rows_in_per_second": "Rows read a second, over the latest batch.",
    "rows_out_per_second": "Rows written a second, over the latest batch.",
    "batch_seconds": "Time that the latest batch took.",
    "batch": "Number of the latest batch.",
    "state_rows": "Rows kept in state.",
    "state_bytes": "Memory that state takes.",
    "watermark_seconds": "The watermark, in seconds since 1970.",
}
_COUNTERS: Final = {
    "rows_in_total": "Rows read since the run began.",
    "rows_out_total": "Rows written since the run began.",
}


def summarize(name: str, progress: Any) -> Event:
    """One batch of one query."""
    batch_ms = progress["durationMs"].get("triggerExecution", 0)
    rows_in, rows_out = progress["numInputRows"] or 0, _rows_out(progress)
    seconds = batch_ms / 1000
    return {
        "event": "progress",
        "query": name,
        "batch": progress["batchId"],
        "at": progress["timestamp"],
        "rows_in": rows_in,
        "rows_out": rows_out,
        "rows_in_per_s": round(rows_in / seconds, 1) if seconds else 0.0,
        "rows_out_per_s": round(rows_out / seconds, 1) if seconds else 0.0,
        "batch_ms": batch_ms,
        "watermark": progress["eventTime"].get("watermark"),
        "state_rows": sum(operator["numRowsTotal"] for operator in progress["stateOperators"]),
        "state_bytes": sum(operator["memoryUsedBytes"] for operator in progress["stateOperators"]),
        "lag": lag_of(progress["sources"]),
    }


def lag_of(sources: Any) -> dict[str, int]:
    """By topic, how many records there are that the batch did not take."""
    lag: dict[str, int] = {}
    for source in sources:
        latest, end = _offsets(source["latestOffset"]), _offsets(source["endOffset"])
        for (topic, number), offset in latest.items():
            lag[topic] = lag.get(topic, 0) + max(0, offset - end.get((topic, number), 0))
    return lag


def _rows_out(progress: Any) -> int:
    """Counted on their way to the sink, because Spark does not ask sinks like ours how many they took."""
    observed = progress["observedMetrics"] or {}
    if OBSERVED in observed:
        row = observed[OBSERVED]
        found = row.get("rows") if isinstance(row, Mapping) else getattr(row, "rows", None)
        if found is not None:  # through Spark Connect, a batch may have a row without columns
            return int(found)
    return max(0, int(progress["sink"]["numOutputRows"] or 0))


def _offsets(text: Any) -> dict[tuple[str, int], int]:
    try:
        read = json.loads(text) if isinstance(text, str) else text or {}
        return {
            (topic, int(number)): int(offset)
            for topic, parts in read.get("topics", {}).items()
            for number, offset in parts["offsets"].items()
        }
    except (ValueError, AttributeError, KeyError, TypeError):
        return {}


@dataclass
class Totals:
    """The latest event of each query, and how much each has done since the run began."""

    latest: dict[str, Event] = field(default_factory=dict)
    rows_in: dict[str, int] = field(default_factory=dict)
    rows_out: dict[str, int] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        """Take in one batch."""
        query = event["query"]
        self.latest[query] = event
        self.rows_in[query] = self.rows_in.get(query, 0) + event["rows_in"]
        self.rows_out[query] = self.rows_out.get(query, 0) + event["rows_out"]

    @property
    def dead_letters(self) -> int:
        """Records that could not be decoded, since the run began."""
        return sum(count for query, count in self.rows_out.items() if query.endswith(f"-{DEAD_QUERY}"))

    def prometheus(self) -> str:
        """All of it in Prometheus' text format."""
        lines: list[str] = []

        def family(name: str, kind: str, text: str, samples: list[tuple[str, Any]]) -> None:
            lines.extend(
                (f"# HELP headrace_pipeline_{name} {text}", f"# TYPE headrace_pipeline_{name} {kind}")
            )
            lines.extend(f"headrace_pipeline_{name}{{{labels}}} {value}" for labels, value in samples)

        events = sorted(self.latest.items())
        for name, text in _GAUGES.items():
            values = [(_label(query=query), _gauge(name, event)) for query, event in events]
            family(name, "gauge", text, [(labels, value) for labels, value in values if value is not None])
        for name, text in _COUNTERS.items():
            counted = self.rows_in if name == "rows_in_total" else self.rows_out
            family(name, "counter", text, [(_label(query=q), count) for q, count in sorted(counted.items())])
        lags = [
            (_label(query=query, topic=topic), lag)
            for query, event in events
            for topic, lag in sorted(event["lag"].items())
        ]
        family("lag", "gauge", "Records in a topic that the latest batch did not take.", lags)
        lines += [
            "# HELP headrace_pipeline_dead_letters_total Records that could not be decoded since the run began.",
            "# TYPE headrace_pipeline_dead_letters_total counter",
            f"headrace_pipeline_dead_letters_total {self.dead_letters}",
        ]
        return "\n".join(lines) + "\n"


def _gauge(name: str, event: Event) -> Any:
    if name == "batch_seconds":
        return event["batch_ms"] / 1000
    if name == "watermark_seconds":
        return None if event["watermark"] is None else _seconds(event["watermark"])
    return event[name.replace("_per_second", "_per_s")]


def _seconds(text: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(text).timestamp()


def _label(**labels: str) -> str:
    escaped = {name: value.replace("\\", r"\\").replace('"', r"\"") for name, value in labels.items()}
    return ",".join(f'{name}="{value}"' for name, value in escaped.items())
