"""Hypothesis strategies for records, shared by the tests of this layer."""

from hypothesis import strategies as st

TIMESTAMP_MAX = 2**62 - 1  # any two are less than 2**63 apart, so they can be in one batch

nullable_bytes = st.none() | st.binary(max_size=300)
timestamps = st.integers(-1, 2**45) | st.integers(-TIMESTAMP_MAX, TIMESTAMP_MAX)
headers = st.lists(st.tuples(st.text(max_size=20), nullable_bytes), max_size=4).map(tuple)
records = st.tuples(timestamps, nullable_bytes, nullable_bytes, headers)
record_lists = st.lists(records, min_size=1, max_size=30)
