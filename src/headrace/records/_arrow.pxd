# The C types of _arrow.py; see _codec.pxd for how the two files go together. What is `nogil` touches no Python object
# and tells of malformed bytes by the field `bad`.

cimport cython
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.string cimport memcpy

cdef int _RECORD_BYTES_MIN
cdef int _HEADER_BYTES_MIN
cdef int64_t _I32_MAX
cdef int64_t _I64_MAX
cdef int64_t _I64_MIN
cdef int64_t _OFFSET_MAX


@cython.final
cdef class _Binary:
    cdef public int64_t count
    cdef public int64_t nulls
    cdef public int64_t used
    cdef int64_t rows_max
    cdef int64_t bytes_max
    cdef bytearray store
    cdef unsigned char* data
    cdef int32_t[::1] offsets
    cdef bytearray valid_store
    cdef unsigned char* valid

    cpdef int reserve(self, int64_t rows, int64_t size) except -1
    cdef inline void put(self, const unsigned char* source, int64_t begin, int64_t length) noexcept nogil
    cdef inline void put_list(self, int64_t end, int64_t length) noexcept nogil


@cython.final
cdef class Columns:
    cdef bint with_keys
    cdef bint with_values
    cdef bint with_headers
    cdef int64_t rows
    cdef int64_t rows_max
    cdef int64_t[::1] offsets
    cdef int64_t[::1] timestamps
    cdef readonly _Binary keys
    cdef readonly _Binary values
    cdef readonly _Binary header_lists
    cdef readonly _Binary header_keys
    cdef readonly _Binary header_values
    cdef const unsigned char[::1] view
    cdef const unsigned char* data
    cdef int64_t pos
    cdef int64_t end
    cdef int64_t size
    cdef int bad
    cdef int64_t key_bytes
    cdef int64_t value_bytes
    cdef int64_t header_count
    cdef int64_t header_key_bytes
    cdef int64_t header_value_bytes

    @cython.locals(row=int64_t)
    cdef bint to_microseconds(self) noexcept nogil
    @cython.locals(before=int64_t)
    cpdef int64_t add(
        self, object payload, int64_t count, int64_t base_offset, int64_t base_timestamp, int64_t append_time,
        int64_t first_offset, int64_t end_offset
    ) except -1
    @cython.locals(pos=int64_t, byte=uint64_t, raw=uint64_t, shift=int)
    cdef inline int64_t varint(self, int shift_max) noexcept nogil
    @cython.locals(length=int64_t)
    cdef inline int64_t length(self) noexcept nogil
    @cython.locals(_=int64_t, _h=int64_t, length=int64_t, delta=int64_t, headers=int64_t)
    cdef void measure(self, int64_t count, int64_t base_timestamp, int64_t append_time) noexcept nogil
    cdef int reserve(self, int64_t count) except -1
    @cython.locals(
        _=int64_t, _h=int64_t, length=int64_t, next_record=int64_t, delta=int64_t, offset=int64_t, headers=int64_t
    )
    cdef void fill(
        self, int64_t count, int64_t base_offset, int64_t base_timestamp, int64_t append_time, int64_t first_offset,
        int64_t end_offset
    ) noexcept nogil


cdef object _longs(int64_t count)
cdef object _ints(int64_t count)
