"""What logs need now and then, in portions small enough for the loop.

Owns the schedule: background flushes (flush.ms; flush.messages when the flush at the append failed; sealed segments, so
that a restart need not read them), rolls by age, retention, expiry of producers, and when the offset checkpoints are
due. Invariants: one call of `tick` looks at
every log once but does real work for at most `LOGS_PER_TICK` of them; nothing here waits for a disk, that is left to
the flusher; a log that is gone leaves nothing behind. `LogManager.tick` is the only caller.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from headrace.base.errors import KafkaError
from headrace.base.log import get_logger
from headrace.base.settings import BrokerConfig
from headrace.storage.log import PartitionLog
from headrace.storage.trims import DELETED_AT_ONCE_MAX

LOGS_PER_TICK: Final = 200
"""Logs whose retention, age and producers are looked at in one tick; the rest of a round waits for the next."""

FLUSH_RETRY_MS: Final = 5_000
"""How long a log whose background flush failed is left alone."""

METADATA_TOPIC: Final = "__cluster_metadata"
"""Never subject to retention, whatever its settings say: what it holds is the cluster."""

logger = get_logger(__name__)


class Background(Protocol):
    """Where flushes go: the flusher."""

    def request(
        self, log: PartitionLog, waiter: Callable[[Exception | None], None] | None = None, /
    ) -> None: ...

    def is_flushing(self, log: PartitionLog, /) -> bool: ...


class Worker(Background, Protocol):
    """The flusher, as far as the manager of logs uses it."""

    def submit(
        self, work: Callable[[], None], done: Callable[[Exception | None], None] | None = None, /
    ) -> bool: ...

    def run_all(self, jobs: Sequence[Callable[[], None]], /) -> None: ...

    prepare: Callable[[PartitionLog], Callable[[], None] | None] | None


class Upkeep:
    """The schedule of one data directory."""

    def __init__(self, config: BrokerConfig, background: Background, now_ms: int) -> None:
        self.config = config
        self._background = background
        self._now_ms = now_ms
        self._round_begun_ms = now_ms
        self._round: list[PartitionLog] = []
        self._gone: set[PartitionLog] = set()  # deleted since the round began
        # Logs seen with something unflushed, and since when; logs not to be flushed before a time.
        self._unflushed_since: dict[PartitionLog, int] = {}
        self._flush_not_before: dict[PartitionLog, int] = {}
        self.recovery_points_moved = False
        """A background flush ended: writing the recovery points down would shorten a recovery. The owner resets it."""

    def tick(
        self, logs: Iterable[PartitionLog], now_ms: int, limit_offset: Callable[[PartitionLog], int]
    ) -> None:
        """Do what is due. `limit_offset` tells how far retention may go (the high watermark)."""
        self._now_ms = now_ms
        logs = list(logs)
        self._flush_due(logs, now_ms)
        if not self._round and now_ms - self._round_begun_ms >= self.config.log_retention_check_interval_ms:
            self._round_begun_ms = now_ms
            self._round = logs[::-1]
            self._gone.clear()
        for _ in range(min(LOGS_PER_TICK, len(self._round))):
            log = self._round.pop()
            if not log.failed and log not in self._gone and self._visit(log, now_ms, limit_offset(log)):
                self._round.insert(
                    0, log
                )  # with more to delete than one visit may: again when the others were

    def forget(self, log: PartitionLog) -> None:
        """The log was deleted."""
        self._unflushed_since.pop(log, None)
        self._flush_not_before.pop(log, None)
        if self._round:
            self._gone.add(log)

    def _flush_due(self, logs: list[PartitionLog], now_ms: int) -> None:
        since = self._unflushed_since
        for log in logs:
            if log.flushed_offset >= log.log_end_offset:
                if log in since:
                    del since[log]
                if log.flush_wanted:
                    self._flush(log, now_ms)
                continue
            first_seen_ms = since.setdefault(log, now_ms)
            config = log.config
            # By count it is due at the append already; here only if that flush failed.
            due_by_count = log.log_end_offset - log.flushed_offset >= config.flush_messages
            if log.flush_wanted or due_by_count or now_ms - first_seen_ms >= config.flush_ms:
                self._flush(log, now_ms)

    def _flush(self, log: PartitionLog, now_ms: int) -> None:
        if (
            log.failed
            or self._background.is_flushing(log)
            or now_ms < self._flush_not_before.get(log, now_ms)
        ):
            return

        def flushed(error: Exception | None) -> None:
            if error is None:
                self._flush_not_before.pop(log, None)
                self.recovery_points_moved = True
            else:
                self._flush_not_before[log] = self._now_ms + FLUSH_RETRY_MS
            self._unflushed_since.pop(log, None)

        self._background.request(log, flushed)

    def _visit(self, log: PartitionLog, now_ms: int, limit_offset: int) -> bool:
        """Look after one log; whether there is more to do for it."""
        deleted = 0
        try:
            log.roll_if_due(now_ms)
            if log.topic != METADATA_TOPIC:
                deleted = log.apply_retention(now_ms, limit_offset)
        except (OSError, KafkaError) as error:
            logger.error(
                "retention failed, to be tried again",
                extra={"fields": {"topic": log.topic, "partition": log.partition, "why": str(error)}},
            )
        if len(log.producer_state):
            log.producer_state.expire(now_ms, self.config.producer_id_expiration_ms)
        return deleted >= DELETED_AT_ONCE_MAX
