# The C types of _compaction.py; see _codec.pxd for how the two files go together. What is `nogil` touches no Python
# object and lets the broker's loop run on meanwhile; it tells of malformed bytes by a return value.

cimport cython
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcpy

cdef extern from *:
    """
    #if defined(__GNUC__)
    #define headrace_prefetch(address) __builtin_prefetch(address)
    #else
    #define headrace_prefetch(address) ((void)(address))
    #endif
    """
    void prefetch "headrace_prefetch" (const void* address) noexcept nogil

cdef int _SLOT_WORDS
cdef int _TOGETHER
cdef int _RECORD_BYTES_MIN
cdef uint64_t _M64
cdef uint64_t _SIP0
cdef uint64_t _SIP1
cdef uint64_t _SIP2
cdef uint64_t _SIP3
cdef int64_t _I64_MAX
cdef int64_t _I64_MIN


@cython.final
cdef class _Records:
    cdef bytes owner
    cdef const unsigned char* data
    cdef Py_ssize_t size
    cdef Py_ssize_t pos
    cdef Py_ssize_t end
    cdef int bad
    cdef Py_ssize_t start
    cdef Py_ssize_t after_timestamp
    cdef int64_t timestamp_delta
    cdef int64_t offset_delta
    cdef Py_ssize_t key_start
    cdef int64_t key_length
    cdef int64_t value_length
    cdef int64_t[::1] runs
    cdef unsigned char[::1] flags
    cdef unsigned char[::1] out

    @cython.locals(pos=Py_ssize_t, raw=uint64_t, byte=uint64_t, shift=int)
    cdef int64_t varint(self, int shift_max) noexcept nogil
    @cython.locals(number=Py_ssize_t, start=Py_ssize_t, length=Py_ssize_t)
    cdef int copy_runs(self, Py_ssize_t count, Py_ssize_t at) noexcept nogil
    @cython.locals(length=int64_t)
    cdef int advance(self) noexcept nogil


@cython.final
cdef class KeyMap:
    cdef object store
    cdef uint64_t[::1] slots
    cdef readonly uint64_t slot_count
    cdef readonly int64_t entries_max
    cdef readonly int64_t count
    cdef int64_t first_offset
    cdef int64_t mark_count
    cdef unsigned char[::1] marks
    cdef uint64_t high
    cdef uint64_t low
    cdef uint64_t[::1] highs
    cdef uint64_t[::1] lows
    cdef int64_t[::1] offsets
    cdef int64_t[::1] numbers

    @cython.locals(
        v0=uint64_t, v1=uint64_t, v2=uint64_t, v3=uint64_t, word=uint64_t, byte=uint64_t, number=Py_ssize_t,
        words=Py_ssize_t, rounds=int, at=Py_ssize_t, shift=int, _=int, first=uint64_t,
    )
    cdef int digest(self, const unsigned char* data, Py_ssize_t start, Py_ssize_t length) noexcept nogil
    cdef Py_ssize_t home(self) noexcept nogil
    @cython.locals(at=Py_ssize_t, last=Py_ssize_t)
    cdef Py_ssize_t find(self) noexcept nogil
    cdef int64_t latest(self) noexcept nogil
    cdef int note(self, Py_ssize_t index, _Records records, int64_t offset, Py_ssize_t number) noexcept nogil
    @cython.locals(index=Py_ssize_t, at=Py_ssize_t, before=int64_t, place=int64_t)
    cdef Py_ssize_t enter(self, Py_ssize_t count) noexcept nogil
    cdef bint has_mark(self, int64_t offset) noexcept nogil
    @cython.locals(place=int64_t)
    cdef bint is_marked(self, int64_t offset) noexcept nogil
    @cython.locals(index=Py_ssize_t, at=Py_ssize_t)
    cdef int look_up(self, Py_ssize_t count, _Records records) noexcept nogil


@cython.locals(
    records=_Records, offset=int64_t, full_at=int64_t, step=int, noted=Py_ssize_t, full=Py_ssize_t,
)
cpdef int64_t map_keys(
    KeyMap keys, bytes data, Py_ssize_t start, Py_ssize_t end, int64_t base_offset, int64_t from_offset
) except? -2

@cython.locals(
    records=_Records, flags=bytearray, number=Py_ssize_t, noted=Py_ssize_t, offset=int64_t, step=int,
)
cdef bytearray _flag_replaced(
    KeyMap keys, bytes data, Py_ssize_t start, Py_ssize_t end, Py_ssize_t count, int64_t base_offset, int64_t map_end
)

@cython.locals(
    records=_Records, run_count=Py_ssize_t, run_start=Py_ssize_t, run_end=Py_ssize_t, kept=int64_t,
    kept_bytes=Py_ssize_t, dropped=int64_t, tombstones=int64_t, latest_delta=int64_t, offset=int64_t,
    keep=bint, all_marked=bint, early=int, step=int, out=bytearray,
)
cpdef tuple filter_records(
    KeyMap keys, bytes data, Py_ssize_t start, Py_ssize_t end, Py_ssize_t count, int64_t base_offset,
    int64_t last_offset, int64_t map_end, bint keep_tombstones, Py_ssize_t room
)

@cython.locals(records=_Records, out=bytearray, delta=int64_t, step=int)
cpdef bytearray rebase_records(bytes data, Py_ssize_t start, Py_ssize_t end, int64_t shift)

cdef bint _sum_fits(int64_t base, int64_t delta) noexcept
@cython.locals(raw=uint64_t)
cdef int _put_varint(bytearray out, int64_t value) except -1
@cython.locals(raw=uint64_t, size=Py_ssize_t)
cdef Py_ssize_t _varint_size(int64_t value) noexcept
