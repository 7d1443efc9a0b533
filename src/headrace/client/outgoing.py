"""What happens to a record before it enters the producer's buffer: interceptors, serializers, tracing.

Owns the order: interceptors see what the caller gave, then a span is begun, then serializers make bytes. Invariant: a
producer without any of these does not come here at all. Called by `producer`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from headrace.base.errors import KafkaError
from headrace.client.batches import Headers
from headrace.client.serializers import Context, Serializer
from headrace.client.tracing import Tracing
from headrace.records.codec import Delivery, RecordMetadata


class ProducerRecord(NamedTuple):
    """A record as the caller gave it."""

    topic: str
    value: Any
    key: Any
    headers: Headers
    partition: int | None
    timestamp_ms: int | None


class ProducerInterceptor(Protocol):
    """Sees, and may replace, every record that is sent, and hears what became of it. Must not block."""

    def on_send(self, record: ProducerRecord) -> ProducerRecord:
        """The record to send instead."""
        ...

    def on_acknowledgement(self, metadata: RecordMetadata | None, error: KafkaError | None) -> None:
        """One record is acknowledged, or has failed."""
        ...


class Outgoing:
    """What a producer's records go through."""

    def __init__(
        self,
        key_serializer: Serializer | None,
        value_serializer: Serializer | None,
        interceptors: Sequence[ProducerInterceptor],
        tracing: Tracing | None,
    ) -> None:
        self._key_serializer = key_serializer
        self._value_serializer = value_serializer
        self._interceptors = interceptors
        self._tracing = tracing

    @property
    def needed(self) -> bool:
        """Whether records must come through here."""
        return bool(self._key_serializer or self._value_serializer or self._interceptors or self._tracing)

    def prepare(self, record: ProducerRecord) -> tuple[ProducerRecord, Any]:
        """The record as it is sent, and the span that follows it. Raises SerializationFailed."""
        for interceptor in self._interceptors:
            record = interceptor.on_send(record)
        span = None
        if self._tracing is not None:
            span, headers = self._tracing.begin_send(record.topic, record.headers)
            record = record._replace(headers=headers)
        try:
            if self._key_serializer is not None:
                key = self._key_serializer(record.key, Context(record.topic, "key"))
                record = record._replace(key=key)
            if self._value_serializer is not None:
                value = self._value_serializer(record.value, Context(record.topic, "value"))
                record = record._replace(value=value)
        except KafkaError as error:
            self.failed(span, error)
            raise
        return record, span

    def failed(self, span: Any, error: KafkaError) -> None:
        """The record did not enter the buffer."""
        if self._tracing is not None:
            self._tracing.end_send(span, None, error)
        for interceptor in self._interceptors:
            interceptor.on_acknowledgement(None, error)

    def follow(self, delivery: Delivery, span: Any) -> None:
        """Tell interceptors and the span how it ends."""
        if self._interceptors or span is not None:
            delivery.add_done_callback(lambda done: self._ended(done, span))

    def _ended(self, delivery: Delivery, span: Any) -> None:
        error = delivery.exception()
        metadata = delivery.result() if error is None else None
        if self._tracing is not None:
            self._tracing.end_send(span, metadata, error)
        for interceptor in self._interceptors:
            interceptor.on_acknowledgement(metadata, error)
