"""What happens to a record between the fetch and the reader: deserializers, and what to do when they fail.

Owns the choice between stopping at a record that cannot be decoded, skipping it and putting it aside. Invariant:
records come out in the order they went in; stopped at a record, everything from it on stays here, and every further
look raises again until the reader seeks past it. Called by `consumer`.
"""

from collections import deque
from collections.abc import Callable

from headrace.client.error_policy import ErrorHandler
from headrace.client.errors import SerializationFailed
from headrace.client.fetched import ConsumerRecord
from headrace.client.serializers import Context, Deserializer


class Incoming:
    """What a consumer's records go through."""

    def __init__(
        self,
        key_deserializer: Deserializer | None,
        value_deserializer: Deserializer | None,
        on_error: ErrorHandler | None,
    ) -> None:
        self._key = key_deserializer
        self._value = value_deserializer
        self._on_error = on_error
        self.held: deque[ConsumerRecord] = deque()  # as fetched, not decoded yet
        self.failures = 0

    @property
    def needed(self) -> bool:
        """Whether records must come through here."""
        return self._key is not None or self._value is not None

    def keep(self, wanted: Callable[[ConsumerRecord], bool]) -> None:
        """Drop held records that are not wanted any more."""
        if self.held:
            self.held = deque(record for record in self.held if wanted(record))

    async def decode(self, records: list[ConsumerRecord]) -> list[ConsumerRecord]:
        """The records decoded, as far as they can be. Raises SerializationFailed when the first of them cannot."""
        self.held.extend(records)
        out: list[ConsumerRecord] = []
        while self.held:
            record = self.held[0]
            try:
                decoded = self._decoded(record)
            except Exception as error:
                failure = self._failure(record, error)
                if self._on_error is None:
                    if out:
                        return out  # the next look raises
                    raise failure from error
                self.failures += 1
                await self._on_error(record, failure)
                self.held.popleft()
                continue
            self.held.popleft()
            out.append(decoded)
        return out

    def _decoded(self, record: ConsumerRecord) -> ConsumerRecord:
        if self._key is not None:
            record = record._replace(key=self._key(record.key, Context(record.topic, "key")))
        if self._value is not None:
            record = record._replace(value=self._value(record.value, Context(record.topic, "value")))
        return record

    def _failure(self, record: ConsumerRecord, error: Exception) -> SerializationFailed:
        place = f"{record.topic}-{record.partition} at offset {record.offset}"
        return SerializationFailed(
            f"the record of {place} cannot be decoded: {error}",
            f"seek past it, or give the consumer on_error='skip' or a DeadLetter ({type(error).__name__})",
        )
