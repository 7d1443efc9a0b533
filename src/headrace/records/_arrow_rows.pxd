# The C types of _arrow_rows.py; see _codec.pxd for how the two files go together. What is `nogil` touches no Python
# object and tells of what does not fit by the field `bad`.

cimport cython
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

cdef uint64_t _M64
cdef uint32_t _M32
cdef int64_t _I32_MAX
cdef int64_t _I64_MAX
cdef int64_t _I64_MIN
cdef uint64_t _DIGEST_START
cdef uint64_t _DIGEST_FACTOR
cdef uint32_t _MURMUR_SEED
cdef uint32_t _MURMUR_FACTOR


@cython.final
cdef class Source:
    cdef readonly int64_t rows
    cdef int64_t first
    cdef bint has_nulls
    cdef const unsigned char[::1] valid
    cdef const int32_t[::1] offsets
    cdef const unsigned char[::1] bytes
    cdef const unsigned char* data

    @cython.locals(last=int64_t, row=int64_t)
    cdef bint check(self, int64_t size) noexcept nogil
    @cython.locals(at=int64_t)
    cdef inline int64_t length(self, int64_t row) noexcept nogil
    cdef inline int64_t begin(self, int64_t row) noexcept nogil


@cython.final
cdef class Rows:
    cdef readonly int64_t rows
    cdef bint has_keys
    cdef bint has_values
    cdef bint has_timestamps
    cdef bint has_headers
    cdef bint has_order
    cdef Source keys
    cdef Source values
    cdef const int64_t[::1] timestamps
    cdef const int32_t[::1] header_lists
    cdef Source header_keys
    cdef Source header_values
    cdef public bint digests
    cdef uint64_t digest
    cdef const int32_t[::1] order
    cdef int32_t[::1] chosen
    cdef int32_t[::1] starts
    cdef int32_t[::1] sorted
    cdef bytearray store
    cdef unsigned char* out
    cdef int64_t pos
    cdef int64_t limit
    cdef int64_t max_timestamp
    cdef int bad

    @cython.locals(last=int64_t, row=int64_t)
    cdef bint lists_fit(self, int64_t count) noexcept nogil
    cpdef int64_t first_timestamp(self, int64_t row, int64_t default)
    @cython.locals(done=int64_t)
    cpdef int64_t encode(
        self, object order, int64_t first, int64_t last, bytearray out, int64_t at, int64_t now_ms
    ) except -1
    @cython.locals(
        base=int64_t, index=int64_t, row=int64_t, timestamp=int64_t, key_length=int64_t, value_length=int64_t,
        size=int64_t, headers=int64_t, header_first=int64_t, header=int64_t, length=int64_t,
    )
    cdef int64_t write(self, int64_t first, int64_t last, int64_t now_ms) noexcept nogil
    @cython.locals(begin=int64_t)
    cdef inline void put_bytes(self, Source column, int64_t row, int64_t length) noexcept nogil
    @cython.locals(raw=uint64_t)
    cdef inline void put_varint(self, int64_t value) noexcept nogil
    @cython.locals(raw=uint64_t, size=int64_t)
    cdef inline int64_t varint_size(self, int64_t value) noexcept nogil
    @cython.locals(found=uint64_t)
    cdef uint64_t hash_row(self, int64_t row, int64_t key_length, int64_t value_length) noexcept nogil
    @cython.locals(at=int64_t, begin=int64_t, size=int64_t, word=uint64_t)
    cdef uint64_t hash_bytes(self, uint64_t found, Source column, int64_t row, int64_t length) noexcept nogil
    @cython.locals(chosen=object, starts=object, order=object)
    cpdef tuple assign(self, object given, int64_t partitions, int64_t turn)
    @cython.locals(row=int64_t, partition=int64_t, length=int64_t, number=int64_t)
    cdef void choose(self, int64_t partitions, int64_t turn) noexcept nogil
    @cython.locals(begin=int64_t, found=uint32_t, word=uint32_t, at=int64_t)
    cdef uint32_t murmur2(self, int64_t row, int64_t length) noexcept nogil


cdef object _longs(int64_t count)
cdef object _ints(int64_t count)
