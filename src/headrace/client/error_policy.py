"""What happens to a record that cannot be decoded or processed: stop, skip it, or put it aside.

Owns the three answers and the headers that tell where a record in a dead-letter topic came from. Invariant: a
record is skipped only after the log has it, and put aside only after the dead-letter topic has acknowledged it;
until then the consumer goes no further in that partition. Called by `consumer` and `processing`.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Literal, Protocol, TypeAlias

from headrace.base.log import get_logger
from headrace.client.errors import ConfigError
from headrace.client.fetched import ConsumerRecord

ERROR_TEXT_MAX = 1_000
ORIGIN = "headrace.origin."

_log = get_logger(__name__)


class Sends(Protocol):
    """The producer that a dead-letter topic is written with."""

    def send(self, topic: str, value: Any, *, key: Any, headers: Any) -> Awaitable[Any]: ...


class DeadLetter:
    """Put records aside in another topic, as they were, with their origin and the error in headers.

    The producer must be one without serializers: records are written as the bytes they were.
    """

    def __init__(self, producer: Sends, topic: str) -> None:
        self.producer = producer
        self.topic = topic

    async def __call__(self, record: ConsumerRecord, error: Exception) -> None:
        delivery = await self.producer.send(
            self.topic,
            record.value,
            key=record.key,
            headers=[*record.headers, *origin_headers(record, error)],
        )
        await delivery


def origin_headers(record: ConsumerRecord, error: Exception) -> list[tuple[str, bytes | None]]:
    """Where a record was, and what went wrong with it."""
    facts = {
        "topic": record.topic,
        "partition": str(record.partition),
        "offset": str(record.offset),
        "timestamp": str(record.timestamp_ms),
        "error": f"{type(error).__name__}: {error}"[:ERROR_TEXT_MAX],
    }
    return [(ORIGIN + name, text.encode()) for name, text in facts.items()]


ErrorHandler: TypeAlias = Callable[[ConsumerRecord, Exception], "Awaitable[None]"]
OnError: TypeAlias = "Literal['stop', 'skip'] | DeadLetter | ErrorHandler"


def error_handler(chosen: Any) -> ErrorHandler | None:
    """The handler that an `on_error` stands for; None is to stop."""
    if chosen is None or chosen == "stop":
        return None
    if chosen == "skip":
        return _skip
    if callable(chosen):
        handler: ErrorHandler = chosen
        return handler
    raise ConfigError(f"on_error={chosen!r}", "use 'stop', 'skip', a DeadLetter, or a coroutine function")


async def _skip(record: ConsumerRecord, error: Exception) -> None:
    place = f"{record.topic}-{record.partition}"
    _log.warning(
        "record skipped",
        extra={"fields": {"partition": place, "offset": record.offset, "reason": str(error)}},
    )
