"""Client configuration: Kafka's own keys, checked at the door.

Owns the table of keys and the typed configurations made from it. Invariant: a key is used or refused, never
ignored in silence. Keys that belong to another kind of client are allowed, because people share one file
among them; `foreign_keys` names them. Called by producer, consumer, admin, and by the command line for
`--config` and `-X`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, NamedTuple, TypeAlias, TypeVar

from headrace.client.errors import ConfigError
from headrace.records.compression import NAMES as COMPRESSION_NAMES

Address: TypeAlias = tuple[str, int]
ACKS_ALL = -1
IDEMPOTENT_IN_FLIGHT_MAX = 5


class Key(NamedTuple):
    """One configuration key: how its value is read, Kafka's default, which clients use it, and what it does."""

    parse: Callable[[Any], Any]
    default: Any
    clients: str
    doc: str


def _integer(lowest: int, highest: int = 2**31 - 1) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        try:
            number = int(str(value).strip())
        except ValueError:
            raise ValueError(f"expected a whole number, got {value!r}") from None
        if not lowest <= number <= highest:
            raise ValueError(f"expected {lowest} to {highest}, got {number}")
        return number

    return parse


def _level(lowest: int, highest: int) -> Callable[[Any], int | None]:
    integer = _integer(lowest, highest)
    return lambda value: None if value is None else integer(value)


def _boolean(value: Any) -> bool:
    text = str(value).strip().lower()
    if text not in ("true", "false"):
        raise ValueError(f"expected true or false, got {value!r}")
    return text == "true"


def _choice(*words: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        text = str(value).strip().lower()
        if text not in words:
            raise ValueError(f"expected {', '.join(words[:-1])} or {words[-1]}, got {value!r}")
        return text

    return parse


def _acks(value: Any) -> int:
    text = str(value).strip().lower()
    if text not in ("0", "1", "-1", "all"):
        raise ValueError(f"expected 0, 1 or all, got {value!r}")
    return ACKS_ALL if text == "all" else int(text)


def _addresses(value: Any) -> tuple[Address, ...]:
    items: Iterable[str] = value.split(",") if isinstance(value, str) else value
    found = tuple(parse_address(item.strip()) for item in items if item.strip())
    if not found:
        raise ValueError("expected HOST:PORT, or several with commas between them")
    return found


def parse_address(text: str) -> Address:
    """`host:port` or `[v6]:port`; ValueError when it is neither."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("PLAINTEXT://")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"expected HOST:PORT, got {text!r}")
    return host.strip("[]"), int(port)


_MS = _integer(0)
_ALL = "producer consumer admin"

KEYS: dict[str, Key] = {
    "bootstrap.servers": Key(_addresses, "127.0.0.1:9092", _ALL, "brokers to begin with, as host:port,…"),
    "client.id": Key(str, "headrace", _ALL, "the name that brokers log and count this client by"),
    "request.timeout.ms": Key(_MS, 30_000, _ALL, "the longest wait for one answer"),
    "default.api.timeout.ms": Key(
        _MS, 60_000, "consumer admin", "the longest wait for a call, retries included"
    ),
    "socket.connection.setup.timeout.ms": Key(_MS, 10_000, _ALL, "the longest wait for a connection"),
    "reconnect.backoff.ms": Key(_MS, 50, _ALL, "the first wait before connecting again"),
    "reconnect.backoff.max.ms": Key(_MS, 1_000, _ALL, "the longest wait before connecting again"),
    "retry.backoff.ms": Key(_MS, 100, _ALL, "the first wait before a retry"),
    "retry.backoff.max.ms": Key(_MS, 1_000, _ALL, "the longest wait before a retry"),
    "metadata.max.age.ms": Key(_MS, 300_000, _ALL, "how old metadata may become"),
    "receive.buffer.bytes": Key(_integer(-1), -1, _ALL, "SO_RCVBUF; -1 leaves it to the system"),
    "send.buffer.bytes": Key(_integer(-1), -1, _ALL, "SO_SNDBUF; -1 leaves it to the system"),
    "security.protocol": Key(
        _choice("plaintext"), "plaintext", _ALL, "plaintext; others are not supported yet"
    ),
    "acks": Key(_acks, "all", "producer", "which replicas must have a record: 0, 1 or all"),
    "enable.idempotence": Key(_boolean, True, "producer", "no duplicates and no reordering by retries"),
    "batch.size": Key(_integer(1), 16_384, "producer", "bytes at which a batch is full"),
    "linger.ms": Key(_MS, 5, "producer", "how long a batch waits for more records"),
    "buffer.memory": Key(
        _integer(1, 2**63 - 1), 33_554_432, "producer", "bytes of unacknowledged records held"
    ),
    "max.block.ms": Key(_MS, 60_000, "producer", "the longest wait for room or metadata in send"),
    "max.request.size": Key(_integer(1), 1_048_576, "producer", "the largest record, and produce request"),
    "max.in.flight.requests.per.connection": Key(
        _integer(1), 5, "producer", "requests sent ahead of their answers"
    ),
    "delivery.timeout.ms": Key(
        _MS, 120_000, "producer", "the longest time from send to acknowledgement or failure"
    ),
    "retries": Key(_integer(0), 2**31 - 1, "producer", "how often a batch is tried again"),
    "compression.type": Key(
        _choice("none", "gzip", "snappy", "lz4", "zstd"), "none", "producer", "compression of batches"
    ),
    "compression.gzip.level": Key(_level(-1, 9), None, "producer", "gzip level, 1 to 9; -1 is its default"),
    "compression.lz4.level": Key(_level(1, 17), None, "producer", "lz4 level, 1 to 17"),
    "compression.zstd.level": Key(_level(-131_072, 22), None, "producer", "zstd level, up to 22"),
    "fetch.min.bytes": Key(_integer(0), 1, "consumer", "bytes a broker waits for before it answers"),
    "fetch.max.bytes": Key(
        _integer(0), 52_428_800, "consumer", "bytes of one answer, and of what is fetched ahead"
    ),
    "fetch.max.wait.ms": Key(_MS, 500, "consumer", "how long a broker waits for fetch.min.bytes"),
    "max.partition.fetch.bytes": Key(
        _integer(0), 1_048_576, "consumer", "bytes of one partition in one answer"
    ),
    "max.poll.records": Key(_integer(1), 500, "consumer", "records that one poll returns at most"),
    "auto.offset.reset": Key(
        _choice("earliest", "latest", "none"), "latest", "consumer", "where to go on when an offset is gone"
    ),
    "isolation.level": Key(
        _choice("read_uncommitted", "read_committed"),
        "read_uncommitted",
        "consumer",
        "which records are seen",
    ),
    "check.crcs": Key(_boolean, True, "consumer", "check each batch's CRC"),
}

_NOT_YET = ("ssl.", "sasl.")
_GROUPS_NOT_YET = ("group.", "session.timeout.ms", "heartbeat.interval.ms", "partition.assignment.strategy")
_GROUPS_NOT_YET_TOO = ("enable.auto.commit", "auto.commit.interval.ms", "max.poll.interval.ms")
_JAVA_ONLY = (
    "key.serializer",
    "value.serializer",
    "key.deserializer",
    "value.deserializer",
    "metric",
    "interceptor.",
)


@dataclass(frozen=True, slots=True)
class CommonConfig:
    """What every client has."""

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


@dataclass(frozen=True, slots=True)
class AdminConfig(CommonConfig):
    """An admin client's configuration."""

    default_api_timeout_ms: int


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
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

    @property
    def read_committed(self) -> bool:
        return self.isolation_level == "read_committed"


C = TypeVar("C", bound=CommonConfig)


def admin_config(values: Mapping[str, object]) -> AdminConfig:
    """The configuration of an admin client from Kafka's keys. Raises ConfigError."""
    return _build(AdminConfig, values)


def consumer_config(values: Mapping[str, object]) -> ConsumerConfig:
    """The configuration of a consumer from Kafka's keys. Raises ConfigError."""
    return _build(ConsumerConfig, values)


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
    if config.enable_idempotence and conflicts:
        if "enable.idempotence" in values:
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

    Among them those that Kafka has and no client of ours yet: a file that is shared with other programs has them.
    `group.id` is foreign to a producer; a consumer that was given it was asked for something it cannot do.
    """
    return [name for name in values if not set(clients) & _users(name)]


def _users(name: str) -> set[str]:
    """The kinds of client that a key is for; all of them when it is not known, so that it is refused."""
    if name in KEYS:
        return set(KEYS[name].clients.split())
    if name == "group.id":
        return {"consumer"}
    if name.startswith("transaction"):
        return {"producer"}
    tunes_groups = name.startswith(_GROUPS_NOT_YET) or name in _GROUPS_NOT_YET_TOO
    return set() if tunes_groups or name.startswith(_JAVA_ONLY) else set(_ALL.split())


def _build(kind: type[C], values: Mapping[str, object]) -> C:
    check_keys(values)
    arguments = {}
    for field in fields(kind):
        name = field.name.replace("_", ".")
        arguments[field.name] = _parse(name, values[name] if name in values else KEYS[name].default)
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
    if name.startswith(_GROUPS_NOT_YET) or name in _GROUPS_NOT_YET_TOO:
        return ConfigError(
            f"{name}: groups are not supported by this client yet",
            "remove it; partitions are assigned by hand",
        )
    if name.startswith("transaction"):
        return ConfigError(f"{name}: transactions are not supported by this client yet", "remove it")
    if name.startswith(_JAVA_ONLY):
        return ConfigError(
            f"{name}: a key of Kafka's Java clients that this client has no use for", "remove it"
        )
    near = get_close_matches(name, KEYS, n=1, cutoff=0.5)
    return ConfigError(
        f"{name}: no such configuration key",
        f"did you mean {near[0]}?" if near else "keys are Kafka's client keys",
    )
