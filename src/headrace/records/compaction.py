"""What log compaction adds to the record codec: a map of keys, and records without those that were replaced.

Apart from `codec`, which chooses between compiled and interpreted for both, because clients never need it. Callers: the
storage layer's cleaning.
"""

from headrace.records import codec  # first, because it chooses between compiled and interpreted
from headrace.records._compaction import SLOT_BYTES, KeyMap, filter_records, map_keys, rebase_records

COMPILED = codec.COMPILED

__all__ = ["COMPILED", "SLOT_BYTES", "KeyMap", "filter_records", "map_keys", "rebase_records"]
