"""OpenTelemetry spans of records, with the W3C context in their headers; off unless asked for.

Owns the span of a send and the link from a consumed record to it. Invariants: without `tracing=True` nothing here
is imported; a record that comes with a context (another program began the trace) keeps the trace; the header is
`traceparent` (and `tracestate`), replaced, never doubled. Needs `headrace[tracing]`. Called by `outgoing` and
`consumer`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from headrace.base.errors import KafkaError
from headrace.client.batches import Headers
from headrace.client.errors import ConfigError
from headrace.client.fetched import ConsumerRecord
from headrace.records.codec import RecordMetadata

CONTEXT_HEADERS = ("traceparent", "tracestate")


class Tracing:
    """Begins and ends spans with the tracer provider that the program has set."""

    def __init__(self) -> None:
        try:
            from opentelemetry import propagate, trace
        except ImportError:
            raise ConfigError(
                "tracing needs the package opentelemetry-api",
                "install it with: pip install 'headrace[tracing]'",
            ) from None
        self._trace: Any = trace
        self._propagate: Any = propagate
        self._tracer = trace.get_tracer("headrace")

    def begin_send(self, topic: str, headers: Headers) -> tuple[Any, Headers]:
        """A span for one record, and the record's headers with its context."""
        span = self._tracer.start_span(
            f"send {topic}",
            kind=self._trace.SpanKind.PRODUCER,
            attributes={"messaging.system": "kafka", "messaging.destination.name": topic},
        )
        carrier: dict[str, str] = {}
        self._propagate.inject(carrier, context=self._trace.set_span_in_context(span))
        kept = [(name, content) for name, content in headers if name not in carrier]
        return span, [*kept, *((name, text.encode()) for name, text in carrier.items())]

    def end_send(self, span: Any, metadata: RecordMetadata | None, error: KafkaError | None) -> None:
        """The record's fate is known."""
        if metadata is not None:
            span.set_attribute("messaging.destination.partition.id", str(metadata.partition))
            span.set_attribute("messaging.kafka.offset", metadata.offset)
        if error is not None:
            span.record_exception(error)
            span.set_status(self._trace.StatusCode.ERROR, error.message)
        span.end()

    @contextmanager
    def processing(self, record: ConsumerRecord) -> Iterator[Any]:
        """A span around the processing of a record, in the trace of its sender."""
        carrier = {
            name: content.decode("ascii", "replace")
            for name, content in record.headers
            if name in CONTEXT_HEADERS and content is not None
        }
        attributes: dict[str, Any] = {
            "messaging.system": "kafka",
            "messaging.destination.name": record.topic,
            "messaging.destination.partition.id": str(record.partition),
            "messaging.kafka.offset": record.offset,
        }
        with self._tracer.start_as_current_span(
            f"process {record.topic}",
            context=self._propagate.extract(carrier),
            kind=self._trace.SpanKind.CONSUMER,
            attributes=attributes,
        ) as span:
            yield span
