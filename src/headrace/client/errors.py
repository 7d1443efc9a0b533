"""What can go wrong on this side of the wire, as one tree under `KafkaError`.

Owns the local errors: each carries the Kafka code nearest to it, says whether trying again can help, and
hints at the next step. What a broker answers stays a plain `KafkaError`. Invariant: no failure of the client
is a silent hang; every wait ends in a result or one of these. Raised by this layer, shown to people by `cli`.
"""

from headrace.base.errors import ErrorCode, KafkaError

NOT_KAFKA_HINT = "check that the port is a Kafka listener without TLS"


class ClientError(KafkaError):
    """A failure found by the client itself."""

    default_code = ErrorCode.UNKNOWN_SERVER_ERROR

    def __init__(self, message: str, hint: str = "", code: ErrorCode | None = None) -> None:
        super().__init__(self.default_code if code is None else code, message, hint)


class ConfigError(ClientError):
    """A configuration key or value that the client cannot use."""

    default_code = ErrorCode.INVALID_CONFIG


class Disconnected(ClientError):
    """The connection ended, or could not be made. Retriable."""

    default_code = ErrorCode.NETWORK_EXCEPTION


class RequestTimedOut(ClientError):
    """No answer within the time allowed. Retriable."""

    default_code = ErrorCode.REQUEST_TIMED_OUT


class NotKafka(ClientError):
    """What answers at the address does not speak Kafka's protocol."""

    default_code = ErrorCode.INVALID_REQUEST


class Unsupported(ClientError):
    """The broker has no version of an API that this client speaks."""

    default_code = ErrorCode.UNSUPPORTED_VERSION


class RecordTooLarge(ClientError):
    """A record that no request can hold."""

    default_code = ErrorCode.MESSAGE_TOO_LARGE


class BufferFull(ClientError):
    """The producer's buffer has had no room for as long as it may wait."""

    default_code = ErrorCode.REQUEST_TIMED_OUT


class DeliveryTimedOut(ClientError):
    """A record was not acknowledged within `delivery.timeout.ms`. Whether the broker has it is not known."""

    default_code = ErrorCode.REQUEST_TIMED_OUT


class SerializationFailed(ClientError):
    """A key or value that does not fit its serializer, deserializer or schema."""

    default_code = ErrorCode.INVALID_RECORD


class NotInGroup(ClientError):
    """The consumer has no group, or lost its place in it: what it asked for belongs to members."""

    default_code = ErrorCode.UNKNOWN_MEMBER_ID


class TransactionFailed(ClientError):
    """The transaction cannot be committed: abort it and do it again. The cause says why."""

    default_code = ErrorCode.TRANSACTION_ABORTABLE


class Fenced(ClientError):
    """Another client took over the transactional.id or group.instance.id: close this one."""

    default_code = ErrorCode.PRODUCER_FENCED


class Closed(ClientError):
    """The client was closed."""

    default_code = ErrorCode.INVALID_REQUEST


def error_code(number: int) -> ErrorCode:
    """The code on the wire; one from the future is an unknown server error."""
    if number == 0:  # by far the most frequent
        return ErrorCode.NONE
    try:
        return ErrorCode(number)
    except ValueError:
        return ErrorCode.UNKNOWN_SERVER_ERROR


def raise_for(number: int, message: str | None, what: str) -> None:
    """Raise what a broker answered, if it is an error, saying what was being done."""
    if number != 0:
        code = error_code(number)
        raise KafkaError(code, f"{what}: {message or code.name}")
