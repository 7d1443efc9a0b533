"""What the tests of compaction share: keyed records, a cleaning run to its end, and what a reader makes of a log."""

from collections.abc import Iterable

from headrace.base.settings import broker_config
from headrace.records.builder import build_batch, iter_batches, iter_records
from headrace.storage.cleanable import Candidate
from headrace.storage.cleaner import make_plan
from headrace.storage.cleaning import CleanedSegment, Cleaning
from headrace.storage.log import PartitionLog
from headrace.storage.swaps import swap_in
from tests.storage.workbench import NOW_MS, read_all

COMPACT = frozenset({"compact"})
Put = tuple[bytes, bytes | None]


def put(
    log: PartitionLog,
    *puts: Put,
    timestamp: int = NOW_MS,
    compression: int = 0,
    producer_id: int = -1,
    sequence: int = 0,
    headers: tuple[tuple[str, bytes | None], ...] = (),
) -> int:
    """Append one batch of keys and values (None deletes the key); its first offset."""
    batch = build_batch(
        [(timestamp + number, key, value, headers) for number, (key, value) in enumerate(puts)],
        compression=compression,
        producer_id=producer_id,
        producer_epoch=0 if producer_id >= 0 else -1,
        base_sequence=sequence if producer_id >= 0 else -1,
    )
    return log.append(bytearray(batch), leader_epoch=0, now_ms=timestamp).first_offset


def seal(log: PartitionLog, now_ms: int = NOW_MS) -> None:
    """Close the active segment and make all durable, so that it can be cleaned."""
    log.roll(now_ms)
    log.flush()


def begin(log: PartitionLog, *, first_dirty: int = 0, now_ms: int = NOW_MS, **settings: str) -> Cleaning:
    """A cleaning of all that may be cleaned."""
    log.active.create()
    end_offset = min(log.active.base_offset, log.recovery_point)
    unstable = log.producer_state.first_unstable_offset(log.log_end_offset)
    end_offset = end_offset if unstable is None else min(end_offset, unstable)
    candidate = Candidate(log, first_dirty, end_offset, 1.0)
    config = broker_config({name.replace("_", "."): value for name, value in settings.items()})
    return Cleaning(make_plan(candidate, config, now_ms))


def clean(log: PartitionLog, *, first_dirty: int = 0, now_ms: int = NOW_MS, **settings: str) -> Cleaning:
    """Clean the log, as far as one cleaning gets."""
    cleaning = begin(log, first_dirty=first_dirty, now_ms=now_ms, **settings)
    for step in cleaning.steps():
        if isinstance(step, CleanedSegment):
            swap_in(log, step.segment, step.replaced)
    return cleaning


def records_of(data: bytes) -> Iterable[tuple[int, bytes | None, bytes | None]]:
    for _, batch in iter_batches(data):
        for record in iter_records(batch):
            yield record.offset, record.key, record.value


def contents(log: PartitionLog) -> list[tuple[int, bytes | None, bytes | None]]:
    """Offset, key and value of every record that a reader gets."""
    return [record for record in records_of(read_all(log)) if record[0] >= log.log_start_offset]


def table(log: PartitionLog) -> dict[bytes | None, bytes]:
    """The last value of every key, as a reader of the whole log makes it up."""
    values: dict[bytes | None, bytes] = {}
    for _, key, value in contents(log):
        if value is None:
            values.pop(key, None)
        else:
            values[key] = value
    return values
