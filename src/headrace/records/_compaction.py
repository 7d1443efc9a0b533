# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, binding=True, cdivision=True
# cython: annotation_typing=False
"""The loops of log compaction: which key was written last where, and which records of a batch stay.

One source, two lives, as `_codec` (the C types are in `_compaction.pxd`). Owns the table of keys: a fixed number of
slots, each a 16-byte digest of a key and the offset of its latest record, so its memory is bounded however many keys
there are; the digest is SipHash-2-4 of 128 bits, and two keys of one digest would be taken for one, as Kafka does with
MD5. Invariant: whatever the bytes are, a function returns or raises KafkaError, and reads nothing outside them.

While records are walked the interpreter lock is not held, so that a broker's loop goes on beside it.
Callers: `codec` chooses between the two, the cleaner imports from there.
"""

from array import array
from contextlib import suppress
from mmap import mmap

from headrace.base.errors import ErrorCode, KafkaError

# Cython reads the import below when it compiles; nothing ever runs it, because Cython need not be installed.
_NEVER = False
if _NEVER:
    import cython
else:
    from headrace.records import without_cython as cython

MADV_HUGEPAGE = 14
SLOT_BYTES = 24
_SLOT_WORDS = 3

# The least a record takes: seven one-byte fields.
_RECORD_BYTES_MIN = 7

_M64 = 0xFFFFFFFFFFFFFFFF
_I64_MAX = 0x7FFFFFFFFFFFFFFF
_I64_MIN = -_I64_MAX - 1

# SipHash's start for the key 00 01 .. 0f, which the published test vectors use.
_SIP0 = 0x736F6D6570736575 ^ 0x0706050403020100
_SIP1 = 0x646F72616E646F6D ^ 0x0F0E0D0C0B0A0908 ^ 0xEE
_SIP2 = 0x6C7967656E657261 ^ 0x0706050403020100
_SIP3 = 0x7465646279746573 ^ 0x0F0E0D0C0B0A0908


_NO_RUNS = array("q", [0])


def _invalid() -> KafkaError:
    return KafkaError(ErrorCode.CORRUPT_MESSAGE, "the records of a batch in the log are malformed")


def _zeroed(size: int) -> memoryview:
    """Memory for a table, in large pages where there are some: its slots are asked for in no order at all."""
    memory = mmap(-1, size)
    with suppress(AttributeError, OSError):  # not on every system
        memory.madvise(MADV_HUGEPAGE)
    return memoryview(memory).cast("Q")


class _Records:
    """A walk over the records of one inflated batch; `advance` shows the next one's parts."""

    def __init__(self, payload: bytes) -> None:
        self.owner = payload
        self.data = payload
        self.size = len(payload)
        self.pos = 0
        self.end = self.size
        self.bad = 0
        self.start = 0
        self.after_timestamp = 0
        self.timestamp_delta = 0
        self.offset_delta = 0
        self.key_start = 0
        self.key_length = 0
        self.value_length = 0
        self.runs = _NO_RUNS

    def varint(self, shift_max: int) -> int:
        """One zigzag number of 32 bits (shift_max 28) or 64 bits (63). Sets `bad` when it is none."""
        pos = self.pos
        raw = 0
        shift = 0
        byte = 0x80
        while byte >= 0x80:
            if pos >= self.end or shift > shift_max:
                self.bad = 1
                return 0
            byte = self.data[pos]
            pos += 1
            if shift == shift_max and byte > (0x0F if shift == 28 else 0x01):
                self.bad = 1
                return 0
            raw |= (byte & 0x7F) << shift
            shift += 7
        self.pos = pos
        return (raw >> 1) ^ -(raw & 1)

    def advance(self) -> int:
        """To the next record: 1, or 0 after the last one, or -1 when the bytes are none."""
        if self.pos >= self.size:
            return 0
        self.end = self.size
        self.start = self.pos
        length = self.varint(28)
        if self.bad > 0 or length < _RECORD_BYTES_MIN - 1 or length > self.size - self.pos:
            return -1
        self.end = self.pos + length
        self.pos += 1
        self.timestamp_delta = self.varint(63)
        self.after_timestamp = self.pos
        self.offset_delta = self.varint(28)
        self.key_length = self.varint(28)
        if (
            self.bad > 0
            or self.offset_delta < 0
            or self.key_length < -1
            or self.key_length > self.end - self.pos
        ):
            return -1
        self.key_start = self.pos
        if self.key_length > 0:
            self.pos += self.key_length
        self.value_length = self.varint(28)
        if self.bad > 0 or self.value_length < -1 or self.value_length > self.end - self.pos:
            return -1
        self.pos = self.end
        return 1


class KeyMap:
    """Key -> offset of its latest record, in a fixed number of slots, of which at most `entries_max` are used."""

    def __init__(self, slot_count: int, entries_max: int) -> None:
        if not 1 <= entries_max < slot_count:
            raise ValueError("a map needs a free slot to end a search at")
        self.store = _zeroed(slot_count * SLOT_BYTES)
        self.slots = self.store
        self.slot_count = slot_count
        self.entries_max = entries_max
        self.count = 0
        self.high = 0
        self.low = 0

    def digest_of(self, key: bytes) -> bytes:
        """The digest of one key, for tests."""
        self.digest(key, 0, len(key))
        return int(self.high).to_bytes(8, "little") + int(self.low).to_bytes(8, "little")

    def get(self, key: bytes) -> int:
        """The offset of a key's latest record, -1 when it has none here."""
        return self.latest(key, 0, len(key))

    def digest(self, data: bytes, start: int, length: int) -> int:
        """SipHash-2-4-128 of a key, into `high` and `low`."""
        v0 = _SIP0
        v1 = _SIP1
        v2 = _SIP2
        v3 = _SIP3
        first = 0
        words = length // 8 + 1  # the last one holds what is left over, and the length
        for number in range(words + 2):
            word = 0
            rounds = 2
            if number < words:
                at = start + number * 8
                if number < words - 1:
                    for shift in range(0, 64, 8):
                        byte = data[at]
                        word |= byte << shift
                        at += 1
                else:
                    shift = 0
                    while at < start + length:
                        byte = data[at]
                        word |= byte << shift
                        shift += 8
                        at += 1
                    byte = length & 0xFF
                    word |= byte << 56
                v3 ^= word
            elif number == words:
                v2 ^= 0xEE
                rounds = 4
            else:
                first = v0 ^ v1 ^ v2 ^ v3
                v1 ^= 0xDD
                rounds = 4
            for _ in range(rounds):
                v0 = (v0 + v1) & _M64
                v1 = ((v1 << 13) & _M64) | (v1 >> 51)
                v1 ^= v0
                v0 = ((v0 << 32) & _M64) | (v0 >> 32)
                v2 = (v2 + v3) & _M64
                v3 = ((v3 << 16) & _M64) | (v3 >> 48)
                v3 ^= v2
                v0 = (v0 + v3) & _M64
                v3 = ((v3 << 21) & _M64) | (v3 >> 43)
                v3 ^= v0
                v2 = (v2 + v1) & _M64
                v1 = ((v1 << 17) & _M64) | (v1 >> 47)
                v1 ^= v2
                v2 = ((v2 << 32) & _M64) | (v2 >> 32)
            v0 ^= word
        self.high = first
        self.low = v0 ^ v1 ^ v2 ^ v3
        return 0

    def find(self) -> int:
        """Where the digest's slot is, or the free one where it would go: there always is one."""
        slot = self.high % self.slot_count
        while True:
            at = slot * _SLOT_WORDS
            if self.slots[at + 2] == 0 or (self.slots[at] == self.high and self.slots[at + 1] == self.low):
                return at
            slot += 1
            if slot == self.slot_count:
                slot = 0

    def put(self, data: bytes, start: int, length: int, offset: int) -> int:
        """Remember a key's record, later than any before; 0 when the key is new and there is no room."""
        self.digest(data, start, length)
        at = self.find()
        if self.slots[at + 2] == 0:
            if self.count >= self.entries_max:
                return 0
            self.count += 1
            self.slots[at] = self.high
            self.slots[at + 1] = self.low
        self.slots[at + 2] = offset + 1
        return 1

    def latest(self, data: bytes, start: int, length: int) -> int:
        self.digest(data, start, length)
        at = self.find()
        return self.slots[at + 2] - 1


def map_keys(keys: KeyMap, payload: bytes, base_offset: int, from_offset: int) -> int:
    """Enter an inflated batch's records from `from_offset` on; -1, or the offset of the first that found no room."""
    records = _Records(payload)
    full_at = -1
    with cython.nogil:
        step = records.advance()
        while step > 0:
            offset = base_offset + records.offset_delta
            if (
                offset >= from_offset
                and records.key_length >= 0
                and not keys.put(records.data, records.key_start, records.key_length, offset)
            ):
                full_at = offset
                break
            step = records.advance()
    if step < 0:
        raise _invalid()
    return full_at


def filter_records(
    keys: KeyMap, payload: bytes, count: int, base_offset: int, map_end: int, keep_tombstones: bool
) -> tuple[int, int, int, int, bytes]:
    """Which of an inflated batch's `count` records stay: the latest of their key, and all from `map_end` on.

    How many are kept and dropped, how many of the kept are tombstones, the latest timestamp delta of the kept, and
    the bytes of the kept: `payload` itself when that is all of them. Tombstones count only when all of the batch lie
    below `map_end`: while what a tombstone deletes may still be there, its time must not begin.
    """
    if count < 0 or count > len(payload) // _RECORD_BYTES_MIN:
        raise _invalid()
    records = _Records(payload)
    # Start and end of each run of kept records, of which there is one to two records at most.
    records.runs = array("q", [0]) * (count + 2)
    run_count = 0
    run_start = 0
    run_end = 0
    kept = 0
    dropped = 0
    tombstones = 0
    early = 0
    latest_delta = _I64_MIN
    with cython.nogil:
        step = records.advance()
        while step > 0 and kept + dropped < count:
            offset = base_offset + records.offset_delta
            if offset >= map_end:
                keep = True
            elif records.key_length < 0:
                keep = (
                    False  # from before the topic was compacted: it can have no successor, Kafka drops it too
                )
            else:
                keep = offset >= keys.latest(records.data, records.key_start, records.key_length)
                if keep and records.value_length < 0 and not keep_tombstones:
                    keep = False
            if keep:
                kept += 1
                if records.value_length < 0:
                    tombstones += 1
                    if offset >= map_end:
                        early = 1
                if records.timestamp_delta > latest_delta:
                    latest_delta = records.timestamp_delta
                run_end = records.end
            else:
                dropped += 1
                if run_end > run_start:
                    records.runs[run_count] = run_start
                    records.runs[run_count + 1] = run_end
                    run_count += 2
                run_start = records.end
                run_end = run_start
            step = records.advance()
    if step != 0 or kept + dropped != count:
        raise _invalid()
    if early > 0:
        tombstones = 0
    if dropped == 0:
        return kept, dropped, tombstones, latest_delta, payload
    if run_end > run_start:
        records.runs[run_count] = run_start
        records.runs[run_count + 1] = run_end
        run_count += 2
    parts = []
    index = 0
    while index < run_count:
        parts.append(payload[records.runs[index] : records.runs[index + 1]])
        index += 2
    return kept, dropped, tombstones, latest_delta, b"".join(parts)


def rebase_records(payload: bytes, shift: int) -> bytearray:
    """The same records with `shift` added to each timestamp delta: for a batch whose base timestamp moved."""
    records = _Records(payload)
    out = bytearray()
    step = records.advance()
    while step > 0:
        if not _sum_fits(shift, records.timestamp_delta):
            raise _invalid()
        delta = records.timestamp_delta + shift
        _put_varint(out, 1 + _varint_size(delta) + (records.end - records.after_timestamp))
        out.append(0)
        _put_varint(out, delta)
        out += payload[records.after_timestamp : records.end]
        step = records.advance()
    if step < 0:
        raise _invalid()
    return out


def _sum_fits(base: int, delta: int) -> bool:
    if delta >= 0:
        return base <= _I64_MAX - delta
    return base >= _I64_MIN - delta


def _put_varint(out: bytearray, value: int) -> None:
    raw = value << 1 if value >= 0 else (value << 1) ^ -1
    while raw >= 0x80:
        out.append((raw & 0x7F) | 0x80)
        raw >>= 7
    out.append(raw)


def _varint_size(value: int) -> int:
    raw = value << 1 if value >= 0 else (value << 1) ^ -1
    size = 1
    while raw >= 0x80:
        raw >>= 7
        size += 1
    return size
