"""Client configuration: Kafka's own keys, checked at the door.

Owns the typed configurations made from the table of keys. Invariant: a key is used or refused, never
ignored in silence. Keys that belong to another kind of client are allowed, because people share one file
among them; `foreign_keys` names them. Called by producer, consumer, admin, and by the command line for
`--config` and `-X`.
"""

import inspect
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from headrace.client.config_keys import ACKS_ALL, KEYS, Address, parse_address
from headrace.client.errors import ConfigError
from headrace.records.compression import NAMES as COMPRESSION_NAMES

__all__ = [
    "ACKS_ALL",
    "KEYS",
    "Address",
    "AdminConfig",
    "CommonConfig",
    "ConsumerConfig",
    "ProducerConfig",
    "admin_config",
    "check_keys",
    "consumer_config",
    "foreign_keys",
    "parse_address",
    "producer_config",
    "settings",
]

IDEMPOTENT_IN_FLIGHT_MAX = 5

_NOT_YET = ("ssl.", "sasl.")
_JAVA_ONLY = (
    "key.serializer",
    "value.serializer",
    "key.deserializer",
    "value.deserializer",
    "metric",
    "interceptor.",
)


class CommonConfig:
    """What every client has. Written by hand where a data class would do: those of this module alone would take a
    tenth of the time that importing the client may take."""

    def __init__(self, **values: Any) -> None:
        assert values.keys() == set(_names(type(self))), "every key has a value"
        vars(self).update(values)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a configuration does not change: {name}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({vars(self)})"

    bootstrap_servers: tuple[Address, ...]
    client_id: str
    request_timeout_ms: int
    socket_connection_setup_timeout_ms: int
    reconnect_backoff_ms: int
    reconnect_backoff_max_ms: int
    retry_backoff_ms: int
    retry_backoff_max_ms: int
    metadata_max_age_ms: int
    receive_buffer_bytes: int
    send_buffer_bytes: int


class AdminConfig(CommonConfig):
    """An admin client's configuration."""

    default_api_timeout_ms: int


class ProducerConfig(CommonConfig):
    """A producer's configuration."""

    acks: int
    enable_idempotence: bool
    batch_size: int
    linger_ms: int
    buffer_memory: int
    max_block_ms: int
    max_request_size: int
    max_in_flight_requests_per_connection: int
    delivery_timeout_ms: int
    retries: int
    compression_type: str
    compression_gzip_level: int | None
    compression_lz4_level: int | None
    compression_zstd_level: int | None
    partitioner: str
    partitioner_ignore_keys: bool
    transactional_id: str | None
    transaction_timeout_ms: int

    @property
    def compression(self) -> int:
        """The codec's number in a batch's attributes."""
        return COMPRESSION_NAMES[self.compression_type]

    @property
    def compression_level(self) -> int | None:
        """The level of the codec in use; None is the codec's own default."""
        gzip_level = self.compression_gzip_level
        levels = {
            "gzip": None if gzip_level == -1 else gzip_level,
            "lz4": self.compression_lz4_level,
            "zstd": self.compression_zstd_level,
        }
        return levels.get(self.compression_type)


class ConsumerConfig(CommonConfig):
    """A consumer's configuration."""

    default_api_timeout_ms: int
    fetch_min_bytes: int
    fetch_max_bytes: int
    fetch_max_wait_ms: int
    max_partition_fetch_bytes: int
    max_poll_records: int
    auto_offset_reset: str
    isolation_level: str
    check_crcs: bool
    group_id: str | None
    group_instance_id: str | None
    group_protocol: str
    group_remote_assignor: str | None
    partition_assignment_strategy: tuple[str, ...]
    session_timeout_ms: int
    heartbeat_interval_ms: int
    max_poll_interval_ms: int
    enable_auto_commit: bool
    auto_commit_interval_ms: int
    exclude_internal_topics: bool
    client_rack: str

    @property
    def read_committed(self) -> bool:
        return self.isolation_level == "read_committed"


C = TypeVar("C", bound=CommonConfig)


def _names(kind: type[CommonConfig]) -> list[str]:
    """The fields of a configuration."""
    return [name for part in reversed(kind.__mro__) for name in inspect.get_annotations(part)]


def admin_config(values: Mapping[str, object]) -> AdminConfig:
    """The configuration of an admin client from Kafka's keys. Raises ConfigError."""
    return _build(AdminConfig, values)


def consumer_config(values: Mapping[str, object]) -> ConsumerConfig:
    """The configuration of a consumer from Kafka's keys. Raises ConfigError."""
    config = _build(ConsumerConfig, values)
    if config.heartbeat_interval_ms >= config.session_timeout_ms:
        raise ConfigError("heartbeat.interval.ms must be below session.timeout.ms", "a third of it is usual")
    if config.group_instance_id is not None and config.group_id is None:
        raise ConfigError("group.instance.id needs a group.id", "give both, or neither")
    if config.group_protocol == "consumer":
        for name in ("partition.assignment.strategy", "session.timeout.ms", "heartbeat.interval.ms"):
            if name in values:
                raise ConfigError(
                    f"{name} has no place with group.protocol=consumer: the broker decides it",
                    "remove it, or use group.protocol=classic",
                )
    elif config.group_remote_assignor is not None:
        raise ConfigError(
            "group.remote.assignor needs group.protocol=consumer",
            "with the classic protocol, use partition.assignment.strategy",
        )
    return config


def producer_config(values: Mapping[str, object]) -> ProducerConfig:
    """The configuration of a producer from Kafka's keys. Raises ConfigError.

    As with Kafka, idempotence that was not asked for gives way to settings it cannot live with; when it was asked for,
    they are refused.
    """
    values = dict(values)
    config = _build(ProducerConfig, values)
    conflicts = []
    if config.acks != ACKS_ALL:
        conflicts.append("acks=all")
    if config.max_in_flight_requests_per_connection > IDEMPOTENT_IN_FLIGHT_MAX:
        conflicts.append(f"max.in.flight.requests.per.connection of at most {IDEMPOTENT_IN_FLIGHT_MAX}")
    if config.retries == 0:
        conflicts.append("retries above 0")
    if config.transactional_id is not None and not config.enable_idempotence:
        raise ConfigError("transactional.id needs enable.idempotence", "leave enable.idempotence as it is")
    if config.enable_idempotence and conflicts:
        if "enable.idempotence" in values or config.transactional_id is not None:
            raise ConfigError(
                f"enable.idempotence needs {' and '.join(conflicts)}",
                "change that, or set enable.idempotence=false",
            )
        config = _build(ProducerConfig, {**values, "enable.idempotence": False})
    if config.delivery_timeout_ms < config.linger_ms + config.request_timeout_ms:
        if "delivery.timeout.ms" in values and "request.timeout.ms" in values:
            raise ConfigError(
                "delivery.timeout.ms must be at least linger.ms + request.timeout.ms",
                "raise delivery.timeout.ms or lower the others",
            )
        if "delivery.timeout.ms" in values:
            request_ms = max(1, config.delivery_timeout_ms - config.linger_ms)
            config = _build(ProducerConfig, {**values, "request.timeout.ms": request_ms})
        else:
            total_ms = config.linger_ms + config.request_timeout_ms
            config = _build(ProducerConfig, {**values, "delivery.timeout.ms": total_ms})
    return config


def check_keys(values: Mapping[str, object]) -> None:
    """Refuse keys that no client of ours has, and values that cannot be. Raises ConfigError."""
    for name, value in values.items():
        _parse(name, value)


def foreign_keys(values: Mapping[str, object], *clients: str) -> list[str]:
    """The keys that none of these kinds of client (`producer`, `consumer`, `admin`) uses.

    Among them those of Java's clients that have no use here: a file that is shared with other programs has them.
    """
    return [name for name in values if not set(clients) & _users(name)]


def settings(config: Mapping[str, object] | None, keywords: Mapping[str, object]) -> dict[str, object]:
    """Kafka's keys from a mapping and from keyword arguments (`linger_ms=5` is `linger.ms`). Raises ConfigError."""
    values = dict(config or {})
    for keyword, value in keywords.items():
        name = keyword.replace("_", ".")
        if name in values:
            raise ConfigError(f"{name} is given twice", f"as a key and as {keyword}=")
        values[name] = value
    return values


def _users(name: str) -> set[str]:
    """The kinds of client that a key is for; all of them when it is not known, so that it is refused."""
    if name in KEYS:
        return set(KEYS[name].clients.split())
    return set() if name.startswith(_JAVA_ONLY) else {"producer", "consumer", "admin"}


def _build(kind: type[C], values: Mapping[str, object]) -> C:
    check_keys(values)
    arguments = {}
    for field in _names(kind):
        name = field.replace("_", ".")
        arguments[field] = _parse(name, values[name] if name in values else KEYS[name].default)
    return kind(**arguments)


def _parse(name: str, value: object) -> Any:
    key = KEYS.get(name)
    if key is None:
        raise _refused(name)
    try:
        return key.parse(value)
    except ValueError as error:
        if name == "security.protocol":
            raise ConfigError(
                f"security.protocol={value} is not supported by this client yet", "use a PLAINTEXT listener"
            ) from None
        raise ConfigError(f"{name}: {error}", key.doc) from None


def _refused(name: str) -> ConfigError:
    if name.startswith(_NOT_YET):
        return ConfigError(
            f"{name}: security is not supported by this client yet", "use a PLAINTEXT listener"
        )
    if name.endswith("serializer"):
        return ConfigError(
            f"{name}: serializers are given to the constructor", f"pass {name.replace('.', '_')}=…, not a key"
        )
    if name.startswith(_JAVA_ONLY):
        return ConfigError(
            f"{name}: a key of Kafka's Java clients that this client has no use for", "remove it"
        )
    from difflib import get_close_matches  # for those who mistype only

    near = get_close_matches(name, KEYS, n=1, cutoff=0.5)
    return ConfigError(
        f"{name}: no such configuration key",
        f"did you mean {near[0]}?" if near else "keys are Kafka's client keys",
    )
