# The C types of _codec.py, which names them nowhere itself: Cython reads this file beside it, Python never does.
# A name missing here stays a Python object, which is slower but never wrong. Positions and sizes are Py_ssize_t;
# what the format calls 64 bits is `int64_t`. `except? -1` marks a return value that may stand for an exception.

cimport cython
from libc.stdint cimport int64_t, uint64_t

cdef int _RECORD_BYTES_MIN
cdef int _HEADER_BYTES_MIN
cdef int64_t _I64_MAX
cdef int64_t _I64_MIN
cdef int64_t _U32_SIGN
cdef int64_t _U32_RANGE
cdef int64_t _U32_MASK
cdef int64_t _OFFSET_MAX
cdef int _NEED_MORE
cdef int _BAD_LENGTH
cdef int _BAD_MAGIC
cdef int _BAD_OFFSET
cdef int _BAD_CRC
cdef int _GAP
cdef bint _COMPILED
cdef object _new_tuple
cdef object _unpack_header


@cython.final
cdef class _Cursor:
    cdef bytes owner
    cdef const unsigned char* data
    cdef Py_ssize_t pos
    cdef Py_ssize_t end
    cdef Py_ssize_t size

    @cython.locals(pos=Py_ssize_t, raw=uint64_t, byte=uint64_t, shift=int)
    cdef int64_t varint(self, int shift_max) except? -1
    @cython.locals(length=int64_t)
    cdef int begin_record(self) except -1
    cdef int end_record(self) except -1
    cdef int end_batch(self) except -1
    @cython.locals(length=int64_t)
    cdef Py_ssize_t length(self) except? -1
    @cython.locals(count=int64_t)
    cdef Py_ssize_t header_count(self) except -1
    @cython.locals(length=Py_ssize_t)
    cdef int skip_nullable(self) except -1
    @cython.locals(_=Py_ssize_t)
    cdef int skip_headers(self) except -1
    @cython.locals(length=Py_ssize_t, count=Py_ssize_t, _=Py_ssize_t, found=list)
    cdef tuple headers(self)
    @cython.locals(length=Py_ssize_t, start=Py_ssize_t)
    cdef bytes nullable_bytes(self)


@cython.locals(
    cursor=_Cursor, _=Py_ssize_t, timestamp=int64_t, timestamp_delta=int64_t,
    offset_delta=int64_t, key=bytes, value=bytes, headers=tuple, records=list, offset=int64_t, start=int64_t,
)
cpdef list decode_records(
    object payload, Py_ssize_t count, int64_t base_offset, int64_t base_timestamp, int64_t append_time=*,
    tuple place=*
)

@cython.locals(cursor=_Cursor, index=Py_ssize_t, null_keys=int, null_values=int)
cpdef int check_records(object payload, Py_ssize_t count) except -1

@cython.locals(count=Py_ssize_t, max_timestamp=int64_t, timestamp=int64_t)
cpdef tuple encode_records(bytearray out, object records, int64_t base_timestamp)

@cython.locals(
    timestamp_delta=int64_t, key_length=Py_ssize_t, value_length=Py_ssize_t, size=Py_ssize_t,
    encoded_headers=bytes,
)
cpdef int encode_record(
    bytearray out, int64_t offset_delta, int64_t timestamp, int64_t base_timestamp,
    object key, object value, object headers
) except -1

@cython.locals(body=bytearray, out=bytearray, count=Py_ssize_t, encoded=bytes)
cdef bytes _encode_headers(object headers)

@cython.final
cdef class _Walk:
    cdef object view
    cdef const unsigned char[::1] data
    cdef int64_t base_offset
    cdef int64_t batch_length
    cdef int leader_epoch
    cdef int magic
    cdef int64_t crc
    cdef int attributes
    cdef int64_t last_offset_delta
    cdef int64_t max_timestamp
    cdef int64_t producer_id
    cdef int producer_epoch
    cdef int64_t base_sequence

    cdef int check_range(self, Py_ssize_t pos, Py_ssize_t end) except -1
    cdef int load(self, Py_ssize_t pos) except -1
    cdef int judge(self, Py_ssize_t pos, Py_ssize_t end, int64_t offset_min, int64_t offset_max) except -1
    @cython.locals(last_sequence=int64_t)
    cdef object info(self, Py_ssize_t pos)
    @cython.locals(needed=Py_ssize_t)
    cdef object outcome(self, Py_ssize_t pos, Py_ssize_t end, int stop, int64_t next_offset, list batches)
    cdef int64_t i64(self, Py_ssize_t pos) noexcept
    @cython.locals(value=int64_t)
    cdef int64_t i32(self, Py_ssize_t pos) noexcept
    @cython.locals(value=int64_t)
    cdef int64_t u32(self, Py_ssize_t pos) noexcept
    @cython.locals(value=int)
    cdef int i16(self, Py_ssize_t pos) noexcept

@cython.locals(walk=_Walk, batches=list, stop=int, next_offset=int64_t)
cpdef object scan(object buf, Py_ssize_t pos, Py_ssize_t end, int64_t min_offset=*)

@cython.locals(
    walk=_Walk, offset_entries=bytearray, time_entries=bytearray, base_offset=int64_t, interval_bytes=int64_t,
    bytes_since_entry=int64_t, max_timestamp=int64_t, max_timestamp_offset=int64_t, indexed_timestamp=int64_t,
    leader_epoch=int, next_offset=int64_t, offset_max=int64_t, batches=list, stop=int,
    size=int64_t, last_offset=int64_t, stop_at_gaps=bint, batch_count=int64_t,
)
cpdef object scan_segment(object state, object buf, Py_ssize_t pos, Py_ssize_t end, int64_t file_position=*)

@cython.locals(walk=_Walk)
cpdef tuple find_offset(object buf, Py_ssize_t pos, Py_ssize_t end, int64_t target)
@cython.locals(walk=_Walk)
cpdef tuple find_timestamp(object buf, Py_ssize_t pos, Py_ssize_t end, int64_t target)

cdef int _check_header(_Walk walk) except -1

cdef int _put_i32(bytearray out, int64_t value) except -1
@cython.locals(raw=uint64_t)
cdef int _put_varint(bytearray out, int64_t value) except -1
@cython.locals(raw=uint64_t, size=Py_ssize_t)
cdef Py_ssize_t _varint_size(int64_t value) noexcept

cdef bint _sum_fits(int64_t base, int64_t delta) noexcept
cdef bint _difference_fits(int64_t value, int64_t base) noexcept
