"""The keys of client configuration: Kafka's own names, how each value is read, its default, who uses it.

Owns the table. Invariant: every key in it has an effect. Called by `config`, which makes typed configurations
of it, and by the command line for its help.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

Address: TypeAlias = tuple[str, int]
ACKS_ALL = -1
ASSIGNORS = ("range", "roundrobin", "sticky", "cooperative-sticky")
PARTITIONERS = ("default", "sticky", "round_robin", "range", "load_aware")
_JAVA_ASSIGNORS = {
    f"org.apache.kafka.clients.consumer.{java}": name
    for java, name in zip(
        ("RangeAssignor", "RoundRobinAssignor", "StickyAssignor", "CooperativeStickyAssignor"), ASSIGNORS
    )
}


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


def _text(value: Any) -> str | None:
    return None if value is None or str(value).strip() == "" else str(value).strip()


def _assignors(value: Any) -> tuple[str, ...]:
    items: Iterable[Any] = value.split(",") if isinstance(value, str) else value
    names = tuple(_JAVA_ASSIGNORS.get(name, name) for name in (str(item).strip() for item in items) if name)
    for name in names:
        if name not in ASSIGNORS:
            raise ValueError(f"expected {', '.join(ASSIGNORS)}, got {name!r}")
    if not names:
        raise ValueError(f"expected at least one of {', '.join(ASSIGNORS)}")
    return names


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
    "partitioner": Key(
        _choice(*PARTITIONERS), "default", "producer", "how a record without a partition gets one"
    ),
    "partitioner.ignore.keys": Key(
        _boolean, False, "producer", "spread records with a key like those without"
    ),
    "transactional.id": Key(_text, None, "producer", "the name that makes transactions survive this process"),
    "transaction.timeout.ms": Key(_integer(1), 60_000, "producer", "the longest a transaction may stay open"),
    "group.id": Key(_text, None, "consumer", "the group that this consumer is a member of"),
    "group.instance.id": Key(_text, None, "consumer", "a name that keeps the membership over restarts"),
    "group.protocol": Key(
        _choice("classic", "consumer"),
        "classic",
        "consumer",
        "who assigns partitions: a member or the broker",
    ),
    "group.remote.assignor": Key(
        _text, None, "consumer", "the broker's assignor to use with group.protocol=consumer"
    ),
    "partition.assignment.strategy": Key(
        _assignors, "range,cooperative-sticky", "consumer", "the assignors this member can run, best first"
    ),
    "session.timeout.ms": Key(
        _integer(1), 45_000, "consumer", "without a heartbeat for so long, a member is gone"
    ),
    "heartbeat.interval.ms": Key(_integer(1), 3_000, "consumer", "how often a member says that it is there"),
    "max.poll.interval.ms": Key(
        _integer(1), 300_000, "consumer", "the longest time between polls before a member leaves its group"
    ),
    "enable.auto.commit": Key(_boolean, True, "consumer", "commit what was polled, now and then"),
    "auto.commit.interval.ms": Key(_MS, 5_000, "consumer", "how often"),
    "exclude.internal.topics": Key(
        _boolean, True, "consumer", "leave the cluster's own topics out of a subscription by pattern"
    ),
    "client.rack": Key(str, "", "consumer", "where this client is, to read from a replica that is near"),
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
