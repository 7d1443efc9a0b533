"""The Spark sink: what Spark asks of a writer, for batch and streaming, at least once and exactly once.

Owns the sink's options and schema, and the identity of a task as Spark tells it. Invariant: exactly once never rests on
anything that a process remembers: which batch, run and attempt this is comes from Spark, what was decided from the
ledger. Called by Spark through `pyspark_headrace`.
"""

import asyncio
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from headrace.base.errors import ErrorCode
from headrace.client.arrow_txn import Coordination
from headrace.client.arrow_write import TRANSACTION_TIMEOUT_MS
from headrace.client.cluster import Cluster
from headrace.client.config import producer_config
from headrace.client.offsets import missing_partition
from headrace.client.retry import with_retries
from headrace.client.topics import TopicPartition
from headrace.pipeline import kept
from headrace.pipeline.committer import Committer
from headrace.pipeline.ledger import Entry, Ledger
from headrace.pipeline.options import SINK_WORDS, OptionError, check_client, check_options
from headrace.pipeline.sink_task import SinkTask, TaskIdentity

IDS_PER_SLOT = 16
CLUSTERS_REACHED_MAX = 16
FIRST_CONTACT_TIMEOUT_MS = 10_000
UNKNOWN_TOPIC_TIMEOUT_MS = 3_000
LEDGER_TOPIC_DEFAULT = "__consumer_offsets"

# The names under which Spark tells a task what it is part of.
BATCH_PROPERTY = "streaming.sql.batchId"
QUERY_PROPERTY = "sql.streaming.queryId"
RUN_PROPERTY = "spark.jobGroup.id"

_REFUSED = {
    "key.serializer": "Keys are serialized as they are. Cast them to string or binary.",
    "value.serializer": "Values are serialized as they are. Cast them to string or binary.",
    "transactional.id": "The sink makes its own; 'transactionalIdPrefix' names it.",
    "enable.idempotence": "The sink is always idempotent.",
}
_BYTES = ("string", "binary")
_TYPES = {
    "key": _BYTES,
    "value": _BYTES,
    "topic": ("string",),
    "partition": ("int",),
    "headers": ("array<struct<key:string,value:binary>>",),
}


@dataclass(frozen=True)
class SinkOptions:
    """A sink's options, checked."""

    topic: str | None
    exactly_once: bool
    prefix: str | None
    ledger_topic: str
    producer: dict[str, str]
    transaction_timeout_ms: int


def parse_sink_options(given: Mapping[str, str], *, streaming: bool) -> SinkOptions:
    """The options of a sink. Raises OptionError."""
    options = check_options(given, SINK_WORDS)
    producer = {}
    for name, value in given.items():
        if name.lower().startswith("kafka."):
            key = name[len("kafka.") :].lower()
            if key in _REFUSED:
                raise OptionError(f"Kafka option '{key}' is not supported. {_REFUSED[key]}")
            producer[key] = value
    if "bootstrap.servers" not in producer:
        raise OptionError(
            "Option 'kafka.bootstrap.servers' must be specified for configuring Kafka producer."
        )
    timeout = producer.pop("transaction.timeout.ms", str(TRANSACTION_TIMEOUT_MS))
    if not timeout.isdigit() or int(timeout) == 0:
        raise OptionError(f"Kafka option 'transaction.timeout.ms' must be milliseconds, but is '{timeout}'.")
    default = "exactly_once" if streaming else "at_least_once"
    delivery = options.choice("delivery", ("exactly_once", "at_least_once"), default)
    if delivery == "exactly_once" and producer.get("acks", "all") not in ("all", "-1"):
        raise OptionError("Kafka option 'acks' must be all for delivery exactly_once.")
    topic = options.get("topic")
    return SinkOptions(
        topic=topic,
        exactly_once=delivery == "exactly_once",
        prefix=options.get("transactionalIdPrefix"),
        ledger_topic=options.get("ledgerTopic") or topic or LEDGER_TOPIC_DEFAULT,
        producer=producer,
        transaction_timeout_ms=int(timeout),
    )


def check_sink_schema(schema: StructType, topic: str | None) -> None:
    """Refuse rows that cannot be written, with the words of Spark's own sink. Raises OptionError."""
    found = {field.name: field.dataType.simpleString() for field in schema.fields}
    if "value" not in found:
        raise OptionError(f"Required attribute 'value' not found in {', '.join(found)}.")
    if topic is None and "topic" not in found:
        raise OptionError(
            "topic option required when no 'topic' attribute is present. Use the topic option for setting a topic."
        )
    for name, allowed in _TYPES.items():
        if name in found and found[name] not in allowed:
            raise OptionError(
                f"{name} attribute unsupported type {found[name]}: must be {' or '.join(allowed)}."
            )


@dataclass
class Written(WriterCommitMessage):
    """What a task tells the driver."""

    sink: str
    run: str
    batch: int
    rows: int
    entry: Entry | None


@lru_cache(maxsize=CLUSTERS_REACHED_MAX)
def check_reachable(producer: tuple[tuple[str, str], ...], topic: str | None) -> None:
    """Are the brokers there, and the topic? Asked once in a process. Raises KafkaError, which is not remembered."""

    async def ask() -> None:
        config = producer_config(dict(producer))
        cluster = Cluster(config)
        cluster.first_contact_timeout_ms = FIRST_CONTACT_TIMEOUT_MS
        try:
            await with_retries(cluster, config.max_block_ms, lambda: look(cluster), UNKNOWN_TOPIC_TIMEOUT_MS)
        finally:
            await cluster.close()

    async def look(cluster: Cluster) -> None:
        if topic is not None:
            cluster.track(topic)
        await cluster.refresh(create=True)
        if topic is not None and cluster.topics[topic].error is not ErrorCode.NONE:
            raise missing_partition(cluster, TopicPartition(topic, 0))

    asyncio.run(ask())


class _Writer:
    """What batch and streaming writers share."""

    def __init__(self, options: SinkOptions, schema: StructType, job: str) -> None:
        check_sink_schema(schema, options.topic)
        check_client(producer_config, options.producer)
        self._options = options
        self._job = job  # stands for the query where there is none: a batch write

    def __getstate__(self) -> dict[str, Any]:
        # Spark sends the writer from the driver to its tasks: the last moment to say that there is no broker, or
        # no topic. Tasks, and the commit after them, wait for a broker that is restarting.
        check_reachable(tuple(sorted(self._options.producer.items())), self._options.topic)
        return dict(self.__dict__)

    def step(self, name: str) -> None:
        """A numbered step of a batch was reached. Tests kill processes here."""

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """One task, on an executor."""
        options = self._options

        def task(calls: Coordination) -> SinkTask:
            return SinkTask(
                options.producer,
                options.topic,
                options.ledger_topic,
                options.transaction_timeout_ms,
                self.step,
                calls,
            )

        if not options.exactly_once:
            rows = kept.run(options.producer, lambda calls: task(calls).write_at_least_once(iterator))
            return Written("", "", 0, rows, None)
        who = self._identity()
        entry = kept.run(options.producer, lambda calls: task(calls).write_once(who, iterator))
        return Written(who.sink, who.run, who.batch, entry.rows if entry is not None else 0, entry)

    def _identity(self) -> TaskIdentity:
        context = TaskContext.get()
        assert context is not None, "a task runs inside Spark"
        batch = context.getLocalProperty(BATCH_PROPERTY)
        query = context.getLocalProperty(QUERY_PROPERTY)
        # The number of an attempt begins again when a stage is tried again; the task's own number tells those apart.
        attempt = f"{context.attemptNumber()}.{context.taskAttemptId() % IDS_PER_SLOT}"
        if batch is None or query is None:
            return TaskIdentity(self._job, self._job, 0, context.partitionId(), attempt)
        run = context.getLocalProperty(RUN_PROPERTY) or query
        sink = self._options.prefix or query
        return TaskIdentity(sink, run, int(batch), context.partitionId(), attempt)

    def finish(self, messages: list[WriterCommitMessage | None], *, commit: bool) -> None:
        """Commit or abort on the driver the batch that the tasks were told of.

        For a batch write inside `foreachBatch` that is the stream's batch, of which Spark tells only the tasks.
        """
        written = [m for m in messages if isinstance(m, Written) and m.sink]
        if not self._options.exactly_once or not written:
            return
        entries = [m.entry for m in written if m.entry is not None]
        kept.run(self._options.producer, lambda calls: self._finish(calls, written[0], entries, commit))

    async def _finish(self, calls: Coordination, one: Written, entries: list[Entry], commit: bool) -> None:
        ledger = Ledger(
            calls, one.sink, self._options.ledger_topic, self._options.transaction_timeout_ms, self.step
        )
        committer = Committer(calls, ledger, one.run, self.step)
        if commit:
            await committer.commit(one.batch, entries)
        else:
            await committer.abort(one.batch, entries)


class BatchWriter(_Writer, DataSourceArrowWriter):
    """`df.write.format("headrace")`."""

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        super().__init__(options, schema, uuid.uuid4().hex)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self.finish(messages, commit=True)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self.finish(messages, commit=False)


class StreamWriter(_Writer, DataSourceStreamArrowWriter):
    """`df.writeStream.format("headrace")`."""

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        super().__init__(options, schema, "")

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 (Spark's name)
        self.finish(messages, commit=True)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 (Spark's name)
        self.finish(messages, commit=False)
