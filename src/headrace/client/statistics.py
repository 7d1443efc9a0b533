"""What a client has done and how it is, in numbers: counters since it began, and gauges of now.

Owns the counters, which are raised once a batch or request, never once a record, and their rendering as Prometheus
text. Invariant: counters only grow. Called by `producer` and `consumer`; read by people's programs.
"""

from collections.abc import Mapping
from typing import TypeAlias

Statistics: TypeAlias = dict[str, "float | dict[str, float]"]


class ProducerCounters:
    """What a producer counts."""

    def __init__(self) -> None:
        self.records_acknowledged = 0
        self.records_failed = 0
        self.bytes_acknowledged = 0
        self.batches_acknowledged = 0
        self.produce_requests = 0
        self.batch_retries = 0
        self.batch_splits = 0
        self.epoch_bumps = 0


class ConsumerCounters:
    """What a consumer counts."""

    def __init__(self) -> None:
        self.records_handed_out = 0
        self.bytes_fetched = 0
        self.fetch_requests = 0
        self.fetch_errors = 0
        self.offset_resets = 0
        self.records_not_decoded = 0


def counted(counters: ProducerCounters | ConsumerCounters) -> Statistics:
    """The counters by name."""
    return dict(vars(counters))


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
