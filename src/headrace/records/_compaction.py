# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, binding=True, cdivision=True
# cython: annotation_typing=False
"""The loops of log compaction: which key was written last where, and which records of a batch stay.

One source, two lives, as `_codec` (the C types are in `_compaction.pxd`). Owns the table of keys: a fixed number of
slots, each a 16-byte digest of a key and the offset of its latest record, so its memory is bounded however many keys
there are; the digest is SipHash-2-4 of 128 bits, and two keys of one digest would be taken for one, as Kafka does with
MD5. Beside it a bit for each offset from the first on, as far as was asked for: set when a later record of the same key
was entered. Those offsets need no second look into the table, which is most of what a look costs: its slots lie in no
order, so none is in a cache. Where the table must be asked, that is done for several records at a time, whose slots
then are on their way together. Invariant: whatever the bytes are, a function returns or raises KafkaError, and reads
nothing outside them.

While records are walked the interpreter lock is not held, so that a broker's loop goes on beside it.
Callers: `codec` chooses between the two, the cleaner imports from there.
"""

from array import array
from contextlib import suppress
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

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
_SLOTS_MAX = 1 << 32

# Keys whose slots are asked for together.
_TOGETHER = 32

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
_NO_FLAGS = bytearray(1)


def _invalid() -> KafkaError:
    return KafkaError(ErrorCode.CORRUPT_MESSAGE, "the records of a batch in the log are malformed")


def _zeroed(size: int) -> memoryview:
    """Memory for a table, in large pages where there are some: its slots are asked for in no order at all.

    Private, because of memory that processes could share Linux as a rule makes no large pages.
    """
    memory = mmap(-1, size, MAP_PRIVATE | MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # not on every system
        memory.madvise(MADV_HUGEPAGE)
    return memoryview(memory).cast("Q")


class _Records:
    """A walk over the records of one inflated batch, data[start:end]; `advance` shows the next one's parts."""

    def __init__(self, data: bytes, start: int, end: int) -> None:
        if start < 0 or start > end or end > len(data):
            raise ValueError("a range outside the buffer")
        self.owner = data
        self.data = data
        self.size = end
        self.pos = start
        self.end = end
        self.bad = 0
        self.start = 0
        self.after_timestamp = 0
        self.timestamp_delta = 0
        self.offset_delta = 0
        self.key_start = 0
        self.key_length = 0
        self.value_length = 0
        self.runs = _NO_RUNS
        self.flags = _NO_FLAGS
        self.out = _NO_FLAGS

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

    def copy_runs(self, count: int, at: int) -> None:
        """The bytes of the first `count` entries of `runs`, each a start and an end, to `out` from `at` on."""
        for number in range(0, count, 2):
            start = self.runs[number]
            length = self.runs[number + 1] - start
            if cython.compiled:
                memcpy(cython.address(self.out[at]), self.data + start, length)  # type: ignore[name-defined, operator] # noqa: F821
            else:
                self.out[at : at + length] = self.data[start : start + length]
            at += length

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
    """Key -> offset of its latest record, in a fixed number of slots, of which at most `entries_max` are used.

    Of `mark_count` offsets from `first_offset` on it also remembers whether a later record took their place.
    """

    def __init__(self, slot_count: int, entries_max: int, first_offset: int = 0, mark_count: int = 0) -> None:
        if not 1 <= entries_max < slot_count <= _SLOTS_MAX:
            raise ValueError("a map needs a free slot to end a search at")
        if first_offset < 0 or mark_count < 0:
            raise ValueError("no offset is negative")
        self.store = _zeroed(slot_count * SLOT_BYTES)
        self.slots = self.store
        self.slot_count = slot_count
        self.entries_max = entries_max
        self.first_offset = first_offset
        self.mark_count = mark_count
        self.marks = bytearray(mark_count // 8 + 1)
        self.count = 0
        self.high = 0
        self.low = 0
        self.highs = array("Q", [0]) * _TOGETHER
        self.lows = array("Q", [0]) * _TOGETHER
        self.offsets = array("q", [0]) * _TOGETHER
        self.numbers = array("q", [0]) * _TOGETHER

    def digest_of(self, key: bytes) -> bytes:
        """The digest of one key, for tests."""
        self.digest(key, 0, len(key))
        return int(self.high).to_bytes(8, "little") + int(self.low).to_bytes(8, "little")

    def get(self, key: bytes) -> int:
        """The offset of a key's latest record, -1 when it has none here."""
        self.digest(key, 0, len(key))
        return self.latest()

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

    def home(self) -> int:
        """Where the search for the digest's slot begins."""
        return (((self.high >> 32) * self.slot_count) >> 32) * _SLOT_WORDS

    def find(self) -> int:
        """Where the digest's slot is, or the free one where it would go: there always is one."""
        at = self.home()
        last = self.slot_count * _SLOT_WORDS
        while True:
            if self.slots[at + 2] == 0 or (self.slots[at] == self.high and self.slots[at + 1] == self.low):
                return at
            at += _SLOT_WORDS
            if at == last:
                at = 0

    def latest(self) -> int:
        return self.slots[self.find() + 2] - 1

    def note(self, index: int, records: _Records, offset: int, number: int) -> None:
        """Note the key of the record at hand as one of those to be looked up together; its slot is sent for."""
        self.digest(records.data, records.key_start, records.key_length)
        self.highs[index] = self.high
        self.lows[index] = self.low
        self.offsets[index] = offset
        self.numbers[index] = number
        if cython.compiled:
            prefetch(cython.address(self.slots[self.home()]))  # type: ignore[name-defined] # noqa: F821

    def enter(self, count: int) -> int:
        """Remember the records noted, each later than any before; -1, or which is the first without room."""
        for index in range(count):
            self.high = self.highs[index]
            self.low = self.lows[index]
            at = self.find()
            before = self.slots[at + 2]
            if before == 0:
                if self.count >= self.entries_max:
                    return index
                self.count += 1
                self.slots[at] = self.high
                self.slots[at + 1] = self.low
            elif self.has_mark(before - 1):
                place = before - 1 - self.first_offset
                self.marks[place >> 3] |= 1 << (place & 7)
            self.slots[at + 2] = self.offsets[index] + 1
        return -1

    def has_mark(self, offset: int) -> bool:
        """Whether there is a bit for this offset."""
        return self.first_offset <= offset < self.first_offset + self.mark_count

    def is_marked(self, offset: int) -> bool:
        """Whether a later record took the place of the one at this offset, which has a bit."""
        place = offset - self.first_offset
        return self.marks[place >> 3] >> (place & 7) & 1 > 0

    def look_up(self, count: int, records: _Records) -> None:
        """Flag those of the records noted whose key has a later one."""
        for index in range(count):
            self.high = self.highs[index]
            self.low = self.lows[index]
            at = self.find()
            records.flags[self.numbers[index]] = self.slots[at + 2] > self.offsets[index] + 1


def map_keys(keys: KeyMap, data: bytes, start: int, end: int, base_offset: int, from_offset: int) -> int:
    """Enter an inflated batch's records from `from_offset` on; -1, or the offset of the first that found no room.

    The records are data[start:end].
    """
    records = _Records(data, start, end)
    full_at = -1
    with cython.nogil:
        step = records.advance()
        while step > 0 and full_at < 0:
            noted = 0
            while step > 0 and noted < _TOGETHER:
                offset = base_offset + records.offset_delta
                if offset >= from_offset and records.key_length >= 0:
                    keys.note(noted, records, offset, 0)
                    noted += 1
                step = records.advance()
            full = keys.enter(noted)
            if full >= 0:
                full_at = keys.offsets[full]
    if step < 0:
        raise _invalid()
    return full_at


def _flag_replaced(
    keys: KeyMap, data: bytes, start: int, end: int, count: int, base_offset: int, map_end: int
) -> bytearray:
    """A byte for each of `count` records: 1 for one below `map_end` that has no bit, but a later one of its key."""
    flags = bytearray(count)
    records = _Records(data, start, end)
    records.flags = flags
    number = 0
    with cython.nogil:
        step = records.advance()
        while step > 0 and number < count:
            noted = 0
            while step > 0 and number < count and noted < _TOGETHER:
                offset = base_offset + records.offset_delta
                if offset < map_end and records.key_length >= 0 and not keys.has_mark(offset):
                    keys.note(noted, records, offset, number)
                    noted += 1
                number += 1
                step = records.advance()
            keys.look_up(noted, records)
    return flags


def filter_records(
    keys: KeyMap,
    data: bytes,
    start: int,
    end: int,
    count: int,
    base_offset: int,
    last_offset: int,
    map_end: int,
    keep_tombstones: bool,
    room: int,
) -> tuple[int, int, int, int, bytearray | None]:
    """Which of an inflated batch's `count` records stay: the latest of their key, and all from `map_end` on.

    The records are data[start:end]; of a batch whose offsets, by its header, end at `last_offset`.
    How many are kept and dropped, how many of the kept are tombstones, the latest timestamp delta of the kept, and
    the bytes of the kept behind `room` bytes for a header: None when that is all of them. Tombstones count only when
    all of the batch lie below `map_end`: while what a tombstone deletes may still be there, its time must not begin.
    """
    records = _Records(data, start, end)
    if count < 0 or count > (end - start) // _RECORD_BYTES_MIN:
        raise _invalid()
    all_marked = keys.has_mark(base_offset) and keys.has_mark(last_offset)
    if not all_marked:
        records.flags = _flag_replaced(keys, data, start, end, count, base_offset, map_end)
    # Start and end of each run of kept records, of which there is one to two records at most.
    records.runs = array("q", [0]) * (count + 2)
    run_count = 0
    run_start = start
    run_end = start
    kept = 0
    kept_bytes = 0
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
                if keys.has_mark(offset):
                    keep = not keys.is_marked(offset)
                elif all_marked:
                    step = -1  # the header said that there is no such offset
                    break
                else:
                    keep = records.flags[kept + dropped] == 0
                if keep and records.value_length < 0 and not keep_tombstones:
                    keep = False
            if keep:
                kept += 1
                kept_bytes += records.end - records.start
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
        return kept, dropped, tombstones, latest_delta, None
    if run_end > run_start:
        records.runs[run_count] = run_start
        records.runs[run_count + 1] = run_end
        run_count += 2
    out = bytearray(room + kept_bytes)
    if kept > 0:
        records.out = out
        with cython.nogil:
            records.copy_runs(run_count, room)
    return kept, dropped, tombstones, latest_delta, out


def rebase_records(data: bytes, start: int, end: int, shift: int) -> bytearray:
    """The records data[start:end] with `shift` added to each timestamp delta: of a batch whose base timestamp moved."""
    records = _Records(data, start, end)
    out = bytearray()
    step = records.advance()
    while step > 0:
        if not _sum_fits(shift, records.timestamp_delta):
            raise _invalid()
        delta = records.timestamp_delta + shift
        _put_varint(out, 1 + _varint_size(delta) + (records.end - records.after_timestamp))
        out.append(0)
        _put_varint(out, delta)
        out += data[records.after_timestamp : records.end]
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
