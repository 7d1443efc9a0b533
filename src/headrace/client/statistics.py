"""What a client has done and how it is, in numbers: counters since it began, and gauges of now.

Owns the counters, which are raised once a batch or request, never once a record, and their rendering as Prometheus
text. Invariant: counters only grow. Called by `producer` and `consumer`; read by people's programs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TypeAlias

Statistics: TypeAlias = dict[str, "float | dict[str, float]"]


@dataclass(slots=True, eq=False)
class ProducerCounters:
    """What a producer counts."""

    records_acknowledged: int = 0
    records_failed: int = 0
    bytes_acknowledged: int = 0
    batches_acknowledged: int = 0
    produce_requests: int = 0
    batch_retries: int = 0
    batch_splits: int = 0
    epoch_bumps: int = 0


@dataclass(slots=True, eq=False)
class ConsumerCounters:
    """What a consumer counts."""

    records_handed_out: int = 0
    bytes_fetched: int = 0
    fetch_requests: int = 0
    fetch_errors: int = 0
    offset_resets: int = 0
    records_not_decoded: int = 0


def counted(counters: ProducerCounters | ConsumerCounters) -> Statistics:
    """The counters by name."""
    return {field.name: getattr(counters, field.name) for field in fields(counters)}


def prometheus_text(statistics: Mapping[str, "float | dict[str, float]"], prefix: str) -> str:
    """The numbers in Prometheus' text format; what is told by broker or partition has that as a label."""
    lines = []
    for name, value in statistics.items():
        metric = f"headrace_{prefix}_{name}"
        if isinstance(value, dict):
            lines += [f'{metric}{{of="{label}"}} {number}' for label, number in value.items()]
        else:
            lines.append(f"{metric} {value}")
    return "\n".join(lines) + "\n"
