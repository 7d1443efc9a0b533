"""All logs of one data directory: opened at start, looked after, closed in order.

Owns the directory (no second process gets it), the table of logs, the clean-shutdown marker and the offset checkpoints.
Invariants: the marker exists only while no process runs on the directory and every log in it was closed in order, so a
kill at any moment is seen as one; a partition's directory is used only by the topic whose id it carries; a log that
cannot be opened is offline (KAFKA_STORAGE_ERROR) and stops nothing else; a deleted partition's name is free at once,
its files go in the background. Called by the broker, on the loop.

The order at start: `start` takes the directory; the metadata log is opened with `create` and replayed; `load` opens
what the metadata says is here; `put_aside_strays` moves what it does not know out of the way.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final, NamedTuple

from headrace.base.clock import Clock
from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.ids import ZERO_ID, format_id
from headrace.base.log import get_logger
from headrace.base.settings import BrokerConfig, TopicConfig
from headrace.storage.checkpoints import (
    PARTITION_METADATA_NAME,
    CorruptIdentity,
    MetaProperties,
    encode_partition_metadata,
    read_meta_properties,
    read_partition_metadata,
    write_meta_properties,
)
from headrace.storage.cleaner import Cleaner
from headrace.storage.directories import (
    DELETED_SUFFIX,
    STRAY_SUFFIX,
    DirectoryLock,
    aside_name,
    directory_name,
    is_deleted,
    parse_directory_name,
)
from headrace.storage.files import DiskFileSystem, FileSystem
from headrace.storage.log import PartitionLog
from headrace.storage.log_checkpoints import Key, LogCheckpoints
from headrace.storage.memory import MemoryFileSystem
from headrace.storage.recovery import open_log
from headrace.storage.segment import LOG_SUFFIX
from headrace.storage.upkeep import Upkeep, Worker

CLEAN_SHUTDOWN_NAME: Final = ".kafka_cleanshutdown"
_CLEAN_SHUTDOWN: Final = b'{"version":0,"brokerEpoch":-1}'

PROGRESS_INTERVAL_MS: Final = 2_000
"""How often a long recovery says how far it is."""

FLUSHED_AT_ONCE_MAX: Final = 32
"""Recovered logs that are made durable in one step."""

REMOVALS_MAX: Final = 2
"""Deleted directories that the worker removes at a time: flushes, which producers wait for, must not queue behind."""

logger = get_logger(__name__)


class Wanted(NamedTuple):
    """A partition that the metadata places on this broker."""

    topic: str
    partition: int
    topic_id: bytes
    config: TopicConfig


class LogSize(NamedTuple):
    """What DescribeLogDirs tells of one partition."""

    topic: str
    partition: int
    size_bytes: int


class LogManager:
    """The logs of one data directory. Everything but `load`'s recovery runs on the loop."""

    def __init__(
        self, fs: FileSystem, data_dir: str, config: BrokerConfig, clock: Clock, worker: Worker
    ) -> None:
        """`data_dir` names the directory that `fs` is rooted in, for people and DescribeLogDirs."""
        self.fs = fs
        self.data_dir = data_dir
        self._config = config
        self._clock = clock
        self._worker = worker
        worker.prepare = self._prepare_flush
        self._upkeep = Upkeep(config, worker, clock.now_ms())
        self.cleaner = Cleaner(fs, config, worker.submit, clock.now_ms())
        self._logs: dict[Key, PartitionLog] = {}
        self._topic_ids: dict[Key, bytes] = {}
        self._offline: dict[Key, KafkaError] = {}
        # Directories found at start that no log was opened from yet.
        self._unclaimed: dict[Key, str] = {}
        self._to_remove: list[str] = []
        self._removals = 0
        self._removals_max = REMOVALS_MAX
        # Logs found closed in order, and what they held then: those still the same need no closing.
        self._opened_at: dict[Key, tuple[int, int, int]] = {}
        self._unsynced_ids: set[Key] = set()
        self._lock: DirectoryLock | None = None
        self._was_clean = False
        self._checkpoints = LogCheckpoints(fs, clock.now_ms())
        self._aside_count = 0
        self.limit_offset: Callable[[PartitionLog], int] = lambda log: log.log_end_offset
        """How far retention of a log may go: its high watermark, once someone keeps one."""

    # -- start -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Take the directory. DirectoryInUse when another process has it, OSError when it cannot be read."""
        if isinstance(self.fs, DiskFileSystem):
            self._lock = DirectoryLock(self.fs.root)
        try:
            self._take_stock()
        except BaseException:
            self._release()
            raise

    def identity(self) -> MetaProperties | None:
        """Whose directory this is, None when it is new. CorruptIdentity when that cannot be told."""
        return read_meta_properties(self.fs)

    def claim(self, meta: MetaProperties) -> None:
        """Write down whose directory this is."""
        write_meta_properties(self.fs, meta)

    def _take_stock(self) -> None:
        names = self.fs.listdir("")
        self._was_clean = CLEAN_SHUTDOWN_NAME in names
        for name in names:
            key = parse_directory_name(name)
            if key is not None:
                self._unclaimed[key] = name
            elif is_deleted(name):
                self._to_remove.append(name)
        self._checkpoints.read()
        self.cleaner.load()
        if self._was_clean:
            # Gone for good before anything is written, or a power cut could bring it back over a log that changed.
            self.fs.remove(CLEAN_SHUTDOWN_NAME)
            self.fs.sync_dir("")
        elif self._unclaimed:
            logger.warning(
                "the last shutdown was not clean, logs are recovered",
                extra={"fields": {"directory": self.data_dir, "logs": len(self._unclaimed)}},
            )

    @property
    def was_clean(self) -> bool:
        """Whether the process before this one closed the directory in order."""
        return self._was_clean

    def load(self, wanted: Iterable[Wanted]) -> None:
        """Open the logs of these partitions whose directories exist. Those that cannot be are offline."""
        for _ in self.loading(wanted):
            pass

    def loading(self, wanted: Iterable[Wanted]) -> Iterator[None]:
        """As `load`, a log at a step: thousands take seconds, and the loop has other work meanwhile."""
        present = [want for want in wanted if (want.topic, want.partition) in self._unclaimed]
        begun_ms = told_ms = self._clock.monotonic_ms()
        for number, want in enumerate(present):
            try:
                self.create(*want)
            except KafkaError:
                pass  # remembered as offline, and logged
            now_ms = self._clock.monotonic_ms()
            if now_ms - told_ms >= PROGRESS_INTERVAL_MS:
                told_ms = now_ms
                logger.warning(
                    "opening logs",
                    extra={"fields": {"done": number + 1, "of": len(present), "last": want.topic}},
                )
            yield
        yield from self._flush_recovered()
        logger.info(
            "logs opened",
            extra={
                "fields": {
                    "logs": len(self._logs),
                    "offline": len(self._offline),
                    "clean": self._was_clean,
                    "ms": round(self._clock.monotonic_ms() - begun_ms),
                }
            },
        )

    def _flush_recovered(self) -> Iterator[None]:
        """Make durable what a killed process left in memory, where the topic wants it so before anyone reads it."""
        unsafe = [
            log
            for log in self._logs.values()
            if log.config.flush_messages == 1 and log.flushed_offset < log.log_end_offset
        ]
        for first in range(0, len(unsafe), FLUSHED_AT_ONCE_MAX):
            some = unsafe[first : first + FLUSHED_AT_ONCE_MAX]
            self._worker.run_all([partial(self._flush_one, log) for log in some])
            yield

    def _flush_one(self, log: PartitionLog) -> None:
        try:
            if first := self._prepare_flush(log):
                first()
            log.flush()
        except (KafkaError, OSError) as error:
            logger.error(
                "recovered log cannot be flushed",
                extra={"fields": {"topic": log.topic, "partition": log.partition, "why": str(error)}},
            )

    def put_aside_strays(self) -> list[str]:
        """Rename the directories that no partition claimed since the start; their new names."""
        strays = []
        for key, name in list(self._unclaimed.items()):
            if key in self._offline:
                continue
            try:
                strays.append(self._put_aside(name, STRAY_SUFFIX))
                del self._unclaimed[key]
            except OSError as error:
                logger.error(
                    "stray directory cannot be renamed",
                    extra={"fields": {"directory": name, "why": str(error)}},
                )
        return strays

    # -- the table -------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._logs)

    def __iter__(self) -> Iterator[PartitionLog]:
        return iter(self._logs.values())

    def get(self, topic: str, partition: int) -> PartitionLog | None:
        """The log, if it is open. KafkaError when it is there but could not be opened."""
        log = self._logs.get((topic, partition))
        if log is None and (error := self._offline.get((topic, partition))):
            raise error
        return log

    def create(self, topic: str, partition: int, topic_id: bytes, config: TopicConfig) -> PartitionLog:
        """The log of a partition: open already, or opened from its directory, or new.

        KafkaError(KAFKA_STORAGE_ERROR) when the disk does not allow it. A log that is there and cannot be opened is
        offline from then on; making a new one can be tried again.
        """
        key = (topic, partition)
        log = self._logs.get(key)
        if log is not None:
            assert self._topic_ids[key] == topic_id, f"{topic}-{partition} is open for another topic id"
            return log
        if key in self._offline:
            raise self._offline[key]
        try:
            log = self._open_found(key, topic_id, config)
        except (OSError, CorruptIdentity, KafkaError) as error:
            raise self._set_offline(key, error) from error
        if log is None:
            log = self._make(key, topic_id, config)
        self._logs[key] = log
        self._topic_ids[key] = topic_id
        return log

    def _open_found(self, key: Key, topic_id: bytes, config: TopicConfig) -> PartitionLog | None:
        """The log in a directory that was found at start; None when there is none, or it belongs to another topic."""
        directory = self._unclaimed.get(key)
        if directory is None:
            return None
        found_id = read_partition_metadata(self.fs, directory, topic_id) if topic_id != ZERO_ID else topic_id
        if found_id != topic_id and (found_id is not None or self._has_records(directory)):
            # Without an id, records were never flushed (`_prepare_flush`), and may be an older topic's.
            logger.warning(
                "directory is not of this topic, but perhaps of another of the same name",
                extra={
                    "fields": {
                        "directory": directory,
                        "found": format_id(found_id) if found_id is not None else "no id",
                        "wanted": format_id(topic_id),
                    }
                },
            )
            self._put_aside(directory, STRAY_SUFFIX)
            self._checkpoints.forget(key)
            del self._unclaimed[key]
            return None
        log = open_log(
            self.fs,
            directory,
            key[0],
            key[1],
            config,
            clean=self._was_clean,
            recovery_point=self._checkpoints.recovery_point(key),
            log_start_offset=self._checkpoints.log_start(key),
            now_ms=self._clock.now_ms(),
        )
        self.cleaner.truncated(log)
        if found_id is None:
            self._write_topic_id(key, directory, topic_id)
        del self._unclaimed[key]
        if self._was_clean:
            self._opened_at[key] = _extent(log)
        elif topic_id != ZERO_ID:
            self._unsynced_ids.add(key)  # perhaps: who was killed cannot say
        return log

    def _has_records(self, directory: str) -> bool:
        names = [f"{directory}/{name}" for name in self.fs.listdir(directory)]
        return any(name.endswith(LOG_SUFFIX) and self.fs.size(name) for name in names)

    def _make(self, key: Key, topic_id: bytes, config: TopicConfig) -> PartitionLog:
        directory = directory_name(*key)
        self._checkpoints.make_room(key)
        self.cleaner.forget(*key)
        try:
            self.fs.makedirs(directory)
            self._write_topic_id(key, directory, topic_id)
        except OSError as error:
            raise KafkaError(
                ErrorCode.KAFKA_STORAGE_ERROR, f"Directory {directory} cannot be made: {error.strerror}"
            ) from error
        return PartitionLog(self.fs, directory, key[0], key[1], config, now_ms=self._clock.now_ms())

    def _write_topic_id(self, key: Key, directory: str, topic_id: bytes) -> None:
        if topic_id == ZERO_ID:
            return  # the metadata log, which is nobody's topic
        # Synced not now, which would make creating a thousand partitions slow, but with the first flush of the log.
        path = f"{directory}/{PARTITION_METADATA_NAME}"
        file = self.fs.open(path, create=True)
        file.pwrite(encode_partition_metadata(topic_id), 0)
        self.fs.forget(path)
        self._unsynced_ids.add(key)

    def _prepare_flush(self, log: PartitionLog) -> Callable[[], None] | None:
        """What the first flush of a log has to do besides: no record is durable before it can be told whose it is."""
        key = (log.topic, log.partition)
        if key not in self._unsynced_ids or self._logs.get(key) is not log:
            return None
        file = self.fs.open(f"{log.directory}/{PARTITION_METADATA_NAME}")

        def sync() -> None:
            file.sync()
            self._unsynced_ids.discard(key)

        return sync

    def _set_offline(self, key: Key, error: Exception) -> KafkaError:
        logger.error(
            "partition is offline, its log cannot be opened",
            extra={"fields": {"topic": key[0], "partition": key[1], "why": str(error)}},
        )
        offline = KafkaError(
            ErrorCode.KAFKA_STORAGE_ERROR, f"Log of {key[0]}-{key[1]} cannot be opened: {error}"
        )
        self._offline[key] = offline
        return offline

    @property
    def offline(self) -> dict[Key, KafkaError]:
        """Partitions whose logs could not be opened, and why."""
        return dict(self._offline)

    def reconfigure(self, config: BrokerConfig) -> None:
        """The broker's settings changed. A topic's are given to its logs."""
        self._config = self._upkeep.config = self.cleaner.config = config

    def sizes(self) -> list[LogSize]:
        """What each partition takes up, for DescribeLogDirs."""
        return [LogSize(log.topic, log.partition, log.size_bytes) for log in self._logs.values()]

    # -- deletion --------------------------------------------------------------------------------------------

    def delete(self, topic: str, partition: int) -> None:
        """Forget a partition; its name is free when this returns, its files are removed in the background."""
        key = (topic, partition)
        log = self._logs.pop(key, None)
        self._topic_ids.pop(key, None)
        self._opened_at.pop(key, None)
        self._unsynced_ids.discard(key)
        was_offline = self._offline.pop(key, None) is not None
        found = self._unclaimed.pop(key, None)
        if log is None and not was_offline and found is None:
            return
        directory = log.directory if log is not None else directory_name(topic, partition)
        self._checkpoints.forget(key)
        self.cleaner.forget(*key)
        if log is not None:
            self._upkeep.forget(log)
            # Its paths may soon be another log's: whoever still holds this one writes and flushes no more.
            log.failed = True
            log.close(clean=False)
        try:
            self._to_remove.append(self._put_aside(directory, DELETED_SUFFIX))
        except FileNotFoundError:
            return
        except OSError as error:
            # The name is not free: a topic of the same name finds another's id in there, and moves it aside itself.
            self._unclaimed[key] = directory
            logger.error(
                "directory of a deleted partition cannot be renamed",
                extra={"fields": {"directory": directory, "why": str(error)}},
            )
            return
        self._remove_next()

    def _put_aside(self, directory: str, suffix: str) -> str:
        self._aside_count += 1
        name = aside_name(directory, f"{self._clock.now_ms():020x}{self._aside_count:012x}", suffix)
        self.fs.rename(directory, name)
        log = logger.warning if suffix == STRAY_SUFFIX else logger.info
        log("directory put aside", extra={"fields": {"directory": directory, "renamed": name}})
        return name

    def _remove_next(self) -> None:
        """Give directories that wait for removal to the worker; `tick` tries again what it does not take."""
        while self._to_remove and self._removals < self._removals_max:
            name = self._to_remove.pop()
            self._removals += 1
            if not self.submit(partial(self.fs.rmtree, name), partial(self._removed, name)):
                self._removals -= 1
                self._to_remove.append(name)
                return

    def leave_the_rest(self) -> None:
        """Begin no more removals: the broker is stopping, and the next start goes on with them."""
        self._removals_max = 0

    def _removed(self, name: str, error: Exception | None) -> None:
        self._removals -= 1
        if error is not None:
            logger.error(
                "deleted directory cannot be removed",
                extra={"fields": {"directory": name, "why": str(error)}},
            )
        if not isinstance(self.fs, MemoryFileSystem):  # there the loop of `_remove_next` goes on by itself
            self._remove_next()

    def submit(
        self, work: Callable[[], None], done: Callable[[Exception | None], None] | None = None
    ) -> bool:
        """Have the worker do it; at once when files are in memory, where it takes no time and suits no thread."""
        if not isinstance(self.fs, MemoryFileSystem):
            return self._worker.submit(work, done)
        work()
        if done is not None:
            done(None)
        return True

    # -- upkeep ----------------------------------------------------------------------------------------------

    def tick(self, now_ms: int) -> None:
        """What is due by now: flushes, rolls, retention, expiry, compaction, checkpoints, removal of the deleted."""
        self._upkeep.tick(self._logs.values(), now_ms, self.limit_offset)
        self.cleaner.tick(self._logs.values, self.limit_offset, now_ms)
        if self._to_remove:
            self._remove_next()
        self._checkpoint(now_ms)

    def _checkpoint(self, now_ms: int) -> None:
        moved, self._upkeep.recovery_points_moved = self._upkeep.recovery_points_moved, False
        interval_ms = self._config.log_flush_offset_checkpoint_interval_ms
        pending = self._checkpoints.due(self._logs, self._not_open(), now_ms, interval_ms, moved)
        if pending is None:
            return
        written = partial(self._checkpoints.written, pending)
        if not self.submit(pending.run, written):
            written(KafkaError(ErrorCode.KAFKA_STORAGE_ERROR, "too much work waits for the disk"))

    def truncated(self, log: PartitionLog) -> None:
        """A log was cut: before anything is appended to it, no recovery may be told to start past its end."""
        self.cleaner.truncated(log)
        try:
            self._checkpoints.lower((log.topic, log.partition), log.flushed_offset)
        except OSError as error:
            raise KafkaError(ErrorCode.KAFKA_STORAGE_ERROR, f"cut of {log.name}: {error}") from error

    def _not_open(self) -> set[Key]:
        return self._offline.keys() | self._unclaimed.keys()

    # -- end -------------------------------------------------------------------------------------------------

    def close(self, clean: bool = True) -> None:
        """Close all logs, leave the marker if all of them could be closed in order, give the directory back.

        The flusher is closed before. With `clean` false everything is left as a kill would.
        """
        try:
            if clean:
                self._close_cleanly()
            else:
                for log in self._logs.values():
                    log.close(clean=False)
        finally:
            self._logs.clear()
            self._release()

    def _close_cleanly(self) -> None:
        failures: list[PartitionLog] = []
        self._worker.run_all(
            [partial(self._close_log, key, log, failures) for key, log in self._logs.items()]
        )
        failed = len(failures)
        if not self._was_clean:
            # These were never recovered, so nobody may take them for whole at the next start.
            failed += len(self._not_open())
        if failed:
            logger.error(
                "no clean shutdown: logs are recovered at the next start", extra={"fields": {"logs": failed}}
            )
        try:
            self._checkpoints.write(self._logs, self._not_open())
            if not failed:
                self.fs.write_atomic(CLEAN_SHUTDOWN_NAME, _CLEAN_SHUTDOWN)
        except OSError as error:
            logger.error("clean shutdown could not be recorded", extra={"fields": {"why": str(error)}})

    def _close_log(self, key: Key, log: PartitionLog, failures: list[PartitionLog]) -> None:
        """Close one log in order; runs in a thread, because it waits for the disk several times."""
        try:
            if first := self._prepare_flush(log):
                first()
            untouched = self._opened_at.get(key) == _extent(log) and not log.failed
            log.close(clean=not untouched and not log.failed)
            if log.failed:
                failures.append(log)
        except (KafkaError, OSError) as error:
            failures.append(log)
            logger.error(
                "log could not be closed in order",
                extra={"fields": {"topic": log.topic, "partition": log.partition, "why": str(error)}},
            )

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def _extent(log: PartitionLog) -> tuple[int, int, int]:
    """What differs when anything was appended, rolled, deleted or truncated."""
    return log.log_start_offset, log.log_end_offset, len(log.segments)
