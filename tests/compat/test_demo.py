"""The demo's account is honest: every kind of loss or damage planted in what was read is counted."""

from examples.demo import PARTITIONS, Account, Stream, number_of, record, settle


def stream_of(count: int) -> tuple[Stream, list[tuple[int, int, bytes]]]:
    stream = Stream(count)
    found = []
    for number in range(count):
        place = (number % PARTITIONS, number // PARTITIONS)
        stream.on_ack(number, *place)
        found.append((*place, record(number)))
    return stream, found


def test_a_whole_stream_balances() -> None:
    stream, found = stream_of(10)
    assert settle(stream, found) == Account(found=10)
    assert settle(stream, found).clean


def test_a_lost_record_is_missed() -> None:
    stream, found = stream_of(10)
    del found[4]
    assert settle(stream, found) == Account(found=9, missing=1)


def test_a_doubled_record_is_counted() -> None:
    stream, found = stream_of(10)
    partition, _, value = found[9]
    account = settle(stream, [*found, (partition, 99, value)])
    assert account == Account(found=11, duplicates=1)
    assert not account.clean


def test_a_damaged_record_is_damaged_and_missing() -> None:
    stream, found = stream_of(10)
    partition, offset, value = found[3]
    found[3] = (partition, offset, value.replace(b"~", b"-", 1))
    assert number_of(found[3][2]) is None
    assert settle(stream, found) == Account(found=10, damaged=1, missing=1)


def test_records_out_of_order_or_at_another_offset_are_counted() -> None:
    stream, found = stream_of(2 * PARTITIONS)
    first, later = found[0], found[PARTITIONS]
    found[0], found[PARTITIONS] = (first[0], first[1], later[2]), (later[0], later[1], first[2])
    assert settle(stream, found) == Account(found=2 * PARTITIONS, disordered=1, elsewhere=2)
