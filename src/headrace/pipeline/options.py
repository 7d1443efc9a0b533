"""The options of `spark.read.format("headrace")`: names, defaults and refusals of Spark's own `kafka` format.

Owns the table of options and the typed form of them. Invariant: an option is used or refused, never ignored in silence;
whatever two options exclude each other is refused before anything is asked of a broker. Called by the source and, for
what both share, by the sink.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final, TypeAlias

from headrace.client.config import consumer_config
from headrace.client.errors import ConfigError

EARLIEST: Final = -2
LATEST: Final = -1

# Per topic, per partition: an offset, EARLIEST or LATEST; or a time in milliseconds.
PerPartition: TypeAlias = dict[str, dict[int, int]]

STRATEGIES: Final = ("subscribe", "subscribePattern", "assign")
SOURCE_OPTIONS: Final = (
    *STRATEGIES,
    "startingOffsets",
    "startingTimestamp",
    "startingOffsetsByTimestamp",
    "startingOffsetsByTimestampStrategy",
    "endingOffsets",
    "endingTimestamp",
    "endingOffsetsByTimestamp",
    "failOnDataLoss",
    "onDataLoss",
    "minPartitions",
    "maxRecordsPerPartition",
    "smallBatchRows",
    "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "maxBytesPerTrigger",
    "includeHeaders",
    "groupIdPrefix",
    "progressGroup",
    "filterPushdown",
    "kafkaConsumer.pollTimeoutMs",
    "fetchOffset.numRetries",
    "fetchOffset.retryIntervalMs",
)
SINK_WORDS: Final = ("topic", "delivery", "transactionalIdPrefix", "ledgerTopic", "includeHeaders")
# What Spark itself adds to the options of every source and sink.
SPARKS_OWN: Final = {"path", "checkpointlocation", "queryname", "mergeschema", "basepath"}

_STREAM_ONLY: Final = (
    "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "maxBytesPerTrigger",
    "smallBatchRows",
)
_BATCH_ONLY: Final = ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp")
_KAFKA_REFUSED: Final = {
    "auto.offset.reset": "Instead set the source option 'startingOffsets' to 'earliest' or 'latest' to specify where "
    "to start. Structured Streaming manages which offsets are consumed internally, rather than relying on Kafka.",
    "key.deserializer": "Keys are deserialized as byte arrays. Use DataFrame operations to deserialize them.",
    "value.deserializer": "Values are deserialized as byte arrays. Use DataFrame operations to deserialize them.",
    "enable.auto.commit": "Offsets are kept in the checkpoint.",
    "interceptor.classes": "Use DataFrame operations instead.",
}
# Keys that tune the membership of a group, which a reader of offset ranges never has.
_GROUP_KEYS: Final = (
    "group.instance.id",
    "session.timeout.ms",
    "heartbeat.interval.ms",
    "max.poll.interval.ms",
    "partition.assignment.strategy",
    "auto.commit.interval.ms",
    "group.protocol",
)

MAX_TRIGGER_DELAY_MS: Final = 15 * 60 * 1000
POLL_TIMEOUT_MS: Final = 120_000
SMALL_BATCH_ROWS: Final = 1_000
_UNITS_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}


class OptionError(ValueError):
    """An option that cannot be: Spark shows its text to whoever wrote the job."""


@dataclass(frozen=True)
class SourceOptions:
    """A source's options, checked."""

    strategy: str
    subscription: str
    consumer: dict[str, str]
    starting: str | PerPartition
    starting_timestamp: int | PerPartition | None
    latest_when_no_timestamp: bool
    ending: str | PerPartition
    ending_timestamp: int | PerPartition | None
    on_data_loss: str
    min_partitions: int | None
    max_records_per_partition: int | None
    small_batch_rows: int
    max_offsets_per_trigger: int | None
    min_offsets_per_trigger: int | None
    max_trigger_delay_ms: int
    max_bytes_per_trigger: int | None
    include_headers: bool
    progress_group: str
    filter_pushdown: bool
    poll_timeout_ms: int
    offset_retries: int
    offset_retry_interval_ms: int

    @property
    def topics(self) -> list[str]:
        """The topics that are named, for the strategies that name them."""
        if self.strategy == "assign":
            return sorted(self.assigned)
        return [name.strip() for name in self.subscription.split(",") if name.strip()]

    @property
    def assigned(self) -> dict[str, list[int]]:
        """The partitions of `assign`."""
        return _assigned(self.subscription)


def parse_source_options(given: Mapping[str, str], *, streaming: bool) -> SourceOptions:
    """The options of a source. Raises OptionError."""
    options = _Given(given, SOURCE_OPTIONS)
    strategies = [name for name in STRATEGIES if options.get(name) is not None]
    if not strategies:
        raise OptionError(
            "One of the following options must be specified for Kafka source: subscribe, subscribePattern, assign. "
            "See the docs for more details."
        )
    if len(strategies) > 1:
        raise OptionError(
            "Only one of the following options can be specified for Kafka source: subscribe, subscribePattern, assign. "
            f"Got {', '.join(strategies)}."
        )
    strategy = strategies[0]
    subscription = options.get(strategy) or ""
    if not subscription.strip():
        raise OptionError(f"Option '{strategy}' is empty: name topics to read from.")
    for name in _BATCH_ONLY if streaming else _STREAM_ONLY:
        if options.get(name) is not None:
            kind = "streaming" if streaming else "batch"
            raise OptionError(f"Option '{name}' is not supported in {kind} queries.")
    if strategy == "assign":
        _assigned(subscription)
    starting = _offsets(options, "startingOffsets", "latest" if streaming else "earliest")
    ending = _offsets(options, "endingOffsets", "latest")
    if not streaming:
        _refuse(
            starting, LATEST, "latest", "startingOffsets", "starting offset can't be latest for batch queries"
        )
        _refuse(
            ending, EARLIEST, "earliest", "endingOffsets", "ending offset can't be earliest in batch queries"
        )
    return SourceOptions(
        strategy=strategy,
        subscription=subscription,
        consumer=consumer_keys(given, "Kafka source"),
        starting=starting,
        starting_timestamp=_timestamp(options, "startingTimestamp", "startingOffsetsByTimestamp"),
        latest_when_no_timestamp=options.choice("startingOffsetsByTimestampStrategy", ("error", "latest"))
        == "latest",
        ending=ending,
        ending_timestamp=_timestamp(options, "endingTimestamp", "endingOffsetsByTimestamp"),
        on_data_loss=_on_data_loss(options),
        min_partitions=options.count("minPartitions"),
        max_records_per_partition=options.count("maxRecordsPerPartition"),
        small_batch_rows=_small_batch_rows(options),
        max_offsets_per_trigger=options.count("maxOffsetsPerTrigger"),
        min_offsets_per_trigger=options.count("minOffsetsPerTrigger"),
        max_trigger_delay_ms=_limits_agree(options),
        max_bytes_per_trigger=options.count("maxBytesPerTrigger"),
        include_headers=options.flag("includeHeaders", False),
        progress_group=_progress_group(options, given, subscription),
        filter_pushdown=options.flag("filterPushdown", False),
        poll_timeout_ms=options.count("kafkaConsumer.pollTimeoutMs") or POLL_TIMEOUT_MS,
        offset_retries=options.count("fetchOffset.numRetries") or 3,
        offset_retry_interval_ms=options.count("fetchOffset.retryIntervalMs") or 10,
    )


def consumer_keys(given: Mapping[str, str], what: str) -> dict[str, str]:
    """What is passed on to the client: `kafka.*` without its prefix."""
    found = {}
    for name, value in given.items():
        if not name.lower().startswith("kafka."):
            continue
        key = name[len("kafka.") :].lower()
        if key in _KAFKA_REFUSED:
            raise OptionError(f"Kafka option '{key}' is not supported. {_KAFKA_REFUSED[key]}")
        if key != "group.id" and key not in _GROUP_KEYS:
            found[key] = value
    if "bootstrap.servers" not in found:
        raise OptionError(f"Option 'kafka.bootstrap.servers' must be specified for configuring {what}.")
    check_client(consumer_config, found)
    return found


def check_client(read: Callable[[Mapping[str, object]], object], keys: Mapping[str, str]) -> None:
    """Refuse client settings that cannot be, before anything is asked of a broker. Raises OptionError."""
    try:
        read(keys)
    except ConfigError as error:
        raise OptionError(f"Kafka option {error.message}; {error.hint}") from None


class _Given:
    """Options as Spark hands them over, whose names are the same in upper and lower case."""

    def __init__(self, given: Mapping[str, str], known: tuple[str, ...]) -> None:
        self._values = {name.lower(): value for name, value in given.items()}
        lower = {name.lower(): name for name in known}
        for name in given:
            if name.lower() in lower or name.lower() in SPARKS_OWN or name.lower().startswith("kafka."):
                continue
            near = get_close_matches(name.lower(), lower, n=1, cutoff=0.6)
            hint = (
                f" Did you mean '{lower[near[0]]}'?"
                if near
                else f" Options are {', '.join(known)} and kafka.*."
            )
            raise OptionError(f"Unknown option '{name}'.{hint}")

    def get(self, name: str) -> str | None:
        return self._values.get(name.lower())

    def count(self, name: str) -> int | None:
        text = self.get(name)
        if text is None:
            return None
        try:
            number = int(text)
        except ValueError:
            number = 0
        if number <= 0:
            raise OptionError(f"Option '{name}' must be a positive number, but is '{text}'.")
        return number

    def flag(self, name: str, default: bool) -> bool:
        return self.choice(name, ("true", "false"), "true" if default else "false") == "true"

    def choice(self, name: str, words: tuple[str, ...], default: str | None = None) -> str:
        text = (self.get(name) or default or words[0]).strip().lower()
        if text not in words:
            raise OptionError(f"Option '{name}' must be one of {', '.join(words)}, but is '{text}'.")
        return text


def check_options(given: Mapping[str, str], known: tuple[str, ...]) -> _Given:
    """Refuse options that are not known, naming the nearest. Raises OptionError."""
    return _Given(given, known)


def _offsets(options: _Given, name: str, default: str) -> str | PerPartition:
    text = (options.get(name) or default).strip()
    if text.lower() in ("earliest", "latest"):
        return text.lower()
    if not text.startswith("{"):
        raise OptionError(
            f"Option '{name}' must be 'earliest', 'latest' or JSON like {{\"topicA\":{{\"0\":23,\"1\":-1}}}}, "
            f"but is '{text}'."
        )
    return _per_partition(name, text, EARLIEST)


def _per_partition(name: str, text: str, lowest: int) -> PerPartition:
    try:
        read: Any = json.loads(text)
        found = {
            str(topic): {int(number): int(value) for number, value in partitions.items()}
            for topic, partitions in read.items()
        }
    except (ValueError, AttributeError, TypeError):
        raise OptionError(
            f"Option '{name}' must be JSON like {{\"topicA\":{{\"0\":23}}}}, but is '{text}'."
        ) from None
    for topic, partitions in found.items():
        for number, value in partitions.items():
            if number < 0 or value < lowest:
                raise OptionError(f"Option '{name}': {value} cannot be for partition {number} of '{topic}'.")
    return found


def _assigned(text: str) -> dict[str, list[int]]:
    try:
        read: Any = json.loads(text)
        return {str(topic): [int(number) for number in numbers] for topic, numbers in read.items()}
    except (ValueError, AttributeError, TypeError):
        raise OptionError(
            f"Option 'assign' must be JSON like {{\"topicA\":[0,1]}}, but is '{text}'."
        ) from None


def _timestamp(options: _Given, one: str, each: str) -> int | PerPartition | None:
    """A time for all partitions goes before times for each, and both go before offsets, as in Spark."""
    text = options.get(one)
    if text is not None:
        if not text.strip().isdigit():
            raise OptionError(f"Option '{one}' must be milliseconds since 1970, but is '{text}'.")
        return int(text)
    text = options.get(each)
    return None if text is None else _per_partition(each, text, 0)


def _refuse(offsets: str | PerPartition, number: int, word: str, name: str, why: str) -> None:
    if offsets == word or (
        not isinstance(offsets, str) and any(number in partitions.values() for partitions in offsets.values())
    ):
        raise OptionError(f"{why} on Kafka (option '{name}').")


def _on_data_loss(options: _Given) -> str:
    if options.get("onDataLoss") is None:
        return "fail" if options.flag("failOnDataLoss", True) else "skip"
    if options.get("failOnDataLoss") is not None:
        raise OptionError("Options 'failOnDataLoss' and 'onDataLoss' say the same thing: give one of them.")
    return options.choice("onDataLoss", ("fail", "skip", "report"))


def _limits_agree(options: _Given) -> int:
    most, least = options.count("maxOffsetsPerTrigger"), options.count("minOffsetsPerTrigger")
    if most is not None and least is not None and most < least:
        raise OptionError(
            "The value of minOffsetPerTrigger must be less than or equal to maxOffsetsPerTrigger."
        )
    delay = options.get("maxTriggerDelay")
    return MAX_TRIGGER_DELAY_MS if delay is None else parse_duration_ms("maxTriggerDelay", delay)


def _small_batch_rows(options: _Given) -> int:
    text = (options.get("smallBatchRows") or str(SMALL_BATCH_ROWS)).strip()
    if not text.isdigit():
        raise OptionError(f"Option 'smallBatchRows' must be a number, 0 for never, but is '{text}'.")
    return int(text)


def parse_duration_ms(name: str, text: str) -> int:
    """`500ms`, `30s`, `15m`: as Spark writes durations. Raises OptionError."""
    text = text.strip().lower()
    digits = text.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = text[len(digits) :].strip() or "ms"
    if not digits.isdigit() or unit not in _UNITS_MS:
        raise OptionError(f"Option '{name}' must be a time like 30s or 15m, but is '{text}'.")
    return int(digits) * _UNITS_MS[unit]


def _progress_group(options: _Given, given: Mapping[str, str], subscription: str) -> str:
    named = options.get("progressGroup")
    if named is not None:
        return "" if named.strip().lower() in ("", "none") else named.strip()
    by_key = {name.lower(): value for name, value in given.items()}.get("kafka.group.id")
    if by_key:
        return by_key
    prefix = options.get("groupIdPrefix") or "spark-headrace-source"
    plain = "".join(c if c.isalnum() or c in "._-" else "-" for c in subscription)
    return f"{prefix}-{plain}"[:200]
