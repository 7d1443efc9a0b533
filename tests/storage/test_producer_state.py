"""Idempotent and transactional producers of one partition: what is taken, refused, answered and remembered."""

import struct
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.errors import ErrorCode, KafkaError
from headrace.records.batch import SEQUENCE_MAX, BatchHeader
from headrace.records.crc import crc32c
from headrace.storage import producer_state
from headrace.storage.markers import EndTransactionMarker, encode_marker, parse_marker
from headrace.storage.origin import Origin
from headrace.storage.producer_entry import CorruptSnapshot
from headrace.storage.producer_state import (
    CompletedTransaction,
    Duplicate,
    ProducerState,
)

TRANSACTIONAL = 0x10
CONTROL = 0x20
COMMIT = EndTransactionMarker(committed=True, coordinator_epoch=1)
ABORT = EndTransactionMarker(committed=False, coordinator_epoch=1)


def batch(
    producer_id: int = 7,
    epoch: int = 0,
    sequence: int = 0,
    count: int = 1,
    *,
    timestamp: int = 1000,
    attributes: int = 0,
) -> BatchHeader:
    return BatchHeader(
        base_offset=0,
        batch_length=49 + count * 10,
        partition_leader_epoch=0,
        magic=2,
        crc=0,
        attributes=attributes,
        last_offset_delta=count - 1,
        base_timestamp=timestamp,
        max_timestamp=timestamp,
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
        record_count=count,
    )


def transactional(producer_id: int = 7, epoch: int = 0, sequence: int = 0, count: int = 1) -> BatchHeader:
    return batch(producer_id, epoch, sequence, count, attributes=TRANSACTIONAL)


def control(producer_id: int = 7, epoch: int = 0, timestamp: int = 1000) -> BatchHeader:
    return batch(producer_id, epoch, -1, timestamp=timestamp, attributes=TRANSACTIONAL | CONTROL)


def append(state: ProducerState, header: BatchHeader, offset: int) -> None:
    assert state.check(header) is None
    state.update(header, offset)


def refused(state: ProducerState, header: BatchHeader, origin: Origin = Origin.CLIENT) -> ErrorCode:
    with pytest.raises(KafkaError) as caught:
        state.check(header, origin)
    return caught.value.code


def states(state: ProducerState) -> dict[int, object]:
    return {entry.producer_id: entry.state() for entry in state}


def test_batches_in_sequence_are_taken() -> None:
    state = ProducerState()
    append(state, batch(sequence=0, count=10), 100)
    append(state, batch(sequence=10, count=5), 110)
    append(state, batch(sequence=15), 115)
    entry = state.get(7)
    assert entry is not None
    assert (entry.last_sequence, entry.last_offset) == (15, 115)


def test_batch_without_producer_id_leaves_no_trace() -> None:
    state = ProducerState()
    append(state, batch(producer_id=-1, epoch=-1, sequence=-1), 0)
    assert len(state) == 0


def test_partitions_without_idempotent_producers_allocate_no_table() -> None:
    one, other = ProducerState(), ProducerState()
    assert one._producers is other._producers
    append(one, batch(), 0)
    assert one._producers is not other._producers
    assert len(other) == 0
    assert one.expire(10_000, 1) == 1
    assert one._producers is other._producers


def test_each_of_the_last_five_batches_is_answered_as_a_duplicate_with_its_first_offset() -> None:
    state = ProducerState()
    for i in range(6):
        append(state, batch(sequence=i * 3, count=3, timestamp=1000 + i), 100 + i * 3)
    for i in range(1, 6):
        assert state.check(batch(sequence=i * 3, count=3)) == Duplicate(100 + i * 3, 102 + i * 3, 1000 + i)
    assert refused(state, batch(sequence=0, count=3)) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


def test_duplicate_is_found_after_a_log_append_time_stamp() -> None:
    state = ProducerState()
    state.update(batch(sequence=0, timestamp=5), 40, max_timestamp=9999)
    assert state.check(batch(sequence=0, timestamp=5)) == Duplicate(40, 40, 9999)


def test_overlapping_but_different_range_is_not_a_duplicate() -> None:
    state = ProducerState()
    append(state, batch(sequence=0, count=4), 0)
    append(state, batch(sequence=4, count=4), 4)
    assert refused(state, batch(sequence=4, count=3)) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert refused(state, batch(sequence=2, count=6)) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


def test_gap_is_refused() -> None:
    state = ProducerState()
    append(state, batch(sequence=0), 0)
    assert refused(state, batch(sequence=2)) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


def test_unknown_producer_may_start_at_any_sequence() -> None:
    state = ProducerState()
    append(state, batch(sequence=1234), 0)
    append(state, batch(sequence=1235), 1)


def test_new_epoch_starts_at_sequence_zero() -> None:
    state = ProducerState()
    append(state, batch(epoch=0, sequence=0), 0)
    assert refused(state, batch(epoch=1, sequence=1)) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    append(state, batch(epoch=1, sequence=0), 1)
    assert state.check(batch(epoch=1, sequence=0)) == Duplicate(1, 1, 1000)
    append(state, batch(epoch=1, sequence=1), 2)


def test_older_epoch_is_refused_as_invalid_producer_epoch() -> None:
    state = ProducerState()
    append(state, batch(epoch=3, sequence=0), 0)
    for origin in (Origin.CLIENT, Origin.COORDINATOR):
        assert refused(state, batch(epoch=2, sequence=0), origin) is ErrorCode.INVALID_PRODUCER_EPOCH


def test_batches_of_an_older_epoch_are_no_duplicates() -> None:
    state = ProducerState()
    append(state, batch(epoch=0, sequence=0), 0)
    append(state, batch(epoch=1, sequence=0), 1)
    assert refused(state, batch(epoch=0, sequence=0)) is ErrorCode.INVALID_PRODUCER_EPOCH


def test_sequence_wraps_after_the_largest_int32() -> None:
    state = ProducerState()
    append(state, batch(sequence=SEQUENCE_MAX - 1, count=2), 0)
    append(state, batch(sequence=0), 2)

    state = ProducerState()
    append(state, batch(sequence=SEQUENCE_MAX - 1, count=4), 10)  # wraps inside the batch
    assert state.check(batch(sequence=SEQUENCE_MAX - 1, count=4)) == Duplicate(10, 13, 1000)
    append(state, batch(sequence=2), 14)
    assert refused(state, batch(sequence=2, count=2)) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


def test_replicas_and_coordinators_need_no_sequence() -> None:
    state = ProducerState()
    append(state, batch(epoch=2, sequence=0), 0)
    assert state.check(batch(epoch=2, sequence=50), Origin.REPLICA) is None
    assert state.check(batch(epoch=1, sequence=50), Origin.REPLICA) is None
    assert state.check(batch(epoch=2, sequence=-1), Origin.COORDINATOR) is None


def test_failed_check_changes_nothing() -> None:
    state = ProducerState()
    append(state, batch(epoch=1, sequence=0), 0)
    before = states(state)
    for header in (batch(epoch=1, sequence=7), batch(epoch=0), batch(epoch=2, sequence=3)):
        refused(state, header)
    assert states(state) == before


def test_producers_expire_by_their_last_timestamp() -> None:
    state = ProducerState()
    append(state, batch(1, timestamp=1000), 0)
    append(state, batch(2, timestamp=2000), 1)
    assert state.expire(1999, 1000) == 0
    assert state.expire(2000, 1000) == 1
    assert state.get(1) is None and state.get(2) is not None
    append(state, batch(1, sequence=99), 2)  # and may come back wherever it was


def test_producer_with_an_open_transaction_does_not_expire() -> None:
    state = ProducerState()
    append(state, transactional(), 0)
    assert state.expire(10**12, 1) == 0
    completed = state.update(control(), 1, marker=COMMIT)
    assert completed is not None
    assert state.expire(10**12, 1) == 1


def test_full_table_forgets_those_that_wrote_longest_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_state, "PRODUCERS_MAX", 20)
    state = ProducerState()
    append(state, transactional(0), 0)
    for offset in range(1, 20):
        append(state, batch(offset), offset)
    append(state, batch(1, sequence=1), 20)
    append(state, batch(99), 21)
    assert len(state) == 19
    assert state.get(0) is not None, "an open transaction is never forgotten"
    assert state.get(1) is not None, "it wrote recently"
    assert state.get(2) is None and state.get(3) is None


# -- transactions --------------------------------------------------------------------------------------------


def test_open_transaction_holds_the_stable_offset_until_its_marker_is_replicated() -> None:
    state = ProducerState()
    assert state.first_unstable_offset(0) is None
    append(state, batch(1), 0)
    append(state, transactional(2), 1)
    append(state, transactional(3), 2)
    append(state, transactional(2, sequence=1), 3)
    assert state.first_unstable_offset(0) == 1

    completed = state.update(control(2), 4, marker=ABORT)
    assert completed == CompletedTransaction(producer_id=2, first_offset=1, last_offset=4, aborted=True)
    assert state.last_stable_offset_after(completed) == 2
    state.complete_transaction(completed)
    assert state.first_undecided_offset() == 2
    assert state.first_unstable_offset(0) == 1, "the marker is not replicated yet"
    state.on_high_watermark(4)
    assert state.first_unstable_offset(0) == 1
    state.on_high_watermark(5)
    assert state.first_unstable_offset(0) == 2

    completed = state.update(control(3), 5, marker=COMMIT)
    assert completed == CompletedTransaction(producer_id=3, first_offset=2, last_offset=5, aborted=False)
    assert state.last_stable_offset_after(completed) == 6
    state.complete_transaction(completed)
    state.on_high_watermark(6)
    assert state.first_unstable_offset(0) is None


def test_marker_without_data_completes_nothing() -> None:
    state = ProducerState()
    assert state.update(control(), 0, marker=COMMIT) is None
    assert state.first_unstable_offset(0) is None
    entry = state.get(7)
    assert entry is not None and entry.coordinator_epoch == 1


def test_control_batch_without_a_marker_is_ignored() -> None:
    state = ProducerState()
    assert state.update(control(), 0) is None
    assert len(state) == 0


def test_sequence_goes_on_over_a_marker_of_the_same_epoch_and_restarts_after_a_raised_one() -> None:
    state = ProducerState()
    append(state, transactional(sequence=0), 0)
    state.update(control(), 1, marker=COMMIT)
    assert state.check(transactional(sequence=0)) == Duplicate(0, 0, 1000)
    append(state, transactional(sequence=1), 2)
    state.update(control(epoch=1), 3, marker=COMMIT)
    assert refused(state, transactional(epoch=1, sequence=2)) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    append(state, transactional(epoch=1, sequence=0), 4)


def test_plain_write_inside_a_transaction_is_refused() -> None:
    state = ProducerState()
    append(state, transactional(sequence=0), 0)
    assert refused(state, batch(sequence=1)) is ErrorCode.INVALID_TXN_STATE


def test_zombie_markers_are_refused() -> None:
    state = ProducerState()
    append(state, transactional(epoch=2), 0)
    with pytest.raises(KafkaError) as caught:
        state.check_marker(control(epoch=1), COMMIT)
    assert caught.value.code is ErrorCode.INVALID_PRODUCER_EPOCH
    state.check_marker(control(epoch=2), COMMIT)
    state.update(control(epoch=2), 1, marker=EndTransactionMarker(True, 5))
    with pytest.raises(KafkaError) as caught:
        state.check_marker(control(epoch=2), EndTransactionMarker(True, 4))
    assert caught.value.code is ErrorCode.TRANSACTION_COORDINATOR_FENCED
    state.check_marker(control(epoch=2), EndTransactionMarker(True, 4), Origin.REPLICA)


def test_second_version_markers_must_raise_the_epoch_unless_they_are_a_retry() -> None:
    state = ProducerState()
    append(state, transactional(epoch=2), 0)
    with pytest.raises(KafkaError) as caught:
        state.check_marker(control(epoch=2), COMMIT, transaction_version=2)
    assert caught.value.code is ErrorCode.INVALID_PRODUCER_EPOCH
    state.check_marker(control(epoch=3), COMMIT, transaction_version=2)
    state.update(control(epoch=3), 1, marker=COMMIT)
    state.check_marker(control(epoch=3), COMMIT, transaction_version=2)


def test_markers_survive_encoding() -> None:
    for marker in (COMMIT, ABORT, EndTransactionMarker(True, 2**31 - 1)):
        assert parse_marker(*encode_marker(marker)) == marker
    leader_change = struct.pack(">hh", 0, 2)
    assert parse_marker(leader_change, b"") is None
    for key, value in (
        (None, b""),
        (b"\0", b""),
        (struct.pack(">hh", 0, 1), b"\0\0"),
        (struct.pack(">hh", 0, 0), None),
    ):
        with pytest.raises(KafkaError):
            parse_marker(key, value)


# -- snapshots -----------------------------------------------------------------------------------------------


def test_snapshot_is_laid_out_as_kafka_reads_it() -> None:
    state = ProducerState()
    append(state, batch(5, epoch=3, sequence=10, count=4, timestamp=77), 100)
    data = state.snapshot()
    body = struct.pack(">i", 1) + struct.pack(">qhiqiqiq", 5, 3, 13, 103, 3, 77, -1, -1)
    assert data == struct.pack(">hI", 1, crc32c(body)) + body


def test_snapshot_keeps_the_last_batch_and_the_open_transaction() -> None:
    state = ProducerState()
    for i in range(3):
        append(state, batch(1, sequence=i), i)
    append(state, transactional(2), 3)
    append(state, transactional(3), 4)
    loaded = ProducerState()
    loaded.load(state.snapshot())
    assert loaded.check(batch(1, sequence=2)) == Duplicate(2, 2, 1000)
    assert refused(loaded, batch(1, sequence=1)) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    append(loaded, batch(1, sequence=3), 5)
    assert loaded.first_unstable_offset(0) == 3
    assert refused(loaded, batch(2, sequence=1)) is ErrorCode.INVALID_TXN_STATE


def test_loading_leaves_out_what_expired() -> None:
    state = ProducerState()
    append(state, batch(1, timestamp=1000), 0)
    append(state, batch(2, timestamp=5000), 1)
    loaded = ProducerState()
    loaded.load(state.snapshot(), now_ms=6000, expiration_ms=2000)
    assert [entry.producer_id for entry in loaded] == [2]


@given(st.data())
def test_damaged_snapshot_is_refused_and_changes_nothing(data: st.DataObject) -> None:
    state = ProducerState()
    append(state, batch(1), 0)
    append(state, batch(2, count=3), 1)
    good = state.snapshot()
    kind = data.draw(st.sampled_from(["flip", "cut", "grow"]))
    if kind == "flip":
        bit = data.draw(st.integers(0, len(good) * 8 - 1))
        damaged = bytearray(good)
        damaged[bit // 8] ^= 1 << bit % 8
    elif kind == "cut":
        damaged = bytearray(good[: data.draw(st.integers(0, len(good) - 1))])
    else:
        damaged = bytearray(good + data.draw(st.binary(min_size=1, max_size=100)))
    other = ProducerState()
    append(other, batch(9), 0)
    before = states(other)
    with pytest.raises(CorruptSnapshot):
        other.load(bytes(damaged))
    assert states(other) == before


# -- against a model -----------------------------------------------------------------------------------------

Step = tuple[int, int, int, int, int]  # producer, epoch change, sequence change, count, timestamp
steps = st.lists(
    st.tuples(
        st.integers(1, 3),
        st.sampled_from([0, 0, 0, 0, 0, 1, -1]),
        st.sampled_from([0, 0, 0, 0, 0, -1, 1, -2, 5]),
        st.integers(1, 3),
        st.integers(0, 10_000),
    ),
    max_size=60,
)


class Model:
    """The rules, told naively: keep every batch of the current epoch, look at the last five."""

    def __init__(self) -> None:
        self.epoch: dict[int, int] = {}
        self.batches: dict[int, list[tuple[int, int, int, int]]] = {}

    def offer(self, header: BatchHeader, offset: int) -> object:
        producer_id, epoch, first = header.producer_id, header.producer_epoch, header.base_sequence
        last = first + header.record_count - 1
        known = self.batches.get(producer_id, [])
        if producer_id in self.epoch:
            if epoch < self.epoch[producer_id]:
                return ErrorCode.INVALID_PRODUCER_EPOCH
            if epoch > self.epoch[producer_id]:
                if first != 0:
                    return ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
                known = []
            else:
                for f, to, at, timestamp in known[-5:]:
                    if (f, to) == (first, last):
                        return Duplicate(at, at + to - f, timestamp)
                if first != (known[-1][1] + 1 if known else 0):
                    return ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        self.epoch[producer_id] = epoch
        self.batches[producer_id] = [*known, (first, last, offset, header.max_timestamp)]
        return None


def run(script: Iterable[Step]) -> Iterable[tuple[BatchHeader, object, object, int, ProducerState]]:
    state, model, offset = ProducerState(), Model(), 0
    for producer_id, epoch_change, sequence_change, count, timestamp in script:
        epoch = max(0, model.epoch.get(producer_id, 0) + epoch_change)
        known = model.batches.get(producer_id, [])
        follows = known[-1][1] + 1 if known and not epoch_change else 0
        header = batch(
            producer_id, epoch, max(0, follows + sequence_change * count), count, timestamp=timestamp
        )
        try:
            answer: object = state.check(header)
        except KafkaError as error:
            answer = error.code
        if answer is None:
            state.update(header, offset)
        yield header, answer, model.offer(header, offset), offset, state
        if answer is None:
            offset += count


@given(steps)
def test_answers_equal_those_of_a_simple_model(script: list[Step]) -> None:
    for _header, answer, expected, _offset, _state in run(script):
        assert answer == expected


@settings(max_examples=50)
@given(steps, st.integers(0, 60))
def test_rebuild_from_a_snapshot_and_the_log_after_it_continues_as_the_original(
    script: list[Step], cut: int
) -> None:
    log: list[tuple[BatchHeader, int]] = []
    snapshot, state = ProducerState().snapshot(), ProducerState()
    for header, answer, _expected, offset, state in run(script):
        if answer is None:
            log.append((header, offset))
            if len(log) == cut:
                snapshot = state.snapshot()
    from_start = ProducerState()
    for header, offset in log:
        from_start.update(header, offset)
    assert states(from_start) == states(state)

    from_snapshot = ProducerState()
    from_snapshot.load(snapshot)
    for header, offset in log[cut if cut <= len(log) else 0 :]:
        from_snapshot.update(header, offset)
    assert from_snapshot.snapshot() == state.snapshot()
    for entry in state:
        following = batch(entry.producer_id, entry.epoch, entry.last_sequence + 1)
        assert from_snapshot.check(following) is None
        again = entry.batches[-1]
        repeated = batch(entry.producer_id, entry.epoch, again.first_sequence, again.offset_delta + 1)
        assert from_snapshot.check(repeated) == state.check(repeated) != None  # noqa: E711
