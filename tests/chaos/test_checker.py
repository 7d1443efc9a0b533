"""The checker finds every kind of violation that is planted in a good history, and nothing in the good one."""

import copy

import pytest

from tests.chaos.checker import OFFSET_UNKNOWN, History, Record, check, check_copies

A, B = "writer a", "writer b"


def good_history() -> History:
    """Two writers, two partitions, everything acknowledged; one reader has followed partition 0."""
    history = History(final={0: [], 1: []})
    for number in range(6):
        for writer in (A, B):
            record, partition = Record(writer, number), number % 2
            offset = len(history.final[partition])
            history.sent[record] = partition
            history.acked[record] = offset
            history.final[partition].append((offset, record))
    for offset, record in history.final[0]:
        history.reads.append(("reader", 0, offset, record))
        history.ends.append(("observer", 0, offset + 1))
    return history


def kinds(history: History) -> set[str]:
    return set(check(history).counts())


def test_a_good_history_has_no_violation() -> None:
    account = check(good_history())
    assert account.violations == []
    assert (account.sent, account.acked, account.found, account.unanswered) == (12, 12, 12, 0)
    assert any("lost 0" in line for line in account.lines())


def test_a_missing_acknowledged_record_is_lost() -> None:
    history = good_history()
    del history.final[1][2]
    assert kinds(history) == {"lost"}


def test_a_record_that_was_read_and_is_gone_is_lost_even_if_nobody_was_told_of_it() -> None:
    history = good_history()
    _, record = history.final[0].pop()
    del history.acked[record]
    history.failed[record] = "timed out"
    assert kinds(history) == {"lost"}


def test_a_record_that_timed_out_may_be_there_or_not() -> None:
    for there in (True, False):
        history = good_history()
        record = Record(A, 99)
        history.sent[record] = 1
        history.failed[record] = "timed out"
        if there:
            history.final[1].append((6, record))
        assert kinds(history) == set()


def test_an_unanswered_record_is_counted_and_is_no_violation() -> None:
    history = good_history()
    history.sent[Record(A, 99)] = 1
    account = check(history)
    assert account.unanswered == 1 and account.violations == []


def test_a_record_at_two_offsets_is_duplicated() -> None:
    history = good_history()
    history.final[1].append((6, history.final[1][-1][1]))
    assert kinds(history) == {"duplicated"}


def test_a_record_in_two_partitions_is_duplicated_and_nobody_sent_it_there() -> None:
    history = good_history()
    history.final[1].append((6, history.final[0][-1][1]))
    assert kinds(history) == {"duplicated", "phantom"}


def test_records_of_one_writer_out_of_order_are_found() -> None:
    history = good_history()
    log = history.final[1]
    (first, one), (third, two) = log[0], log[2]
    log[0], log[2] = (first, two), (third, one)
    history.acked[one], history.acked[two] = third, first
    assert kinds(history) == {"reordered"}


def test_an_acknowledgement_with_another_offset_than_the_log_is_found() -> None:
    history = good_history()
    history.acked[Record(A, 1)] = 3
    assert kinds(history) == {"moved"}


def test_an_acknowledgement_without_an_offset_wants_the_record_anywhere() -> None:
    history = good_history()
    history.acked[Record(A, 1)] = OFFSET_UNKNOWN
    assert kinds(history) == set()
    history.final[1] = [entry for entry in history.final[1] if entry[1] != Record(A, 1)]
    assert kinds(history) == {"lost"}


def test_two_readers_that_see_different_records_at_one_offset_are_found() -> None:
    history = good_history()
    history.reads += [("one", 1, 0, Record(A, 1)), ("two", 1, 0, Record(B, 1))]
    assert kinds(history) == {"two values"}


def test_a_reader_and_the_final_log_that_disagree_are_found() -> None:
    history = good_history()
    history.sent[Record(A, 98)] = 1
    history.reads.append(("stale", 1, 0, Record(A, 98)))
    assert kinds(history) == {"two values", "lost"}


def test_a_record_that_nobody_sent_is_found() -> None:
    history = good_history()
    history.final[1].append((6, Record("stranger", 0)))
    assert kinds(history) == {"phantom"}


def test_a_reader_that_goes_back_is_found() -> None:
    history = good_history()
    history.reads.append(history.reads[-1])
    assert kinds(history) == {"went back"}


def test_an_end_offset_that_goes_down_is_found_for_the_client_that_saw_it() -> None:
    history = good_history()
    history.ends.append(("another", 0, 2))
    assert kinds(history) == set()
    history.ends.append(("observer", 0, 2))
    assert kinds(history) == {"end went down"}


@pytest.mark.parametrize("dropped", range(6))
def test_no_single_record_can_vanish_unseen(dropped: int) -> None:
    history = copy.deepcopy(good_history())
    del history.final[1][dropped]
    assert "lost" in kinds(history)


def copies_of(history: History) -> dict[int, list[tuple[int, Record]]]:
    return copy.deepcopy(history.final)


def test_a_true_copy_has_no_violation_wherever_its_offsets_are() -> None:
    source = good_history().final
    shifted = {partition: [(offset * 2, r) for offset, r in log] for partition, log in source.items()}
    assert check_copies(source, shifted) == []


@pytest.mark.parametrize("kind", ["not copied", "copied twice", "phantom copy", "copied out of order"])
def test_every_fault_of_a_copy_is_found(kind: str) -> None:
    source, copies = good_history().final, copies_of(good_history())
    log = copies[1]
    if kind == "not copied":
        del log[2]
    elif kind == "copied twice":
        log.append((9, log[0][1]))
    elif kind == "phantom copy":
        log.append((9, Record("stranger", 1)))
    else:
        log[0], log[1] = (log[0][0], log[1][1]), (log[1][0], log[0][1])
    assert [violation.kind for violation in check_copies(source, copies)] == [kind]
