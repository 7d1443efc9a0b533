"""A snapshot of the metadata is whole, or refused."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.consensus.snapshots import SnapshotDamaged, decode_snapshot, encode_snapshot

NOW_MS = 1_700_000_000_000


@pytest.mark.parametrize("entries", [0, 1, 4_999, 5_000, 12_345])
def test_a_snapshot_holds_every_entry(entries: int) -> None:
    written = [b"%d" % number for number in range(entries)]
    assert list(decode_snapshot(encode_snapshot(written, NOW_MS), "here")) == written


@settings(max_examples=50)
@given(st.data())
def test_a_damaged_snapshot_is_refused_not_half_read(data: st.DataObject) -> None:
    whole = encode_snapshot([b"entry %d" % number for number in range(20)], NOW_MS)
    position = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        damaged = whole[:position]
    else:
        flipped = data.draw(st.integers(1, 255))
        damaged = whole[:position] + bytes([whole[position] ^ flipped]) + whole[position + 1 :]
    with contextlib.suppress(SnapshotDamaged):
        found = list(decode_snapshot(damaged, "here"))
        assert found == [b"entry %d" % number for number in range(20)], "outside of every CRC, and harmless"
